"""How a plan shows itself: ``str(plan)`` is the table, and a notebook shows the page with its pictures."""

from __future__ import annotations

from html import escape

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import tables


def to_text(plan: ExecutionPlan) -> str:
    """Return the table of a plan as plain text."""
    return tables.to_text(tables.plan_table(plan))


def to_page(plan: ExecutionPlan) -> str:
    """Return the page of a plan.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    try:
        from lightning_osdp.report.html import render_page
    except ImportError as error:
        raise ConfigurationError(f"a plan's page needs matplotlib: pip install matplotlib ({error})") from error
    return render_page(plan)


def to_html(plan: ExecutionPlan) -> str:
    """Return the page of a plan in a frame for a notebook; its table alone where matplotlib is missing."""
    try:
        page = to_page(plan)
    except ConfigurationError:
        return f"<pre>{escape(to_text(plan))}</pre>"
    return f'<iframe srcdoc="{escape(page)}" width="100%" height="800" style="border: 0"></iframe>'


def register() -> None:
    """Make plans show themselves so: ``planning`` itself prints nothing."""
    ExecutionPlan.text_display, ExecutionPlan.html_display, ExecutionPlan.page_display = to_text, to_html, to_page

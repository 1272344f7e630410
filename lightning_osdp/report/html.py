"""Write a plan as one page of HTML that loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from lightning_osdp.planning.search.plan_search import Candidate
from lightning_osdp.planning.spec.formatting import format_bytes, format_count
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, SimulatedResult
from lightning_osdp.report.baseline_text import baseline_cells
from lightning_osdp.report.figures import (
    STRATEGIES,
    decisions_figure,
    devices_figure,
    format_rate,
    memory_figure,
    throughput_figure,
    to_svg,
    tradeoff_figure,
)
from lightning_osdp.report.operator_rows import operator_rows
from lightning_osdp.report.tables import summary_rows

BASELINE_HEADER = ("instead", ">batch size", ">samples/s", "gain of this plan")

OPERATOR_HEADER = ("operators", "mode", ">count", ">parameters")

DEVICE_HEADER = (
    ">devices",
    "sharding",
    ">batch size",
    ">throughput",
    ">peak memory",
    ">sharded",
    ">split",
    ">blocks recomputed",
)

_PAGE = Environment(loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined)


class _Section(NamedTuple):
    """What ``page.html.jinja`` shows under a title. Columns whose titles start with ``>`` hold numbers."""

    title: str
    picture: str = ""
    description: str = ""
    header: Sequence[str] = ()
    table_rows: Sequence[Sequence[str]] = ()

    @property
    def header_cells(self) -> list[str]:
        return [title.removeprefix(">") for title in self.header]


def render_page(
    plan: ExecutionPlan,
    *,
    model: ModelProfile | None = None,
    tradeoff: Sequence[Candidate] = (),
    points: Sequence[SimulatedPoint] = (),
) -> str:
    """Render the numbers and figures of a plan as one page of HTML.

    Args:
        plan: the plan to show.
        model: its model; adds the memory along a step.
        tradeoff: plans under other limits (``simulate.sweep_memory_limits``); adds the figure of time against memory.
        points: results of ``simulate.simulate``; adds a figure and a table by number of devices.

    Returns:
        The page, figures included.

    Raises:
        PlanMismatchError: the plan is for another model than ``model``.
    """
    cluster = plan.cluster
    nodes = f"{cluster.nodes} nodes of {cluster.devices_per_node}" if cluster.nodes > 1 else "one node"
    summary = [("devices", f"{cluster.ranks} ({nodes}, {cluster.device}, {cluster.backend})")]
    sections = [
        _Section("The plan", header=["", "predicted"], table_rows=[*summary, *summary_rows(plan).items()]),
        _Section("Batch size", _encode(throughput_figure(plan)), "Throughput and memory by batch size"),
    ]
    if plan.baselines:
        rows = [baseline_cells(plan, baseline) for baseline in plan.baselines]
        sections.append(_Section("What else there was", header=BASELINE_HEADER, table_rows=rows))
    if model is not None:
        sections.append(_Section("Memory", _encode(memory_figure(plan, model)), "Memory along one training step"))
    picture, said = _encode(decisions_figure(plan)), "How the states of each operator are kept"
    sections.append(_Section("Operators", picture, said, OPERATOR_HEADER, _operator_rows(plan)))
    if tradeoff:
        picture = _encode(tradeoff_figure(tradeoff, plan.memory_limit_bytes))
        sections.append(_Section("What memory buys", picture, "Step time against memory"))
    if points:
        picture, said = _encode(devices_figure(points)), "Throughput and memory by number of devices"
        device_rows = [_device_row(point, field) for point in points for field in STRATEGIES]
        sections.append(_Section("Other numbers of devices", picture, said, DEVICE_HEADER, device_rows))
    devices = f"{cluster.ranks} device{'' if cluster.ranks == 1 else 's'}"
    title = f"Execution plan: {format_count(plan.model.num_parameters)} parameters on {devices}"
    return _PAGE.get_template("page.html.jinja").render(title=title, sections=sections)


def _encode(figure: Figure) -> str:
    return base64.b64encode(to_svg(figure).encode()).decode()


def _operator_rows(plan: ExecutionPlan) -> list[Sequence[str]]:
    return [
        ("\N{NO-BREAK SPACE}" * 4 * row.is_part + row.label, row.mode, str(row.count), format_count(row.num_parameters))
        for row in operator_rows(plan)
    ]


def _device_row(point: SimulatedPoint, field: str) -> Sequence[str]:
    one: SimulatedResult | None = getattr(point, field)
    start = [str(point.devices), STRATEGIES[field][0]]
    if one is None:
        needed = f" (needs {format_bytes(point.needed_bytes)})" if field == "osdp" else ""
        return [*start, "", "does not fit" + needed, "", "", "", ""]
    return [
        *start,
        str(one.batch_size),
        format_rate(one.samples_per_s),
        format_bytes(one.peak_memory_bytes),
        f"{one.sharded_share:.0%}",
        f"{one.split_share:.0%}",
        str(one.recomputed_blocks),
    ]

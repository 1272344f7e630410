"""Write a plan as one page of HTML that loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from matplotlib.figure import Figure

from lightning_osdp.planning.search.batch_size_search import Candidate
from lightning_osdp.planning.spec.formatting import format_bytes, format_count, format_seconds
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, SimulatedResult
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

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="osdp">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ text-align: left; padding: 0.25rem 1.5rem 0.25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }}
td.number, th.number {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
img {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


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
    parts = [_section("The plan", _summary_table(plan))]
    parts += [_section("Batch size", _image(throughput_figure(plan), "Throughput and memory by batch size"))]
    if model is not None:
        parts.append(_section("Memory", _image(memory_figure(plan, model), "Memory along one training step")))
    decisions = _image(decisions_figure(plan), "How the states of each operator are kept")
    parts.append(_section("Operators", decisions + _operator_table(plan)))
    if tradeoff:
        picture = _image(tradeoff_figure(tradeoff, plan.memory_limit_bytes), "Step time against memory")
        parts.append(_section("What memory buys", picture))
    if points:
        picture = _image(devices_figure(points), "Throughput and memory by number of devices")
        parts.append(_section("Other numbers of devices", picture + _device_table(points)))
    devices = f"{plan.cluster.ranks} device{'' if plan.cluster.ranks == 1 else 's'}"
    title = f"Execution plan: {format_count(plan.model.num_parameters)} parameters on {devices}"
    return _PAGE.format(title=escape(title), body="\n".join(parts))


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _image(figure: Figure, description: str) -> str:
    data = base64.b64encode(to_svg(figure).encode()).decode()
    return f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}">\n'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table; a column whose title starts with ``>`` holds numbers and is aligned to the right."""
    kinds = [' class="number"' if title.startswith(">") else "" for title in header]

    def line(tag: str, cells: Sequence[str]) -> str:
        written = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(written)}</tr>"

    head = line("th", [title.removeprefix(">") for title in header])
    body = "\n".join(line("td", row) for row in rows)
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _summary_table(plan: ExecutionPlan) -> str:
    predicted, cluster = plan.predicted, plan.cluster
    nodes = f"{cluster.nodes} nodes of {cluster.devices_per_node}" if cluster.nodes > 1 else "one node"
    rows = [
        ("devices", f"{cluster.ranks} ({nodes}, {cluster.device}, {cluster.backend})"),
        (
            "batch size",
            f"{plan.batch_size} x {plan.accumulate_grad_batches} accumulated x {cluster.ranks} devices "
            f"= {plan.global_batch_size} in all",
        ),
        (
            "step time",
            f"{format_seconds(predicted.step_time_s)} = {format_seconds(predicted.compute_time_s)} compute "
            f"+ {format_seconds(predicted.communication_time_s)} communication",
        ),
        ("throughput", format_rate(predicted.samples_per_s)),
        (
            "peak memory",
            f"{format_bytes(predicted.peak_memory_bytes)} of {format_bytes(plan.memory_limit_bytes)}, "
            f"{format_bytes(predicted.overhead_bytes)} of it before the model",
        ),
    ]
    return _table(["", "predicted"], rows)


def _operator_table(plan: ExecutionPlan) -> str:
    rows = [
        ("\N{NO-BREAK SPACE}" * 4 * row.is_part + row.label, row.mode, str(row.count), format_count(row.num_parameters))
        for row in operator_rows(plan)
    ]
    return _table(["operators", "mode", ">count", ">parameters"], rows)


def _device_table(points: Sequence[SimulatedPoint]) -> str:
    def row(point: SimulatedPoint, field: str) -> Sequence[str]:
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

    header = [
        ">devices",
        "sharding",
        ">batch size",
        ">throughput",
        ">peak memory",
        ">sharded",
        ">split",
        ">blocks recomputed",
    ]
    return _table(header, [row(point, field) for point in points for field in STRATEGIES])

"""Show plans as tables: decisions, predictions and measurements. They read well without colours, in 80 columns."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.run_correction import MeasuredStep
from lightning_osdp.planning.search.batch_size_search import THROUGHPUT_TOLERANCE
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.formatting import format_bytes, format_count, format_seconds
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.whatif.simulate import SimulatedPoint
from lightning_osdp.report.baseline_text import baseline_cells, describe_gain, format_throughput
from lightning_osdp.report.operator_rows import TableRow, operator_rows
from lightning_osdp.report.operator_runs import MODE_DESCRIPTIONS, describe_tried

MAX_RUNNERS_UP = 3
"""Number of other batch sizes that a table shows."""

WIDTH, _GAP = 80, 2
"""Width of tables, and blanks between their columns."""

_MIN_MODE_WIDTH, _MAX_MODE_WIDTH = 14, 24
"""Least width of the column of modes, and the one above which it is wrapped if names need the rest."""

_BREAK = r"(?<= )|(?=\.)"
"""Where names of operators may be wrapped."""

_BAR_WIDTH = 20

_OPTIONAL_COLUMNS = {
    "sharded_share": "sharded",
    "in_node_share": "in node",
    "split_share": "split",
    "recomputed_blocks": "recomputed",
}
"""Titles of the optional columns of the simulation table, by field of ``SimulatedResult``."""

_STRATEGIES = {"osdp": "OSDP", "ddp": "DDP", "fsdp": "FSDP", "fsdp2": "fully_shard"}
"""Names of the strategies of ``osdp emulate``."""


def plan_table(plan: ExecutionPlan, profiling_s: float | None = None, collectives: int | None = None) -> Group:
    """Show a plan: its summary, the modes of blocks and operators, the share of each mode, and what else there was.

    Args:
        plan: the plan.
        profiling_s: seconds that measuring took; None if nothing was measured.
        collectives: number of collectives in one optimizer step on each rank; None if unknown.
    """
    parts: list[RenderableType] = [_heading(plan), _summary(plan, profiling_s, collectives), ""]
    parts += [_operator_table(operator_rows(plan)), "", _mode_table(plan.operators)]
    parts += [Text(line) for line in _compiled_lines(plan)]
    if any(point.batch_size != plan.batch_size for point in plan.frontier):
        parts += ["", _frontier_table(plan)]
        fastest = max(plan.frontier, key=lambda point: point.samples_per_s)
        is_close = plan.predicted.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * fastest.samples_per_s
        if fastest.batch_size > plan.batch_size and is_close:
            tolerance = f"{THROUGHPUT_TOLERANCE:.0%}"
            parts.append(Text(f"Of batch sizes within {tolerance} of the fastest the smallest is taken."))
    if plan.baselines:
        parts += ["", baseline_table(plan)]
    return Group(*parts)


def _compiled_lines(plan: ExecutionPlan) -> list[str]:
    """Say which operators could not be sharded because they are compiled, where some others can be."""
    found: dict[str, list[OperatorPlan]] = {}
    for operator in plan.operators:
        if operator.replicated_reason.startswith(("compiled", "scripted")):
            found.setdefault(operator.replicated_reason, []).append(operator)
    return [
        f"Replicated as they are {reason}: {operators[0].name}"
        + (f" and {len(operators) - 1} more" if len(operators) > 1 else "")
        for reason, operators in found.items()
    ]


def baseline_table(plan: ExecutionPlan) -> Table:
    """Show what else there was: DDP, ZeRO-2 and FSDP, each at its best batch size, and the gain of the plan over it."""
    table = _table("what else there was", ">batch size", ">samples/s", "gain of this plan")
    for baseline in plan.baselines:
        table.add_row(*baseline_cells(plan, baseline))
    return table


def measured_table(plan: ExecutionPlan, measured: MeasuredStep, steps: int) -> Group:
    """Compare predicted with measured step time, its parts, throughput and peak memory, and say what was gained.

    The error is (predicted - measured) / measured: positive where the prediction was too high.

    Args:
        plan: the plan with the prediction.
        measured: the measurements of the slowest rank.
        steps: number of optimizer steps made so far.
    """
    predicted, exposed_s = plan.predicted, measured.communication_s
    rows: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("step time", predicted.step_time_s, measured.step_time_s, format_seconds)
    ]
    if exposed_s is not None and plan.cluster.ranks > 1:
        computed_s = measured.step_time_s - exposed_s
        rows.append(("  compute", predicted.compute_time_s, computed_s, format_seconds))
        rows.append(("  communication", predicted.communication_time_s, exposed_s, format_seconds))
    samples_per_s = plan.global_batch_size / measured.step_time_s
    rows.append(("throughput", predicted.samples_per_s, samples_per_s, _format_throughput))
    rows.append(("peak memory", predicted.peak_memory_bytes, measured.peak_memory_bytes, format_bytes))
    table = _table(f"after {steps} steps", ">predicted", ">measured", ">error")
    for name, expected, seen, write in rows:
        table.add_row(name, write(expected), write(seen), _format_difference(expected, seen) if seen else "")
    gain = describe_gain(plan, samples_per_s)
    return Group(table, *([Text(f"\n{gain}")] if gain else ()))


def simulation_table(points: Sequence[SimulatedPoint]) -> Table:
    """Compare the plan (osdp) with all operators replicated (dp) or sharded (zdp), by number of devices.

    Throughput is that of all devices, peak memory that of one. The last columns are shares of the parameters and
    numbers of blocks; columns in which no plan has anything are left out.
    """
    plans = [point.osdp for point in points if point.osdp is not None]
    more = [name for name in _OPTIONAL_COLUMNS if name == "sharded_share" or any(getattr(plan, name) for plan in plans)]
    titles = (f">{_OPTIONAL_COLUMNS[name]}" for name in more)
    table = _table("devices", "sharding", ">batch size", ">samples/s", ">peak memory", *titles)
    for point in points:
        nodes = f" ({point.nodes} nodes)" if point.nodes > 1 else ""
        for name, one in (("osdp", point.osdp), ("dp", point.dp), ("zdp", point.zdp)):
            devices = f"{point.devices}{nodes}" if name == "osdp" else ""
            if one is None:
                needed = f"needs {format_bytes(point.needed_bytes)}" if name == "osdp" else ""
                table.add_row(devices, name, "", "does not fit", needed)
                continue
            table.add_row(
                devices,
                name,
                str(one.batch_size),
                format_throughput(one.samples_per_s),
                format_bytes(one.peak_memory_bytes),
                *(f"{value:.0%}" if isinstance(value := getattr(one, name), float) else str(value) for name in more),
            )
    return table


def emulation_table(rows: Sequence[Mapping[str, Any]], plan: ExecutionPlan | None) -> Table:
    """Show what was predicted for OSDP's plan, if there is one, and what each strategy took under ``osdp emulate``.

    Args:
        rows: for each strategy its name, and either an error or the measured figures.
        plan: OSDP's plan.
    """
    table = Table(box=None, pad_edge=False)
    is_limit_exceeded = any(row.get("over_limit_bytes") for row in rows)
    titles = ["strategy", "batch size", "step time", "samples/s", "peak memory"]
    for title in titles + ["over limit"] * is_limit_exceeded:
        table.add_column(title, justify="left" if title == "strategy" else "right")
    named = [(", ".join([_STRATEGIES[row["strategy"]], *row.get("settings", {})]), row) for row in rows]
    if plan is not None:
        named.insert(0, ("OSDP, predicted", {"batch_size": plan.batch_size, **plan.predicted.model_dump()}))
    for name, row in named:
        if "error" in row:
            table.add_row(name, "", row["error"])
            continue
        step_time, rate = format_seconds(row["step_time_s"]), f"{row['samples_per_s']:,.1f}"
        excess = row.get("over_limit_bytes", 0)
        over_limit = [format_bytes(excess) if excess else ""] * is_limit_exceeded
        peak = format_bytes(row["peak_memory_bytes"])
        table.add_row(name, str(row["batch_size"]), step_time, rate, peak, *over_limit)
    return table


def to_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """Render a table as plain text of at most ``width`` columns, for logs and files."""
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def print_output(renderable: RenderableType, soft_wrap: bool = False) -> None:
    """Print to standard output; warn where that takes no text (a full disk, a closed pipe), for which no run ends.

    Args:
        renderable: a text or a table.
        soft_wrap: whether lines may be longer than the terminal is wide.
    """
    try:
        Console().print(renderable, soft_wrap=soft_wrap)
    except (OSError, ValueError, SystemExit) as error:  # rich answers to a closed pipe with the latter
        warnings.warn(f"standard output takes no text: {error.__context__ or error}", OSDPWarning, stacklevel=2)


def _heading(plan: ExecutionPlan) -> Text:
    cluster = plan.cluster
    nodes = f"{cluster.nodes} nodes of {cluster.devices_per_node}" if cluster.nodes > 1 else "one node"
    return Text(
        f"Execution plan for {format_count(plan.model.num_parameters)} parameters on {cluster.ranks} ranks "
        f"({nodes}, {cluster.device}, {cluster.backend})\n"
    )


def summary_rows(plan: ExecutionPlan) -> dict[str, str]:
    """Return the numbers of a plan as text, by what they tell."""
    predicted = plan.predicted
    rows = {
        "batch size": f"{plan.batch_size} x {plan.accumulate_grad_batches} accumulated x {plan.cluster.ranks} ranks "
        f"= {plan.global_batch_size} in all",
        "step time": f"{format_seconds(predicted.step_time_s)} = {format_seconds(predicted.compute_time_s)} compute "
        f"+ {format_seconds(predicted.communication_time_s)} communication",
        "throughput": _format_throughput(predicted.samples_per_s),
        **({"tried": describe_tried(plan)} if plan.tried else {}),
        "peak memory": f"{format_bytes(predicted.peak_memory_bytes)} of {format_bytes(plan.memory_limit_bytes)}",
    }
    if predicted.overhead_bytes:
        rows[""] = f"{format_bytes(predicted.overhead_bytes)} of it before the model"
    if predicted.non_training_bytes:
        needs = (f"{format_bytes(size)} for {what}" for what, size in predicted.non_training_bytes.items())
        rows["between steps"] = ", ".join(needs)
    if plan.update_in_backward:
        rows["updates"] = "sharded parameters are updated during backward, so their gradients need not be stored"
    if plan.retain_freed_memory:
        rows["freed memory"] = "is retained in the heap, so that new tensors need no new pages"
    return rows


def _summary(plan: ExecutionPlan, profiling_s: float | None, collectives: int | None) -> Table:
    rows = summary_rows(plan)
    rows["peak memory"] += f"  {_format_bar(plan.predicted.peak_memory_bytes / plan.memory_limit_bytes)}"
    if collectives is not None:
        rows["collectives"] = f"{collectives} per step{_prefetch_text(plan)}"
    if profiling_s is not None:
        rows["profiling"] = f"took {format_seconds(profiling_s)}"
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _operator_table(rows: Sequence[TableRow]) -> Table:
    """Show rows of operators: names that are too long for a line are wrapped at dots and commas."""
    counts, sizes = [str(row.count) for row in rows], [format_count(row.num_parameters) for row in rows]
    available = WIDTH - 3 * _GAP - max(map(len, ["count", *counts])) - max(map(len, ["parameters", *sizes]))
    longest = max((len(row.label) + 2 * row.is_part for row in rows), default=0)
    pieces = (len(piece) + 4 * row.is_part for row in rows for piece in re.split(_BREAK, row.label))
    needed = min(longest, max(available - _MAX_MODE_WIDTH, *pieces, 0))
    mode_width = max(_MIN_MODE_WIDTH, min(max((len(row.mode) for row in rows), default=0), available - needed))
    table = _table("operators", "mode", ">count", ">parameters")
    for row, count, size in zip(rows, counts, sizes, strict=True):
        label = Text(wrap_name(row.label, available - mode_width, 2 * row.is_part))  # a str would be read as markup
        table.add_row(label, textwrap.fill(row.mode, mode_width, break_on_hyphens=False), count, size)
    return table


def wrap_name(name: str, width: int, indent: int = 0) -> str:
    """Wrap a dotted name, or several, before a dot or after a blank: what lies between is never broken.

    Args:
        name: the name.
        width: of a line; a longer piece has a line of its own.
        indent: blanks before the first line; further ones have two more.
    """
    lines = [" " * indent]
    for piece in re.split(_BREAK, name):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1].strip():
            lines.append(" " * (indent + 2))
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _mode_table(operators: Iterable[OperatorPlan]) -> Table:
    """Count parameters by the mode of their slice; the slices of an operator are equal parts."""
    by_mode: Counter[Mode] = Counter()
    for operator in operators:
        for index, mode in enumerate(operator.slices):
            numel, k = operator.num_parameters, len(operator.slices)
            by_mode[mode] += numel * (index + 1) // k - numel * index // k
    total = by_mode.total()
    table = _table("mode", "meaning", ">parameters", ">share")
    for mode in Mode:
        if mode in by_mode:
            share = by_mode[mode] / total if total else 0.0
            table.add_row(mode.value, MODE_DESCRIPTIONS[mode], format_count(by_mode[mode]), f"{share:.1%}")
    return table


def _frontier_table(plan: ExecutionPlan) -> Table:
    others = sorted(
        (point for point in plan.frontier if point.batch_size != plan.batch_size),
        key=lambda point: point.samples_per_s,
        reverse=True,
    )
    table = _table("runner-up", ">throughput", ">against the plan", ">peak memory")
    for point in others[:MAX_RUNNERS_UP]:
        table.add_row(
            f"batch size {point.batch_size}",
            _format_throughput(point.samples_per_s),
            _format_difference(point.samples_per_s, plan.predicted.samples_per_s),
            format_bytes(point.peak_memory_bytes),
        )
    return table


def _table(*columns: str) -> Table:
    """Make an empty table; a column whose title starts with ``>`` holds numbers and is aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold underline")
    for title in columns:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left", no_wrap=True)
    table.columns[0].no_wrap = False
    table.columns[0].overflow = "fold"
    return table


def _format_bar(share: float) -> str:
    filled = min(_BAR_WIDTH, round(share * _BAR_WIDTH))
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:.1%}"


def _prefetch_text(plan: ExecutionPlan) -> str:
    size = plan.cluster.prefetch_max_bytes
    return f", overlapped with compute for units up to {format_bytes(size)}" if size else ""


def _format_throughput(samples_per_s: float) -> str:
    return f"{format_throughput(samples_per_s)} samples/s"


def _format_difference(value: float, reference: float) -> str:
    return f"{(value - reference) / reference:+.1%}"

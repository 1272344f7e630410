"""Draw a plan as figures; needs the extra ``pictures`` (matplotlib).

Each function returns a ``matplotlib.figure.Figure`` of its own; nothing is registered with pyplot. The colours are
Okabe and Ito's: colour-blind readers can tell them apart, and they differ in lightness, too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.cost.cpu_effects import HeapModel
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.search.plan_search import Candidate
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.wrapping import WrappedModel
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, SimulatedResult

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, ScalarFormatter, StrMethodFormatter
except ImportError as error:
    raise ConfigurationError("pictures need matplotlib: pip install 'lightning-osdp[pictures]'") from error

MODE_COLOURS = {Mode.DP: "#0072B2", Mode.ZDP2: "#56B4E9", Mode.ZDP: "#E69F00", Mode.TP: "#009E73"}

MODE_LABELS = {
    Mode.DP: "dp: replicated",
    Mode.ZDP2: "zdp2: sharded, parameters kept until backward",
    Mode.ZDP: "zdp: sharded throughout",
    Mode.TP: "tp: cut, activations exchanged",
}

RECOMPUTED_COLOUR = "#444444"

NO_CHOICE_COLOUR, NO_CHOICE_LABEL = "#BBBBBB", "replicated for lack of a choice"

CATEGORY_COLOURS = {
    "states": "#0072B2",
    "gradients": "#E69F00",
    "gathered": "#009E73",
    "transient": "#D55E00",
    "activations": "#56B4E9",
    "heap": "#CC79A7",
    "overhead": "#999999",
}
"""Colours of the memory categories, in the order in which they are stacked from below."""

STRATEGIES = {
    "osdp": ("OSDP", "#0072B2", "o", "-"),
    "dp": ("all dp (DDP)", "#D55E00", "s", "--"),
    "zdp": ("all zdp (FSDP)", "#009E73", "^", ":"),
}
"""Label, colour, marker and line style of each field of ``SimulatedPoint``."""

LIMIT_COLOUR = "#000000"

MIN_LOG_AXIS_RATIO = 64
"""Batch sizes that differ by more than this factor are drawn on a logarithmic axis."""

MAX_NAMES_SHOWN = 12
"""Most operators that are named below a strip; more names would overlap."""


def throughput_figure(plan: ExecutionPlan) -> Figure:
    """Draw throughput and peak memory of the best plan at each batch size, the chosen one marked."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    sizes = [point.batch_size for point in plan.frontier]
    scale, unit = _memory_unit([plan.memory_limit_bytes])
    speed.plot(sizes, [point.samples_per_s for point in plan.frontier], color="#0072B2", marker="o", markersize=3)
    chosen = f"chosen: batch size {plan.batch_size}, {format_rate(plan.predicted.samples_per_s)}"
    speed.plot(
        plan.batch_size, plan.predicted.samples_per_s, "*", color="#D55E00", markersize=15, label=chosen, zorder=3
    )
    speed.set_ylabel("samples/s, all devices")
    speed.set_ylim(0, 1.1 * max([point.samples_per_s for point in plan.frontier] + [plan.predicted.samples_per_s]))
    memory.plot(sizes, [p.peak_memory_bytes / scale for p in plan.frontier], color="#0072B2", marker="o", markersize=3)
    memory.plot(plan.batch_size, plan.predicted.peak_memory_bytes / scale, "*", color="#D55E00", markersize=15)
    _draw_limit(memory, plan.memory_limit_bytes / scale)
    memory.set_ylabel(f"peak, {unit}")
    memory.set_ylim(0, 1.25 * plan.memory_limit_bytes / scale)
    memory.set_xlabel("batch size per device")
    if len(sizes) > 1 and max(sizes) > MIN_LOG_AXIS_RATIO * min(sizes):
        memory.set_xscale("log", base=2)
        memory.xaxis.set_major_formatter(ScalarFormatter())
    else:
        memory.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, "Best plan at each batch size", [speed, memory])
    return figure


def memory_figure(plan: ExecutionPlan, model: ModelProfile) -> Figure:
    """Draw what one device holds along a training step, by category, against the memory limit.

    Args:
        plan: the plan to draw.
        model: the model that it is for.

    Returns:
        A stacked area chart over the moments of the step.

    Raises:
        PlanMismatchError: the plan is for another model.
    """
    plan.check(model, plan.cluster.ranks)
    operators = plan.operators_of(model)
    wrapped = WrappedModel.from_assignment(model, [operator.unit for operator in operators])
    growth = plan.peak.heap_growth if plan.peak is not None else 0.0
    timeline = Timeline(
        wrapped.model, plan.cluster, plan.predicted.overhead_bytes, heap=HeapModel(growth, LinearInBatch())
    )
    step = (plan.batch_size, plan.accumulate_grad_batches, plan.recomputed)
    choices = wrapped.merge_choices([operator.choice for operator in operators])
    curves, peak = timeline.curves(choices, *step), timeline.peak(choices, *step)
    phases = timeline.phases(plan.recomputed)
    total = sum(curves.values())
    scale, unit = _memory_unit([plan.memory_limit_bytes])
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    moments = range(len(phases) + 1)
    shown = {name: colour for name, colour in CATEGORY_COLOURS.items() if name != "heap" or plan.retain_freed_memory}
    axes.stackplot(
        moments,
        [curves[name] / scale for name in shown],
        labels=list(shown),
        colors=list(shown.values()),
        step="mid",
        linewidth=0,
    )
    _draw_limit(axes, plan.memory_limit_bytes / scale)
    worst = int(total.argmax())  # type: ignore[union-attr]
    axes.plot(worst, peak.total_bytes / scale, "v", color="black", markersize=8)
    axes.annotate(
        f"{format_bytes(peak.total_bytes)}: {peak.where}",
        (worst, peak.total_bytes / scale),
        xytext=(0, 9),
        textcoords="offset points",
        ha="left" if worst < len(moments) / 3 else "right" if worst > 2 * len(moments) / 3 else "center",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    axes.set_ylabel(f"held by one device, {unit}")
    axes.set_ylim(0, 1.2 * max(plan.memory_limit_bytes, peak.total_bytes) / scale)
    axes.set_xlim(0, max(1, len(moments) - 1))
    _label_phases(axes, phases)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    _finish(figure, f"Memory along one training step, batch size {plan.batch_size}", [axes], legend=False)
    return figure


def decisions_figure(plan: ExecutionPlan) -> Figure:
    """Draw how the states of each operator are kept and how large it is, in the order of the model's depth.

    A bar of a split operator is divided from below in the order of its slices. Hatches mark operators sharded inside
    nodes; a dark line below the strip marks recomputed ones.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    size, strip = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    places = range(len(plan.operators))
    used: dict[str, _BarStyle] = {}
    for place, operator in zip(places, plan.operators, strict=True):
        below = 0.0
        for mode, alike in groupby(operator.slices):
            share = len(list(alike)) / len(operator.slices)
            look = _get_bar_style(operator, mode)
            used.setdefault(look.label, look)
            style = {"facecolor": look.colour, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0}
            millions = operator.num_parameters / 1e6
            size.bar(place, share * millions, width=0.9, bottom=below * millions, **style)
            strip.bar(place, share, width=1.0, bottom=below, **style)
            below += share
    size.set_ylabel("million parameters")
    strip.set_yticks([])
    recomputed = [(place - 0.5, 1.0) for place in places if plan.operators[place].is_recomputed]
    if recomputed:
        strip.broken_barh(recomputed, (-0.25, 0.15), color=RECOMPUTED_COLOUR, linewidth=0)
    strip.set_ylim(-0.3 if recomputed else 0, 1)
    strip.set_xlim(-0.6, len(plan.operators) - 0.4)
    shown = sorted({round(i * (len(places) - 1) / max(1, MAX_NAMES_SHOWN - 1)) for i in range(MAX_NAMES_SHOWN)})
    names = [plan.operators[place].name or "(the module itself)" for place in shown]
    strip.set_xticks(shown, names, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    strip.set_xlabel("operators, in the order of their first use")
    patches = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0, label=look.label)
        for look in sorted(used.values(), key=lambda look: look.rank)
    ]
    if recomputed:
        patches.append(Patch(color=RECOMPUTED_COLOUR, label="its block is recomputed"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    _finish(figure, "How the states of each operator are kept", [size, strip], legend=False)
    return figure


def tradeoff_figure(candidates: Sequence[Candidate], memory_limit_bytes: int | None = None) -> Figure:
    """Draw step time against memory: what each further byte buys at one batch size.

    Args:
        candidates: plans as ``simulate.sweep_memory_limits`` returns them, at least one.
        memory_limit_bytes: a limit to mark.

    Returns:
        A step curve with the compute time as a reference.

    Raises:
        ConfigurationError: there are no candidates.
    """
    if not candidates:
        raise ConfigurationError("a picture of time against memory needs at least one plan")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    memory_scale, memory_unit = _memory_unit([candidate.peak.total_bytes for candidate in candidates])
    time_scale, time_unit = (1.0, "s") if max(one.step_time_s for one in candidates) >= 1 else (1e-3, "ms")
    peaks = [candidate.peak.total_bytes / memory_scale for candidate in candidates]
    times = [candidate.step_time_s / time_scale for candidate in candidates]
    axes.step(peaks, times, where="post", color="#0072B2")
    axes.plot(peaks, times, "o", color="#0072B2", markersize=5, label="fastest plan that fits")
    axes.plot(
        peaks,
        [candidate.compute_s / time_scale for candidate in candidates],
        color="#999999",
        linestyle="--",
        label="compute alone",
    )
    if memory_limit_bytes is not None:
        axes.axvline(memory_limit_bytes / memory_scale, color=LIMIT_COLOUR, linestyle="-.", label="memory limit")
    axes.set_xlabel(f"peak memory of one device, {memory_unit}")
    axes.set_ylabel(f"one optimizer step, {time_unit}")
    axes.set_ylim(0, 1.1 * max(times))
    _finish(figure, f"Time against memory, batch size {candidates[0].batch_size}", [axes])
    return figure


def devices_figure(points: Sequence[SimulatedPoint]) -> Figure:
    """Draw throughput and memory by number of devices, for the plan and both baselines; a cross where nothing fits.

    Args:
        points: results of ``simulate.simulate``, at least one.

    Returns:
        Two charts with a common axis.

    Raises:
        ConfigurationError: there are no points.
    """
    if not points:
        raise ConfigurationError("a picture by number of devices needs at least one of them")
    figure = Figure(figsize=(8, 6), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    places = range(len(points))
    scale, unit = _memory_unit([point.memory_limit_bytes for point in points])
    for row, (field, (label, colour, marker, line)) in enumerate(STRATEGIES.items()):
        results: list[SimulatedResult | None] = [getattr(point, field) for point in points]
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 6}
        rates = [one.samples_per_s if one is not None else float("nan") for one in results]
        peaks = [one.peak_memory_bytes / scale if one is not None else float("nan") for one in results]
        speed.plot(places, rates, label=label, **style)
        memory.plot(places, peaks, **style)
        infeasible = [place + 0.06 * (row - 1) for place, one in zip(places, results, strict=True) if one is None]
        if infeasible:  # shifted, so that the crosses of several strategies do not overlap
            speed.plot(infeasible, [0.0] * len(infeasible), "x", color=colour, markersize=9, clip_on=False)
    if any(getattr(point, field) is None for point in points for field in STRATEGIES):
        speed.plot([], [], "x", color="#444444", markersize=9, label="does not fit")
    limits = [point.memory_limit_bytes / scale for point in points]
    memory.plot(places, limits, color=LIMIT_COLOUR, linestyle="-.", linewidth=1.2)
    _label_limit(memory, limits[0])
    speed.set_ylabel("samples/s, all devices")
    speed.set_ylim(bottom=0)
    memory.set_ylabel(f"peak of one device, {unit}")
    memory.set_ylim(0, 1.2 * max(limits))
    memory.set_xticks(list(places), [f"{one.devices}" + f"\n({one.nodes} nodes)" * (one.nodes > 1) for one in points])
    memory.set_xlabel("devices")
    _finish(figure, "By number of devices", [speed, memory])
    return figure


def format_rate(samples_per_s: float) -> str:
    """Format a throughput: ``0.0123 samples/s``, ``13.5 samples/s``, ``800,771 samples/s``."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def to_svg(figure: Figure) -> str:
    """Render a figure as SVG with its text as text; equal figures give equal files."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning_osdp"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


# -- parts -------------------------------------------------------------------------------------------------------------


def _finish(figure: Figure, title: str, axes: Sequence[Axes], *, legend: bool = True) -> None:
    figure.suptitle(title, fontsize=13)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
        if each.get_yticks().size:
            each.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    if legend:
        axes[0].legend(frameon=False)


def _draw_limit(axes: Axes, value: float) -> None:
    axes.axhline(value, color=LIMIT_COLOUR, linestyle="-.", linewidth=1.2)
    _label_limit(axes, value)


def _label_limit(axes: Axes, value: float) -> None:
    """Write on the limit's line, at its left end, where memory is usually lower."""
    axes.annotate(
        "memory limit",
        (0.01, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        va="bottom",
        fontsize=9,
    )


def _label_phases(axes: Axes, phases: Sequence[str]) -> None:
    """Mark where backward begins, what is recomputed in it, and where the optimizer's step begins."""
    turn = next((at for at, phase in enumerate(phases) if phase != "forward"), len(phases))
    for at, phase in enumerate(phases):
        if phase == "recompute":
            axes.axvspan(at - 0.5, at + 0.5, ymax=0.015, color=RECOMPUTED_COLOUR, linewidth=0)
    for edge in (turn - 0.5, len(phases) - 0.5):
        axes.axvline(edge, color="#444444", linewidth=0.8, linestyle=":")
    ticks = [(turn - 1) / 2, (turn + len(phases) - 1) / 2, len(phases)]
    backward = "backward (recomputation marked)" if "recompute" in phases else "backward"
    axes.set_xticks(ticks, ["forward", backward, "optimizer\nstep"])
    axes.tick_params(axis="x", length=0)


def _memory_unit(amounts: Sequence[float]) -> tuple[float, str]:
    return (1 << 30, "GiB") if max(amounts) >= 1 << 30 else (1 << 20, "MiB")


class _BarStyle(NamedTuple):
    """Style of the bar of a slice, and its rank in the legend."""

    rank: int
    colour: str
    hatch: str
    label: str


def _get_bar_style(operator: OperatorPlan, mode: Mode) -> _BarStyle:
    if operator.replicated_reason or len(operator.alternatives) == 1:
        return _BarStyle(2 * len(Mode), NO_CHOICE_COLOUR, "", NO_CHOICE_LABEL)
    in_node = mode != Mode.DP and operator.sharding_group == ShardingScope.NODE
    rank = 2 * list(Mode).index(mode) + in_node
    words = MODE_LABELS[mode] + (", inside nodes" if in_node else "")
    return _BarStyle(rank, MODE_COLOURS[mode], "////" if in_node else "", words)

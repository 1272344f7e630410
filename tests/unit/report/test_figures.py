"""Pictures hold what they should say, and the page needs nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import Baseline
from lightning_osdp.planning.whatif.hardware import load
from lightning_osdp.planning.whatif.simulate import SimulatedPoint, sweep_memory_limits
from lightning_osdp.report import figures
from lightning_osdp.report.baseline_text import format_throughput
from lightning_osdp.report.html import render_page
from tests.support.simulated import simulate
from tests.unit.planning.search.test_batch_size_search import MIB, cluster, compute, model

RULE = BatchSizePolicy(max_batch_size=4)


@pytest.fixture(scope="module")
def description() -> ModelProfile:
    return model(activations_per_sample=MIB)


@pytest.fixture(scope="module")
def problem(description: ModelProfile) -> Problem:
    return Problem(description, cluster(), compute(), 40 * MIB)


@pytest.fixture(scope="module")
def plan(problem: Problem) -> ExecutionPlan:
    return make_plan(problem, RULE)


@pytest.fixture(scope="module")
def points(description: ModelProfile) -> tuple[SimulatedPoint, ...]:
    return simulate(description, load("2xtitan-rtx-pcie3+10gbit"), [1, 4, 16], memory_limit_bytes=40 * MIB, policy=RULE)


def svg_text(figure: Figure) -> str:
    """All text of a figure's SVG, which must be well-formed."""
    return " | ".join("".join(ElementTree.fromstring(figures.to_svg(figure)).itertext()).split("\n"))


def test_throughput_figure_marks_chosen_batch_size(plan: ExecutionPlan) -> None:
    text = svg_text(figures.throughput_figure(plan))
    rate = figures.format_rate(plan.predicted.samples_per_s)
    assert f"chosen: batch size {plan.batch_size}, {rate}" in text
    for words in ("samples/s, all devices", "batch size per device", "memory limit", "peak, MiB"):
        assert words in text


def test_memory_figure_shows_categories_limit_and_peak(plan: ExecutionPlan, description: ModelProfile) -> None:
    figure = figures.memory_figure(plan, description)
    text = svg_text(figure)
    shown = [name for name in figures.CATEGORY_COLOURS if name != "heap"]
    for words in (*shown, "memory limit", "forward", "backward", "optimizer", "MiB"):
        assert words in text
    assert plan.peak is not None
    assert plan.peak.where in text
    top = figure.axes[0].collections[len(shown) - 1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(plan.predicted.peak_memory_bytes / MIB)


def test_memory_figure_with_retained_heap_shows_it(plan: ExecutionPlan, description: ModelProfile) -> None:
    assert plan.peak is not None
    peak = plan.peak.model_copy(update={"heap": 20 * MIB})
    kept = plan.model_copy(update={"retain_freed_memory": True, "peak": peak})
    figure = figures.memory_figure(kept, description)
    assert "heap" in svg_text(figure)
    assert "heap" not in svg_text(figures.memory_figure(plan, description))
    top = figure.axes[0].collections[len(figures.CATEGORY_COLOURS) - 1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(plan.predicted.peak_memory_bytes / MIB + 20)


def test_memory_figure_of_other_model_raises_plan_mismatch_error(plan: ExecutionPlan) -> None:
    with pytest.raises(PlanMismatchError):
        figures.memory_figure(plan, model(count=3))


def test_decisions_figure_names_only_modes_in_use(plan: ExecutionPlan) -> None:
    text = svg_text(figures.decisions_figure(plan))
    used = {operator.slices[0] for operator in plan.operators}
    assert len(used) > 1
    for mode, words in figures.MODE_LABELS.items():
        assert (words in text) == (mode in used)
    assert "op0" in text
    assert "op3" in text
    assert "million parameters" in text


def test_decisions_figure_draws_slices_nodes_and_recomputed_blocks(plan: ExecutionPlan) -> None:
    slices = (Mode.DP, Mode.ZDP, Mode.ZDP, Mode.ZDP)
    changes = {"slices": slices, "split_dim": 1, "sharding_group": ShardingScope.NODE, "is_recomputed": True}
    first = plan.operators[0].model_copy(update=changes)
    split = plan.model_copy(update={"operators": (first, *plan.operators[1:])})
    figure = figures.decisions_figure(split)
    heights = [patch.get_height() for patch in figure.axes[1].patches]
    assert heights == [0.25, 0.75] + [1.0] * 3
    words = svg_text(figure)
    assert "zdp: sharded throughout, inside nodes" in words
    assert "its block is recomputed" in words
    assert "recomputed" not in svg_text(figures.decisions_figure(plan))
    assert "dp x 1 + zdp x 3" in render_page(split)


def test_decisions_figure_marks_operators_without_choice(plan: ExecutionPlan) -> None:
    first = plan.operators[0].model_copy(update={"replicated_reason": "used everywhere", "slices": (Mode.DP,)})
    pinned = plan.model_copy(update={"operators": (first, *plan.operators[1:])})
    assert figures.NO_CHOICE_LABEL in svg_text(figures.decisions_figure(pinned))
    assert figures.NO_CHOICE_LABEL not in svg_text(figures.decisions_figure(plan))


def test_tradeoff_figure_has_units_and_memory_limit(problem: Problem) -> None:
    candidates = sweep_memory_limits(problem, 1, points=4)
    figure = figures.tradeoff_figure(candidates, problem.memory_limit_bytes)
    text = svg_text(figure)
    for words in ("one optimizer step, ms", "peak memory of one device, MiB", "memory limit", "compute alone"):
        assert words in text
    drawn = figure.axes[0].lines[1].get_ydata()
    assert list(drawn) == pytest.approx([candidate.step_time_s * 1e3 for candidate in candidates])


def test_devices_figure_shows_all_three_plans_and_what_does_not_fit(points: tuple[SimulatedPoint, ...]) -> None:
    assert points[0].dp is None
    text = svg_text(figures.devices_figure(points))
    for words in ("OSDP", "all dp (DDP)", "all zdp (FSDP)", "does not fit", "(2 nodes)", "peak of one device, MiB"):
        assert words in text


def test_devices_figure_fills_its_height_when_everything_fits(description: ModelProfile) -> None:
    points = simulate(description, load("h100-80gb-nvlink"), [1, 8], policy=RULE)
    figure = figures.devices_figure(points)
    assert "does not fit" not in svg_text(figure)
    assert all(axes.get_position().height > 0.3 for axes in figure.axes)


def test_throughput_figure_with_wide_batch_size_range_uses_log_scale(plan: ExecutionPlan) -> None:
    point = plan.frontier[0]
    wide = [point.model_copy(update={"batch_size": size}) for size in (1, 64, 1024)]
    narrow = [point.model_copy(update={"batch_size": size}) for size in (1, 2, 64)]
    for frontier, scale in ((wide, "log"), (narrow, "linear")):
        figure = figures.throughput_figure(plan.model_copy(update={"frontier": tuple(frontier)}))
        assert figure.axes[1].get_xscale() == scale


@pytest.mark.parametrize(
    ("rate", "text"), [(0.01234, "0.0123 samples/s"), (13.47, "13.5 samples/s"), (800_770.7, "800,771 samples/s")]
)
def test_format_rate_writes_no_exponents(rate: float, text: str) -> None:
    assert figures.format_rate(rate) == text


def test_figure_of_empty_input_raises_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="at least one plan"):
        figures.tradeoff_figure([])
    with pytest.raises(ConfigurationError, match="at least one of them"):
        figures.devices_figure([])


def test_svg_of_equal_figures_is_equal(plan: ExecutionPlan) -> None:
    assert figures.to_svg(figures.decisions_figure(plan)) == figures.to_svg(figures.decisions_figure(plan))


def test_html_page_loads_nothing_external_and_holds_the_numbers(
    plan: ExecutionPlan, problem: Problem, points: tuple[SimulatedPoint, ...], description: ModelProfile
) -> None:
    page = render_page(plan, model=description, tradeoff=sweep_memory_limits(problem, 1, points=3), points=points)
    sources = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page)
    assert len(sources) == 5
    head = "data:image/svg+xml;base64,"
    assert all(source.startswith(head) for source in sources)
    assert not re.search(r"https?://", page)
    assert "url(" not in page
    for source in sources:
        ElementTree.fromstring(base64.b64decode(source.removeprefix(head)))
    assert f"{format_throughput(plan.predicted.samples_per_s)} samples/s" in page
    assert "What else there was" not in page
    baselines = (Baseline(name="ZeRO-3", fits=False, batch_size=1, peak_memory_bytes=9, missing_bytes=8),)
    page = render_page(plan.model_copy(update={"baselines": baselines}), points=points)
    for words in ("What else there was", "ZeRO-3", "needs 8 B more"):
        assert words in page
    assert "does not fit (needs" in page
    assert f"= {plan.global_batch_size} in all" in page


def test_html_page_escapes_operator_names(plan: ExecutionPlan) -> None:
    strange = plan.operators[0].model_copy(update={"name": "<script>alert(1)</script>"})
    page = render_page(plan.model_copy(update={"operators": (strange, *plan.operators[1:])}))
    assert "<script" not in page
    assert "&lt;script&gt;" in page

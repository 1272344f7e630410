"""Pictures hold what they should say, and the page needs nothing from elsewhere."""

from __future__ import annotations

import base64
import re
import struct
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from lightning_osdp import pictures
from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.pictures import figures
from lightning_osdp.planning.choices import Group, Mode
from lightning_osdp.planning.hardware import load
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule, Problem, make_plan
from lightning_osdp.planning.simulate import SimulatedPoint, simulate, tradeoff
from tests.planning.test_schedule import MIB, cluster, compute, model

RULE = BatchRule(max_batch_size=4)


@pytest.fixture(scope="module")
def description() -> ModelDescription:
    return model(activations_per_sample=MIB)


@pytest.fixture(scope="module")
def problem(description: ModelDescription) -> Problem:
    return Problem(description, cluster(), compute(), 40 * MIB)


@pytest.fixture(scope="module")
def plan(problem: Problem) -> ExecutionPlan:
    return make_plan(problem, RULE)


@pytest.fixture(scope="module")
def points(description: ModelDescription) -> tuple[SimulatedPoint, ...]:
    return simulate(description, load("2xtitan-rtx-pcie3+10gbit"), [1, 4, 16], memory_limit_bytes=40 * MIB, rule=RULE)


def texts(figure: Figure) -> str:
    """All text of a figure's SVG, which must be well-formed."""
    return " | ".join("".join(ElementTree.fromstring(pictures.svg(figure)).itertext()).split("\n"))


def test_throughput_marks_the_chosen_batch_size(plan: ExecutionPlan) -> None:
    text = texts(pictures.throughput_figure(plan))
    rate = figures.format_rate(plan.predicted.samples_per_s)
    assert f"chosen: batch size {plan.batch_size}, {rate}" in text
    for words in ("samples/s, all devices", "batch size per device", "memory limit", "peak, MiB"):
        assert words in text


def test_memory_shows_every_category_the_limit_and_the_peak(plan: ExecutionPlan, description: ModelDescription) -> None:
    figure = pictures.memory_figure(plan, description)
    text = texts(figure)
    shown = [name for name in figures.CATEGORY_COLOURS if name != "heap"]
    for words in (*shown, "memory limit", "forward", "backward", "optimizer", "MiB"):
        assert words in text
    assert plan.peak is not None
    assert plan.peak.where in text
    top = figure.axes[0].collections[len(shown) - 1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(plan.predicted.peak_memory_bytes / MIB)


def test_memory_shows_what_stays_in_the_heap_where_something_does(
    plan: ExecutionPlan, description: ModelDescription
) -> None:
    assert plan.peak is not None
    peak = plan.peak.model_copy(update={"heap": 20 * MIB})
    kept = plan.model_copy(update={"keep_heap": True, "peak": peak})
    figure = pictures.memory_figure(kept, description)
    assert "heap" in texts(figure)
    assert "heap" not in texts(pictures.memory_figure(plan, description))
    top = figure.axes[0].collections[len(figures.CATEGORY_COLOURS) - 1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(plan.predicted.peak_memory_bytes / MIB + 20)


def test_memory_of_another_model_is_refused(plan: ExecutionPlan) -> None:
    with pytest.raises(PlanMismatchError):
        pictures.memory_figure(plan, model(count=3))


def test_decisions_name_the_modes_in_use(plan: ExecutionPlan) -> None:
    text = texts(pictures.decisions_figure(plan))
    used = {operator.slices[0] for operator in plan.operators}
    assert len(used) > 1
    for mode, words in figures.MODE_WORDS.items():
        assert (words in text) == (mode in used)
    assert "op0" in text
    assert "op3" in text
    assert "million parameters" in text


def test_decisions_draw_slices_nodes_and_recomputed_blocks(plan: ExecutionPlan) -> None:
    slices = (Mode.DP, Mode.ZDP, Mode.ZDP, Mode.ZDP)
    changes = {"slices": slices, "split_dim": 1, "sharding_group": Group.NODE, "checkpoint": True}
    first = plan.operators[0].model_copy(update=changes)
    split = plan.model_copy(update={"operators": (first, *plan.operators[1:])})
    figure = pictures.decisions_figure(split)
    heights = [patch.get_height() for patch in figure.axes[1].patches]
    assert heights == [0.25, 0.75] + [1.0] * 3
    words = texts(figure)
    assert "zdp: sharded throughout, inside nodes" in words
    assert "its block is recomputed" in words
    assert "recomputed" not in texts(pictures.decisions_figure(plan))
    assert "dp x 1 + zdp x 3" in pictures.html(split)


def test_an_operator_without_a_choice_is_said_to_have_none(plan: ExecutionPlan) -> None:
    first = plan.operators[0].model_copy(update={"pinned": "used everywhere", "slices": (Mode.DP,)})
    pinned = plan.model_copy(update={"operators": (first, *plan.operators[1:])})
    assert figures.NO_CHOICE_WORDS in texts(pictures.decisions_figure(pinned))
    assert figures.NO_CHOICE_WORDS not in texts(pictures.decisions_figure(plan))


def test_tradeoff_has_units_and_the_limit(problem: Problem) -> None:
    candidates = tradeoff(problem, 1, points=4)
    figure = pictures.tradeoff_figure(candidates, problem.memory_limit_bytes)
    text = texts(figure)
    for words in ("one optimizer step, ms", "peak memory of one device, MiB", "memory limit", "compute alone"):
        assert words in text
    drawn = figure.axes[0].lines[1].get_ydata()
    assert list(drawn) == pytest.approx([candidate.step_time_s * 1e3 for candidate in candidates])


def test_devices_show_all_three_and_what_does_not_fit(points: tuple[SimulatedPoint, ...]) -> None:
    assert points[0].dp is None
    text = texts(pictures.devices_figure(points))
    for words in ("OSDP", "all dp (DDP)", "all zdp (FSDP)", "does not fit", "(2 nodes)", "peak of one device, MiB"):
        assert words in text


def test_panels_fill_the_picture_where_everything_fits(description: ModelDescription) -> None:
    points = simulate(description, load("h100-80gb-nvlink"), [1, 8], rule=RULE)
    figure = pictures.devices_figure(points)
    assert "does not fit" not in texts(figure)
    assert all(axes.get_position().height > 0.3 for axes in figure.axes)


def test_a_wide_range_of_batch_sizes_is_drawn_logarithmically(plan: ExecutionPlan) -> None:
    point = plan.frontier[0]
    wide = [point.model_copy(update={"batch_size": size}) for size in (1, 64, 1024)]
    narrow = [point.model_copy(update={"batch_size": size}) for size in (1, 2, 64)]
    for frontier, scale in ((wide, "log"), (narrow, "linear")):
        figure = pictures.throughput_figure(plan.model_copy(update={"frontier": tuple(frontier)}))
        assert figure.axes[1].get_xscale() == scale


@pytest.mark.parametrize(
    ("rate", "text"), [(0.01234, "0.0123 samples/s"), (13.47, "13.5 samples/s"), (800_770.7, "800,771 samples/s")]
)
def test_rates_are_written_without_exponents(rate: float, text: str) -> None:
    assert figures.format_rate(rate) == text


def test_pictures_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one plan"):
        pictures.tradeoff_figure([])
    with pytest.raises(ConfigurationError, match="at least one of them"):
        pictures.devices_figure([])


def test_png_is_one_of_the_size_asked_for(plan: ExecutionPlan) -> None:
    data = pictures.png(pictures.throughput_figure(plan), dpi=50)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (400, 250)


def test_equal_figures_give_equal_svg(plan: ExecutionPlan) -> None:
    assert pictures.svg(pictures.decisions_figure(plan)) == pictures.svg(pictures.decisions_figure(plan))


def test_the_page_loads_nothing_and_holds_the_numbers(
    plan: ExecutionPlan, problem: Problem, points: tuple[SimulatedPoint, ...], description: ModelDescription
) -> None:
    page = pictures.html(plan, model=description, tradeoff=tradeoff(problem, 1, points=3), points=points)
    sources = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page)
    assert len(sources) == 5
    head = "data:image/svg+xml;base64,"
    assert all(source.startswith(head) for source in sources)
    assert not re.search(r"https?://", page)
    assert "url(" not in page
    for source in sources:
        ElementTree.fromstring(base64.b64decode(source.removeprefix(head)))
    assert figures.format_rate(plan.predicted.samples_per_s) in page
    assert "does not fit (needs" in page
    assert f"= {plan.global_batch_size} in all" in page


def test_the_page_escapes_what_it_is_given(plan: ExecutionPlan) -> None:
    strange = plan.operators[0].model_copy(update={"name": "<script>alert(1)</script>"})
    page = pictures.html(plan.model_copy(update={"operators": (strange, *plan.operators[1:])}))
    assert "<script" not in page
    assert "&lt;script&gt;" in page

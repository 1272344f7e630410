"""The best plan at one batch size, against all plans there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.bounds import Bounds
from lightning_osdp.planning.candidates import WORTH_TRYING, Candidate, Desk
from lightning_osdp.planning.choices import Choice
from lightning_osdp.planning.explain import explain
from lightning_osdp.planning.schedule import BatchRule, make_plan
from lightning_osdp.planning.space import Problem
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from tests.planning.small import MIB, blocks_of_one, cluster, compute


def problem(
    limit_mib: float = 60, blocks: int = 3, saved_mib: int = 5, wishes: Wishes = NO_WISHES, **times: float
) -> Problem:
    model = blocks_of_one(blocks, saved_mib)
    return Problem(model, cluster(), compute(model, slices=(2,), **times), int(limit_mib * MIB), wishes=wishes)


def every_plan(desk: Desk, batch_size: int) -> list[Candidate]:
    menus = [desk.space.menus[menu].choices for menu in desk.space.menu_of]
    names = [block.name for block in desk.problem.model.blocks]
    return [
        desk.candidate(choices, batch_size, recomputed=tuple(itertools.compress(names, flags)))
        for choices in itertools.product(*menus)
        for flags in itertools.product((False, True), repeat=len(names))
    ]


@settings(max_examples=25, deadline=None)
@given(
    saved_mib=st.integers(1, 12),
    batch_size=st.integers(1, 3),
    forward_ms=st.sampled_from([0.1, 0.5, 3.0]),
    per_slice_ms=st.sampled_from([0.0, 0.05, 0.5]),
    share=st.floats(0.0, 1.0),
)
def test_no_plan_of_two_blocks_is_better(
    saved_mib: int, batch_size: int, forward_ms: float, per_slice_ms: float, share: float
) -> None:
    """Against every choice of slices and the earliest blocks recomputed, by the true peak along the step.

    The bound holds for any set of recomputed blocks.
    """
    given_ = problem(blocks=2, saved_mib=saved_mib, forward_ms=forward_ms, per_slice_ms=per_slice_ms)
    plans = every_plan(Desk(given_), batch_size)
    peaks = [plan.peak.total_bytes for plan in plans]
    limit = int(min(peaks) + share * (max(peaks) - min(peaks)))
    desk = Desk(replace(given_, memory_limit_bytes=limit))
    earliest = [plan for plan in plans if plan.recomputed != ("blocks.1",)]
    best = min(plan.step_time_s for plan in plans if plan.peak.total_bytes <= limit)
    best_of_these = min((p.step_time_s for p in earliest if p.peak.total_bytes <= limit), default=best)
    found = desk.best(batch_size)
    assert found.peak.total_bytes <= limit
    assert found.bound_s <= best * (1 + 1e-9)
    assert found.step_time_s <= best_of_these * (1 + 2 * WORTH_TRYING)


@settings(max_examples=10, deadline=None)
@given(batch_size=st.integers(1, 4), limit_mib=st.integers(40, 120))
def test_bounds_are_bounds_for_each_number_of_recomputed_blocks(batch_size: int, limit_mib: int) -> None:
    desk = Desk(problem(limit_mib, blocks=2))
    bounds = Bounds(desk.space).lower_s(desk.space.times(batch_size, 1), batch_size, 1)
    for plan in every_plan(desk, batch_size):
        if plan.peak.total_bytes <= limit_mib * MIB and plan.recomputed in (
            (),
            ("blocks.0",),
            ("blocks.0", "blocks.1"),
        ):
            assert bounds[len(plan.recomputed)] <= plan.step_time_s * (1 + 1e-9)


def test_blocks_are_recomputed_where_that_is_cheaper_than_sharding() -> None:
    # Communication takes longer than computing a block again; activations are what fills the memory.
    fast = Desk(problem(66, saved_mib=12, forward_ms=0.1)).best(1)
    assert fast.recomputed
    assert set(fast.choices) == {Choice()}
    slow = Desk(problem(66, saved_mib=12, forward_ms=50.0)).best(1)
    assert not slow.recomputed
    assert set(slow.choices) != {Choice()}


def test_the_earliest_blocks_are_recomputed() -> None:
    for limit in range(48, 96, 4):
        found = Desk(problem(limit, blocks=4, saved_mib=12, forward_ms=0.1)).best(1).recomputed
        assert found == tuple(f"blocks.{index}" for index in range(len(found)))


def test_operators_are_split_where_their_gathers_do_not_fit() -> None:
    whole = problem(wishes=Wishes(1, False))
    needed = Desk(whole).least(1).peak.total_bytes
    split = replace(whole, wishes=Wishes("auto", False))
    assert Desk(split).least(1).peak.total_bytes < needed
    found = Desk(replace(split, memory_limit_bytes=needed - 1)).best(1)
    assert any(len(choice.slices) > 1 for choice in found.choices)
    assert found.peak.total_bytes < needed


def test_wishes_are_kept() -> None:
    everything = Desk(problem(200, wishes=Wishes("auto", True))).best(1)
    assert everything.recomputed == ("blocks.0", "blocks.1", "blocks.2")
    one = Desk(problem(200, wishes=Wishes("auto", ("blocks.1",)))).best(1)
    assert one.recomputed == ("blocks.1",)
    for limit in (40, 60, 80):
        halves = Desk(problem(limit, wishes=Wishes(2))).best(1)
        assert all(len(choice.slices) == 2 or choice == Choice() for choice in halves.choices)
        mixed = Desk(problem(limit, wishes=Wishes({"blocks.0": 1, "*": 2}))).best(1)
        assert len(mixed.choices[0].slices) == 1


def test_many_kinds_of_blocks_are_counted_in_steps() -> None:
    model = blocks_of_one(60, 3)
    kinds = tuple(block.model_copy(update={"kind": f"kind {index % 3}"}) for index, block in enumerate(model.blocks))
    model = model.model_copy(update={"blocks": kinds})
    desk = Desk(Problem(model, cluster(), compute(model), 500 * MIB))
    vectors = desk.space.vectors
    assert vectors.shape[1] == 3
    assert 200 < len(vectors) <= 700
    assert vectors.max(axis=0).tolist() == [20, 20, 20]
    found = desk.best(2)
    assert found.peak.total_bytes <= 500 * MIB


def test_pinned_blocks_are_kept_and_say_why() -> None:
    given_ = problem(64, saved_mib=12, forward_ms=0.1)
    pinned = tuple(block.model_copy(update={"pinned": "it holds BatchNorm"}) for block in given_.model.blocks)
    given_ = replace(given_, model=given_.model.model_copy(update={"blocks": pinned}))
    plan = make_plan(given_, BatchRule(batch_size=1))
    assert plan.recomputed == ()
    assert "Block in blocks: none of 3 recomputed: it holds BatchNorm." in explain(plan)


def test_the_plan_says_what_recomputing_and_splitting_bring_and_cost() -> None:
    plan = make_plan(problem(50, saved_mib=12, forward_ms=0.1), BatchRule(batch_size=1))
    assert plan.recomputed
    first = plan.blocks[0]
    assert first.recomputed
    assert first.saved_bytes == 12 * MIB
    assert first.time_s >= 0.15e-3  # its own forward and half of that outside of its operator
    inside = {operator.name for operator in plan.operators if operator.checkpoint}
    assert inside == {f"{name}.up" for name in plan.recomputed}
    text = explain(plan)
    assert f"{len(plan.recomputed)} of 3 recomputed" in text
    assert "frees 12.0 MiB" in text or "between forward and backward" in text
    tight = make_plan(problem(28, saved_mib=1), BatchRule(batch_size=1))
    assert any(len(operator.slices) > 1 for operator in tight.operators)
    assert "Whole, as" in explain(tight) or "Next best" in explain(tight)


def test_infeasible_names_splitting_and_recomputing_where_a_wish_rules_them_out() -> None:
    free = Desk(problem()).least(1).peak.total_bytes
    strict = problem(free / MIB + 1, wishes=Wishes(1, False))
    with pytest.raises(InfeasibleError) as caught:
        make_plan(strict, BatchRule(batch_size=1))
    assert "slice_granularity='auto'" in str(caught.value)
    assert "activation_checkpointing='auto'" in str(caught.value)
    both = str(caught.value).split("What would fit: ")[1].split(". Not enough")[0]
    assert "both of these" in both
    assert make_plan(replace(strict, wishes=NO_WISHES), BatchRule(batch_size=1)).batch_size == 1


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes({"block.0": 2}), r"slice_granularity: 'block\.0' matches no operator \(near names: blocks\.0\.up"),
        (Wishes("auto", ("blocks.7",)), r"activation_checkpointing: 'blocks\.7' matches no block that repeats"),
    ],
)
def test_patterns_that_match_nothing_are_refused(wishes: Wishes, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Desk(problem(wishes=wishes))


@pytest.mark.parametrize("value", ["many", 0, True, {"blocks": 0}, 2.5])
def test_granularities_of_another_form_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="slice_granularity has to be"):
        Wishes.of(value, "auto")


@pytest.mark.parametrize("value", ["blocks.0", 3, [1]])
def test_checkpointing_of_another_form_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="activation_checkpointing has to be"):
        Wishes.of("auto", value)


def test_first_row_of_each_menu_is_the_replica() -> None:
    space = Desk(problem()).space
    assert all(menu.choices[0] == Choice() for menu in space.menus)
    rows = space.rows_of((Choice(),) * 3)
    assert np.array_equal(rows, space.first_row[space.menu_of])
    assert space.choices_of(rows) == (Choice(),) * 3

"""Operators of a block that share one unit: which may, what that costs, and that the search finds it where it pays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.candidates import WORTH_TRYING, Candidate, Desk
from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.cost import communication, footprint
from lightning_osdp.planning.explain import explain
from lightning_osdp.planning.joining import Joined, ways
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule, Problem, best_candidate, make_plan
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from tests.planning.small import MIB, RANKS, blocks_of_two, cluster, compute

ZDP = Choice((Mode.ZDP,))
GATHER_MS = 1.0
"""Of a tensor of 4 MiB, latency apart."""


def problem(
    limit_mib: float, links: Cluster, model: ModelDescription | None = None, wishes: Wishes = NO_WISHES
) -> Problem:
    model = model or blocks_of_two(2)
    return Problem(model, links, compute(model), int(limit_mib * MIB), wishes=wishes)


def slow(latency_ms: float = 5.0) -> Cluster:
    return cluster(gather_ms=GATHER_MS, latency_ms=latency_ms)


def test_blocks_that_are_alike_are_joined_all_or_none() -> None:
    model = blocks_of_two(2)
    apart, together = ways(model, NO_WISHES)
    assert not any(apart)
    assert together == ("blocks.0", "blocks.0", "blocks.1", "blocks.1")


def test_what_can_not_share_a_unit_has_its_own() -> None:
    model = blocks_of_two(2)
    assert len(ways(model, Wishes(slice_granularity=2))) == 1
    assert len(ways(model, Wishes(slice_granularity={"*.up": 2}))) == 1, "one that is left is alone"
    assert len(ways(model, Wishes(slice_granularity={"*.up": 1}))) == 2
    pinned = tuple(block.model_copy(update={"pinned": "it has hooks"}) for block in model.blocks)
    assert len(ways(model.model_copy(update={"blocks": pinned}), NO_WISHES)) == 1
    for change in ({"trainable": False}, {"element_bytes": 2}):
        first = model.operators[0]
        other = first.model_copy(update={"parameters": (first.parameters[0].model_copy(update=change),)})
        changed = model.model_copy(update={"operators": (other, *model.operators[1:])})
        assert ways(changed, NO_WISHES)[-1][:2] == ("", ""), change
    twice = model.operators[1].model_copy(update={"calls": 2})
    changed = model.model_copy(update={"operators": (model.operators[0], twice, *model.operators[2:])})
    assert ways(changed, NO_WISHES)[-1][:2] == ("", "")


def test_a_joined_model_is_the_same_with_fewer_operators() -> None:
    model = blocks_of_two(2)
    joined = Joined.of(model, ("", "", "blocks.1", "blocks.1"))
    assert [operator.name for operator in joined.model.operators] == ["blocks.0.up", "blocks.0.down", "blocks.1"]
    assert joined.model.num_parameters == model.num_parameters
    assert [block.operators for block in joined.model.blocks] == [(0, 1), (2,)]
    assert [moment.operator for moment in joined.model.moments] == [0, 1, 2, 2, 2, 2, 1, 0]
    choices = (ZDP, Choice(), Choice((Mode.ZDP2,)), Choice((Mode.ZDP2,)))
    assert joined.gathered(choices) == (ZDP, Choice(), Choice((Mode.ZDP2,)))
    assert joined.spread(joined.gathered(choices)) == choices
    times = joined.times(compute(model))
    assert [time.forward.per_sample for time in times.operators] == [1e-3, 1e-3, 2e-3]


@pytest.mark.parametrize("recomputed", [False, True])
def test_one_gather_for_all_and_none_for_the_second_forward(recomputed: bool) -> None:
    model, links = blocks_of_two(1), slow(latency_ms=5.0)
    (block,) = Joined.of(model, ("blocks.0", "blocks.0")).model.operators
    seconds = communication(block, ZDP, links, recomputed=recomputed).each_s
    gather_s = (5 + 12 / 4 * GATHER_MS) * 1e-3  # 4 + 8 MiB at the latency of one
    reduce_s = (2 * 5 + 12 / 4 * GATHER_MS) * 1e-3
    assert seconds == pytest.approx(2 * gather_s + reduce_s)
    alone = sum(communication(one, ZDP, links, recomputed=recomputed).each_s for one in model.operators)
    assert alone - seconds == pytest.approx((2 * 5 + (2 * 5 + 3 * GATHER_MS) * recomputed) * 1e-3)


def test_further_tensors_of_a_gather_have_a_price() -> None:
    model, links = blocks_of_two(1), slow()
    dear = links.link.all_gather.model_copy(update={"more_s": 1e-4})
    dearer = links.model_copy(update={"link": links.link.model_copy(update={"all_gather": dear})})
    (block,) = Joined.of(model, ("blocks.0", "blocks.0")).model.operators
    more = communication(block, ZDP, dearer).each_s - communication(block, ZDP, links).each_s
    assert more == pytest.approx(2 * (RANKS - 1) * 1e-4), "two gathers of one more tensor each"


def test_gradients_come_one_by_one_while_parameters_go() -> None:
    (block,) = Joined.of(blocks_of_two(1), ("blocks.0", "blocks.0")).model.operators
    found = footprint(block, ZDP, slow())
    assert found.gathered == 12 * MIB
    # The last operator's gradient (8 MiB) comes while both are whole; then 8 MiB less are there, and a quarter of 8.
    assert found.transient == 8 * MIB
    other = Joined.of(blocks_of_two(1, sizes=(8, 4)), ("blocks.0", "blocks.0")).model.operators[0]
    assert footprint(other, ZDP, slow()).transient == max(4, 8 - 4 + 1) * MIB


def test_small_gradients_of_a_unit_are_reduced_as_one() -> None:
    model, links = blocks_of_two(1, sizes=(1, 2)), slow(latency_ms=5.0)
    (block,) = Joined.of(model, ("blocks.0", "blocks.0")).model.operators
    gather_s = reduce_s = (5 + 3 / 4 * GATHER_MS) * 1e-3  # 1 + 2 MiB at the latency of one, either way
    assert communication(block, ZDP, links).each_s == pytest.approx(2 * gather_s + reduce_s)
    for one_by_one in ({"ahead_bytes": 3 * MIB}, {"nodes": 2, "devices_per_node": 2}, {"device": "cuda: some"}):
        other = links.model_copy(update=one_by_one)
        assert communication(block, ZDP, other).each_s == pytest.approx(2 * gather_s + reduce_s + 5e-3)

    found = footprint(block, ZDP, links)
    assert found.gathered == 3 * MIB
    # Each parameter is freed for its gradient; at the end their sums (3 / 4) stand beside what two ranks send (3 / 2).
    assert found.transient == (3 / 4 + 3 / 2) * MIB
    assert footprint(block, ZDP, links.model_copy(update={"device": "cuda: some"})).transient == 2 * MIB


def test_joining_pays_for_latencies_and_costs_memory() -> None:
    free = problem(1000, slow(), wishes=Wishes(activation_checkpointing=False))
    needed = Desk(free, ways(free.model, NO_WISHES)[1]).least(1).peak.total_bytes
    less = Desk(free).least(1).peak.total_bytes
    assert less < needed
    roomy = best_candidate(replace(free, memory_limit_bytes=needed), 1)
    assert any(roomy.units)
    tight = best_candidate(replace(free, memory_limit_bytes=needed - 1), 1)
    assert not all(tight.units)
    with pytest.raises(InfeasibleError):
        best_candidate(replace(free, memory_limit_bytes=less - 1), 1)


def test_a_plan_keeps_its_units_and_says_why() -> None:
    free = problem(1000, slow(), blocks_of_two(4))
    limit = Desk(free, ways(free.model, NO_WISHES)[1]).least(1).peak.total_bytes + MIB
    plan = make_plan(replace(free, memory_limit_bytes=limit), BatchRule(batch_size=1))
    assert {operator.unit for operator in plan.operators} >= {"blocks.0"}
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    assert plan.predicted.peak_memory_bytes <= limit
    text = explain(plan)
    assert "2 operators are gathered together, which saves" in text
    assert "One unit for the whole block" in text
    assert "Shares the unit of its block" in text
    first = plan.operators[0]
    assert first.unit
    assert len(first.alternatives) > 1
    other = first.model_copy(update={"slices": (Mode.ZDP2,) if first.slices == (Mode.ZDP,) else (Mode.ZDP,)})
    for wrong in (
        {"unit": "blocks.0", "slices": (Mode.DP,)},
        {"unit": "blocks.0", "slices": (Mode.ZDP,) * 2, "split_dim": 0},
    ):
        with pytest.raises(ValidationError, match="sharded whole"):
            type(first).model_validate(first.model_dump() | wrong)
    with pytest.raises(ValidationError, match="differs in mode"):
        ExecutionPlan.model_validate(plan.model_dump() | {"operators": (other, *plan.operators[1:])})


@settings(max_examples=40, deadline=None)
@example(limit_mib=67, latency_ms=0.0, saved_mib=0, sizes=(11, 8))  # the best shards what the peak's moment can't tell
@given(
    limit_mib=st.integers(30, 260),
    latency_ms=st.sampled_from([0.0, 0.2, 5.0]),
    saved_mib=st.integers(0, 12),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_no_plan_with_or_without_shared_units_is_better(
    limit_mib: int, latency_ms: float, saved_mib: int, sizes: tuple[int, int]
) -> None:
    """Of those in which alike blocks are joined all or none, and the earliest recomputed, which are all looked at."""
    given_ = problem(limit_mib, slow(latency_ms), blocks_of_two(2, saved_mib, sizes))
    best = min(
        (one for one in _every_plan(given_) if one.peak.total_bytes <= given_.memory_limit_bytes),
        key=lambda one: one.step_time_s,
        default=None,
    )
    if best is None:
        with pytest.raises(InfeasibleError):
            best_candidate(given_, 1)
        return
    found = best_candidate(given_, 1)
    assert found.peak.total_bytes <= given_.memory_limit_bytes
    assert found.bound_s <= best.step_time_s * (1 + 1e-9)
    assert found.step_time_s <= best.step_time_s * (1 + 2 * WORTH_TRYING)


def _every_plan(given_: Problem) -> list[Candidate]:
    names = [block.name for block in given_.model.blocks]
    found = []
    for units in ways(given_.model, NO_WISHES):
        desk = Desk(given_, units)
        menus = [desk.space.menus[menu].choices for menu in desk.space.menu_of]
        for choices in itertools.product(*menus):
            spread = desk.joined.spread(choices)
            found += [desk.candidate(spread, 1, recomputed=tuple(names[:count])) for count in range(len(names) + 1)]
    return found

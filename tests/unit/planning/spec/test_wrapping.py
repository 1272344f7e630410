"""Operators of a block that share one unit: which may, what that costs, and that the search finds it where it pays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.footprint import footprint
from lightning_osdp.planning.cost.step_time import communication_time
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, find_best_candidate, make_plan
from lightning_osdp.planning.search.plan_search import MIN_IMPROVEMENT, Candidate, PlanSearch
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorUse
from lightning_osdp.planning.spec.wrapping import WrappedModel, wrap_assignments
from lightning_osdp.report.explain import explain
from tests.support.small_models import MIB, RANKS, blocks_of_two, cluster, compute

ZDP = ShardingChoice((Mode.ZDP,))
GATHER_MS = 1.0
"""Milliseconds to gather a tensor of 4 MiB, without latency."""


def problem(
    limit_mib: float, links: Cluster, model: ModelProfile | None = None, wishes: SearchConstraints = UNCONSTRAINED
) -> Problem:
    model = model or blocks_of_two(2)
    return Problem(model, links, compute(model), int(limit_mib * MIB), constraints=wishes)


def cluster_with_latency(latency_ms: float = 5.0) -> Cluster:
    return cluster(gather_ms=GATHER_MS, latency_ms=latency_ms)


def test_wrap_assignments_wrap_identical_blocks_all_or_none() -> None:
    model = blocks_of_two(2)
    apart, together = wrap_assignments(model, UNCONSTRAINED)
    assert not any(apart)
    assert together == ("blocks.0", "blocks.0", "blocks.1", "blocks.1")


def test_wrap_assignments_do_not_tell_blocks_apart_by_what_may_be_tensor_parallel() -> None:
    model = blocks_of_two(3)
    use = TensorUse(role=TensorRole.LINEAR, degrees=(2,), input_bytes=1.0, output_bytes=1.0)
    first = model.operators[0].model_copy(update={"tensor": use})
    model = model.model_copy(update={"operators": (first, *model.operators[1:])})
    assert len(wrap_assignments(model, UNCONSTRAINED)) == 2


def test_wrap_assignments_leave_incompatible_operators_unwrapped() -> None:
    model = blocks_of_two(2)
    assert len(wrap_assignments(model, SearchConstraints(slice_granularity=2))) == 1
    assert len(wrap_assignments(model, SearchConstraints(slice_granularity={"*.up": 2}))) == 1, (
        "one that is left is alone"
    )
    assert len(wrap_assignments(model, SearchConstraints(slice_granularity={"*.up": 1}))) == 2
    for modes, count in (("zdp", 2), ("dp", 1), ({"*.up": "zdp2"}, 2), ({"*.up": "zdp2", "*": "zdp"}, 1)):
        assert len(wrap_assignments(model, SearchConstraints(modes=modes))) == count, modes
    pinned = tuple(block.model_copy(update={"recompute_blocker": "it has hooks"}) for block in model.blocks)
    assert len(wrap_assignments(model.model_copy(update={"blocks": pinned}), UNCONSTRAINED)) == 1
    for change in ({"trainable": False}, {"element_bytes": 2}):
        first = model.operators[0]
        other = first.model_copy(update={"parameters": (first.parameters[0].model_copy(update=change),)})
        changed = model.model_copy(update={"operators": (other, *model.operators[1:])})
        assert wrap_assignments(changed, UNCONSTRAINED)[-1][:2] == ("", ""), change
    twice = model.operators[1].model_copy(update={"calls": 2})
    changed = model.model_copy(update={"operators": (model.operators[0], twice, *model.operators[2:])})
    assert wrap_assignments(changed, UNCONSTRAINED)[-1][:2] == ("", "")


def test_wrapped_model_has_same_parameters_in_fewer_operators() -> None:
    model = blocks_of_two(2)
    joined = WrappedModel.from_assignment(model, ("", "", "blocks.1", "blocks.1"))
    assert [operator.name for operator in joined.model.operators] == ["blocks.0.up", "blocks.0.down", "blocks.1"]
    assert joined.model.num_parameters == model.num_parameters
    assert [block.operators for block in joined.model.blocks] == [(0, 1), (2,)]
    assert [moment.operator for moment in joined.model.moments] == [0, 1, 2, 2, 2, 2, 1, 0]
    choices = (ZDP, ShardingChoice(), ShardingChoice((Mode.ZDP2,)), ShardingChoice((Mode.ZDP2,)))
    assert joined.merge_choices(choices) == (ZDP, ShardingChoice(), ShardingChoice((Mode.ZDP2,)))
    assert joined.expand_choices(joined.merge_choices(choices)) == choices
    times = joined.merge_times(compute(model))
    assert [time.forward.per_sample for time in times.operators] == [1e-3, 1e-3, 2e-3]


@pytest.mark.parametrize("recomputed", [False, True])
def test_communication_time_of_wrapped_block_has_no_gather_for_recompute(recomputed: bool) -> None:
    model, links = blocks_of_two(1), cluster_with_latency(latency_ms=5.0)
    (block,) = WrappedModel.from_assignment(model, ("blocks.0", "blocks.0")).model.operators
    seconds = communication_time(block, ZDP, links, recomputed=recomputed).per_microbatch_s
    gather_s = (5 + 12 / 4 * GATHER_MS) * 1e-3  # 4 + 8 MiB at the latency of one
    reduce_s = (2 * 5 + 12 / 4 * GATHER_MS) * 1e-3
    assert seconds == pytest.approx(2 * gather_s + reduce_s)
    alone = sum(communication_time(one, ZDP, links, recomputed=recomputed).per_microbatch_s for one in model.operators)
    assert alone - seconds == pytest.approx((2 * 5 + (2 * 5 + 3 * GATHER_MS) * recomputed) * 1e-3)


def test_communication_time_of_wrapped_block_charges_extra_tensor_latency() -> None:
    model, links = blocks_of_two(1), cluster_with_latency()
    dear = links.link.all_gather.model_copy(update={"extra_tensor_latency_s": 1e-4})
    dearer = links.model_copy(update={"link": links.link.model_copy(update={"all_gather": dear})})
    (block,) = WrappedModel.from_assignment(model, ("blocks.0", "blocks.0")).model.operators
    more = (
        communication_time(block, ZDP, dearer).per_microbatch_s - communication_time(block, ZDP, links).per_microbatch_s
    )
    assert more == pytest.approx(2 * (RANKS - 1) * 1e-4), "two gathers of one more tensor each"


def test_footprint_of_wrapped_block_frees_parameters_as_gradients_are_made() -> None:
    (block,) = WrappedModel.from_assignment(blocks_of_two(1), ("blocks.0", "blocks.0")).model.operators
    found = footprint(block, ZDP, cluster_with_latency())
    assert found.unsharded_while_running == 12 * MIB
    # The last operator's gradient (8 MiB) comes while both are whole; then 8 MiB less are there, and a quarter of 8.
    assert found.transient == 8 * MIB
    other = WrappedModel.from_assignment(blocks_of_two(1, sizes=(8, 4)), ("blocks.0", "blocks.0")).model.operators[0]
    assert footprint(other, ZDP, cluster_with_latency()).transient == max(4, 8 - 4 + 1) * MIB


def test_wrapped_block_coalesces_reduction_of_small_gradients() -> None:
    model, links = blocks_of_two(1, sizes=(1, 2)), cluster_with_latency(latency_ms=5.0)
    (block,) = WrappedModel.from_assignment(model, ("blocks.0", "blocks.0")).model.operators
    gather_s = reduce_s = (5 + 3 / 4 * GATHER_MS) * 1e-3  # 1 + 2 MiB at the latency of one, either way
    assert communication_time(block, ZDP, links).per_microbatch_s == pytest.approx(2 * gather_s + reduce_s)
    for one_by_one in ({"prefetch_max_bytes": 3 * MIB}, {"nodes": 2, "devices_per_node": 2}, {"device": "cuda: some"}):
        other = links.model_copy(update=one_by_one)
        assert communication_time(block, ZDP, other).per_microbatch_s == pytest.approx(2 * gather_s + reduce_s + 5e-3)

    found = footprint(block, ZDP, links)
    assert found.unsharded_while_running == 3 * MIB
    # Each parameter is freed for its gradient; at the end their sums (3 / 4) stand beside what two ranks send (3 / 2).
    assert found.transient == (3 / 4 + 3 / 2) * MIB
    # On CUDA the first gradient and its part stay while the second is made, and no parameter is freed meanwhile.
    assert footprint(block, ZDP, links.model_copy(update={"device": "cuda: some"})).transient == 1.25 * (2 + 1) * MIB


def test_best_candidate_wraps_blocks_only_where_memory_allows() -> None:
    free = problem(1000, cluster_with_latency(), wishes=SearchConstraints(activation_checkpointing=False))
    needed = PlanSearch(free, wrap_assignments(free.model, UNCONSTRAINED)[1]).min_memory_plan(1).peak.total_bytes
    less = PlanSearch(free).min_memory_plan(1).peak.total_bytes
    assert less < needed
    roomy = find_best_candidate(replace(free, memory_limit_bytes=needed), 1)
    assert any(roomy.wrap_assignment)
    tight = find_best_candidate(replace(free, memory_limit_bytes=needed - 1), 1)
    assert not all(tight.wrap_assignment)
    with pytest.raises(InfeasibleError):
        find_best_candidate(replace(free, memory_limit_bytes=less - 1), 1)


def test_plan_with_wrapped_units_round_trips_explains_and_validates() -> None:
    free = problem(1000, cluster_with_latency(), blocks_of_two(4))
    limit = PlanSearch(free, wrap_assignments(free.model, UNCONSTRAINED)[1]).min_memory_plan(1).peak.total_bytes + MIB
    plan = make_plan(replace(free, memory_limit_bytes=limit), BatchSizePolicy(batch_size=1))
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


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@example(limit_mib=67, latency_ms=0.0, saved_mib=0, sizes=(11, 8))  # the best shards what the peak's moment can't tell
@given(
    limit_mib=st.integers(30, 260),
    latency_ms=st.sampled_from([0.0, 0.2, 5.0]),
    saved_mib=st.integers(0, 12),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_best_candidate_with_and_without_wrapping_matches_brute_force(
    limit_mib: int, latency_ms: float, saved_mib: int, sizes: tuple[int, int]
) -> None:
    """Brute force tries all plans in which alike blocks are joined all or none, and the earliest are recomputed."""
    given_ = problem(limit_mib, cluster_with_latency(latency_ms), blocks_of_two(2, saved_mib, sizes))
    best = min(
        (one for one in _every_plan(given_) if one.peak.total_bytes <= given_.memory_limit_bytes),
        key=lambda one: one.step_time_s,
        default=None,
    )
    if best is None:
        with pytest.raises(InfeasibleError):
            find_best_candidate(given_, 1)
        return
    found = find_best_candidate(given_, 1)
    assert found.peak.total_bytes <= given_.memory_limit_bytes
    assert found.lower_bound_s <= best.step_time_s * (1 + 1e-9)
    assert found.step_time_s <= best.step_time_s * (1 + 2 * MIN_IMPROVEMENT)


def _every_plan(given_: Problem) -> list[Candidate]:
    names = [block.name for block in given_.model.blocks]
    found = []
    for units in wrap_assignments(given_.model, UNCONSTRAINED):
        desk = PlanSearch(given_, units)
        menus = [desk.space.option_groups[menu].choices for menu in desk.space.group_of]
        for choices in itertools.product(*menus):
            spread = desk.wrapped_model.expand_choices(choices)
            found += [
                desk.evaluate_choices(spread, 1, recomputed=tuple(names[:count])) for count in range(len(names) + 1)
            ]
    return found

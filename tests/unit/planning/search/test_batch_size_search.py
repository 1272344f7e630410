"""Plans for hand-made numbers, where the best one can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.search.batch_size_search import (
    THROUGHPUT_TOLERANCE,
    BatchSizePolicy,
    Problem,
    _complete_searches,
    make_plan,
    no_deadline,
    pick_batch_size,
)
from lightning_osdp.planning.search.plan_search import MIN_IMPROVEMENT, Candidate
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, ComputeTimes, Link, OperatorTime
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    Moment,
    NonTrainingWork,
    Operator,
    ParameterInfo,
)
from lightning_osdp.planning.spec.plan import ExecutionPlan

MIB = 1 << 20
RANKS = 4


def operator(index: int, mebibytes: int = 4) -> Operator:
    """A matrix of ``mebibytes`` with Adam: states of 4 times that (parameter, gradient, two moments)."""
    parameter = ParameterInfo(
        name=f"op{index}.weight", shape=(mebibytes, MIB // 4), optimizer_bytes=2 * mebibytes * MIB
    )
    return Operator(name=f"op{index}", kind="Linear", parameters=(parameter,))


def model(count: int = 4, activations_per_sample: int = 0) -> ModelProfile:
    """``world_size`` equal operators in a row; all activations are alive where forward turns into backward."""
    kept = LinearInBatch(per_sample=activations_per_sample)
    forward = [Moment(phase="forward", operator=i, live=LinearInBatch()) for i in range(count)]
    turn = [Moment(phase="forward", operator=UNATTRIBUTED, live=kept)]
    backward = [Moment(phase="backward", operator=i, live=LinearInBatch()) for i in reversed(range(count))]
    operators = tuple(operator(i) for i in range(count))
    return ModelProfile(
        fingerprint="hand-made", operators=operators, moments=(*forward, *turn, *backward), batch_size=1
    )


def cluster(all_reduce: float = 1.0, all_gather: float = 1.0, reduce_scatter: float = 1.0) -> Cluster:
    """Collectives of a 4 MiB tensor take as many milliseconds on 4 ranks as given here; no latency."""

    def fit(milliseconds: float) -> CollectiveFit:
        return CollectiveFit(latency_s=0.0, s_per_byte=milliseconds * 1e-3 / (3 * MIB))

    link = Link(all_reduce=fit(all_reduce), all_gather=fit(all_gather), reduce_scatter=fit(reduce_scatter))
    return Cluster(devices_per_node=RANKS, device="cpu", backend="gloo", link=link)


def compute(count: int = 4, per_sample_s: float = 0.0, outside: LinearInBatch | None = None) -> ComputeTimes:
    """Every operator takes ``per_sample_s`` a sample; the optimizer is free."""
    one = OperatorTime(forward=LinearInBatch(per_sample=per_sample_s))
    rest = OperatorTime(forward=outside or LinearInBatch(fixed=1e-3))
    return ComputeTimes(operators=(one,) * count, unattributed=rest, optimizer_s_per_byte=0.0)


def plan_for(limit_mib: float, rule: BatchSizePolicy | None = None, **changes: object) -> ExecutionPlan:
    values = {"model": model(), "cluster": cluster(), "compute": compute(), "overhead_bytes": 0} | changes
    problem = Problem(memory_limit_bytes=int(limit_mib * MIB), **values)  # type: ignore[arg-type]
    return make_plan(problem, rule or BatchSizePolicy(batch_size=1))


def modes(plan: ExecutionPlan) -> list[Mode]:
    return [op.slices[0] for op in plan.operators]


def test_make_plan_leaves_memory_to_save_checkpoint() -> None:
    # Nothing sharded: 4 x 12 MiB between steps, and nothing becomes whole. One is: 3 x 12 + 3, and 12 beside it.
    between = NonTrainingWork(checkpoint_memory="gathered")
    plan = plan_for(64, non_training=between)
    assert modes(plan) == [Mode.DP] * 4
    assert plan.predicted.saving_memory_bytes == 48 * MIB
    # Without saving, 40 MiB are enough for states of 12 + 3 x 3, and what a step makes whole.
    assert plan_for(40).predicted.peak_memory_bytes <= 40 * MIB
    with pytest.raises(InfeasibleError, match=r"for saving a checkpoint \(.*save_format='sharded'\)"):
        plan_for(40, non_training=between)
    streamed = plan_for(40, non_training=NonTrainingWork(checkpoint_memory="streamed"))
    assert max(streamed.predicted.non_training_bytes.values()) <= streamed.predicted.max_memory_bytes <= 40 * MIB


def test_make_plan_with_ample_memory_replicates_all_operators() -> None:
    # Whole states of 4 operators: 4 x 16 MiB. dp: 1 ms each; zdp2: 2 ms; zdp: 3 ms.
    plan = plan_for(64)
    assert modes(plan) == [Mode.DP] * 4
    assert plan.predicted.communication_time_s == pytest.approx(4e-3)
    assert plan.predicted.step_time_s == pytest.approx(5e-3)
    assert plan.predicted.peak_memory_bytes == 64 * MIB


def test_make_plan_with_scarce_memory_shards_all_operators() -> None:
    # Everything sharded, in the last backward: states 4 x 3 MiB, gradients 3 x 1 + 1, gathered 4, its gradient 4.
    # The last operator runs backward right after its forward: zdp2 saves it a gather and costs no memory.
    plan = plan_for(24)
    assert modes(plan) == [Mode.ZDP, Mode.ZDP, Mode.ZDP, Mode.ZDP2]
    assert plan.predicted.peak_memory_bytes == 24 * MIB
    assert plan.predicted.communication_time_s == pytest.approx(11e-3)


def test_make_plan_with_medium_memory_replicates_where_most_time_is_saved() -> None:
    # zdp -> dp saves 2 ms for 12 MiB more of states; from 24 MiB, 40 admits one of them and 1 zdp2 (1 ms for 4 MiB).
    plan = plan_for(40)
    counts = {mode: modes(plan).count(mode) for mode in Mode}
    assert counts[Mode.DP] == 1
    assert counts[Mode.ZDP2] >= 1
    assert plan.predicted.peak_memory_bytes <= 40 * MIB
    best = plan.predicted.communication_time_s
    assert best < plan_for(30).predicted.communication_time_s


def test_make_plan_prefers_zdp2_where_all_reduce_is_slower_than_its_halves() -> None:
    plan = plan_for(64, cluster=cluster(all_reduce=3.0, all_gather=1.0, reduce_scatter=1.0))
    assert modes(plan) == [Mode.ZDP2] * 4


def test_make_plan_prefers_smaller_batch_size_with_higher_throughput() -> None:
    # 2 MiB of activations a sample. At batch size 1 all is replicated in 64 MiB; larger batches must shard, and
    # communication is so slow that what they save in fixed time is lost many times over.
    slow = cluster(all_reduce=1.0, all_gather=500.0, reduce_scatter=500.0)
    plan = plan_for(
        64,
        BatchSizePolicy(max_batch_size=32),
        model=model(activations_per_sample=2 * MIB),
        cluster=slow,
        compute=compute(outside=LinearInBatch(fixed=1e-3, per_sample=50e-3)),
    )
    sizes = [point.batch_size for point in plan.frontier]
    best = max(plan.frontier, key=lambda point: point.samples_per_s)
    assert max(sizes) > plan.batch_size
    assert plan.frontier[-1].samples_per_s < best.samples_per_s
    assert plan.batch_size <= best.batch_size
    assert set(modes(plan)) == {Mode.DP}


def test_make_plan_prefers_larger_batch_size_that_amortises_communication() -> None:
    plan = plan_for(
        64, BatchSizePolicy(max_batch_size=8), model=model(activations_per_sample=1), compute=compute(per_sample_s=1e-4)
    )
    assert plan.batch_size == 8


def test_make_plan_takes_smallest_of_equally_good_batch_sizes() -> None:
    free = cluster(0.0, 0.0, 0.0)
    plan = plan_for(
        64, BatchSizePolicy(max_batch_size=64), cluster=free, compute=compute(outside=LinearInBatch(per_sample=1e-3))
    )
    assert plan.batch_size == 1
    assert [point.batch_size for point in plan.frontier][-1] == 64


def test_make_plan_stops_where_min_memory_plan_does_not_fit() -> None:
    plan = plan_for(30, BatchSizePolicy(), model=model(activations_per_sample=8 * MIB))
    assert [point.batch_size for point in plan.frontier] == [1, 2]
    assert all(point.peak_memory_bytes <= 30 * MIB for point in plan.frontier)


def test_make_plan_reaches_global_batch_size_exactly() -> None:
    rule = BatchSizePolicy(global_batch_size=48)
    plan = plan_for(64, rule)
    assert plan.batch_size * plan.accumulate_grad_batches * RANKS == 48
    assert plan.global_batch_size == 48
    assert [point.batch_size for point in plan.frontier] == [1, 2, 3, 4, 6, 12]


def test_make_plan_rejects_unreachable_global_batch_size() -> None:
    with pytest.raises(ConfigurationError, match=r"nearest are 48 and 52$"):
        plan_for(64, BatchSizePolicy(global_batch_size=50))
    with pytest.raises(ConfigurationError, match="not a multiple of batch_size=5"):
        plan_for(64, BatchSizePolicy(global_batch_size=48, batch_size=5))


def test_make_plan_accumulation_communicates_shards_each_time_replicas_once() -> None:
    rule = BatchSizePolicy(batch_size=1, accumulation=3)
    assert plan_for(200, rule).predicted.communication_time_s == pytest.approx(4e-3)
    assert plan_for(25, rule).predicted.communication_time_s == pytest.approx(3 * 11e-3)


def test_infeasible_error_names_needed_bytes_and_largest_operator() -> None:
    big = model().model_copy(update={"operators": (operator(0), operator(1, 8), operator(2), operator(3))})
    with pytest.raises(InfeasibleError, match=r"at least 35 MiB per device, the limit is 20 MiB.*op1") as caught:
        plan_for(20, model=big)
    assert caught.value.needed_bytes == 35 * MIB
    assert caught.value.budget_bytes == 20 * MIB
    assert caught.value.largest == 1


def test_make_plan_counts_process_overhead_against_memory_limit() -> None:
    assert modes(plan_for(74, overhead_bytes=10 * MIB)) == [Mode.DP] * 4
    assert modes(plan_for(73, overhead_bytes=10 * MIB)) != [Mode.DP] * 4


def test_make_plan_keeps_unshardable_operators_replicated() -> None:
    pinned = tuple(
        op.model_copy(update={"replicated_reason": "used by the whole model"}) if i == 2 else op
        for i, op in enumerate(model().operators)
    )
    plan = plan_for(36, model=model().model_copy(update={"operators": pinned}))
    assert modes(plan)[2] == Mode.DP
    assert set(modes(plan)) - {Mode.DP}


def test_pick_batch_size_rejects_empty_list() -> None:
    with pytest.raises(ValueError, match="empty"):
        pick_batch_size([])


class StubPlanSearch:
    """Desks that know the best step time of each batch size, and count how many are searched to the end."""

    def __init__(self, best_s: Sequence[float]) -> None:
        self.best_s = best_s
        self.searched: list[int] = []

    def best_plan_below(self, seconds: float, batch_size: int, accumulation: int = 1) -> Candidate | None:
        self.searched.append(batch_size)
        best_s = self.best_s[batch_size - 1]
        return candidate_with_bound(batch_size, best_s, 0.0) if best_s < seconds else None


def candidate_with_bound(batch_size: int, step_s: float, bound_s: float) -> Candidate:
    """What a first look at a batch size gives."""
    return Candidate(batch_size, 1, (), (), step_s, 0.0, Peak("nowhere", 0, 0, 0, 0, 0, 0), RANKS, bound_s)


@given(st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(1.0, 1.1), st.floats(0.9, 1.0)), min_size=1, max_size=30))
def test_complete_searches_choice_is_as_good_as_searching_all_batch_sizes(
    sizes: list[tuple[float, float, float]],
) -> None:
    best_s = [(1 + index) * pace for index, (pace, _, _) in enumerate(sizes)]
    desks = StubPlanSearch(best_s)
    found = [
        candidate_with_bound(index + 1, best_s[index] * more, best_s[index] * less)
        for index, (_, more, less) in enumerate(sizes)
    ]
    chosen = pick_batch_size(_complete_searches(desks, found, no_deadline))  # type: ignore[arg-type]
    throughput = [(index + 1) * RANKS / seconds for index, seconds in enumerate(best_s)]
    enough = (1 - THROUGHPUT_TOLERANCE) * max(throughput)
    assert chosen.samples_per_s >= enough * (1 - 2 * MIN_IMPROVEMENT)
    assert all(other < enough * (1 + 2 * MIN_IMPROVEMENT) for other in throughput[: chosen.batch_size - 1])


@pytest.mark.parametrize("looks", [0, 1, 2, 9])
def test_complete_searches_past_deadline_keeps_remaining_candidates(looks: int) -> None:
    desks = StubPlanSearch([1.0, 1.8, 2.6])
    found = [candidate_with_bound(index + 1, best_s * 1.1, best_s * 0.9) for index, best_s in enumerate(desks.best_s)]

    def late() -> bool:
        return len(desks.searched) >= looks

    finished = _complete_searches(desks, found, late)  # type: ignore[arg-type]
    assert len(desks.searched) <= looks
    assert len(finished) == len(found)
    assert all(after.step_time_s <= before.step_time_s for before, after in zip(found, finished, strict=True))
    assert (finished == found) == (looks == 0)


def test_complete_searches_skips_batch_sizes_that_cannot_change_choice() -> None:
    """Larger ones that may be better by less than what is worth a larger batch."""
    paces = [1.02, 1.0, *(1 - 1e-4 * index for index in range(20))]
    best_s = [(1 + index) * pace for index, pace in enumerate(paces)]
    desks = StubPlanSearch(best_s)
    found = [candidate_with_bound(index + 1, 1.001 * seconds, 0.999 * seconds) for index, seconds in enumerate(best_s)]
    chosen = pick_batch_size(_complete_searches(desks, found, no_deadline))  # type: ignore[arg-type]
    assert chosen.batch_size == 2
    assert desks.searched == [2]


def test_plan_json_round_trip_is_lossless() -> None:
    plan = plan_for(40)
    assert ExecutionPlan.from_json(plan.to_json()) == plan


def test_policy_restricted_to_one_batch_size_refuses_others() -> None:
    for policy in (BatchSizePolicy(accumulation=2), BatchSizePolicy(batch_size=5, accumulation=2)):
        assert list(policy.restricted_to(5).candidates(2)) == [(5, 2)]
        assert policy.restricted_to(0) == policy
    assert list(BatchSizePolicy(global_batch_size=40).restricted_to(5).candidates(2)) == [(5, 4)]
    with pytest.raises(ConfigurationError, match="batch_size=6 can't be: training_step works with 5 samples alone"):
        BatchSizePolicy(batch_size=6).restricted_to(5)

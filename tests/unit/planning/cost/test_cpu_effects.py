"""Freed tensors that stay in the heap: planned with the memory that they take and the time that they save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.cpu_effects import (
    AMPLE_HEAP_GROWTH,
    HEAP_GROWTH,
    HEAP_LIMIT_MARGIN,
    MAX_MMAP_THRESHOLD,
    NO_RETENTION,
    HeapModel,
    max_retained_batch_size,
)
from lightning_osdp.planning.cost.memory_timeline import Peak, Timeline
from lightning_osdp.planning.cost.peak_text import explain_peak
from lightning_osdp.planning.cost.run_correction import Correction, MeasuredStep, exceeds_prediction, update_correction
from lightning_osdp.planning.cost.trial_correction import Trial, plan_key, predict_trial
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, WrapPolicySearch, make_plan
from lightning_osdp.planning.search.plan_selection import (
    MIN_GAIN_RETAIN,
    CachedPlan,
    find_cached_plan,
    repredict,
    request_key,
    select_plan,
    variant_policy,
)
from lightning_osdp.planning.spec.batch_sizes import MAX_BATCH_SIZE
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice
from lightning_osdp.planning.spec.cluster import ComputeTimes
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import LinearInBatch, NonTrainingWork, OptimizerStep
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import PeakMoment
from lightning_osdp.report.diff import diff
from lightning_osdp.report.explain import explain
from lightning_osdp.report.tables import plan_table
from tests.support.small_models import MIB, RANKS, blocks_of_one, cluster, compute

MODEL = blocks_of_one(3, 2)
ROOMY = 1 << 10
USE = HeapModel(0.5, LinearInBatch(fixed=2 * MIB, per_sample=2 * MIB))
FREED = ("gradients", "gathered", "transient", "activations")
ONE, UP_TO_FOUR = BatchSizePolicy(batch_size=1), BatchSizePolicy(max_batch_size=4)


def scaled(times: ComputeTimes, share: float) -> ComputeTimes:
    return times.map_lines(lambda line: line.scale(share))


def problem(limit_mib: float = ROOMY, share: float = 0.75) -> Problem:
    """Compute takes ``share`` where freed tensors stay in the heap."""
    times = compute(MODEL)
    return Problem(MODEL, cluster(), times, int(limit_mib * MIB), compute_with_retained_heap=scaled(times, share))


def trial_of(plan: ExecutionPlan, times: ComputeTimes, factor: float = 1.0) -> Trial:
    expected = predict_trial(MODEL, times, plan.cluster, plan, plan.batch_size)
    return expected.model_copy(update={"measured_s": factor * expected.measured_s, "plan": plan.without_alternatives()})


def freed_bytes(peak: PeakMoment) -> int:
    return sum(getattr(peak, name) for name in FREED)


def test_timeline_retained_heap_grows_within_step_and_not_between_steps() -> None:
    between = NonTrainingWork(checkpoint_memory="streamed", evaluation_batch_size=2)
    split = ShardingChoice((Mode.ZDP, Mode.DP), split_dim=1)
    for choices in ([ShardingChoice((mode,)) for mode in WEIGHT_MODES], [split, split, ShardingChoice((Mode.ZDP,))]):
        for accumulation, again in ((1, ()), (2, ("blocks.0",))):
            asked = (choices, 3, accumulation, again)
            usual, grown = (Timeline(MODEL, cluster(), 7 * MIB, between, use) for use in (NO_RETENTION, USE))
            before, after = usual.curves(*asked), grown.curves(*asked)
            freed = sum(before[name] for name in FREED)
            assert np.allclose(after["heap"], 0.5 * freed + 8 * MIB)
            assert all(np.allclose(after[name], before[name]) for name in before if name != "heap")
            assert grown.peak(*asked).total_bytes == round(max(sum(after.values())))
            for name in ("saving_bytes", "evaluation_bytes"):
                assert getattr(grown.peak(*asked), name) == getattr(usual.peak(*asked), name)


def test_timeline_explain_names_retained_heap_beside_process_overhead() -> None:
    choices = [ShardingChoice((Mode.DP,))] * 3
    text = explain_peak(Timeline(MODEL, cluster(), 7 * MIB, heap=USE).peak(choices, 3))
    assert "beside 7.0 MiB of the process before the model and 26.5 MiB of freed tensors that stay in the heap" in text


def test_select_plan_with_ample_memory_retains_heap_and_explains_it() -> None:
    plan = select_plan(problem(), ONE, [])
    usual = make_plan(problem(), ONE)
    assert (plan.retain_freed_memory, usual.retain_freed_memory) == (True, False)
    assert plan.peak is not None
    # the largest gradient is of 4 MiB, the largest activation of 2 a sample
    freed = freed_bytes(plan.peak)
    assert plan.predicted.heap_headroom_bytes == 6 * MIB
    assert plan.peak.heap == pytest.approx(AMPLE_HEAP_GROWTH * freed + 6 * MIB)
    assert plan.predicted.peak_memory_bytes == usual.predicted.peak_memory_bytes + plan.peak.heap
    assert plan.predicted.step_time_s < usual.predicted.step_time_s
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    assert "Freed memory is retained in the heap" in explain(plan)
    assert "Freed memory" not in explain(usual)
    assert "freed tensors: are handed back to the system -> stay in the heap" in diff(usual, plan)
    assert plan_key(plan) != plan_key(plan.model_copy(update={"retain_freed_memory": False}))


def test_plan_table_says_when_freed_tensors_are_retained() -> None:
    from rich.console import Console

    for plan, said in ((select_plan(problem(), ONE, []), True), (make_plan(problem(), ONE), False)):
        console = Console(record=True, width=200)
        console.print(plan_table(plan))
        assert ("freed memory" in console.export_text()) == said


def test_select_plan_releases_heap_where_retention_does_not_fit() -> None:
    usual, grown = (make_plan(each, ONE) for each in (problem(), problem().with_retained_heap()))
    assert grown.peak is not None
    least_heap = grown.peak.heap - (AMPLE_HEAP_GROWTH - HEAP_GROWTH) * freed_bytes(grown.peak)
    grown_mib = (usual.predicted.peak_memory_bytes + least_heap) / MIB
    assert least_heap > 5 * MIB
    for limit_mib, kept in ((grown_mib - 0.1, False), (grown_mib + 0.1, True)):
        plan = select_plan(problem(limit_mib, share=0.9), ONE, [])  # it does not pay to shard for that
        assert plan.retain_freed_memory == kept
        assert all(op.slices == (Mode.DP,) for op in plan.operators)


def test_retained_heap_is_predicted_to_leave_its_margin_of_limit_free() -> None:
    """The heap is kept within it: W&S under bf16-mixed was predicted 8.7 % too high."""
    roomy = select_plan(problem(), ONE, [])
    peak = roomy.predicted.peak_memory_bytes
    for limit, expected in ((peak + 2, (1 - HEAP_LIMIT_MARGIN) * (peak + 2)), (peak / (1 - HEAP_LIMIT_MARGIN), peak)):
        plan = select_plan(problem(limit / MIB, share=0.9), ONE, [])
        assert plan.retain_freed_memory
        assert plan.predicted.peak_memory_bytes == pytest.approx(expected, abs=1)
        assert plan.frontier[0].peak_memory_bytes == plan.predicted.peak_memory_bytes
        assert plan.peak is not None
        assert roomy.peak is not None
        assert plan.peak.heap == pytest.approx(roomy.peak.heap - (peak - expected), abs=1)
        assert plan.predicted.heap_headroom_bytes == roomy.predicted.heap_headroom_bytes


def test_peak_with_heap_within_limit_leaves_live_tensors_and_what_does_not_fit() -> None:
    parts = {"states": 50.0, "gradients": 0.0, "gathered": 0.0, "transient": 0.0, "activations": 40.0, "overhead": 6.0}
    peak = Peak("", heap=3.0, **parts)
    assert peak.with_heap_within(100).heap == 2.0
    assert replace(peak, activations=43.0, heap=0.0).with_heap_within(100).total_bytes == 99
    assert replace(peak, heap=0.0).with_heap_within(1000).total_bytes == 96
    assert peak.with_heap_within(98) == peak


@pytest.mark.parametrize(
    ("limit", "heap"), [(110, 0.98 * 110 - 96), (1000, 3.0 + 40 * (AMPLE_HEAP_GROWTH - HEAP_GROWTH))]
)
def test_peak_with_heap_within_limit_takes_the_room_that_there_is(limit: int, heap: float) -> None:
    parts = {"states": 50.0, "gradients": 10.0, "gathered": 5.0, "transient": 5.0, "activations": 20.0, "overhead": 6.0}
    assert Peak("", heap=3.0, **parts).with_heap_within(limit).heap == pytest.approx(heap)


def test_select_plan_with_little_time_searches_first_what_promised_most() -> None:
    retained = select_plan(problem(), ONE, [])
    times = problem().compute_with_retained_heap
    assert retained.retain_freed_memory
    assert times is not None
    tried = [trial_of(retained, times), trial_of(make_plan(problem(), ONE), problem().compute)]
    smaller = problem(retained.predicted.peak_memory_bytes / MIB - 0.5)  # the plan that was tried does not fit
    for trials, expected in ((tried, True), ([], False)):
        plan = select_plan(smaller, ONE, trials, deadline_reached=lambda: True)
        assert plan.retain_freed_memory == expected
        assert plan.predicted.peak_memory_bytes < retained.predicted.peak_memory_bytes


@pytest.mark.parametrize("gain", [0.5 * MIN_GAIN_RETAIN, 2 * MIN_GAIN_RETAIN])
def test_select_plan_retains_heap_only_above_min_gain(gain: float) -> None:
    usual = make_plan(problem(), ONE).predicted
    share = 1 - usual.step_time_s * (1 - 1 / (1 + gain)) / usual.compute_time_s
    assert select_plan(problem(share=share), ONE, []).retain_freed_memory == (gain > MIN_GAIN_RETAIN)


def test_select_plan_without_retained_heap_compute_does_not_retain() -> None:
    unknown = replace(problem(), compute_with_retained_heap=None)
    assert unknown.with_retained_heap() is unknown
    assert select_plan(unknown, ONE, []) == make_plan(unknown, ONE)


@pytest.mark.slow
@settings(max_examples=40)
@given(limit_mib=st.integers(16, 200), share=st.floats(0.3, 1.2))
def test_select_plan_takes_better_of_retained_and_released_heap(limit_mib: int, share: float) -> None:
    whole = problem(limit_mib, share)
    try:
        usual = make_plan(whole, UP_TO_FOUR)
    except InfeasibleError:
        reject()
    plan = select_plan(whole, UP_TO_FOUR, [])
    assert plan.predicted.max_memory_bytes <= limit_mib * MIB
    try:
        kept = make_plan(whole.with_retained_heap(), UP_TO_FOUR)
    except InfeasibleError:
        assert plan == usual
        return
    pays = kept.predicted.samples_per_s > usual.predicted.samples_per_s * (1 + MIN_GAIN_RETAIN)
    assert plan == (kept if pays else usual)


def test_select_plan_does_not_retain_heap_above_max_retained_batch_size() -> None:
    whole = replace(problem(), max_retained_batch_size=2)
    assert select_plan(problem(), BatchSizePolicy(batch_size=4), []).retain_freed_memory
    assert not select_plan(whole, BatchSizePolicy(batch_size=4), []).retain_freed_memory
    kept = select_plan(whole, BatchSizePolicy(batch_size=2), [])
    assert kept.retain_freed_memory
    plan = select_plan(whole, UP_TO_FOUR, [])
    assert plan.batch_size <= 2 or not plan.retain_freed_memory
    only_kept = select_plan(replace(whole, compute_with_retained_heap=scaled(whole.compute, 0.01)), UP_TO_FOUR, [])
    assert (only_kept.retain_freed_memory, only_kept.batch_size) == (True, 2)
    assert "The largest allowed is 2 (by freed memory that is retained)" in explain(only_kept)
    desks, larger = WrapPolicySearch(whole.with_retained_heap()), kept.model_copy(update={"batch_size": 4})
    assert repredict(desks, UP_TO_FOUR, kept, kept) is not None
    assert repredict(desks, UP_TO_FOUR, larger, kept) is None
    roomy = replace(whole, max_retained_batch_size=MAX_BATCH_SIZE + 1).with_retained_heap()
    assert max(variant_policy(roomy, BatchSizePolicy()).candidates(RANKS)) == (MAX_BATCH_SIZE, 1)


@pytest.mark.parametrize("per_sample", [1, 4 * MIB, MAX_MMAP_THRESHOLD - 1, MAX_MMAP_THRESHOLD])
def test_max_retained_batch_size_keeps_tensors_below_max_mmap_threshold(per_sample: int) -> None:
    made = MODEL.moments[1].model_copy(update={"live": LinearInBatch(per_sample=per_sample)})
    model = MODEL.model_copy(update={"moments": (made.model_copy(update={"live": LinearInBatch()}), made)})
    largest = max_retained_batch_size(model)
    assert largest * per_sample < MAX_MMAP_THRESHOLD <= (largest + 1) * per_sample
    assert max_retained_batch_size(MODEL.model_copy(update={"moments": (made, made)})) == float("inf")


def test_select_plan_with_retained_heap_excludes_optimizer_in_backward() -> None:
    model = MODEL.model_copy(update={"optimizer_step": OptimizerStep(per_parameter=True)})
    whole = replace(problem(), model=model, constraints=SearchConstraints(update_in_backward=True))
    plan = select_plan(whole, ONE, [])
    assert (plan.retain_freed_memory, plan.update_in_backward) == (True, False)


def test_select_plan_keeps_trialled_heap_variant_unless_other_gains_more() -> None:
    whole, times = problem(share=0.9), compute(MODEL)
    kept = select_plan(whole, ONE, [])
    assert kept.retain_freed_memory
    assert whole.compute_with_retained_heap is not None
    quick = trial_of(kept, whole.compute_with_retained_heap)
    assert select_plan(whole, ONE, [quick]).retain_freed_memory
    slower = trial_of(kept, whole.compute_with_retained_heap, factor=1.5)
    assert not select_plan(whole, ONE, [slower]).retain_freed_memory
    usual = trial_of(make_plan(whole, ONE), times)
    assert not select_plan(whole, ONE, [usual], min_gain=1.0).retain_freed_memory
    assert select_plan(whole, ONE, [usual], min_gain=0.01).retain_freed_memory


def test_find_cached_plan_repredicts_with_its_heap_retention() -> None:
    whole = problem()
    question = request_key(ONE, whole.constraints, NonTrainingWork(), Correction())
    plan = select_plan(whole, ONE, [])
    before = [CachedPlan(request_key=question, plan=plan.without_alternatives())]
    again = find_cached_plan(whole, ONE, question, before, [])
    assert again is not None
    assert (again.retain_freed_memory, again.predicted) == (True, plan.predicted)
    assert repredict(WrapPolicySearch(whole), ONE, plan, plan) is None
    assert find_cached_plan(replace(whole, compute_with_retained_heap=None), ONE, question, before, []) is None


def test_update_correction_ignores_memory_of_run_with_retained_heap() -> None:
    plan = select_plan(problem(), ONE, [])
    took = MeasuredStep(plan.predicted.step_time_s, None, plan.predicted.peak_memory_bytes + 50 * MIB)
    assert update_correction(Correction(memory_bytes=3), plan, took).memory_bytes == 3
    assert not exceeds_prediction(plan, took.peak_memory_bytes, 0.05)
    assert exceeds_prediction(plan, plan.memory_limit_bytes + 1, 0.05)
    usual = make_plan(problem(), ONE)
    assert update_correction(Correction(memory_bytes=3), usual, took).memory_bytes > 50 * MIB
    assert exceeds_prediction(usual, took.peak_memory_bytes, 0.05)

"""Freed tensors that stay in the heap: planned with the memory that they take and the time that they save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.calibration import Correction, MeasuredStep, drifted, learn
from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.cluster import ComputeTimes
from lightning_osdp.planning.compare import diff
from lightning_osdp.planning.explain import explain
from lightning_osdp.planning.heap import HEAP_GROWTH, MOST_KEPT_BYTES, NO_HEAP, HeapUse, kept_batch_size
from lightning_osdp.planning.operators import BetweenSteps, Line, OptimizerStep
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import Rehearsal, decided, foreseen
from lightning_osdp.planning.schedule import BatchRule, Desks, Problem, make_plan
from lightning_osdp.planning.settled import WORTH_KEEPING, Settled, asked, predicted_now, settled, settled_before
from lightning_osdp.planning.timeline import Timeline
from lightning_osdp.planning.wishes import Wishes
from lightning_osdp.report import plan_table
from tests.planning.small import MIB, blocks_of_one, cluster, compute

MODEL = blocks_of_one(3, 2)
ROOMY = 1 << 10
USE = HeapUse(0.5, Line(fixed=2 * MIB, per_sample=2 * MIB))
FREED = ("gradients", "gathered", "transient", "activations")
ONE, UP_TO_FOUR = BatchRule(batch_size=1), BatchRule(max_batch_size=4)


def scaled(times: ComputeTimes, share: float) -> ComputeTimes:
    return times.changed(lambda line: line.times(share))


def problem(limit_mib: float = ROOMY, share: float = 0.75) -> Problem:
    """Compute takes ``share`` where freed tensors stay in the heap."""
    times = compute(MODEL)
    return Problem(MODEL, cluster(), times, int(limit_mib * MIB), kept_compute=scaled(times, share))


def rehearsed(plan: ExecutionPlan, times: ComputeTimes, factor: float = 1.0) -> Rehearsal:
    expected = foreseen(MODEL, times, plan.cluster, plan, plan.batch_size)
    return expected.model_copy(update={"took_s": factor * expected.took_s, "plan": plan.without_reasons()})


def test_a_heap_is_larger_than_what_is_freed_within_a_step_and_nothing_is_kept_between() -> None:
    between = BetweenSteps(saving="streamed", evaluation_batch_size=2)
    split = Choice((Mode.ZDP, Mode.DP), split_dim=1)
    for choices in ([Choice((mode,)) for mode in Mode], [split, split, Choice((Mode.ZDP,))]):
        for accumulation, again in ((1, ()), (2, ("blocks.0",))):
            asked = (choices, 3, accumulation, again)
            usual, grown = (Timeline(MODEL, cluster(), 7 * MIB, between, use) for use in (NO_HEAP, USE))
            before, after = usual.curves(*asked), grown.curves(*asked)
            freed = sum(before[name] for name in FREED)
            assert np.allclose(after["heap"], 0.5 * freed + 8 * MIB)
            assert all(np.allclose(after[name], before[name]) for name in before if name != "heap")
            assert grown.peak(*asked).total_bytes == round(max(sum(after.values())))
            for name in ("saving_bytes", "evaluation_bytes"):
                assert getattr(grown.peak(*asked), name) == getattr(usual.peak(*asked), name)


def test_a_heap_is_named_beside_the_model() -> None:
    choices = [Choice((Mode.DP,))] * 3
    text = Timeline(MODEL, cluster(), 7 * MIB, heap=USE).explain(choices, 3)
    assert "beside 7.0 MiB of the process before the model and 26.5 MiB of freed tensors that stay in the heap" in text


def test_where_there_is_room_freed_tensors_stay_and_the_plan_says_so() -> None:
    plan = settled(problem(), ONE, [])
    usual = make_plan(problem(), ONE)
    assert (plan.keep_heap, usual.keep_heap) == (True, False)
    assert plan.peak is not None
    # the largest gradient is of 4 MiB, the largest activation of 2 a sample
    freed = plan.peak.gradients + plan.peak.gathered + plan.peak.transient + plan.peak.activations
    assert plan.predicted.heap_spare_bytes == 6 * MIB
    assert plan.peak.heap == pytest.approx(HEAP_GROWTH * freed + 6 * MIB)
    assert plan.predicted.peak_memory_bytes == usual.predicted.peak_memory_bytes + plan.peak.heap
    assert plan.predicted.step_time_s < usual.predicted.step_time_s
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    assert "Freed tensors stay in the heap" in explain(plan)
    assert "Freed tensors" not in explain(usual)
    assert "freed tensors: are handed back to the system -> stay in the heap" in diff(usual, plan)
    assert decided(plan) != decided(plan.model_copy(update={"keep_heap": False}))


def test_the_table_says_that_freed_tensors_stay() -> None:
    from rich.console import Console

    for plan, said in ((settled(problem(), ONE, []), True), (make_plan(problem(), ONE), False)):
        console = Console(record=True, width=200)
        console.print(plan_table(plan))
        assert ("freed tensors" in console.export_text()) == said


def test_where_there_is_no_room_they_are_handed_back() -> None:
    needed_mib, grown_mib = (
        make_plan(each, ONE).predicted.peak_memory_bytes / MIB for each in (problem(), problem().keeping_heap())
    )
    assert grown_mib > needed_mib + 5
    for limit_mib, kept in ((grown_mib - 0.1, False), (grown_mib + 0.1, True)):
        plan = settled(problem(limit_mib, share=0.9), ONE, [])  # it does not pay to shard for that
        assert plan.keep_heap == kept
        assert all(op.slices == (Mode.DP,) for op in plan.operators)


@pytest.mark.parametrize("gain", [0.5 * WORTH_KEEPING, 2 * WORTH_KEEPING])
def test_it_has_to_pay(gain: float) -> None:
    usual = make_plan(problem(), ONE).predicted
    share = 1 - usual.step_time_s * (1 - 1 / (1 + gain)) / usual.compute_time_s
    assert settled(problem(share=share), ONE, []).keep_heap == (gain > WORTH_KEEPING)


def test_where_nobody_has_seen_how_far_the_heap_grows_nothing_stays() -> None:
    unknown = replace(problem(), kept_compute=None)
    assert unknown.keeping_heap() is unknown
    assert settled(unknown, ONE, []) == make_plan(unknown, ONE)


@given(limit_mib=st.integers(16, 200), share=st.floats(0.3, 1.2))
def test_the_better_of_both_is_found_and_it_fits(limit_mib: int, share: float) -> None:
    whole = problem(limit_mib, share)
    try:
        usual = make_plan(whole, UP_TO_FOUR)
    except InfeasibleError:
        reject()
    plan = settled(whole, UP_TO_FOUR, [])
    assert plan.predicted.most_memory_bytes <= limit_mib * MIB
    try:
        kept = make_plan(whole.keeping_heap(), UP_TO_FOUR)
    except InfeasibleError:
        assert plan == usual
        return
    pays = kept.predicted.samples_per_s > usual.predicted.samples_per_s * (1 + WORTH_KEEPING)
    assert plan == (kept if pays else usual)


def test_of_batches_larger_than_was_looked_at_nothing_stays() -> None:
    whole = replace(problem(), kept_batch_size=2)
    assert settled(problem(), BatchRule(batch_size=4), []).keep_heap
    assert not settled(whole, BatchRule(batch_size=4), []).keep_heap
    kept = settled(whole, BatchRule(batch_size=2), [])
    assert kept.keep_heap
    plan = settled(whole, UP_TO_FOUR, [])
    assert plan.batch_size <= 2 or not plan.keep_heap
    only_kept = settled(replace(whole, kept_compute=scaled(whole.compute, 0.01)), UP_TO_FOUR, [])
    assert (only_kept.keep_heap, only_kept.batch_size) == (True, 2)
    assert "The largest tried where freed tensors stay in the heap is 2" in explain(only_kept)
    desks, larger = Desks(whole.keeping_heap()), kept.model_copy(update={"batch_size": 4})
    assert predicted_now(desks, UP_TO_FOUR, kept, kept) is not None
    assert predicted_now(desks, UP_TO_FOUR, larger, kept) is None


@pytest.mark.parametrize("per_sample", [1, 4 * MIB, MOST_KEPT_BYTES - 1, MOST_KEPT_BYTES])
def test_a_batch_whose_activations_are_too_large_for_the_heap_does_not_count_on_it(per_sample: int) -> None:
    made = MODEL.moments[1].model_copy(update={"live": Line(per_sample=per_sample)})
    model = MODEL.model_copy(update={"moments": (made.model_copy(update={"live": Line()}), made)})
    largest = kept_batch_size(model)
    assert largest * per_sample < MOST_KEPT_BYTES <= (largest + 1) * per_sample
    assert kept_batch_size(MODEL.model_copy(update={"moments": (made, made)})) == float("inf")


def test_parameters_are_not_updated_in_the_backward_pass_of_a_plan_that_keeps_freed_tensors() -> None:
    model = MODEL.model_copy(update={"optimizer_step": OptimizerStep(separable=True)})
    whole = replace(problem(), model=model, wishes=Wishes(update_in_backward=True))
    plan = settled(whole, ONE, [])
    assert (plan.keep_heap, plan.update_in_backward) == (True, False)


def test_a_rehearsed_plan_stays_unless_the_other_promises_more() -> None:
    whole, times = problem(share=0.9), compute(MODEL)
    kept = settled(whole, ONE, [])
    assert kept.keep_heap
    assert whole.kept_compute is not None
    quick = rehearsed(kept, whole.kept_compute)
    assert settled(whole, ONE, [quick]).keep_heap
    slower = rehearsed(kept, whole.kept_compute, factor=1.5)
    assert not settled(whole, ONE, [slower]).keep_heap
    usual = rehearsed(make_plan(whole, ONE), times)
    assert not settled(whole, ONE, [usual], gain=1.0).keep_heap
    assert settled(whole, ONE, [usual], gain=0.01).keep_heap


def test_an_earlier_plan_is_predicted_with_its_own_way() -> None:
    whole = problem()
    question = asked(ONE, whole.wishes, BetweenSteps(), Correction())
    plan = settled(whole, ONE, [])
    before = [Settled(asked=question, plan=plan.without_reasons())]
    again = settled_before(whole, ONE, question, before, [])
    assert again is not None
    assert (again.keep_heap, again.predicted) == (True, plan.predicted)
    assert predicted_now(Desks(whole), ONE, plan, plan) is None
    assert settled_before(replace(whole, kept_compute=None), ONE, question, before, []) is None


def test_what_a_run_with_a_grown_heap_takes_says_nothing_of_others() -> None:
    plan = settled(problem(), ONE, [])
    took = MeasuredStep(plan.predicted.step_time_s, None, plan.predicted.peak_memory_bytes + 50 * MIB)
    assert learn(Correction(memory_bytes=3), plan, took).memory_bytes == 3
    assert not drifted(plan, took.peak_memory_bytes, 0.05)
    assert drifted(plan, plan.memory_limit_bytes + 1, 0.05)
    usual = make_plan(problem(), ONE)
    assert learn(Correction(memory_bytes=3), usual, took).memory_bytes > 50 * MIB
    assert drifted(usual, took.peak_memory_bytes, 0.05)

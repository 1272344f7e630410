"""Trials before the search: the module stays as it was, and times are those of the whole step."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_osdp.autotune import calibration, startup_budget, trial_step, trials
from lightning_osdp.autotune.calibration import Calibration, replicated_plan, run_calibration_trials
from lightning_osdp.autotune.ranks import RankGroup, current_cluster
from lightning_osdp.autotune.trial_step import StepTiming
from lightning_osdp.backend.cpu.malloc import HEAP, configure_cpu_allocator
from lightning_osdp.backend.memory import GROWTH_BYTES, growth_reserve
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.trial_correction import passes_peak_bytes, training_peak_bytes, trial_peak_bytes
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.tracing.stand_ins import lazy_clone, lazy_clone_bytes
from tests.support.leaks import leaked_parameter_bytes
from tests.support.models import some_cluster
from tests.support.ranks import run_ranks
from tests.support.small_models import compute_s
from tests.support.traced_models import trace
from tests.support.trials import BATCH, CPU, ROOM, Module, all_ranks, make_trial_context, make_trial_setup


def run_trials(
    rank: int, ranks: int, means: dict[int, float] | None, room_bytes: int, fails: bool
) -> tuple[bool, ComputeTimes, ComputeTimes, list[str]]:
    """Whether the module is as it was, times before and after, and warnings."""
    torch.manual_seed(1)
    module = Module(fails)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    everyone: list[Any] = [parts] * ranks
    dist.all_gather_object(everyone, parts)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    steps, random = module.steps, torch.get_rng_state()
    if means is not None:
        run = trial_step._time_repeats

        def given(steps: Any, *arguments: Any, **named: Any) -> list[StepTiming]:
            run(steps, *arguments, **named)
            return [StepTiming(means[len(steps)], 0.25, means[len(steps)] / 4)] * len(steps)

        trial_step._time_repeats = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OSDPWarning)
        found = run_calibration_trials(make_trial_setup(module, traced, None, lambda: room_bytes), everyone[0])
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same &= all(parameter.grad is None for parameter in module.parameters()) and module._trainer is None
    same &= module.steps == steps and torch.equal(random, torch.get_rng_state())
    messages = [str(one.message) for one in caught if issubclass(one.category, OSDPWarning)]
    return same, everyone[0], found.compute, messages


def test_calibration_trials_keep_module_unchanged_and_scale_compute_to_step() -> None:
    # One second for the plain step at both sizes.
    first, second = run_ranks(run_trials, 2, {2: 1.0, 1: 2.0}, ROOM, False)
    assert first[1:] == second[1:]
    for same, parts, times, messages in (first, second):
        assert same
        assert not messages
        limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
        assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)


def test_calibration_trials_skip_steps_that_take_too_long() -> None:
    for same, parts, times, messages in run_ranks(run_trials, 2, {2: startup_budget.MAX_TRIAL_S}, ROOM, False):
        assert same
        assert not messages
        assert times == parts


def run_heap_trials(
    rank: int, ranks: int, room_bytes: int, left_s: float
) -> tuple[bool, ComputeTimes, ComputeTimes | None]:
    """Whether the module is as it was and freed tensors are handed back, times, and what there is where they stay."""
    configure_cpu_allocator()
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    everyone: list[Any] = [compute.measure_compute(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(everyone, everyone[rank])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    setup = make_trial_setup(module, traced, None, lambda: room_bytes, lambda: left_s)
    found = run_calibration_trials(setup, everyone[0])
    kept = found.compute_with_retained_heap
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    return same and not HEAP.retains and not leaked_parameter_bytes(module), found.compute, kept


def test_heap_trial_times_unsharded_step_with_retained_heap() -> None:
    for same, times, kept in run_ranks(run_heap_trials, 2, ROOM, math.inf):
        assert same
        assert kept is not None
        assert 0 < compute_s(kept, 8) <= compute_s(times, 8)


def test_heap_trial_without_memory_for_heap_growth_gives_no_result() -> None:
    room = trial_memory_bytes(2)  # for the copy, not for training
    for left_s in (math.inf, startup_budget.HEAP_TRIAL_RESERVE_S):
        for same, _, kept in run_ranks(run_heap_trials, 2, room, left_s):
            assert same
            assert kept is None


def test_heap_trial_skipped_for_time_saves_the_time_of_new_pages() -> None:
    for same, times, kept in run_ranks(run_heap_trials, 2, ROOM, startup_budget.HEAP_TRIAL_RESERVE_S):
        assert same
        assert kept is not None
        assert all(0 < compute_s(kept, size) <= compute_s(times, size) for size in (2, 8))


def test_filling_a_tensor_again_needs_no_new_pages() -> None:
    configure_cpu_allocator()
    HEAP.release()  # what other tests have left free in the heap would be no new pages
    new, again = trial_step.time_filling(all_ranks(), CPU)
    assert new.page_faults >= 1024  # 4 MiB
    assert again.page_faults < 100
    assert again.step_s > 0


@pytest.mark.parametrize(
    ("can_measure", "share", "is_assumed"), [(True, 2.1, True), (True, 1.9, False), (False, 9, False)]
)
def test_retention_is_assumed_if_training_leaves_as_much_memory_again(
    monkeypatch: pytest.MonkeyPatch, can_measure: bool, share: float, is_assumed: bool
) -> None:
    traced, ranks = trace(Module(), BATCH, 4, device=CPU), RankGroup.single(CPU)
    times = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    model, hardware = traced.model_profile, current_cluster(ranks)
    peak_bytes = training_peak_bytes(model, hardware, calibration.replicated_plan(model, hardware), 4)
    monkeypatch.setattr(calibration, "can_measure_retention", lambda device: can_measure)
    free_bytes = int(share * peak_bytes) + growth_reserve(CPU, "measured")
    found = calibration.assume_retained_heap(times, model, hardware, 4, free_bytes, ranks)
    assert (found is not None) == is_assumed
    if found is not None:
        assert compute_s(found, 8) == pytest.approx(calibration.ASSUMED_RETAIN_TIME_RATIO * compute_s(times, 8))


def test_calibration_trials_of_real_steps_measure_nonzero_times() -> None:
    for same, _, times, messages in run_ranks(run_trials, 2, None, ROOM, False):
        assert same
        assert not messages
        assert compute_s(times, 8) > 0


def trial_bytes(model: ModelProfile, cluster: Cluster, size: int, device: str = "cpu") -> int:
    """Memory that a trial of the unsharded step with this batch size asks for."""
    peak = trial_peak_bytes(model, cluster, replicated_plan(model, cluster), size)
    return math.ceil(trials.MEMORY_MARGIN[device] * peak)


def trial_memory_bytes(size: int, *, frees_gradients: bool = False) -> int:
    """Memory of a trial of the unsharded step."""
    module, cluster = Module(), some_cluster(2)
    model = trace(module, BATCH, 4, device=CPU).model_profile
    freed = math.ceil(trials.MEMORY_MARGIN["cpu"] * passes_peak_bytes(model, cluster, size))
    step = freed if frees_gradients else trial_bytes(model, cluster, size)
    return step + lazy_clone_bytes(module, CPU) + GROWTH_BYTES["cpu"]["measured"]


def test_calibration_trials_skip_sizes_that_exceed_memory() -> None:
    room = trial_memory_bytes(2, frees_gradients=True)  # the copy shares parameters that stay whole
    assert room < trial_memory_bytes(4, frees_gradients=True)
    for same, parts, times, _ in run_ranks(run_trials, 2, {1: 1.0}, room, False):
        assert same
        assert compute_s(times, 2) == pytest.approx(min(1.0, 3 * compute_s(parts, 2)))


def test_calibration_trials_free_gradients_where_memory_is_short() -> None:
    room = trial_memory_bytes(2)
    assert trial_memory_bytes(8, frees_gradients=True) <= room < trial_memory_bytes(4)
    for same, parts, times, _ in run_ranks(run_trials, 2, {2: 1.0}, room, False):
        assert same
        for size in (2, 8):
            assert compute_s(times, size) == pytest.approx(min(1.0, 3 * compute_s(parts, size)), rel=0.3)


def test_unsharded_batch_sizes_take_largest_size_within_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hardware, found = Module(), some_cluster(2), []
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    for most in (2, 3, 4, 5, 8, 8):
        monkeypatch.setattr(startup_budget, "MAX_LARGE_BATCH_S", compute_s(parts, 6) if len(found) == 5 else math.inf)
        room = trial_bytes(traced.model_profile, hardware, most)
        setup = make_trial_setup(module, traced, hardware, searched_sizes=range(1, 9))
        found.append(calibration.unsharded_batch_sizes(setup, parts, room))
    assert found == [[2], [2], [2, 4], [2, 5], [2, 8], [2, 6]]


@pytest.mark.parametrize(("planned", "tried"), [(1, [2, 8]), (2, [2]), (3, [3]), (8, [8]), (9, [9])])
def test_unsharded_step_is_tried_at_the_only_batch_size_that_may_be_planned(planned: int, tried: list[int]) -> None:
    module, hardware = Module(), some_cluster(2)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    setup = make_trial_setup(module, traced, hardware, searched_sizes=(planned,))
    assert traced.batch_sizes == (2, 8)
    assert calibration.unsharded_batch_sizes(setup, parts, ROOM) == tried
    assert calibration.unsharded_batch_sizes(setup, parts, trial_bytes(traced.model_profile, hardware, 2)) == [2]


@pytest.mark.parametrize(
    ("most", "longest", "sizes"),
    [(8, 99, [2, 8]), (9, 99, [2, 8]), (20, 99, [2, 16]), (999, 20, [2, 16]), (999, 99, [2, 64])],
)
def test_unsharded_batch_sizes_go_beyond_traced_ones_within_memory_time_and_search(
    most: int, longest: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, hardware = Module(), some_cluster(2)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    monkeypatch.setattr(startup_budget, "TRIAL_S", compute_s(parts, longest))
    room = trial_bytes(traced.model_profile, hardware, most)
    setup = make_trial_setup(module, traced, hardware, searched_sizes=(1, 4, 16, 64, 256))
    assert calibration.unsharded_batch_sizes(setup, parts, room) == sizes


@pytest.mark.parametrize(
    ("most", "longest", "sizes"),
    [(1, 99, []), (2, 99, [2]), (3, 99, [2]), (4, 99, [2, 4]), (40, 99, [16, 32]), (40, 9, [4, 8])],
)
def test_unsharded_batch_sizes_on_cuda_saturate_device(
    most: int, longest: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, hardware = Module(), some_cluster(1)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    monkeypatch.setattr(startup_budget, "SATURATED_STEP_S", compute_s(parts, longest))
    room = trial_bytes(traced.model_profile, hardware, most, "cuda")
    setup = make_trial_setup(module, traced, hardware)
    on_cuda = replace(setup, context=replace(setup.context, device=torch.device("cuda", 0)))
    assert calibration.unsharded_batch_sizes(on_cuda, parts, room) == sizes


@pytest.mark.parametrize("fails", [False, True])
def test_calibration_trials_without_memory_or_on_failure_keep_compute_times(fails: bool) -> None:
    for same, parts, times, messages in run_ranks(run_trials, 2, None, ROOM if fails else 1 << 10, fails):
        assert same
        assert times == parts
        assert [("can't be tried" in message and "not for real" in message) for message in messages] == [True] * fails


def test_calibration_trials_alone_scale_compute_to_unsharded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, run = Module(), trial_step._time_repeats
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def a_second_each(steps: Any, *arguments: Any, **named: Any) -> list[StepTiming]:
        run(steps, *arguments, **named)
        return [StepTiming(1.0, 0.0, 0.25)] * len(steps)

    monkeypatch.setattr(trial_step, "_time_repeats", a_second_each)
    times = run_calibration_trials(make_trial_setup(module, traced, some_cluster(4)), parts).compute
    limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
    assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    crowded = make_trial_setup(module, traced, some_cluster(4), free_bytes=lambda: 1 << 10)
    assert run_calibration_trials(crowded, parts) == Calibration(parts)


@pytest.mark.parametrize(("longest_s", "size"), [(5.0, 8), (0.5, 2)])
def test_heap_trial_takes_larger_batch_unless_it_takes_too_long(
    longest_s: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few samples, more of the time is that of new pages: 0.54 at 2 samples and 0.67 at 8 and 41 in one model."""
    module, ratios = Module(), {2: 0.5, 8: 0.75}
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    unsharded = {size: StepTiming(0.1 * size, 0.0, 0.0) for size in (2, 8)}

    def time_both(_: Any, size: int, *__: Any) -> tuple[StepTiming, StepTiming]:
        return StepTiming(1.0, 0.0, 0.0), StepTiming(ratios[size], 0.0, 0.0)

    monkeypatch.setattr(calibration, "time_release_and_retain", time_both)
    monkeypatch.setattr(calibration, "can_measure_retention", lambda device: True)
    monkeypatch.setattr(startup_budget, "MAX_HEAP_TRIAL_S", longest_s)
    found = calibration.try_retained_heap(
        make_trial_setup(module, traced, some_cluster(1)), Calibration(parts, unsharded=unsharded)
    )
    assert found.compute_with_retained_heap is not None
    assert compute_s(found.compute_with_retained_heap, 8) == pytest.approx(ratios[size] * compute_s(parts, 8))


@pytest.mark.parametrize(
    ("step_s", "page_faults", "ratio"), [(1.0, 1000, 0.6), (4.0, 2000, 0.8), (1.0, 0, 0.6), (1.0, 9000, 1 / 3)]
)
def test_retaining_saves_the_time_of_the_pages_that_a_step_of_any_size_takes(
    step_s: float, page_faults: int, ratio: float
) -> None:
    released, retained = StepTiming(1.0, page_faults=1000), StepTiming(0.61, page_faults=25)
    found = calibration.retain_ratio(StepTiming(step_s, page_faults=page_faults), released, retained)
    assert found == pytest.approx(ratio if page_faults else 0.61)


@pytest.mark.parametrize(
    ("page_faults", "expected_s", "num_steps"),
    [([900, 50], 2.0, 2), ([900, 300, 20], 3.0, 3), ([900, 300, 200, 100], 4.0, 4), ([900, 300, 300, 300], 4.0, 4)],
)
def test_step_with_retained_heap_is_made_again_while_it_needs_new_pages(
    monkeypatch: pytest.MonkeyPatch, page_faults: list[int], expected_s: float, num_steps: int
) -> None:
    made: list[StepTiming] = []

    def make_step(*_: object) -> list[StepTiming]:
        made.append(StepTiming(1.0 + len(made), page_faults=page_faults[len(made)]))
        return made[-1:]

    monkeypatch.setattr(trial_step, "_time_each_once", make_step)
    context = make_trial_context(Module())
    released = StepTiming(1.2, page_faults=1000)
    assert trial_step.time_release_and_retain(context, 4, all_ranks(), 1 << 30, released) == (
        released,
        StepTiming(expected_s, page_faults=page_faults[num_steps - 1]),
    )
    assert len(made) == num_steps


def test_page_faults_of_a_step_are_those_of_its_new_tensors() -> None:
    configure_cpu_allocator()

    def step() -> float:
        torch.ones(1 << 22).sum()
        return time.perf_counter()

    found = trial_step._time_once(step, CPU)
    assert 4096 <= found.page_faults < 2 * 4096


def test_calibration_trials_free_copy_whose_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    twins: list[pl.LightningModule] = []

    def noted(module: pl.LightningModule) -> pl.LightningModule:
        twins.append(lazy_clone(module))
        return twins[-1]

    monkeypatch.setattr(trial_step, "lazy_clone", noted)
    module = Module(fails=True)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    with pytest.warns(OSDPWarning, match=r"can't be tried.*not for real"):
        assert run_calibration_trials(make_trial_setup(module, traced, some_cluster(4)), parts) == Calibration(parts)
    assert twins
    assert {parameter.numel() for twin in twins for parameter in twin.parameters()} == {0}

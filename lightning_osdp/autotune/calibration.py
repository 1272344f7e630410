"""Trials before the search: the unsharded step at two batch sizes, and with freed tensors retained in the heap.

Kernels are measured one by one. These trials tell what the whole step takes, and the measurements are scaled to that
(``planning.cost.trial_correction``). Plans are tried after the search (``trials``).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from lightning_osdp.autotune import startup_budget as seconds
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.trial_step import (
    StepTiming,
    TrialError,
    release_and_retain_duration_s,
    time_filling,
    time_release_and_retain,
    time_step,
)
from lightning_osdp.autotune.trials import TrialSetup, warn_of_failure
from lightning_osdp.backend.allocator import can_measure_retention
from lightning_osdp.backend.memory import growth_reserve
from lightning_osdp.planning.cost.cpu_effects import max_retained_batch_size
from lightning_osdp.planning.cost.trial_correction import (
    PassTimes,
    pass_times,
    passes_peak_bytes,
    scale_to_trial,
    training_peak_bytes,
    trial_peak_bytes,
)
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import MAX_CORRECTION, Cluster, ComputeTimes
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan

MIN_SIZE_RATIO = 2
"""Minimum ratio of the two batch sizes of the unsharded step: closer ones say little about a sample. [M-autotune-7]"""

MAX_SIZE_RATIO = 8
"""Maximum ratio of a batch size of the unsharded step to the largest traced one."""

ASSUMED_RETAIN_TIME_RATIO = 0.9
"""Time of a step's compute with freed tensors retained, relative to releasing them, if it is not measured.
[M-autotune-8]"""


@dataclass(frozen=True)
class Calibration:
    """The compute times as the trials so far have shown them.

    Attributes:
        compute: compute times, scaled to the unsharded step once that was tried.
        compute_with_retained_heap: the same with freed tensors retained in the heap; None if they can't be.
        unsharded: timings of the unsharded step by batch size.
    """

    compute: ComputeTimes
    compute_with_retained_heap: ComputeTimes | None = None
    unsharded: Mapping[int, StepTiming] = field(default_factory=dict)


def run_calibration_trials(setup: TrialSetup, compute: ComputeTimes) -> Calibration:
    """Run the trials that the memory and the budget allow. Collective: every rank must call it.

    Args:
        setup: what the trials share.
        compute: the compute times as measured kernel by kernel.

    Returns:
        What the trials have shown until one has failed, if any has; ``compute`` alone if the step takes too long.
    """
    calibration = Calibration(compute)
    try:
        calibration = try_unsharded_step(setup, calibration)
        total_s = sum(one.step_s for one in calibration.unsharded.values())
        if total_s > seconds.MAX_TRIAL_S and not setup.ranks.is_offline:  # which has no deadline
            return Calibration(compute)
        calibration = try_retained_heap(setup, calibration)
    except TrialError as error:
        warn_of_failure(error)
    return calibration


def try_unsharded_step(setup: TrialSetup, calibration: Calibration) -> Calibration:
    """Try the unsharded step at one or two batch sizes, and scale all compute times to it. Collective.

    If the largest traced batch does not fit, gradients are freed as soon as they are made where a larger one fits then.
    """
    available_bytes = setup.available_bytes()
    sizes, frees_gradients = unsharded_batch_sizes(setup, calibration.compute, available_bytes), False
    if sizes[-1:] < [*setup.batch_sizes[-1:]]:
        larger = unsharded_batch_sizes(setup, calibration.compute, available_bytes, frees_gradients=True)
        sizes, frees_gradients = max((sizes, False), (larger, True), key=lambda each: each[0][-1:])
    if not sizes:
        return calibration
    step = partial(time_step, setup.context, sizes, setup.ranks, None, frees_gradients=frees_gradients)
    timings = setup.ranks.raise_on_all_ranks(step)
    passes = {size: PassTimes(one.forward_s, one.step_s - one.forward_s) for size, one in timings.items()}
    return replace(calibration, compute=scale_to_trial(calibration.compute, passes), unsharded=timings)


def unsharded_batch_sizes(
    setup: TrialSetup, compute: ComputeTimes, available_bytes: int, *, frees_gradients: bool = False
) -> list[int]:
    """Return the smallest traced batch size and a larger one, as far as memory and time allow.

    The larger one is the largest traced batch size that fits. If all fit and their steps are short, it is the largest
    batch size that may be planned and whose step is still short: a line through two small batches is 10 % off at a
    large one [M-autotune-11]. On CUDA both sizes fill the device. On a CPU, if a single batch size may be planned, and
    fits, it is the only one. The list is empty if even the smallest does not fit.
    """
    smallest, replicated = setup.batch_sizes[0], replicated_plan(setup.model, setup.cluster)
    is_saturating = setup.is_cuda and len(setup.batch_sizes) > 1
    max_step_s = seconds.SATURATED_STEP_S if is_saturating else seconds.MAX_LARGE_BATCH_S

    def fits_memory(size: int) -> bool:
        if frees_gradients:
            return setup.memory_margin * passes_peak_bytes(setup.model, setup.cluster, size) <= available_bytes
        return setup.fits_memory(replicated, size, available_bytes)

    def is_short(size: int) -> bool:
        return sum(pass_times(compute, size)) <= seconds.TRIAL_S

    def fits(size: int) -> bool:
        return fits_memory(size) and sum(pass_times(compute, size)) <= max_step_s

    if not fits_memory(smallest):
        return []
    if not is_saturating:
        first, *others = setup.searched_sizes
        if not (others or setup.is_cuda) and first >= smallest and fits(first):
            return [first]
        traced = range(setup.batch_sizes[-1], MIN_SIZE_RATIO * smallest - 1, -1)
        larger = [*islice(filter(fits, traced), 1)]
        if larger == [*setup.batch_sizes[-1:]]:
            beyond = [size for size in setup.searched_sizes if 1 < size / larger[0] <= MAX_SIZE_RATIO]
            num_short = bisect(beyond, False, key=lambda size: not (is_short(size) and fits_memory(size)))
            larger = beyond[:num_short][-1:] or larger
        return [smallest, *larger]
    # A line through two large sizes holds beyond them. Steps of few samples take as long as to launch their kernels.
    largest = smallest
    while fits(2 * largest):
        largest *= 2
    return sorted({max(smallest, largest // 2), largest})


def try_retained_heap(setup: TrialSetup, calibration: Calibration) -> Calibration:
    """Try the unsharded step with freed tensors retained in the heap, compared with releasing them (CPU). Collective.

    The larger of the batches that were tried tells more, if there are memory and time for it: of few samples, more of
    the time is that of new pages [M-autotune-10]. Where there is no time at all, what new pages take is timed by
    filling a tensor.
    """
    if not calibration.unsharded or not _can_measure_heap_retention(setup.ranks):
        return calibration
    replicated = replicated_plan(setup.model, setup.cluster)
    available_bytes = setup.available_bytes()
    is_line = len(calibration.unsharded) > 1
    tried = [size for size in setup.batch_sizes if is_line and size < max(calibration.unsharded)]
    sizes = [
        size
        for size in sorted({*tried, *calibration.unsharded})
        if _can_retain(setup, replicated, size, available_bytes)
    ]
    if not sizes:
        return calibration
    for size in reversed(sizes):
        known = _timing_at(calibration.unsharded, size)
        takes_s = release_and_retain_duration_s(known)
        is_short = takes_s <= seconds.MAX_HEAP_TRIAL_S or size == sizes[0]
        if is_short and setup.budget.allows(takes_s, seconds.HEAP_TRIAL_RESERVE_S):
            heap_bytes = setup.heap_bytes(replicated, size)
            step = partial(time_release_and_retain, setup.context, size, setup.ranks, heap_bytes, known)
            released, retained = setup.ranks.raise_on_all_ranks(step)
            break
    else:
        released, retained = time_filling(setup.ranks, setup.context.device)
    ratios = {size: retain_ratio(timing, released, retained) for size, timing in calibration.unsharded.items()}
    passes = {size: pass_times(calibration.compute, size) for size in ratios}
    retained_passes = {size: PassTimes(*(ratios[size] * one for one in both)) for size, both in passes.items()}
    return replace(calibration, compute_with_retained_heap=scale_to_trial(calibration.compute, retained_passes))


def retain_ratio(step: StepTiming, released: StepTiming, retained: StepTiming) -> float:
    """Return the time of ``step`` with freed tensors retained, relative to releasing them.

    What retaining saves is the time of new pages, which are fewer for each sample of a larger batch [M-autotune-10].

    Args:
        step: an unsharded step that releases them, of any batch size.
        released: such a step of the batch size of the trial.
        retained: the same with freed tensors retained.
    """
    saved_s, saved_faults = released.step_s - retained.step_s, released.page_faults - retained.page_faults
    saved_fraction = saved_s / released.step_s
    if saved_faults > 0 and step.page_faults > 0:
        saved_fraction = saved_s / saved_faults * step.page_faults / step.step_s
    return min(1.0, max(1 / MAX_CORRECTION, 1 - saved_fraction))


def _timing_at(timings: Mapping[int, StepTiming], size: int) -> StepTiming:
    """Return the timing of one of these batch sizes, or of one between them."""
    if size in timings:
        return timings[size]
    (low, first), (high, second) = sorted(timings.items())
    weight = (size - low) / (high - low)
    return StepTiming(*((1 - weight) * a + weight * b for a, b in zip(first, second, strict=True)))


def _can_retain(setup: TrialSetup, replicated: ExecutionPlan, size: int, available_bytes: int) -> bool:
    """Return whether tensors of a batch of this size stay in the heap, and training leaves memory for it.

    Training with all operators replicated must leave memory for the heap to grow by as much as the copy takes.
    """
    copy_bytes = trial_peak_bytes(setup.model, setup.cluster, replicated, size)
    needed_bytes = copy_bytes + max(copy_bytes, training_peak_bytes(setup.model, setup.cluster, replicated, size))
    return needed_bytes <= available_bytes and max_retained_batch_size(setup.model) >= size


def assume_retained_heap(
    compute: ComputeTimes, model: ModelProfile, cluster: Cluster, batch_size: int, free_bytes: int, ranks: RankGroup
) -> ComputeTimes | None:
    """Return compute times with freed tensors retained in the heap where no step can be tried (CPU). Collective.

    Training as DDP does retains them as well, and would be the faster one.

    Args:
        compute: the times if they are released.
        model: the profile of the model.
        cluster: the ranks.
        batch_size: a batch that is trained at least.
        free_bytes: what this rank may take.
        ranks: the ranks that train together.

    Returns:
        The times; None if training with all operators replicated does not leave as much memory again for the heap to
        grow, or if tensors of the batch are too large to stay in it.
    """
    available_bytes = ranks.all_reduce_min(free_bytes - growth_reserve(ranks.device, "measured"))
    needed_bytes = 2 * training_peak_bytes(model, cluster, replicated_plan(model, cluster), batch_size)
    is_possible = needed_bytes <= available_bytes and max_retained_batch_size(model) >= batch_size
    if not (_can_measure_heap_retention(ranks) and is_possible):
        return None
    return compute.map_lines(lambda line: line.scale(ASSUMED_RETAIN_TIME_RATIO))


def _can_measure_heap_retention(ranks: RankGroup) -> bool:
    """Return whether freed tensors can be retained, and heap growth measured, on all ranks. Collective."""
    return bool(ranks.all_reduce_min(int(can_measure_retention(ranks.device))))


def replicated_plan(model: ModelProfile, cluster: Cluster) -> ExecutionPlan:
    """Return a plan with all operators replicated."""
    operators = (
        OperatorPlan(name=op.name, num_parameters=op.num_parameters, slices=(Mode.DP,)) for op in model.operators
    )
    return ExecutionPlan.minimal(operators, cluster)

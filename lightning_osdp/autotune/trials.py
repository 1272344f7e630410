"""One trial of the user's own step under a plan, and the trial of the plan that was found.

A trial needs memory beside the module (``trial_step``). Where there is none, and where there is no time, predictions
are made from the measurements alone.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import MAX_TRIAL_S, NO_RETRY_ABOVE_S, PLAN_TRIAL_S, TRIAL_S, StartupBudget
from lightning_osdp.autotune.trial_step import MIN_STEPS, WARMUP_STEPS, StepTiming, TrialContext, TrialError, time_step
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.cpu_effects import HEAP_GROWTH
from lightning_osdp.planning.cost.trial_correction import (
    PLAN_TRIAL_RELATIVE_ERROR,
    Trial,
    calibrated_s,
    predict_trial,
    trial_peak_bytes,
)
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling.tracing.stand_ins import fork_rng

RETRY_TOLERANCE, PLAN_RETRY_TOLERANCE = 0.2, 0.05
"""Relative difference from the expected time beyond which a trial is repeated once: of a mode, and of a searched plan.
Other work on a machine lasts for seconds at times."""

MEMORY_MARGIN = 1.1
"""Memory that must be available for a trial, as a multiple of its predicted peak."""


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of one start share.

    Attributes:
        context: the user's step.
        model: the traced step.
        batch_sizes: the traced batch sizes, rising.
        ranks: the ranks that run the trials together.
        cluster: the cluster with its measured links and engine.
        free_bytes: returns what this rank may take now.
        budget: the time of the start.
    """

    context: TrialContext
    model: ModelProfile
    batch_sizes: Sequence[int]
    ranks: RankGroup
    cluster: Cluster
    free_bytes: Callable[[], int]
    budget: StartupBudget

    @property
    def is_cuda(self) -> bool:
        """Whether the trials run on CUDA."""
        return self.context.device.type == "cuda"

    def available_bytes(self) -> int:
        """Return what a trial may take now: each copy leaves a little behind. Collective: every rank must call it."""
        return self.context.available_bytes(self.free_bytes(), self.ranks)

    def fits_memory(self, plan: ExecutionPlan, size: int, available_bytes: float | None = None) -> bool:
        """Return whether there is memory for a trial, and a margin for what is not counted in its peak.

        Collective unless ``available_bytes`` is given.
        """
        available = self.available_bytes() if available_bytes is None else available_bytes
        factor = MEMORY_MARGIN * (1 + HEAP_GROWTH * plan.retain_freed_memory)
        return factor * trial_peak_bytes(self.model, self.cluster, plan, size) <= available

    def predict(self, plan: ExecutionPlan, size: int, compute: ComputeTimes) -> Trial:
        """Return the trial of ``plan`` as it is predicted from the measurements."""
        return predict_trial(self.model, compute, self.cluster, plan, size)

    def heap_bytes(self, plan: ExecutionPlan, size: int) -> int:
        """Return the heap that a trial with freed tensors retained may fill."""
        return int((1 + HEAP_GROWTH) * trial_peak_bytes(self.model, self.cluster, plan, size))


class TrialTiming(NamedTuple):
    """How a trial is timed.

    Attributes:
        duration_s: approximate time of its steps; 0 to time a single one.
        expected_s: step time that is expected.
        tolerance: relative difference from that beyond which the trial is repeated once.
        can_retry: returns whether there is time for that. Collective.
        heap_bytes: maximum bytes of freed tensors retained in the heap; None to release them.
    """

    duration_s: float
    expected_s: float
    tolerance: float
    can_retry: Callable[[], bool]
    heap_bytes: int | None = None


def run_trial(setup: TrialSetup, predicted: Trial, plan: ExecutionPlan, size: int, timing: TrialTiming) -> Trial:
    """Return ``predicted`` with the measured time. Collective: every rank must call it.

    A trial that is off its expected time is repeated once. If the two agree their mean counts (the smaller would be
    less than a step takes), else the smaller: the other one was disturbed.

    Raises:
        TrialError: the user's step fails, or the module can't be copied.
    """
    step = partial(time_step, setup.context, [size], setup.ranks, plan, timing.duration_s, timing.heap_bytes)
    timings = [setup.ranks.raise_on_all_ranks(step)[size]]
    first_s = timings[0].step_s
    is_unexpected = abs(first_s / timing.expected_s - 1) > timing.tolerance
    if first_s <= NO_RETRY_ABOVE_S and is_unexpected and timing.can_retry():
        timings.append(setup.ranks.raise_on_all_ranks(step)[size])
    if max(timings).step_s / min(timings).step_s - 1 > RETRY_TOLERANCE:
        timings = [min(timings)]
    measured = StepTiming(*map(statistics.mean, zip(*timings, strict=True)))
    # On CUDA the host's waiting time is not the device's.
    exposed_comm_s = None if setup.is_cuda else measured.exposed_comm_s
    return predicted.model_copy(update={"measured_s": measured.step_s, "exposed_comm_s": exposed_comm_s})


def fits_time(predicted: Trial, max_s: float = MAX_TRIAL_S, num_steps: int = MIN_STEPS) -> bool:
    """Return whether the warm-up and ``num_steps`` timed steps take less than ``max_s``."""
    return predicted.predicted_s * (WARMUP_STEPS + num_steps) < max_s


def warn_of_failure(error: TrialError) -> None:
    """Warn that a trial failed. Either the user's step is broken (training will show it) or it can't be copied."""
    text = f"the step can't be tried on a copy, so its predicted time is less sure: {error}"
    warnings.warn(text, OSDPWarning, stacklevel=3)


# -- the plan that was found -------------------------------------------------------------------------------------------


class PlanTrialOption(NamedTuple):
    """A way to try a plan.

    Attributes:
        batch_size: the batch size of the trial.
        max_s: the time that it may take.
        num_steps: timed steps that must fit in that time; with 1 the step is timed once.
    """

    batch_size: int
    max_s: float
    num_steps: int


def run_plan_trial(setup: TrialSetup, compute: ComputeTimes, plan: ExecutionPlan, reserve_s: float) -> Trial | None:
    """Try a plan that was found; None if that is not possible. Collective: every rank must call it.

    Args:
        setup: what the trials share.
        compute: compute times with the heap policy of the plan.
        plan: the plan. It is tried at its batch size, or at a smaller one if that takes too much time or memory.
        reserve_s: time of the start that must remain after the trial. A trial takes half of the rest at most, so that
            it can be repeated; a step that is too long for that takes all, or is timed once within three quarters.
    """
    available_bytes, half_s = setup.available_bytes(), (setup.budget.remaining_s() - reserve_s) / 2
    for size, max_s, num_steps in _plan_trial_options(plan.batch_size, setup, half_s):
        predicted = setup.predict(plan, size, compute)
        if fits_time(predicted, max_s, num_steps) and setup.fits_memory(plan, size, available_bytes):
            break
    else:
        return None
    timing = TrialTiming(
        duration_s=min(PLAN_TRIAL_S, max(TRIAL_S, half_s / 2)) if num_steps > 1 else 0.0,
        expected_s=calibrated_s(predicted, plan.cluster.engine.calibration),
        tolerance=PLAN_RETRY_TOLERANCE,
        can_retry=lambda: setup.budget.allows(half_s, reserve_s),
        heap_bytes=setup.heap_bytes(plan, size) if plan.retain_freed_memory else None,
    )
    try:
        with fork_rng(setup.context.device):
            trial = run_trial(setup, predicted, plan, size, timing)
    except TrialError as error:
        warn_of_failure(error)
        return None
    return trial.model_copy(update={"relative_error": PLAN_TRIAL_RELATIVE_ERROR, "plan": plan.without_alternatives()})


def _plan_trial_options(batch_size: int, setup: TrialSetup, half_s: float) -> Iterator[PlanTrialOption]:
    """Yield the ways to try a plan, the most informative first."""
    for size in plan_trial_batch_sizes(batch_size, setup.batch_sizes, setup.is_cuda):
        yield PlanTrialOption(size, min(half_s, MAX_TRIAL_S), MIN_STEPS)
    smallest = setup.batch_sizes[0]
    yield PlanTrialOption(smallest, min(2 * half_s, MAX_TRIAL_S), MIN_STEPS)
    yield PlanTrialOption(smallest, min(1.5 * half_s, MAX_TRIAL_S), 1)


def plan_trial_batch_sizes(batch_size: int, traced_sizes: Sequence[int], is_cuda: bool) -> Sequence[int]:
    """Return batch sizes to try a plan at, the most informative first.

    On CUDA, where few samples say little, these are its own batch size and halves of it.
    """
    if len(traced_sizes) == 1:
        return traced_sizes
    if not is_cuda:
        return [batch_size, sum(traced_sizes) // len(traced_sizes), traced_sizes[0]]
    halves = (batch_size >> times for times in range(batch_size.bit_length()))
    return [*(size for size in halves if size > traced_sizes[0]), traced_sizes[0]]

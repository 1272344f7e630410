"""Trials of plans: the user's own step on a copy of the module, under each plan in turns.

A trial needs memory beside the module (``trial_step``). Where there is none, and where there is no time, predictions
are made from the measurements alone.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import MAX_TRIAL_S, MAX_TURNS_S, TURN_S, StartupBudget
from lightning_osdp.autotune.trial_step import (
    GC_GENERATION,
    MIN_STEPS,
    WARMUP_STEPS,
    StepTiming,
    TrialContext,
    TrialError,
    time_step,
)
from lightning_osdp.backend.memory import Progress, trim
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.cpu_effects import HEAP_GROWTH
from lightning_osdp.planning.cost.trial_correction import (
    PLAN_TRIAL_RELATIVE_ERROR,
    Trial,
    predict_trial,
    trial_peak_bytes,
)
from lightning_osdp.planning.search.finalists import spread_s
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan

MIN_ROUNDS, MAX_ROUNDS = 3, 5
"""Rounds in which plans are tried in turns: other work on a machine lasts for seconds at times."""

MEMORY_MARGIN = {"cpu": 1.03, "cuda": 1.1}
"""Memory that must be available for a trial, as a multiple of its predicted peak [M-autotune-12]."""


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of one start share.

    Attributes:
        context: the user's step.
        model: the traced step.
        batch_sizes: the traced batch sizes, rising.
        searched_sizes: the batch sizes that may be planned, rising.
        ranks: the ranks that run the trials together.
        cluster: the cluster with its measured links and engine.
        free_bytes: returns what this rank may take now.
        budget: the time of the start.
    """

    context: TrialContext
    model: ModelProfile
    batch_sizes: Sequence[int]
    searched_sizes: Sequence[int]
    ranks: RankGroup
    cluster: Cluster
    free_bytes: Callable[[], int]
    budget: StartupBudget

    @property
    def is_cuda(self) -> bool:
        """Return whether the trials run on CUDA."""
        return self.context.device.type == "cuda"

    @property
    def memory_margin(self) -> float:
        """Return the factor on predicted peaks for which there must be memory."""
        return MEMORY_MARGIN[self.context.device.type]

    def available_bytes(self, progress: Progress = "measured") -> int:
        """Return what a trial may take now: each copy leaves a little behind. Collective: every rank must call it."""
        trim(self.context.device, GC_GENERATION)  # tracing, too, has left freed memory in the heap
        return self.context.available_bytes(self.free_bytes(), self.ranks, progress)

    def fits_memory(self, plan: ExecutionPlan, size: int, available_bytes: float | None = None) -> bool:
        """Return whether there is memory for a trial, and a margin for what is not counted in its peak.

        Collective unless ``available_bytes`` is given.
        """
        available = self.available_bytes() if available_bytes is None else available_bytes
        factor = self.memory_margin * (1 + HEAP_GROWTH * plan.retain_freed_memory)
        return factor * trial_peak_bytes(self.model, self.cluster, plan, size) <= available

    def heap_bytes(self, plan: ExecutionPlan, size: int) -> int:
        """Return the heap that a trial with freed tensors retained may fill."""
        return int((1 + HEAP_GROWTH) * trial_peak_bytes(self.model, self.cluster, plan, size))


class PlanTrial(NamedTuple):
    """How a plan is tried.

    Attributes:
        plan: the plan.
        batch_size: the batch size of the trial.
        duration_s: approximate time of the steps of a turn; 0 to time a single one.
        predicted: the trial as it is predicted.
    """

    plan: ExecutionPlan
    batch_size: int
    duration_s: float
    predicted: Trial


def run_plan_trials(
    setup: TrialSetup,
    compute_for: Callable[[ExecutionPlan], ComputeTimes],
    plans: Sequence[ExecutionPlan],
    reserve_s: float,
) -> list[Trial]:
    """Try plans in turns, several rounds if there is time. Collective: every rank must call it.

    Args:
        setup: what the trials share.
        compute_for: returns compute times with the heap policy of a plan.
        plans: the plans, the most important first: the last ones are left out where there is no time or memory for
            all. Each is tried at its batch size, or at a smaller one if that takes too much time or memory.
        reserve_s: time of the start that must remain after the trials.

    Returns:
        A trial of each plan that could be tried; none if the first one can't be.
    """
    available_s = setup.budget.remaining_s() - reserve_s
    trials = _prepare_plan_trials(setup, compute_for, plans, available_s)
    timings: list[list[StepTiming]] = [[] for _ in trials]
    began_s = setup.budget.elapsed_s()
    for index in range(MAX_ROUNDS):
        spent_s = setup.budget.elapsed_s() - began_s
        limit_s = available_s if index < MIN_ROUNDS else min(available_s, MAX_TURNS_S)
        if index and spent_s + spent_s / index > limit_s:
            break
        for number, (trial, own) in enumerate(zip(trials, timings, strict=True), start=1):
            if len(own) == index:  # the others have failed
                setup.budget.begin_stage(f"trying plan {number} of {len(trials)}", f", round {index + 1}")
                own += _run_turn(setup, trial)
        if not (timings and timings[0]):
            return []
    rounds = len(timings[0]) if timings else 0
    return [_summarize(setup, trial, own) for trial, own in zip(trials, timings, strict=True) if len(own) == rounds > 0]


def _run_turn(setup: TrialSetup, trial: PlanTrial) -> list[StepTiming]:
    """Return the timing of a turn; none, with a warning, if the user's step fails or the module can't be copied."""
    plan, size = trial.plan, trial.batch_size
    heap_bytes = setup.heap_bytes(plan, size) if plan.retain_freed_memory else None
    step = partial(time_step, setup.context, [size], setup.ranks, plan, trial.duration_s, heap_bytes)
    try:
        return [setup.ranks.raise_on_all_ranks(step)[size]]
    except TrialError as error:
        warn_of_failure(error)
        return []


def _summarize(setup: TrialSetup, trial: PlanTrial, timings: Sequence[StepTiming]) -> Trial:
    """Return the trial with the median of its rounds, and by how much they differ as its error."""
    rounds_s = tuple(one.step_s for one in timings)
    measured_s = statistics.median(rounds_s)
    # On CUDA the host's waiting time is not the device's; elsewhere more samples hide more of a collective.
    is_known = not setup.is_cuda and trial.batch_size == trial.plan.batch_size
    exposed_s = statistics.median(one.exposed_comm_s for one in timings) if is_known else None
    error = max(PLAN_TRIAL_RELATIVE_ERROR, spread_s(rounds_s) / measured_s if measured_s > 0 else 1.0)
    changes = {"measured_s": measured_s, "rounds_s": rounds_s, "exposed_comm_s": exposed_s, "relative_error": error}
    return trial.predicted.model_copy(update=changes)


def warn_of_failure(error: TrialError) -> None:
    """Warn that a trial failed. Either the user's step is broken (training will show it) or it can't be copied."""
    text = f"the step can't be tried on a copy, so its predicted time is less sure: {error}"
    warnings.warn(text, OSDPWarning, stacklevel=3)


def _prepare_plan_trials(
    setup: TrialSetup,
    compute_for: Callable[[ExecutionPlan], ComputeTimes],
    plans: Sequence[ExecutionPlan],
    available_s: float,
) -> list[PlanTrial]:
    """Return trials of as many of the plans as there is time for, without those that there is no memory for."""
    available_bytes = setup.available_bytes("searched")

    @cache  # a prediction takes as long as a step of a small model
    def predict(index: int, size: int) -> Trial:
        return predict_trial(setup.model, compute_for(plans[index]), setup.cluster, plans[index], size)

    for count in range(len(plans), 0, -1):
        found = [
            _prepare(setup, plan, partial(predict, index), available_bytes, available_s / count)
            for index, plan in enumerate(plans[:count])
        ]
        if found[0] is not None:
            return [trial for trial in found if trial is not None]
    return []


def _prepare(
    setup: TrialSetup, plan: ExecutionPlan, predict: Callable[[int], Trial], available_bytes: int, max_s: float
) -> PlanTrial | None:
    for size, limit_s, num_steps in _plan_trial_options(plan.batch_size, setup, max_s):
        predicted = predict(size)
        takes_s = predicted.predicted_s * (WARMUP_STEPS + num_steps)
        if takes_s < limit_s and setup.fits_memory(plan, size, available_bytes):
            return PlanTrial(plan, size, TURN_S if num_steps > 1 else 0.0, predicted)
    return None


def _plan_trial_options(batch_size: int, setup: TrialSetup, max_s: float) -> Iterator[tuple[int, float, int]]:
    """Yield the ways to try a plan, the most informative first: batch size, most seconds, steps to time in these."""
    for size in plan_trial_batch_sizes(batch_size, setup.batch_sizes, setup.is_cuda):
        yield size, min(max_s / 2, MAX_TRIAL_S), MIN_STEPS
    smallest = setup.batch_sizes[0]
    if not setup.is_cuda:
        yield batch_size, min(0.75 * max_s, MAX_TRIAL_S), 1
    yield smallest, min(max_s, MAX_TRIAL_S), MIN_STEPS
    yield smallest, min(0.75 * max_s, MAX_TRIAL_S), 1


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

"""Trials before the search: the unsharded step, and the step with all operators in one mode.

Kernels, collectives and the engine are measured one by one. These trials tell what the whole step takes, and the
measurements are scaled to that (``planning.cost.trial_correction``).

Note [the list of trials]: ``calibration_trials`` is the ordered list of what is tried, most important first. Each entry
prepares a trial, which says how long it takes and how much of the start must remain after it. Those that the memory and
the budget allow are run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from lightning_osdp.autotune import startup_budget as seconds
from lightning_osdp.autotune.trial_step import (
    WARMUP_STEPS,
    StepTiming,
    TrialError,
    release_and_retain_duration_s,
    time_release_and_retain,
    time_step,
)
from lightning_osdp.autotune.trials import (
    RETRY_TOLERANCE,
    TrialSetup,
    TrialTiming,
    fits_time,
    run_trial,
    warn_of_failure,
)
from lightning_osdp.backend.allocator import can_measure_retention
from lightning_osdp.engine.base import engine_capabilities
from lightning_osdp.planning.cost.cpu_effects import max_retained_batch_size
from lightning_osdp.planning.cost.trial_correction import (
    PassTimes,
    Trial,
    pass_times,
    scale_to_trial,
    training_peak_bytes,
    trial_peak_bytes,
    trials_of_plan,
    uniform_choice,
)
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.wrapping import WrapAssignment, wrap_assignments
from lightning_osdp.profiling.tracing.stand_ins import fork_rng

log = logging.getLogger(__name__)

MIN_SIZE_RATIO = 2
"""Minimum ratio of the two batch sizes of the unsharded step: closer ones say little about a sample. [M-autotune-7]"""

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
        trials: trials with all operators in one mode.
        is_too_slow: whether steps take so long that nothing else is tried.
    """

    compute: ComputeTimes
    compute_with_retained_heap: ComputeTimes | None = None
    unsharded: Mapping[int, StepTiming] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    is_too_slow: bool = False


@dataclass(frozen=True)
class PreparedTrial:
    """A trial that is possible: there is memory for it.

    Attributes:
        duration_s: its estimated duration.
        reserve_s: time of the start that must remain after it.
        run: runs it, and returns the calibration with what it has shown. Collective.
        skip: returns the calibration with what is assumed if there is no time for it; None if nothing is.
    """

    duration_s: float
    reserve_s: float
    run: Callable[[], Calibration]
    skip: Callable[[], Calibration] | None = None


CalibrationTrial = Callable[[TrialSetup, Calibration], PreparedTrial | None]
"""An entry of the list: prepares a trial after those before it; None if it is not possible. Collective."""


def calibration_trials(setup: TrialSetup) -> dict[str, CalibrationTrial]:
    """Return what to try before the search by name, in order of priority: see Note [the list of trials]."""
    trials: dict[str, CalibrationTrial] = {"unsharded": prepare_unsharded_trial, "retained heap": prepare_heap_trial}
    capabilities = engine_capabilities(setup.context.engine, setup.context.device)
    # Without the plans of this line, modes are not tried and collectives not calibrated before the search.
    plans = uniform_plans(setup.model, setup.cluster, capabilities) if setup.ranks.world_size > 1 else {}
    # Modes, with several steps each: first those that add most to the unsharded step.
    trials |= {name: partial(prepare_mode_trial, plans[name]) for name in reversed(plans)}
    # Without time for that, a single step of each that is not tried yet: first those that add least.
    for name in sorted(plans, key=lambda name: name != "zdp2 in nodes"):
        trials[f"{name}, one step"] = partial(prepare_mode_trial, plans[name], is_single_step=True)
    return trials


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
        with fork_rng(setup.context.device):
            for name, prepare in calibration_trials(setup).items():
                trial = prepare(setup, calibration)
                if trial is None:
                    log.debug("trial %s is not possible", name)
                elif setup.budget.allows(trial.duration_s, trial.reserve_s):
                    calibration = trial.run()
                    log.debug("ran trial %s", name)
                else:
                    calibration = trial.skip() if trial.skip is not None else calibration
                    log.debug("no time for trial %s", name)
                if calibration.is_too_slow:
                    return Calibration(compute)
    except TrialError as error:
        warn_of_failure(error)
    return calibration


# -- the unsharded step ------------------------------------------------------------------------------------------------


def prepare_unsharded_trial(setup: TrialSetup, calibration: Calibration) -> PreparedTrial | None:
    """Prepare the unsharded step at one or two batch sizes. All compute times are scaled to it."""
    sizes = unsharded_batch_sizes(setup, calibration.compute, setup.available_bytes())
    if not sizes:
        return None

    def run() -> Calibration:
        step = partial(time_step, setup.context, sizes, setup.ranks, None)
        timings = setup.ranks.raise_on_all_ranks(step)
        passes = {size: PassTimes(one.forward_s, one.step_s - one.forward_s) for size, one in timings.items()}
        return replace(
            calibration,
            compute=scale_to_trial(calibration.compute, passes),
            unsharded=timings,
            is_too_slow=not setup.ranks.is_offline  # which has no deadline
            and sum(one.step_s for one in timings.values()) > seconds.MAX_TRIAL_S,
        )

    return PreparedTrial(seconds.TRIAL_S, -math.inf, run)


def unsharded_batch_sizes(setup: TrialSetup, compute: ComputeTimes, available_bytes: int) -> list[int]:
    """Return the smallest traced batch size and the largest one, or the largest in between that fits memory and time.

    On CUDA these are sizes that fill the device. Empty if even the smallest does not fit.
    """
    smallest, replicated = setup.batch_sizes[0], uniform_plans(setup.model, setup.cluster)["dp"]
    is_saturating = setup.is_cuda and len(setup.batch_sizes) > 1
    max_step_s = seconds.SATURATED_STEP_S if is_saturating else seconds.MAX_LARGE_BATCH_S

    def fits(size: int) -> bool:
        return setup.fits_memory(replicated, size, available_bytes) and sum(pass_times(compute, size)) <= max_step_s

    if not setup.fits_memory(replicated, smallest, available_bytes):
        return []
    if not is_saturating:
        larger = range(setup.batch_sizes[-1], MIN_SIZE_RATIO * smallest - 1, -1)
        return [smallest, *islice(filter(fits, larger), 1)]
    # A line through two large sizes holds beyond them. Steps of few samples take as long as to launch their kernels.
    largest = smallest
    while fits(2 * largest):
        largest *= 2
    return sorted({max(smallest, largest // 2), largest})


def prepare_heap_trial(setup: TrialSetup, calibration: Calibration) -> PreparedTrial | None:
    """Prepare the unsharded step with freed tensors retained in the heap, compared with releasing them (CPU).

    Training with all operators replicated must leave memory for the heap to grow by as much as the copy takes, and the
    tensors of the smallest batch must not be too large to stay in it.
    """
    if not calibration.unsharded or not _can_measure_heap_retention(setup):
        return None
    model, cluster, size, replicated = (
        setup.model,
        setup.cluster,
        setup.batch_sizes[0],
        uniform_plans(setup.model, setup.cluster)["dp"],
    )
    copy_bytes = trial_peak_bytes(model, cluster, replicated, size)
    needed_bytes = copy_bytes + max(copy_bytes, training_peak_bytes(model, cluster, replicated, size))
    if needed_bytes > setup.available_bytes() or max_retained_batch_size(model) < size:
        return None
    known = calibration.unsharded[size]

    def with_ratio(ratio: float) -> Calibration:
        scaled = calibration.compute.map_lines(lambda line: line.scale(ratio))
        return replace(calibration, compute_with_retained_heap=scaled)

    def run() -> Calibration:
        heap_bytes = setup.heap_bytes(replicated, size)
        step = partial(time_release_and_retain, setup.context, size, setup.ranks, heap_bytes, known)
        released, retained = setup.ranks.raise_on_all_ranks(step)
        return with_ratio(min(1.0, retained.step_s / released.step_s))

    duration_s, skip = release_and_retain_duration_s(known), partial(with_ratio, ASSUMED_RETAIN_TIME_RATIO)
    return PreparedTrial(duration_s, seconds.HEAP_TRIAL_RESERVE_S, run, skip)


def _can_measure_heap_retention(setup: TrialSetup) -> bool:
    """Return whether freed tensors can be retained, and heap growth measured, on all ranks. Collective."""
    return bool(setup.ranks.all_reduce_min(int(can_measure_retention(setup.context.device))))


# -- all operators in one mode -----------------------------------------------------------------------------------------


def prepare_mode_trial(
    plan: ExecutionPlan, setup: TrialSetup, calibration: Calibration, is_single_step: bool = False
) -> PreparedTrial | None:
    """Prepare a trial of a uniform plan: what collectives and the engine add to the step.

    It is tried at the smaller traced batch size, where that is most of the step.
    """
    if trials_of_plan(plan, calibration.trials):
        return None
    size = min(calibration.unsharded, default=setup.batch_sizes[0])
    predicted = setup.predict(plan, size, calibration.compute)
    if not fits_time(predicted) or not setup.fits_memory(plan, size):
        return None
    timing = TrialTiming(
        duration_s=0.0 if is_single_step else seconds.TRIAL_S,
        expected_s=predicted.predicted_s,
        tolerance=RETRY_TOLERANCE,
        can_retry=partial(setup.budget.allows, seconds.TRIAL_S, seconds.MODE_TRIAL_RESERVE_S),
    )

    def run() -> Calibration:
        trial = run_trial(setup, predicted, plan, size, timing)
        return replace(calibration, trials=(*calibration.trials, trial))

    if is_single_step:
        return PreparedTrial((WARMUP_STEPS + 1) * predicted.predicted_s, seconds.SINGLE_STEP_RESERVE_S, run)
    return PreparedTrial(seconds.TRIAL_S, seconds.MODE_TRIAL_RESERVE_S, run)


def uniform_plans(
    model: ModelProfile, cluster: Cluster, capabilities: EngineCapabilities = ALL_CAPABILITIES
) -> dict[str, ExecutionPlan]:
    """Return plans with all operators in one mode by name, those that add least to the unsharded step first.

    Operators that can't be in a mode take the nearest one. With ZDP2, operators of a block share a unit if they may.
    """
    constraints = replace(UNCONSTRAINED, capabilities=capabilities)
    unwrapped, *wrapped = wrap_assignments(model, constraints)
    per_block = wrapped[-1] if wrapped else unwrapped
    kinds = {"dp": (Mode.DP, unwrapped, ShardingScope.WORLD)}
    if (ShardingScope.NODE, False) in constraints.allowed_scopes(cluster):
        kinds["zdp2 in nodes"] = (Mode.ZDP2, per_block, ShardingScope.NODE)
    kinds["zdp2"] = (Mode.ZDP2, per_block, ShardingScope.WORLD)
    kinds["zdp"] = (Mode.ZDP, unwrapped, ShardingScope.WORLD)
    return {n: _uniform_plan(model, cluster, *kind) for n, kind in kinds.items() if kind[0] in capabilities.modes}


def _uniform_plan(
    model: ModelProfile, cluster: Cluster, mode: Mode, units: WrapAssignment, scope: ShardingScope
) -> ExecutionPlan:
    operators = (
        OperatorPlan(
            name=operator.name,
            slices=uniform_choice(operator, mode).slices,
            sharding_group=scope,
            unit=unit,
            num_parameters=operator.num_parameters,
            replicated_reason=operator.replicated_reason,
        )
        for operator, unit in zip(model.operators, units, strict=True)
    )
    return ExecutionPlan.minimal(operators, cluster.model_copy(update={"prefetch_max_bytes": 0}))

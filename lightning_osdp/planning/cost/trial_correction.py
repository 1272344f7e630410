"""Corrections of times that were measured in parts, by trials of the whole step.

Kernels timed one by one find other data in the caches than in a step; collectives run between operators of another
size, and ranks are differently out of step. Trials give the sums: of either pass of the unsharded module at one or two
batch sizes, and of the step under some plans. The parts keep their shares.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.cost.footprint import COLUMN, Footprint, as_rows, footprint
from lightning_osdp.planning.cost.link_schedule import can_be_played, exposed_communication_s
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.neighbours import neighbours_of
from lightning_osdp.planning.cost.step_time import (
    calibration_kinds,
    communication_time,
    engine_time,
    exchange_time,
    time_cost,
)
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.cluster import (
    MAX_CORRECTION,
    CalibrationFactors,
    Cluster,
    ComputeTimes,
    EngineOverhead,
)
from lightning_osdp.planning.spec.frozen import FrozenModel, Seconds
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Operator, OptimizerStep
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import BatchSizePoint
from lightning_osdp.planning.spec.wrapping import WrappedModel

TRIAL_RELATIVE_ERROR = 0.05
"""Relative standard error of a trial's seconds. [M-cost-11]"""

PLAN_TRIAL_RELATIVE_ERROR = 0.035
"""The least error that a trial over several rounds is taken to have, however little its rounds differ."""

PRIOR_RELATIVE_ERROR = 0.25
"""Assumed standard deviation of ``CalibrationFactors``: of one for all parts together, and of each kind's."""

MAX_TRIAL_SAVING = 1 - 1 / MAX_CORRECTION
"""Fraction of a predicted step that its trial may show not to be needed, on a single rank."""

MODE_NAMES = tuple(mode.value for mode in Mode)

MAX_VALUE = 1e18
"""Limit of fitted values, in seconds or bytes: sums of such ones are finite."""


def fit_nonnegative_line(points: Sequence[tuple[int, float]]) -> LinearInBatch:
    """Return the least-squares line through one or two points (batch size, value), slope and intercept at least 0.

    Values that can't be, negative or not finite, count as 0.
    """
    points = [(size, min(value, MAX_VALUE) if 0 <= value < math.inf else 0.0) for size, value in points]
    if len(points) == 1:
        return LinearInBatch(fixed=points[0][1])
    (low, first), (high, second) = points
    slope = (second - first) / (high - low)
    if slope < 0:
        return LinearInBatch(fixed=(first + second) / 2)
    if first < slope * low:
        return LinearInBatch(per_sample=sum(b * t for b, t in points) / sum(b * b for b, _ in points))
    return LinearInBatch(fixed=first - slope * low, per_sample=slope)


class PassTimes(NamedTuple):
    """Seconds of the unsharded module's forward and backward pass."""

    forward_s: float
    backward_s: float


def pass_times(compute: ComputeTimes, batch_size: int) -> PassTimes:
    """Return the times of the unsharded module's passes as sums of their parts."""
    times = (*compute.operators, compute.unattributed)
    return PassTimes(
        sum(t.forward.value_at(batch_size) for t in times), sum(t.backward.value_at(batch_size) for t in times)
    )


def scale_to_trial(compute: ComputeTimes, measured: Mapping[int, PassTimes]) -> ComputeTimes:
    """Scale the parts so that the sums of each pass agree with trials; recomputing costs a part of the forward.

    [M-cost-12]

    Args:
        compute: Times measured in parts.
        measured: Passes by batch size; one or two of them.
    """
    sizes = sorted(measured)
    factors = zip(*(map(_bounded_ratio, measured[size], pass_times(compute, size)) for size in sizes), strict=True)
    forward, backward = (partial(_scale_line, dict(zip(sizes, each, strict=True))) for each in factors)
    return compute.map_lines(forward, backward)


def _scale_line(factors: Mapping[int, float], line: LinearInBatch) -> LinearInBatch:
    """Scale a line by a factor for each of one or two batch sizes, by one factor what does not grow with the batch.

    Otherwise a little noise between two small batches would make a table's gradient, which is as long for any batch,
    many times as long for one of hundreds of samples.
    """
    if len(factors) == 1:
        return line.scale(*factors.values())
    (low, at_low), (high, at_high) = factors.items()
    common, largest = math.sqrt(at_low * at_high), line.value_at(high)
    proportional_share = high * line.per_sample / largest if largest > 0 else 0.0
    scale = {size: common + proportional_share * (factor - common) for size, factor in factors.items()}
    return fit_nonnegative_line([(size, scale[size] * line.value_at(size)) for size in (low, high)])


def _bounded_ratio(measured_s: float, predicted_s: float) -> float:
    if not predicted_s > 0 or math.isnan(measured_s):
        return 1.0
    return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, measured_s / predicted_s))


class Trial(FrozenModel):
    """Forward and backward of one micro-batch under one plan, predicted from the parts and measured."""

    plan_key: str
    """Which plan (see the function ``plan_key``)."""
    predicted_s: Seconds
    measured_s: Seconds
    overhead_by_kind_s: dict[str, Seconds]
    """Part of ``predicted_s`` of collectives and engine, by ``step_time.calibration_kinds``."""
    exposed_comm_s: Seconds | None = None
    """Part of ``measured_s`` that the rank waited for collectives; None if unknown (CUDA)."""
    relative_error: float = TRIAL_RELATIVE_ERROR
    rounds_s: tuple[Seconds, ...] = ()
    """Measured in each of several rounds, in turns with other plans; ``measured_s`` is their median."""
    plan: ExecutionPlan
    """The plan without its alternatives."""


def plan_key(plan: ExecutionPlan) -> str:
    """Return a key that is equal for plans with the same decisions and the same batch size."""
    choices = [[*op.choice, op.unit, op.is_recomputed] for op in plan.operators]
    has_prefetch = plan.cluster.prefetch_max_bytes > 0 and any(set(op.slices) != {Mode.DP} for op in plan.operators)
    facts = [choices, plan.recomputed, plan.batch_size, has_prefetch, plan.retain_freed_memory]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def predict_trial(
    model: ModelProfile, compute: ComputeTimes, cluster: Cluster, plan: ExecutionPlan, batch_size: int
) -> Trial:
    """Return a trial that has not run yet, with the prediction as ``measured_s``.

    Args:
        model: The model that the plan is for.
        compute: Times scaled to trials of the unsharded module.
        cluster: The ranks and the engine's overhead; its ``CalibrationFactors`` are ignored.
        plan: The plan to try.
        batch_size: Samples of the micro-batch.
    """
    engine = cluster.engine.model_copy(update={"calibration": CalibrationFactors()})
    changes = {"engine": engine, "prefetch_max_bytes": plan.cluster.prefetch_max_bytes}
    parts = cluster.model_copy(update=changes)
    wrapped, choices = _wrap_plan(model, plan)
    is_recomputed = {i for i, op in zip(wrapped.wrapped_index, plan.operators, strict=True) if op.is_recomputed}
    times = wrapped.merge_times(compute).model_copy(update={"optimizer_s_per_byte": 0.0})
    total_s, added_s = times.unattributed.seconds_at(batch_size), Counter[str]()
    neighbours, is_played = neighbours_of(wrapped.model, times), can_be_played(parts)
    if is_played:
        total_s += exposed_communication_s(wrapped.model, choices, plan.recomputed, parts, times, batch_size)
    for index, (operator, choice) in enumerate(zip(wrapped.model.operators, choices, strict=True)):
        recomputed = index in is_recomputed
        own = (operator, choice, parts, times, times.operators[index], batch_size)
        cost = time_cost(*own, recomputed=recomputed, neighbours=neighbours[index])
        total_s += cost.compute_s + (0.0 if is_played else cost.communication_s)
        own_s = sum(
            sum(time(operator, choice, parts, recomputed=recomputed)) for time in (communication_time, engine_time)
        )
        own_s += exchange_time(operator, choice, parts, recomputed=recomputed).value_at(batch_size)
        added_s.update(dict.fromkeys(calibration_kinds(operator, choice), own_s))
    blocks = zip(model.blocks, times.blocks, strict=False)  # times that were not measured count as zero
    total_s += sum(line.value_at(batch_size) for block, line in blocks if block.name in plan.recomputed)
    return Trial(
        plan_key=plan_key(plan),
        predicted_s=total_s,
        measured_s=total_s,
        overhead_by_kind_s=dict(added_s),
        plan=plan.without_alternatives(),
    )


def _wrap_plan(model: ModelProfile, plan: ExecutionPlan) -> tuple[WrappedModel, tuple[ShardingChoice, ...]]:
    wrapped = WrappedModel.from_assignment(model, [op.unit for op in plan.operators])
    return wrapped, wrapped.merge_choices([op.choice for op in plan.operators])


def trial_peak_bytes(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    """Return the peak of a copy of the module in forward and backward under ``plan``.

    The copy has no optimizer, shares replicated parameters with the module, and keeps gradients only if the plan does.
    """
    operators = tuple(_without_optimizer_states(operator) for operator in model.operators)
    step = OptimizerStep(in_backward=plan.update_in_backward)
    model = model.model_copy(update={"operators": operators, "optimizer_step": step})
    pairs = zip(operators, plan.operators, strict=True)
    shared = sum(p.parameter_bytes for own, op in pairs if op.slices == (Mode.DP,) for p in own.parameters)
    return max(0, _step_peak_bytes(model, cluster, plan, batch_size) - shared - model.buffer_bytes)


def passes_peak_bytes(model: ModelProfile, cluster: Cluster, batch_size: int) -> int:
    """Return the peak of an unsharded copy of the module whose gradients are freed as soon as they are made.

    The copy has no optimizer, and shares parameters with the module.
    """
    footprints = [footprint(operator, ShardingChoice(), cluster) for operator in model.operators]
    nothing = Footprint(*(0.0 for _ in COLUMN))
    rows = [
        nothing._replace(
            transient=own.replicated_gradients,
            unsharded_between_passes=own.unsharded_between_passes,
            replicated_casts=own.replicated_casts,
            casts_before_gradients=own.casts_before_gradients,
        )
        for own in footprints
    ]
    timeline, nothing_recomputed = Timeline(model, cluster, 0), np.zeros(len(model.blocks), dtype=bool)
    peak = timeline.peak_of_footprints(as_rows(rows), batch_size, 1, nothing_recomputed)
    return max(0, peak.total_bytes - model.buffer_bytes)


def training_peak_bytes(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    """Return the peak of training under ``plan``, without the module's parameters and buffers as they are before."""
    return max(0, _step_peak_bytes(model, cluster, plan, batch_size) - model.parameter_bytes - model.buffer_bytes)


def _step_peak_bytes(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    wrapped, choices = _wrap_plan(model, plan)
    cluster = cluster.model_copy(update={"prefetch_max_bytes": plan.cluster.prefetch_max_bytes})
    return Timeline(wrapped.model, cluster, 0).peak(choices, batch_size, recomputed=plan.recomputed).total_bytes


def _without_optimizer_states(operator: Operator) -> Operator:
    parameters = tuple(p.model_copy(update={"optimizer_bytes": 0}) for p in operator.parameters)
    return operator.model_copy(update={"parameters": parameters})


def fit_calibration(engine_overhead: EngineOverhead, trials: Sequence[Trial]) -> EngineOverhead:
    """Return the engine's overhead with the most likely ``CalibrationFactors``, given the trials.

    Trials are noisy sums over kinds of operators: a least-squares fit weighs them against what is assumed without
    them, the factors of ``engine_overhead``, by their errors.
    """
    if not trials:
        return engine_overhead
    kinds = list(CalibrationFactors.model_fields)
    rows, values = [], []
    for trial in trials:
        added_s = [trial.overhead_by_kind_s.get(kind, 0.0) for kind in kinds]
        common_s = sum(trial.overhead_by_kind_s.get(mode, 0.0) for mode in MODE_NAMES)
        error_s = trial.relative_error * trial.measured_s
        if (
            not all(0 <= value < MAX_VALUE for value in (trial.predicted_s, *added_s))
            or not 1 / MAX_VALUE < error_s < MAX_VALUE
        ):
            continue
        rows.append(np.array([common_s, *added_s]) / error_s)
        values.append((trial.measured_s - trial.predicted_s) / error_s)
    prior = np.eye(1 + len(kinds)) / PRIOR_RELATIVE_ERROR
    assumed = [0.0, *(getattr(engine_overhead.calibration, kind) for kind in kinds)]
    targets = [*values, *(factor / PRIOR_RELATIVE_ERROR for factor in assumed)]
    common, *own = _solve_nonnegative(np.vstack([*rows, prior]), np.array(targets))
    factors = {kind: float(factor + common * (kind in MODE_NAMES)) for kind, factor in zip(kinds, own, strict=True)}
    return engine_overhead.model_copy(update={"calibration": CalibrationFactors(**factors)})


def _solve_nonnegative(matrix: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a least-squares solution without the columns that would be negative in it."""
    solution, free = np.zeros(matrix.shape[1]), np.arange(matrix.shape[1])
    while free.size:
        found = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
        if (found >= 0).all():
            solution[free] = found
            break
        free = np.delete(free, found.argmin())
    return solution


def trials_of_plan(plan: ExecutionPlan, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of exactly this plan."""
    key = plan_key(plan)
    return [trial for trial in trials if trial.plan_key == key]


def apply_trial(plan: ExecutionPlan, trials: Sequence[Trial]) -> ExecutionPlan:
    """Return the plan with the step time that its own trials measured, if it has any.

    No batch size that was not tried is recorded as better than it. Calibration serves all plans, so it leaves an error
    for each. That error counts as communication, unless the time spent waiting was measured, or there is a single rank.
    """
    own = [trial for trial in trials_of_plan(plan, trials) if 0 <= trial.measured_s < MAX_VALUE]
    if not own:
        return plan
    before, is_alone = plan.predicted, plan.cluster.ranks == 1
    error_s = sum(trial.measured_s - calibrated_s(trial, plan.cluster.engine.calibration) for trial in own) / len(own)
    error_s *= plan.accumulate_grad_batches
    error_s = max(error_s, -MAX_TRIAL_SAVING * before.step_time_s if is_alone else -before.communication_time_s)
    step_s = before.step_time_s + error_s
    communication_s = 0.0 if is_alone else before.communication_time_s + error_s
    exposed_s = [trial.exposed_comm_s for trial in own if trial.exposed_comm_s is not None]
    if exposed_s and plan.accumulate_grad_batches == 1:  # else some collectives are rarer than forward and backward
        communication_s = min(step_s, sum(exposed_s) / len(exposed_s))
    update = {
        "step_time_s": step_s,
        "compute_time_s": step_s - communication_s,
        "communication_time_s": communication_s,
        "samples_per_s": before.samples_per_s * before.step_time_s / step_s if step_s else before.samples_per_s,
    }
    predicted = before.model_copy(update=update)
    return plan.model_copy(update={"predicted": predicted, "frontier": _known_frontier(plan, predicted.samples_per_s)})


def _known_frontier(plan: ExecutionPlan, samples_per_s: float) -> tuple[BatchSizePoint, ...]:
    """Return the best of each batch size, off by as much as the plan's own was, and none better than the plan."""
    own = next((point.samples_per_s for point in plan.frontier if point.batch_size == plan.batch_size), 0.0)

    def known_rate(point: BatchSizePoint) -> float:
        is_own = point.batch_size == plan.batch_size
        return (
            samples_per_s if is_own else min(samples_per_s, point.samples_per_s * (samples_per_s / own if own else 1))
        )

    return tuple(point.model_copy(update={"samples_per_s": known_rate(point)}) for point in plan.frontier)


def calibrated_s(trial: Trial, calibration: CalibrationFactors) -> float:
    """Return the trial's prediction with ``calibration``."""
    added_s: float = sum(seconds * getattr(calibration, kind) for kind, seconds in trial.overhead_by_kind_s.items())
    return trial.predicted_s + added_s

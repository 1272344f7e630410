"""What rehearsals of the whole step say of times that were measured in parts.

Kernels that are timed one by one find other data in the caches than in a step, and collectives between operators of
another size, ranks that are out of step in other ways. Rehearsals give the sums: of either pass of the plain module at
one or two batch sizes, and of the step under some plans. The parts keep their shares.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.step_time import calibration_kinds, communication_time, engine_time, time_cost
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, legal_modes
from lightning_osdp.planning.spec.cluster import (
    MAX_CORRECTION,
    CalibrationFactors,
    Cluster,
    ComputeTimes,
    EngineOverhead,
)
from lightning_osdp.planning.spec.model import FrozenModel, LinearInBatch, ModelProfile, Operator, OptimizerStep
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.wrapping import WrappedModel

TRIAL_RELATIVE_ERROR = 0.05
"""Relative standard error of a rehearsal's seconds: the same step comes out as differently when it is run again.
[measured, a fixed step without communication, stretches of some seconds: 5 to 9 %]"""

PLAN_TRIAL_RELATIVE_ERROR = 0.035
"""The same where the plan that was chosen is rehearsed, for twice as long."""

PRIOR_RELATIVE_ERROR = 0.25
"""How far parts are thought to be off: the standard deviation of all together, and of each kind (``CalibrationFactors``)."""

MODE_NAMES = tuple(mode.value for mode in Mode)


def fit_nonnegative_line(points: Sequence[tuple[int, float]]) -> LinearInBatch:
    """The line through one or two points (batch size, value) with neither slope nor intercept below zero, least squares
    of the rest."""
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
    """Seconds of the plain module's forward and backward pass."""

    forward_s: float
    backward_s: float


def pass_times(compute: ComputeTimes, batch_size: int) -> PassTimes:
    """Of the plain module, as sums of its parts."""
    times = (*compute.operators, compute.unattributed)
    return PassTimes(
        sum(t.forward.value_at(batch_size) for t in times), sum(t.backward.value_at(batch_size) for t in times)
    )


def scale_to_trial(compute: ComputeTimes, measured: Mapping[int, PassTimes]) -> ComputeTimes:
    """The same parts, scaled so that the sums of each pass come to what was rehearsed: what recomputing costs is a part
    of the forward pass. [measured, language model, 4 ranks on 2 cores, starts of one hour: parts have it at 29 to 45 %
    of the step, rehearsals at 33 to 38 %]

    Args:
        compute: as measured in parts.
        measured: by batch size; one or two of them.
    """
    sizes = sorted(measured)
    factors = zip(*(map(_bounded_ratio, measured[size], pass_times(compute, size)) for size in sizes), strict=True)
    forward, backward = (partial(_scale_line, dict(zip(sizes, each, strict=True))) for each in factors)
    return compute.map_lines(forward, backward)


def _scale_line(factors: Mapping[int, float], line: LinearInBatch) -> LinearInBatch:
    if len(factors) == 1:
        (factor,) = factors.values()
        return line.scale(factor)
    return fit_nonnegative_line([(size, factor * line.value_at(size)) for size, factor in factors.items()])


def _bounded_ratio(measured_s: float, predicted_s: float) -> float:
    if predicted_s <= 0:
        return 1.0
    return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, measured_s / predicted_s))


def uniform_choice(operator: Operator, mode: Mode) -> ShardingChoice:
    """The choice for an operator, not split, where all that can are in one mode; what it may come nearest to that."""
    legal = legal_modes(operator)
    return ShardingChoice((mode if mode in legal else legal[-1],))


class Trial(FrozenModel):
    """The step under one plan, forward and backward of one micro-batch: foreseen from the parts, and as it was."""

    plan_key: str
    """Which plan (``plan_key``)."""
    predicted_s: float
    measured_s: float
    overhead_by_kind_s: dict[str, float]
    """Part of ``predicted_s`` that collectives and the engine add, by kind of operator (``step_time.kinds``)."""
    exposed_comm_s: float | None = None
    """Part of ``measured_s`` in which the rank waited for collectives; None where that is not known (CUDA)."""
    relative_error: float = TRIAL_RELATIVE_ERROR
    plan: ExecutionPlan | None = None
    """The plan without reasons, if the search has found it."""


def plan_key(plan: ExecutionPlan) -> str:
    """A name for what is decided in a plan, the same for plans that do the same at the same batch size."""
    choices = [[*op.choice, op.unit, op.is_recomputed] for op in plan.operators]
    facts = [choices, plan.recomputed, plan.batch_size, plan.cluster.prefetch_max_bytes > 0, plan.retain_freed_memory]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def predict_trial(
    model: ModelProfile, compute: ComputeTimes, cluster: Cluster, plan: ExecutionPlan, batch_size: int
) -> Trial:
    """A rehearsal that has not been yet: ``measured_s`` is what was foreseen.

    Args:
        model: whose step it is.
        compute: sums as rehearsed with the plain module.
        cluster: with links and engine; its ``CalibrationFactors`` does not count.
        plan: what is to be rehearsed.
        batch_size: at which.
    """
    engine_overhead = cluster.engine.model_copy(update={"calibration": CalibrationFactors()})
    parts = cluster.model_copy(
        update={"engine": engine_overhead, "prefetch_max_bytes": plan.cluster.prefetch_max_bytes}
    )
    joined = WrappedModel.from_assignment(model, [op.unit for op in plan.operators])
    again = {at for at, op in zip(joined.wrapped_index, plan.operators, strict=True) if op.is_recomputed}
    choices = joined.merge_choices([op.choice for op in plan.operators])
    passes = joined.merge_times(compute).model_copy(update={"optimizer_s_per_byte": 0.0})
    seconds, added_s = passes.unattributed.seconds_at(batch_size), Counter[str]()
    for at, (operator, choice) in enumerate(zip(joined.model.operators, choices, strict=True)):
        recomputed, time = at in again, passes.operators[at]
        seconds += sum(time_cost(operator, choice, parts, passes, time, batch_size, recomputed=recomputed))
        own = communication_time(operator, choice, parts, recomputed=recomputed)
        own_s = sum(own) + sum(engine_time(operator, choice, parts, recomputed=recomputed))
        added_s.update(dict.fromkeys(calibration_kinds(operator, choice), own_s))
    blocks = zip(model.blocks, passes.blocks, strict=False)  # times that were not measured are none
    seconds += sum(line.value_at(batch_size) for block, line in blocks if block.name in plan.recomputed)
    return Trial(plan_key=plan_key(plan), predicted_s=seconds, measured_s=seconds, overhead_by_kind_s=dict(added_s))


def trial_peak_bytes(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    """Peak of a copy in forward and backward under ``make_plan``: it has no optimizer, shares whole parameters that stay
    replicated with the module, and keeps no gradients where the plan does not."""
    free = tuple(_without_optimizer_states(operator) for operator in model.operators)
    step = OptimizerStep(in_backward=plan.update_in_backward)
    model = model.model_copy(update={"operators": free, "optimizer_step": step})
    pairs = zip(free, plan.operators, strict=True)
    shared = sum(p.parameter_bytes for own, op in pairs if op.slices == (Mode.DP,) for p in own.parameters)
    return max(0, _step_peak_bytes(model, cluster, plan, batch_size) - shared - model.buffer_bytes)


def training_peak_bytes(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    """Peak of the module in training under ``make_plan``, beside its parameters and buffers as they are before."""
    present = sum(p.parameter_bytes for operator in model.operators for p in operator.parameters)
    return max(0, _step_peak_bytes(model, cluster, plan, batch_size) - present - model.buffer_bytes)


def _step_peak_bytes(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    joined = WrappedModel.from_assignment(model, [op.unit for op in plan.operators])
    choices = joined.merge_choices([op.choice for op in plan.operators])
    cluster = cluster.model_copy(update={"prefetch_max_bytes": plan.cluster.prefetch_max_bytes})
    return Timeline(joined.model, cluster, 0).peak(choices, batch_size, recomputed=plan.recomputed).total_bytes


def _without_optimizer_states(operator: Operator) -> Operator:
    parameters = tuple(p.model_copy(update={"optimizer_bytes": 0}) for p in operator.parameters)
    return operator.model_copy(update={"parameters": parameters})


def fit_calibration(engine_overhead: EngineOverhead, trials: Sequence[Trial]) -> EngineOverhead:
    """The engine's time with what rehearsals have shown of all collectives and the engine: the most likely ``CalibrationFactors``.

    All rehearsals were of sums, so kinds of operators can't be told apart for sure, nor is the clock. A least squares
    fit weighs what the rehearsals took, each with its error, against the parts, with theirs.
    """
    if not trials:
        return engine_overhead
    names = list(CalibrationFactors.model_fields)
    rows, values = [], []
    for one in trials:
        together = sum(one.overhead_by_kind_s.get(mode, 0.0) for mode in MODE_NAMES)
        error_s = one.relative_error * one.measured_s
        rows.append(np.array([together, *(one.overhead_by_kind_s.get(name, 0.0) for name in names)]) / error_s)
        values.append((one.measured_s - one.predicted_s) / error_s)
    parts = np.eye(1 + len(names)) / PRIOR_RELATIVE_ERROR
    common, *own = np.linalg.lstsq(np.vstack([*rows, parts]), np.append(values, np.zeros(len(parts))), rcond=None)[0]
    shares = {name: float(share + common * (name in MODE_NAMES)) for name, share in zip(names, own, strict=True)}
    return engine_overhead.model_copy(update={"calibration": CalibrationFactors(**shares)})


def trials_of_plan(plan: ExecutionPlan, trials: Sequence[Trial]) -> list[Trial]:
    """Those in which this very plan was run."""
    name = plan_key(plan)
    return [one for one in trials if one.plan_key == name]


def apply_trial(plan: ExecutionPlan, trials: Sequence[Trial]) -> ExecutionPlan:
    """The plan with the time that it took where it was rehearsed itself: one ``CalibrationFactors`` for all plans leaves a rest.
    That counts as communication, unless it is known how long ranks have waited, or there are no others."""
    own = trials_of_plan(plan, trials)
    if not own:
        return plan
    more_s = sum(one.measured_s - calibrated_s(one, plan.cluster.engine.calibration) for one in own) / len(own)
    before, alone = plan.predicted, plan.cluster.ranks == 1
    more_s *= plan.accumulate_grad_batches
    more_s = more_s if alone else max(more_s, -before.communication_time_s)
    step_s, communication_s = before.step_time_s + more_s, 0.0 if alone else before.communication_time_s + more_s
    waits = [one.exposed_comm_s for one in own if one.exposed_comm_s is not None]
    if waits and plan.accumulate_grad_batches == 1:  # else some collectives come less often than forward and backward
        communication_s = min(step_s, sum(waits) / len(waits))
    update = {
        "step_time_s": step_s,
        "compute_time_s": step_s - communication_s,
        "communication_time_s": communication_s,
        "samples_per_s": before.samples_per_s * before.step_time_s / step_s,
    }
    return plan.model_copy(update={"predicted": before.model_copy(update=update)})


def calibrated_s(trial: Trial, calibration: CalibrationFactors) -> float:
    """What is foreseen with ``calibration``, as far as each kind of operators has it."""
    more_s: float = sum(seconds * getattr(calibration, kind) for kind, seconds in trial.overhead_by_kind_s.items())
    return trial.predicted_s + more_s

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

from lightning_osdp.planning.choices import Choice, Mode, legal_modes
from lightning_osdp.planning.cluster import MOST_FACTOR, Cluster, ComputeTimes, EngineOverhead, Excess
from lightning_osdp.planning.cost import communication, engine, kinds, time_cost
from lightning_osdp.planning.joining import Joined
from lightning_osdp.planning.operators import Frozen, Line, ModelDescription, Operator, OptimizerStep
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.timeline import Timeline

STEP_ERROR = 0.05
"""Relative standard error of a rehearsal's seconds: the same step comes out as differently when it is run again.
[measured, a fixed step without communication, stretches of some seconds: 5 to 9 %]"""

CHOSEN_ERROR = 0.035
"""The same where the plan that was chosen is rehearsed, for twice as long."""

PART_ERROR = 0.25
"""How far parts are thought to be off: the standard deviation of all together, and of each kind (``Excess``)."""

MODES = tuple(mode.value for mode in Mode)


def rising(points: Sequence[tuple[int, float]]) -> Line:
    """The line through one or two points (batch size, value) with neither slope nor intercept below zero, least squares
    of the rest."""
    if len(points) == 1:
        return Line(fixed=points[0][1])
    (low, first), (high, second) = points
    slope = (second - first) / (high - low)
    if slope < 0:
        return Line(fixed=(first + second) / 2)
    if first < slope * low:
        return Line(per_sample=sum(b * t for b, t in points) / sum(b * b for b, _ in points))
    return Line(fixed=first - slope * low, per_sample=slope)


class Passes(NamedTuple):
    """Seconds of the plain module's forward and backward pass."""

    forward_s: float
    backward_s: float


def passes_s(compute: ComputeTimes, batch_size: int) -> Passes:
    """Of the plain module, as sums of its parts."""
    times = (*compute.operators, compute.outside)
    return Passes(sum(t.forward.at(batch_size) for t in times), sum(t.backward.at(batch_size) for t in times))


def rehearsed_compute(compute: ComputeTimes, took: Mapping[int, Passes]) -> ComputeTimes:
    """The same parts, scaled so that the sums of each pass come to what was rehearsed: what recomputing costs is a part
    of the forward pass. [measured, language model, 4 ranks on 2 cores, starts of one hour: parts have it at 29 to 45 %
    of the step, rehearsals at 33 to 38 %]

    Args:
        compute: as measured in parts.
        took: by batch size; one or two of them.
    """
    sizes = sorted(took)
    factors = zip(*(map(_within, took[size], passes_s(compute, size)) for size in sizes), strict=True)
    forward, backward = (partial(_scaled, dict(zip(sizes, each, strict=True))) for each in factors)
    return compute.changed(forward, backward)


def _scaled(factors: Mapping[int, float], line: Line) -> Line:
    if len(factors) == 1:
        (factor,) = factors.values()
        return line.times(factor)
    return rising([(size, factor * line.at(size)) for size, factor in factors.items()])


def _within(rehearsed_s: float, parts_s: float) -> float:
    if parts_s <= 0:
        return 1.0
    return min(MOST_FACTOR, max(1 / MOST_FACTOR, rehearsed_s / parts_s))


def alike(operator: Operator, mode: Mode) -> Choice:
    """The choice for an operator, not split, where all that can are in one mode; what it may come nearest to that."""
    legal = legal_modes(operator)
    return Choice((mode if mode in legal else legal[-1],))


class Rehearsal(Frozen):
    """The step under one plan, forward and backward of one micro-batch: foreseen from the parts, and as it was."""

    decided: str
    """Which plan (``decided``)."""
    foreseen_s: float
    took_s: float
    added_s: dict[str, float]
    """Part of ``foreseen_s`` that collectives and the engine add, by kind of operator (``cost.kinds``)."""
    waited_s: float | None = None
    """Part of ``took_s`` in which the rank waited for collectives; None where that is not known (CUDA)."""
    error: float = STEP_ERROR
    plan: ExecutionPlan | None = None
    """The plan without reasons, if the search has found it."""


def decided(plan: ExecutionPlan) -> str:
    """A name for what is decided in a plan, the same for plans that do the same at the same batch size."""
    choices = [[*op.choice, op.unit, op.checkpoint] for op in plan.operators]
    facts = [choices, plan.recomputed, plan.batch_size, plan.cluster.ahead_bytes > 0, plan.keep_heap]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def foreseen(
    model: ModelDescription, compute: ComputeTimes, cluster: Cluster, plan: ExecutionPlan, batch_size: int
) -> Rehearsal:
    """A rehearsal that has not been yet: ``took_s`` is what was foreseen.

    Args:
        model: whose step it is.
        compute: sums as rehearsed with the plain module.
        cluster: with links and engine; its ``Excess`` does not count.
        plan: what is to be rehearsed.
        batch_size: at which.
    """
    engine_overhead = cluster.engine.model_copy(update={"excess": Excess()})
    parts = cluster.model_copy(update={"engine": engine_overhead, "ahead_bytes": plan.cluster.ahead_bytes})
    joined = Joined.of(model, [op.unit for op in plan.operators])
    again = {at for at, op in zip(joined.place, plan.operators, strict=True) if op.checkpoint}
    choices = joined.gathered([op.choice for op in plan.operators])
    passes = joined.times(compute).model_copy(update={"optimizer_s_per_byte": 0.0})
    seconds, added_s = passes.outside.at(batch_size), Counter[str]()
    for at, (operator, choice) in enumerate(zip(joined.model.operators, choices, strict=True)):
        recomputed, time = at in again, passes.operators[at]
        seconds += sum(time_cost(operator, choice, parts, passes, time, batch_size, recomputed=recomputed))
        own = communication(operator, choice, parts, recomputed=recomputed)
        own_s = sum(own) + sum(engine(operator, choice, parts, recomputed=recomputed))
        added_s.update(dict.fromkeys(kinds(operator, choice), own_s))
    blocks = zip(model.blocks, passes.blocks, strict=False)  # times that were not measured are none
    seconds += sum(line.at(batch_size) for block, line in blocks if block.name in plan.recomputed)
    return Rehearsal(decided=decided(plan), foreseen_s=seconds, took_s=seconds, added_s=dict(added_s))


def copy_bytes(model: ModelDescription, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    """Peak of a copy in forward and backward under ``plan``: it has no optimizer, shares whole parameters that stay
    replicated with the module, and keeps no gradients where the plan does not."""
    free = tuple(_without_states(operator) for operator in model.operators)
    step = OptimizerStep(in_backward=plan.update_in_backward)
    model = model.model_copy(update={"operators": free, "optimizer_step": step})
    pairs = zip(free, plan.operators, strict=True)
    shared = sum(p.parameter_bytes for own, op in pairs if op.slices == (Mode.DP,) for p in own.parameters)
    return max(0, _step_bytes(model, cluster, plan, batch_size) - shared - model.buffer_bytes)


def training_bytes(model: ModelDescription, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    """Peak of the module in training under ``plan``, beside its parameters and buffers as they are before."""
    present = sum(p.parameter_bytes for operator in model.operators for p in operator.parameters)
    return max(0, _step_bytes(model, cluster, plan, batch_size) - present - model.buffer_bytes)


def _step_bytes(model: ModelDescription, cluster: Cluster, plan: ExecutionPlan, batch_size: int) -> int:
    joined = Joined.of(model, [op.unit for op in plan.operators])
    choices = joined.gathered([op.choice for op in plan.operators])
    cluster = cluster.model_copy(update={"ahead_bytes": plan.cluster.ahead_bytes})
    return Timeline(joined.model, cluster, 0).peak(choices, batch_size, recomputed=plan.recomputed).total_bytes


def _without_states(operator: Operator) -> Operator:
    parameters = tuple(p.model_copy(update={"optimizer_bytes": 0}) for p in operator.parameters)
    return operator.model_copy(update={"parameters": parameters})


def with_excess(engine_overhead: EngineOverhead, rehearsals: Sequence[Rehearsal]) -> EngineOverhead:
    """The engine's time with what rehearsals have shown of all collectives and the engine: the most likely ``Excess``.

    All rehearsals were of sums, so kinds of operators can't be told apart for sure, nor is the clock. A least squares
    fit weighs what the rehearsals took, each with its error, against the parts, with theirs.
    """
    if not rehearsals:
        return engine_overhead
    names = list(Excess.model_fields)
    rows, values = [], []
    for one in rehearsals:
        together = sum(one.added_s.get(mode, 0.0) for mode in MODES)
        error_s = one.error * one.took_s
        rows.append(np.array([together, *(one.added_s.get(name, 0.0) for name in names)]) / error_s)
        values.append((one.took_s - one.foreseen_s) / error_s)
    parts = np.eye(1 + len(names)) / PART_ERROR
    common, *own = np.linalg.lstsq(np.vstack([*rows, parts]), np.append(values, np.zeros(len(parts))), rcond=None)[0]
    shares = {name: float(share + common * (name in MODES)) for name, share in zip(names, own, strict=True)}
    return engine_overhead.model_copy(update={"excess": Excess(**shares)})


def of_plan(plan: ExecutionPlan, rehearsals: Sequence[Rehearsal]) -> list[Rehearsal]:
    """Those in which this very plan was run."""
    name = decided(plan)
    return [one for one in rehearsals if one.decided == name]


def as_rehearsed(plan: ExecutionPlan, rehearsals: Sequence[Rehearsal]) -> ExecutionPlan:
    """The plan with the time that it took where it was rehearsed itself: one ``Excess`` for all plans leaves a rest.
    That counts as communication, unless it is known how long ranks have waited, or there are no others."""
    own = of_plan(plan, rehearsals)
    if not own:
        return plan
    more_s = sum(one.took_s - fitted_s(one, plan.cluster.engine.excess) for one in own) / len(own)
    before, alone = plan.predicted, plan.cluster.ranks == 1
    more_s *= plan.accumulate_grad_batches
    more_s = more_s if alone else max(more_s, -before.communication_time_s)
    step_s, communication_s = before.step_time_s + more_s, 0.0 if alone else before.communication_time_s + more_s
    waits = [one.waited_s for one in own if one.waited_s is not None]
    if waits and plan.accumulate_grad_batches == 1:  # else some collectives come less often than forward and backward
        communication_s = min(step_s, sum(waits) / len(waits))
    update = {
        "step_time_s": step_s,
        "compute_time_s": step_s - communication_s,
        "communication_time_s": communication_s,
        "samples_per_s": before.samples_per_s * before.step_time_s / step_s,
    }
    return plan.model_copy(update={"predicted": before.model_copy(update=update)})


def fitted_s(one: Rehearsal, excess: Excess) -> float:
    """What is foreseen with ``excess``, as far as each kind of operators has it."""
    more_s: float = sum(seconds * getattr(excess, kind) for kind, seconds in one.added_s.items())
    return one.foreseen_s + more_s

"""What a run teaches about the next prediction: how far compute, communication and memory were off."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, ComputeTimes
from lightning_osdp.planning.spec.model import FrozenModel
from lightning_osdp.planning.spec.plan import ExecutionPlan

FrozenValue = TypeVar("FrozenValue", bound=FrozenModel)

STEP_TIME_TOLERANCE = 0.1
"""Share by which steps may differ from their prediction while their parts are left alone. How much of a step is waiting
differs more from run to run: threads of collectives take their time from the compute or beside it. [measured, two ranks
on two cores, all replicated, the same step of 1.0 s: 289 ms in a rehearsal, 56 ms in training]"""

MAX_CHANGE = 2.0
"""No run changes a prediction by more than this factor: a machine that was busy teaches little."""


class Correction(FrozenModel):
    """By what the next prediction is changed; the default changes nothing."""

    compute: float = 1.0
    """Factor on the measured kernels' times: what surrounds them in a real step."""
    communication: float = 1.0
    """Factor on the collectives' times: between stretches of compute, ranks also wait for each other."""
    memory_bytes: int = 0
    """Added to the overhead of the process."""


@dataclass(frozen=True)
class MeasuredStep:
    """What steps of a real run took, on the rank that took most.

    Attributes:
        step_time_s: median of an optimizer step.
        communication_s: median of the part of it in which the rank waited for collectives; None where that is not
            known, since they overlap compute (CUDA).
        peak_memory_bytes: by the device's own counter.
    """

    step_time_s: float
    communication_s: float | None
    peak_memory_bytes: int


def update_correction(previous: Correction, plan: ExecutionPlan, measured: MeasuredStep) -> Correction:
    """The correction after a run under ``make_plan``, which was predicted with ``previous``.

    Times are taken half way, in the sense of ratios, from what was believed to what was seen: the figures of machines
    are noisy. Compute and communication are corrected apart where both are known and the step itself was off; not where
    units run ahead, since compute is slowed by what goes on beside it. Memory is not noisy; an underestimate is
    corrected at once and in full, an overestimate by half; neither where freed tensors stay in the heap, which says
    little of plans that hand them back.
    """
    predicted = plan.predicted
    communication_s, factor = measured.communication_s, measured.step_time_s / predicted.step_time_s
    parts = predicted.compute_time_s, predicted.communication_time_s
    if (
        communication_s is None
        or plan.cluster.prefetch_max_bytes
        or 0 in parts
        or abs(factor - 1) <= STEP_TIME_TOLERANCE
    ):
        compute, communication = previous.compute * _damped(factor), previous.communication * _damped(factor)
    else:
        compute_s = max(0.0, measured.step_time_s - communication_s)
        compute = previous.compute * _damped(compute_s / predicted.compute_time_s)
        communication = previous.communication * _damped(communication_s / predicted.communication_time_s)
    missing = 0 if plan.retain_freed_memory else measured.peak_memory_bytes - predicted.peak_memory_bytes
    return Correction(
        compute=compute,
        communication=communication,
        memory_bytes=previous.memory_bytes + (missing if missing > 0 else missing // 2),
    )


def exceeds_prediction(plan: ExecutionPlan, peak_memory_bytes: int, margin: float) -> bool:
    """Whether the measured peak is above the predicted one by more than ``margin`` (a share), or above the limit: that
    alone where the heap may grow up to the limit."""
    if plan.retain_freed_memory:
        return peak_memory_bytes > plan.memory_limit_bytes
    allowed = min(plan.memory_limit_bytes, round(plan.predicted.peak_memory_bytes * (1 + margin)))
    return peak_memory_bytes > allowed


def correct_compute(compute: ComputeTimes, correction: Correction) -> ComputeTimes:
    """The same times, each by the factor on compute."""
    factor = correction.compute
    changed = compute.map_lines(lambda line: line.scale(factor))
    return changed.model_copy(update={"optimizer_s_per_byte": compute.optimizer_s_per_byte * factor})


def correct_cluster(cluster: Cluster, correction: Correction) -> Cluster:
    """The same hardware, every collective by the factor on communication."""
    return _scale_links(cluster, correction.communication)


def _scale_links(value: FrozenValue, factor: float) -> FrozenValue:
    """The same value with every collective in it, however deep, by ``factor``."""
    if isinstance(value, CollectiveFit):
        times = {"latency_s": value.latency_s * factor, "s_per_byte": value.s_per_byte * factor}
        return value.model_copy(update=times)
    inner = {name: getattr(value, name) for name in type(value).model_fields}
    return value.model_copy(
        update={name: _scale_links(one, factor) for name, one in inner.items() if isinstance(one, FrozenModel)}
    )


def _damped(factor: float) -> float:
    return sqrt(min(MAX_CHANGE, max(1 / MAX_CHANGE, factor)))

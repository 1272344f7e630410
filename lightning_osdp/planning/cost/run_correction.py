"""Corrections of predictions by what earlier runs have measured: compute, communication and memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, sqrt
from typing import TypeVar

from pydantic import Field

from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, ComputeTimes
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.plan import ExecutionPlan

FrozenValue = TypeVar("FrozenValue", bound=FrozenModel)

STEP_TIME_TOLERANCE = 0.1
"""Relative error of a step's prediction up to which compute and communication are corrected by the same factor; the
time spent waiting differs more from run to run than the step. [M-cost-8]"""

MAX_STEP_TIME_ERROR = 0.15
"""Relative error of a step's prediction beyond which its plan and trials are not trusted any more."""

MAX_CHANGE, MAX_TOTAL_CHANGE = 2.0, 8.0
"""Largest factors by which one run, and all of them, change a prediction, because the machine may have been busy."""


class Correction(FrozenModel):
    """Changes of the next prediction; the default changes nothing."""

    compute: float = Field(ge=1 / MAX_TOTAL_CHANGE, le=MAX_TOTAL_CHANGE, default=1.0)
    """Factor on the measured times of kernels."""
    communication: float = Field(ge=1 / MAX_TOTAL_CHANGE, le=MAX_TOTAL_CHANGE, default=1.0)
    """Factor on the times of collectives, which include waiting for other ranks in a real step."""
    memory_bytes: int = 0
    """Addition to the memory of the process before the model."""


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of a real run, on the rank with the largest.

    Attributes:
        step_time_s: Median of an optimizer step.
        communication_s: Median of the time in it spent waiting for collectives; None if unknown, because they overlap
            compute (CUDA).
        peak_memory_bytes: Peak by the device's own counter.
    """

    step_time_s: float
    communication_s: float | None
    peak_memory_bytes: int


def update_correction(previous: Correction, plan: ExecutionPlan, measured: MeasuredStep) -> Correction:
    """Return the correction after a run of ``plan``, which was predicted with the ``previous`` one.

    Times are noisy, so a factor moves half way (geometrically) to the measured one. Compute and communication are
    corrected separately if both are known and the step was off, except with prefetching, where collectives slow
    compute down. Memory is not noisy: an underestimate is corrected in full, an overestimate by half; neither if the
    heap retains freed tensors, which says little about other plans.
    """
    predicted, communication_s = plan.predicted, measured.communication_s
    step = measured.step_time_s / predicted.step_time_s if predicted.step_time_s > 0 else 1.0
    compute = communication = step
    if (
        communication_s is not None
        and not plan.cluster.prefetch_max_bytes
        and predicted.compute_time_s
        and predicted.communication_time_s
        and abs(step - 1) > STEP_TIME_TOLERANCE
    ):
        compute = max(0.0, measured.step_time_s - communication_s) / predicted.compute_time_s
        communication = communication_s / predicted.communication_time_s
    missing = 0 if plan.retain_freed_memory else measured.peak_memory_bytes - predicted.peak_memory_bytes
    return Correction(
        compute=_limit(previous.compute * _damp(compute), MAX_TOTAL_CHANGE),
        communication=_limit(previous.communication * _damp(communication), MAX_TOTAL_CHANGE),
        memory_bytes=previous.memory_bytes + (missing if missing > 0 else missing // 2),
    )


def is_step_time_off(plan: ExecutionPlan, measured: MeasuredStep) -> bool:
    """Return whether a run has shown that the plan should be chosen anew: its step is not as it was predicted."""
    return abs(plan.predicted.step_time_s / measured.step_time_s - 1) > MAX_STEP_TIME_ERROR


def contradicts_measurements(plan: ExecutionPlan, measured: MeasuredStep) -> bool:
    """Return whether a run's step is shorter than a correction can explain; a longer one may wait for data."""
    return measured.step_time_s * MAX_TOTAL_CHANGE < plan.predicted.step_time_s


def exceeds_prediction(plan: ExecutionPlan, peak_memory_bytes: int, margin: float) -> bool:
    """Return whether a measured peak is above the limit, or above the predicted one by the fraction ``margin``.

    A heap that retains freed tensors may grow up to the limit.
    """
    limit = plan.memory_limit_bytes
    if not plan.retain_freed_memory:
        limit = min(limit, round(plan.predicted.peak_memory_bytes * (1 + margin)))
    return peak_memory_bytes > limit


def correct_compute(compute: ComputeTimes, correction: Correction) -> ComputeTimes:
    """Return compute times multiplied by the correction's factor."""
    scaled = compute.map_lines(lambda line: line.scale(correction.compute))
    return scaled.model_copy(update={"optimizer_s_per_byte": compute.optimizer_s_per_byte * correction.compute})


def correct_cluster(cluster: Cluster, correction: Correction) -> Cluster:
    """Return the cluster with the time of every collective multiplied by the correction's factor."""
    return _scale_links(cluster, correction.communication)


def _scale_links(value: FrozenValue, factor: float) -> FrozenValue:
    """Scale every ``CollectiveFit`` in ``value``, however deep."""
    if isinstance(value, CollectiveFit):
        return value.model_copy(update={name: getattr(value, name) * factor for name in ("latency_s", "s_per_byte")})
    fields = ((name, getattr(value, name)) for name in type(value).model_fields)
    scaled = {name: _scale_links(field, factor) for name, field in fields if isinstance(field, FrozenModel)}
    return value.model_copy(update=scaled)


def _damp(factor: float) -> float:
    return sqrt(_limit(factor, MAX_CHANGE))


def _limit(factor: float, maximum: float) -> float:
    """Return a factor between the inverse of ``maximum`` and that; 1 if it is not a number."""
    return 1.0 if isnan(factor) else min(maximum, max(1 / maximum, factor))

"""All that is measured before planning, as values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.cost.trial_correction import Trial
from lightning_osdp.planning.search.plan_selection import CachedPlan
from lightning_osdp.planning.spec.cluster import (
    NO_ENGINE_OVERHEAD,
    ComputeTimes,
    EngineOverhead,
    HierarchicalLinks,
    Link,
)
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan

TYPICAL_BYTES = 1 << 20
"""Size of the operator whose times tell measurements apart."""

NO_CORRECTION = Correction()
"""The correction of measurements that no run has followed yet."""


class ClusterProfile(FrozenModel):
    """What is measured of the ranks, whichever model they train."""

    link: Link
    hierarchical_links: HierarchicalLinks | None = None
    """The links inside and between nodes, if there are several nodes of several ranks."""
    engine: EngineOverhead = NO_ENGINE_OVERHEAD

    def figures_s(self, ranks: int) -> tuple[float, ...]:
        """Return the times that tell measurements apart: of each collective, and of each mode with its engine."""
        fits = (self.link.all_reduce, self.link.all_gather, self.link.reduce_scatter)
        reduce_s, gather_s, scatter_s = (fit.time_s(TYPICAL_BYTES, ranks) for fit in fits)
        modes = (
            reduce_s + self.engine.dp.time_s(TYPICAL_BYTES),
            gather_s + scatter_s + self.engine.zdp2.time_s(TYPICAL_BYTES),
            2 * gather_s + scatter_s + self.engine.zdp.time_s(TYPICAL_BYTES),
        )
        return (reduce_s, gather_s, scatter_s, *modes)


class MeasuredCluster(FrozenModel):
    """What the latest starts have measured of the ranks. Their median counts: one disturbed start changes little."""

    starts: tuple[ClusterProfile, ...] = Field(min_length=1)

    @property
    def median(self) -> ClusterProfile:
        """The median of every number."""
        median: ClusterProfile = _median(self.starts)
        return median

    def relative_spread(self, ranks: int) -> float:
        """Return the factor by which the typical start differs from the median, minus 1."""
        median = self.median
        return max(statistics.median(max_ratio(each, median, ranks) - 1 for each in self.starts), 0.0)


def max_ratio(one: ClusterProfile, other: ClusterProfile, ranks: int) -> float:
    """Return the largest factor between the times of two measurements."""
    pairs = zip(one.figures_s(ranks), other.figures_s(ranks), strict=True)
    return max((max(pair) / min(pair) if min(pair) > 0 else math.inf for pair in pairs if max(pair) > 0), default=1.0)


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or of each number in frozen values."""
    first = values[0]
    if isinstance(first, FrozenModel):
        names = type(first).model_fields
        return type(first)(**{name: _median([getattr(value, name) for value in values]) for name in names})
    return statistics.median(values) if isinstance(first, float) else first


class Profile(ClusterProfile):
    """All that a plan is made from."""

    compute: ComputeTimes
    trials: tuple[Trial, ...] = ()
    """Trials of whole steps, predicted with these measurements."""
    compute_with_retained_heap: ComputeTimes | None = None
    """``compute`` with freed tensors retained in the heap; None if they can't or must not be, or if it is not known."""
    cached_plans: tuple[CachedPlan, ...] = ()
    """Plans that earlier starts chose with these measurements."""
    correction: Correction = NO_CORRECTION
    """What runs with these measurements have shown since."""

    def matches(self, model: ModelProfile | None) -> bool:
        """Return whether this can have been measured for ``model``: whether there are as many operators and blocks."""
        if model is None:
            return True
        times = [self.compute, *([self.compute_with_retained_heap] if self.compute_with_retained_heap else [])]
        plans = [cached.plan for cached in self.cached_plans] + [trial.plan for trial in self.trials]
        names = [operator.name for operator in model.operators]
        return all(one.matches(model) for one in times) and all(
            [operator.name for operator in plan.operators] == names for plan in plans
        )

    def compute_for(self, plan: ExecutionPlan) -> ComputeTimes:
        """Return the compute times with the heap policy of ``plan``."""
        return (self.compute_with_retained_heap if plan.retain_freed_memory else None) or self.compute

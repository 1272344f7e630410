"""All that is measured before planning, as values."""

from __future__ import annotations

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
from lightning_osdp.planning.spec.model import FrozenModel, ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan

NO_CORRECTION = Correction()
"""The correction of measurements that no run has followed yet."""


class ClusterProfile(FrozenModel):
    """What is measured of the ranks, whichever model they train."""

    link: Link
    hierarchical_links: HierarchicalLinks | None = None
    """The links inside and between nodes, if there are several nodes of several ranks."""
    engine: EngineOverhead = NO_ENGINE_OVERHEAD
    checksum: str = Field(default="", exclude=True, repr=False)
    """Of its file (``profile_cache.write``), which is checked and taken off when that is read."""


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
        plans = [cached.plan for cached in self.cached_plans] + [trial.plan for trial in self.trials if trial.plan]
        names = [operator.name for operator in model.operators]
        return all(one.matches(model) for one in times) and all(
            [operator.name for operator in plan.operators] == names for plan in plans
        )

    def compute_for(self, plan: ExecutionPlan) -> ComputeTimes:
        """Return the compute times with the heap policy of ``plan``."""
        return (self.compute_with_retained_heap if plan.retain_freed_memory else None) or self.compute

"""The planning problem: everything that a search for a plan decides from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, ModelProfile, NonTrainingWork

PREFETCH_FRACTION = 1 / 24
"""Largest prefetched unit, as a fraction of the memory limit (rounded down to a power of two). Prefetching keeps one
more unit and its gradients in memory; for larger units that memory is of more use elsewhere."""

MIN_OVERLAP = 0.15
"""Smallest fraction of a collective's time that compute must be able to hide for prefetching to be considered."""


@dataclass(frozen=True)
class Problem:
    """Everything that the search decides from.

    Attributes:
        model: The traced model, its operators as tensor parallel as ``constraints`` and ``cluster`` allow.
        cluster: The ranks and their links.
        compute: Measured compute times of ``model``.
        memory_limit_bytes: Limit of a device; no plan's predicted peak exceeds it.
        overhead_bytes: Memory of the process before the model.
        constraints: What the user has decided.
        non_training: Work between steps.
        compute_with_retained_heap: ``compute`` if freed tensors stay in the heap; None if that can't be or is unknown.
        max_retained_batch_size: Largest batch size for which they may stay; None for any.
        has_retained_heap: Whether freed tensors stay in the heap.
    """

    model: ModelProfile
    cluster: Cluster
    compute: ComputeTimes
    memory_limit_bytes: int
    overhead_bytes: int = 0
    constraints: SearchConstraints = UNCONSTRAINED
    non_training: NonTrainingWork = NO_NON_TRAINING_WORK
    compute_with_retained_heap: ComputeTimes | None = None
    max_retained_batch_size: int | None = None
    has_retained_heap: bool = False

    def __post_init__(self) -> None:
        """Restrict tensor parallelism to what the user, the engine and the nodes allow."""
        model = self.constraints.restrict_tensor_parallel(self.model, self.cluster)
        object.__setattr__(self, "model", model)

    @property
    def has_prefetch(self) -> bool:
        """Return whether collectives of units run beside compute."""
        return self.cluster.prefetch_max_bytes > 0

    def with_prefetch(self) -> Problem:
        """Return a copy in which units are prefetched, or the same problem if compute can't hide enough of that."""
        cluster, links = self.cluster, self.cluster.hierarchical_links
        gather = cluster.link.all_gather if cluster.supports_prefetch else None
        if cluster.supports_prefetch_in_nodes and links is not None:
            gather = links.intra_node.all_gather
        if not self.constraints.capabilities.prefetch or gather is None or gather.overlap_fraction < MIN_OVERLAP:
            return self
        bits = int(PREFETCH_FRACTION * self.memory_limit_bytes).bit_length() - 1
        return replace(self, cluster=cluster.model_copy(update={"prefetch_max_bytes": 1 << max(20, bits)}))

    @property
    def has_optimizer_in_backward(self) -> bool:
        """Return whether sharded parameters are updated during backward."""
        return self.model.optimizer_step.in_backward

    def with_optimizer_in_backward(self) -> Problem:
        """Return a copy in which sharded parameters are updated during backward."""
        step = self.model.optimizer_step.model_copy(update={"in_backward": True})
        return replace(self, model=self.model.model_copy(update={"optimizer_step": step}))

    def with_retained_heap(self) -> Problem:
        """Return a copy in which freed tensors stay in the heap, or the same problem if its speed is unknown."""
        if self.compute_with_retained_heap is None:
            return self
        return replace(self, compute=self.compute_with_retained_heap, has_retained_heap=True)

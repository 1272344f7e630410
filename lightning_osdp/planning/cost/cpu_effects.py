"""Memory effects that exist on CPUs only: a heap that retains freed tensors, and prefetching by the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_osdp.planning.cost.moments import Flags, Floats, Held, Intervals, OperatorRuns
from lightning_osdp.planning.cost.sharding_scopes import PREFETCHED_UNITS
from lightning_osdp.planning.cost.shards import ParamShard, ShardUnit
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile

if TYPE_CHECKING:
    from lightning_osdp.planning.cost.footprint import Footprint

HEAP_GROWTH = 0.5
"""Least size of a heap that retains freed tensors, beyond the live ones, as a fraction of what a step frees: freed
tensors seldom have the size of the next ones. In training it grows step by step within the limit. [M-cost-5]"""

AMPLE_HEAP_GROWTH = 1.0
"""The same where the memory limit leaves room for it: hardly a page is new in a step then. [M-cost-14]"""

HEAP_LIMIT_MARGIN = 0.02
"""Fraction of the memory limit that a retained heap leaves free: in use it goes on to grow by some MiB.
[M-backend-13]"""

MAX_MMAP_THRESHOLD = 32 << 20
"""Larger tensors have their own memory mapping and are never retained: glibc's threshold can't be higher."""

MIN_MAPPED_BYTES = 64 << 10
"""Smallest tensors that have their own memory mapping, where freed ones are returned to the system."""


@dataclass(frozen=True)
class HeapModel:
    """Planned size of the heap.

    Attributes:
        growth: Fraction of what is freed within a step.
        headroom: Free bytes by batch size. In some step a large tensor finds no gap in the heap and is placed beside
            it. [M-cost-6]
    """

    growth: float
    headroom: LinearInBatch

    @classmethod
    def for_model(cls, model: ModelProfile, *, retained: bool = True) -> HeapModel:
        """Return the plan for a heap that has room for the largest gradient and the largest activation."""
        if not retained:
            return NO_RETENTION
        gradients = (p.gradient_bytes for operator in model.operators for p in operator.parameters)
        live = [moment.live.per_sample for moment in model.moments]
        activation = max((after - before for before, after in pairwise(live)), default=0.0)
        return cls(HEAP_GROWTH, LinearInBatch(fixed=max(gradients, default=0), per_sample=max(0.0, activation)))

    def grow(self, footprint: Footprint[float]) -> Footprint[float]:
        """Return the footprint with everything that is freed within a step larger by ``growth``."""
        permanent = {"states", "local_trainable", "eval_unsharded"}
        permanent |= {"checkpoint_tensor", "unsharded_parameters", "unsharded_state"}
        grown = {name: (1 + self.growth) * size for name, size in footprint._asdict().items() if name not in permanent}
        return footprint._replace(**grown) if self.growth else footprint

    def separate(self, curves: dict[str, Floats], batch_size: int) -> dict[str, Floats]:
        """Move what the heap adds to categories that are freed within a step into a category of its own."""
        freed = ("gradients", "gathered", "transient", "activations")
        added = (1 - 1 / (1 + self.growth)) * sum(curves[name] for name in freed)
        heap = np.asarray(added + self.headroom.value_at(batch_size))
        return curves | {"heap": heap} | {name: curves[name] / (1 + self.growth) for name in freed}


NO_RETENTION = HeapModel(0.0, LinearInBatch())
"""The heap if freed tensors are returned to the system."""


def kept_tensor_bytes(num_bytes: float, cluster: Cluster) -> float:
    """Return what a tensor takes that is kept from step to step, besides its elements: its object, and part of a page.

    Large tensors have pages of their own, on which a header precedes them. [M-engine-3]
    """
    if not num_bytes:
        return 0.0
    pages, header = cluster.page_bytes, 64
    is_mapped = pages and num_bytes >= MIN_MAPPED_BYTES
    return cluster.tensor_bytes + (-(num_bytes + header) % pages + header if is_mapped else 0)


def max_retained_batch_size(model: ModelProfile) -> float:
    """Return the largest batch size whose activations are all below ``MAX_MMAP_THRESHOLD``; infinite if any are.

    Larger tensors are mapped while the heap retains the memory of others, so memory or time would be underestimated.
    [M-cost-7]
    """
    per_sample = HeapModel.for_model(model).headroom.per_sample
    return (MAX_MMAP_THRESHOLD - 1) // per_sample if per_sample else math.inf


class PrefetchBytes(NamedTuple):
    """Bytes that prefetching adds to one operator."""

    next_unit: float = 0.0
    """``Footprint.prefetched_parameters``."""
    inflight_gradient: float = 0.0
    """``Footprint.inflight_gradient``."""
    second_unit: float = 0.0
    """``Footprint.prefetched_slice``."""
    next_slices: float = 0.0
    """``Footprint.next_slices``."""
    previous_gradient: float = 0.0
    """Gradient of its previous slice or parameter, while it runs backward."""


def prefetch_bytes(units: list[ShardUnit], gathered: list[float], cluster: Cluster, ranks: int) -> PrefetchBytes:
    """Return what prefetching adds to an operator with these units.

    Args:
        units: The operator's units.
        gathered: Bytes that gathering each unit takes.
        cluster: The ranks.
        ranks: Ranks that the units are sharded over.
    """
    if cluster.has_streams:  # see ``stream_memory``
        reduced = [sum(map(kept_bytes, unit.shards)) for unit in units]
        return PrefetchBytes(max(gathered, default=0), max(reduced, default=0))
    prefetched = [(unit, size) for unit, size in zip(units, gathered, strict=True) if unit.is_prefetched(cluster)]
    if not prefetched:
        return PrefetchBytes()
    next_unit = max(size for _, size in prefetched)
    # A ring holds the parts that other ranks have sent, too, except for those of one rank.
    received = max(0, ranks - 2) / ranks if cluster.uses_ring_collectives else 0.0
    largest = max(
        sum(unit.gradient_sizes) if unit.coalesces_gradients(cluster) else max(unit.gradient_sizes, default=0)
        for unit, _ in prefetched
    )
    inflight = largest * (1 + received)
    num_units = sum(unit.num_slices for unit in units)
    several = num_units > 1
    is_freed = any(unit.mode == Mode.ZDP for unit, _ in prefetched)  # zdp2 slices count from the first one on
    return PrefetchBytes(
        next_unit,
        inflight,
        next_unit if several else 0.0,
        min(PREFETCHED_UNITS, num_units - 1) * next_unit if is_freed else 0.0,
        inflight if several or (len(units[0].shards) > 1 and not units[0].coalesces_gradients(cluster)) else 0.0,
    )


def kept_bytes(shard: ParamShard) -> int:
    """Return the bytes of a gradient that is being reduced: its own, and those of a copy in another type."""
    is_cast = shard.reduced_bytes != shard.gradient_bytes
    return shard.gradient_bytes + (shard.reduced_bytes if is_cast else 0)


def freed_bytes(shards: Sequence[ParamShard], cluster: Cluster) -> int:
    """Return the bytes of parameters that are freed when their gradients have come: on CUDA at the next gather only."""
    return 0 if cluster.has_streams else sum(shard.bytes_before_gradient for shard in shards)


def coalesced_reduction_bytes(groups: Sequence[Sequence[ParamShard]], cluster: Cluster, ranks: int) -> list[float]:
    """Return the memory of reducing gradients by one collective as each group's come, on top of their parameters.

    All gradients are held until the last exists; then also their reduced parts and what other ranks have sent on gloo.

    Args:
        groups: The shards whose gradients appear at the same time, in order.
        cluster: The ranks.
        ranks: Ranks that they are sharded over.
    """
    sizes, held, cast_gradients = [], 0.0, 0
    for group in groups:
        gradients, freed = sum(shard.gradient_bytes for shard in group), freed_bytes(group, cluster)
        # A product's cast is freed before its gradient is cast to the parameter's type.
        is_cast = all(shard.has_casts and shard.looked_up != "alone" for shard in group)
        sizes.append(held + gradients - (freed if is_cast else 0))
        cast_gradients = sum(shard.gathered_bytes for shard in group) if is_cast and not cluster.has_streams else 0
        held += gradients - freed
    total = sum(shard.gradient_bytes for group in groups for shard in group)
    if cluster.has_streams:
        held = float(sum(kept_bytes(shard) for group in groups for shard in group))
    received = max(0, ranks - 2) if cluster.uses_ring_collectives else 0
    # What the last gradients were cast from counts among the activations, and is freed before the reduction.
    sizes[-1] = max(sizes[-1], held + total * (1 + received) / ranks - cast_gradients)
    return sizes


def prefetch_held(
    runs: OperatorRuns, footprints: Footprint[Floats], recomputed_blocks: Flags, wrapped: Flags
) -> Iterator[Held]:
    """Yield what prefetching holds between units: the next units' parameters, and gradients still being reduced.

    Args:
        runs: When operators run.
        footprints: Their footprints.
        recomputed_blocks: Whether each block is recomputed.
        wrapped: Whether an operator stands for several that share a unit.
    """
    is_sharded, is_freed = footprints.eval_unsharded > 0, footprints.unsharded_while_running > 0
    is_gathered_again = footprints.unsharded_in_backward > 0
    recomputed = runs.are_recomputed(recomputed_blocks)
    # A shared unit is gathered once for its recomputed forward and its backward.
    backward = is_gathered_again & runs.has_backward & ~(recomputed & wrapped)
    second_pass = ((runs.recompute, is_freed & recomputed), (runs.unsharded_backward, backward))
    for passes in (((runs.forward, is_sharded),), second_pass):
        starts, stops = (np.concatenate([each[at][which] for each, which in passes]) for at in range(2))
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        first, second, own = (
            np.concatenate([column[which] for _, which in passes])[order]
            for column in (footprints.prefetched_parameters, footprints.prefetched_slice, footprints.next_slices)
        )
        # An operator without slices is one unit, and the second one ahead is the first of the operator after it.
        ahead = first + np.where(second > 0, second, np.append(first[1:], 0.0))
        stops = np.minimum(stops[:-1], starts[1:])
        # While an operator runs, its own slices are ahead first: never more than so many units at a time.
        yield Held("gathered", Intervals(starts[:-1], stops), np.maximum(0.0, ahead[1:] - own[:-1]))
        yield Held("gathered", Intervals(stops, starts[1:]), ahead[1:])
    which = np.flatnonzero(is_sharded & runs.has_backward)
    order = which[np.argsort(runs.backward.stop[which], kind="stable")]
    stops, amounts = runs.backward.stop[order], footprints.inflight_gradient[order]
    yield Held("transient", Intervals(stops[:-1], stops[1:]), amounts[:-1])

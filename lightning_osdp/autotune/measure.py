"""Measures links, the engine's overhead and kernels, on all ranks together. Every function here is collective."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_osdp.autotune.profile import ClusterProfile, MeasuredCluster, Profile, max_ratio
from lightning_osdp.autotune.profile_cache import ProfileCache
from lightning_osdp.autotune.ranks import RankGroup, current_cluster, described_links
from lightning_osdp.backend.allocator import run_and_free_kernels
from lightning_osdp.backend.emulated import without_link_time
from lightning_osdp.backend.hierarchical import NodeGroups
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes, HierarchicalLinks, Link
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.formatting import format_bytes, format_seconds
from lightning_osdp.profiling import compute, engine_overhead, network
from lightning_osdp.profiling.tracing.trace import TracedStep

log_info = rank_zero_only(logging.getLogger(__name__).info)

LARGEST_TENSOR_DIVISOR = 3
"""Divisor of the free memory that gives the largest tensor to measure links with: two such tensors are needed."""

MAX_TIMING_RANKS = 8
"""Maximum number of neighbouring ranks that share the timing of kernels."""

LOGGED_BYTES = 32 << 20
"""Size of the tensor whose bandwidth is logged."""

PROBE_BYTES, PROBE_ATTEMPTS = 4 << 20, 2
"""Size of the all-gather that checks whether cached links are as fast as then, and how often it is tried."""

PROBE_TOLERANCE = 2.0
"""Factor within which measurements agree, more where they vary. Busy machines are off by a factor of 2 at times."""

MIN_STARTS, MAX_STARTS = 3, 5
"""Number of starts after which no start measures the ranks again, and number of starts that are kept at most."""

MAX_REPEATED_S = 8.0
"""A measurement that takes longer is not made again: the start would take too long."""

MAX_RESIDUAL = 0.5
"""Relative error of a fit of collectives beyond which they contradict each other."""


def measure_profile(
    traced: TracedStep,
    ranks: RankGroup,
    cluster: Cluster | None,
    cache: ProfileCache,
    constraints: SearchConstraints,
    available_bytes: int,
) -> Profile:
    """Measure links and engine, unless ``cluster`` gives them or another model has measured them, and all kernels.

    Args:
        traced: the step of the model, with all kernels.
        ranks: the ranks.
        cluster: hardware that is known already.
        cache: the cached measurements.
        constraints: the constraints, which say how many slices are measured, and of which engine.
        available_bytes: memory that measuring may take on this rank.
    """
    cluster_profile = load_or_measure_cluster(ranks, cluster, cache, available_bytes, constraints.capabilities)
    began_s = time.monotonic()
    times = measure_compute_times(traced, ranks, constraints, available_bytes)
    log_info("measured kernels in %s", format_seconds(time.monotonic() - began_s))
    return Profile(**dict(cluster_profile), compute=times)


def load_or_measure_cluster(
    ranks: RankGroup,
    cluster: Cluster | None,
    cache: ProfileCache,
    available_bytes: int,
    capabilities: EngineCapabilities = ALL_CAPABILITIES,
) -> ClusterProfile:
    """Return links and engine overhead: as given, or the median of this start and those before it.

    After ``MIN_STARTS`` starts nothing is measured as long as a probe agrees with the median.
    """
    if cluster is not None:
        return ClusterProfile(link=cluster.link, hierarchical_links=cluster.hierarchical_links, engine=cluster.engine)
    if ranks.is_emulated:
        return _describe_cluster(ranks, available_bytes, capabilities)
    stored = cache.load_cluster()
    if (
        stored is not None
        and len(stored.starts) >= MIN_STARTS
        and is_cache_valid(stored.median, ranks, stored.relative_spread(ranks.world_size))
    ):
        return stored.median

    def measure() -> ClusterProfile:
        measured = _measure_cluster(ranks, available_bytes, capabilities)
        return measured if is_plausible(measured) else _measure_cluster(ranks, available_bytes, capabilities)

    known = add_start(stored, measure, ranks)
    if all(map(is_plausible, known.starts)):
        cache.save_cluster(known)
    return known.median


def add_start(
    stored: MeasuredCluster | None, measure: Callable[[], ClusterProfile], ranks: RankGroup
) -> MeasuredCluster:
    """Return the kept measurements with that of this start. Collective.

    If the new measurement contradicts the kept ones it is made again, and those two of the three that agree are kept;
    all are kept if none agree. If it took too long to be made again, it replaces the kept ones.
    """
    began_s = time.monotonic()
    new = measure()
    if stored is None:
        return MeasuredCluster(starts=(new,))
    known, median = stored.starts, stored.median
    starts: tuple[ClusterProfile, ...] = (new,)
    if _agree(new, median, stored, ranks):
        starts = (*known, new)
    elif ranks.all_reduce_max([time.monotonic() - began_s])[0] <= MAX_REPEATED_S:
        again = measure()
        if _agree(again, median, stored, ranks):
            starts = (*known, again)
        else:
            starts = (new, again) if _agree(new, again, stored, ranks) else (*known, new, again)
    return MeasuredCluster(starts=starts[-MAX_STARTS:])


def _agree(one: ClusterProfile, other: ClusterProfile, stored: MeasuredCluster, ranks: RankGroup) -> bool:
    return max_ratio(one, other, ranks.world_size) <= _tolerance(stored.relative_spread(ranks.world_size))


def _tolerance(spread: float) -> float:
    return PROBE_TOLERANCE * (1 + min(1.0, spread))


def agrees_with_kept(profile: ClusterProfile, cache: ProfileCache) -> bool:
    """Return whether a model's measurements are those that starts of any model have kept since. Collective."""
    stored = cache.load_cluster()
    return stored is None or _agree(profile, stored.median, stored, cache.ranks)


def is_plausible(measured: ClusterProfile) -> bool:
    """Return whether the times of no collective contradict each other."""
    link = measured.link
    return max(fit.residual for fit in (link.all_reduce, link.all_gather, link.reduce_scatter)) <= MAX_RESIDUAL


def _measure_cluster(ranks: RankGroup, available_bytes: int, capabilities: EngineCapabilities) -> ClusterProfile:
    began_s = time.monotonic()
    link, hierarchical = measure_links(ranks, available_bytes)
    measured_s = time.monotonic()
    cluster = current_cluster(ranks, link, hierarchical)
    engine = engine_overhead.measure_engine_overhead(ranks.group, ranks.device, cluster, available_bytes, capabilities)
    if ranks.world_size > 1:
        log_info("measured links: %s, in %s", _bandwidths(link, ranks), format_seconds(measured_s - began_s))
        log_info("measured the engine's overhead in %s", format_seconds(time.monotonic() - measured_s))
    return ClusterProfile(link=link, hierarchical_links=hierarchical, engine=engine)


def _describe_cluster(ranks: RankGroup, available_bytes: int, capabilities: EngineCapabilities) -> ClusterProfile:
    """Return the links that are described, and the engine's overhead as measured where they take no time."""
    known, cluster = described_links(ranks), current_cluster(ranks)
    with without_link_time(ranks.group):
        engine = engine_overhead.measure_engine_overhead(
            ranks.group, ranks.device, cluster, available_bytes, capabilities
        )
    return known.model_copy(update={"engine": engine})


def measure_links(ranks: RankGroup, available_bytes: int) -> tuple[Link, HierarchicalLinks | None]:
    """Measure the link of all ranks, and those inside and between nodes if there are several nodes of several ranks."""
    max_bytes = available_bytes // LARGEST_TENSOR_DIVISOR
    link = network.measure_links(ranks.group, ranks.device, max_bytes=max_bytes)
    if not ranks.is_hierarchical:
        return link, None
    node_groups = NodeGroups.create(ranks.group, ranks.nodes)
    hierarchical = network.measure_hierarchical_links(node_groups, ranks.device, max_bytes=max_bytes)
    node_groups.destroy()
    return link, hierarchical


def measure_compute_times(
    traced: TracedStep, ranks: RankGroup, constraints: SearchConstraints, available_bytes: int
) -> ComputeTimes:
    """Time the kernels. Groups of up to 8 neighbouring ranks split the work; return the times of the slowest rank."""
    sizes = range(1 if ranks.is_emulated else min(MAX_TIMING_RANKS, ranks.world_size), 0, -1)
    num_partitions = next(size for size in sizes if ranks.world_size % size == 0)
    index, budget_s = ranks.rank % num_partitions, compute.KERNEL_TIMING_BUDGET_S / num_partitions
    limits: dict[str, Any] = {"time_budget_s": budget_s, "constraints": constraints, "available_bytes": available_bytes}
    run = partial(run_and_free_kernels, ranks.device, traced.kernel_dtypes)
    time_part = partial(compute.measure_partition, traced, ranks.device, index, num_partitions, **limits)
    own = ranks.raise_on_all_ranks(partial(run, time_part))
    partitions = ranks.all_gather_object(own)[ranks.rank - index :][:num_partitions]
    time_rest = partial(compute.measure_compute, traced, ranks.device, partitions=partitions, **limits)
    times: ComputeTimes = ranks.raise_on_all_ranks(partial(run, time_rest))
    return max(
        ranks.all_gather_object(times),
        key=lambda each: sum(line.seconds_at(8) for line in [*each.operators, each.unattributed]),
    )


def is_cache_valid(cluster_profile: ClusterProfile, ranks: RankGroup, spread: float = 0.0) -> bool:
    """Return whether all needed links are cached, and a fresh all-gather takes about what they predict.

    The same host may reach its peers over another link today, and what was cached may have been disturbed.
    """
    if ranks.is_hierarchical and cluster_profile.hierarchical_links is None:
        return False
    if ranks.world_size == 1 or ranks.is_emulated:  # whose links are a part of the key
        return True
    predicted_s = cluster_profile.link.all_gather.time_s(PROBE_BYTES, ranks.world_size)
    for _ in range(PROBE_ATTEMPTS):
        measured_s = network.time_all_gather_s(ranks.group, ranks.device, PROBE_BYTES)
        if predicted_s <= _tolerance(spread) * measured_s and measured_s <= _tolerance(spread) * predicted_s:
            return True
    return False


def _bandwidths(link: Link, ranks: RankGroup) -> str:
    """Return the bandwidth of each collective for a large tensor, in words."""
    return ", ".join(
        f"{name.replace('_', '-')} {format_bytes(LOGGED_BYTES / fit.time_s(LOGGED_BYTES, ranks.world_size))}/s"
        for name, fit in link
    )

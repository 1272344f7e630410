"""Times each collective on the real process group and fits the planner's constants to it (the paper's alpha and beta).

The times are those that a step waits for: gathers and reduce-scatters come between stretches of compute, all-reduces
by themselves. All functions are collective: every rank must call them with the same arguments.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from lightning_osdp.backend import agree, collectives
from lightning_osdp.backend.hierarchical import Communicator, FlatCommunicator, HierarchicalCommunicator, NodeGroups
from lightning_osdp.backend.timer import CORE_SHARING, synchronize, typical_time_s
from lightning_osdp.backend.work import Work, is_driven_by_host
from lightning_osdp.planning.cost.link_fit import fit_collective
from lightning_osdp.planning.spec.cluster import CollectiveFit, HierarchicalLinks, Link, ShardingLink

log = logging.getLogger(__name__)

DEFAULT_SIZES_BYTES = (16 << 10, 128 << 10, 1 << 20, 4 << 20, 32 << 20)
"""Sizes of the unsharded tensor: from a small layer's weights to a large embedding's."""

LARGE_SIZES_BYTES = {"nccl": (128 << 20, 512 << 20)}
"""Further sizes by backend: NCCL reaches its bandwidth late."""

WARMUP_REPEATS, MIN_REPEATS, MAX_REPEATS = 2, 3, 15
"""Untimed and timed repeats of one collective at one size."""

REPEATS_BUDGET_S, SHARED_CORES_DIVISOR = 0.2, 2
"""Seconds for one collective at one size, and the divisor of that time where ranks share cores. [M-links-1]"""

MIN_SIZES, BANDWIDTH_BOUND_S = 3, 0.012
"""After ``MIN_SIZES`` sizes, no size is measured above one at which two collectives take that long. [M-links-2]"""

COALESCED_TENSORS, COALESCED_SIZES = 4, slice(1, 3)
"""Tensors of a coalesced gather, and the sizes at which it is timed: those at which latencies matter."""

OVERLAP_SIZE_INDEX, OVERLAP_COMPUTE_RATIO = 3, 1.5
"""Size at which overlap is measured (or the last one), and the time of the compute beside it. [M-links-3]"""

COMPUTE_REPEATS = 8
"""Stretches of compute that are timed in a row to know the time of one."""

OVERLAP_ALTERNATIONS, OVERLAP_DURATION_S, OVERLAP_MIN_CALLS = 4, 0.016, 2
"""Turns in which collective, compute and both are timed, and how long, or how often, each is called. [M-links-4]"""

COMPUTE_MATRIX_SIZE, COMPUTE_MATMULS = 192, 16
"""Matrix products of a stretch of compute: some milliseconds on one core, like a small layer."""

DEVICE_MATRIX_SIZE = 1024
"""Size of the product that stands for compute beside a collective on CUDA: it takes all of a device for 0.1 ms."""

Call = Callable[[], None]
AsyncCall = Callable[[], Work]


class CollectiveBenchmark(NamedTuple):
    """A collective that is measured; its makers take the number of float32 elements of the unsharded tensor."""

    make: Callable[[int], Call]
    """Makes the collective, on tensors that live as long as it does."""
    ranks: int
    """Number of ranks that take part: N of the paper's equation 2."""
    follows_compute: bool = False
    """Whether a stretch of compute comes right before it."""
    make_coalesced: Callable[[int], Call] | None = None
    """Makes the collective of ``COALESCED_TENSORS`` tensors with that many elements together, if there is one."""
    make_async: Callable[[int], AsyncCall] | None = None
    """Makes the collective that can be waited for later, if there is one."""
    is_always_async: bool = False
    """Whether the engine always computes while it goes on."""


def measure_links(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] | None = None,
    max_bytes: int | None = None,
) -> Link:
    """Time every collective of ``backend.collectives`` on ``group`` and fit its latency and bandwidth.

    A barrier precedes each repeat. The typical time of each rank counts, and of those the slowest rank's.

    Args:
        group: The ranks that will share states.
        device: Device of the tensors.
        sizes_bytes: Sizes of the unsharded float32 tensor, each rounded up to equal shards; None for the usual ones.
        max_bytes: Largest size, but the two smallest are always measured: a fit needs two. The largest size s takes up
            to 2 s of memory on each rank. The smallest value of any rank counts.

    Returns:
        The fit of each collective, the same on every rank; all zeros on a single rank.

    Raises:
        ValueError: If ``sizes_bytes`` holds fewer than two different sizes.
    """
    if group.size() == 1:
        return Link(**{name: CollectiveFit(latency_s=0.0, s_per_byte=0.0) for name in Link.model_fields})
    benchmarks = {"all_reduce": _all_reduce_benchmark(group, device)}
    benchmarks |= _sharding_benchmarks("", FlatCommunicator(group), group, device)
    benchmarks["all_to_all"] = _all_to_all_benchmark(group, device)
    sizes = _affordable_sizes(_sizes_for(group, device, sizes_bytes), max_bytes, group, device)
    return Link(**_fit_all(benchmarks, sizes, LinkTimer(group, device)))


def measure_hierarchical_links(
    node_groups: NodeGroups,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] | None = None,
    max_bytes: int | None = None,
) -> HierarchicalLinks:
    """Time the collectives inside nodes, between nodes, and of both levels together, and fit them.

    All nodes (or all places in them) work at the same time, as they do in training: they may share a link.

    Args:
        node_groups: Process groups of the world, of this node, and of the same place on all nodes.
        device: See ``measure_links``.
        sizes_bytes: See ``measure_links``.
        max_bytes: See ``measure_links``.
    """
    world, intra_node = node_groups.world, node_groups.intra_node
    benchmarks = _sharding_benchmarks("intra_node.", FlatCommunicator(intra_node), intra_node, device)
    benchmarks["intra_node.all_to_all"] = _all_to_all_benchmark(intra_node, device)
    benchmarks["inter_node"] = _all_reduce_benchmark(node_groups.inter_node, device, intra_node.size())
    benchmarks |= _sharding_benchmarks("hierarchical.", HierarchicalCommunicator(node_groups), world, device)
    sizes = _affordable_sizes(_sizes_for(world, device, sizes_bytes), max_bytes, world, device)
    fits = _fit_all(benchmarks, sizes, LinkTimer(world, device))
    # The reduced part was fitted as if it were the whole tensor.
    s_per_byte = fits["inter_node"].s_per_byte * intra_node.size()

    def links_with_prefix(prefix: str) -> ShardingLink:
        return ShardingLink(**{name.removeprefix(prefix): fits[name] for name in fits if name.startswith(prefix)})

    return HierarchicalLinks(
        intra_node=links_with_prefix("intra_node."),
        inter_node=fits["inter_node"].model_copy(update={"s_per_byte": s_per_byte}),
        hierarchical=links_with_prefix("hierarchical."),
    )


def time_all_gather_s(group: dist.ProcessGroup, device: torch.device, unsharded_bytes: int) -> float:
    """Return the seconds of one all-gather, timed like a benchmark with as few repeats as possible."""
    benchmark = _sharding_benchmarks("", FlatCommunicator(group), group, device)["all_gather"]
    numel = _round_up(unsharded_bytes, group)
    return LinkTimer(group, device).typical_s(benchmark.make(numel), benchmark.follows_compute, budget_s=0.0)


def _sharding_benchmarks(
    prefix: str, communicator: Communicator, group: dist.ProcessGroup, device: torch.device
) -> dict[str, CollectiveBenchmark]:
    """Return the collectives of ``ShardingLink`` by name.

    Results are allocated anew each time, as the engine does: on a CPU, first touching memory takes as long as a fast
    link's transfer. Zeros stay zeros, while sums of other values would grow without end.

    Threads of gathers and reduce-scatters have gone to sleep during the compute before, and ranks are not quite in
    step: on a CPU that makes up most of the latency.
    """
    ranks = communicator.size()

    def all_gather(numel: int) -> Call:
        shard = torch.zeros(numel // ranks, device=device)
        return lambda: communicator.all_gather(torch.empty(numel, device=device), shard)

    def all_gather_coalesced(numel: int) -> Call:
        size = -(-numel // (ranks * COALESCED_TENSORS))
        shards = [torch.zeros(size, device=device) for _ in range(COALESCED_TENSORS)]
        return lambda: communicator.all_gather_coalesced(
            [torch.empty(size * ranks, device=device) for _ in shards], shards
        )

    def reduce_scatter(numel: int) -> Call:
        unsharded = torch.zeros(numel, device=device)
        return lambda: communicator.reduce_scatter(torch.empty(numel // ranks, device=device), unsharded)

    def all_gather_async(numel: int) -> AsyncCall:
        shard = torch.zeros(numel // ranks, device=device)
        return lambda: collectives.all_gather_async([torch.empty(numel, device=device)], [shard], group)

    def reduce_scatter_async(numel: int) -> AsyncCall:
        unsharded = torch.zeros(numel, device=device)
        return lambda: collectives.reduce_scatter_async(
            [torch.empty(numel // ranks, device=device)], [unsharded], group
        )

    has_async = isinstance(communicator, FlatCommunicator) and _is_beside_compute(group, device)
    gather_async, scatter_async = (all_gather_async, reduce_scatter_async) if has_async else (None, None)
    return {
        f"{prefix}all_gather": CollectiveBenchmark(all_gather, ranks, True, all_gather_coalesced, gather_async),
        f"{prefix}reduce_scatter": CollectiveBenchmark(reduce_scatter, ranks, True, None, scatter_async),
    }


def _is_beside_compute(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether collectives can be waited for later: gloo copies CUDA tensors through the host."""
    return is_driven_by_host(device) or collectives.coalesces(group, device)


def _all_reduce_benchmark(group: dist.ProcessGroup, device: torch.device, num_parts: int = 1) -> CollectiveBenchmark:
    """Return an all-reduce of one of ``num_parts`` parts of a tensor.

    All-reduces go on in the background of the backward pass and are waited for together.
    """

    def all_reduce(numel: int) -> Call:
        part = torch.zeros(numel // num_parts, device=device)
        return lambda: collectives.all_reduce_mean(part, group)

    def all_reduce_async(numel: int) -> AsyncCall:
        part = torch.zeros(numel // num_parts, device=device)
        return lambda: collectives.all_reduce_async(part, group)

    make_async = all_reduce_async if _is_beside_compute(group, device) else None
    return CollectiveBenchmark(all_reduce, group.size(), make_async=make_async, is_always_async=True)


def _all_to_all_benchmark(group: dist.ProcessGroup, device: torch.device) -> CollectiveBenchmark:
    """Return the exchange of equal parts of a tensor, one for each rank."""

    def all_to_all(numel: int) -> Call:
        parts = torch.zeros(numel, device=device)
        return lambda: dist.all_to_all_single(torch.empty(numel, device=device), parts, group=group)

    return CollectiveBenchmark(all_to_all, group.size(), True)


class LinkTimer:
    """Times calls that all ranks of a group make together.

    Attributes:
        group: The process group.
        device: The device to wait for.
        compute: A stretch of compute like a small layer's. On CUDA it does nothing: the device's queue keeps ranks in
            step.
        compute_beside: Compute that goes on beside a collective.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        factor = torch.ones(COMPUTE_MATRIX_SIZE, COMPUTE_MATRIX_SIZE)

        def multiply() -> None:
            for _ in range(COMPUTE_MATMULS):
                factor @ factor

        self.compute: Call = multiply if device.type == "cpu" else lambda: None
        self.compute_beside: Call = multiply if device.type == "cpu" else _device_product(device)

    def typical_s(self, call: Call, follows_compute: bool, budget_s: float | None = None) -> float:
        """Return the typical seconds of ``call`` on the slowest rank, the same number on every rank."""
        budget_s = REPEATS_BUDGET_S / _repeat_divisor() if budget_s is None else budget_s
        for _ in range(WARMUP_REPEATS):
            start = time.perf_counter()
            self.time_once_s(call, follows_compute)
            last_s = time.perf_counter() - start
        affordable = int(budget_s / max(agree.all_reduce_max([last_s], self.group, self.device)[0], 1e-6))
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, affordable))
        samples_s = [self.time_once_s(call, follows_compute) for _ in range(repeats)]
        return agree.all_reduce_max([typical_time_s(samples_s)], self.group, self.device)[0]

    def time_once_s(self, call: Call, follows_compute: bool) -> float:
        """Return this rank's seconds of ``call`` after a barrier."""
        synchronize(self.device)
        dist.barrier(self.group)
        if follows_compute:
            self.compute()
        synchronize(self.device)
        start = time.perf_counter()
        call()
        synchronize(self.device)
        return time.perf_counter() - start


def _device_product(device: torch.device) -> Call:
    factor = torch.ones(DEVICE_MATRIX_SIZE, DEVICE_MATRIX_SIZE, device=device)
    result = torch.empty_like(factor)

    def multiply() -> None:
        torch.mm(factor, factor, out=result)

    return multiply


def _fit_all(
    benchmarks: Mapping[str, CollectiveBenchmark], sizes: Sequence[int], timer: LinkTimer
) -> dict[str, CollectiveFit]:
    """Time each benchmark at each number of elements, one after the other, and fit the constants to the times."""
    start = time.perf_counter()
    times_s: dict[str, list[float]] = {name: [] for name in benchmarks}
    unsharded_bytes: list[int] = []
    for numel in sizes:
        unsharded_bytes.append(4 * numel)
        for name, benchmark in benchmarks.items():
            times_s[name].append(timer.typical_s(benchmark.make(numel), benchmark.follows_compute))
            log.debug("%s of %d bytes: %.3g s", name, 4 * numel, times_s[name][-1])
        if len(unsharded_bytes) >= MIN_SIZES and sorted(s[-1] for s in times_s.values())[-2] > BANDWIDTH_BOUND_S:
            break  # A single slow collective may have been disturbed. The times are the same on all ranks.
    compute_s = timer.typical_s(_repeat(timer.compute_beside, COMPUTE_REPEATS), True) / COMPUTE_REPEATS
    overlap_index = min(OVERLAP_SIZE_INDEX, len(unsharded_bytes) - 1)
    fits: dict[str, CollectiveFit] = {}
    for name, benchmark in benchmarks.items():
        fit = fit_collective(unsharded_bytes, times_s[name], benchmark.ranks)
        extra_s = _extra_tensor_latency_s(benchmark, sizes[COALESCED_SIZES], timer)
        if name.endswith("reduce_scatter"):  # It sends as many messages more as the gather, the other way.
            extra_s = fits[name.replace("reduce_scatter", "all_gather")].extra_tensor_latency_s
        overlap = _overlap_fraction(benchmark, sizes[overlap_index], times_s[name][overlap_index], compute_s, timer)
        fits[name] = fit.model_copy(update={"extra_tensor_latency_s": extra_s, "overlap_fraction": overlap})
    log.debug("link fits after %.1f s: %s", time.perf_counter() - start, fits)
    return fits


def _overlap_fraction(
    benchmark: CollectiveBenchmark, numel: int, collective_s: float, compute_s: float, timer: LinkTimer
) -> float:
    """Return the share of a collective that goes on beside compute, less its standard error.

    The estimate is cautious because units that run ahead take memory. Where ranks share cores, collectives that units
    would have to run ahead for overlap nothing: while one rank waits, another computes. [M-links-5] The seconds of the
    collective and of one stretch of ``timer.compute_beside`` need not be precise.
    """
    shares_cores = CORE_SHARING.is_shared and not benchmark.is_always_async
    if benchmark.make_async is None or benchmark.ranks == 1 or shares_cores:
        return 0.0
    blocking, start = benchmark.make(numel), benchmark.make_async(numel)
    compute = _repeat(timer.compute_beside, max(1, round(OVERLAP_COMPUTE_RATIO * collective_s / compute_s)))

    def run_overlapped() -> None:
        work = start()
        compute()
        work.wait()

    repeats = max(OVERLAP_MIN_CALLS, round(OVERLAP_DURATION_S / collective_s))
    calls = [_repeat(call, repeats) for call in (blocking, compute, run_overlapped)]
    run_overlapped()  # The first call sets things up.
    turns = OVERLAP_ALTERNATIONS // _repeat_divisor()
    own_s = [timer.time_once_s(call, benchmark.follows_compute) for _ in range(turns) for call in calls]
    slowest_s = np.reshape(agree.all_reduce_max(own_s, timer.group, timer.device), (turns, len(calls)))
    shares = 1 - (slowest_s[:, 2] - slowest_s[:, 1]) / typical_time_s(slowest_s[:, 0].tolist())
    return float(np.clip(shares.mean() - shares.std(ddof=1) / math.sqrt(turns), 0, 1))


def _extra_tensor_latency_s(benchmark: CollectiveBenchmark, sizes: Sequence[int], timer: LinkTimer) -> float:
    """Return what each further tensor of a coalesced collective adds to a hop's latency."""
    if benchmark.make_coalesced is None or not sizes:
        return 0.0
    extra_s = [
        timer.typical_s(benchmark.make_coalesced(numel), benchmark.follows_compute)
        - timer.typical_s(benchmark.make(numel), benchmark.follows_compute)
        for numel in sizes
    ]
    return max(0.0, float(np.mean(extra_s))) / ((COALESCED_TENSORS - 1) * (benchmark.ranks - 1))


def _sizes_for(group: dist.ProcessGroup, device: torch.device, given: Sequence[int] | None) -> Sequence[int]:
    if given is not None:
        return given
    return (*DEFAULT_SIZES_BYTES, *LARGE_SIZES_BYTES.get(collectives.backend_of(group, device), ()))


def _affordable_sizes(
    sizes_bytes: Sequence[int], max_bytes: int | None, group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Return the numbers of float32 elements to measure at, ascending, the same on all ranks."""
    numels = sorted({_round_up(size, group) for size in sizes_bytes})
    if len(numels) < 2:
        raise ValueError(f"need two different sizes at least to fit latency and bandwidth, got {list(sizes_bytes)}")
    limit = agree.all_reduce_min(max_bytes, group, device)
    return numels[:2] + [numel for numel in numels[2:] if numel * 4 <= limit]


def _round_up(size_bytes: int, group: dist.ProcessGroup) -> int:
    """Return the number of float32 elements, rounded up to equal shards."""
    return -(-size_bytes // (4 * group.size())) * group.size()


def _repeat_divisor() -> int:
    return SHARED_CORES_DIVISOR if CORE_SHARING.is_shared else 1


def _repeat(call: Call, times: int) -> Call:
    def call_repeatedly() -> None:
        for _ in range(times):
            call()

    return call_repeatedly

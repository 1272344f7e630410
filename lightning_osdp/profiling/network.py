"""Measures each collective on the real process group and fits the planner's constants to it (the paper's alpha, beta).

What is measured is what a step waits for: gathers and reduce-scatters as they come between stretches of compute,
all-reduces by themselves.
"""

from __future__ import annotations

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
from lightning_osdp.planning.spec import cluster
from lightning_osdp.planning.spec.cluster import CollectiveFit, Link, ShardingLink

DEFAULT_SIZES_BYTES = (16 << 10, 128 << 10, 1 << 20, 4 << 20, 32 << 20)
"""Of the whole tensor: from a small layer's weights to a large embedding's."""

WARMUP_REPEATS = 2
REPEATS_BUDGET_S, SHARED_CORES_DIVISOR = 0.2, 2
"""Seconds to spend on one collective at one size, with what comes before it, as far as the bounds below allow; and how
many times less where ranks share cores: all takes longer there, and rehearsals of whole steps tell more. [4 ranks on 2
cores, 2 Gbit/s: 3.8 s in all, 5.9 to 6.3 before]"""

MIN_REPEATS = 3
MAX_REPEATS = 15

MIN_SIZES, BANDWIDTH_BOUND_S = 3, 0.012
"""After so many sizes none is measured that is larger than one for which two collectives take so long: there bytes are
all that counts. A single one may have been disturbed. [1 Gbit/s: 16 and 34 ms for 4 MiB; four more seconds for 32]"""

COALESCED_TENSORS, COALESCED_SIZES = 4, slice(1, 3)
"""Tensors of a gather of several, and at which of the sizes it is timed: those at which latencies matter."""

OVERLAP_SIZE_INDEX, OVERLAP_COMPUTE_RATIO = 3, 1.5
"""At which of the sizes, the last one if there are fewer, it is measured how much of a collective goes on beside
compute that takes so many times as long. [1 Gbit/s: a shaped link lets 1 MiB through at once, and nothing is hidden; of
4 MiB, 15 ms, three quarters; over loopback, where copies are all, a tenth]"""

COMPUTE_REPEATS = 8
"""Stretches of compute that are timed in a row, to know how many take as long."""

OVERLAP_ALTERNATIONS, OVERLAP_DURATION_S, OVERLAP_MIN_CALLS = 4, 0.016, 2
"""How often the collective, the compute and both are timed in turns, and each time so many collectives in a row as take
about so long, but no fewer than that: what ranks that share cores take differs much from one to the next. [2 ranks on 2
cores: a gather's share was 0 to 0.63 over loopback, where there is next to nothing to gain, and 0 to 1 at 1 Gbit/s,
from three times the collective with compute and the others measured earlier; so it is 0 to 0.11, and 0.24 to 0.88]"""

COMPUTE_MATRIX_SIZE, COMPUTE_MATMULS = 192, 16
"""Matrix products before a collective that interrupts compute: some milliseconds on one core, like a small layer."""

Collective = Callable[[], None]
AsyncCollective = Callable[[], Work]
Progress = Callable[[int, int], None]


class CollectiveBenchmark(NamedTuple):
    """A collective to be measured."""

    make: Callable[[int], Collective]
    """Of a number of float32 elements of the whole tensor, on tensors that live as long as it does."""
    ranks: int
    """That take part in one of it: N of the paper's equation 2."""
    interleaved_compute: Collective
    """What comes right before it."""
    make_coalesced: Callable[[int], Collective] | None = None
    """The same of ``COALESCED_TENSORS`` tensors, so many elements in all; None where there is no such thing."""
    async_start: Callable[[int], AsyncCollective] | None = None
    """The same, to be waited for while something else goes on; None where that can't be."""
    always_async: bool = False
    """Whether the engine always goes on meanwhile."""


def measure_links(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> Link:
    """Times every collective of ``lightning_osdp.collectives`` on ``scope``. Collective: all ranks call it alike.

    Per size and collective: a barrier before each repeat, what is typical on each rank, and of that the slowest rank's.

    Args:
        group: the ranks that will share states.
        device: where the tensors live.
        sizes_bytes: of the whole tensor, float32, each rounded up to the same number of elements on every rank.
        max_bytes: leaves out larger sizes, but never the two smallest: a fit needs two. The largest size s takes
            up to 2 s of memory on each rank. The smallest value of any rank counts.
        progress: called as ``progress(done, total)`` after each measurement.

    Returns:
        A fit for each collective, the same on every rank; all zeros on a single rank.

    Raises:
        ValueError: ``sizes_bytes`` holds fewer than two different sizes.
    """
    if group.size() == 1:
        return Link(**{name: CollectiveFit(latency_s=0.0, s_per_byte=0.0) for name in Link.model_fields})
    subjects = {"all_reduce": _all_reduce_benchmark(group, device)} | _sharding_benchmarks(
        "", FlatCommunicator(group), group, device
    )
    sizes = _affordable_sizes(sizes_bytes, max_bytes, group, device)
    return Link(**_fit_all(subjects, sizes, group, device, progress))


def time_all_gather_s(group: dist.ProcessGroup, device: torch.device, unsharded_bytes: int) -> float:
    """Seconds of one all-gather, timed as ``measure`` does it, but as seldom as may be. Collective; every rank gets the
    same number."""
    subject = _sharding_benchmarks("", FlatCommunicator(group), group, device)["all_gather"]
    numel = -(-unsharded_bytes // (4 * group.size())) * group.size()
    return _time_s(subject.make(numel), group, device, subject.interleaved_compute, budget_s=0.0)


def measure_hierarchical_links(
    node_groups: NodeGroups,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> cluster.HierarchicalLinks:
    """Times what there is to choose from where nodes differ from the world: see ``cluster.Levels``.

    All nodes (or all places in them) work at the same time, as they do in training: they may share a link.
    Arguments as in ``measure``. Collective over the world.
    """
    inside, across = node_groups.intra_node, node_groups.inter_node
    subjects = _sharding_benchmarks("intra_node.", FlatCommunicator(inside), inside, device)
    subjects["inter_node"] = _all_reduce_benchmark(across, device, inside.size())
    subjects |= _sharding_benchmarks("hierarchical.", HierarchicalCommunicator(node_groups), node_groups.world, device)
    sizes = _affordable_sizes(sizes_bytes, max_bytes, node_groups.world, device)
    fits = _fit_all(subjects, sizes, node_groups.world, device, progress)
    between = fits["inter_node"]  # it was fitted to the whole, not to the part
    between = between.model_copy(update={"s_per_byte": between.s_per_byte * inside.size()})

    def links_with_prefix(prefix: str) -> ShardingLink:
        return ShardingLink(**{name.removeprefix(prefix): fits[name] for name in fits if name.startswith(prefix)})

    return cluster.HierarchicalLinks(
        intra_node=links_with_prefix("intra_node."), inter_node=between, hierarchical=links_with_prefix("hierarchical.")
    )


def _sharding_benchmarks(
    prefix: str, communicator: Communicator, group: dist.ProcessGroup, device: torch.device
) -> dict[str, CollectiveBenchmark]:
    """The collectives of ``ShardingLink`` by name.

    Results are allocated anew each time, as the engine does: on a CPU, first touching memory takes as long as a fast
    link's transfer. Zeros stay zeros: sums of other values would grow without end.

    Gathers and reduce-scatters stand between stretches of compute: their threads have gone to sleep, and the ranks are
    not quite in step. On a CPU that makes up most of their latency. All-reduces go on in the background of the backward
    pass and are waited for together, so they are measured by themselves.
    """

    def all_gather(numel: int) -> Collective:
        part = torch.zeros(numel // communicator.size(), device=device)
        return lambda: communicator.all_gather(torch.empty(numel, device=device), part)

    def all_gather_coalesced(numel: int) -> Collective:
        parts = [
            torch.zeros(-(-numel // (communicator.size() * COALESCED_TENSORS)), device=device)
            for _ in range(COALESCED_TENSORS)
        ]
        return lambda: communicator.all_gather_coalesced(
            [torch.empty(part.numel() * communicator.size(), device=device) for part in parts], parts
        )

    def reduce_scatter(numel: int) -> Collective:
        whole = torch.zeros(numel, device=device)
        return lambda: communicator.reduce_scatter(torch.empty(numel // communicator.size(), device=device), whole)

    def all_gather_async(numel: int) -> AsyncCollective:
        part = torch.zeros(numel // communicator.size())
        return lambda: collectives.all_gather_async([torch.empty(numel)], [part], group)

    def reduce_scatter_async(numel: int) -> AsyncCollective:
        whole = torch.zeros(numel)
        return lambda: collectives.reduce_scatter_async([torch.empty(numel // communicator.size())], [whole], group)

    compute = _make_compute(device)
    found = {
        "all_gather": CollectiveBenchmark(all_gather, communicator.size(), compute, all_gather_coalesced),
        "reduce_scatter": CollectiveBenchmark(reduce_scatter, communicator.size(), compute),
    }
    if isinstance(communicator, FlatCommunicator) and is_driven_by_host(device):
        begun = {"all_gather": all_gather_async, "reduce_scatter": reduce_scatter_async}
        found |= {name: found[name]._replace(async_start=one) for name, one in begun.items()}
    return {prefix + name: one for name, one in found.items()}


def _all_reduce_benchmark(group: dist.ProcessGroup, device: torch.device, parts: int = 1) -> CollectiveBenchmark:
    """An all-reduce of one of so many parts of a tensor."""

    def all_reduce(numel: int) -> Collective:
        part = torch.zeros(numel // parts, device=device)
        return lambda: collectives.all_reduce_mean(part, group)

    def all_reduce_async(numel: int) -> AsyncCollective:
        part = torch.zeros(numel // parts)
        return lambda: collectives.all_reduce_async(part, group)

    begins = all_reduce_async if is_driven_by_host(device) else None
    return CollectiveBenchmark(all_reduce, group.size(), lambda: None, async_start=begins, always_async=True)


def _fit_all(
    benchmarks: Mapping[str, CollectiveBenchmark],
    sizes: Sequence[int],
    world: dist.ProcessGroup,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, CollectiveFit]:
    """Each subject at each number of elements, one after the other, and the constants that explain the times best.
    The times are the same on all ranks, and so is where they become long."""
    times_s: dict[str, list[float]] = {name: [] for name in benchmarks}
    whole_bytes: list[int] = []
    for numel in sizes:
        for name, subject in benchmarks.items():
            times_s[name].append(_time_s(subject.make(numel), world, device, subject.interleaved_compute))
            if progress is not None:
                progress(sum(map(len, times_s.values())), len(sizes) * len(times_s))
        whole_bytes.append(4 * numel)
        if len(whole_bytes) >= MIN_SIZES and sorted(each[-1] for each in times_s.values())[-2] > BANDWIDTH_BOUND_S:
            break
    fits = {name: fit_collective(whole_bytes, times_s[name], subject.ranks) for name, subject in benchmarks.items()}
    stretch = _make_compute(device)
    stretch_s = _time_s(_repeat(stretch, COMPUTE_REPEATS), world, device, stretch) / COMPUTE_REPEATS
    at = min(OVERLAP_SIZE_INDEX, len(whole_bytes) - 1)
    for name, subject in benchmarks.items():
        more_s = _extra_tensor_latency_s(subject, sizes[COALESCED_SIZES], world, device)
        hidden = _overlap_fraction(subject, sizes[at], times_s[name][at], stretch, stretch_s, world, device)
        fits[name] = fits[name].model_copy(update={"extra_tensor_latency_s": more_s, "overlap_fraction": hidden})
    for name in [name for name in fits if name.endswith("reduce_scatter")]:  # as many messages more, the other way
        more_s = fits[name.replace("reduce_scatter", "all_gather")].extra_tensor_latency_s
        fits[name] = fits[name].model_copy(update={"extra_tensor_latency_s": more_s})
    return fits


def _overlap_fraction(
    benchmark: CollectiveBenchmark,
    numel: int,
    collective_s: float,
    compute_unit: Collective,
    compute_unit_s: float,
    world: dist.ProcessGroup,
    device: torch.device,
) -> float:
    """Share of the collective, which takes about ``collective_s``, that goes on beside compute: some of a ``compute_unit`` of it,
    of about ``compute_unit_s``. What is sure of it, the mean less the standard error: units that run ahead take memory.

    Of collectives that units would have to run ahead for, none where ranks share cores: while one waits, another
    computes, and what goes on beside compute takes its cores. [4 ranks on 2 cores, 1 Gbit/s: a step in which units run
    ahead waits 0.3 s, not 1.7, and takes as long]
    """
    if benchmark.async_start is None or benchmark.ranks == 1 or (CORE_SHARING.is_shared and not benchmark.always_async):
        return 0.0
    alone, begin = benchmark.make(numel), benchmark.async_start(numel)
    compute = _repeat(compute_unit, max(1, round(OVERLAP_COMPUTE_RATIO * collective_s / compute_unit_s)))

    def run_overlapped() -> None:
        under_way = begin()
        compute()
        under_way.wait()

    row = max(OVERLAP_MIN_CALLS, round(OVERLAP_DURATION_S / collective_s))
    calls = [_repeat(call, row) for call in (alone, compute, run_overlapped)]
    run_overlapped()  # what is new the first time
    turns = OVERLAP_ALTERNATIONS // _repeat_divisor()
    own = [_time_once_s(call, world, device, benchmark.interleaved_compute) for _ in range(turns) for call in calls]
    each_s = np.reshape(agree.all_reduce_max(own, world, device), (turns, len(calls)))
    shares = 1 - (each_s[:, 2] - each_s[:, 1]) / typical_time_s(each_s[:, 0].tolist())
    return float(np.clip(shares.mean() - shares.std(ddof=1) / math.sqrt(turns), 0, 1))


def _repeat_divisor() -> int:
    return SHARED_CORES_DIVISOR if CORE_SHARING.is_shared else 1


def _repeat(call: Collective, times: int) -> Collective:
    def call_repeatedly() -> None:
        for _ in range(times):
            call()

    return call_repeatedly


def _extra_tensor_latency_s(
    benchmark: CollectiveBenchmark, sizes: Sequence[int], world: dist.ProcessGroup, device: torch.device
) -> float:
    """What each further tensor adds to a hop's latency. Both sides are timed one right after the other."""
    if benchmark.make_coalesced is None:
        return 0.0
    more = [
        _time_s(benchmark.make_coalesced(numel), world, device, benchmark.interleaved_compute)
        - _time_s(benchmark.make(numel), world, device, benchmark.interleaved_compute)
        for numel in sizes
    ]
    return max(0.0, float(np.mean(more))) / ((COALESCED_TENSORS - 1) * (benchmark.ranks - 1)) if more else 0.0


def _affordable_sizes(
    sizes_bytes: Sequence[int], max_bytes: int | None, group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Numbers of float32 elements to measure at, ascending, the same on all ranks."""
    ranks = group.size()
    numels = sorted({-(-size // (4 * ranks)) * ranks for size in sizes_bytes})
    if len(numels) < 2:
        raise ValueError(f"need two different sizes at least to fit latency and bandwidth, got {list(sizes_bytes)}")
    limit = agree.all_reduce_min(max_bytes, group, device)
    return numels[:2] + [numel for numel in numels[2:] if numel * 4 <= limit]


def _make_compute(device: torch.device) -> Collective:
    """A stretch of compute like a small layer's. On CUDA, ranks are kept in step by the device's own queue."""
    if device.type != "cpu":
        return lambda: None
    factor = torch.ones(COMPUTE_MATRIX_SIZE, COMPUTE_MATRIX_SIZE)

    def work() -> None:
        for _ in range(COMPUTE_MATMULS):
            factor @ factor

    return work


def _time_s(
    collective: Collective,
    group: dist.ProcessGroup,
    device: torch.device,
    interleaved_compute: Collective,
    budget_s: float | None = None,
) -> float:
    """What is typical of several repeats on the slowest rank; every rank gets the same number."""
    budget_s = REPEATS_BUDGET_S / _repeat_divisor() if budget_s is None else budget_s
    for _ in range(WARMUP_REPEATS):
        began = time.perf_counter()
        _time_once_s(collective, group, device, interleaved_compute)
        last_s = time.perf_counter() - began
    wanted = int(budget_s / max(agree.all_reduce_max([last_s], group, device)[0], 1e-6))
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, wanted))
    samples_s = [_time_once_s(collective, group, device, interleaved_compute) for _ in range(repeats)]
    return agree.all_reduce_max([typical_time_s(samples_s)], group, device)[0]


def _time_once_s(
    collective: Collective, group: dist.ProcessGroup, device: torch.device, interleaved_compute: Collective
) -> float:
    synchronize(device)
    dist.barrier(group)
    interleaved_compute()
    synchronize(device)
    start = time.perf_counter()
    collective()
    synchronize(device)
    return time.perf_counter() - start

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

from lightning_osdp import collectives
from lightning_osdp.instants import synchronize
from lightning_osdp.levels import Communicator, Levels, OneStage, TwoStage
from lightning_osdp.planning import cluster
from lightning_osdp.planning.cluster import CollectiveFit, Link, ShardingLink
from lightning_osdp.planning.fitting import fit
from lightning_osdp.repeats import CORES, typical_s

DEFAULT_SIZES_BYTES = (16 << 10, 128 << 10, 1 << 20, 4 << 20, 32 << 20)
"""Of the whole tensor: from a small layer's weights to a large embedding's."""

WARM_UP = 2
REPEATS_BY_BUDGET_S, SHARED_LESS = 0.2, 2
"""Seconds to spend on one collective at one size, with what comes before it, as far as the bounds below allow; and how
many times less where ranks share cores: all takes longer there, and rehearsals of whole steps tell more. [4 ranks on 2
cores, 2 Gbit/s: 3.8 s in all, 5.9 to 6.3 before]"""

FEWEST_REPEATS = 3
MOST_REPEATS = 15

FEWEST_SIZES, LONG_S = 3, 0.012
"""After so many sizes none is measured that is larger than one for which two collectives take so long: there bytes are
all that counts. A single one may have been disturbed. [1 Gbit/s: 16 and 34 ms for 4 MiB; four more seconds for 32]"""

TOGETHER, TOGETHER_SIZES = 4, slice(1, 3)
"""Tensors of a gather of several, and at which of the sizes it is timed: those at which latencies matter."""

BESIDE_SIZE, BESIDE_COMPUTE = 3, 1.5
"""At which of the sizes, the last one if there are fewer, it is measured how much of a collective goes on beside
compute that takes so many times as long. [1 Gbit/s: a shaped link lets 1 MiB through at once, and nothing is hidden; of
4 MiB, 15 ms, three quarters; over loopback, where copies are all, a tenth]"""

STRETCHES = 8
"""Stretches of compute that are timed in a row, to know how many take as long."""

BESIDE_TURNS, BESIDE_S, BESIDE_ROW = 4, 0.016, 2
"""How often the collective, the compute and both are timed in turns, and each time so many collectives in a row as take
about so long, but no fewer than that: what ranks that share cores take differs much from one to the next. [2 ranks on 2
cores: a gather's share was 0 to 0.63 over loopback, where there is next to nothing to gain, and 0 to 1 at 1 Gbit/s,
from three times the collective with compute and the others measured earlier; so it is 0 to 0.11, and 0.24 to 0.88]"""

COMPUTE_SIDE, COMPUTE_PRODUCTS = 192, 16
"""Matrix products before a collective that interrupts compute: some milliseconds on one core, like a small layer."""

Collective = Callable[[], None]
Begun = Callable[[], collectives.Work]
Progress = Callable[[int, int], None]


class _Subject(NamedTuple):
    """A collective to be measured."""

    make: Callable[[int], Collective]
    """Of a number of float32 elements of the whole tensor, on tensors that live as long as it does."""
    ranks: int
    """That take part in one of it: N of the paper's equation 2."""
    before: Collective
    """What comes right before it."""
    make_together: Callable[[int], Collective] | None = None
    """The same of ``TOGETHER`` tensors, so many elements in all; None where there is no such thing."""
    begun: Callable[[int], Begun] | None = None
    """The same, to be waited for while something else goes on; None where that can't be."""
    always_begun: bool = False
    """Whether the engine always goes on meanwhile."""


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> Link:
    """Times every collective of ``lightning_osdp.collectives`` on ``group``. Collective: all ranks call it alike.

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
    subjects = {"all_reduce": _reduced(group, device)} | _subjects("", OneStage(group), group, device)
    sizes = _affordable(sizes_bytes, max_bytes, group, device)
    return Link(**_fits(subjects, sizes, group, device, progress))


def all_gather_s(group: dist.ProcessGroup, device: torch.device, whole_bytes: int) -> float:
    """Seconds of one all-gather, timed as ``measure`` does it, but as seldom as may be. Collective; every rank gets the
    same number."""
    subject = _subjects("", OneStage(group), group, device)["all_gather"]
    numel = -(-whole_bytes // (4 * group.size())) * group.size()
    return _time_s(subject.make(numel), group, device, subject.before, budget_s=0.0)


def measure_levels(
    levels: Levels,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> cluster.Levels:
    """Times what there is to choose from where nodes differ from the world: see ``cluster.Levels``.

    All nodes (or all places in them) work at the same time, as they do in training: they may share a link.
    Arguments as in ``measure``. Collective over the world.
    """
    inside, across = levels.node, levels.across
    subjects = _subjects("inside.", OneStage(inside), inside, device)
    subjects["between"] = _reduced(across, device, inside.size())
    subjects |= _subjects("two_stage.", TwoStage(levels), levels.world, device)
    sizes = _affordable(sizes_bytes, max_bytes, levels.world, device)
    fits = _fits(subjects, sizes, levels.world, device, progress)
    between = fits["between"]  # it was fitted to the whole, not to the part
    between = between.model_copy(update={"s_per_byte": between.s_per_byte * inside.size()})

    def named(prefix: str) -> ShardingLink:
        return ShardingLink(**{name.removeprefix(prefix): fits[name] for name in fits if name.startswith(prefix)})

    return cluster.Levels(inside=named("inside."), between=between, two_stage=named("two_stage."))


def _subjects(prefix: str, by: Communicator, group: dist.ProcessGroup, device: torch.device) -> dict[str, _Subject]:
    """The collectives of ``ShardingLink`` by name.

    Results are allocated anew each time, as the engine does: on a CPU, first touching memory takes as long as a fast
    link's transfer. Zeros stay zeros: sums of other values would grow without end.

    Gathers and reduce-scatters stand between stretches of compute: their threads have gone to sleep, and the ranks are
    not quite in step. On a CPU that makes up most of their latency. All-reduces go on in the background of the backward
    pass and are waited for together, so they are measured by themselves.
    """

    def all_gather(numel: int) -> Collective:
        part = torch.zeros(numel // by.size(), device=device)
        return lambda: by.all_gather(torch.empty(numel, device=device), part)

    def gather_together(numel: int) -> Collective:
        parts = [torch.zeros(-(-numel // (by.size() * TOGETHER)), device=device) for _ in range(TOGETHER)]
        return lambda: by.all_gather_together(
            [torch.empty(part.numel() * by.size(), device=device) for part in parts], parts
        )

    def reduce_scatter(numel: int) -> Collective:
        whole = torch.zeros(numel, device=device)
        return lambda: by.reduce_scatter(torch.empty(numel // by.size(), device=device), whole)

    def begun_gather(numel: int) -> Begun:
        part = torch.zeros(numel // by.size())
        return lambda: collectives.begin_all_gather([torch.empty(numel)], [part], group)

    def begun_scatter(numel: int) -> Begun:
        whole = torch.zeros(numel)
        return lambda: collectives.begin_reduce_scatter([torch.empty(numel // by.size())], [whole], group)

    compute = _compute(device)
    found = {
        "all_gather": _Subject(all_gather, by.size(), compute, gather_together),
        "reduce_scatter": _Subject(reduce_scatter, by.size(), compute),
    }
    if isinstance(by, OneStage) and device.type == "cpu":
        begun = {"all_gather": begun_gather, "reduce_scatter": begun_scatter}
        found |= {name: found[name]._replace(begun=one) for name, one in begun.items()}
    return {prefix + name: one for name, one in found.items()}


def _reduced(group: dist.ProcessGroup, device: torch.device, parts: int = 1) -> _Subject:
    """An all-reduce of one of so many parts of a tensor."""

    def all_reduce(numel: int) -> Collective:
        part = torch.zeros(numel // parts, device=device)
        return lambda: collectives.all_reduce_mean(part, group)

    def begun(numel: int) -> Begun:
        part = torch.zeros(numel // parts)
        return lambda: collectives.all_reduce_async(part, group)

    begins = begun if device.type == "cpu" else None
    return _Subject(all_reduce, group.size(), lambda: None, begun=begins, always_begun=True)


def _fits(
    subjects: Mapping[str, _Subject],
    sizes: Sequence[int],
    world: dist.ProcessGroup,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, CollectiveFit]:
    """Each subject at each number of elements, one after the other, and the constants that explain the times best.
    The times are the same on all ranks, and so is where they become long."""
    times_s: dict[str, list[float]] = {name: [] for name in subjects}
    whole_bytes: list[int] = []
    for numel in sizes:
        for name, subject in subjects.items():
            times_s[name].append(_time_s(subject.make(numel), world, device, subject.before))
            if progress is not None:
                progress(sum(map(len, times_s.values())), len(sizes) * len(times_s))
        whole_bytes.append(4 * numel)
        if len(whole_bytes) >= FEWEST_SIZES and sorted(each[-1] for each in times_s.values())[-2] > LONG_S:
            break
    fits = {name: fit(whole_bytes, times_s[name], subject.ranks) for name, subject in subjects.items()}
    stretch = _compute(device)
    stretch_s = _time_s(_in_a_row(stretch, STRETCHES), world, device, stretch) / STRETCHES
    at = min(BESIDE_SIZE, len(whole_bytes) - 1)
    for name, subject in subjects.items():
        more_s = _more_s(subject, sizes[TOGETHER_SIZES], world, device)
        hidden = _hidden(subject, sizes[at], times_s[name][at], stretch, stretch_s, world, device)
        fits[name] = fits[name].model_copy(update={"more_s": more_s, "hidden": hidden})
    for name in [name for name in fits if name.endswith("reduce_scatter")]:  # as many messages more, the other way
        more_s = fits[name.replace("reduce_scatter", "all_gather")].more_s
        fits[name] = fits[name].model_copy(update={"more_s": more_s})
    return fits


def _hidden(
    subject: _Subject,
    numel: int,
    alone_s: float,
    stretch: Collective,
    stretch_s: float,
    world: dist.ProcessGroup,
    device: torch.device,
) -> float:
    """Share of the collective, which takes about ``alone_s``, that goes on beside compute: some of a ``stretch`` of it,
    of about ``stretch_s``. What is sure of it, the mean less the standard error: units that run ahead take memory.

    Of collectives that units would have to run ahead for, none where ranks share cores: while one waits, another
    computes, and what goes on beside compute takes its cores. [4 ranks on 2 cores, 1 Gbit/s: a step in which units run
    ahead waits 0.3 s, not 1.7, and takes as long]
    """
    if subject.begun is None or subject.ranks == 1 or (CORES.shared and not subject.always_begun):
        return 0.0
    alone, begin = subject.make(numel), subject.begun(numel)
    compute = _in_a_row(stretch, max(1, round(BESIDE_COMPUTE * alone_s / stretch_s)))

    def both() -> None:
        under_way = begin()
        compute()
        under_way.wait()

    row = max(BESIDE_ROW, round(BESIDE_S / alone_s))
    calls = [_in_a_row(call, row) for call in (alone, compute, both)]
    both()  # what is new the first time
    turns = BESIDE_TURNS // _less()
    own = [_once_s(call, world, device, subject.before) for _ in range(turns) for call in calls]
    each_s = np.reshape(collectives.largest_of_ranks(own, world, device), (turns, len(calls)))
    shares = 1 - (each_s[:, 2] - each_s[:, 1]) / typical_s(each_s[:, 0].tolist())
    return float(np.clip(shares.mean() - shares.std(ddof=1) / math.sqrt(turns), 0, 1))


def _less() -> int:
    return SHARED_LESS if CORES.shared else 1


def _in_a_row(call: Collective, times: int) -> Collective:
    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def _more_s(subject: _Subject, sizes: Sequence[int], world: dist.ProcessGroup, device: torch.device) -> float:
    """What each further tensor adds to a hop's latency. Both sides are timed one right after the other."""
    if subject.make_together is None:
        return 0.0
    more = [
        _time_s(subject.make_together(numel), world, device, subject.before)
        - _time_s(subject.make(numel), world, device, subject.before)
        for numel in sizes
    ]
    return max(0.0, float(np.mean(more))) / ((TOGETHER - 1) * (subject.ranks - 1)) if more else 0.0


def _affordable(
    sizes_bytes: Sequence[int], max_bytes: int | None, group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Numbers of float32 elements to measure at, ascending, the same on all ranks."""
    ranks = group.size()
    numels = sorted({-(-size // (4 * ranks)) * ranks for size in sizes_bytes})
    if len(numels) < 2:
        raise ValueError(f"need two different sizes at least to fit latency and bandwidth, got {list(sizes_bytes)}")
    limit = collectives.least_room(max_bytes, group, device)
    return numels[:2] + [numel for numel in numels[2:] if numel * 4 <= limit]


def _compute(device: torch.device) -> Collective:
    """A stretch of compute like a small layer's. On CUDA, ranks are kept in step by the device's own queue."""
    if device.type != "cpu":
        return lambda: None
    factor = torch.ones(COMPUTE_SIDE, COMPUTE_SIDE)

    def work() -> None:
        for _ in range(COMPUTE_PRODUCTS):
            factor @ factor

    return work


def _time_s(
    collective: Collective,
    group: dist.ProcessGroup,
    device: torch.device,
    before: Collective,
    budget_s: float | None = None,
) -> float:
    """What is typical of several repeats on the slowest rank; every rank gets the same number."""
    budget_s = REPEATS_BY_BUDGET_S / _less() if budget_s is None else budget_s
    for _ in range(WARM_UP):
        began = time.perf_counter()
        _once_s(collective, group, device, before)
        last_s = time.perf_counter() - began
    wanted = int(budget_s / max(collectives.largest_of_ranks([last_s], group, device)[0], 1e-6))
    repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, wanted))
    samples_s = [_once_s(collective, group, device, before) for _ in range(repeats)]
    return collectives.largest_of_ranks([typical_s(samples_s)], group, device)[0]


def _once_s(collective: Collective, group: dist.ProcessGroup, device: torch.device, before: Collective) -> float:
    synchronize(device)
    dist.barrier(group)
    before()
    synchronize(device)
    start = time.perf_counter()
    collective()
    synchronize(device)
    return time.perf_counter() - start

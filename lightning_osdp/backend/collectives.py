"""The collectives as the engine runs them, so that what is measured is what is run.

Accelerators use their backend's own. On CPU tensors the gather and the reduce-scatter are rings of point-to-point
messages (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"): each rank
sends (N - 1) / N of the tensor, the least possible, and talks to two neighbours only, so a link between two hosts is
crossed once however many ranks each has.

Note [why not gloo's own]: its reduce-scatter makes copies and its all-gather does not fill a link in both directions.
[measured, torch 2.13, 64 MiB whole, 2 ranks] reduce-scatter 141 -> 45 ms and all-gather 98 -> 32 ms on loopback;
330 -> 150 ms and 242 -> 160 ms over 2 Gbit/s, where the bytes alone take 134 ms. ``benchmarks/collectives.py`` measures
again. Its all-reduce is as fast as the two rings together, and goes on in the background, so that one stays.

Note [pieces]: parts travel in pieces, so that a rank sums one piece, still in its cache, while the next is on its way,
and buffers have a constant size instead of the tensor's.

Note [in the background]: where links are slow, a rank has nothing to do but wait. A collective that was begun goes on
in the backend's own thread, but nobody there adds or passes on: each rank sends every other its part at once. That is
as many bytes as in a ring, but links between hosts of several ranks are crossed more often (``Cluster.supports_prefetch``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.errors import OSDPError
from lightning_osdp.planning.cost.sharding_scopes import DIRECT_REDUCE_SCATTER_BYTES

Result = TypeVar("Result")

CHUNK_BYTES = 2 << 20
"""Of one message. [empirical, gloo: 0.25 MiB is up to 2 times slower, 4 MiB leaves a 2 Gbit/s link idle at times]"""

CHUNKS_IN_FLIGHT = 2
"""Pieces of a reduce-scatter on their way round the ring together."""

NATIVE_GATHER_BYTES = 2 << 20
"""Whole tensors up to this size are gathered by the backend itself, which wakes fewer threads. [empirical, gloo,
2 ranks, between stretches of compute: 256 KiB 3.0 -> 1.4 ms, 1 MiB 3.6 -> 2.9, 4 MiB no difference]"""

COALESCE_BYTES = {"cpu": NATIVE_GATHER_BYTES, "cuda": 16 << 20}
"""Several tensors that are gathered together travel as one up to this size in all: the copies cost less than the
latencies. On a CPU larger ones share a ring without being copied; on CUDA they are gathered one after the other."""

_TAG = 1 << 20
"""Of the first message, out of the way of a user's own point-to-point messages."""

_GATHER_TAG, _REDUCE_TAG = 2 << 20, 3 << 20
"""The same of collectives in the background."""

# torch 2.13 renamed these; the old names still work there but warn.
_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_native_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class WaitTimer:
    """Seconds that this process has waited for collectives on CPU tensors. On CUDA they run beside compute."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Counts the time of the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


COMM_WAIT = WaitTimer()
"""Of all collectives of this process. It only ever grows: take differences."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Returns when the result may be used (on CUDA: by the current stream)."""


class _MeanWork:
    """Divides once a sum is complete, for backends that can't average."""

    def __init__(self, work: Work, tensor: Tensor, ranks: int) -> None:
        self._work = work
        self._tensor = tensor
        self._ranks = ranks

    def wait(self) -> None:
        with COMM_WAIT.measure():
            self._work.wait()
            self._tensor.div_(self._ranks)


def all_reduce_async(tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Starts to replace ``tensor`` by its mean over the ranks.

    Args:
        tensor: contiguous, any shape, the same on all ranks. Neither to be read nor written before ``wait``.
        group: the ranks to average over.

    Returns:
        A handle. ``wait`` must be called exactly once.
    """
    if backend_of(group, tensor.device) == "nccl":
        work: Work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
        return work
    return _MeanWork(dist.all_reduce(tensor, group=group, async_op=True), tensor, group.size())


def all_reduce_mean(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``tensor`` (contiguous, any shape) by its mean over the ranks."""
    with torch.no_grad():
        all_reduce_async(tensor, group).wait()


def all_gather(output_flat: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Fills ``output_flat`` with all ranks' shards in rank order. Needs no further memory.

    Args:
        output_flat: contiguous, 1-D, ``N * shard.numel()`` elements.
        shard: contiguous, 1-D, the same size on all ranks; it may be its own part of ``output_flat``.
        group: the N ranks.
    """
    assert output_flat.numel() == group.size() * shard.numel(), (output_flat.shape, shard.shape, group.size())
    with torch.no_grad(), COMM_WAIT.measure():
        if shard.device.type != "cpu" or output_flat.nbytes <= NATIVE_GATHER_BYTES:
            _native_all_gather(output_flat, shard, group=group)
        else:
            _ring_all_gather([output_flat], [shard], group)


def all_gather_coalesced(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """``all_gather`` of several tensors of one dtype, at the latency of one where that can be had.

    Args:
        outputs_flat: as of ``all_gather``, one for each of ``shards``.
        shards: as of ``all_gather``; the same number and sizes on all ranks.
        group: the N ranks.
    """
    device, whole_bytes = shards[0].device.type, sum(output.nbytes for output in outputs_flat)
    if len(shards) == 1 or (device != "cpu" and whole_bytes > COALESCE_BYTES[device]):
        for output, shard in zip(outputs_flat, shards, strict=True):
            all_gather(output, shard, group)
        return
    with torch.no_grad(), COMM_WAIT.measure():
        if whole_bytes > COALESCE_BYTES[device]:
            _ring_all_gather(outputs_flat, shards, group)
            return
        packed = torch.cat([shard.flatten() for shard in shards])
        gathered = packed.new_empty(group.size(), packed.numel())
        _native_all_gather(gathered.view(-1), packed, group=group)
        for output, part in zip(outputs_flat, torch.split(gathered, [s.numel() for s in shards], dim=1), strict=True):
            output.view(group.size(), -1).copy_(part)


def reduce_scatter(output_shard: Tensor, full_flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sums ``full_flat`` over the ranks and keeps this rank's part of the sum: a SUM, not a mean.

    On CPU the addends of part p are taken in the order of ranks p + 1, p + 2, ..., p (modulo N), so equal inputs give
    equal bits. Beside its arguments it takes ``reduce_scatter_buffer_bytes`` at most.

    Args:
        output_shard: contiguous, 1-D, ``whole_flat.numel() / N`` elements; no part of ``full_flat``.
        full_flat: contiguous, 1-D, the same size on all ranks, divisible by N. It is not changed.
        group: the N ranks.
    """
    assert full_flat.numel() == group.size() * output_shard.numel(), (full_flat.shape, output_shard.shape)
    with torch.no_grad(), COMM_WAIT.measure():
        if full_flat.device.type != "cpu":
            _native_reduce_scatter(output_shard, full_flat, group=group)
        elif group.size() > 2 and full_flat.nbytes <= DIRECT_REDUCE_SCATTER_BYTES:
            _direct_reduce_scatter(output_shard, full_flat, group)
        else:
            _ring_reduce_scatter(output_shard, full_flat, group)


def reduce_scatter_coalesced(
    output_shards: Sequence[Tensor], full_flats: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """``reduce_scatter`` of several tensors of a CPU at the latency of one, and the same to the bit. Each rank sends
    every other its parts at once (Note [in the background]): beside its arguments it takes (N - 2) / N of the tensors.

    Args:
        output_shards: as of ``reduce_scatter``, one for each of ``full_flats``.
        full_flats: as of ``reduce_scatter``; the same number and sizes on all ranks.
        group: the N ranks.
    """
    reduce_scatter_async(output_shards, full_flats, group).wait()


def all_gather_async(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> Work:
    """``all_gather_coalesced`` on CPU tensors that goes on while the caller computes: see Note [in the background].

    Args:
        outputs_flat: as of ``all_gather_coalesced``; not to be touched before ``wait``.
        shards: as of ``all_gather_coalesced``; not to be changed before ``wait``.
        group: the N ranks.
    """
    ranks, rank = group.size(), group.rank()
    works: list[Work] = []
    with torch.no_grad():
        for index, (output, shard) in enumerate(zip(outputs_flat, shards, strict=True)):
            parts = output.view(ranks, -1)  # (N, P / N)
            works += _post_pairwise([shard] * ranks, list(parts), _GATHER_TAG + index, group)
            parts[rank].copy_(shard)
    return _PairwiseWork(works, (outputs_flat, shards))


def reduce_scatter_async(
    output_shards: Sequence[Tensor], full_flats: Sequence[Tensor], group: dist.ProcessGroup
) -> Work:
    """``reduce_scatter_coalesced`` that goes on while the caller computes: see Note [in the background].

    Args:
        output_shards: as of ``reduce_scatter_coalesced``; complete after ``wait``.
        full_flats: as of ``reduce_scatter_coalesced``; not to be changed before ``wait``.
        group: the N ranks.
    """
    ranks, rank = group.size(), group.rank()
    works: list[Work] = []
    sums: list[tuple[Tensor, list[Tensor]]] = []
    with torch.no_grad():
        for index, (output, whole) in enumerate(zip(output_shards, full_flats, strict=True)):
            assert whole.numel() == ranks * output.numel(), (whole.shape, output.shape)
            parts = list(whole.view(ranks, -1))  # (P / N,) each
            others = list(whole.new_empty(ranks - 2, output.numel())) if ranks > 2 else []
            # In the order of the sum: what comes from the next rank is received right where the sum is made.
            addends = {(rank + 1 + step) % ranks: each for step, each in enumerate([output, *others])}
            received = [addends.get(source, output) for source in range(ranks)]
            works += _post_pairwise(parts, received, _REDUCE_TAG + index, group)
            sums.append((output, [*others, parts[rank]]))

    def sum_addends() -> None:
        for output, addends in sums:
            for addend in addends:
                output.add_(addend)

    return _PairwiseWork(works, full_flats, sum_addends)


def _post_pairwise(
    sent: Sequence[Tensor], received: Sequence[Tensor], tag: int, group: dist.ProcessGroup
) -> list[Work]:
    """Messages to and from each other rank, its own in ``sent`` and ``received``. Those of the same tag and pair of
    ranks arrive in the order in which they were sent."""
    ranks, rank = group.size(), group.rank()
    others = [(rank + step) % ranks for step in range(1, ranks)]
    works = [dist.irecv(received[other], group=group, group_src=other, tag=tag) for other in others]
    works += [dist.isend(sent[other], group=group, group_dst=other, tag=tag) for other in others]
    return [work for work in works if work is not None]


class _PairwiseWork:
    """Messages under way, and what is to be done with what they bring."""

    def __init__(self, works: Sequence[Work], buffers: object, on_complete: Callable[[], None] | None = None) -> None:
        self._works = works
        self._buffers: object = buffers  # the backend has addresses only
        self._on_complete = on_complete

    def wait(self) -> None:
        with torch.no_grad(), COMM_WAIT.measure():
            for work in self._works:
                work.wait()
            if self._on_complete is not None:
                self._on_complete()
        self._works, self._buffers, self._on_complete = (), None, None


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Which backend of ``scope`` serves tensors on ``device``: ``gloo``, ``nccl``. It may have one for each kind."""
    return str(group._get_backend(device).name())


def reduce_scatter_copy_factor(backend: str, ranks: int, device: str = "cpu") -> float:
    """Memory a reduce-scatter takes beside its input and output, as a share of the whole tensor's.

    0 for the ring on CPU, whose buffers are constant (``reduce_scatter_buffer_bytes``), and for NCCL, which sums into its
    output. Others, gloo on CUDA among them, stage a whole copy where there is anything to exchange.
    """
    return 0.0 if ranks == 1 or backend == "nccl" or (backend, device) == ("gloo", "cpu") else 1.0


def reduce_buffer_bytes(backend: str, ranks: int, device: str = "cpu") -> int:
    """Most bytes of buffers on the device that a reduce-scatter takes, whatever the tensor's size."""
    ring = (backend, device) == ("gloo", "cpu") and ranks > 2
    return min(2, ranks - 2) * CHUNKS_IN_FLIGHT * CHUNK_BYTES if ring else 0


def all_reduce_buffer_bytes(backend: str, ranks: int, device: str = "cpu") -> int:
    """Most bytes on the device that all-reduces which are under way take beside their tensors, whatever their number
    and size.

    gloo: two segments of 1 MiB in each of its two threads, handed back after each. [measured, eight tensors of 8 MiB at
    once, 2 and 4 ranks: 4.0 MiB] What it stages for CUDA lies on the host.
    """
    return 4 << 20 if (backend, device) == ("gloo", "cpu") and ranks > 1 else 0


class _Ring:
    """Point-to-point messages of one rank to its right neighbour and from its left one, cut into pieces."""

    def __init__(self, part: Tensor, group: dist.ProcessGroup) -> None:
        self.ranks = group.size()
        self.rank = group.rank()
        self._group = group
        self.chunks = _chunks(part)

    def send(self, tensor: Tensor, chunk: int, step: int) -> Work:
        """Starts to send piece number ``chunk`` on its hop number ``run_step`` (1 .. N - 1)."""
        to = (self.rank + 1) % self.ranks
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=_TAG + chunk * self.ranks + step)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, chunk: int, step: int) -> Work:
        """Starts to receive what the left neighbour sends with the same numbers."""
        source = (self.rank - 1) % self.ranks
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=_TAG + chunk * self.ranks + step)
        assert work is not None
        return work


def _chunks(part: Tensor) -> list[slice]:
    """A 1-D tensor in stretches of at most ``CHUNK_BYTES``."""
    step = max(1, CHUNK_BYTES // part.element_size())
    return [slice(start, min(start + step, part.numel())) for start in range(0, part.numel(), step)]


def _ring_all_gather(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Rank r receives the parts r - 1, r - 2, ... from its left and passes all but the last of them on.

    The pieces of all tensors travel in one ring, so that the latency is that of one.
    """
    ring = _Ring(shards[0], group)
    parts = [output.view(ring.ranks, -1) for output in outputs_flat]  # each (N, P / N)
    pieces = [(index, where) for index, shard in enumerate(shards) for where in _chunks(shard)]
    arriving = [
        (step, piece, part, ring.receive(part, piece, step))
        for step in range(1, ring.ranks)
        for piece, (index, where) in enumerate(pieces)
        for part in (parts[index][(ring.rank - step) % ring.ranks, where],)
    ]
    leaving = [
        ring.send(shards[index][where], piece, 1) for piece, (index, where) in enumerate(pieces) if ring.ranks > 1
    ]
    for own, shard in zip(parts, shards, strict=True):
        if own[ring.rank].data_ptr() != shard.data_ptr():
            own[ring.rank].copy_(shard)
    for step, piece, part, work in arriving:
        work.wait()
        if step < ring.ranks - 1:
            leaving.append(ring.send(part, piece, step + 1))
    for work in leaving:
        work.wait()


def _ring_reduce_scatter(output_shard: Tensor, full_flat: Tensor, group: dist.ProcessGroup) -> None:
    """Part p starts at rank p + 1 and goes round to rank p; every rank on the way adds its own."""
    ring = _Ring(output_shard, group)
    parts = full_flat.view(ring.ranks, -1)  # (N, P / N)
    if ring.ranks == 1:
        output_shard.copy_(parts[0])
        return
    at_once = min(CHUNKS_IN_FLIGHT, len(ring.chunks))
    longest = ring.chunks[0].stop if ring.chunks else 0
    # Step s sums in buffer s % 2 and sends from there while step s + 1 fills the other. The last sums in the output.
    buffers = full_flat.new_empty(min(2, ring.ranks - 2), at_once, longest)
    for first in range(0, len(ring.chunks), at_once):
        _reduce_chunks(ring, range(first, min(first + at_once, len(ring.chunks))), output_shard, parts, buffers)


def _reduce_chunks(ring: _Ring, chunks: range, output_shard: Tensor, parts: Tensor, buffers: Tensor) -> None:
    """All steps of a ring reduce-scatter for some of the pieces, one hop of the ring at a time."""

    def target_buffer(chunk: int, step: int) -> Tensor:
        where = ring.chunks[chunk]
        if step == ring.ranks - 1:
            return output_shard[where]
        return buffers[step % len(buffers), chunk - chunks.start, : where.stop - where.start]

    arriving = [ring.receive(target_buffer(piece, 1), piece, 1) for piece in chunks]
    leaving = {0: [ring.send(parts[ring.rank - 1, ring.chunks[piece]], piece, 1) for piece in chunks]}
    for step in range(1, ring.ranks):
        current = arriving
        if step + 1 < ring.ranks:
            for work in leaving.pop(step - 1):  # step + 1 writes where step - 1 was sent from
                work.wait()
            arriving = [ring.receive(target_buffer(piece, step + 1), piece, step + 1) for piece in chunks]
        leaving[step] = []
        own = parts[(ring.rank - 1 - step) % ring.ranks]
        for piece, work in zip(chunks, current, strict=True):
            work.wait()
            partial = target_buffer(piece, step).add_(own[ring.chunks[piece]])
            if step + 1 < ring.ranks:
                leaving[step].append(ring.send(partial, piece, step + 1))
    for works in leaving.values():
        for work in works:
            work.wait()


def _direct_reduce_scatter(output_shard: Tensor, full_flat: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank sends every other its part at once; added in the ring's order, so both ways agree to the bit."""
    received = torch.empty_like(full_flat)
    dist.all_to_all_single(received, full_flat, group=group)
    ranks, rank = group.size(), group.rank()
    addends = received.view(ranks, -1)  # (N, P / N)
    output_shard.copy_(addends[(rank + 1) % ranks])
    for step in range(2, ranks + 1):
        output_shard.add_(addends[(rank + step) % ranks])


def all_reduce_max(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Each of the numbers on the rank where it is largest (of times: on the slowest). Whole ones are exact up to 2^53.
    Collective."""
    largest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [float(each) for each in largest.tolist()]


def all_reduce_min(value: int | None, group: dist.ProcessGroup, device: torch.device) -> float:
    """The least of any rank; infinite if none has a bound (None). Collective."""
    (least,) = all_reduce_max([-math.inf if value is None else -value], group, device)
    return -least


def broadcast_object(group: Any, value: Result) -> Result:
    """What the first rank gives, on every rank; it is pickled. Collective."""
    box = [value if group.rank() == 0 else None]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]  # type: ignore[return-value]


def raise_on_all_ranks(group: Any, work: Callable[[], Result]) -> Result:
    """Runs ``work`` on every rank; if it fails on any, every rank raises, so that none is left waiting.

    A rank raises its own error if it has one, else an ``OSDPError`` that names the rank that failed and its error
    (the same error if it is one of this package's).
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    known = error if error is None or isinstance(error, OSDPError) else OSDPError(f"{type(error).__name__}: {error}")
    everyone: list[OSDPError | None] = [None] * group.size()
    dist.all_gather_object(everyone, known, group=group)
    if error is not None:
        raise error
    for rank, theirs in enumerate(everyone):
        if theirs is not None:
            raise theirs if type(theirs) is not OSDPError else OSDPError(f"rank {rank} failed: {theirs}")
    return result  # type: ignore[return-value]

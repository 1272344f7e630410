"""Collectives on CPU tensors, made of gloo's point-to-point messages.

Note [rings]: all-gather and reduce-scatter are rings (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations"). Each rank sends (N - 1) / N of the tensor, which is the minimum, and talks to two
neighbours only, so a link between two hosts is crossed once however many ranks each host has. They are 2 to 3 times as
fast as gloo's own [M-backend-1]. Gloo's all-reduce is as fast as both rings together and is used as it is.

Note [chunks]: shards travel in chunks. A rank sums one chunk, still in its cache, while the next is in flight, and
buffers have a constant size instead of the tensor's.

Note [pairwise]: an asynchronous collective runs in gloo's thread, where nobody adds or forwards. So each rank sends
every other rank its shard directly. That is as many bytes as in a ring, but links between hosts of several ranks are
crossed more often (``Cluster.supports_prefetch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend.work import COMM_WAIT, Work

CHUNK_BYTES = 2 << 20
"""Size of one message [M-backend-2]."""

CHUNKS_IN_FLIGHT = 2
"""Chunks of a reduce-scatter that go round the ring together."""

_RING_TAG, _GATHER_TAG, _REDUCE_TAG = 1 << 20, 2 << 20, 3 << 20
"""Tags of the first messages, out of the way of a user's own point-to-point messages."""


class _Ring:
    """Messages of one rank to its right neighbour and from its left one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.num_ranks = group.size()
        self.rank = group.rank()
        self._group = group

    def send(self, tensor: Tensor, chunk: int, step: int) -> Work:
        """Start to send chunk number ``chunk`` on its hop number ``step`` (1 .. N - 1)."""
        target, tag = (self.rank + 1) % self.num_ranks, _RING_TAG + chunk * self.num_ranks + step
        work = dist.isend(tensor, group=self._group, group_dst=target, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, chunk: int, step: int) -> Work:
        """Start to receive what the left neighbour sends with the same numbers."""
        source, tag = (self.rank - 1) % self.num_ranks, _RING_TAG + chunk * self.num_ranks + step
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag)
        assert work is not None
        return work


def _chunk_slices(shard: Tensor) -> list[slice]:
    """Cut a 1-D tensor into stretches of at most ``CHUNK_BYTES``."""
    step = max(1, CHUNK_BYTES // shard.element_size())
    return [slice(start, min(start + step, shard.numel())) for start in range(0, shard.numel(), step)]


def ring_all_gather(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gather several tensors in one ring, at the latency of one; arguments as of ``all_gather_coalesced``.

    Rank r receives the shards of ranks r - 1, r - 2, ... from its left and forwards all but the last.
    """
    ring = _Ring(group)
    rows = [output.view(ring.num_ranks, -1) for output in outputs_flat]  # each (N, P / N)
    chunks = [(index, where) for index, shard in enumerate(shards) for where in _chunk_slices(shard)]
    arriving = []
    for step in range(1, ring.num_ranks):
        source = (ring.rank - step) % ring.num_ranks
        for number, (index, where) in enumerate(chunks):
            target = rows[index][source, where]
            arriving.append((step, number, target, ring.receive(target, number, step)))
    leaving = [ring.send(shards[i][where], number, 1) for number, (i, where) in enumerate(chunks) if ring.num_ranks > 1]
    for own_rows, shard in zip(rows, shards, strict=True):
        if own_rows[ring.rank].data_ptr() != shard.data_ptr():
            own_rows[ring.rank].copy_(shard)
    for step, number, target, work in arriving:
        work.wait()
        if step < ring.num_ranks - 1:
            leaving.append(ring.send(target, number, step + 1))
    for work in leaving:
        work.wait()


def ring_reduce_scatter(output_shard: Tensor, full_flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the ranks: shard p starts at rank p + 1 and goes round to rank p; every rank on the way adds its own."""
    ring = _Ring(group)
    shards = full_flat.view(ring.num_ranks, -1)  # (N, P / N)
    if ring.num_ranks == 1:
        output_shard.copy_(shards[0])
        return
    if not (chunks := _chunk_slices(output_shard)):
        return
    at_once = min(CHUNKS_IN_FLIGHT, len(chunks))
    longest = chunks[0].stop
    # Step s sums in buffer s % 2 and sends from there while step s + 1 fills the other. The last sums in the output.
    buffers = full_flat.new_empty(min(2, ring.num_ranks - 2), at_once, longest)
    for first in range(0, len(chunks), at_once):
        numbered = list(enumerate(chunks))[first : first + at_once]
        _reduce_chunks(ring, numbered, output_shard, shards, buffers)


def _reduce_chunks(
    ring: _Ring, numbered_chunks: list[tuple[int, slice]], output_shard: Tensor, shards: Tensor, buffers: Tensor
) -> None:
    """Run all steps of a ring reduce-scatter for some of the chunks, one hop of the ring at a time."""

    def target_buffers(step: int) -> list[Tensor]:
        if step == ring.num_ranks - 1:
            return [output_shard[where] for _, where in numbered_chunks]
        rows = buffers[step % len(buffers)]
        return [row[: where.stop - where.start] for row, (_, where) in zip(rows, numbered_chunks, strict=False)]

    def start_receiving(step: int) -> list[Work]:
        targets = zip(target_buffers(step), numbered_chunks, strict=True)
        return [ring.receive(target, number, step) for target, (number, _) in targets]

    arriving = start_receiving(1)
    leaving = {0: [ring.send(shards[ring.rank - 1, where], number, 1) for number, where in numbered_chunks]}
    for step in range(1, ring.num_ranks):
        current = arriving
        if step + 1 < ring.num_ranks:
            for work in leaving.pop(step - 1):  # step + 1 writes where step - 1 was sent from
                work.wait()
            arriving = start_receiving(step + 1)
        leaving[step] = []
        own = shards[(ring.rank - 1 - step) % ring.num_ranks]
        for (number, where), partial_sum, work in zip(numbered_chunks, target_buffers(step), current, strict=True):
            work.wait()
            partial_sum.add_(own[where])
            if step + 1 < ring.num_ranks:
                leaving[step].append(ring.send(partial_sum, number, step + 1))
    for works in leaving.values():
        for work in works:
            work.wait()


def direct_reduce_scatter(output_shard: Tensor, full_flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the ranks in the ring's order, so to the same bits; every rank sends every other its shard at once."""
    received = torch.empty_like(full_flat)
    dist.all_to_all_single(received, full_flat, group=group)
    num_ranks, rank = group.size(), group.rank()
    addends = received.view(num_ranks, -1)  # (N, P / N)
    output_shard.copy_(addends[(rank + 1) % num_ranks])
    for step in range(2, num_ranks + 1):
        output_shard.add_(addends[(rank + step) % num_ranks])


def all_gather_async(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> Work:
    """Start ``all_gather_coalesced`` on CPU tensors; it goes on while the caller computes. See Note [pairwise].

    Args:
        outputs_flat: as of ``all_gather_coalesced``; not to be touched before ``wait``.
        shards: as of ``all_gather_coalesced``; not to be changed before ``wait``.
        group: the N ranks.
    """
    num_ranks, rank = group.size(), group.rank()
    works: list[Work] = []
    with torch.no_grad():
        for index, (output, shard) in enumerate(zip(outputs_flat, shards, strict=True)):
            rows = output.view(num_ranks, -1)  # (N, P / N)
            works += _post_pairwise([shard] * num_ranks, list(rows), _GATHER_TAG + index, group)
            rows[rank].copy_(shard)
    return _PairwiseWork(works, (outputs_flat, shards))


def reduce_scatter_async(
    output_shards: Sequence[Tensor], full_flats: Sequence[Tensor], group: dist.ProcessGroup
) -> Work:
    """Start ``reduce_scatter_coalesced``; it goes on while the caller computes. See Note [pairwise].

    Args:
        output_shards: as of ``reduce_scatter_coalesced``; complete after ``wait``.
        full_flats: as of ``reduce_scatter_coalesced``; not to be changed before ``wait``.
        group: the N ranks.
    """
    num_ranks, rank = group.size(), group.rank()
    works: list[Work] = []
    sums: list[tuple[Tensor, list[Tensor]]] = []
    with torch.no_grad():
        for index, (output, full_flat) in enumerate(zip(output_shards, full_flats, strict=True)):
            assert full_flat.numel() == num_ranks * output.numel(), (full_flat.shape, output.shape)
            shards = list(full_flat.view(num_ranks, -1))  # (P / N,) each
            others = list(full_flat.new_empty(num_ranks - 2, output.numel())) if num_ranks > 2 else []
            # In the order of the sum: the next rank's shard is received right where the sum is made.
            addends = {(rank + 1 + step) % num_ranks: addend for step, addend in enumerate([output, *others])}
            received = [addends.get(source, output) for source in range(num_ranks)]
            works += _post_pairwise(shards, received, _REDUCE_TAG + index, group)
            sums.append((output, [*others, shards[rank]]))

    def sum_addends() -> None:
        for output, addends in sums:
            for addend in addends:
                output.add_(addend)

    return _PairwiseWork(works, full_flats, sum_addends)


def _post_pairwise(
    sent: Sequence[Tensor], received: Sequence[Tensor], tag: int, group: dist.ProcessGroup
) -> list[Work]:
    """Start messages to and from each other rank; both sequences have an entry for each rank.

    Messages of the same tag between the same ranks arrive in the order in which they were sent.
    """
    num_ranks, rank = group.size(), group.rank()
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    works = [dist.irecv(received[other], group=group, group_src=other, tag=tag) for other in others]
    works += [dist.isend(sent[other], group=group, group_dst=other, tag=tag) for other in others]
    return [work for work in works if work is not None]


class _PairwiseWork:
    """Messages in flight, with their buffers and what is to be done on completion."""

    def __init__(self, works: Sequence[Work], buffers: object, on_complete: Callable[[], None] | None = None) -> None:
        self._works = works
        self._buffers: object = buffers  # gloo holds addresses only
        self._on_complete = on_complete

    def wait(self) -> None:
        with torch.no_grad(), COMM_WAIT.measure():
            for work in self._works:
                work.wait()
            if self._on_complete is not None:
                self._on_complete()
        self._works, self._buffers, self._on_complete = (), None, None

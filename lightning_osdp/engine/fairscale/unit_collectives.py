"""When the collectives of units run: coalesced, and on a CPU while other units compute.

A unit's gathers run as one, and so do its reductions if they are small. On CUDA, streams overlap collectives with
compute. A CPU has none, and a rank that waits for a slow link computes nothing. There the gathers of the next
two units start when a unit has been gathered, and a gradient's reduction is waited for when the next gradient comes.
That keeps two more units unsharded and one more gradient in memory (the memory timeline counts both), so only units up
to ``Cluster.prefetch_max_bytes`` do it.

All ranks know by ``CollectiveOrder.prefetch_next`` which units are next. What was prefetched in vain is freed when the
backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_gather_async, reduce_scatter_async
from lightning_osdp.backend.hierarchical import Communicator, FlatCommunicator
from lightning_osdp.backend.streams import ReductionMemory
from lightning_osdp.backend.work import Work

CommunicatorT = TypeVar("CommunicatorT", bound=Communicator)


class _RankedCommunicator(Generic[CommunicatorT]):
    """What FairScale takes for a unit's process group: it passes ``rank`` and ``size`` on."""

    def __init__(self, communicator: CommunicatorT) -> None:
        self._communicator = communicator

    def rank(self) -> int:
        """See ``Communicator.rank``."""
        return self._communicator.rank()

    def size(self) -> int:
        """See ``Communicator.size``."""
        return self._communicator.size()


class CoalescedAllGather(_RankedCommunicator[Communicator]):
    """Runs a unit's all-gathers as one."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._work: Work | None = None

    @property
    def is_started(self) -> bool:
        """Return whether the unit's gathers are running already."""
        return self._work is not None

    def start(self, outputs_flat: list[Tensor], shards: list[Tensor]) -> None:
        """Start gathers; the next ``gather``, of the same tensors, waits for them."""
        assert isinstance(self._communicator, FlatCommunicator)
        self._work = all_gather_async(outputs_flat, shards, self._communicator.group)

    def gather(self, outputs_flat: list[Tensor], shards: list[Tensor]) -> None:
        """Run gathers, or wait for them if they were started."""
        if self._work is not None:
            self.wait()
        else:
            self._communicator.all_gather_coalesced(outputs_flat, shards)

    def gather_and_free(self, shards: list[Tensor]) -> None:
        """Take part in a gather whose result only other ranks need."""
        outputs = [shard.new_empty(shard.numel() * self.size()) for shard in shards]
        self._communicator.all_gather_coalesced(outputs, shards)

    def wait(self) -> None:
        """Wait for gathers that were started."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class CoalescedReduceScatter(_RankedCommunicator[FlatCommunicator]):
    """Queues a unit's gradients until all have come, to reduce them as one.

    A unit frees each parameter when its gradient comes, so the queue takes no more memory than the unit has.

    Args:
        communicator: runs the reduce-scatters.
        parameters: of the unit; those that are trained have gradients.
    """

    def __init__(self, communicator: FlatCommunicator, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(communicator)
        self._parameters = parameters
        self._queued: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def enqueue(self, full_flat: Tensor, on_reduced: Callable[[Tensor], None]) -> bool:
        """Queue a gradient for the next ``start`` and return whether all have come."""
        self._queued.append((full_flat, on_reduced))
        return len(self._queued) >= sum(parameter.requires_grad for parameter in self._parameters)

    @property
    def queued_bytes(self) -> int:
        """Return the bytes of the queued gradients."""
        return sum(full_flat.nbytes for full_flat, _ in self._queued)

    @property
    def callbacks(self) -> list[Callable[[Tensor], None]]:
        """Return what is called with each queued gradient once it is reduced."""
        return [on_reduced for _, on_reduced in self._queued]

    @property
    def is_async(self) -> bool:
        """Return whether the reduction goes on while others compute."""
        return self._communicator.is_async

    def start(self, retain: Callable[[Sequence[Tensor]], None]) -> Callable[[bool], None]:
        """Reduce the queued gradients, or begin to; return what waits for that and hands them on, or drops them.

        Args:
            retain: keeps gradients that a stream reads until it has done so.
        """
        queued, self._queued = self._queued, []
        inputs, callbacks = zip(*queued, strict=True)
        outputs = [full_flat.new_empty(full_flat.numel() // self.size()) for full_flat in inputs]
        work = reduce_scatter_async(outputs, inputs, self._communicator.group) if self.is_async else None
        if work is None:
            self.reduce_scatter_coalesced(outputs, inputs)
            retain(inputs)
        del queued, inputs  # the full gradients are freed before callbacks, which may update parameters

        def finish(is_wanted: bool) -> None:
            if work is not None:
                work.wait()
            for on_reduced, output in zip(callbacks, outputs, strict=True) if is_wanted else ():
                on_reduced(output)

        return finish

    def reduce_scatter_coalesced(self, outputs: Sequence[Tensor], full_flats: Sequence[Tensor]) -> None:
        """See ``collectives.reduce_scatter_coalesced``."""
        self._communicator.reduce_scatter_coalesced(outputs, full_flats)

    def discard(self) -> None:
        """Drop the queued gradients."""
        self._queued.clear()


class GradientReducer:
    """Takes the place of FairScale's bucketing reducer, which copies every gradient once more than needed.

    Args:
        before_reduction: called before a reduction with the callbacks of those gradients that it reduces.
        memory: keeps gradients while streams read them.
        dtype: the type in which gradients are reduced and handed on; None for their own.
    """

    def __init__(
        self,
        before_reduction: Callable[[Sequence[Any]], None],
        memory: ReductionMemory,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._before_reduction, self.memory, self.dtype = before_reduction, memory, dtype
        self._pending: Callable[[bool], None] | None = None
        self._dropped: list[Callable[[bool], None]] = []
        self._queued_reduction: CoalescedReduceScatter | None = None

    def bound_memory(self, gradient: Tensor, group: Communicator | CoalescedReduceScatter) -> None:
        """Free earlier gradients before one of a unit is reduced. The current stream is that of compute."""
        queued = group.queued_bytes if isinstance(group, CoalescedReduceScatter) else 0
        dtype = self.dtype or gradient.dtype
        copied = gradient.numel() * dtype.itemsize if dtype != gradient.dtype else 0
        self.memory.before_reduction(queued + gradient.nbytes + copied)

    def reduce(
        self,
        gradient: list[Tensor],
        group: Communicator | CoalescedReduceScatter,
        callback_fn: Callable[[Tensor], None],
    ) -> None:
        """Sum a gradient over the ranks and call ``callback_fn`` with this rank's part of the sum.

        That happens at once, when the next reduction has started, or when the last gradient of the unit has come.

        Args:
            gradient: a list of the one gradient, which is taken out, so that nobody holds it longer than needed.
            group: runs the reductions of its unit.
            callback_fn: called with this rank's part.
        """
        full_flat = _pad(gradient[0], group.size())
        full_flat = full_flat.to(self.dtype or full_flat.dtype)
        if full_flat.data_ptr() != gradient[0].data_ptr():
            self.memory.retain([gradient[0]])
        gradient.clear()
        if self._queued_reduction is not group:
            self._flush_queued()  # of a unit that this pass did not reach in full; there is never more than one
        if isinstance(group, CoalescedReduceScatter):
            self._queued_reduction = group
            if group.enqueue(full_flat, callback_fn):
                self._flush_queued()
            return
        self._before_reduction([callback_fn])
        output = full_flat.new_empty(full_flat.numel() // group.size())
        if not (isinstance(group, FlatCommunicator) and group.is_async):
            group.reduce_scatter(output, full_flat)
            self.memory.retain([full_flat])
            del full_flat  # before the callback, which may update parameters
            callback_fn(output)
            return
        work = reduce_scatter_async([output], [full_flat], group.group)

        def finish(is_wanted: bool) -> None:
            work.wait()
            if is_wanted:
                callback_fn(output)

        self._finish_pending()
        self._pending = finish

    def flush(self) -> None:
        """Complete all reductions."""
        self._flush_queued()
        self._finish_pending()

    def _finish_pending(self) -> None:
        while self._dropped:
            self._dropped.pop(0)(False)
        pending, self._pending = self._pending, None
        if pending is not None:
            pending(True)

    def _flush_queued(self) -> None:
        queued, self._queued_reduction = self._queued_reduction, None
        if queued is not None:
            self._before_reduction(queued.callbacks)
            finish = queued.start(self.memory.retain)
            if queued.is_async:
                self._finish_pending()
                self._pending = finish
            else:
                finish(True)

    def discard(self) -> None:
        """Drop what a backward pass that raised has left unfinished; what is in flight keeps its memory until then."""
        if self._pending is not None:
            self._dropped.append(self._pending)
            self._pending = None
        self.memory.free_all()
        if self._queued_reduction is not None:
            self._queued_reduction.discard()
            self._queued_reduction = None

    def teardown(self) -> None:
        """Do nothing: there is no buffer to free, as FairScale's reducer has one."""


def reduce_zeros(
    shards: Sequence[Tensor], group: Communicator | CoalescedReduceScatter, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Take part in a reduction without gradients of one's own.

    Args:
        shards: of the parameters, as large as their gradients' shards.
        group: runs the unit's reductions.
        dtype: the type in which gradients are reduced; None for their own.

    Returns:
        The shards of the other ranks' gradients, in the type in which they are reduced.
    """
    zeros = [shard.new_zeros(shard.numel() * group.size(), dtype=dtype or shard.dtype) for shard in shards]
    outputs = [shard.new_empty(shard.numel(), dtype=dtype or shard.dtype) for shard in shards]
    if isinstance(group, CoalescedReduceScatter) or (isinstance(group, FlatCommunicator) and group.is_async):
        group.reduce_scatter_coalesced(outputs, zeros)
    else:
        group.reduce_scatter(outputs[0], zeros[0])
    return outputs


def _pad(gradient: Tensor, ranks: int) -> Tensor:
    """Return a gradient as a flat tensor of equal parts for all ranks, without a copy if there are such."""
    flat = gradient.flatten()
    missing = -flat.numel() % ranks
    return nn.functional.pad(flat, (0, missing)) if missing else flat

"""When collectives of units are run: the gathers of a unit as one, its reductions as one where they are small, and, on
a CPU, the next unit's gather and the last gradient's reduction beside compute.

On CUDA streams do that. A CPU has none, and a rank that waits for a slow link computes nothing. So the gather of the
unit that comes next is begun when a unit has its own, and a gradient's reduction is waited for when the next gradient
comes. It costs memory: one more unit is whole, and one more gradient (``planning.timeline`` counts both), so only units
of up to ``Cluster.prefetch_max_bytes`` do.

Note [which is next]: a training step is like the one before. Units are expected in the order in which the last forward
or backward pass gathered them; where a pass goes another way, nothing more is begun in it. All ranks go the same way,
as they have to for their collectives, so they agree on what is begun. What was begun in vain is freed when the backward
pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_gather_async, reduce_scatter_async
from lightning_osdp.backend.hierarchical import Communicator, FlatCommunicator
from lightning_osdp.backend.work import Work

UnitT = TypeVar("UnitT")


def is_in_backward() -> bool:
    """Whether this is called amid a backward pass."""
    return torch._C._current_graph_task_id() != -1


class PrefetchOrder(Generic[UnitT]):
    """See Note [which is next]."""

    def __init__(self) -> None:
        self._last_pass: dict[bool, list[UnitT]] = {False: [], True: []}
        self._current_pass: list[UnitT] = []
        self._is_backward = False

    def start_pass(self, is_backward: bool) -> None:
        """A forward or backward pass begins."""
        self._last_pass[self._is_backward] = self._current_pass
        self._current_pass, self._is_backward = [], is_backward

    def predict_next(self, unit: UnitT) -> UnitT | None:
        """What is gathered after ``unit``, which is gathered now; None if that is not known."""
        if not torch.is_grad_enabled() and not is_in_backward():
            return None  # evaluation, which has room for no more than it needs
        if self._is_backward != is_in_backward():
            self.start_pass(is_in_backward())
        at, last = len(self._current_pass), self._last_pass[self._is_backward]
        self._current_pass.append(unit)
        return last[at + 1] if at + 1 < len(last) and last[at] is unit else None


class CoalescedAllGather:
    """A unit's communicator: it holds all-gathers back, to run those of its parameters as one.

    FairScale asks for one after the other and looks at none before the last.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._work: Work | None = None

    def rank(self) -> int:
        """See ``Communicator.rank``."""
        return self._communicator.rank()

    def size(self) -> int:
        """See ``Communicator.size``."""
        return self._communicator.size()

    def all_gather(self, output_flat: Tensor, shard: Tensor) -> None:
        """To be run with the next ``run``."""
        self._queued.append((output_flat, shard))

    @property
    def has_pending(self) -> bool:
        """Whether anything is held back."""
        return bool(self._queued)

    @property
    def is_started(self) -> bool:
        """Whether all of it is under way already."""
        return self._work is not None

    def start(self, outputs_flat: list[Tensor], shards: list[Tensor]) -> None:
        """Begins what will be asked for."""
        assert isinstance(self._communicator, FlatCommunicator)
        self._work = all_gather_async(outputs_flat, shards, self._communicator.group)

    def flush(self) -> None:
        """Gathers what was held back."""
        held, self._queued = self._queued, []
        if self._work is not None:
            self.wait()
        else:
            self._communicator.all_gather_coalesced(*zip(*held, strict=True))

    def wait(self) -> None:
        """Waits for what was begun."""
        begun, self._work = self._work, None
        if begun is not None:
            begun.wait()


class CoalescedReduceScatter:
    """A unit's communicator: its gradients are held back until all have come, to be reduced as one.

    FairScale frees each parameter when its gradient comes, so a unit takes no more for it than it has.

    Args:
        stage: what reduces.
        parameters: of the unit; those that are trained have gradients.
    """

    def __init__(self, communicator: FlatCommunicator, parameters: Sequence[nn.Parameter]) -> None:
        self._communicator = communicator
        self._parameters = parameters
        self._queued: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def rank(self) -> int:
        """See ``Communicator.rank``."""
        return self._communicator.rank()

    def size(self) -> int:
        """See ``Communicator.size``."""
        return self._communicator.size()

    def enqueue(self, full_flat: Tensor, on_reduced: Callable[[Tensor], None]) -> bool:
        """To be reduced with the next ``run``, for ``on_reduced``; returns whether all have come."""
        self._queued.append((full_flat, on_reduced))
        return len(self._queued) >= sum(parameter.requires_grad for parameter in self._parameters)

    def flush(self) -> None:
        """Reduces what was held back."""
        held, self._queued = self._queued, []
        wholes, calls = zip(*held, strict=True)
        del held  # gradients are freed before what is done with their sums, such as an update
        outputs = [whole.new_empty(whole.numel() // self.size()) for whole in wholes]
        self._communicator.reduce_scatter_coalesced(outputs, wholes)
        del wholes
        for done, output in zip(calls, outputs, strict=True):
            done(output)

    def discard(self) -> None:
        """Forgets what was held back."""
        self._queued.clear()


class GradientReducer:
    """Stands in for FairScale's bucketing reducer, which copies every gradient once more than needed."""

    def __init__(self) -> None:
        self._pending: Callable[[], None] | None = None
        self._queued_reduction: CoalescedReduceScatter | None = None

    def reduce_scatter_async(
        self,
        input_list: list[Tensor],
        group: Communicator | CoalescedReduceScatter,
        callback_fn: Callable[[Tensor], None],
    ) -> None:
        """Sums ``input_list[i]`` over the ranks onto rank i and hands the result to ``callback_fn``: now, when the
        next one is under way, or when the last one of its unit has come."""
        whole = merge_chunks(input_list)
        if self._queued_reduction is not group:
            self._flush_queued()  # of a unit with a parameter that this pass did not reach: never of more than one
        if isinstance(group, CoalescedReduceScatter):
            self._queued_reduction = group
            if group.enqueue(whole, callback_fn):
                self._flush_queued()
            return
        output = torch.empty_like(input_list[0])
        if not (isinstance(group, FlatCommunicator) and group.is_async):
            group.reduce_scatter(output, whole)
            callback_fn(output)
            return
        work = reduce_scatter_async([output], [whole], group.group)

        def finish() -> None:
            work.wait()
            callback_fn(output)

        self._finish_pending()
        self._pending = finish

    def flush(self) -> None:
        """Ends what is under way and reduces what is held back."""
        self._finish_pending()
        self._flush_queued()

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _flush_queued(self) -> None:
        held, self._queued_reduction = self._queued_reduction, None
        if held is not None:
            held.flush()

    def discard(self) -> None:
        """Forgets what a backward pass that was broken off has left under way."""
        self._pending = None
        if self._queued_reduction is not None:
            self._queued_reduction.discard()
            self._queued_reduction = None

    def teardown(self) -> None:
        """Nothing is kept."""


def merge_chunks(chunks: list[Tensor]) -> Tensor:
    """The tensor that ``chunks`` were cut from, without a copy where they still lie side by side."""
    first = chunks[0]
    storage, step = first.untyped_storage().data_ptr(), first.numel()
    for index, chunk in enumerate(chunks):
        in_place = chunk.untyped_storage().data_ptr() == storage
        if not in_place or chunk.storage_offset() != first.storage_offset() + index * step:
            return torch.cat(chunks)
    return first.as_strided((step * len(chunks),), (1,))

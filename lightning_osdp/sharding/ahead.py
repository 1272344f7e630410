"""When collectives of units are run: the gathers of a unit as one, its reductions as one where they are small, and, on
a CPU, the next unit's gather and the last gradient's reduction beside compute.

On CUDA streams do that. A CPU has none, and a rank that waits for a slow link computes nothing. So the gather of the
unit that comes next is begun when a unit has its own, and a gradient's reduction is waited for when the next gradient
comes. It costs memory: one more unit is whole, and one more gradient (``planning.timeline`` counts both), so only units
of up to ``Cluster.ahead_bytes`` do.

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

from lightning_osdp.collectives import Work, begin_all_gather, begin_reduce_scatter
from lightning_osdp.levels import Communicator, OneStage

Unit = TypeVar("Unit")


def in_backward() -> bool:
    """Whether this is called amid a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Order(Generic[Unit]):
    """See Note [which is next]."""

    def __init__(self) -> None:
        self._last: dict[bool, list[Unit]] = {False: [], True: []}
        self._now: list[Unit] = []
        self._backward = False

    def begin(self, backward: bool) -> None:
        """A forward or backward pass begins."""
        self._last[self._backward] = self._now
        self._now, self._backward = [], backward

    def after(self, unit: Unit) -> Unit | None:
        """What is gathered after ``unit``, which is gathered now; None if that is not known."""
        if not torch.is_grad_enabled() and not in_backward():
            return None  # evaluation, which has room for no more than it needs
        if self._backward != in_backward():
            self.begin(in_backward())
        at, last = len(self._now), self._last[self._backward]
        self._now.append(unit)
        return last[at + 1] if at + 1 < len(last) and last[at] is unit else None


class Gather:
    """A unit's communicator: it holds all-gathers back, to run those of its parameters as one.

    FairScale asks for one after the other and looks at none before the last.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._held: list[tuple[Tensor, Tensor]] = []
        self._begun: Work | None = None

    def rank(self) -> int:
        """See ``Communicator.rank``."""
        return self._communicator.rank()

    def size(self) -> int:
        """See ``Communicator.size``."""
        return self._communicator.size()

    def all_gather(self, output_flat: Tensor, shard: Tensor) -> None:
        """To be run with the next ``run``."""
        self._held.append((output_flat, shard))

    @property
    def asked(self) -> bool:
        """Whether anything is held back."""
        return bool(self._held)

    @property
    def begun(self) -> bool:
        """Whether all of it is under way already."""
        return self._begun is not None

    def begin(self, outputs_flat: list[Tensor], shards: list[Tensor]) -> None:
        """Begins what will be asked for."""
        assert isinstance(self._communicator, OneStage)
        self._begun = begin_all_gather(outputs_flat, shards, self._communicator.group)

    def run(self) -> None:
        """Gathers what was held back."""
        held, self._held = self._held, []
        if self._begun is not None:
            self.finish()
        else:
            self._communicator.all_gather_together(*zip(*held, strict=True))

    def finish(self) -> None:
        """Waits for what was begun."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.wait()


class Reduction:
    """A unit's communicator: its gradients are held back until all have come, to be reduced as one.

    FairScale frees each parameter when its gradient comes, so a unit takes no more for it than it has.

    Args:
        stage: what reduces.
        parameters: of the unit; those that are trained have gradients.
    """

    def __init__(self, stage: OneStage, parameters: Sequence[nn.Parameter]) -> None:
        self._stage = stage
        self._parameters = parameters
        self._held: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def rank(self) -> int:
        """See ``Communicator.rank``."""
        return self._stage.rank()

    def size(self) -> int:
        """See ``Communicator.size``."""
        return self._stage.size()

    def hold(self, whole_flat: Tensor, done: Callable[[Tensor], None]) -> bool:
        """To be reduced with the next ``run``, for ``done``; returns whether all have come."""
        self._held.append((whole_flat, done))
        return len(self._held) >= sum(parameter.requires_grad for parameter in self._parameters)

    def run(self) -> None:
        """Reduces what was held back."""
        held, self._held = self._held, []
        wholes, calls = zip(*held, strict=True)
        del held  # gradients are freed before what is done with their sums, such as an update
        outputs = [whole.new_empty(whole.numel() // self.size()) for whole in wholes]
        self._stage.reduce_scatter_together(outputs, wholes)
        del wholes
        for done, output in zip(calls, outputs, strict=True):
            done(output)

    def drop(self) -> None:
        """Forgets what was held back."""
        self._held.clear()


class Reducer:
    """Stands in for FairScale's bucketing reducer, which copies every gradient once more than needed."""

    def __init__(self) -> None:
        self._pending: Callable[[], None] | None = None
        self._held: Reduction | None = None

    def reduce_scatter_async(
        self,
        input_list: list[Tensor],
        group: Communicator | Reduction,
        callback_fn: Callable[[Tensor], None],
    ) -> None:
        """Sums ``input_list[i]`` over the ranks onto rank i and hands the result to ``callback_fn``: now, when the
        next one is under way, or when the last one of its unit has come."""
        whole = joined(input_list)
        if self._held is not group:
            self._run_held()  # of a unit with a parameter that this pass did not reach: never of more than one
        if isinstance(group, Reduction):
            self._held = group
            if group.hold(whole, callback_fn):
                self._run_held()
            return
        output = torch.empty_like(input_list[0])
        if not (isinstance(group, OneStage) and group.background):
            group.reduce_scatter(output, whole)
            callback_fn(output)
            return
        work = begin_reduce_scatter([output], [whole], group.group)

        def end() -> None:
            work.wait()
            callback_fn(output)

        self._end_pending()
        self._pending = end

    def flush(self) -> None:
        """Ends what is under way and reduces what is held back."""
        self._end_pending()
        self._run_held()

    def _end_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _run_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.run()

    def drop(self) -> None:
        """Forgets what a backward pass that was broken off has left under way."""
        self._pending = None
        if self._held is not None:
            self._held.drop()
            self._held = None

    def teardown(self) -> None:
        """Nothing is kept."""


def joined(chunks: list[Tensor]) -> Tensor:
    """The tensor that ``chunks`` were cut from, without a copy where they still lie side by side."""
    first = chunks[0]
    storage, step = first.untyped_storage().data_ptr(), first.numel()
    for index, chunk in enumerate(chunks):
        in_place = chunk.untyped_storage().data_ptr() == storage
        if not in_place or chunk.storage_offset() != first.storage_offset() + index * step:
            return torch.cat(chunks)
    return first.as_strided((step * len(chunks),), (1,))

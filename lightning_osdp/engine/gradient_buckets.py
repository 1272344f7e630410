"""Replicated parameters: gradients are averaged over the ranks in buckets during the backward pass.

Note [order of reductions]: ranks must start their collectives in the same order, but gradients become ready in an order
that may differ. So buckets are laid out once, in reverse order of use, and a bucket starts only after all earlier ones
have.

Note [parameters without a gradient]: a rank on which a parameter took no part contributes zeros. Whether any rank had a
gradient must be known to all, since an optimizer treats "none" and "zero" differently (momentum, weight decay). Each
rank's answers travel as extra elements of the last bucket. Only a rank that lacks a gradient reads them, so the usual
step waits for nothing.

Note [gradients in flight]: once packed, a gradient is freed, and its parameter has none until it is averaged.

Note [which parameters take part]: those that all ranks train, as they have agreed; a rank says so when it trains others
than before, at the beginning of a step or of a backward pass. Where ranks differ, those take part, from the next step
on, that any of them trains. A gradient that comes meanwhile, in no bucket, is averaged when the pass is over: in one
more round over all of them, which leaves averages as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import or_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_reduce_async
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.cluster import BUCKET_BYTES, UNBUCKETED_BYTES, size_on
from lightning_osdp.planning.spec.model import NOT_USED
from lightning_osdp.planning.spec.plan import OperatorPlan


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are reduced together."""

    parameters: list[nn.Parameter]
    unbucketed: bool
    """Whether this is one large gradient that is reduced in place."""
    missing: set[nn.Parameter] = field(default_factory=set)
    present: set[nn.Parameter] = field(default_factory=set)
    """Parameters that had a gradient when it was launched."""
    is_launched: bool = False
    work: Any = None
    buffer: Tensor | None = None


class GradientSync:
    """Whether gradients are averaged over the ranks and used, or accumulated; one for all parts of an engine."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Accumulate gradients within a context."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


class RankOrder(Protocol):
    """How ranks agree on which parameters take part."""

    on_trainable: Callable[[str, bool], None]
    join_replicated: Callable[[], None]
    join_late: Callable[[], None]

    def before_trainable(self, trainable: str) -> None:
        """Tell the other ranks which parameters this one trains."""

    def before_late(self) -> None:
        """Return when the next collectives on all ranks are those of gradients that were in no bucket."""


class BucketedAllReduce:
    """Averages the gradients of replicated parameters over a process group.

    Args:
        parameters: in the order of their first use. Frozen ones may be among them and take part once unfrozen.
        group: the process group to average over.
        sync: while it is paused, each rank accumulates its own gradients.
        before_finish: called before what is left of a backward pass is reduced.
        on_pass_end: called when the gradients of a backward pass are reduced at its end.
        dtype: the type in which gradients are reduced; None for their own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        sync: GradientSync,
        before_finish: Callable[[], None],
        on_pass_end: Callable[[], None],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self._group, self._sync, self._before_finish = group, sync, before_finish
        self._after_pass = on_pass_end
        self._world_size: int = group.size()
        self._parameters = list(parameters)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next_bucket = 0
        self.is_active = False
        """Whether a backward pass has come to gradients that are not reduced yet."""
        self._unhooked = set(self._parameters)
        self._hooks: list[Any] = []
        self.refresh()
        self._order: RankOrder | None = None
        self._unsynced: set[nn.Parameter] = set()
        """Parameters with gradients of this rank alone, which may have been frozen since."""
        self._told = self._included = self._trained_by_any = self._own_trainable()

    @property
    def num_collectives(self) -> int:
        """Number of collectives in one synchronised backward pass."""
        trainable = self._included_parameters()
        return len(_make_buckets(trainable)) if self._world_size > 1 and trainable else 0

    def refresh(self) -> None:
        """Include parameters that were unfrozen. Cheap enough for every forward."""
        for parameter in [p for p in self._unhooked if p.requires_grad]:
            with torch.enable_grad():
                node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            # On the node, which has to be held: there it comes after all hooks on the parameter, however late.
            self._hooks.append((node, node.register_hook(partial(self._on_gradient, parameter))))
            self._unhooked.discard(parameter)

    def agree_by(self, order: RankOrder, before_join: Callable[[], None]) -> None:
        """Have ranks agree on which parameters take part; see Note [which parameters take part].

        Args:
            order: tells the others, and has this rank join them.
            before_join: called before gradients are reduced that only other ranks have.
        """

        def join(reduce: Callable[[], None]) -> None:
            before_join()
            reduce()

        self._order, order.on_trainable = order, self._note_trainable
        order.join_replicated, order.join_late = partial(join, self.join), partial(join, self._average_all)

    def begin_step(self) -> None:
        """Note that a training step begins on all ranks."""
        self._included = self._trained_by_any
        self._notice_changes()

    def _own_trainable(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad or p in self._unsynced for p in self._parameters)

    def _notice_changes(self) -> None:
        own = self._own_trainable()
        if own != self._told:
            self._told, trainable = own, "".join("01"[is_trained] for is_trained in own)
            if self._order is None:
                self._note_trainable(trainable, is_unanimous=True)
            else:
                self._order.before_trainable(trainable)

    def _note_trainable(self, trainable: str, is_unanimous: bool) -> None:
        told = tuple(digit == "1" for digit in trainable)
        if is_unanimous:
            self._included = self._trained_by_any = told
        else:
            self._trained_by_any = tuple(map(or_, self._trained_by_any, told))

    def detach(self) -> None:
        """Stop averaging gradients, until ``refresh``."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unhooked = set(self._parameters)

    def join(self) -> None:
        """Take part in the reduction of gradients that other ranks have, with what is here."""
        if not self.is_active:
            self._rebuild_buckets()
        self._finish()

    def finish(self) -> None:
        """Reduce what is left of the backward pass that just ended, and wait for all of it."""
        if self._unsynced and self._sync.is_on and not self.is_active:
            self._rebuild_buckets()
        if self.is_active:
            self._before_finish()
            self._finish()
        if self._sync.is_on and self._world_size > 1 and self._has_others():
            self.refresh()
            self._told = ()
            self._notice_changes()
            if self._order is not None:
                self._order.before_late()
            self._average_all()
        if self._sync.is_on:
            self._unsynced.clear()

    def _has_others(self) -> bool:
        """Return whether there is a gradient of a parameter that takes no part yet."""
        if any(p.requires_grad and p.grad is not None for p in self._unhooked):
            return True
        if self._told == self._included:
            return False
        with_others = zip(self._parameters, self._told, self._included, strict=True)
        return any(is_told and not is_included and p.grad is not None for p, is_told, is_included in with_others)

    def _average_all(self) -> None:
        """Average the gradients of all parameters that any rank trains, most of which are averages already."""
        self._included = self._trained_by_any
        self._rebuild_buckets()
        self._finish()

    def _finish(self) -> None:
        self.is_active = False
        absent = [p for bucket in self._buckets for p in bucket.missing if p.grad is None]
        for bucket in self._buckets[self._next_bucket :]:
            self._launch(bucket)
        for bucket in self._buckets:
            _wait_and_unpack(bucket)
        if absent:
            self._clear_absent_gradients(absent)
        for bucket in self._buckets:
            bucket.buffer = bucket.work = None  # only the gradients refer to the buffer now

    def _included_parameters(self) -> list[nn.Parameter]:
        return [p for p, is_included in zip(self._parameters, self._included, strict=True) if is_included]

    def _on_gradient(self, parameter: nn.Parameter, *_: object) -> None:
        if self._world_size == 1 or parameter.grad is None:  # a function may give none
            return
        if not self._sync.is_on:
            self._unsynced.add(parameter)
            return
        if parameter.grad.layout != torch.strided:
            raise ShardingError("sparse gradients are not supported: build the embedding with sparse=False")
        if not self.is_active:
            self.refresh()
            self._notice_changes()
            self._rebuild_buckets()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_pass_end)
        bucket = self._bucket_of.get(parameter)
        if bucket is None:  # averaged when the pass is over
            return
        if bucket.is_launched or parameter not in bucket.missing:
            raise ShardingError(
                f"a replicated parameter of shape {tuple(parameter.shape)} received its gradient twice in one backward "
                "pass. That happens when a module used in several places is recomputed by reentrant checkpointing (use "
                "it once, or switch its checkpointing off), or after an exception in a backward pass of the same step"
            )
        bucket.missing.discard(parameter)
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].missing:
            self._launch(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _rebuild_buckets(self) -> None:
        """Lay the buckets out, since parameters may have been frozen or unfrozen."""
        self._buckets = _make_buckets(self._included_parameters())
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next_bucket = 0
        self.is_active = True

    def _on_pass_end(self) -> None:
        """Finish when the pass is over: a step may have several. A checkpoint's within another one is a part of it."""
        if torch._C._current_autograd_node() is None:
            self.finish()
            self._after_pass()

    def _launch(self, bucket: _Bucket) -> None:
        bucket.is_launched = True
        bucket.present = {parameter for parameter in bucket.parameters if parameter.grad is not None}
        bucket.buffer = self._pack(bucket)
        for parameter in bucket.present:
            parameter.grad = None
        bucket.work = all_reduce_async(bucket.buffer, self._group)

    def _pack(self, bucket: _Bucket) -> Tensor:
        """Return the gradients in one flat tensor; a large one as it is, if it is reduced in its own type."""
        first = bucket.parameters[0]
        dtype = self._dtype or first.dtype
        if bucket.unbucketed:
            gradient = torch.zeros_like(first) if first.grad is None else first.grad
            return gradient.detach().contiguous().to(dtype)
        parts = [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.detach().flatten() for p in bucket.parameters
        ]
        if bucket is self._buckets[-1]:
            parts.append(self._presence_flags(parts[0]))
        buffer = parts[0].new_empty(sum(part.numel() for part in parts), dtype=dtype)
        return torch.cat(parts, out=buffer)

    def _presence_flags(self, like: Tensor) -> Tensor:
        """Return 1 for each parameter that has a gradient and 0 for others, made on the device: copies would wait."""
        has_gradient = [p in bucket.present for bucket in self._buckets for p in bucket.parameters]
        flags = like.new_ones(len(has_gradient))
        for index, is_present in enumerate(has_gradient):
            if not is_present:
                flags[index].zero_()
        return flags

    def _clear_absent_gradients(self, absent: list[nn.Parameter]) -> None:
        """Remove the zero gradients of parameters that had no gradient on any rank."""
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        buffer = self._buckets[-1].buffer
        assert buffer is not None
        num_present = dict(zip(parameters, buffer[-len(parameters) :].tolist(), strict=True))
        for parameter in absent:
            if num_present[parameter] == 0.0:
                parameter.grad = None


def parameters_in_order_of_use(module: nn.Module, operators: Sequence[OperatorPlan]) -> list[nn.Parameter]:
    """Return the parameters as the operators, which are in the order of their first use, use them.

    A module may list them in another order, and then gradients that come late would hold those up that come early.
    Parameters that are not used come first, so that nothing waits for their gradients.
    """
    used = [operator.name for operator in operators if operator.replicated_reason != NOT_USED]
    positions = {name: index for index, name in enumerate(used)}

    def position(name: str) -> int:
        while name and name not in positions:
            name = name.rpartition(".")[0]
        return positions.get(name, -1)

    named = sorted(module.named_parameters(), key=lambda pair: position(pair[0]))
    return [parameter for _, parameter in named]


def _wait_and_unpack(bucket: _Bucket) -> None:
    """Wait for the reduction and make each parameter's part of the buffer its gradient, without a copy."""
    bucket.work.wait()
    assert bucket.buffer is not None
    bucket.buffer = bucket.buffer.to(bucket.parameters[0].dtype)
    if bucket.unbucketed:
        bucket.parameters[0].grad = bucket.buffer
        return
    offset = 0
    for parameter in bucket.parameters:
        parameter.grad = bucket.buffer[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()


def _make_buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Return buckets: large gradients alone, the others packed by data type in reverse order of use.

    They come in the order in which they are complete, or those that wait for a late gradient would hold up the others.
    The last bucket is always a packed one, which carries the presence flags.
    """
    buckets: list[_Bucket] = []
    open_buckets: dict[torch.dtype, tuple[_Bucket, int]] = {}
    positions = {parameter: position for position, parameter in enumerate(reversed(list(parameters)))}
    for parameter in positions:
        if parameter.nbytes >= size_on(parameter.device.type, UNBUCKETED_BYTES):
            buckets.append(_Bucket([parameter], unbucketed=True, missing={parameter}))
            continue
        bucket, filled_bytes = open_buckets.get(parameter.dtype, (None, 0))
        if bucket is None or filled_bytes + parameter.nbytes > size_on(parameter.device.type, BUCKET_BYTES):
            bucket, filled_bytes = _Bucket([], unbucketed=False), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.missing.add(parameter)
        open_buckets[parameter.dtype] = (bucket, filled_bytes + parameter.nbytes)
    if not buckets:
        return []
    buckets.sort(key=lambda bucket: positions[bucket.parameters[-1]])
    last = next((bucket for bucket in reversed(buckets) if not bucket.unbucketed), buckets[-1])
    last.unbucketed = False
    return [*(bucket for bucket in buckets if bucket is not last), last]

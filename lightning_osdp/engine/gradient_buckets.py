"""Replicated parameters: gradients averaged over the ranks in buckets, while the backward pass goes on.

Note [order of reductions]: ranks must start their collectives in the same order, but gradients become ready in an
order that may differ. So buckets are laid out once, in reverse order of use, and a bucket starts only after all
earlier ones have.

Note [parameters without a gradient]: a rank on which a parameter took no part contributes zeros. Whether any rank
had a gradient must be known to all, since an optimizer treats "none" and "zero" differently (momentum, weight
decay). Each rank's answers travel as extra elements of the last bucket. Only a rank that lacks a gradient reads
them, so the usual step waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_reduce_async
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.cluster import BUCKET_BYTES, UNBUCKETED_BYTES


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter]
    unbucketed: bool
    """One large gradient, reduced in place."""
    missing: set[nn.Parameter] = field(default_factory=set)
    is_launched: bool = False
    work: Any = None
    buffer: Tensor | None = None


class BucketedAllReduce:
    """Averages the gradients of replicated parameters over a process group.

    Args:
        parameters: in the order of their first use. Frozen ones may be among them: they take part once unfrozen.
        group: the process group to average over.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self._group = group
        self._world_size: int = group.size()
        self._parameters = list(parameters)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next_bucket = 0
        self._is_active = False
        self._sync = True
        self._unhooked = set(self._parameters)
        self._hooks: list[Any] = []
        self.refresh()

    @property
    def num_collectives(self) -> int:
        """Collectives in one synchronised backward pass."""
        return (
            len(_make_buckets(self._trainable_parameters()))
            if self._world_size > 1 and self._trainable_parameters()
            else 0
        )

    def refresh(self) -> None:
        """Takes in parameters that were frozen and no longer are. Cheap: to be called before every forward."""
        for parameter in [p for p in self._unhooked if p.requires_grad]:
            hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            self._unhooked.discard(parameter)

    def detach(self) -> None:
        """Lets go of the parameters: their gradients are no longer averaged, until ``refresh``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unhooked = set(self._parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients pile up locally within it."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Reduces what is left of the backward pass that just ended and waits for all of it."""
        if not self._is_active:
            return
        self._is_active = False
        absent = [p for bucket in self._buckets for p in bucket.missing if p.grad is None]
        for bucket in self._buckets[self._next_bucket :]:
            self._launch(bucket)
        for bucket in self._buckets:
            _wait_and_unpack(bucket)
        if absent:
            self._clear_absent_gradients(absent)
        for bucket in self._buckets:
            bucket.buffer = bucket.work = None  # the gradients alone hold on to it now

    def _trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self._parameters if p.requires_grad]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._sync or self._world_size == 1:
            return
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ShardingError("sparse gradients are not supported: build the embedding with sparse=False")
        if not self._is_active:
            self._rebuild_buckets()
        bucket = self._bucket_of[parameter]
        if bucket.is_launched or parameter not in bucket.missing:
            raise ShardingError(
                f"a replicated parameter of shape {tuple(parameter.shape)} received its gradient twice in one backward "
                "pass. That happens when a module used in several places is recomputed by reentrant checkpointing: "
                "use it once, or switch its checkpointing off"
            )
        bucket.missing.discard(parameter)
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].missing:
            self._launch(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _rebuild_buckets(self) -> None:
        """Lays the buckets out anew: parameters may have been frozen or unfrozen since."""
        self._buckets = _make_buckets(self._trainable_parameters())
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next_bucket = 0
        self._is_active = True

    def _launch(self, bucket: _Bucket) -> None:
        bucket.is_launched = True
        if bucket.unbucketed:
            (parameter,) = bucket.parameters
            buffer = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        else:
            buffer = self._pack(bucket)
        bucket.buffer = buffer.detach()
        bucket.work = all_reduce_async(bucket.buffer, self._group)

    def _pack(self, bucket: _Bucket) -> Tensor:
        parts = [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.detach().flatten() for p in bucket.parameters
        ]
        if bucket is self._buckets[-1]:
            parts.append(self._grad_present_flags(like=parts[0]))
        return torch.cat(parts)

    def _grad_present_flags(self, like: Tensor) -> Tensor:
        """One element for each parameter: whether this rank has a gradient for it."""
        flags = [float(p.grad is not None) for bucket in self._buckets for p in bucket.parameters]
        return torch.tensor(flags, dtype=like.dtype, device=like.device)

    def _clear_absent_gradients(self, absent: list[nn.Parameter]) -> None:
        """Takes the zeros back from parameters that had no gradient on any rank."""
        order = [p for bucket in self._buckets for p in bucket.parameters]
        buffer = self._buckets[-1].buffer
        assert buffer is not None
        present = dict(zip(order, buffer[-len(order) :].tolist(), strict=True))
        for parameter in absent:
            if present[parameter] == 0.0:
                parameter.grad = None


def _wait_and_unpack(bucket: _Bucket) -> None:
    """Waits for the reduction and hands each parameter its part of the buffer as its gradient, without a copy."""
    bucket.work.wait()
    assert bucket.buffer is not None
    if bucket.unbucketed:
        bucket.parameters[0].grad = bucket.buffer
        return
    offset = 0
    for parameter in bucket.parameters:
        parameter.grad = bucket.buffer[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()


def _make_buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Large gradients alone, the others packed by dtype, in reverse order of use; the last one is never alone."""
    buckets: list[_Bucket] = []
    open_buckets: dict[torch.dtype, tuple[_Bucket, int]] = {}
    for parameter in reversed(list(parameters)):
        size = parameter.numel() * parameter.element_size()
        if size >= UNBUCKETED_BYTES.get(parameter.device.type, BUCKET_BYTES):
            buckets.append(_Bucket([parameter], unbucketed=True, missing={parameter}))
            continue
        bucket, filled = open_buckets.get(parameter.dtype, (None, 0))
        if bucket is None or filled + size > BUCKET_BYTES:
            bucket, filled = _Bucket([], unbucketed=False), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.missing.add(parameter)
        open_buckets[parameter.dtype] = (bucket, filled + size)
    return _move_packed_bucket_last(buckets)


def _move_packed_bucket_last(buckets: list[_Bucket]) -> list[_Bucket]:
    """Moves a packed bucket to the end, to carry the presence flags."""
    packed = [bucket for bucket in buckets if not bucket.unbucketed]
    if not packed:
        return [*buckets[:-1], _Bucket(buckets[-1].parameters, unbucketed=False, missing=set(buckets[-1].parameters))]
    last = packed[-1]
    return [bucket for bucket in buckets if bucket is not last] + [last]

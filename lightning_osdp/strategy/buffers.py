"""Rank 0's buffers on all ranks, as DDP's ``broadcast_buffers`` does it: running statistics, codebooks and the like.

A forward in training or validation begins with rank 0's buffers if the one before it was in training and ended in a
reduction of gradients (Lightning runs it for each batch); DDP has the same rule. All buffers are sent together, except
large ones that no step writes (masks, tables of positions). Whether one is written shows in its version and address at
each forward, and in its bytes at the first ones and at those of evaluation, since kernels and ``.data`` may hide it.
One that is registered after ``setup`` counts as written; as with DDP, none is sent if there was none at ``setup``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lightning_osdp.backend.hierarchical import cached_host_group
from lightning_osdp.state.guarded_parameter import is_guarded

LARGE_BYTES = 64 << 10
"""Buffers from this size on are sent only once they are known to be written."""

NUM_FIRST_FORWARDS, ASK_EVERY = 4, 50
"""Ranks compare the bytes of large buffers in this many first forwards. After those, ranks on a GPU ask each other in
one of so many forwards only, since their hosts wait for each other then."""

BUCKET_BYTES = 250 << 20
"""Buffers are sent in buckets of this size, as by DDP."""


class BufferBroadcast:
    """Gives all ranks rank 0's buffers at the forwards at which DDP does.

    Args:
        module: the module that is trained.
        group: all ranks.
        device: where they compute.
    """

    def __init__(self, module: pl.LightningModule, group: Any, device: torch.device) -> None:
        self._module, self._group, self._device = module, group, device
        self._is_due = self._has_buffers = any(True for _ in module.buffers())
        self._is_accumulating = False
        self._num_forwards = 0
        self._written: set[str] = set()
        self._marks: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, int] = {}
        for name, buffer in module.named_buffers():  # all ranks have rank 0's now
            if buffer.nbytes >= LARGE_BYTES:
                self._has_changed(name, buffer, compares_bytes=True)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Note that gradients are not reduced within a context."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def before_forward(self, *, is_training: bool) -> None:
        """Broadcast the buffers if they are due, before a training step or a validation step. Collective."""
        if self._is_due:
            self._broadcast(is_training)
        # With manual optimization, Lightning's DDP sends buffers only once.
        is_last = is_training and not self._is_accumulating
        self._is_due = self._has_buffers and is_last and self._module.automatic_optimization

    def _broadcast(self, is_training: bool) -> None:
        buffers = dict(self._module.named_buffers())
        large = [name for name, buffer in buffers.items() if buffer.nbytes >= LARGE_BYTES and name not in self._written]
        if large:
            self._find_written({name: buffers.pop(name) for name in large}, is_training)
            buffers |= {name: self._module.get_buffer(name) for name in large if name in self._written}
        self._num_forwards += 1
        tensors = [buffer.detach() for buffer in buffers.values() if not is_guarded(buffer)]
        if tensors:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
                dist._broadcast_coalesced(self._group, tensors, BUCKET_BYTES, 0)  # type: ignore[attr-defined]

    def _find_written(self, large: dict[str, Tensor], is_training: bool) -> None:
        """Note which large buffers were written on any rank."""
        compares_bytes = not is_training or self._num_forwards < NUM_FIRST_FORWARDS
        if self._device.type != "cpu" and not compares_bytes and self._num_forwards % ASK_EVERY:
            return
        changed = [self._has_changed(name, buffer, compares_bytes) for name, buffer in large.items()]
        flags = torch.tensor(changed, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=cached_host_group(self._group))
        self._written.update(name for name, flag in zip(large, flags.tolist(), strict=True) if flag)

    def _has_changed(self, name: str, buffer: Tensor, compares_bytes: bool) -> bool:
        mark = (buffer._version, buffer.data_ptr())
        is_new = self._marks.get(name) != mark
        self._marks[name] = mark
        if compares_bytes:
            digest = zlib.crc32(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            is_new = self._digests.setdefault(name, digest) != digest or is_new
        return is_new

"""Keeps freed tensors in the heap from one training step to the next, as far as memory allows, if the plan says so.

How far a heap grows can't be told for sure, and whoever exceeds a limit is ended. So the heap starts with the room that
the limit leaves beside a step that hands everything back, which is safe however it is used, and is given more as long
as steps take less than the limit. A step that takes more, since batches or the model's paths differ or the heap has
holes of the wrong sizes, takes a quarter of it away for good.
"""

from __future__ import annotations

import torch

from lightning_osdp.backend.cpu.malloc import HEAP
from lightning_osdp.backend.memory import memory_in_use, peak_memory
from lightning_osdp.planning.spec.plan import ExecutionPlan

WARMUP_BATCHES = 2
"""In these, with an optimizer step each, nothing is kept: in the first the optimizers' states are made, which are to
lie outside of the heap, and the second shows what a step takes with them."""

LIMIT_MARGIN = 0.02
"""Share of the memory limit that stays free: a heap that is used goes on to grow by some MiB, since what is small finds
no room in it either. [measured, natural language model, 1 GiB: 16 MiB in 30 steps, up to 9 in one]"""

SHRINK_FACTOR = 0.75
"""Share of its room that the heap keeps when a step has taken too much."""

MIN_ADJUSTMENT_BYTES = 4 << 20
"""Less is not worth a change."""

MAX_GROWTH = 2.0
"""The heap is given no more than so many times what a step frees."""


class HeapController:
    """Of one run under one plan.

    Args:
        plan: that is in use.
        device: of this rank.
    """

    def __init__(self, plan: ExecutionPlan, device: torch.device) -> None:
        self._is_enabled = plan.retain_freed_memory and device.type == "cpu"
        self._device, self._limit_bytes = device, int((1 - LIMIT_MARGIN) * plan.memory_limit_bytes)
        self._max_peak_bytes = self._limit_bytes - plan.predicted.heap_headroom_bytes
        self._batches, self._peak_bytes, self._idle_bytes = 0, 0, 0
        self._target_bytes, self._retained_bytes, self._max_target_bytes = 0, 0, 0

    def on_step_start(self) -> None:
        """A micro-batch starts."""
        if not self._is_enabled:
            return
        if self._peak_bytes:  # an optimizer has stepped since
            self._batches += 1
            if self._batches >= WARMUP_BATCHES:
                self._adjust()
            self._peak_bytes = 0
        if self._target_bytes and self._target_bytes != self._retained_bytes:
            HEAP.retain(self._target_bytes)
            self._retained_bytes = self._target_bytes

    def on_step_end(self) -> None:
        """An optimizer's update is done, and the device's peak counter shows what that took since the last one."""
        if self._is_enabled:
            self._peak_bytes = max(self._peak_bytes, peak_memory(self._device))
            self._idle_bytes = memory_in_use(self._device)
            if self._peak_bytes > self._limit_bytes:
                self.release()

    def release(self) -> None:
        """Something else than training comes, which was not planned with a grown heap."""
        if self._retained_bytes:
            HEAP.release()
            self._retained_bytes = 0

    def _adjust(self) -> None:
        """Gives the heap more room, or less, for what a step has taken."""
        left = self._max_peak_bytes - self._peak_bytes
        if self._batches == WARMUP_BATCHES:
            freed_bytes = self._peak_bytes - self._idle_bytes
            self._max_target_bytes = min(self._max_peak_bytes - self._idle_bytes, int(MAX_GROWTH * freed_bytes))
        if self._peak_bytes > self._limit_bytes:
            less = int(SHRINK_FACTOR * self._target_bytes)
            self._target_bytes = self._max_target_bytes = less if less >= MIN_ADJUSTMENT_BYTES else 0
        elif left >= MIN_ADJUSTMENT_BYTES:
            self._target_bytes = min(self._target_bytes + left, self._max_target_bytes)

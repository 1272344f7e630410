"""Retention of freed tensors in the heap from one training step to the next, as far as memory allows.

How far a heap grows can't be predicted exactly, and exceeding a limit ends the process. So the heap starts with the
memory that its bound leaves besides a step that releases everything, which is safe however it is used, and is enlarged
as long as steps take less than the bound, with what they have not touched yet of the heap. A step that takes more,
because batches or the model's paths differ or the heap has holes of the wrong sizes, shrinks it by a quarter for good.

The bound is the plan's predicted peak, or what a step that releases everything takes and the growth that was planned,
if that is more; in any case the memory limit.
"""

from __future__ import annotations

import torch

from lightning_osdp.backend.cpu.malloc import HEAP
from lightning_osdp.backend.cpu.process_memory import peak_resident_bytes, resident_bytes
from lightning_osdp.planning.cost.cpu_effects import HEAP_GROWTH, HEAP_LIMIT_MARGIN
from lightning_osdp.planning.spec.plan import ExecutionPlan

WARMUP_STEPS = 2
"""First optimizer steps, in which nothing is retained: the first one makes the optimizers' states, which are to lie
outside of the heap, and the second one shows what a step takes with them."""

SHRINK_FACTOR = 0.75
"""Factor on the heap's size if a step has taken too much."""

MIN_ADJUSTMENT_BYTES = 4 << 20
"""Smallest change of the heap's size that is worth making."""


class HeapController:
    """The size of the heap during training with one plan. It does nothing on CUDA, or if the plan retains nothing.

    Args:
        plan: the plan in use.
        device: the device of this rank.
    """

    def __init__(self, plan: ExecutionPlan, device: torch.device) -> None:
        self._is_enabled = plan.retain_freed_memory and device.type == "cpu"
        self._limit_bytes = int((1 - HEAP_LIMIT_MARGIN) * plan.memory_limit_bytes)
        self._headroom_bytes = plan.predicted.heap_headroom_bytes
        self._bound_bytes = min(self._limit_bytes, plan.predicted.peak_memory_bytes)
        self._num_steps, self._peak_bytes, self._idle_bytes, self._released_idle_bytes = 0, 0, 0, 0
        self._target_bytes, self._retained_bytes, self._max_target_bytes = 0, 0, 0

    def on_step_start(self) -> None:
        """Adjust the heap before a micro-batch."""
        if not self._is_enabled:
            return
        if self._peak_bytes:  # an optimizer has stepped since
            self._num_steps += 1
            if self._num_steps >= WARMUP_STEPS:
                self._adjust()
            self._peak_bytes = 0
        if not self._target_bytes:
            self.release()
        elif self._target_bytes != self._retained_bytes:
            HEAP.retain(self._target_bytes)
            self._retained_bytes = self._target_bytes

    def on_step_end(self) -> None:
        """Note the memory that was used since the last update, after an optimizer's update."""
        if self._is_enabled:
            self._peak_bytes = max(self._peak_bytes, peak_resident_bytes())
            self._idle_bytes = resident_bytes()
            if self._peak_bytes > self._limit_bytes:
                self.release()

    def release(self) -> None:
        """Return the heap's unused memory before work other than training, which was not planned with a grown heap."""
        if self._retained_bytes:
            HEAP.release()
            self._retained_bytes = 0

    def _adjust(self) -> None:
        if self._num_steps == WARMUP_STEPS:
            growth_bytes = int(HEAP_GROWTH * (self._peak_bytes - self._idle_bytes))  # what was planned for
            planned_peak_bytes = self._peak_bytes + growth_bytes + self._headroom_bytes
            self._bound_bytes = min(self._limit_bytes, max(self._bound_bytes, planned_peak_bytes))
            self._max_target_bytes = self._bound_bytes - self._headroom_bytes - self._idle_bytes
            self._released_idle_bytes = self._idle_bytes
        untouched_bytes = max(0, self._retained_bytes - (self._idle_bytes - self._released_idle_bytes))
        left_bytes = self._bound_bytes - self._headroom_bytes - self._peak_bytes - untouched_bytes
        if self._peak_bytes > self._bound_bytes:
            smaller_bytes = int(SHRINK_FACTOR * self._target_bytes)
            self._target_bytes = self._max_target_bytes = smaller_bytes if smaller_bytes >= MIN_ADJUSTMENT_BYTES else 0
        elif left_bytes >= MIN_ADJUSTMENT_BYTES:
            self._target_bytes = min(self._target_bytes + left_bytes, self._max_target_bytes)

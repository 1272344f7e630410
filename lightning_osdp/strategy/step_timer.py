"""Measure how long real optimizer steps take and how much memory they need."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_osdp.backend.memory import peak_memory, reset_peak
from lightning_osdp.backend.timer import elapsed_s, record_event
from lightning_osdp.backend.work import is_driven_by_host
from lightning_osdp.planning.cost.run_correction import MeasuredStep

WARMUP_STEPS = 3
"""First steps that are not timed: optimizer states are made, caches and allocators fill up."""

MAX_TIMED_STEPS = 500
"""The median is taken over at most this many of the last steps."""


class StepTimer:
    """A timer from the first micro-batch of an optimizer step to the end of its update.

    Args:
        device: the device; on CUDA, events are recorded and read at the end, so that no step waits for the timer.
        exposed_comm_s: returns the seconds that this process has waited for collectives so far; used on the CPU only.
    """

    def __init__(self, device: torch.device, exposed_comm_s: Callable[[], float]) -> None:
        self._device = device
        self._exposed_comm_s = exposed_comm_s
        self._exposed_comm_times_s: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        self._start: Any = None
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=MAX_TIMED_STEPS)
        self._exposed_comm_before_s = 0.0
        self._steps = 0
        self.peak_memory_bytes = 0
        """Largest peak of any step so far in bytes, by the device's own counter, without evaluation and saving."""

    def on_microbatch_start(self) -> None:
        """Start the timer at the first micro-batch after an optimizer step."""
        if self._start is None:
            reset_peak(self._device)
            self._exposed_comm_before_s = self._exposed_comm_s()
            self._start = record_event(self._device)

    def on_step_end(self) -> None:
        """Stop the timer: the optimizer's update is done."""
        if self._start is None:
            return
        self._steps += 1
        if self._steps > WARMUP_STEPS:
            self._spans.append((self._start, record_event(self._device)))
            self._exposed_comm_times_s.append(self._exposed_comm_s() - self._exposed_comm_before_s)
        self._start = None
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory(self._device))

    def median_s(self) -> float | None:
        """Median seconds per optimizer step; None if too few steps were made."""
        if not self._spans:
            return None
        return float(statistics.median(elapsed_s(*span) for span in self._spans))

    def summarize(self) -> MeasuredStep | None:
        """Return what a step took on this rank; None if too few were made."""
        seconds = self.median_s()
        if seconds is None:
            return None
        waited = float(statistics.median(self._exposed_comm_times_s)) if is_driven_by_host(self._device) else None
        return MeasuredStep(seconds, waited, self.peak_memory_bytes)

"""A clock for real training steps: how long each optimizer step takes and how much memory it needs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_osdp.instants import instant, seconds_between
from lightning_osdp.planning.calibration import MeasuredStep
from lightning_osdp.profiling.memory import peak_memory, reset_peak

SKIPPED_STEPS = 3
"""First steps that are not counted in the time: optimizer states are made, caches and allocators fill up."""

KEPT_STEPS = 500
"""How many of the last steps the median is taken over."""


class StepClock:
    """Measures from the first micro-batch of an optimizer step to the end of its update.

    Args:
        device: on CUDA, events are recorded and read at the end, so that no step waits for the clock.
        waited_s: seconds that this process has waited for collectives so far; asked on the CPU only.
    """

    def __init__(self, device: torch.device, waited_s: Callable[[], float]) -> None:
        self._device = device
        self._waited_s = waited_s
        self._waits: deque[float] = deque(maxlen=KEPT_STEPS)
        self._start: Any = None
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=KEPT_STEPS)
        self._waited_before = 0.0
        self._steps = 0
        self.peak_memory_bytes = 0
        """Largest peak of any step so far, by the device's own counter; evaluation and saving are left out."""

    def begin(self) -> None:
        """A micro-batch starts. Only the first one after an optimizer step counts."""
        if self._start is None:
            reset_peak(self._device)
            self._waited_before = self._waited_s()
            self._start = instant(self._device)

    def end(self) -> None:
        """The optimizer's update is done."""
        if self._start is None:
            return
        self._steps += 1
        if self._steps > SKIPPED_STEPS:
            self._spans.append((self._start, instant(self._device)))
            self._waits.append(self._waited_s() - self._waited_before)
        self._start = None
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory(self._device))

    def median_s(self) -> float | None:
        """Median seconds per optimizer step; None if too few steps were made."""
        if not self._spans:
            return None
        return float(statistics.median(seconds_between(*span) for span in self._spans))

    def measured(self) -> MeasuredStep | None:
        """What a step took on this rank; None if too few were made."""
        seconds = self.median_s()
        if seconds is None:
            return None
        waited = None if self._device.type == "cuda" else float(statistics.median(self._waits))
        return MeasuredStep(seconds, waited, self.peak_memory_bytes)

"""Which batch size comes next while a system looks for its best one under a limit, in one process. Pure.

Sizes double until three are known; then the largest that should fit is tried, until no larger one should. Meanwhile
links take no time, for peaks do not depend on them. At the end the best size is timed with links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from bench.comparison.batch_probe import is_flat

LARGEST = 64
"""Samples of a rank."""

SLOW_STEP_S = 6.0
"""Beyond steps that compute for so long no larger batch size is tried."""

WARM_UP, KNOWN = 3, 3
"""Steps of the first size, and sizes whose peaks tell those of all others."""

MOST_TRIES = 12
"""Of larger batch sizes."""


@dataclass
class Climb:
    """The state of one search.

    Attributes:
        limit_bytes: a step's peak may not be larger.
        link_s: returns the seconds of communication that a step of the last size would have waited for at most.
        timed: steps of the best size that are timed.
        size: batch size of the next step.
        has_links: whether links take time in the next step.
    """

    limit_bytes: int
    link_s: Callable[[], float] = lambda: 0.0
    timed: int = 3
    size: int = 1
    has_links: bool = False
    peaks: dict[int, int] = field(default_factory=dict)
    compute_s: dict[int, float] = field(default_factory=dict)
    best: int = 0
    final_s: list[float] = field(default_factory=list)
    final_peak: int = 0
    _steps: int = 0
    _tries: int = 0

    def after_step(self, seconds: float, peak_bytes: int) -> bool:
        """Take in what a step of ``size`` took; return whether there is another one."""
        self._steps += 1
        if self.has_links:
            if self._steps > 1:
                self.final_s.append(seconds)
            self.final_peak = max(self.final_peak, peak_bytes)
            return len(self.final_s) < self.timed
        self.peaks[self.size] = max(peak_bytes, self.peaks.get(self.size, 0))
        if self._steps < (WARM_UP if len(self.peaks) == 1 else 1):
            return True
        self.compute_s[self.size] = seconds
        self._steps = 0
        return self._choose()

    def after_out_of_memory(self) -> bool:
        """Take in that memory ran out at ``size``; return whether a smaller one is left for a new run to time."""
        self.compute_s.pop(self.size, None)
        self._steps, self._tries, self.final_s, self.final_peak = 0, MOST_TRIES, [], 0
        return self._choose()

    def rate(self, size: int) -> float:
        """Samples per second, if communication is not hidden."""
        return size / (self.compute_s[size] + self.link_s())

    def _choose(self) -> bool:
        lived = sorted(size for size in self.compute_s if self.peaks[size] <= self.limit_bytes)
        if not lived:
            return False
        largest, died = lived[-1], min((size for size in self.compute_s if size not in lived), default=LARGEST + 1)
        flat = is_flat([self.rate(size) for size in lived])
        if not flat and self.compute_s[largest] < SLOW_STEP_S and self._tries < MOST_TRIES:
            highest = 2 * largest if len(self.peaks) < KNOWN else LARGEST
            fits = min(self._estimate(), died - 1, highest)
            if fits > largest * 1.1:
                self.size, self._tries = fits, self._tries + 1
                return True
        self.best = self.size = max(lived, key=self.rate)
        self.has_links = True
        return True

    def _estimate(self) -> int:
        """The largest size whose peak should fit, by the line through the two largest that are known."""
        known = sorted(self.peaks)[-2:]
        if len(known) < 2:
            return 2 * known[0]
        slope = (self.peaks[known[1]] - self.peaks[known[0]]) / (known[1] - known[0])
        return LARGEST if slope <= 0 else int(known[1] + (self.limit_bytes - self.peaks[known[1]]) / slope)

    @property
    def step_s(self) -> float:
        """Seconds of a step of the best size."""
        return median(self.final_s)

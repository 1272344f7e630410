"""How far gathers may run ahead of compute."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

MAX_GATHERS_IN_FLIGHT = 2
"""How many gathers may run ahead of compute on CUDA: the one in use and the next. FairScale sets no bound."""


class PrefetchLimiter:
    """Keeps the host from launching gathers whose memory could not be reused yet.

    A gather may start when at most ``limit - 1`` earlier ones have not been freed on the device's own clock. Without
    this, the host runs ahead of the device and whole parameters of many operators are allocated at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free_events: deque[Any] = deque()

    def before_gather(self) -> None:
        """Waits until few enough gathers are in flight."""
        while len(self._free_events) >= self._limit:
            self._free_events.popleft().synchronize()

    def after_free(self) -> None:
        """Marks the point in the compute stream after which the memory is free."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._free_events.append(event)


class NoLimit:
    """On a CPU nothing runs ahead."""

    def before_gather(self) -> None:
        """Nothing to wait for."""

    def after_free(self) -> None:
        """Nothing to mark."""

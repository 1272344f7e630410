"""Streams for FairScale's units, and how many all-gathers may run ahead of compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from lightning_osdp.backend.cpu.stub_streams import STUB_STREAM, patch_cuda_streams
from lightning_osdp.backend.cpu.stub_streams import ModuleProxy as ModuleProxy

MAX_GATHERS_IN_FLIGHT = 2
"""Largest number of unsharded units on CUDA: the one in use and the next. FairScale sets no bound."""


class PrefetchLimiter:
    """Keeps the host from launching all-gathers whose memory can't be reused yet.

    An all-gather may start if at most ``limit - 1`` earlier ones are not freed yet on the device's own clock. Without
    this the host runs ahead of the device, and full parameters of many operators are allocated at once.

    Args:
        limit: None: no limit, and no events are recorded.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._free_events: deque[Any] = deque()

    def before_gather(self) -> None:
        """Wait until few enough all-gathers are in flight."""
        while self._limit is not None and len(self._free_events) >= self._limit:
            self._free_events.popleft().synchronize()

    def after_free(self) -> None:
        """Mark the point in the compute stream after which the memory is free."""
        if self._limit is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._free_events.append(event)


def create_prefetch_limiter(device: torch.device) -> PrefetchLimiter:
    """Return the limiter of ``device``; on a CPU, where the host does not run ahead, it does nothing."""
    return PrefetchLimiter(MAX_GATHERS_IN_FLIGHT if device.type == "cuda" else None)


def create_streams(device: torch.device, names: Sequence[str], module: Any) -> dict[str, Any]:
    """Return a stream for each name, by name.

    Args:
        device: where they run.
        names: of the streams.
        module: the Python module that uses them; on a CPU its ``torch`` is replaced by one without CUDA.
    """
    if device.type == "cuda":
        return {name: torch.cuda.Stream(device) for name in names}  # type: ignore[no-untyped-call]
    patch_cuda_streams(module)
    return dict.fromkeys(names, STUB_STREAM)

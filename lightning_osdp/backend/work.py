"""Handles of collectives in flight, and the time that the host has waited for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


def is_driven_by_host(device: torch.device) -> bool:
    """Return whether the host itself runs the collectives of ``device``, as it does on a CPU.

    Only then does ``COMM_WAIT`` show what a step waits for, and a collective overlaps compute only if it was started
    asynchronously. On CUDA streams see to both.
    """
    return device.type == "cpu"


class WaitTimer:
    """Seconds that this process has waited for collectives on CPU tensors, as a sum that only grows."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time that the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


COMM_WAIT = WaitTimer()
"""The timer of all collectives of this process: take differences."""


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Return when the result may be used (on CUDA: by the current stream)."""

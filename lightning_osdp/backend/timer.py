"""Waits for a device: instants on it, and the seconds between them."""

from __future__ import annotations

import time
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Waits for what the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record_event(device: torch.device) -> Any:
    """Now; on CUDA an event: when the device is done with what it was given so far on the current stream."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    return time.perf_counter()


def elapsed_s(start: Any, end: Any) -> float:
    """Between two instants. On CUDA it waits until the device is there."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3

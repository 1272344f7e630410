"""Points in time on a device, and the typical time of repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_osdp.backend.cpu.core_sharing import CORE_SHARING as CORE_SHARING


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record_event(device: torch.device) -> Any:
    """Return the present point in time; on CUDA the one at which the current stream has done its work so far."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    return time.perf_counter()


def elapsed_s(start: Any, end: Any) -> float:
    """Return the seconds between two results of ``record_event``; on CUDA wait until the device has got there."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def typical_time_s(repeats_s: Sequence[float]) -> float:
    """Return the typical time of repeats of one call: their median, which ignores what other programs do at times.

    If ranks share cores, it is the mean: then a short call is interrupted for other ranks' turns or not at all, but a
    training step by its full share of them [M-backend-12].
    """
    return statistics.fmean(repeats_s) if CORE_SHARING.is_shared else statistics.median(repeats_s)

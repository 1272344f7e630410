"""Explain an out-of-memory error: the prediction, the measured peak, and what to set next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lightning_osdp.errors import OSDPError, OutOfMemoryError, message_of
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.plan import ExecutionPlan

RETRY_LIMIT_FRACTION = 0.9
"""Fraction of the memory limit to plan with next, where nothing better is known."""


@contextmanager
def explain_oom(plan: ExecutionPlan, rank: int, peak_memory_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn an allocator's error in the block into one that says what to do.

    Args:
        plan: the plan in use.
        rank: the rank of this process, for the message.
        peak_memory_bytes: reads the device's own counter of peak memory; called once memory has run out.

    Yields:
        Nothing.

    Raises:
        OutOfMemoryError: an allocation failed; its cause is the allocator's error. Other errors pass unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_oom = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in message_of(error)
        if isinstance(error, OSDPError) or not is_oom:
            raise
        text = f"rank {rank} ran out of memory: {message_of(error)}\n{oom_advice(plan, peak_memory_bytes())}"
        raise OutOfMemoryError(text) from error


def oom_advice(plan: ExecutionPlan, measured_bytes: int) -> str:
    """Describe the prediction by category, the measured peak and the next safer setting.

    Args:
        plan: the plan under which memory ran out.
        measured_bytes: the device's peak at that moment, without the allocation that failed.
    """
    predicted, limit = plan.predicted.peak_memory_bytes, plan.memory_limit_bytes
    lines = [
        f"The plan predicts a peak of {format_bytes(predicted)} under a limit of {format_bytes(limit)}"
        f"{_peak_breakdown_text(plan)}.",
        f"When memory ran out, the peak measured was {format_bytes(measured_bytes)}.",
    ]
    if measured_bytes < predicted:
        safer = int(RETRY_LIMIT_FRACTION * measured_bytes)
        lines.append(
            "Less was there than the plan was made for: other processes use this device's memory, or a limit is lower "
            f"than memory_limit. Free it, or plan with memory_limit={_memory_limit_text(safer)}."
        )
    else:
        safer = int(min(RETRY_LIMIT_FRACTION, limit / measured_bytes * RETRY_LIMIT_FRACTION) * limit)
        lines.append(
            f"The prediction was too low: plan with memory_limit={_memory_limit_text(safer)}"
            f"{_smaller_batch_text(plan)}."
        )
    return "\n".join(lines)


def _peak_breakdown_text(plan: ExecutionPlan) -> str:
    peak = plan.peak
    if peak is None:
        return ""
    amounts = {
        "states": peak.states,
        "gradients": peak.gradients,
        "gathered parameters": peak.gathered,
        "transients": peak.transient,
        "activations": peak.activations,
        "freed memory in the heap": peak.heap,
        "the process itself": peak.overhead,
    }
    return f", in the {peak.where}: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in amounts.items())


def _smaller_batch_text(plan: ExecutionPlan) -> str:
    smaller = [point.batch_size for point in plan.frontier if point.batch_size < plan.batch_size]
    return f", or keep it and set batch_size={max(smaller)}" if smaller else ""


def _memory_limit_text(size: int) -> str:
    """Format a limit as a user writes it, rounded down to whole MiB."""
    return f'"{max(1, size >> 20)}MiB"'

"""Out of memory, explained: what the plan expected, what was measured until then, and what to set next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lightning_osdp.errors import OSDPError, OutOfMemoryError
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.plan import ExecutionPlan

RETRY_LIMIT_FRACTION = 0.9
"""Of the memory limit that a plan was made for: what to plan with next, where nothing better is known."""


@contextmanager
def explain_oom(plan: ExecutionPlan, rank: int, peak_memory_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns an allocator's error within the block into one that says what to do.

    Args:
        plan: the plan in use.
        rank: of this process, for the message.
        peak_memory_bytes: asks the device's own counter, once memory has run out.

    Raises:
        OutOfMemoryError: an allocation failed; its cause is the allocator's error. Other errors pass unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OSDPError) or not _is_oom(error):
            raise
        text = f"rank {rank} ran out of memory: {error}\n{oom_advice(plan, peak_memory_bytes())}"
        raise OutOfMemoryError(text) from error


def oom_advice(plan: ExecutionPlan, measured_bytes: int) -> str:
    """The prediction by category, what was measured, and the next safer setting, in words.

    Args:
        plan: the plan under which memory ran out.
        measured_bytes: the device's peak when it did. The allocation that failed is not in it.
    """
    predicted, limit = plan.predicted.peak_memory_bytes, plan.memory_limit_bytes
    lines = [
        f"The plan predicts a peak of {format_bytes(predicted)} under a limit of {format_bytes(limit)}{_peak_breakdown_text(plan)}.",
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
            f"The prediction was too low: plan with memory_limit={_memory_limit_text(safer)}{_smaller_batch_text(plan)}."
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
        "freed tensors in the heap": peak.heap,
        "the process itself": peak.overhead,
    }
    return f", in the {peak.where}: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in amounts.items())


def _smaller_batch_text(plan: ExecutionPlan) -> str:
    smaller = [point.batch_size for point in plan.frontier if point.batch_size < plan.batch_size]
    return f", or keep it and set batch_size={max(smaller)}" if smaller else ""


def _memory_limit_text(size: int) -> str:
    """As a user writes it, rounded down to whole MiB."""
    return f'"{max(1, size >> 20)}MiB"'


def _is_oom(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)

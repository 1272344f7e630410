"""Warnings of memory: a plan for more than there is, a batch larger than planned for, a peak above the memory limit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_osdp.backend.memory import MemoryLimit
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy.dataloader import batch_bytes

WARNING_MARGIN = 1.02
"""Ratio to the batch that was planned for, or to what the last warning told of, from which on there is a warning."""

REMEDIES = "a sample_batch as large as any, more sample_batches, a smaller max_batch_size, or replan='on_drift'"


def warn_if_device_has_less(plan: ExecutionPlan, limit: MemoryLimit) -> None:
    """Warn on the first rank if a plan takes more than a rank can have here: a limit that the user gives is believed.

    Args:
        plan: the plan.
        limit: the memory limit that it was made for.
    """
    available, needed = replace(limit, user_limit=None).current(), plan.predicted.max_memory_bytes
    if limit.user_limit and needed > available:
        rank_zero_warn(
            f"the plan takes up to {format_bytes(needed)} under memory_limit={format_bytes(limit.user_limit)!r}, and "
            f"a rank can have {format_bytes(available)} here now: training may run out of memory. Give a lower "
            "memory_limit, or 'auto'",
            category=OSDPWarning,
        )


class RunWarnings:
    """Compares the batches and the memory of a run with what its plan was made for.

    Args:
        plan: the plan in use.
        bytes_per_sample: tensors of the largest batch that was read, per sample.
        rank: this rank, for the messages.
    """

    def __init__(self, plan: ExecutionPlan, bytes_per_sample: float, rank: int) -> None:
        self.plan = plan
        """The plan in use; it may be replaced by another one of the same batch size and memory limit."""
        self._planned_bytes = bytes_per_sample * plan.batch_size
        self._rank = rank
        self._accepted_batch_bytes = WARNING_MARGIN * self._planned_bytes
        self._accepted_peak_bytes: float = plan.memory_limit_bytes

    def on_batch(self, batch: Any) -> None:
        """Warn if a batch is larger than planned, and than all that was warned of."""
        size = batch_bytes(batch)
        if size <= self._accepted_batch_bytes or not self._planned_bytes:
            return
        self._accepted_batch_bytes = WARNING_MARGIN * size
        warnings.warn(
            f"rank {self._rank} got a batch of {format_bytes(size)}, {size / self._planned_bytes:.2g} times the "
            f"{format_bytes(round(self._planned_bytes))} that the plan was made for: its peak of memory, predicted as "
            f"{format_bytes(self.plan.predicted.peak_memory_bytes)}, may be exceeded. Give OSDPStrategy {REMEDIES}",
            OSDPWarning,
            stacklevel=2,
        )

    def on_step_end(self, peak_bytes: int) -> None:
        """Warn if the measured peak is above the limit, and above all that was warned of."""
        if peak_bytes <= self._accepted_peak_bytes:
            return
        self._accepted_peak_bytes = WARNING_MARGIN * peak_bytes
        limit, predicted = self.plan.memory_limit_bytes, self.plan.predicted.peak_memory_bytes
        warnings.warn(
            f"rank {self._rank} took {format_bytes(peak_bytes)} of memory at its peak, above the limit of "
            f"{format_bytes(limit)} (predicted: {format_bytes(predicted)}). Give OSDPStrategy a lower memory_limit, "
            f"{REMEDIES}",
            OSDPWarning,
            stacklevel=2,
        )

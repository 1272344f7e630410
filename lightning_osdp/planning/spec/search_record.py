"""What a plan records of its search: other batch sizes and plans, what was tried, its peak, why the search stopped."""

from __future__ import annotations

from typing import Literal

from lightning_osdp.planning.spec.frozen import Count, Finite, FrozenModel, Size


class BatchSizePoint(FrozenModel):
    """The best plan at one batch size."""

    batch_size: Count
    samples_per_s: Finite
    peak_memory_bytes: Size


class PeakMoment(FrozenModel):
    """The moment of a step with the largest memory, and its parts in bytes (``cost.memory_timeline.Peak``)."""

    where: str
    states: int
    gradients: int
    gathered: int
    transient: int
    activations: int
    overhead: int
    heap: int = 0
    """What a heap that retains freed tensors takes in addition to live ones."""

    @property
    def heap_growth(self) -> float:
        """``heap`` as a fraction of the tensors that are freed within a step."""
        freed = self.gradients + self.gathered + self.transient + self.activations
        return self.heap / freed if freed else 0.0


class TriedPlan(FrozenModel):
    """What a plan took that was tried before one was taken; times are of an optimizer step."""

    name: str
    """What it does, in words."""
    batch_size: int
    step_time_s: float
    samples_per_s: float
    spread_s: float
    """Seconds of a step by which its rounds differ."""
    num_rounds: int
    is_chosen: bool = False


class Baseline(FrozenModel):
    """What a plan that treats all operators alike would do instead, at its own best batch size under the same limit."""

    name: str
    """``DDP``, ``ZeRO-2``, ``FSDP per operator`` or ``FSDP per block``, and whether blocks are recomputed."""
    fits: bool
    batch_size: Count
    """The best batch size that fits; the smallest one if none does."""
    samples_per_s: Finite = 0.0
    """Throughput over all ranks, as predicted, or as measured if it was tried; 0 if it does not fit."""
    peak_memory_bytes: Size
    missing_bytes: Size = 0
    """Bytes by which its peak exceeds the limit."""
    is_tried: bool = False
    is_plan: bool = False
    """Whether the plan itself is this one."""
    is_uncertain: bool = False
    """Whether it is predicted to be no slower than the plan, which was tried, but was not tried itself:
    ``samples_per_s`` is the plan's then."""


class SearchStop(FrozenModel):
    """Why no larger batch size was tried."""

    reason: Literal["memory", "maximum", "fixed", "global_batch_size"]
    """The next one does not fit, the largest allowed was reached, or the user gave the (global) batch size."""
    batch_size: int | None = None
    """First batch size that does not fit (``memory``), or the largest allowed (``maximum``)."""
    needed_bytes: int | None = None
    """Smallest possible peak at that batch size (``memory``)."""
    setting: str = ""
    """Setting of the user, or retained memory, that allows no more (``maximum``); empty if it is neither."""

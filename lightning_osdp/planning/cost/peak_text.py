"""The moment of a training step at which most memory is held, in words."""

from __future__ import annotations

from typing import Protocol

from lightning_osdp.planning.spec.formatting import format_bytes


class PeakBreakdown(Protocol):
    """A peak by category, in bytes: ``memory_timeline.Peak`` or what a plan keeps of it, ``plan.PeakMoment``."""

    @property
    def where(self) -> str:
        """``forward of NAME``, ``backward of NAME``, ``optimizer step``."""

    @property
    def states(self) -> float:
        """Parameters, optimizer states and buffers."""

    @property
    def gradients(self) -> float:
        """Those that exist already."""

    @property
    def gathered(self) -> float:
        """Whole parameters of sharded operators."""

    @property
    def transient(self) -> float:
        """What is held at this moment alone."""

    @property
    def activations(self) -> float:
        """What forward keeps for backward, and temporaries."""

    @property
    def overhead(self) -> float:
        """The process before the model."""

    @property
    def heap(self) -> float:
        """Freed tensors that stay in the heap."""


def explain_peak(peak: PeakBreakdown) -> str:
    """Where the peak is and what makes it up, the largest first, with the share of each in what the model takes.

    ``reached in the backward of blocks.3.up: activations 120.0 MiB (60%), states ...; beside 300.0 MiB of the process``
    """
    parts = {
        "states": peak.states,
        "gradients": peak.gradients,
        "gathered parameters": peak.gathered,
        f"transients ({_describe_transients(peak.where)})": peak.transient,
        "activations": peak.activations,
    }
    model = sum(parts.values())
    found = sorted(((name, size) for name, size in parts.items() if size), key=lambda part: -part[1])
    words = [f"{name} {format_bytes(size)} ({size / model:.0%})" for name, size in found]
    text = f"reached in the {peak.where}: {', '.join(words) or 'nothing of the model'}"
    beside = {"of the process before the model": peak.overhead, "of freed tensors that stay in the heap": peak.heap}
    words = [f"{format_bytes(size)} {what}" for what, size in beside.items() if size]
    return f"{text}; beside {' and '.join(words)}" if words else text


def _describe_transients(where: str) -> str:
    """What is held for a moment alone, by the phase that the moment is in."""
    if where.startswith("optimizer"):
        return "temporaries of the optimizer's update"
    if where.startswith("backward"):
        return "whole gradients on their way to be reduced, and buckets"
    return "new gradients beside the accumulated ones"

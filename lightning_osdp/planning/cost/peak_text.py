"""The moment of a training step with the largest memory, in words."""

from __future__ import annotations

from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.search_record import PeakMoment


def explain_peak(peak: Peak | PeakMoment) -> str:
    """Return where the peak is and its parts, the largest first, with the share of each in the model's memory.

    ``reached in the backward of blocks.3.up: activations 120.0 MiB (60%), states ...; beside 300.0 MiB of the process``
    """
    if peak.where.startswith("optimizer"):
        transients = "temporaries of the optimizer's update"
    elif peak.where.startswith("backward"):
        transients = "whole gradients on their way to be reduced, and buckets"
    else:
        transients = "new gradients beside the accumulated ones"
    parts = {
        "states": peak.states,
        "gradients": peak.gradients,
        "gathered parameters": peak.gathered,
        f"transients ({transients})": peak.transient,
        "activations": peak.activations,
    }
    model = sum(parts.values())
    by_size = sorted(((name, size) for name, size in parts.items() if size), key=lambda part: -part[1])
    words = [f"{name} {format_bytes(size)} ({size / model:.0%})" for name, size in by_size]
    text = f"reached in the {peak.where}: {', '.join(words) or 'nothing of the model'}"
    others = {"of the process before the model": peak.overhead, "of freed tensors that stay in the heap": peak.heap}
    words = [f"{format_bytes(size)} {name}" for name, size in others.items() if size]
    return f"{text}; beside {' and '.join(words)}" if words else text

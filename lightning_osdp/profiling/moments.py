"""Reads recordings of a step at two batch sizes: which operator did what, and how many bytes were live meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_osdp.planning.operators import OUTSIDE, Line, Moment, Phase
from lightning_osdp.profiling.kernels import Kernel, Spec
from lightning_osdp.profiling.recorder import Op, Recording
from lightning_osdp.profiling.scopes import Scope


def operators_of(recording: Recording, scopes: Sequence[Scope]) -> list[int]:
    """Index of the operator that each op belongs to, or ``OUTSIDE``.

    An op is the work of the innermost operator that was running. An operator that encloses others owns only the ops
    that read its parameters, and their backward.
    """
    leaves = {scope.name: index for index, scope in enumerate(scopes) if not scope.encloses}
    readers = {p: index for index, scope in enumerate(scopes) if scope.encloses for p in scope.parameters}
    by_node: dict[int, int] = {}
    found = []
    for op in recording.ops:
        index = next((leaves[name] for name in reversed(op.site) if name in leaves), OUTSIDE)
        if index == OUTSIDE and op.phase == "forward":
            index = next((readers[p] for p in op.uses if p in readers), OUTSIDE)
            if index != OUTSIDE:
                by_node[op.node] = index
        elif index == OUTSIDE:
            index = by_node.get(op.node, OUTSIDE)
        found.append(index)
    return found


def moments_of(recordings: Mapping[int, Recording], owners: Mapping[int, Sequence[int]]) -> tuple[Moment, ...]:
    """Moments with live bytes as lines through the traced batch sizes.

    Args:
        recordings: by batch size, one or two.
        owners: what ``operators_of`` gives, by batch size.
    """
    stretches = {size: _stretches(recordings[size], owners[size]) for size in sorted(recordings)}
    largest = max(stretches)
    if len(stretches) == 1:
        return tuple(Moment(phase=p, operator=o, live=Line(fixed=live)) for p, o, live in stretches[largest])
    small, large = (stretches[size] for size in sorted(stretches))
    if [m[:2] for m in small] != [m[:2] for m in large]:  # control flow that depends on the batch size
        return tuple(
            Moment(phase=p, operator=o, live=Line(per_sample=live / largest)) for p, o, live in stretches[largest]
        )
    return tuple(
        Moment(phase=phase, operator=operator, live=line((min(stretches), low), (largest, high)))
        for (phase, operator, low), (_, _, high) in zip(small, large, strict=True)
    )


def line(low: tuple[int, float], high: tuple[int, float]) -> Line:
    """The line through two points (batch size, value)."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return Line(fixed=low[1] - slope * low[0], per_sample=slope)


def _stretches(recording: Recording, owners: Sequence[int]) -> list[tuple[Phase, int, int]]:
    """Maximal runs of ops of one operator and phase: (phase, operator, largest live bytes)."""
    found: list[tuple[Phase, int, int]] = []
    for op, owner, live in zip(recording.ops, owners, recording.live_bytes(), strict=True):
        if found and found[-1][:2] == (op.phase, owner):
            live = max(live, found.pop()[2])
        found.append((op.phase, owner, live))
    return found


def kernels_of(recording: Recording, owners: Sequence[int]) -> tuple[Kernel, ...]:
    """The step's kernels, equal ones of an operator and phase counted together; views cost nothing and are left out."""
    counts: dict[tuple[object, ...], int] = {}
    nodes: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], tuple[Op, int]] = {}
    node_seen: tuple[str, int] = ("", -1)
    for op, owner in zip(recording.ops, owners, strict=True):
        if op.view:
            continue
        key: tuple[Spec, ...] = (op.func, op.args, op.kwargs, owner, op.phase)
        first.setdefault(key, (op, owner))
        counts[key] = counts.get(key, 0) + 1
        nodes[key] = nodes.get(key, 0) + (node_seen != (op.phase, op.node))
        node_seen = (op.phase, op.node)
    return tuple(
        Kernel(op.func, op.args, op.kwargs, owner, op.phase, counts[key], nodes[key])
        for key, (op, owner) in first.items()
    )

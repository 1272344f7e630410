"""Reads recordings of a step at two batch sizes: which operator did what, and how many bytes were live meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_osdp.planning.operators import OUTSIDE, Line, Moment, Phase
from lightning_osdp.profiling.kernels import Kernel, Spec
from lightning_osdp.profiling.recorder import Op, Recording
from lightning_osdp.profiling.scopes import Scope


class Stretch(NamedTuple):
    """A maximal run of ops of one operator, block and phase."""

    phase: Phase
    operator: int
    block: int
    """Index of the repeated block that they lie in; negative for none."""
    live_bytes: int
    """The most that are live during them."""


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


def moments_of(stretches: Mapping[int, Sequence[Stretch]]) -> tuple[Moment, ...]:
    """Moments with live bytes as lines through the traced batch sizes (one or two)."""
    sizes = sorted(stretches)
    largest = sizes[-1]
    if len(sizes) == 1:
        lines = [Line(fixed=one.live_bytes) for one in stretches[largest]]
    elif [one[:3] for one in stretches[sizes[0]]] != [one[:3] for one in stretches[largest]]:
        # Control flow that depends on the batch size.
        lines = [Line(per_sample=one.live_bytes / largest) for one in stretches[largest]]
    else:
        pairs = zip(stretches[sizes[0]], stretches[largest], strict=True)
        lines = [line((sizes[0], low.live_bytes), (largest, high.live_bytes)) for low, high in pairs]
    return tuple(
        Moment(phase=one.phase, operator=one.operator, live=live)
        for one, live in zip(stretches[largest], lines, strict=True)
    )


def line(low: tuple[int, float], high: tuple[int, float]) -> Line:
    """The line through two points (batch size, value)."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return Line(fixed=low[1] - slope * low[0], per_sample=slope)


def stretches_of(recording: Recording, owners: Sequence[int], blocks: Sequence[int]) -> list[Stretch]:
    """The step as moments: what ran in each, in the order of time.

    Args:
        recording: of one batch size.
        owners: what ``operators_of`` gives.
        blocks: the block of each op.
    """
    found: list[Stretch] = []
    for op, owner, block, live in zip(recording.ops, owners, blocks, recording.live_bytes(), strict=True):
        if found and found[-1][:3] == (op.phase, owner, block):
            live = max(live, found.pop().live_bytes)
        found.append(Stretch(op.phase, owner, block, live))
    return found


def kernels_of(recording: Recording, owners: Sequence[int], blocks: Sequence[int] | None = None) -> tuple[Kernel, ...]:
    """The step's kernels, equal ones of an operator and phase counted together; views cost nothing and are left out.

    Of what belongs to no operator, those of each block's forward are counted apart.

    Args:
        recording: of one batch size.
        owners: what ``operators_of`` gives.
        blocks: the block of each op; None if there are none.
    """
    counts: dict[tuple[object, ...], int] = {}
    nodes: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], tuple[Op, int, int]] = {}
    node_seen: tuple[str, int] = ("", -1)
    for op, owner, inside in zip(recording.ops, owners, blocks or [OUTSIDE] * len(recording.ops), strict=True):
        if op.view:
            continue
        block = inside if owner == OUTSIDE and op.phase == "forward" else OUTSIDE
        key: tuple[Spec, ...] = (op.func, op.args, op.kwargs, owner, op.phase, block)
        first.setdefault(key, (op, owner, block))
        counts[key] = counts.get(key, 0) + 1
        nodes[key] = nodes.get(key, 0) + (node_seen != (op.phase, op.node))
        node_seen = (op.phase, op.node)
    return tuple(
        Kernel(op.func, op.args, op.kwargs, owner, op.phase, counts[key], nodes[key], block)
        for key, (op, owner, block) in first.items()
    )

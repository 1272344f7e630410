"""Reads recordings of a step at two batch sizes: which operator did what, and how many bytes were live meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, Moment, Phase
from lightning_osdp.profiling.kernels.kernel import Kernel, Spec
from lightning_osdp.profiling.tracing.parameter_owners import OwnerScope
from lightning_osdp.profiling.tracing.recorder import Op, Recording


class OpRun(NamedTuple):
    """A maximal run of ops of one operator, block and phase."""

    phase: Phase
    operator: int
    block: int
    """Index of the repeated block that they lie in; negative for none."""
    live_bytes: int
    """The most that are live during them."""


def owners_of_ops(recording: Recording, scopes: Sequence[OwnerScope]) -> list[int]:
    """Index of the operator that each op belongs to, or ``UNATTRIBUTED``.

    An op is the work of the innermost operator that was running. An operator that encloses others owns only the ops
    that read its parameters, and their backward.
    """
    leaves = {scope.name: index for index, scope in enumerate(scopes) if not scope.encloses_operators}
    readers = {p: index for index, scope in enumerate(scopes) if scope.encloses_operators for p in scope.parameters}
    by_node: dict[int, int] = {}
    found = []
    for op in recording.ops:
        index = next((leaves[name] for name in reversed(op.site) if name in leaves), UNATTRIBUTED)
        if index == UNATTRIBUTED and op.phase == "forward":
            index = next((readers[p] for p in op.used_parameters if p in readers), UNATTRIBUTED)
            if index != UNATTRIBUTED:
                by_node[op.node] = index
        elif index == UNATTRIBUTED:
            index = by_node.get(op.node, UNATTRIBUTED)
        found.append(index)
    return found


def fit_moments(op_runs: Mapping[int, Sequence[OpRun]]) -> tuple[Moment, ...]:
    """Moments with live bytes as lines through the traced batch sizes (one or two)."""
    sizes = sorted(op_runs)
    largest = sizes[-1]
    if len(sizes) == 1:
        lines = [LinearInBatch(fixed=one.live_bytes) for one in op_runs[largest]]
    elif [one[:3] for one in op_runs[sizes[0]]] != [one[:3] for one in op_runs[largest]]:
        # Control flow that depends on the batch size.
        lines = [LinearInBatch(per_sample=one.live_bytes / largest) for one in op_runs[largest]]
    else:
        pairs = zip(op_runs[sizes[0]], op_runs[largest], strict=True)
        lines = [line_through((sizes[0], low.live_bytes), (largest, high.live_bytes)) for low, high in pairs]
    return tuple(
        Moment(phase=one.phase, operator=one.operator, live=live)
        for one, live in zip(op_runs[largest], lines, strict=True)
    )


def line_through(low: tuple[int, float], high: tuple[int, float]) -> LinearInBatch:
    """The line through two points (batch size, value)."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return LinearInBatch(fixed=low[1] - slope * low[0], per_sample=slope)


def group_ops(recording: Recording, owners: Sequence[int], blocks: Sequence[int]) -> list[OpRun]:
    """The step as moments: what ran in each, in the order of time.

    Args:
        recording: of one batch size.
        owners: what ``owners_of_ops`` gives.
        blocks: the block of each op.
    """
    found: list[OpRun] = []
    for op, owner, block, live in zip(recording.ops, owners, blocks, recording.live_bytes(), strict=True):
        if found and found[-1][:3] == (op.phase, owner, block):
            live = max(live, found.pop().live_bytes)
        found.append(OpRun(op.phase, owner, block, live))
    return found


def count_kernels(
    recording: Recording, owners: Sequence[int], blocks: Sequence[int] | None = None
) -> tuple[Kernel, ...]:
    """The step's kernels, equal ones of an operator and phase counted together; views cost nothing and are left out.

    Of what belongs to no operator, those of each block's forward are counted apart.

    Args:
        recording: of one batch size.
        owners: what ``owners_of_ops`` gives.
        blocks: the block of each op; None if there are none.
    """
    counts: dict[tuple[object, ...], int] = {}
    nodes: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], tuple[Op, int, int]] = {}
    node_seen: tuple[str, int] = ("", -1)
    for op, owner, inside in zip(recording.ops, owners, blocks or [UNATTRIBUTED] * len(recording.ops), strict=True):
        if op.is_view:
            continue
        block = inside if owner == UNATTRIBUTED and op.phase == "forward" else UNATTRIBUTED
        key: tuple[Spec, ...] = (op.func, op.args, op.kwargs, owner, op.phase, block)
        first.setdefault(key, (op, owner, block))
        counts[key] = counts.get(key, 0) + 1
        nodes[key] = nodes.get(key, 0) + (node_seen != (op.phase, op.node))
        node_seen = (op.phase, op.node)
    return tuple(
        Kernel(op.func, op.args, op.kwargs, owner, op.phase, counts[key], nodes[key], block)
        for key, (op, owner, block) in first.items()
    )

"""Attributes recorded ops to operators and blocks, and fits the bytes that were live in each moment of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, Moment, Phase
from lightning_osdp.profiling.kernels.kernel import Kernel
from lightning_osdp.profiling.tracing.parameter_owners import OwnerScope
from lightning_osdp.profiling.tracing.recorder import Op, Recording


class OpRun(NamedTuple):
    """A maximal run of ops of one operator, block and phase, within the same operators."""

    phase: Phase
    operator: int
    block: int
    """Index of the repeated block that the ops lie in, or ``UNATTRIBUTED``."""
    within: tuple[int, ...]
    """Operators that enclose others, in the run of whose modules the ops lie."""
    before_gradients: bool
    """``Moment.before_gradients``."""
    live_bytes: int
    """Peak of live bytes during the run."""


class AttributedRecording:
    """A recording at one batch size, with the operator and the block of each op.

    Attributes:
        recording: The recording.
        ops: Its ops.
        owners: Index of the operator that each op belongs to, or ``UNATTRIBUTED``.
        within: Operators that may be sharded and enclose others, in the run of whose modules each op lies.
        first_casts: For operators whose gradients are casts, the op that makes the first of them.
        blocks: Index of the repeated block that each op lies in, or ``UNATTRIBUTED``.
    """

    def __init__(
        self, recording: Recording, scopes: Sequence[OwnerScope], cast_parameters: Set[int] = frozenset()
    ) -> None:
        self.recording = recording
        self.ops = recording.ops
        self.owners = _owners_of_ops(recording.ops, scopes)
        tied = [(index, scope.name) for index, scope in enumerate(scopes) if scope.tied_names]
        self.within = [tuple(index for index, name in tied if name in op.site) for op in recording.ops]
        self.blocks = [UNATTRIBUTED] * len(recording.ops)
        self.first_casts: dict[int, int] = {}
        for index, scope in enumerate(scopes):
            cast = cast_parameters & set(scope.parameters) & recording.gradients.keys()
            if cast:
                self.first_casts[index] = min(recording.gradients[parameter][0] for parameter in cast)

    def assign_blocks(self, names: Sequence[str]) -> None:
        """Assign each op to the outermost block that was running, given the names of all blocks."""
        index = {name: position for position, name in enumerate(names)}
        self.blocks = [next((index[name] for name in op.site if name in index), UNATTRIBUTED) for op in self.ops]

    def op_runs(self) -> list[OpRun]:
        """Return the step as runs of ops, in the order of time."""
        runs: list[OpRun] = []
        live_bytes = self.recording.live_bytes()
        places = enumerate(zip(self.owners, self.blocks, self.within, strict=True))
        for op, (index, (owner, block, within)), live in zip(self.ops, places, live_bytes, strict=True):
            is_before = op.phase == "backward" and index < self.first_casts.get(owner, 0)
            run = OpRun(op.phase, owner, block, within, is_before, live)
            if runs and runs[-1][:-1] == run[:-1]:
                run = run._replace(live_bytes=max(live, runs.pop().live_bytes))
            runs.append(run)
        return runs

    def kernels(self, profile_blocks: Sequence[int] = ()) -> tuple[Kernel, ...]:
        """Return the step's kernels without views, which cost nothing; equal ones of an operator and phase as one.

        Kernels of a block's forward that belong to no operator are counted separately for each block.

        Args:
            profile_blocks: Index in the profile of each block, with ``UNATTRIBUTED`` at the end; empty for no blocks.
        """
        calls: Counter[tuple[object, ...]] = Counter()
        nodes: Counter[tuple[object, ...]] = Counter()
        first_ops: dict[tuple[object, ...], tuple[Op, int, int]] = {}
        last_node: tuple[str, int] = ("", -1)
        for op, owner, block in zip(self.ops, self.owners, self.blocks, strict=True):
            if op.is_view:
                continue
            is_unowned = owner == UNATTRIBUTED and op.phase == "forward"
            kernel_block = profile_blocks[block] if profile_blocks and is_unowned else UNATTRIBUTED
            key = (op.func, op.args, op.kwargs, owner, op.phase, kernel_block)
            first_ops.setdefault(key, (op, owner, kernel_block))
            calls[key] += 1
            nodes[key] += last_node != (op.phase, op.node)
            last_node = (op.phase, op.node)
        return tuple(
            Kernel(op.func, op.args, op.kwargs, owner, op.phase, calls[key], nodes[key], block)
            for key, (op, owner, block) in first_ops.items()
        )


def _owners_of_ops(ops: Sequence[Op], scopes: Sequence[OwnerScope]) -> list[int]:
    """Return the index of the operator that each op belongs to, or ``UNATTRIBUTED``.

    An op is the work of the innermost operator that was running. An operator that encloses others owns only the ops
    that read its parameters, and their backward.
    """
    leaves = {scope.name: index for index, scope in enumerate(scopes) if not scope.encloses_operators}
    readers = {p: index for index, scope in enumerate(scopes) if scope.encloses_operators for p in scope.parameters}
    owner_of_node: dict[int, int] = {}
    owners = []
    for op in ops:
        owner = next((leaves[name] for name in reversed(op.site) if name in leaves), UNATTRIBUTED)
        if owner == UNATTRIBUTED and op.phase == "forward":
            owner = next((readers[p] for p in op.used_parameters if p in readers), UNATTRIBUTED)
            if owner != UNATTRIBUTED:
                owner_of_node[op.node] = owner
        elif owner == UNATTRIBUTED:
            owner = owner_of_node.get(op.node, UNATTRIBUTED)
        owners.append(owner)
    return owners


def fit_moments(op_runs: Mapping[int, Sequence[OpRun]]) -> tuple[Moment, ...]:
    """Return the runs of a step as moments, whose live bytes are lines through one or two traced batch sizes."""
    smallest, largest = min(op_runs), max(op_runs)
    runs = op_runs[largest]
    if [run[:-1] for run in op_runs[smallest]] == [run[:-1] for run in runs]:
        pairs = zip(op_runs[smallest], runs, strict=True)
        lines = [fit_line({smallest: low.live_bytes, largest: high.live_bytes}) for low, high in pairs]
    else:  # The control flow depends on the batch size.
        lines = [LinearInBatch(per_sample=run.live_bytes / largest) for run in runs]
    return tuple(
        Moment(
            phase=run.phase, operator=run.operator, live=line, within=run.within, before_gradients=run.before_gradients
        )
        for run, line in zip(runs, lines, strict=True)
    )


def fit_line(values: Mapping[int, float]) -> LinearInBatch:
    """Return the line through values at two batch sizes, or a constant if there is one value."""
    (low, first), (high, second) = min(values.items()), max(values.items())
    slope = (second - first) / (high - low) if high > low else 0.0
    return LinearInBatch(fixed=first - slope * low, per_sample=slope)

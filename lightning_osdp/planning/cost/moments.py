"""When things happen in a training step: its moments, and when each operator runs, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NOT_RECOMPUTED = -1
"""Index of no block: of moments outside recomputed forwards, and of operators outside blocks."""


class LineArray(NamedTuple):
    """Many ``LinearInBatch`` as arrays."""

    fixed: Floats
    per_sample: Floats

    def value_at(self, batch_size: int) -> Floats:
        """Return their values, which may be negative, unlike those of ``LinearInBatch.value_at``."""
        return np.asarray(self.fixed + self.per_sample * batch_size, dtype=np.float64)

    @classmethod
    def from_lines(cls, lines: Sequence[LinearInBatch]) -> LineArray:
        """Return the array of ``lines``."""
        pairs = np.array([(line.fixed, line.per_sample) for line in lines], dtype=np.float64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1])


class Intervals(NamedTuple):
    """Intervals of moments: the first, and one past the last."""

    start: Ints
    stop: Ints

    def select(self, indices: Ints | slice | Flags) -> Intervals:
        """Return some of the intervals."""
        return Intervals(self.start[indices], self.stop[indices])

    def changes(self, amounts: Floats, count: int) -> Floats:
        """Return by how much the sum of amounts held in these intervals changes at each of ``count`` moments."""
        changes = np.bincount(self.start, amounts, count + 1) - np.bincount(self.stop, amounts, count + 1)
        return np.asarray(changes[:count], dtype=np.float64)


@dataclass(frozen=True)
class StepMoments:
    """The moments of the model, with those of each block's recomputed forward before the block's backward.

    Attributes:
        source: Index into the model's moments.
        recomputed_block: Block whose recomputed forward a moment belongs to, else ``NOT_RECOMPUTED``.
        position: For each moment of the model, its index here.
        recompute_start: For each block, where its recomputed forward begins; -1 if it can't be recomputed.
    """

    source: Ints
    recomputed_block: Ints
    position: Ints
    recompute_start: Ints

    @classmethod
    def from_model(cls, model: ModelProfile) -> StepMoments:
        """Return the moments of ``model``."""
        block_at = {block.backward[0]: i for i, block in enumerate(model.blocks) if not block.recompute_blocker}
        pairs: list[tuple[int, int]] = []  # (source, recomputed block)
        position: list[int] = []
        recompute_start = [-1] * len(model.blocks)
        for moment in range(len(model.moments)):
            if moment in block_at:
                index = block_at[moment]
                first, last = model.blocks[index].forward
                recompute_start[index] = len(pairs)
                pairs += [(source, index) for source in range(first, last + 1)]
            position.append(len(pairs))
            pairs.append((moment, NOT_RECOMPUTED))
        source, block = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(source, block, np.array(position, dtype=np.int64), np.array(recompute_start, dtype=np.int64))

    def to_intervals(self, ranges: Sequence[tuple[int, int]]) -> Intervals:
        """Return ranges of the model's moments, each from its first to its last, as intervals of these moments."""
        if not len(self.position):
            return Intervals(*np.zeros((2, len(ranges)), dtype=np.int64))
        first, last = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        return Intervals(self.position[first], self.position[last] + 1)


@dataclass(frozen=True)
class OperatorRuns:
    """When each operator runs. Operators that were never traced count as running all the time.

    Attributes:
        forward: First forward; all of its module's run if that encloses other operators.
        recompute: Forward in the recomputation of its block; empty if that can't be recomputed.
        backward: Backward; the last moment if it has none, so that what it holds stays until the end.
        unsharded_backward: The same, from where the backward of its module begins.
        with_gradients: The same, from where there are gradients in the parameters' own type.
        quarters: When the second, third and last quarter of the operators that share its unit begin to have gradients,
            (3, operators); the start of ``with_gradients`` for other operators.
        has_backward: Whether it has a backward.
        block: Index of its block; ``NOT_RECOMPUTED`` if it has none.
    """

    forward: Intervals
    recompute: Intervals
    backward: Intervals
    unsharded_backward: Intervals
    with_gradients: Intervals
    quarters: Ints
    has_backward: Flags
    block: Ints

    def are_recomputed(self, recomputed_blocks: Flags) -> Flags:
        """Return whether each operator runs a second forward, given whether each block is recomputed."""
        flags: Flags = np.append(recomputed_blocks, False)[self.block] & (self.recompute.stop > 0)
        return flags

    @classmethod
    def from_model(cls, model: ModelProfile, moments: StepMoments) -> OperatorRuns:
        """Return the runs of each operator of ``model``."""
        traced: dict[tuple[int, str], list[int]] = {}
        enclosed: dict[tuple[int, str], list[int]] = {}
        graded: dict[tuple[int, int], int] = {}
        for index, moment in enumerate(model.moments):
            traced.setdefault((moment.operator, moment.phase), []).append(index)
            if moment.phase == "backward" and not moment.before_gradients:
                for later in range(moment.later_quarters, 4):
                    graded.setdefault((moment.operator, later), index)
            for operator in {moment.operator, *moment.within}:
                enclosed.setdefault((operator, moment.phase), []).append(index)
        count, last = len(model.operators), len(model.moments) - 1
        forward_moments = [enclosed.get((operator, "forward"), [0, last]) for operator in range(count)]
        backward_moments = [traced.get((operator, "backward"), [last, last]) for operator in range(count)]
        quarters = [
            [(first := graded.get((i, later), m[0]), first) for i, m in enumerate(backward_moments)]
            for later in (2, 1, 0)
        ]
        begins = [enclosed.get((operator, "backward"), [last])[0] for operator in range(count)]
        forward = moments.to_intervals([(indices[0], indices[-1]) for indices in forward_moments])
        block_of = np.full(count, NOT_RECOMPUTED, dtype=np.int64)
        for index, block in enumerate(model.blocks):
            block_of[list(block.operators)] = index
        recompute_start = np.append(moments.recompute_start, NOT_RECOMPUTED)[block_of]
        block_start = np.array([*(block.forward[0] for block in model.blocks), 0], dtype=np.int64)[block_of]
        start = recompute_start + np.array([indices[0] for indices in forward_moments], dtype=np.int64) - block_start
        stop = start + forward.stop - forward.start
        is_recomputable = recompute_start != NOT_RECOMPUTED
        return cls(
            forward,
            Intervals(np.where(is_recomputable, start, 0), np.where(is_recomputable, stop, 0)),
            moments.to_intervals([(indices[0], indices[-1]) for indices in backward_moments]),
            moments.to_intervals([(min(b, m[0]), m[-1]) for b, m in zip(begins, backward_moments, strict=True)]),
            moments.to_intervals([(graded.get((i, 3), m[0]), m[-1]) for i, m in enumerate(backward_moments)]),
            np.array([moments.to_intervals(ranges).start for ranges in quarters], dtype=np.int64),
            np.array([(operator, "backward") in traced for operator in range(count)], dtype=bool),
            block_of,
        )

    def select(self, operators: Ints | slice) -> OperatorRuns:
        """Return the runs of some operators."""
        intervals = (self.forward, self.recompute, self.backward, self.unsharded_backward, self.with_gradients)
        forward, recompute, backward, unsharded_backward, with_gradients = (
            each.select(operators) for each in intervals
        )
        rest = self.quarters[:, operators], self.has_backward[operators], self.block[operators]
        return OperatorRuns(forward, recompute, backward, unsharded_backward, with_gradients, *rest)


class Held(NamedTuple):
    """Bytes of one category that are held during intervals."""

    category: str
    intervals: Intervals
    amounts: Floats

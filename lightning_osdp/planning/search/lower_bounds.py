"""Lower bounds of the step time for each way to recompute blocks, without searching.

At any one moment of the step the memory constraint is a sum over the operators,

    sum_i bytes(i, x_i, moment) + other(moment) <= limit,

so for each price of memory, the cheapest option of each operator with its bytes paid for gives a lower bound
(Lagrangian relaxation). The bytes of an operator depend only on its phase (before, in or after its backward), so all
operators of a group are bounded at once, and so are all ways to recompute blocks: they differ in the number of a
group's operators that lie in recomputed blocks, in the activations, and in the time of recomputing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.moments import Floats, Ints, LineArray
from lightning_osdp.planning.search.search_space import (
    AFTER_BACKWARD,
    BEFORE_BACKWARD,
    IN_BACKWARD,
    NUM_PHASES,
    OptionTimes,
    SearchSpace,
)
from lightning_osdp.planning.solver.relaxation import compute_hulls

MAX_MOMENTS = 10
"""Moments that a bound considers."""

PRICE_TOLERANCE = 0.02
"""Relative: prices closer together than this give nearly the same bound."""


class _MomentCounts(NamedTuple):
    """What the memory constraint counts at some moments, for each way to recompute blocks.

    Attributes:
        operator_counts: (moments, ways, phases x groups x recomputed).
        other_bytes: bytes that belong to no operator, by moment and way: lines over the batch size.
    """

    operator_counts: Floats
    other_bytes: LineArray


class LagrangianBounds:
    """Lower bounds for all batch sizes of one problem."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._moment_counts = _count_at_moments(space, _select_moments(space))
        sizes = np.array([len(group.choices) for group in space.option_groups], dtype=np.int64)
        index = np.arange(sizes.max(initial=1))
        self._is_option = index < sizes[:, None]
        self._option_index = np.where(self._is_option, space.first_option[:, None] + index, 0)

    def lower_bounds_s(self, times: OptionTimes, batch_size: int, accumulation: int) -> Floats:
        """Return the seconds of a step that no plan undercuts, for each of the space's ways to recompute, (ways,).

        They are infinite where nothing fits.
        """
        space = self._space
        cost, resident = times.total[:, self._option_index], self._resident_bytes(batch_size, accumulation)
        prices = self._candidate_prices(cost, resident)
        priced = np.where(self._is_option, cost, np.inf) + prices[:, None, None, None, None] * resident
        sums = self._sum_at_moments(priced)
        limit = space.problem.memory_limit_bytes
        available = limit - self._other_bytes(batch_size)
        bound = (sums - prices * available[..., None]).max(axis=(0, 2))
        bound[self.least_bytes(batch_size, accumulation) > limit + 1.0] = np.inf  # a byte for rounding
        recompute_s = space.recompute_masks @ space.recompute_s(batch_size, accumulation)
        return np.asarray(bound + recompute_s + space.unattributed_s(batch_size, accumulation), dtype=np.float64)

    def least_bytes(self, batch_size: int, accumulation: int) -> Floats:
        """Return the peak that no plan undercuts, for each of the space's ways to recompute, (ways,)."""
        resident = np.where(self._is_option, self._resident_bytes(batch_size, accumulation), np.inf)
        least = self._sum_at_moments(resident[None])[..., 0] + self._other_bytes(batch_size)
        return np.asarray(least.max(axis=0, initial=0.0))

    def _resident_bytes(self, batch_size: int, accumulation: int) -> Floats:
        """Return the bytes of each group's options, (phases, 2, groups, options)."""
        return self._space.resident_bytes(batch_size, accumulation)[..., self._option_index]

    def _other_bytes(self, batch_size: int) -> Floats:
        """Return the bytes that belong to no operator, (moments, ways)."""
        return np.maximum(0.0, self._moment_counts.other_bytes.value_at(batch_size))

    def _sum_at_moments(self, values: Floats) -> Floats:
        """Return the sum of all operators' least values at each moment, (moments, ways, rows of ``values``)."""
        least = values.min(axis=-1).transpose(0, 1, 3, 2).reshape(len(values), -1)
        return np.asarray(self._moment_counts.operator_counts @ least.T)

    def _candidate_prices(self, cost: Floats, resident_bytes: Floats) -> Floats:
        """Return the slopes of the groups' hulls: between two of them a bound is linear in the price."""
        if not len(self._is_option):
            return np.zeros(1)
        shape = (NUM_PHASES, 2, *self._is_option.shape)
        costs = np.broadcast_to(cost, shape).reshape(-1, shape[-1])
        weights = np.broadcast_to(np.rint(resident_bytes).astype(np.int64), shape).reshape(-1, shape[-1])
        valid = np.broadcast_to(self._is_option, shape).reshape(-1, shape[-1])
        slopes = compute_hulls(costs, weights, valid).slope
        slopes = slopes[slopes > 0]
        _, distinct = np.unique(np.rint(np.log(slopes) / PRICE_TOLERANCE), return_index=True)
        return np.append(0.0, slopes[distinct])


def _select_moments(space: SearchSpace) -> Ints:
    """Return the first and last backward of each group, those of large transients first, after the backward's ends."""
    backward = space.timeline.backward.start
    if not len(backward):
        return np.zeros(0, dtype=np.int64)
    transient = space.transient_bytes(0, 1)
    largest = [-float(transient[group.options].max(initial=0.0)) for group in space.option_groups]
    moments = [int(backward.min()), int(backward.max())]
    for group in np.argsort(largest, kind="stable").tolist():
        members = backward[space.group_of == group]
        moments += [int(members.min()), int(members.max())]
    distinct = [moment for moment in dict.fromkeys(moments) if moment < len(space.timeline.live.fixed)]
    return np.array(distinct[:MAX_MOMENTS], dtype=np.int64)


def _count_at_moments(space: SearchSpace, moments: Ints) -> _MomentCounts:
    timeline, blocks, groups = space.timeline, len(space.problem.model.blocks), len(space.option_groups)
    masks = space.recompute_masks.astype(np.float64)
    counts = np.zeros((len(moments), len(masks), NUM_PHASES, groups, 2))
    fixed, slope = np.zeros((2, len(moments), len(masks)))
    fixed_bytes = space.problem.overhead_bytes + space.problem.model.buffer_bytes + timeline.heap_headroom.fixed
    for index, moment in enumerate(moments.tolist()):
        start, stop = timeline.backward
        phase = np.where(start > moment, BEFORE_BACKWARD, np.where(stop > moment, IN_BACKWARD, AFTER_BACKWARD))
        by_block = np.zeros((blocks + 1, NUM_PHASES * groups))
        np.add.at(by_block, (timeline.block_of, phase * groups + space.group_of), 1.0)
        recomputed = masks @ by_block[:-1]
        counts[index, ..., 0] = (by_block.sum(axis=0) - recomputed).reshape(counts.shape[1:-1])
        counts[index, ..., 1] = recomputed.reshape(counts.shape[1:-1])
        released = (timeline.released_intervals.start <= moment) & (moment < timeline.released_intervals.stop)
        saves, live, headroom = timeline.recompute_saves, timeline.live, timeline.heap_headroom
        fixed[index] = fixed_bytes + live.fixed[moment] - masks @ (released * saves.fixed)
        slope[index] = headroom.per_sample + live.per_sample[moment] - masks @ (released * saves.per_sample)
    return _MomentCounts(counts.reshape(len(moments), len(masks), -1), LineArray(fixed, slope))

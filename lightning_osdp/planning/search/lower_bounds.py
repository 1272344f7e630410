"""A lower bound of the step time for each way to recompute blocks, without searching; and the plans of least memory.

At any one moment of the step the memory constraint is a sum over the operators,

    sum_i bytes(i, x_i, moment) + other(moment) <= limit,

so for each price of memory the cheapest row of each operator, bytes paid for, gives a lower bound (Lagrange's). What a
moment counts of an operator depends only on whether its backward has begun, is under way, or is still to come, so all
operators of a menu are bounded at once, and so are all ways to recompute blocks: they differ in how many operators of
a menu lie in recomputed blocks, in the activations, and in the time that recomputing takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.footprint import COLUMN
from lightning_osdp.planning.cost.moments import Floats, Ints, LineArray
from lightning_osdp.planning.search.search_space import OptionTimes, SearchSpace
from lightning_osdp.planning.solver.knapsack import Option, solve
from lightning_osdp.planning.solver.relaxation import EXCLUDED_COST, PADDING_BYTES, compute_hulls

MAX_MOMENTS = 10
"""Moments that the bound looks at."""

PRICE_TOLERANCE = 0.02
"""Relative: prices closer together than this give next to the same bound."""

BEFORE_BACKWARD, IN_BACKWARD, AFTER_BACKWARD = range(3)
"""What an operator is at a moment, by its backward."""


def resident_bytes_by_phase(space: SearchSpace, batch_size: int, accumulation: int) -> Floats:
    """Bytes of each row, (BEFORE RUNNING AFTER, rows)."""
    column = {name: space.footprints[:, index] for name, index in COLUMN.items()}
    whole, pieces = column["replicated_gradients"], column["sharded_gradients"]
    early = whole + pieces if accumulation > 1 else 0.0
    before = column["states"] + column["unsharded_between_passes"] + early
    running = (
        column["states"] + column["unsharded_between_passes"] + whole + (whole + pieces if accumulation > 1 else 0.0)
    )
    running = (
        running + column["unsharded_while_running"] + column["transient"] + column["backward_per_sample"] * batch_size
    )
    return np.array([before, running, column["states"] + whole + pieces], dtype=np.float64)


def transient_bytes(space: SearchSpace, batch_size: int, accumulation: int) -> Floats:
    """Bytes of each row that are there only while the operator itself runs."""
    column = {name: space.footprints[:, index] for name, index in COLUMN.items()}
    # What its neighbours have under way beside it counts as its own: they are often alike.
    beside = column["prefetched_parameters"] + column["inflight_gradient"]
    backward = (
        column["unsharded_while_running"] + column["transient"] + beside + column["backward_per_sample"] * batch_size
    )
    if accumulation > 1:  # the new gradient stands beside the accumulated one until it is added
        backward = backward + column["replicated_gradients"]
    forward = (
        column["unsharded_while_running"] + column["prefetched_parameters"] + column["forward_per_sample"] * batch_size
    )
    return np.asarray(np.maximum(forward, backward))


class _MomentCounts(NamedTuple):
    """What the moments count, for each way to recompute blocks.

    Attributes:
        operator_counts: (moments, vectors, state x menu x recomputed).
        other_bytes: bytes that belong to no operator, by moment and vector: lines over the batch size.
    """

    operator_counts: Floats
    other_bytes: LineArray


class LagrangianBounds:
    """Bounds for all batch sizes of one problem."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._moment_counts = _count_at_moments(space, _select_moments(space))
        sizes = [menu.options.stop - menu.options.start for menu in space.option_groups]
        self._is_option = np.arange(max(sizes, default=1)) < np.array(sizes)[:, None]
        self._option_index = np.where(
            self._is_option, space.first_option[:, None] + np.arange(max(sizes, default=1)), 0
        )

    def lower_bounds_s(self, times: OptionTimes, batch_size: int, accumulation: int) -> Floats:
        """Seconds of an optimizer step, for each of the space's vectors: no plan takes less."""
        space = self._space
        cost = times.total[:, self._option_index]
        byte = resident_bytes_by_phase(space, batch_size, accumulation)[:, self._option_index]
        prices = self._candidate_prices(cost, byte)
        paid = np.where(self._is_option, cost, EXCLUDED_COST) + prices[:, None, None, None, None] * byte[:, None]
        least = paid.min(axis=-1).transpose(0, 1, 3, 2).reshape(len(prices), -1)
        sums = self._moment_counts.operator_counts @ least.T
        free = space.problem.memory_limit_bytes - np.maximum(0.0, self._moment_counts.other_bytes.value_at(batch_size))
        bound = (sums - prices * free[..., None]).max(axis=(0, 2))
        again = space.recompute_masks @ space.recompute_s(batch_size, accumulation)
        return np.asarray(bound + again + space.unattributed_s(batch_size, accumulation), dtype=np.float64)

    def _candidate_prices(self, cost: Floats, resident_bytes: Floats) -> Floats:
        """The slopes of the menus' hulls: between two of them a bound is linear in the price."""
        states, menus = len(resident_bytes), len(self._is_option)
        shape = (states, 2, *self._is_option.shape)
        all_cost = np.broadcast_to(cost[None], shape).reshape(-1, shape[-1])
        whole = np.where(self._is_option, np.rint(resident_bytes), PADDING_BYTES).astype(np.int64)
        all_byte = np.broadcast_to(whole[:, None], shape).reshape(-1, shape[-1])
        slopes = (
            compute_hulls(all_cost, all_byte, np.tile(self._is_option, (states * 2, 1))).slope if menus else np.zeros(0)
        )
        steps = np.rint(np.log(slopes[slopes > 0]) / PRICE_TOLERANCE)
        _, at = np.unique(steps, return_index=True)
        return np.append(0.0, slopes[slopes > 0][at])


def _select_moments(space: SearchSpace) -> Ints:
    """Where operators of large transients run backward, first and last of each menu, and both ends of the backward."""
    backward = space.timeline.backward.start
    transient = transient_bytes(space, 0, 1)
    largest = [-float(transient[menu.options].max(initial=0.0)) for menu in space.option_groups]
    found: list[int] = []
    for menu in np.argsort(largest, kind="stable").tolist():
        members = backward[space.group_of == menu]
        found += [int(members.min()), int(members.max())]
    ends = [int(backward.min(initial=0)), int(backward.max(initial=0))] if len(backward) else []
    usual = [moment for moment in dict.fromkeys([*ends, *found]) if moment < len(space.timeline.live.fixed)]
    return np.array(usual[:MAX_MOMENTS], dtype=np.int64)


def _count_at_moments(space: SearchSpace, moments: Ints) -> _MomentCounts:
    timeline, blocks = space.timeline, len(space.problem.model.blocks)
    menus, flags = len(space.option_groups), space.recompute_masks.astype(np.float64)
    counted = np.zeros((len(moments), len(flags), 3, menus, 2))
    fixed, slope = np.zeros((2, len(moments), len(flags)))
    fixed_bytes = space.problem.overhead_bytes + space.problem.model.buffer_bytes + timeline.heap_headroom.fixed
    for at, moment in enumerate(moments.tolist()):
        start, stop = timeline.backward
        state = np.where(start > moment, BEFORE_BACKWARD, np.where(stop > moment, IN_BACKWARD, AFTER_BACKWARD))
        by_block = np.zeros((blocks + 1, 3 * menus))
        np.add.at(by_block, (timeline.block_of, state * menus + space.group_of), 1.0)
        again = flags @ by_block[:-1]
        counted[at, ..., 0] = (by_block.sum(axis=0) - again).reshape(len(flags), 3, menus)
        counted[at, ..., 1] = again.reshape(len(flags), 3, menus)
        freed = (timeline.released_intervals.start <= moment) & (moment < timeline.released_intervals.stop)
        fixed[at] = fixed_bytes + timeline.live.fixed[moment] - flags @ (freed * timeline.recompute_saves.fixed)
        slope[at] = (
            timeline.heap_headroom.per_sample
            + timeline.live.per_sample[moment]
            - flags @ (freed * timeline.recompute_saves.per_sample)
        )
    return _MomentCounts(counted.reshape(len(moments), len(flags), -1), LineArray(fixed, slope))


def min_memory_options(space: SearchSpace) -> Iterator[Ints]:
    """Plans of least memory: everything sharded as it is, everything in its finest slices, and what is needed at least
    if the largest transient is on top of all states.

    They differ where one operator dominates: gathering it whole costs more than sharding its states saves.
    """
    resident = np.rint(
        resident_bytes_by_phase(space, 0, 1)[AFTER_BACKWARD] + space.footprints[:, COLUMN["unsharded_between_passes"]]
    ).astype(np.int64)
    transient = np.rint(transient_bytes(space, 0, 1)).astype(np.int64)
    counts = np.bincount(space.group_of, minlength=len(space.option_groups)).tolist()
    menus = [
        [
            Option(0.0, *pair)
            for pair in zip(resident[menu.options].tolist(), transient[menu.options].tolist(), strict=True)
        ]
        for menu in space.option_groups
    ]
    try:
        solution = solve(menus, 0, counts=counts)
    except InfeasibleError as error:
        solution = solve(menus, error.needed_bytes, counts=counts)
    rows = np.zeros(len(space.group_of), dtype=np.int64)
    rows[np.argsort(space.group_of, kind="stable")] = solution.choices
    yield rows + space.first_option[space.group_of]
    for first, second in ((resident, transient), (transient, resident)):
        least = [int(np.lexsort((second[menu.options], first[menu.options]))[0]) for menu in space.option_groups]
        yield (np.array(least, dtype=np.int64) + space.first_option)[space.group_of]

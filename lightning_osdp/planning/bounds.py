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
from lightning_osdp.planning.relaxation import NONE_BYTES, NONE_COST, hulls
from lightning_osdp.planning.search import Option, solve
from lightning_osdp.planning.space import Space, Times
from lightning_osdp.planning.timeline import COLUMN, Floats, Ints, Lines

MOST_MOMENTS = 10
"""Moments that the bound looks at."""

PRICE_STEP = 0.02
"""Relative: prices closer together than this give next to the same bound."""

BEFORE, RUNNING, AFTER = range(3)
"""What an operator is at a moment, by its backward."""


def weights(space: Space, batch_size: int, accumulation: int) -> Floats:
    """Bytes of each row, (BEFORE RUNNING AFTER, rows)."""
    column = {name: space.footprints[:, index] for name, index in COLUMN.items()}
    whole, pieces = column["replicated_gradients"], column["sharded_gradients"]
    early = whole + pieces if accumulation > 1 else 0.0
    before = column["states"] + column["kept"] + early
    running = column["states"] + column["kept"] + whole + (whole + pieces if accumulation > 1 else 0.0)
    running = running + column["gathered"] + column["transient"] + column["backward_per_sample"] * batch_size
    return np.array([before, running, column["states"] + whole + pieces], dtype=np.float64)


def own_run(space: Space, batch_size: int, accumulation: int) -> Floats:
    """Bytes of each row that are there only while the operator itself runs."""
    column = {name: space.footprints[:, index] for name, index in COLUMN.items()}
    # What its neighbours have under way beside it counts as its own: they are often alike.
    beside = column["ahead"] + column["pending"]
    backward = column["gathered"] + column["transient"] + beside + column["backward_per_sample"] * batch_size
    if accumulation > 1:  # the new gradient stands beside the accumulated one until it is added
        backward = backward + column["replicated_gradients"]
    forward = column["gathered"] + column["ahead"] + column["forward_per_sample"] * batch_size
    return np.asarray(np.maximum(forward, backward))


class _Counts(NamedTuple):
    """What the moments count, for each way to recompute blocks.

    Attributes:
        operators: (moments, vectors, state x menu x recomputed).
        other: bytes that belong to no operator, by moment and vector: lines over the batch size.
    """

    operators: Floats
    other: Lines


class Bounds:
    """Bounds for all batch sizes of one problem."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._counts = _counts(space, _moments(space))
        sizes = [menu.rows.stop - menu.rows.start for menu in space.menus]
        self._valid = np.arange(max(sizes, default=1)) < np.array(sizes)[:, None]
        self._index = np.where(self._valid, space.first_row[:, None] + np.arange(max(sizes, default=1)), 0)

    def lower_s(self, times: Times, batch_size: int, accumulation: int) -> Floats:
        """Seconds of an optimizer step, for each of the space's vectors: no plan takes less."""
        space = self._space
        cost = times.total[:, self._index]
        byte = weights(space, batch_size, accumulation)[:, self._index]
        prices = self._prices(cost, byte)
        paid = np.where(self._valid, cost, NONE_COST) + prices[:, None, None, None, None] * byte[:, None]
        least = paid.min(axis=-1).transpose(0, 1, 3, 2).reshape(len(prices), -1)
        sums = self._counts.operators @ least.T
        free = space.problem.memory_limit_bytes - np.maximum(0.0, self._counts.other.at(batch_size))
        bound = (sums - prices * free[..., None]).max(axis=(0, 2))
        again = space.every_recomputed @ space.block_s(batch_size, accumulation)
        return np.asarray(bound + again + space.outside_s(batch_size, accumulation), dtype=np.float64)

    def _prices(self, cost: Floats, byte: Floats) -> Floats:
        """The slopes of the menus' hulls: between two of them a bound is linear in the price."""
        states, menus = len(byte), len(self._valid)
        shape = (states, 2, *self._valid.shape)
        all_cost = np.broadcast_to(cost[None], shape).reshape(-1, shape[-1])
        whole = np.where(self._valid, np.rint(byte), NONE_BYTES).astype(np.int64)
        all_byte = np.broadcast_to(whole[:, None], shape).reshape(-1, shape[-1])
        slopes = hulls(all_cost, all_byte, np.tile(self._valid, (states * 2, 1))).slope if menus else np.zeros(0)
        steps = np.rint(np.log(slopes[slopes > 0]) / PRICE_STEP)
        _, at = np.unique(steps, return_index=True)
        return np.append(0.0, slopes[slopes > 0][at])


def _moments(space: Space) -> Ints:
    """Where operators of large transients run backward, first and last of each menu, and both ends of the backward."""
    backward = space.timeline.backward.start
    transient = own_run(space, 0, 1)
    largest = [-float(transient[menu.rows].max(initial=0.0)) for menu in space.menus]
    found: list[int] = []
    for menu in np.argsort(largest, kind="stable").tolist():
        members = backward[space.menu_of == menu]
        found += [int(members.min()), int(members.max())]
    ends = [int(backward.min(initial=0)), int(backward.max(initial=0))] if len(backward) else []
    usual = [moment for moment in dict.fromkeys([*ends, *found]) if moment < len(space.timeline.live.fixed)]
    return np.array(usual[:MOST_MOMENTS], dtype=np.int64)


def _counts(space: Space, moments: Ints) -> _Counts:
    timeline, blocks = space.timeline, len(space.problem.model.blocks)
    menus, flags = len(space.menus), space.every_recomputed.astype(np.float64)
    counted = np.zeros((len(moments), len(flags), 3, menus, 2))
    fixed, slope = np.zeros((2, len(moments), len(flags)))
    fixed_bytes = space.problem.overhead_bytes + space.problem.model.buffer_bytes + timeline.spare.fixed
    for at, moment in enumerate(moments.tolist()):
        start, stop = timeline.backward
        state = np.where(start > moment, BEFORE, np.where(stop > moment, RUNNING, AFTER))
        by_block = np.zeros((blocks + 1, 3 * menus))
        np.add.at(by_block, (timeline.block_of, state * menus + space.menu_of), 1.0)
        again = flags @ by_block[:-1]
        counted[at, ..., 0] = (by_block.sum(axis=0) - again).reshape(len(flags), 3, menus)
        counted[at, ..., 1] = again.reshape(len(flags), 3, menus)
        freed = (timeline.released.start <= moment) & (moment < timeline.released.stop)
        fixed[at] = fixed_bytes + timeline.live.fixed[moment] - flags @ (freed * timeline.saved.fixed)
        slope[at] = (
            timeline.spare.per_sample + timeline.live.per_sample[moment] - flags @ (freed * timeline.saved.per_sample)
        )
    return _Counts(counted.reshape(len(moments), len(flags), -1), Lines(fixed, slope))


def smallest_rows(space: Space) -> Iterator[Ints]:
    """Plans of least memory: everything sharded as it is, everything in its finest slices, and what is needed at least
    if the largest transient is on top of all states.

    They differ where one operator dominates: gathering it whole costs more than sharding its states saves.
    """
    resident = np.rint(weights(space, 0, 1)[AFTER] + space.footprints[:, COLUMN["kept"]]).astype(np.int64)
    transient = np.rint(own_run(space, 0, 1)).astype(np.int64)
    counts = np.bincount(space.menu_of, minlength=len(space.menus)).tolist()
    menus = [
        [Option(0.0, *pair) for pair in zip(resident[menu.rows].tolist(), transient[menu.rows].tolist(), strict=True)]
        for menu in space.menus
    ]
    try:
        solution = solve(menus, 0, counts=counts)
    except InfeasibleError as error:
        solution = solve(menus, error.needed_bytes, counts=counts)
    rows = np.zeros(len(space.menu_of), dtype=np.int64)
    rows[np.argsort(space.menu_of, kind="stable")] = solution.choices
    yield rows + space.first_row[space.menu_of]
    for first, second in ((resident, transient), (transient, resident)):
        least = [int(np.lexsort((second[menu.rows], first[menu.rows]))[0]) for menu in space.menus]
        yield (np.array(least, dtype=np.int64) + space.first_row)[space.menu_of]

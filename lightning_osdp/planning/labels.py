"""The fastest plans that hold no more than there is at any moment of the step, where operators are few.

Operators that are alike differ in when they run, so which of them shard decides what is held at moments that lie apart.
Here operators are decided one by one, and what was decided so far is a label (the word of the shortest-path problem
with resources): its seconds, and its bytes at every moment. A label is dropped if the least of all others exceeds what
there is, or if no plan that begins so can be faster than a known one: by Lagrange's bound, with a price of memory for
each moment, found by subgradient steps (Held, Wolfe and Crowder, "Validation of subgradient optimization", 1974).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_osdp.planning.space import Space, Times
from lightning_osdp.planning.timeline import Flags, Floats, Ints

STEPS = 60
"""Subgradient steps: the bound hardly moves after that."""

EFFORT, MOST_LABELS = 10_000_000, 4096
"""Numbers that are computed at most, all rows of all labels at all moments; and labels that are kept at most."""

FEWEST_LABELS = 16
"""With fewer it is not worth beginning."""


@dataclass(frozen=True)
class Rows:
    """What may be chosen, operator by operator.

    Attributes:
        row: of the space.
        slices: each operator's rows.
        seconds: of each row.
        held: bytes of each row at each moment, (rows, moments).
        free: bytes at each moment, (moments,).
        labels: so many are followed at most.
    """

    row: Ints
    slices: tuple[slice, ...]
    seconds: Floats
    held: Floats
    free: Floats
    labels: int

    @classmethod
    def of(cls, space: Space, times: Times, batch_size: int, accumulation: int, recomputed: Flags) -> Rows | None:
        """All rows of a space; None if there are too many of them, or too many moments.

        Args:
            space: what may be decided.
            times: its times at this batch size.
            batch_size: samples per micro-batch.
            accumulation: micro-batches per optimizer step.
            recomputed: a flag for each block.
        """
        menus = [space.menus[menu].rows for menu in space.menu_of]
        sizes = [menu.stop - menu.start for menu in menus]
        rest = space.timeline.rest(batch_size, recomputed)
        labels = min(MOST_LABELS, EFFORT // max(1, sum(sizes) * len(rest)))
        if labels < FEWEST_LABELS:
            return None
        operators, stops = np.repeat(np.arange(len(menus)), sizes), np.cumsum(sizes).tolist()
        row = np.concatenate([np.arange(menu.start, menu.stop) for menu in menus] or [np.zeros(0, dtype=np.int64)])
        return cls(
            row=row,
            slices=tuple(slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)),
            seconds=times.total[space.in_recomputed(recomputed)[operators], row],
            held=space.timeline.added(operators, space.footprints[row], batch_size, accumulation, recomputed),
            free=space.problem.memory_limit_bytes + 1.0 - rest,  # a byte for rounding
            labels=labels,
        )


def plans(rows: Rows, under_s: float) -> Iterator[Ints]:
    """Plans that take less than ``under_s``, the fastest first: one row of the space for each operator.

    None is missed unless more partial plans than ``rows.labels`` are worth following; then those of the least bounds
    are. What operators do not hold one by one is not counted (``Timeline.added``): some plans may not fit.
    """
    prices, bound_s = _prices(rows, under_s)
    if bound_s >= under_s:
        return
    paid = rows.seconds + rows.held @ prices
    order = np.argsort([-float(np.ptp(paid[menu])) for menu in rows.slices], kind="stable").tolist()
    least_held = np.array([rows.held[rows.slices[at]].min(axis=0) for at in order])
    least_paid = np.array([paid[rows.slices[at]].min() for at in order])
    held_later = np.cumsum(least_held[::-1], axis=0)[::-1] - least_held
    paid_later = np.cumsum(least_paid[::-1])[::-1] - least_paid - prices @ rows.free
    seconds, held, chosen = np.zeros(1), np.zeros((1, len(rows.free))), np.zeros((1, 0), dtype=np.int64)
    for depth, at in enumerate(order):
        menu = rows.slices[at]
        now = (held[:, None] + rows.held[menu]).reshape(-1, held.shape[1])
        took = (seconds[:, None] + rows.seconds[menu]).ravel()
        bounds = took + now @ prices + paid_later[depth]
        kept = np.flatnonzero((bounds < under_s) & (now + held_later[depth] <= rows.free).all(axis=1))
        if len(kept) > rows.labels:
            kept = kept[np.argsort(bounds[kept], kind="stable")[: rows.labels]]
        before, choice = np.divmod(kept, menu.stop - menu.start)
        seconds, held = took[kept], now[kept]
        chosen = np.column_stack([chosen[before], choice + menu.start])
    yield from rows.row[chosen[np.argsort(seconds, kind="stable")][:, np.argsort(order)]]


def _prices(rows: Rows, under_s: float) -> tuple[Floats, float]:
    """Seconds for a byte at each moment, and the bound of the step time that they give: the best of some steps."""
    prices = best = np.zeros(len(rows.free))
    bound_s = -np.inf
    for step in range(STEPS):
        paid = rows.seconds + rows.held @ prices
        cheapest = np.array([menu.start + int(paid[menu].argmin()) for menu in rows.slices], dtype=np.int64)
        found_s = float(paid[cheapest].sum() - prices @ rows.free)
        if found_s > bound_s:
            best, bound_s = prices, found_s
        excess = rows.held[cheapest].sum(axis=0) - rows.free
        excess[(excess < 0) & (prices == 0)] = 0.0
        length = float(excess @ excess)
        if not length or bound_s >= under_s:
            break
        prices = np.maximum(0.0, prices + (under_s - found_s) / (1 + step / 10) / length * excess)
    return best, bound_s

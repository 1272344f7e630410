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

from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.search.search_space import OptionTimes, SearchSpace

MAX_SUBGRADIENT_STEPS = 60
"""Subgradient steps: the bound hardly moves after that."""

MAX_LABEL_ENTRIES, MAX_LABELS = 10_000_000, 4096
"""Numbers that are computed at most, all rows of all labels at all moments; and labels that are kept at most."""

MIN_LABELS = 16
"""With fewer it is not worth beginning."""


@dataclass(frozen=True)
class LabelProblem:
    """What may be chosen, operator by operator.

    Attributes:
        options: of the space.
        operator_slices: each operator's rows.
        time_s: of each row.
        bytes_per_moment: bytes of each row at each moment, (rows, moments).
        available_bytes: bytes at each moment, (moments,).
        max_labels: so many are followed at most.
    """

    options: Ints
    operator_slices: tuple[slice, ...]
    time_s: Floats
    bytes_per_moment: Floats
    available_bytes: Floats
    max_labels: int

    @classmethod
    def create(
        cls, space: SearchSpace, times: OptionTimes, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> LabelProblem | None:
        """All rows of a space; None if there are too many of them, or too many moments.

        Args:
            space: what may be decided.
            times: its times at this batch size.
            batch_size: samples per micro-batch.
            accumulation: micro-batches per optimizer step.
            recomputed_blocks: a flag for each block.
        """
        menus = [space.option_groups[menu].options for menu in space.group_of]
        sizes = [menu.stop - menu.start for menu in menus]
        rest = space.timeline.unattributed_bytes(batch_size, recomputed_blocks)
        labels = min(MAX_LABELS, MAX_LABEL_ENTRIES // max(1, sum(sizes) * len(rest)))
        if labels < MIN_LABELS:
            return None
        operators, stops = np.repeat(np.arange(len(menus)), sizes), np.cumsum(sizes).tolist()
        row = np.concatenate([np.arange(menu.start, menu.stop) for menu in menus] or [np.zeros(0, dtype=np.int64)])
        return cls(
            options=row,
            operator_slices=tuple(slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)),
            time_s=times.total[space.recompute_flags(recomputed_blocks)[operators], row],
            bytes_per_moment=space.timeline.bytes_per_moment(
                operators, space.footprints[row], batch_size, accumulation, recomputed_blocks
            ),
            available_bytes=space.problem.memory_limit_bytes + 1.0 - rest,  # a byte for rounding
            max_labels=labels,
        )


def enumerate_plans(problem: LabelProblem, upper_bound_s: float) -> Iterator[Ints]:
    """Plans that take less than ``upper_bound_s``, the fastest first: one row of the space for each operator.

    None is missed unless more partial plans than ``rows.max_labels`` are worth following; then those of the least bounds
    are. What operators do not hold one by one is not counted (``Timeline.added``): some plans may not fit.
    """
    prices, bound_s = _lagrange_multipliers(problem, upper_bound_s)
    if bound_s >= upper_bound_s:
        return
    paid = problem.time_s + problem.bytes_per_moment @ prices
    order = np.argsort([-float(np.ptp(paid[menu])) for menu in problem.operator_slices], kind="stable").tolist()
    least_held = np.array([problem.bytes_per_moment[problem.operator_slices[at]].min(axis=0) for at in order])
    least_paid = np.array([paid[problem.operator_slices[at]].min() for at in order])
    held_later = np.cumsum(least_held[::-1], axis=0)[::-1] - least_held
    paid_later = np.cumsum(least_paid[::-1])[::-1] - least_paid - prices @ problem.available_bytes
    seconds, held, chosen = np.zeros(1), np.zeros((1, len(problem.available_bytes))), np.zeros((1, 0), dtype=np.int64)
    for depth, at in enumerate(order):
        menu = problem.operator_slices[at]
        now = (held[:, None] + problem.bytes_per_moment[menu]).reshape(-1, held.shape[1])
        took = (seconds[:, None] + problem.time_s[menu]).ravel()
        bounds = took + now @ prices + paid_later[depth]
        kept = np.flatnonzero(
            (bounds < upper_bound_s) & (now + held_later[depth] <= problem.available_bytes).all(axis=1)
        )
        if len(kept) > problem.max_labels:
            kept = kept[np.argsort(bounds[kept], kind="stable")[: problem.max_labels]]
        before, choice = np.divmod(kept, menu.stop - menu.start)
        seconds, held = took[kept], now[kept]
        chosen = np.column_stack([chosen[before], choice + menu.start])
    yield from problem.options[chosen[np.argsort(seconds, kind="stable")][:, np.argsort(order)]]


def _lagrange_multipliers(problem: LabelProblem, upper_bound_s: float) -> tuple[Floats, float]:
    """Seconds for a byte at each moment, and the bound of the step time that they give: the best of some steps."""
    prices = best = np.zeros(len(problem.available_bytes))
    bound_s = -np.inf
    for step in range(MAX_SUBGRADIENT_STEPS):
        paid = problem.time_s + problem.bytes_per_moment @ prices
        cheapest = np.array([menu.start + int(paid[menu].argmin()) for menu in problem.operator_slices], dtype=np.int64)
        found_s = float(paid[cheapest].sum() - prices @ problem.available_bytes)
        if found_s > bound_s:
            best, bound_s = prices, found_s
        excess = problem.bytes_per_moment[cheapest].sum(axis=0) - problem.available_bytes
        excess[(excess < 0) & (prices == 0)] = 0.0
        length = float(excess @ excess)
        if not length or bound_s >= upper_bound_s:
            break
        prices = np.maximum(0.0, prices + (upper_bound_s - found_s) / (1 + step / 10) / length * excess)
    return best, bound_s

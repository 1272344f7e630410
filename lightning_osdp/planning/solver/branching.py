"""Branching on a sum of steps, where the linear relaxation alone is too weak.

If sharding costs each operator the same latency plus a time proportional to its bytes (the paper's equation 2), the
relaxation spends its last bytes on a fraction of an operator and saves a fraction of a latency, which no plan can. The
number of hull steps that a plan takes over all operators is whole: at most the relaxation's rounded down, or at least
that rounded up. Each side gets the price per step (a Lagrangian multiplier) of its highest bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.solver.pareto import Ints
from lightning_osdp.planning.solver.relaxation import OptionTable, Relaxation, hull_step_counts, solve_relaxation

MAX_DUAL_ITERATIONS = 24
"""Relaxations per side: the tangents of a concave, piecewise linear function meet in its maximum after a few."""

MAX_COST = 1 << 61
"""Limit of the price of an option's steps: integers have 63 bits."""

INTEGRALITY_TOLERANCE = 1e-9
"""A sum of steps this close to a whole number has no fraction to branch on."""


class BranchSide(NamedTuple):
    """One side of a branch, or a whole cap (without steps).

    Attributes:
        relaxation: the relaxation with each step paid for.
        hull_step_counts: steps of each option, (groups, options); None for a whole cap.
        step_multiplier: price of a step in cost units; negative where more steps are wanted.
        lower_bound: no solution of this side costs less.
    """

    relaxation: Relaxation
    hull_step_counts: Ints | None
    step_multiplier: int
    lower_bound: float


def branch(
    table: OptionTable, cost: Ints, admitted: NDArray[np.bool_], capacity: int, relaxation: Relaxation
) -> tuple[BranchSide, ...]:
    """Return both sides of a branch; none if the relaxation takes a whole number of steps."""
    step_counts = hull_step_counts(table, cost, admitted)
    steps = relaxation.fractional_sum(step_counts, table.count)
    if relaxation.split_item is None or abs(steps - round(steps)) < INTEGRALITY_TOLERANCE:
        return ()
    row, target = relaxation.split_item
    multiplier = max(1, int(cost[row, relaxation.reference[row]] - cost[row, target]))

    def relax(multiplier: int, step_limit: int) -> tuple[BranchSide, float]:
        relaxed = solve_relaxation(table, cost + multiplier * step_counts, admitted, capacity)
        assert relaxed is not None, "what is admitted has not changed"
        # Integers until the last: price times steps may be far above the bound itself.
        bound = relaxed.cost - multiplier * step_limit - relaxed.fractional_saving
        slope = relaxed.fractional_sum(step_counts, table.count) - step_limit
        return BranchSide(relaxed, step_counts, multiplier, bound), slope

    def maximize(step_limit: int, multiplier: int) -> BranchSide:
        root = BranchSide(relaxation, None, 0, relaxation.lower_bound)
        max_multiplier = MAX_COST // max(1, int(step_counts.max()))
        return _maximize_dual(
            lambda price: relax(price, step_limit), multiplier, max_multiplier, root, steps - step_limit
        )

    return maximize(math.floor(steps), multiplier), maximize(math.ceil(steps), -multiplier)


def _maximize_dual(
    relax: Callable[[int], tuple[BranchSide, float]],
    multiplier: int,
    max_multiplier: int,
    root: BranchSide,
    root_slope: float,
) -> BranchSide:
    """Return the side at the price of a step, of the sign of ``multiplier``, at which the bound is highest.

    The bound is concave in the price; its slope is the relaxation's excess of steps over their limit. The next price
    is where the tangents on either side of the maximum meet, or twice the last one while only one side is known.
    """
    best = root
    near, far = (0, root.lower_bound, root_slope), None
    for _ in range(MAX_DUAL_ITERATIONS):
        side, slope = relax(multiplier)
        if side.lower_bound > best.lower_bound:
            best = side
        if slope == 0:
            break
        point = (multiplier, side.lower_bound, slope)
        if slope * near[2] > 0:
            near = point
        else:
            far = point
        proposal = 2 * multiplier if far is None else _tangent_intersection(near, far)
        if proposal in (near[0], far[0] if far else None) or abs(proposal) >= max_multiplier:
            break
        multiplier = proposal
    return best


def _tangent_intersection(first: tuple[int, float, float], second: tuple[int, float, float]) -> int:
    """Return where two tangents (position, value, slope) of opposite slopes meet."""
    distance = (first[1] - second[1] - first[2] * (first[0] - second[0])) / (second[2] - first[2])
    return second[0] + round(distance)

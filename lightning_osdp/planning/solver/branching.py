"""Branching on a sum of steps, where the linear relaxation alone is too weak.

Where sharding costs each operator the same latency plus a time proportional to its bytes (the paper's equation 2),
the relaxation spends its last bytes on a fraction of an operator, and so saves a fraction of a latency, which no plan
can. The number of steps up the hulls that a plan takes, over all operators, is a whole number: it is at most the
relaxation's rounded down, or at least that rounded up. Each side gets its own price per step (a Lagrangian
multiplier), at which its bound is highest, and is searched as the whole was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.solver.pareto import Ints
from lightning_osdp.planning.solver.relaxation import OptionTable, Relaxation, hull_step_counts, solve_relaxation

MAX_DUAL_ITERATIONS = 24
"""Relaxations per side; the tangents of a concave, piecewise linear function meet in its maximum after a few."""

MAX_COST = 1 << 61
"""Of an option and its steps together: integers have 63 bits."""

INTEGRALITY_TOLERANCE = 1e-9
"""A sum of steps this close to a whole number has no fraction to branch on."""


class BranchSide(NamedTuple):
    """One side of a branch, or the whole (without steps).

    Attributes:
        relaxation: the relaxation with each step paid for.
        hull_step_counts: that count, (groups, options); None if none do.
        step_multiplier: of a step, in cost units; negative where steps are asked for.
        lower_bound: no solution of this side costs less.
    """

    relaxation: Relaxation
    hull_step_counts: Ints | None
    step_multiplier: int
    lower_bound: float


def branch(
    table: OptionTable, cost: Ints, admitted: NDArray[np.bool_], capacity: int, relaxation: Relaxation
) -> tuple[BranchSide, ...]:
    """Both sides of a branch; none if the relaxation takes a whole number of steps."""
    steps = hull_step_counts(table, cost, admitted)
    taken = relaxation.fractional_sum(steps, table.count)
    if relaxation.split_item is None or abs(taken - round(taken)) < INTEGRALITY_TOLERANCE:
        return ()
    row, target = relaxation.split_item
    scale = max(1, int(cost[row, relaxation.reference[row]] - cost[row, target]))

    def solve_side(step_limit: int, sign: int) -> BranchSide:
        return _maximize_dual(
            table,
            cost,
            admitted,
            capacity,
            steps,
            step_limit,
            sign * scale,
            BranchSide(relaxation, None, 0, relaxation.lower_bound),
        )

    return solve_side(math.floor(taken), 1), solve_side(math.ceil(taken), -1)


def _maximize_dual(
    table: OptionTable,
    cost: Ints,
    admitted: NDArray[np.bool_],
    capacity: int,
    step_counts: Ints,
    step_limit: int,
    multiplier: int,
    start: BranchSide,
) -> BranchSide:
    """The price of a step, of the sign of ``multiplier``, at which the bound is highest.

    The bound is concave in the price; its slope is by how much the relaxation's steps are above ``step_limit``. The next
    price is where the tangents on either side of the maximum meet, or twice as high as long as there is one only.
    """
    best = start
    near = (0, start.lower_bound, start.relaxation.fractional_sum(step_counts, table.count) - step_limit)
    far: tuple[int, float, float] | None = None
    for _ in range(MAX_DUAL_ITERATIONS):
        relaxed = solve_relaxation(table, cost + multiplier * step_counts, admitted, capacity)
        assert relaxed is not None, "what is admitted has not changed"
        slope = relaxed.fractional_sum(step_counts, table.count) - step_limit
        # Integers until the last: price times steps may be far above the bound itself.
        point = (multiplier, relaxed.cost - multiplier * step_limit - relaxed.fractional_saving, slope)
        if point[1] > best.lower_bound:
            best = BranchSide(relaxed, step_counts, multiplier, point[1])
        if slope == 0:
            break
        if slope * near[2] > 0:
            near = point
        else:
            far = point
        proposal = 2 * multiplier if far is None else _tangent_intersection(near, far)
        if proposal in (near[0], far[0] if far else None) or abs(proposal) * int(step_counts.max()) >= MAX_COST:
            break
        multiplier = proposal
    return best


def _tangent_intersection(first: tuple[int, float, float], second: tuple[int, float, float]) -> int:
    """Where two tangents (at, value, slope) of opposite slopes meet."""
    between = (first[1] - second[1] - first[2] * (first[0] - second[0])) / (second[2] - first[2])
    return second[0] + round(between)

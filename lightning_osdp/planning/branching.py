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

from lightning_osdp.planning.pareto import Ints
from lightning_osdp.planning.relaxation import Relaxation, Table, hull_steps, relax

MOST_CUTS = 24
"""Relaxations per side; the tangents of a concave, piecewise linear function meet in its maximum after a few."""

LARGEST_COST = 1 << 61
"""Of an option and its steps together: integers have 63 bits."""

WHOLE = 1e-9
"""A sum of steps this close to a whole number has no fraction to branch on."""


class Side(NamedTuple):
    """One side of a branch, or the whole (without steps).

    Attributes:
        relaxed: the relaxation with each step paid for.
        steps: that count, (groups, options); None if none do.
        price: of a step, in cost units; negative where steps are asked for.
        bound: no solution of this side costs less.
    """

    relaxed: Relaxation
    steps: Ints | None
    price: int
    bound: float


def branch(table: Table, cost: Ints, admitted: NDArray[np.bool_], room: int, relaxed: Relaxation) -> tuple[Side, ...]:
    """Both sides of a branch; none if the relaxation takes a whole number of steps."""
    steps = hull_steps(table, cost, admitted)
    taken = relaxed.total(steps, table.count)
    if relaxed.edge is None or abs(taken - round(taken)) < WHOLE:
        return ()
    row, target = relaxed.edge
    scale = max(1, int(cost[row, relaxed.reference[row]] - cost[row, target]))

    def side(most: int, sign: int) -> Side:
        return _dual(table, cost, admitted, room, steps, most, sign * scale, Side(relaxed, None, 0, relaxed.bound))

    return side(math.floor(taken), 1), side(math.ceil(taken), -1)


def _dual(
    table: Table,
    cost: Ints,
    admitted: NDArray[np.bool_],
    room: int,
    steps: Ints,
    whole: int,
    price: int,
    start: Side,
) -> Side:
    """The price of a step, of the sign of ``price``, at which the bound is highest.

    The bound is concave in the price; its slope is by how much the relaxation's steps are above ``whole``. The next
    price is where the tangents on either side of the maximum meet, or twice as high as long as there is one only.
    """
    best = start
    near = (0, start.bound, start.relaxed.total(steps, table.count) - whole)
    far: tuple[int, float, float] | None = None
    for _ in range(MOST_CUTS):
        relaxed = relax(table, cost + price * steps, admitted, room)
        assert relaxed is not None, "what is admitted has not changed"
        slope = relaxed.total(steps, table.count) - whole
        # Integers until the last: price times steps may be far above the bound itself.
        point = (price, relaxed.cost - price * whole - relaxed.saving, slope)
        if point[1] > best.bound:
            best = Side(relaxed, steps, price, point[1])
        if slope == 0:
            break
        if slope * near[2] > 0:
            near = point
        else:
            far = point
        proposal = 2 * price if far is None else _meeting(near, far)
        if proposal in (near[0], far[0] if far else None) or abs(proposal) * int(steps.max()) >= LARGEST_COST:
            break
        price = proposal
    return best


def _meeting(one: tuple[int, float, float], other: tuple[int, float, float]) -> int:
    """Where two tangents (at, value, slope) of opposite slopes meet."""
    between = (one[1] - other[1] - one[2] * (one[0] - other[0])) / (other[2] - one[2])
    return other[0] + round(between)

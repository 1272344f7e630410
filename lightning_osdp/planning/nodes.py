"""The nodes of the search's tree, and how solutions are found at one.

A node is one cap, or one side of a branch on a cap. It is searched in rounds, each of which combines options of a
little more excess than the last (see ``pareto``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.branching import Side
from lightning_osdp.planning.pareto import Deviations, Front, Ints, Limits, add, best_pair, copies, leaf
from lightning_osdp.planning.relaxation import Relaxation, Table, exact_dot

FIRST_DEVIATIONS, FIRST_CAPACITY = 32, 1 << 15
"""Deviations of least excess, and entries per front, that the first round of a cap looks at."""

SMALLEST_LIMIT_LOG2 = 40
"""The smallest excess that a round allows is the gap over 2**40."""

POLISHED = 256
"""Options in each of the four parts that polishing looks at."""

PARTINGS = (0, 2, 4)
"""Digits of a group's index, by which polishing parts the groups in four, one after the other."""


@dataclass(frozen=True)
class Found:
    """A solution, by groups: all operators take the reference's option but for the deviations."""

    cost: float
    reference: Ints
    deviations: Deviations
    price_s_per_byte: float


def rounded(relaxed: Relaxation, unit_s: float) -> Found:
    """The relaxation's rounded solution."""
    deviations = {} if relaxed.edge is None else {relaxed.edge: relaxed.operators}
    return Found(relaxed.cost, relaxed.reference, deviations, relaxed.price * unit_s)


class Node:
    """How far one cap, or one side of a branch on it, has been searched.

    Attributes:
        relaxed: its linear relaxation; the reference of what follows.
        price_s_per_byte: of the cap's relaxation.
        room: bytes above ``Table.least_bytes``.
        admitted: the options that may be taken, (groups, options).
        cost: of the reference, in units.
        left: bytes that the reference leaves.
        weight, added, excess: bytes, cost and loss of each option against its group's reference, (groups, options).
        useful: options that may improve on the best solution, (groups, options); the reference is not among them.
        bound: the least cost at this node.
        best: the best solution found here.
        branched: whether it is a side of a branch.
        whole: whether there is nothing more to branch on.
        deviations, capacity: what the next round looks at.
    """

    def __init__(
        self, table: Table, cost: Ints, admitted: NDArray[np.bool_], room: int, side: Side, price_s_per_byte: float
    ) -> None:
        groups = np.arange(len(table.count))
        relaxed = side.relaxed
        self.relaxed = relaxed
        self.price_s_per_byte = price_s_per_byte
        self.room = room
        self.admitted = admitted
        self.left = room - relaxed.weight
        self.weight = table.weight - table.weight[groups, relaxed.reference][:, None]
        self.added = cost - cost[groups, relaxed.reference][:, None]
        self.cost = exact_dot(table.count, cost[groups, relaxed.reference])
        paid = self.added
        if side.steps is not None:
            paid = paid + side.price * (side.steps - side.steps[groups, relaxed.reference][:, None])
        self.excess = paid + relaxed.price * self.weight
        # Neither the reference itself nor what equals it (but for its transient) is a deviation.
        self.useful = admitted & ((self.weight != 0) | (self.added < 0))
        self.bound = side.bound
        self.best: Found | None = None
        self.branched = side.steps is not None
        self.whole = self.branched
        self.deviations = FIRST_DEVIATIONS
        self.capacity = FIRST_CAPACITY

    def found(self, added: int, deviations: Deviations) -> Found:
        """A solution that deviates from the reference."""
        found = Found(self.cost + added, self.relaxed.reference, deviations, self.price_s_per_byte)
        if self.best is None or found.cost < self.best.cost:
            self.best = found
        return found

    def narrow(self, target: float) -> None:
        """Drops the options that no solution below ``target`` takes, and with them memory that nothing can use.

        All sums of the others are multiples of their greatest common divisor away from the reference; what is left
        beyond a multiple stays unused, and is worth its price.
        """
        self.useful &= self.excess <= target - self.bound
        step = int(np.gcd.reduce(self.weight[self.useful], initial=0))
        unusable = self.left % step if step else self.left
        self.bound += self.relaxed.price * unusable
        self.left -= unusable

    def allowed(self, count: Ints, gap: float) -> float:
        """The excess, at most the gap, that admits about as many deviations as the round is to look at.

        An option of excess e that n operators have is taken by up to ``limit / e`` of them, each number being one
        deviation; options that lose next to nothing are not counted, since every limit admits them.
        """
        least = gap * 2.0**-SMALLEST_LIMIT_LOG2
        counted = self.useful & (self.excess > least)
        operators, excess = np.broadcast_to(count[:, None], counted.shape)[counted], self.excess[counted]
        limit = gap
        while limit > least and np.minimum(operators, limit // excess).sum() > self.deviations:
            limit /= math.sqrt(2)
        return limit

    def best_two(self) -> tuple[int, Deviations]:
        """The best plan in which at most two operators deviate from the reference: a first guess.

        The operators are parted into two halves, one deviation from each, by every digit of the group's index in
        turn: two groups differ in some digit.
        """
        rows, options = np.nonzero(self.useful)
        columns = (rows, options, *(values[rows, options] for values in (self.weight, self.added, self.excess)))
        best: tuple[int, Deviations] = (0, {})
        for digit in range(max(1, (len(self.useful) - 1).bit_length())):
            half = (rows >> digit) & 1 == 1
            left, right = (leaf(*(column[part] for column in columns)) for part in (half, ~half))
            pair = best_pair(left, right, self.left)
            if pair is not None and pair[0] < best[0]:
                best = pair
        return best

    def fronts(self, count: Ints, limits: Limits) -> list[Front]:
        """What each group may deviate to within the limits."""
        within = self.useful & (self.excess <= limits.excess)
        fronts: list[Front] = []
        for row in np.flatnonzero(within.any(axis=1)).tolist():
            options = np.flatnonzero(within[row])
            one = leaf(
                np.full(len(options), row),
                options,
                self.weight[row, options],
                self.added[row, options],
                self.excess[row, options],
            )
            fronts += copies(one, row, int(count[row]), limits)
        return fronts


def polish(table: Table, cost: Ints, node: Node, best: Found, unit_s: float, tick: Callable[[], None]) -> Found | None:
    """The best solution around another: in each of four parts of the operators, at most one takes another option.

    Where the options of a branch lose next to nothing, all that is left to gain is a few bytes, and the best of so
    many quadruples wastes hardly any. Only operators that are alone in their group take part. None if nothing is
    gained.
    """
    alone, groups = table.count == 1, np.arange(len(table.count))
    moved = dict(key for key in best.deviations if alone[key[0]])
    kept = {key: count for key, count in best.deviations.items() if not alone[key[0]]}
    choice = best.reference.copy()
    choice[list(moved)] = list(moved.values())
    if not node.admitted[groups, choice].all():
        return None
    weight = table.weight - table.weight[groups, choice][:, None]
    added = cost - cost[groups, choice][:, None]
    excess = np.abs(added + best.price_s_per_byte / unit_s * weight)
    spent = int(table.weight[groups, choice] @ table.count) + sum(int(weight[key]) * n for key, n in kept.items())
    limits = Limits(1.0, False, POLISHED**2, tick)
    pair: tuple[int, Deviations] | None = None
    for shift in PARTINGS:
        parts: list[Front] = []
        for part in range(4):
            mine = alone & ((groups >> shift) & 3 == part)
            rows, options = np.nonzero(node.admitted & mine[:, None] & (weight != 0))
            least = np.argsort(excess[rows, options], kind="stable")[:POLISHED]
            rows, options = rows[least], options[least]
            parts.append(leaf(rows, options, weight[rows, options], added[rows, options], np.zeros(len(least))))
        found = best_pair(add(parts[0], parts[1], limits), add(parts[2], parts[3], limits), node.room - spent)
        if found is not None and (pair is None or found[0] < pair[0]):
            pair = found
    if pair is None or pair[0] >= 0:
        return None
    moved |= dict(pair[1].keys())
    deviations = kept | {(group, option): 1 for group, option in moved.items() if option != best.reference[group]}
    return Found(best.cost + pair[0], best.reference, deviations, best.price_s_per_byte)

"""The nodes of the search tree, and how solutions are found at one.

A node is one cap, or one side of a branch on a cap. It is searched in rounds, each of which combines options of a
little more reduced cost than the last (see ``pareto``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.solver.branching import BranchSide
from lightning_osdp.planning.solver.pareto import (
    Deviations,
    Front,
    Ints,
    MergeLimits,
    best_pair,
    identical_operator_fronts,
    single_choice_front,
)
from lightning_osdp.planning.solver.relaxation import OptionTable, Relaxation, exact_dot

INITIAL_MAX_DEVIATIONS, INITIAL_MAX_ENTRIES = 32, 1 << 15
"""Deviations of least reduced cost, and entries per front, in the first round of a node."""

MIN_LIMIT_LOG2 = 40
"""The smallest reduced cost that a round allows is the gap over 2**40."""


@dataclass(frozen=True)
class Incumbent:
    """A solution by groups: all operators take the reference's option except the deviations."""

    cost: float
    reference: Ints
    deviations: Deviations
    memory_shadow_price: float


def round_relaxation(relaxation: Relaxation, cost_unit_s: float) -> Incumbent:
    """Return the relaxation's rounded solution."""
    deviations = {} if relaxation.split_item is None else {relaxation.split_item: relaxation.split_count}
    return Incumbent(relaxation.cost, relaxation.reference, deviations, relaxation.shadow_price * cost_unit_s)


class Node:
    """The state of the search of one cap, or of one side of a branch on it.

    Attributes:
        relaxation: the linear relaxation; costs and bytes are relative to its reference.
        memory_shadow_price: seconds per byte in the cap's relaxation.
        capacity: bytes above ``OptionTable.min_resident_bytes``.
        admitted: the options that may be taken, (groups, options).
        reference_cost: cost of the reference in units.
        remaining_bytes: bytes that the reference leaves.
        added_bytes, added_cost: bytes and cost of each option above its group's reference, (groups, options).
        reduced_cost: loss of each option against the relaxation, (groups, options).
        useful: options that may improve on the best solution, (groups, options); the reference is not among them.
        lower_bound: the least cost at this node.
        is_branched, is_leaf: whether it is a side of a branch, and whether there is nothing more to branch on.
        max_deviations, max_entries: what the next round looks at.
    """

    def __init__(
        self,
        table: OptionTable,
        cost: Ints,
        admitted: NDArray[np.bool_],
        capacity: int,
        side: BranchSide,
        memory_shadow_price: float,
    ) -> None:
        relaxation, groups = side.relaxation, np.arange(len(table.count))
        reference = relaxation.reference
        self.relaxation = relaxation
        self.memory_shadow_price = memory_shadow_price
        self.capacity = capacity
        self.admitted = admitted
        self.remaining_bytes = capacity - relaxation.extra_bytes
        self.added_bytes = table.extra_bytes - table.extra_bytes[groups, reference][:, None]
        self.added_cost = cost - cost[groups, reference][:, None]
        self.reference_cost = exact_dot(table.count, cost[groups, reference])
        added_price = self.added_cost
        if side.hull_step_counts is not None:
            added_steps = side.hull_step_counts - side.hull_step_counts[groups, reference][:, None]
            added_price = added_price + side.step_multiplier * added_steps
        self.reduced_cost = added_price + relaxation.shadow_price * self.added_bytes
        # Neither the reference itself nor its equals (except for their transient) are deviations.
        self.useful = admitted & ((self.added_bytes != 0) | (self.added_cost < 0))
        self.lower_bound = side.lower_bound
        self.is_branched = self.is_leaf = side.hull_step_counts is not None
        self.max_deviations = INITIAL_MAX_DEVIATIONS
        self.max_entries = INITIAL_MAX_ENTRIES

    def to_incumbent(self, added_cost: int, deviations: Deviations) -> Incumbent:
        """Return a solution that deviates from the reference."""
        cost = self.reference_cost + added_cost
        return Incumbent(cost, self.relaxation.reference, deviations, self.memory_shadow_price)

    def fix_by_reduced_cost(self, cutoff: float) -> None:
        """Drop the options that no solution below ``cutoff`` takes, and with them memory that nothing can use.

        All sums of the other options are multiples of their greatest common divisor away from the reference; the
        remainder of the free bytes stays unused, and its price raises the bound.
        """
        self.useful &= self.reduced_cost <= cutoff - self.lower_bound
        divisor = int(np.gcd.reduce(self.added_bytes[self.useful], initial=0))
        unusable = self.remaining_bytes % divisor if divisor else self.remaining_bytes
        self.lower_bound += self.relaxation.shadow_price * unusable
        self.remaining_bytes -= unusable

    def reduced_cost_limit(self, count: Ints, gap: float) -> float:
        """Return the reduced cost, at most the gap, that admits about as many deviations as the round looks at.

        Up to ``limit / e`` of n operators take an option of reduced cost e, each number being one deviation. Options
        that lose next to nothing are not counted, since every limit admits them.
        """
        least = gap * 2.0**-MIN_LIMIT_LOG2
        counted = self.useful & (self.reduced_cost > least)
        operators, reduced_cost = np.broadcast_to(count[:, None], counted.shape)[counted], self.reduced_cost[counted]
        limit = gap
        while limit > least and np.minimum(operators, limit // reduced_cost).sum() > self.max_deviations:
            limit /= math.sqrt(2)
        return limit

    def best_two_swaps(self) -> tuple[int, Deviations]:
        """Return the best plan in which at most two operators deviate from the reference: a first guess.

        The groups are parted in two halves, with one deviation from each, by every binary digit of their index in
        turn: any two groups differ in some digit.
        """
        rows, options = np.nonzero(self.useful)
        values = (column[rows, options] for column in (self.added_bytes, self.added_cost, self.reduced_cost))
        columns = (rows, options, *values)
        best: tuple[int, Deviations] = (0, {})
        for digit in range(max(1, (len(self.useful) - 1).bit_length())):
            half = (rows >> digit) & 1 == 1
            left, right = (single_choice_front(*(column[part] for column in columns)) for part in (half, ~half))
            pair = best_pair(left, right, self.remaining_bytes)
            if pair is not None and pair[0] < best[0]:
                best = pair
        return best

    def build_fronts(self, count: Ints, limits: MergeLimits) -> list[Front]:
        """Return the deviations of each group within the limits."""
        within = self.useful & (self.reduced_cost <= limits.max_reduced_cost)
        fronts: list[Front] = []
        for row in np.flatnonzero(within.any(axis=1)).tolist():
            options = np.flatnonzero(within[row])
            values = (column[row, options] for column in (self.added_bytes, self.added_cost, self.reduced_cost))
            front = single_choice_front(np.full(len(options), row), options, *values)
            fronts += identical_operator_fronts(front, row, int(count[row]), limits)
        return fronts

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

from lightning_osdp.planning.solver.branching import BranchSide
from lightning_osdp.planning.solver.pareto import (
    Deviations,
    Front,
    Ints,
    MergeLimits,
    add,
    best_pair,
    identical_operator_fronts,
    single_choice_front,
)
from lightning_osdp.planning.solver.relaxation import OptionTable, Relaxation, exact_dot

INITIAL_MAX_DEVIATIONS, INITIAL_MAX_ENTRIES = 32, 1 << 15
"""Deviations of least excess, and entries per front, that the first round of a cap looks at."""

MIN_LIMIT_LOG2 = 40
"""The smallest excess that a round allows is the gap over 2**40."""

MAX_SWAP_OPTIONS = 256
"""Options in each of the four parts that polishing looks at."""

PARTITION_SHIFTS = (0, 2, 4)
"""Digits of a group's index, by which polishing parts the groups in four, one after the other."""


@dataclass(frozen=True)
class Incumbent:
    """A solution, by groups: all operators take the reference's option but for the deviations."""

    cost: float
    reference: Ints
    deviations: Deviations
    memory_shadow_price: float


def round_relaxation(relaxation: Relaxation, cost_unit_s: float) -> Incumbent:
    """The relaxation's rounded solution."""
    deviations = {} if relaxation.split_item is None else {relaxation.split_item: relaxation.split_count}
    return Incumbent(relaxation.cost, relaxation.reference, deviations, relaxation.shadow_price * cost_unit_s)


class Node:
    """How far one cap, or one side of a branch on it, has been searched.

    Attributes:
        relaxation: its linear relaxation; the reference of what follows.
        memory_shadow_price: of the cap's relaxation.
        capacity: bytes above ``OptionTable.least_bytes``.
        admitted: the options that may be taken, (groups, options).
        reference_cost: of the reference, in units.
        remaining_bytes: bytes that the reference leaves.
        weight, added, excess: bytes, cost and loss of each option against its group's reference, (groups, options).
        useful: options that may improve on the best solution, (groups, options); the reference is not among them.
        lower_bound: the least cost at this node.
        best: the best solution found here.
        is_branched: whether it is a side of a branch.
        is_leaf: whether there is nothing more to branch on.
        deviations, capacity: what the next round looks at.
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
        groups = np.arange(len(table.count))
        relaxed = side.relaxation
        self.relaxation = relaxed
        self.memory_shadow_price = memory_shadow_price
        self.capacity = capacity
        self.admitted = admitted
        self.remaining_bytes = capacity - relaxed.extra_bytes
        self.added_bytes = table.extra_bytes - table.extra_bytes[groups, relaxed.reference][:, None]
        self.added_cost = cost - cost[groups, relaxed.reference][:, None]
        self.reference_cost = exact_dot(table.count, cost[groups, relaxed.reference])
        paid = self.added_cost
        if side.hull_step_counts is not None:
            paid = paid + side.step_multiplier * (
                side.hull_step_counts - side.hull_step_counts[groups, relaxed.reference][:, None]
            )
        self.reduced_cost = paid + relaxed.shadow_price * self.added_bytes
        # Neither the reference itself nor what equals it (but for its transient) is a deviation.
        self.useful = admitted & ((self.added_bytes != 0) | (self.added_cost < 0))
        self.lower_bound = side.lower_bound
        self.best: Incumbent | None = None
        self.is_branched = side.hull_step_counts is not None
        self.is_leaf = self.is_branched
        self.max_deviations = INITIAL_MAX_DEVIATIONS
        self.max_entries = INITIAL_MAX_ENTRIES

    def record_solution(self, added_cost: int, deviations: Deviations) -> Incumbent:
        """A solution that deviates from the reference."""
        found = Incumbent(
            self.reference_cost + added_cost, self.relaxation.reference, deviations, self.memory_shadow_price
        )
        if self.best is None or found.cost < self.best.cost:
            self.best = found
        return found

    def fix_by_reduced_cost(self, cutoff: float) -> None:
        """Drops the options that no solution below ``cutoff`` takes, and with them memory that nothing can use.

        All sums of the others are multiples of their greatest common divisor away from the reference; what is left
        beyond a multiple stays unused, and is worth its price.
        """
        self.useful &= self.reduced_cost <= cutoff - self.lower_bound
        step = int(np.gcd.reduce(self.added_bytes[self.useful], initial=0))
        unusable = self.remaining_bytes % step if step else self.remaining_bytes
        self.lower_bound += self.relaxation.shadow_price * unusable
        self.remaining_bytes -= unusable

    def reduced_cost_limit(self, count: Ints, gap: float) -> float:
        """The excess, at most the gap, that admits about as many deviations as the round is to look at.

        An option of excess e that n operators have is taken by up to ``limit / e`` of them, each number being one
        deviation; options that lose next to nothing are not counted, since every limit admits them.
        """
        least = gap * 2.0**-MIN_LIMIT_LOG2
        counted = self.useful & (self.reduced_cost > least)
        operators, excess = np.broadcast_to(count[:, None], counted.shape)[counted], self.reduced_cost[counted]
        limit = gap
        while limit > least and np.minimum(operators, limit // excess).sum() > self.max_deviations:
            limit /= math.sqrt(2)
        return limit

    def best_two_swaps(self) -> tuple[int, Deviations]:
        """The best plan in which at most two operators deviate from the reference: a first guess.

        The operators are parted into two halves, one deviation from each, by every digit of the group's index in
        turn: two groups differ in some digit.
        """
        rows, options = np.nonzero(self.useful)
        columns = (
            rows,
            options,
            *(values[rows, options] for values in (self.added_bytes, self.added_cost, self.reduced_cost)),
        )
        best: tuple[int, Deviations] = (0, {})
        for digit in range(max(1, (len(self.useful) - 1).bit_length())):
            half = (rows >> digit) & 1 == 1
            left, right = (single_choice_front(*(column[part] for column in columns)) for part in (half, ~half))
            pair = best_pair(left, right, self.remaining_bytes)
            if pair is not None and pair[0] < best[0]:
                best = pair
        return best

    def build_fronts(self, count: Ints, limits: MergeLimits) -> list[Front]:
        """What each group may deviate to within the limits."""
        within = self.useful & (self.reduced_cost <= limits.max_reduced_cost)
        fronts: list[Front] = []
        for row in np.flatnonzero(within.any(axis=1)).tolist():
            options = np.flatnonzero(within[row])
            one = single_choice_front(
                np.full(len(options), row),
                options,
                self.added_bytes[row, options],
                self.added_cost[row, options],
                self.reduced_cost[row, options],
            )
            fronts += identical_operator_fronts(one, row, int(count[row]), limits)
        return fronts


def four_swap_search(
    table: OptionTable, cost: Ints, node: Node, best: Incumbent, cost_unit_s: float, check_deadline: Callable[[], None]
) -> Incumbent | None:
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
    weight = table.extra_bytes - table.extra_bytes[groups, choice][:, None]
    added = cost - cost[groups, choice][:, None]
    excess = np.abs(added + best.memory_shadow_price / cost_unit_s * weight)
    spent = int(table.extra_bytes[groups, choice] @ table.count) + sum(int(weight[key]) * n for key, n in kept.items())
    limits = MergeLimits(1.0, False, MAX_SWAP_OPTIONS**2, check_deadline)
    pair: tuple[int, Deviations] | None = None
    for shift in PARTITION_SHIFTS:
        parts: list[Front] = []
        for part in range(4):
            mine = alone & ((groups >> shift) & 3 == part)
            rows, options = np.nonzero(node.admitted & mine[:, None] & (weight != 0))
            least = np.argsort(excess[rows, options], kind="stable")[:MAX_SWAP_OPTIONS]
            rows, options = rows[least], options[least]
            parts.append(
                single_choice_front(rows, options, weight[rows, options], added[rows, options], np.zeros(len(least)))
            )
        found = best_pair(add(parts[0], parts[1], limits), add(parts[2], parts[3], limits), node.capacity - spent)
        if found is not None and (pair is None or found[0] < pair[0]):
            pair = found
    if pair is None or pair[0] >= 0:
        return None
    moved |= dict(pair[1].keys())
    deviations = kept | {(group, option): 1 for group, option in moved.items() if option != best.reference[group]}
    return Incumbent(best.cost + pair[0], best.reference, deviations, best.memory_shadow_price)

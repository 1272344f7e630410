"""Pareto lists of partial solutions, and their sums.

A `Front` holds how a part of the operators may deviate from a reference solution: bytes added (``weight``) against time
added (``cost``), without entries that are worse in both. Costs are integers, a fixed fraction of a second, so sums do
not depend on their order and ties are exact.

At a given price of memory the reference is the cheapest solution, so each entry has a *reduced cost*, ``cost + price *
weight >= 0``: its loss against the linear relaxation. Reduced costs add up, and a solution whose reduced cost exceeds
the gap between the relaxation and the best known solution is useless. This bound keeps the lists short (Horowitz and
Sahni's lists, fathomed by reduced costs as in Pisinger's core algorithms).

In a branch that also limits a sum of steps, the reduced cost includes the price of the steps. Entries are still dropped
by weight and cost alone, although the better one may have the larger reduced cost: in a solution of least cost and,
among these, of least weight, no part can be replaced. Only between entries equal in both does the reduced cost decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Deviations = dict[tuple[int, int], int]
"""Numbers of operators that take another option than the reference: {(group, option): operators}."""

REFERENCE = -1
"""Option of an entry that does not deviate."""

MIN_FRONT_ENTRIES = 1 << 10
"""Entries that a front may always keep."""

MAX_PAIRS_PER_ENTRY = 16
"""Limit of the pairs that one sum looks at, per entry that it may keep: bounds its memory."""


@dataclass(frozen=True)
class SingleChoiceOrigin:
    """Each entry is one operator of a group that takes an option, or the reference."""

    groups: Ints
    options: Ints


@dataclass(frozen=True)
class IdenticalOrigin:
    """Entry i is i operators of a group that take the same option."""

    group: int
    option: int


@dataclass(frozen=True)
class SumOrigin:
    """Entry i is entry ``left_entries[i]`` of one front together with ``right_entries[i]`` of another."""

    left: Front
    right: Front
    left_entries: Ints
    right_entries: Ints


@dataclass(frozen=True)
class Front:
    """Partial solutions of which none is better than another in both weight and cost.

    Attributes:
        weight: bytes relative to the reference, strictly ascending.
        cost: time relative to the reference in integer units, strictly descending.
        reduced_cost: loss of each entry against the relaxation, in the same unit.
        origin: the choices behind each entry.
        is_complete: whether no entry within the limits was left out to save memory.
    """

    weight: Ints
    cost: Ints
    reduced_cost: Floats
    origin: SingleChoiceOrigin | IdenticalOrigin | SumOrigin
    is_complete: bool = True

    def __len__(self) -> int:
        return len(self.weight)

    def deviations(self, entry: int) -> Deviations:
        """Return the choices behind one entry."""
        result: Deviations = {}
        stack: list[tuple[Front, int]] = [(self, entry)]
        while stack:
            front, at = stack.pop()
            match front.origin:
                case SumOrigin(left, right, left_entries, right_entries):
                    stack += [(left, int(left_entries[at])), (right, int(right_entries[at]))]
                case IdenticalOrigin(group, option) if at:
                    result[group, option] = result.get((group, option), 0) + at
                case SingleChoiceOrigin(groups, options) if options[at] != REFERENCE:
                    key = (int(groups[at]), int(options[at]))
                    result[key] = result.get(key, 0) + 1
        return result


@dataclass(frozen=True)
class MergeLimits:
    """Limits of one round of the search.

    Attributes:
        max_reduced_cost: entries above it are left out.
        is_branched: whether reduced costs include the price of steps.
        max_entries: entries that a front may keep; of more, those of least reduced cost stay and it is not complete.
    """

    max_reduced_cost: float
    is_branched: bool
    max_entries: int


def pareto_entries(weight: Ints, cost: Ints, reduced_cost: Floats | None = None) -> Ints:
    """Return the indices of the entries that no other matches or betters in both, by ascending weight.

    Of equal entries the one of least reduced cost stays, or the first if no reduced cost is given.
    """
    # A stable sort is fast here: its input is a few ascending runs.
    order = np.argsort(weight, kind="stable") if reduced_cost is None else np.lexsort((reduced_cost, cost, weight))
    sorted_cost = cost[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = sorted_cost[1:] < np.minimum.accumulate(sorted_cost)[:-1]
    order = order[keep]
    # Of equal weights the cheapest comes last.
    sorted_weight = weight[order]
    keep = np.ones(len(order), dtype=bool)
    keep[:-1] = sorted_weight[:-1] < sorted_weight[1:]
    return np.asarray(order[keep], dtype=np.int64)


def single_choice_front(groups: Ints, options: Ints, weight: Ints, cost: Ints, reduced_cost: Floats) -> Front:
    """Return the front of the reference and of one operator of ``groups[i]`` that takes ``options[i]``."""
    # Arrays are filled in place: there are many small ones, and np.append would dominate the time.
    columns = np.empty((4, len(weight) + 1), dtype=np.int64)
    columns[:, 0] = (0, 0, REFERENCE, REFERENCE)
    columns[0, 1:], columns[1, 1:], columns[2, 1:], columns[3, 1:] = weight, cost, groups, options
    losses = np.zeros(len(weight) + 1)
    losses[1:] = reduced_cost
    keep = pareto_entries(columns[0], columns[1], losses)
    weight, cost, groups, options = columns[:, keep]
    return Front(weight, cost, losses[keep], SingleChoiceOrigin(groups, options))


def empty_front() -> Front:
    """Return the front that holds the reference alone."""
    none = np.zeros(0, dtype=np.int64)
    return single_choice_front(none, none, none, none, none.astype(np.float64))


def add(left: Front, right: Front, limits: MergeLimits) -> Front:
    """Return the front of all sums of an entry of each whose reduced cost is within the limit."""
    i, j, is_complete = _pairs_within_limit(left, right, limits)
    weight, cost = left.weight[i] + right.weight[j], left.cost[i] + right.cost[j]
    reduced_cost = left.reduced_cost[i] + right.reduced_cost[j]
    keep = pareto_entries(weight, cost, reduced_cost if limits.is_branched else None)
    if len(keep) > limits.max_entries:
        keep, is_complete = keep[_select_least_reduced_cost(reduced_cost[keep], limits.max_entries)], False
    is_complete = is_complete and left.is_complete and right.is_complete
    return Front(weight[keep], cost[keep], reduced_cost[keep], SumOrigin(left, right, i[keep], j[keep]), is_complete)


def _pairs_within_limit(left: Front, right: Front, limits: MergeLimits) -> tuple[Ints, Ints, bool]:
    """Return pairs of entries within the reduced-cost limit, and whether these are all."""
    max_pairs = limits.max_entries * MAX_PAIRS_PER_ENTRY
    order = np.argsort(right.reduced_cost, kind="stable")
    sorted_cost = right.reduced_cost[order]

    def count_partners(limit: float) -> Ints:
        return np.searchsorted(sorted_cost, limit - left.reduced_cost, side="right")

    limit, is_complete = limits.max_reduced_cost, True
    count = count_partners(limit)
    while int(count.sum()) > max_pairs:
        is_complete = False
        if limit <= limits.max_reduced_cost * 2.0**-20:
            return *_evenly_spaced_pairs(len(left), len(right), max_pairs), False
        limit /= 2
        count = count_partners(limit)
    i = np.repeat(np.arange(len(left)), count)
    partner = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)
    return i, order[partner], is_complete


def _evenly_spaced_pairs(left: int, right: int, max_pairs: int) -> tuple[Ints, Ints]:
    """Return evenly spaced pairs of indices, for lists whose many pairs are equally good."""
    left_count = min(left, max(math.isqrt(max_pairs), max_pairs // right))
    i, j = _evenly_spaced(left, left_count), _evenly_spaced(right, max(1, max_pairs // left_count))
    return np.repeat(i, len(j)), np.tile(j, len(i))


def _evenly_spaced(length: int, max_count: int) -> Ints:
    if length <= max_count:
        return np.arange(length)
    return np.linspace(0, length - 1, max_count).astype(np.int64)


def _select_least_reduced_cost(reduced_cost: Floats, max_entries: int) -> Ints:
    """Return the entries of least reduced cost in their order; of equally good ones an even spread."""
    cut = np.partition(reduced_cost, max_entries)[max_entries]
    below, equal = np.flatnonzero(reduced_cost < cut), np.flatnonzero(reduced_cost == cut)
    fill = equal[_evenly_spaced(len(equal), max_entries - len(below))]
    return np.sort(np.concatenate([below, fill]))


def identical_operator_fronts(front: Front, group: int, count: int, limits: MergeLimits) -> list[Front]:
    """Return fronts whose sum is that of ``count`` identical operators, each free to choose from ``front``.

    Only the number of operators per option matters. All but a few take the reference or the deviation that loses
    least (a plain progression); the others choose freely. A few are enough once the limit admits no more other
    deviations, or once one more free operator adds nothing to the sums (by induction, no number of them does then).
    """
    assert isinstance(front.origin, SingleChoiceOrigin)
    reduced_cost = front.reduced_cost
    deviating = np.flatnonzero(front.origin.options != REFERENCE)
    if count == 1 or not len(deviating):
        return [front]
    best = min(deviating.tolist(), key=lambda at: (reduced_cost[at], -abs(int(front.weight[at]))))
    others = deviating[deviating != best]
    max_free = _max_deviating_operators(float(reduced_cost[others].min()), count, limits) if len(others) else 0
    best_only = _restrict_to_entry(front, best)
    free_front: Front | None = None
    free = 0
    while free < max_free:
        wider = front if free_front is None else add(free_front, front, limits)
        narrower = best_only if free_front is None else add(free_front, best_only, limits)
        if _dominates(narrower, wider, limits.is_branched):
            break
        free_front, free = wider, free + 1
    fronts = [] if free_front is None else [free_front]
    repeated = min(count - free, _max_deviating_operators(float(reduced_cost[best]), count, limits))
    if repeated:
        fronts.append(_repeated_option_front(group, front, best, repeated))
    return fronts


def _max_deviating_operators(reduced_cost: float, count: int, limits: MergeLimits) -> int:
    """Return how many operators can take an option of that reduced cost; one more, for rounding."""
    if reduced_cost * count <= limits.max_reduced_cost:
        return count
    return min(count, int(limits.max_reduced_cost / reduced_cost) + 1)


def _restrict_to_entry(front: Front, entry: int) -> Front:
    """Return the front of the reference and one other entry."""
    assert isinstance(front.origin, SingleChoiceOrigin)
    keep = np.flatnonzero((front.origin.options == REFERENCE) | (np.arange(len(front)) == entry))
    origin = SingleChoiceOrigin(front.origin.groups[keep], front.origin.options[keep])
    return Front(front.weight[keep], front.cost[keep], front.reduced_cost[keep], origin)


def _dominates(front: Front, other: Front, is_branched: bool) -> bool:
    """Return whether each entry of ``other`` is matched or bettered by one of ``front``."""
    at = np.searchsorted(front.weight, other.weight, side="right") - 1
    matched = (at >= 0) & (front.cost[at] <= other.cost)
    if is_branched:
        bettered = (front.weight[at] < other.weight) | (front.cost[at] < other.cost)
        matched &= bettered | (front.reduced_cost[at] <= other.reduced_cost)
    return bool(np.all(matched))


def _repeated_option_front(group: int, front: Front, entry: int, count: int) -> Front:
    """Return the front of 0 to ``count`` operators that take one option, by ascending weight."""
    assert isinstance(front.origin, SingleChoiceOrigin)
    steps = np.arange(count + 1)
    weight, cost, reduced_cost = (steps * column[entry] for column in (front.weight, front.cost, front.reduced_cost))
    ascending = Front(weight, cost, reduced_cost, IdenticalOrigin(group, int(front.origin.options[entry])))
    if front.weight[entry] > 0:
        return ascending
    # Fewer bytes for more time: the entries run backwards, as a sum, so that entry i stays "i operators".
    origin = SumOrigin(ascending, empty_front(), steps[::-1], np.zeros(count + 1, np.int64))
    return Front(weight[::-1], cost[::-1], reduced_cost[::-1], origin)


def merge_fronts(fronts: list[Front], limits: MergeLimits) -> tuple[Front, Front]:
    """Add the two shortest fronts again and again until two are left.

    The last sum is left to ``best_pair``, which finds its best entry without making the others.
    """
    remaining = sorted(fronts, key=len)
    while len(remaining) > 2:
        first, second, *remaining = remaining
        merged = add(first, second, limits)
        if not merged.is_complete:
            # Nothing can be proven any more. Shorter lists find nearly as good solutions in bounded time.
            limits = replace(limits, max_entries=max(MIN_FRONT_ENTRIES, limits.max_entries // 2))
        at = next((at for at, front in enumerate(remaining) if len(front) >= len(merged)), len(remaining))
        remaining.insert(at, merged)
    left, right = (*remaining, empty_front(), empty_front())[:2]
    return left, right


def best_pair(left: Front, right: Front, capacity: int) -> tuple[int, Deviations] | None:
    """Return cost and choices of the cheapest sum within ``capacity`` bytes (of equals the lightest); None if none."""
    partner = np.searchsorted(right.weight, capacity - left.weight, side="right") - 1
    fits = np.flatnonzero(partner >= 0)
    if not len(fits):
        return None
    cost = left.cost[fits] + right.cost[partner[fits]]
    weight = left.weight[fits] + right.weight[partner[fits]]
    best = int(np.lexsort((weight, cost))[0])
    entry = int(fits[best])
    deviations = left.deviations(entry)
    for key, count in right.deviations(int(partner[entry])).items():
        deviations[key] = deviations.get(key, 0) + count
    return int(cost[best]), deviations

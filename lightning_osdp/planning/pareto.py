"""Lists of partial solutions of a multiple-choice knapsack, and the sums of such lists.

A `Front` holds what a part of the operators may deviate to from a reference solution: so many bytes more or less
(``weight``) for so much more or less time (``cost``), with everything that is worse in both left out. Times are
integers, a fixed fraction of a second, so that sums do not depend on their order and ties are exact.

At a given price of memory the reference is the cheapest solution, so each entry has an *excess*, ``cost + price *
weight >= 0``: what it loses against the linear relaxation. Excesses add up, and a solution whose excess is above the
gap between the relaxation and the best known solution is of no use. That is the one bound that keeps the lists short
(the fathoming of Horowitz and Sahni's lists by reduced costs, as in Pisinger's core algorithms for the problem).

In a branch of the search that also limits a sum of steps, the excess holds the price of the steps too. Entries are
still dropped by weight and cost alone, although the better one may have the larger excess: follow a solution of least
cost and, among these, of least weight, and no part of it can be replaced. Only of entries equal in both does the
excess have to decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Deviations = dict[tuple[int, int], int]
"""How many operators of a group take an option other than the reference: {(group, option): operators}."""

REFERENCE = -1
"""Option of a leaf's entry that does not deviate."""

SHORTEST = 1 << 10
"""Entries that a front may always keep."""

PAIRS_PER_ENTRY = 16
"""Pairs that one sum looks at, per entry that it may keep: bounds its memory."""


@dataclass(frozen=True)
class Leaf:
    """Each entry is one operator of a group that takes an option, or none that deviates."""

    groups: Ints
    options: Ints


@dataclass(frozen=True)
class Copies:
    """Entry i is i operators of a group that take the same option."""

    group: int
    option: int


@dataclass(frozen=True)
class Sum:
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
        cost: time relative to the reference, in the search's integer unit, strictly descending.
        excess: what each entry loses against the relaxation, in the same unit.
        origin: what each entry consists of.
        complete: whether nothing within the limit was left out for want of capacity.
    """

    weight: Ints
    cost: Ints
    excess: Floats
    origin: Leaf | Copies | Sum
    complete: bool = True

    def __len__(self) -> int:
        return len(self.weight)

    def deviations(self, entry: int) -> Deviations:
        """The options behind one entry."""
        found: Deviations = {}
        stack: list[tuple[Front, int]] = [(self, entry)]
        while stack:
            front, at = stack.pop()
            match front.origin:
                case Sum(left, right, left_entries, right_entries):
                    stack += [(left, int(left_entries[at])), (right, int(right_entries[at]))]
                case Copies(group, option) if at:
                    found[group, option] = found.get((group, option), 0) + at
                case Leaf(groups, options) if options[at] != REFERENCE:
                    key = (int(groups[at]), int(options[at]))
                    found[key] = found.get(key, 0) + 1
        return found


@dataclass(frozen=True)
class Limits:
    """What a round of the search looks at.

    Attributes:
        excess: entries above it are left out.
        branched: whether excesses hold more than cost and weight.
        capacity: entries that a front may keep; above it the best by excess stay and the front is not complete.
        tick: called before each sum; raises to stop the search.
    """

    excess: float
    branched: bool
    capacity: int
    tick: Callable[[], None]


def undominated(weight: Ints, cost: Ints, excess: Floats | None = None) -> Ints:
    """Indices of the entries that no other matches or betters in both, by ascending weight.

    Of equals the one of least excess, or the first where no excess is given.
    """
    # A stable sort is fast on what comes here: a few ascending runs.
    order = np.argsort(weight, kind="stable") if excess is None else np.lexsort((excess, cost, weight))
    ordered = cost[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    order = order[keep]
    # Of equal weights the cheapest came last.
    heavier = weight[order]
    keep = np.ones(len(order), dtype=bool)
    keep[:-1] = heavier[:-1] < heavier[1:]
    return np.asarray(order[keep], dtype=np.int64)


def leaf(groups: Ints, options: Ints, weight: Ints, cost: Ints, excess: Floats) -> Front:
    """The reference, or one operator of ``groups[i]`` that takes ``options[i]``."""
    # Fields filled in place: these are many small arrays, and np.append takes longer than all else here.
    columns = np.empty((4, len(weight) + 1), dtype=np.int64)
    columns[:, 0] = (0, 0, REFERENCE, REFERENCE)
    columns[0, 1:], columns[1, 1:], columns[2, 1:], columns[3, 1:] = weight, cost, groups, options
    losses = np.zeros(len(weight) + 1)
    losses[1:] = excess
    weight, cost, excess = columns[0], columns[1], losses
    keep = undominated(weight, cost, excess)
    origin = Leaf(columns[2][keep], columns[3][keep])
    return Front(weight[keep], cost[keep], excess[keep], origin)


def nothing() -> Front:
    """The reference alone."""
    none = np.zeros(0, dtype=np.int64)
    return leaf(none, none, none, none, none.astype(np.float64))


def add(left: Front, right: Front, limits: Limits) -> Front:
    """All sums of an entry of each whose excess is within the limit."""
    limits.tick()
    i, j, complete = _pairs(left, right, limits)
    weight, cost = left.weight[i] + right.weight[j], left.cost[i] + right.cost[j]
    excess = left.excess[i] + right.excess[j]
    keep = undominated(weight, cost, excess if limits.branched else None)
    if len(keep) > limits.capacity:
        keep, complete = keep[_best(excess[keep], limits.capacity)], False
    complete = complete and left.complete and right.complete
    return Front(weight[keep], cost[keep], excess[keep], Sum(left, right, i[keep], j[keep]), complete)


def _pairs(left: Front, right: Front, limits: Limits) -> tuple[Ints, Ints, bool]:
    """Pairs of entries within the excess limit, and whether these are all."""
    most = limits.capacity * PAIRS_PER_ENTRY
    order = np.argsort(right.excess, kind="stable")
    ordered = right.excess[order]

    def partners(limit: float) -> Ints:
        return np.searchsorted(ordered, limit - left.excess, side="right")

    limit, complete = limits.excess, True
    count = partners(limit)
    while int(count.sum()) > most:
        complete = False
        if limit <= limits.excess * 2.0**-20:
            return *_spread_pairs(len(left), len(right), most), False
        limit /= 2
        count = partners(limit)
    i = np.repeat(np.arange(len(left)), count)
    within = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)
    return i, order[within], complete


def _spread_pairs(left: int, right: int, most: int) -> tuple[Ints, Ints]:
    """Pairs spread evenly, where there are too many that are equally good."""
    side = math.isqrt(most)
    left_side = min(left, max(side, most // right))
    i, j = _spread(left, left_side), _spread(right, max(1, most // left_side))
    return np.repeat(i, len(j)), np.tile(j, len(i))


def _spread(length: int, count: int) -> Ints:
    """At most ``count`` indices spread evenly over ``length``."""
    if length <= count:
        return np.arange(length)
    return np.linspace(0, length - 1, count).astype(np.int64)


def _best(excess: Floats, capacity: int) -> Ints:
    """The ``capacity`` entries of least excess, in their order; of equally good ones an even spread."""
    cut = np.partition(excess, capacity)[capacity]
    below, equal = np.flatnonzero(excess < cut), np.flatnonzero(excess == cut)
    fill = equal[_spread(len(equal), capacity - len(below))]
    return np.sort(np.concatenate([below, fill]))


def copies(one: Front, group: int, count: int, limits: Limits) -> list[Front]:
    """``count`` identical operators, each free to choose from ``one``: fronts whose sum is theirs.

    Which operator takes which option does not matter, only how many take it. All but a few take the reference or the
    alternative that loses least, so that their front is a plain progression; ``general`` of them choose freely. That
    is enough when the limit admits no more deviations, or when one more free operator adds nothing to the sums
    (then, by induction, no number of them does).
    """
    assert isinstance(one.origin, Leaf)
    excess = one.excess
    deviating = np.flatnonzero(one.origin.options != REFERENCE)
    if count == 1 or not len(deviating):
        return [one]
    first = min(deviating.tolist(), key=lambda at: (excess[at], -abs(int(one.weight[at]))))
    others = deviating[deviating != first]
    free = _at_most(float(excess[others].min()), count, limits) if len(others) else 0
    pair = _only(one, first)
    general: Front | None = None
    used = 0
    while used < free:
        wider = one if general is None else add(general, one, limits)
        narrower = pair if general is None else add(general, pair, limits)
        if _covers(narrower, wider, limits.branched):
            break
        general, used = wider, used + 1
    fronts = [] if general is None else [general]
    rest = min(count - used, _at_most(float(excess[first]), count, limits))
    if rest:
        fronts.append(_progression(group, one, first, rest))
    return fronts


def _at_most(excess: float, count: int, limits: Limits) -> int:
    """How many operators can take an option of that excess; one more, for rounding."""
    return count if excess * count <= limits.excess else min(count, int(limits.excess / excess) + 1)


def _only(one: Front, entry: int) -> Front:
    """The reference and one other entry."""
    assert isinstance(one.origin, Leaf)
    keep = np.flatnonzero((one.origin.options == REFERENCE) | (np.arange(len(one)) == entry))
    return Front(
        one.weight[keep], one.cost[keep], one.excess[keep], Leaf(one.origin.groups[keep], one.origin.options[keep])
    )


def _covers(front: Front, other: Front, branched: bool) -> bool:
    """Whether each entry of ``other`` is matched or bettered by one of ``front``."""
    at = np.searchsorted(front.weight, other.weight, side="right") - 1
    matched = (at >= 0) & (front.cost[at] <= other.cost)
    if branched:
        bettered = (front.weight[at] < other.weight) | (front.cost[at] < other.cost)
        matched &= bettered | (front.excess[at] <= other.excess)
    return bool(np.all(matched))


def _progression(group: int, one: Front, entry: int, count: int) -> Front:
    """0 to ``count`` operators that take one option; kept by ascending weight."""
    assert isinstance(one.origin, Leaf)
    steps = np.arange(count + 1)
    weight, cost, excess = steps * one.weight[entry], steps * one.cost[entry], steps * one.excess[entry]
    forwards = Front(weight, cost, excess, Copies(group, int(one.origin.options[entry])))
    if one.weight[entry] > 0:
        return forwards
    # Fewer bytes for more time: the entries run backwards, by way of a sum, so that entry i stays "i operators".
    entries = Sum(forwards, nothing(), steps[::-1], np.zeros(count + 1, np.int64))
    return Front(weight[::-1], cost[::-1], excess[::-1], entries)


def total(fronts: list[Front], limits: Limits) -> tuple[Front, Front]:
    """Two fronts whose sums are those of ``fronts``, made by adding the two shortest again and again.

    The last sum is left to ``best_pair``, which finds its best entry without making the others.
    """
    remaining = sorted(fronts, key=len)
    while len(remaining) > 2:
        first, second, *remaining = remaining
        merged = add(first, second, limits)
        if not merged.complete:
            # Nothing can be proven now. Shorter lists find nearly as good solutions, in bounded time.
            limits = replace(limits, capacity=max(SHORTEST, limits.capacity // 2))
        at = next((at for at, front in enumerate(remaining) if len(front) >= len(merged)), len(remaining))
        remaining.insert(at, merged)
    left, right = (*remaining, nothing(), nothing())[:2]
    return left, right


def best_pair(left: Front, right: Front, room: int) -> tuple[int, Deviations] | None:
    """The cheapest sum of weight at most ``room``, of equals the lightest: its cost and options; None if none fits."""
    partner = np.searchsorted(right.weight, room - left.weight, side="right") - 1
    fits = np.flatnonzero(partner >= 0)
    if not len(fits):
        return None
    cost = left.cost[fits] + right.cost[partner[fits]]
    weight = left.weight[fits] + right.weight[partner[fits]]
    at = int(np.lexsort((weight, cost))[0])
    entry = int(fits[at])
    deviations = left.deviations(entry)
    for key, count in right.deviations(int(partner[entry])).items():
        deviations[key] = deviations.get(key, 0) + count
    return int(cost[at]), deviations

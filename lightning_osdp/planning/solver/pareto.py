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

MIN_FRONT_ENTRIES = 1 << 10
"""Entries that a front may always keep."""

MAX_PAIRS_PER_ENTRY = 16
"""Pairs that one sum looks at, per entry that it may keep: bounds its memory."""


@dataclass(frozen=True)
class SingleChoiceOrigin:
    """Each entry is one operator of a group that takes an option, or none that deviates."""

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
        cost: time relative to the reference, in the search's integer unit, strictly descending.
        reduced_cost: what each entry loses against the relaxation, in the same unit.
        origin: what each entry consists of.
        is_complete: whether nothing within the limit was left out for want of capacity.
    """

    weight: Ints
    cost: Ints
    reduced_cost: Floats
    origin: SingleChoiceOrigin | IdenticalOrigin | SumOrigin
    is_complete: bool = True

    def __len__(self) -> int:
        return len(self.weight)

    def deviations(self, entry: int) -> Deviations:
        """The options behind one entry."""
        found: Deviations = {}
        stack: list[tuple[Front, int]] = [(self, entry)]
        while stack:
            front, at = stack.pop()
            match front.origin:
                case SumOrigin(left, right, left_entries, right_entries):
                    stack += [(left, int(left_entries[at])), (right, int(right_entries[at]))]
                case IdenticalOrigin(group, option) if at:
                    found[group, option] = found.get((group, option), 0) + at
                case SingleChoiceOrigin(groups, options) if options[at] != REFERENCE:
                    key = (int(groups[at]), int(options[at]))
                    found[key] = found.get(key, 0) + 1
        return found


@dataclass(frozen=True)
class MergeLimits:
    """What a round of the search looks at.

    Attributes:
        max_reduced_cost: entries above it are left out.
        is_branched: whether excesses hold more than cost and weight.
        max_entries: entries that a front may keep; above it the best by excess stay and the front is not complete.
        check_deadline: called before each sum; raises to stop the search.
    """

    max_reduced_cost: float
    is_branched: bool
    max_entries: int
    check_deadline: Callable[[], None]


def pareto_entries(weight: Ints, cost: Ints, reduced_cost: Floats | None = None) -> Ints:
    """Indices of the entries that no other matches or betters in both, by ascending weight.

    Of equals the one of least excess, or the first where no excess is given.
    """
    # A stable sort is fast on what comes here: a few ascending runs.
    order = np.argsort(weight, kind="stable") if reduced_cost is None else np.lexsort((reduced_cost, cost, weight))
    ordered = cost[order]
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    order = order[keep]
    # Of equal weights the cheapest came last.
    heavier = weight[order]
    keep = np.ones(len(order), dtype=bool)
    keep[:-1] = heavier[:-1] < heavier[1:]
    return np.asarray(order[keep], dtype=np.int64)


def single_choice_front(groups: Ints, options: Ints, weight: Ints, cost: Ints, reduced_cost: Floats) -> Front:
    """The reference, or one operator of ``groups[i]`` that takes ``options[i]``."""
    # Fields filled in place: these are many small arrays, and np.append takes longer than all else here.
    columns = np.empty((4, len(weight) + 1), dtype=np.int64)
    columns[:, 0] = (0, 0, REFERENCE, REFERENCE)
    columns[0, 1:], columns[1, 1:], columns[2, 1:], columns[3, 1:] = weight, cost, groups, options
    losses = np.zeros(len(weight) + 1)
    losses[1:] = reduced_cost
    weight, cost, reduced_cost = columns[0], columns[1], losses
    keep = pareto_entries(weight, cost, reduced_cost)
    origin = SingleChoiceOrigin(columns[2][keep], columns[3][keep])
    return Front(weight[keep], cost[keep], reduced_cost[keep], origin)


def empty_front() -> Front:
    """The reference alone."""
    none = np.zeros(0, dtype=np.int64)
    return single_choice_front(none, none, none, none, none.astype(np.float64))


def add(left: Front, right: Front, limits: MergeLimits) -> Front:
    """All sums of an entry of each whose excess is within the limit."""
    limits.check_deadline()
    i, j, complete = _pairs_within_limit(left, right, limits)
    weight, cost = left.weight[i] + right.weight[j], left.cost[i] + right.cost[j]
    excess = left.reduced_cost[i] + right.reduced_cost[j]
    keep = pareto_entries(weight, cost, excess if limits.is_branched else None)
    if len(keep) > limits.max_entries:
        keep, complete = keep[_select_least_reduced_cost(excess[keep], limits.max_entries)], False
    complete = complete and left.is_complete and right.is_complete
    return Front(weight[keep], cost[keep], excess[keep], SumOrigin(left, right, i[keep], j[keep]), complete)


def _pairs_within_limit(left: Front, right: Front, limits: MergeLimits) -> tuple[Ints, Ints, bool]:
    """Pairs of entries within the excess limit, and whether these are all."""
    most = limits.max_entries * MAX_PAIRS_PER_ENTRY
    order = np.argsort(right.reduced_cost, kind="stable")
    ordered = right.reduced_cost[order]

    def count_partners(limit: float) -> Ints:
        return np.searchsorted(ordered, limit - left.reduced_cost, side="right")

    limit, complete = limits.max_reduced_cost, True
    count = count_partners(limit)
    while int(count.sum()) > most:
        complete = False
        if limit <= limits.max_reduced_cost * 2.0**-20:
            return *_evenly_spaced_pairs(len(left), len(right), most), False
        limit /= 2
        count = count_partners(limit)
    i = np.repeat(np.arange(len(left)), count)
    within = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)
    return i, order[within], complete


def _evenly_spaced_pairs(left: int, right: int, max_pairs: int) -> tuple[Ints, Ints]:
    """Pairs spread evenly, where there are too many that are equally good."""
    side = math.isqrt(max_pairs)
    left_side = min(left, max(side, max_pairs // right))
    i, j = _evenly_spaced(left, left_side), _evenly_spaced(right, max(1, max_pairs // left_side))
    return np.repeat(i, len(j)), np.tile(j, len(i))


def _evenly_spaced(length: int, count: int) -> Ints:
    """At most ``world_size`` indices spread evenly over ``length``."""
    if length <= count:
        return np.arange(length)
    return np.linspace(0, length - 1, count).astype(np.int64)


def _select_least_reduced_cost(reduced_cost: Floats, max_entries: int) -> Ints:
    """The ``max_entries`` entries of least excess, in their order; of equally good ones an even spread."""
    cut = np.partition(reduced_cost, max_entries)[max_entries]
    below, equal = np.flatnonzero(reduced_cost < cut), np.flatnonzero(reduced_cost == cut)
    fill = equal[_evenly_spaced(len(equal), max_entries - len(below))]
    return np.sort(np.concatenate([below, fill]))


def identical_operator_fronts(front: Front, group: int, count: int, limits: MergeLimits) -> list[Front]:
    """``world_size`` identical operators, each free to choose from ``front``: fronts whose sum is theirs.

    Which operator takes which option does not matter, only how many take it. All but a few take the reference or the
    alternative that loses least, so that their front is a plain progression; ``general`` of them choose freely. That
    is enough when the limit admits no more deviations, or when one more free operator adds nothing to the sums
    (then, by induction, no number of them does).
    """
    assert isinstance(front.origin, SingleChoiceOrigin)
    excess = front.reduced_cost
    deviating = np.flatnonzero(front.origin.options != REFERENCE)
    if count == 1 or not len(deviating):
        return [front]
    first = min(deviating.tolist(), key=lambda at: (excess[at], -abs(int(front.weight[at]))))
    others = deviating[deviating != first]
    free = _max_deviating_operators(float(excess[others].min()), count, limits) if len(others) else 0
    pair = _restrict_to_entry(front, first)
    general: Front | None = None
    used = 0
    while used < free:
        wider = front if general is None else add(general, front, limits)
        narrower = pair if general is None else add(general, pair, limits)
        if _dominates(narrower, wider, limits.is_branched):
            break
        general, used = wider, used + 1
    fronts = [] if general is None else [general]
    rest = min(count - used, _max_deviating_operators(float(excess[first]), count, limits))
    if rest:
        fronts.append(_repeated_option_front(group, front, first, rest))
    return fronts


def _max_deviating_operators(reduced_cost: float, count: int, limits: MergeLimits) -> int:
    """How many operators can take an option of that excess; one more, for rounding."""
    return (
        count
        if reduced_cost * count <= limits.max_reduced_cost
        else min(count, int(limits.max_reduced_cost / reduced_cost) + 1)
    )


def _restrict_to_entry(front: Front, entry: int) -> Front:
    """The reference and one other entry."""
    assert isinstance(front.origin, SingleChoiceOrigin)
    keep = np.flatnonzero((front.origin.options == REFERENCE) | (np.arange(len(front)) == entry))
    return Front(
        front.weight[keep],
        front.cost[keep],
        front.reduced_cost[keep],
        SingleChoiceOrigin(front.origin.groups[keep], front.origin.options[keep]),
    )


def _dominates(front: Front, other: Front, is_branched: bool) -> bool:
    """Whether each entry of ``other_bytes`` is matched or bettered by one of ``front``."""
    at = np.searchsorted(front.weight, other.weight, side="right") - 1
    matched = (at >= 0) & (front.cost[at] <= other.cost)
    if is_branched:
        bettered = (front.weight[at] < other.weight) | (front.cost[at] < other.cost)
        matched &= bettered | (front.reduced_cost[at] <= other.reduced_cost)
    return bool(np.all(matched))


def _repeated_option_front(group: int, front: Front, entry: int, count: int) -> Front:
    """0 to ``world_size`` operators that take one option; kept by ascending weight."""
    assert isinstance(front.origin, SingleChoiceOrigin)
    steps = np.arange(count + 1)
    weight, cost, excess = steps * front.weight[entry], steps * front.cost[entry], steps * front.reduced_cost[entry]
    forwards = Front(weight, cost, excess, IdenticalOrigin(group, int(front.origin.options[entry])))
    if front.weight[entry] > 0:
        return forwards
    # Fewer bytes for more time: the entries run backwards, by way of a sum, so that entry i stays "i operators".
    entries = SumOrigin(forwards, empty_front(), steps[::-1], np.zeros(count + 1, np.int64))
    return Front(weight[::-1], cost[::-1], excess[::-1], entries)


def merge_fronts(fronts: list[Front], limits: MergeLimits) -> tuple[Front, Front]:
    """Two fronts whose sums are those of ``build_fronts``, made by adding the two shortest again and again.

    The last sum is left to ``best_pair``, which finds its best entry without making the others.
    """
    remaining = sorted(fronts, key=len)
    while len(remaining) > 2:
        first, second, *remaining = remaining
        merged = add(first, second, limits)
        if not merged.is_complete:
            # Nothing can be proven now. Shorter lists find nearly as good solutions, in bounded time.
            limits = replace(limits, max_entries=max(MIN_FRONT_ENTRIES, limits.max_entries // 2))
        at = next((at for at, front in enumerate(remaining) if len(front) >= len(merged)), len(remaining))
        remaining.insert(at, merged)
    left, right = (*remaining, empty_front(), empty_front())[:2]
    return left, right


def best_pair(left: Front, right: Front, capacity: int) -> tuple[int, Deviations] | None:
    """The cheapest sum of weight at most ``max_entries``, of equals the lightest: its cost and options; None if none fits."""
    partner = np.searchsorted(right.weight, capacity - left.weight, side="right") - 1
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

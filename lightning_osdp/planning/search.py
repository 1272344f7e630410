"""The search: one option for each operator, the least time that fits into the memory. Exact, with a proof.

    minimise    sum_i time_s(i, x_i)
    subject to  sum_i resident_bytes(i, x_i) + max_i transient_bytes(i, x_i) <= budget_bytes

The paper (arXiv 2209.13258, section 3.2, algorithm 1) walks this depth first. Here it is solved as what it is, a
multiple-choice knapsack problem with one maximum in its constraint:

1. Operators with the same menu form a group: what counts is how many of them take each option (``relaxation.py``).
2. The maximum is enumerated: with the *cap* T, options of a larger transient are out and ``budget - T`` is left. Some
   caps are solved, most are fathomed by their Lagrangian bound, which one pass yields for all caps at once.
3. At one cap the linear relaxation is a greedy walk along the lower convex hulls of the menus (Sinha and Zoltners
   1979). It yields a lower bound, a price of memory, and a solution that is optimal but for a part of one operator.
4. Solutions better than the best known lose little against the relaxation at that price (their *excess*). So only
   options of small excess are combined, in Pareto lists (``pareto.py``), the last two of which are searched without
   being multiplied out (Horowitz and Sahni 1974). The excess allowed starts small and grows: a round that finds a
   solution within it has found the optimum of its cap, one that finds none has raised the cap's lower bound.
5. Where that takes too long lists, the relaxation is made stronger by branching (``branching.py``).

The cap of the least lower bound is always taken next, until no bound is below the best solution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.branching import Side, branch
from lightning_osdp.planning.nodes import FIRST_CAPACITY, Found, Node, polish, rounded
from lightning_osdp.planning.pareto import Floats, Ints, Limits, best_pair, total
from lightning_osdp.planning.relaxation import NONE_BYTES, NONE_COST, Option, Table, relax, table_of

TOLERANCE = 5e-13
"""Relative: solutions that are better by less than this are not looked for."""

PROVEN = 1e-9
"""Relative: once lists have to be cut, a solution this close to the bound counts as optimal."""

UNITS_LOG2 = 58
"""Times become integers, 2**58 of them for the most that any option may add to its operator's fastest. Sums are exact
then, and do not depend on their order; rounding n operators moves a sum by at most n * 2**-59 of that."""

SMALL_TABLE = 256
"""Options of all groups up to which a relaxation takes longer to set up than what a better start would save."""

POLISHES = 4
"""How often a solution is polished, if it gains each time."""

WORTH_BRANCHING = 0.05
"""The part of the gap that a branch has to close."""

LAST_CAPACITY = 1 << 21
"""Entries per front at which the search gives up proving (a quarter of a GiB)."""

CLOSE = 1e-7
"""Relative: a gap below which it gives up at an eighth of that."""

__all__ = ["FrontierPoint", "Option", "Solution", "frontier", "solve"]


@dataclass(frozen=True)
class Solution:
    """The best options found.

    Attributes:
        choices: index into each operator's menu.
        time_s: sum of their times.
        peak_bytes: sum of their resident bytes plus the largest of their transients.
        bound_s: no solution takes less (to a relative 1e-12); at most ``time_s``.
        optimal: whether the search finished, rather than stop at the time limit or at lists too long to hold. Then
            ``bound_s`` equals ``time_s``; only where lists of millions would have been needed to prove that may it be
            lower, by a relative 1e-9 at most.
        price_s_per_byte: seconds that one more byte of budget would save, by the linear relaxation; 0 where every
            operator has its fastest option.
    """

    choices: tuple[int, ...]
    time_s: float
    peak_bytes: int
    bound_s: float
    optimal: bool
    price_s_per_byte: float = 0.0


class FrontierPoint(NamedTuple):
    """The least time that fits into a budget, and the peak it takes."""

    budget_bytes: int
    time_s: float
    peak_bytes: int


def solve(
    menus: Sequence[Sequence[Option]],
    budget_bytes: int,
    *,
    counts: Sequence[int] | None = None,
    time_limit_s: float | None = None,
) -> Solution:
    """The options of least total time whose peak is within the budget.

    The same arguments give the same choices (with a time limit: if it is not reached). Of solutions that take the
    same time, one of the smaller peak is preferred where both come up; among identical operators the lower options
    go to the earlier ones.

    Args:
        menus: the options of each operator.
        budget_bytes: for resident and transient bytes together.
        counts: how many operators have each menu, each number at least 1; None for one each. The operators of one
            menu come one after the other in ``Solution.choices``.
        time_limit_s: seconds after which the best solution so far is returned, with its bound; None for no limit.

    Raises:
        InfeasibleError: no choice fits.
        ValueError: a menu is empty, or a time or a number of bytes is negative, not finite or too large.
    """
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    if not menus:
        if budget_bytes < 0:
            raise InfeasibleError("the budget is negative", needed_bytes=0, budget_bytes=budget_bytes)
        return Solution((), 0.0, 0, 0.0, True)
    return _solve(table_of(menus, counts), budget_bytes, deadline)


def frontier(menus: Sequence[Sequence[Option]], *, points: int = 32) -> tuple[FrontierPoint, ...]:
    """The least time at a row of budgets, from the smallest that is feasible to the first at which all is fastest.

    The budgets are those at which the linear relaxation changes the operator it spends on (the breakpoints of its
    convex, piecewise linear time), thinned evenly to ``points``; each is solved exactly. Points that take no less
    time than one of a smaller budget are left out, so time falls strictly. Between two points the true frontier is a
    staircase that this does not draw.

    Raises:
        ValueError: as ``solve``, or ``points`` is less than 2.
    """
    if points < 2:
        raise ValueError(f"a frontier has at least 2 points, not {points}")
    if not menus:
        return (FrontierPoint(0, 0.0, 0),)
    table = table_of(menus)
    caps = table.caps[table.caps >= table.least_cap]
    least = int(table.needs(caps).min())
    most = _least_fast_peak(table)[0]
    inner = table.breakpoints(int(table.caps[-1]))
    inner = inner[(inner > least) & (inner < most)]
    thinned = inner[np.unique(np.linspace(0, len(inner) - 1, points - 2).astype(int))] if len(inner) else inner
    found: list[FrontierPoint] = []
    for budget in sorted({least, *thinned.tolist(), most}):
        solution = _solve(table, budget, math.inf)
        if not found or solution.time_s < found[-1].time_s:
            found.append(FrontierPoint(budget, solution.time_s, solution.peak_bytes))
    return tuple(found)


COARSE = 1e-3
"""If the best solution takes a smaller share of the first one's time than this, its units were too coarse."""

LEAST_S = 1e-290
"""Seconds that are not told apart: fractions of them are beyond what a double can hold."""


class _OutOfTimeError(Exception):
    """The time limit has passed."""


def _solve(table: Table, budget_bytes: int, deadline: float) -> Solution:
    caps = table.caps[table.caps >= table.least_cap]
    needs = table.needs(caps)
    if int(needs.min()) > budget_bytes:
        raise _infeasible(table, int(needs.min()), budget_bytes)
    fastest = _fastest(table, budget_bytes)
    if fastest is not None:
        return _finish(table, fastest)
    caps = caps[needs <= budget_bytes]
    first = _first(table, caps, budget_bytes)
    while first.cost > max(TOLERANCE * table.least_s, LEAST_S):
        search = _Search(table, caps, budget_bytes, first, deadline)
        finished = search.run()
        cost_s = _above_fastest_s(table, search.best)
        if not finished or cost_s > COARSE * first.cost:
            return _finish(table, search.best, search.bound_s, optimal=finished)
        first = replace(search.best, cost=cost_s)  # once more, in units that tell such times apart
    return _finish(table, first)


def _above_fastest_s(table: Table, found: Found) -> float:
    """Seconds that a solution takes more than every operator's fastest option."""
    times = table.time_s[np.arange(len(table.count)), found.reference] * table.count
    more = (
        count * (table.time_s[row, option] - table.time_s[row, found.reference[row]])
        for (row, option), count in found.deviations.items()
    )
    return math.fsum([*times.tolist(), *more])


def _infeasible(table: Table, needed: int, budget: int) -> InfeasibleError:
    smallest = [min(option.resident_bytes + option.transient_bytes for option in menu) for menu in table.menus]
    largest = table.members[int(np.argmax(smallest))][0]
    return InfeasibleError(
        f"nothing fits into {budget:,} bytes: at least {needed:,} are needed. The operator that needs the most is "
        f"number {largest}, at least {max(smallest):,} bytes",
        needed_bytes=needed,
        budget_bytes=budget,
        largest=largest,
    )


def _least_fast_peak(table: Table) -> tuple[int, int]:
    """The least peak with every operator at its fastest, and the cap that it takes."""
    fast = table.time_s == 0
    least_cap = int(np.where(fast, table.transient, NONE_BYTES).min(axis=1).max())
    caps = table.caps[table.caps >= least_cap]
    peaks = table.least_sums(np.where(fast, table.weight, NONE_BYTES), caps) + table.least_bytes + caps
    at = int(peaks.argmin())
    return int(peaks[at]), int(caps[at])


def _fastest(table: Table, budget_bytes: int) -> Found | None:
    """Every operator at its fastest, with the least peak that this can have; None if that is above the budget."""
    peak, cap = _least_fast_peak(table)
    if peak > budget_bytes:
        return None
    fast = (table.time_s == 0) & (table.transient <= cap)
    return Found(0.0, np.where(fast, table.weight, NONE_BYTES).argmin(axis=1), {}, 0.0)


def _first(table: Table, caps: Ints, budget_bytes: int) -> Found:
    """A good solution to start from: the best of the rounded relaxations at a few caps. Its cost is in seconds."""
    found: list[Found] = []
    looks = 5 if table.time_s.size > SMALL_TABLE else 1
    for cap in np.unique(caps[np.linspace(0, len(caps) - 1, looks).astype(int)]).tolist():
        room = budget_bytes - cap - table.least_bytes
        relaxed = relax(table, table.time_s, table.transient <= cap, room)
        assert relaxed is not None, "the caps are those that something fits under"
        found.append(rounded(relaxed, 1.0))
    return min(found, key=lambda solution: solution.cost)


class _Search:
    """Best first over the caps; costs are in integer units, above the sum of the operators' fastest."""

    def __init__(self, table: Table, caps: Ints, budget_bytes: int, first: Found, deadline: float) -> None:
        self.table = table
        self.caps = caps
        self.room = budget_bytes - table.least_bytes - caps
        self.deadline = deadline
        self.unit_s = math.ldexp(first.cost, -UNITS_LOG2)
        # An option that alone adds more than the first solution does in all is in no better one.
        self.useful = table.time_s <= first.cost
        scaled = np.ldexp(np.where(self.useful, table.time_s, 0.0) / first.cost, UNITS_LOG2)
        self.cost: Ints = np.rint(scaled).astype(np.int64)
        self.float_cost: Floats = np.where(self.useful, self.cost.astype(np.float64), NONE_COST)
        self.best = Found(float(1 << UNITS_LOG2), first.reference, first.deviations, first.price_s_per_byte)
        self.tolerance = TOLERANCE * (first.cost + table.least_s) / self.unit_s
        self.bounds: Floats = np.zeros(len(caps))
        self.nodes: dict[int, Node] = {}

    @property
    def bound_s(self) -> float:
        """No solution takes less; infinite if none takes less than the best."""
        bound = float(self.bounds.min())
        return self.table.least_s + bound * self.unit_s if bound < self.target else math.inf

    @property
    def gap(self) -> float:
        """Relative to what the best solution takes in all."""
        return (self.best.cost - float(self.bounds.min())) * TOLERANCE / self.tolerance

    @property
    def target(self) -> float:
        """What a solution has to be below to be better than the best."""
        return self.best.cost - self.tolerance

    def run(self) -> bool:
        """Whether the search came to its end."""
        try:
            while self.bounds[at := int(self.bounds.argmin())] < self.target:
                self.tick()
                node = self.nodes.get(at)
                if node is None:
                    self._open(at)
                elif node.capacity > FIRST_CAPACITY and self.gap <= PROVEN:
                    return True
                elif node.capacity > LAST_CAPACITY or (node.capacity == LAST_CAPACITY and self.gap <= CLOSE):
                    return False
                else:
                    self._round(at, node)
        except _OutOfTimeError:
            return False
        return True

    def tick(self) -> None:
        """Raises _OutOfTimeError after the deadline."""
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError

    def _offer(self, found: Found) -> None:
        if found.cost < self.best.cost:
            self.best = found

    def _open(self, at: int) -> None:
        """Relaxes one cap, and bounds all others at its price."""
        cap, room = int(self.caps[at]), int(self.room[at])
        admitted = self.useful & (self.table.transient <= cap)
        relaxed = relax(self.table, self.cost, admitted, room)
        if relaxed is None:
            self.bounds[at] = math.inf
            return
        self._offer(rounded(relaxed, self.unit_s))
        others = self.table.lagrangian(self.float_cost, relaxed.price, self.caps, self.room)
        self.bounds[: len(self.caps)] = np.maximum(self.bounds[: len(self.caps)], others)
        self._enter(at, self._node(admitted, room, Side(relaxed, None, 0, relaxed.bound), relaxed.price * self.unit_s))

    def _node(self, admitted: NDArray[np.bool_], room: int, side: Side, price_s_per_byte: float) -> Node:
        return Node(self.table, self.cost, admitted, room, side, price_s_per_byte)

    def _enter(self, at: int, node: Node) -> None:
        """Makes a first guess at a node and bounds it."""
        self._offer(node.found(*node.best_two()))
        node.narrow(self.target)
        self.nodes[at] = node
        self.bounds[at] = max(float(self.bounds[at]), node.bound)

    def _branch(self, at: int, node: Node) -> bool:
        """Polishes the best solution of a node, and parts the node in two, if that raises its bound."""
        found = node.best
        for _ in range(POLISHES):
            found = polish(self.table, self.cost, node, found, self.unit_s, self.tick) if found is not None else None
            if found is not None:
                self._offer(found)
        sides = branch(self.table, self.cost, node.admitted, node.room, node.relaxed)
        if not sides or min(side.bound for side in sides) < node.bound + (self.target - node.bound) * WORTH_BRANCHING:
            node.whole = True
            return False
        self.bounds[at] = math.inf
        for side in sides:
            self.bounds = np.append(self.bounds, side.bound)
            self._enter(len(self.bounds) - 1, self._node(node.admitted, node.room, side, node.price_s_per_byte))
        return True

    def _round(self, at: int, node: Node) -> None:
        """Combines the options of small excess at one cap; raises its bound, or allows more in the next round."""
        node.narrow(self.target)
        gap = self.target - node.bound
        if gap <= 0:
            self.bounds[at] = math.inf
            return
        limits = Limits(node.allowed(self.table.count, gap), node.branched, node.capacity, self.tick)
        left, right = total(node.fronts(self.table.count, limits), limits)
        pair = best_pair(left, right, node.left)
        value = math.inf
        if pair is not None:
            value = node.cost + pair[0]
            self._offer(node.found(*pair))
        if not (left.complete and right.complete):
            if node.whole or not self._branch(at, node):
                node.capacity *= 8
        elif limits.excess >= gap or value <= node.bound + limits.excess:
            self.bounds[at] = math.inf
        else:
            self.bounds[at] = max(float(self.bounds[at]), node.bound + limits.excess)
            node.deviations += node.deviations // 2


def _finish(table: Table, found: Found, bound_s: float = math.inf, *, optimal: bool = True) -> Solution:
    """The choices of each operator."""
    taken = [{option: len(members)} for option, members in zip(found.reference.tolist(), table.members, strict=True)]
    for (row, option), count in found.deviations.items():
        taken[row][option] = taken[row].get(option, 0) + count
        taken[row][int(found.reference[row])] -= count
    choices = [0] * int(table.count.sum())
    times: list[float] = []
    resident = transient = 0
    for row, (members, menu) in enumerate(zip(table.members, table.menus, strict=True)):
        counts = sorted((int(table.option[row, at]), count) for at, count in taken[row].items() if count)
        options = [option for option, count in counts for _ in range(count)]
        for member, option in zip(members, options, strict=True):
            choices[member] = option
        for option, count in counts:
            times += [menu[option].time_s] * count
            resident += int(menu[option].resident_bytes) * count
            transient = max(transient, int(menu[option].transient_bytes))
    time_s = math.fsum(times)
    return Solution(
        choices=tuple(choices),
        time_s=time_s,
        peak_bytes=resident + transient,
        bound_s=min(bound_s, time_s),
        optimal=optimal,
        price_s_per_byte=found.price_s_per_byte,
    )

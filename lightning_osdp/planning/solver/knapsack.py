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
from lightning_osdp.planning.solver.branching import BranchSide, branch
from lightning_osdp.planning.solver.node import INITIAL_MAX_ENTRIES, Incumbent, Node, four_swap_search, round_relaxation
from lightning_osdp.planning.solver.pareto import Floats, Ints, MergeLimits, best_pair, merge_fronts
from lightning_osdp.planning.solver.relaxation import (
    EXCLUDED_COST,
    PADDING_BYTES,
    Option,
    OptionTable,
    build_table,
    solve_relaxation,
)

RELATIVE_TOLERANCE = 5e-13
"""Relative: solutions that are better by less than this are not looked for."""

OPTIMALITY_TOLERANCE = 1e-9
"""Relative: once lists have to be cut, a solution this close to the bound counts as optimal."""

COST_UNITS_LOG2 = 58
"""Times become integers, 2**58 of them for the most that any option may add to its operator's fastest. Sums are exact
then, and do not depend on their order; rounding n operators moves a sum by at most n * 2**-59 of that."""

SMALL_TABLE = 256
"""Options of all groups up to which a relaxation takes longer to set up than what a better start would save."""

MAX_FOUR_SWAP_SEARCHES = 4
"""How often a solution is polished, if it gains each time."""

MIN_GAP_CLOSED = 0.05
"""The part of the gap that a branch has to close."""

MAX_FRONT_ENTRIES = 1 << 21
"""Entries per front at which the search gives up proving (a quarter of a GiB)."""

EARLY_STOP_TOLERANCE = 1e-7
"""Relative: a gap below which it gives up at an eighth of that."""

__all__ = ["BudgetPoint", "Option", "Solution", "solve", "solve_frontier"]


@dataclass(frozen=True)
class Solution:
    """The best options found.

    Attributes:
        choices: index into each operator's menu.
        time_s: sum of their times.
        peak_bytes: sum of their resident bytes plus the largest of their transients.
        lower_bound_s: no solution takes less (to a relative 1e-12); at most ``time_s``.
        optimal: whether the search finished, rather than stop at the time limit or at lists too long to hold. Then
            ``lower_bound_s`` equals ``time_s``; only where lists of millions would have been needed to prove that may it be
            lower, by a relative 1e-9 at most.
        memory_shadow_price: seconds that one more byte of budget would save, by the linear relaxation; 0 where every
            operator has its fastest option.
    """

    choices: tuple[int, ...]
    time_s: float
    peak_bytes: int
    lower_bound_s: float
    optimal: bool
    memory_shadow_price: float = 0.0


class BudgetPoint(NamedTuple):
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
    return _solve(build_table(menus, counts), budget_bytes, deadline)


def solve_frontier(menus: Sequence[Sequence[Option]], *, points: int = 32) -> tuple[BudgetPoint, ...]:
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
        return (BudgetPoint(0, 0.0, 0),)
    table = build_table(menus)
    caps = table.transient_caps[table.transient_caps >= table.min_transient_cap]
    least = int(table.min_peak_bytes(caps).min())
    most = _min_peak_all_fastest(table)[0]
    inner = table.breakpoints(int(table.transient_caps[-1]))
    inner = inner[(inner > least) & (inner < most)]
    thinned = inner[np.unique(np.linspace(0, len(inner) - 1, points - 2).astype(int))] if len(inner) else inner
    found: list[BudgetPoint] = []
    for budget in sorted({least, *thinned.tolist(), most}):
        solution = _solve(table, budget, math.inf)
        if not found or solution.time_s < found[-1].time_s:
            found.append(BudgetPoint(budget, solution.time_s, solution.peak_bytes))
    return tuple(found)


MIN_INCUMBENT_RATIO = 1e-3
"""If the best solution takes a smaller share of the first one's time than this, its units were too coarse."""

MIN_DISTINCT_S = 1e-290
"""Seconds that are not told apart: fractions of them are beyond what a double can hold."""


class _OutOfTimeError(Exception):
    """The time limit has passed."""


def _solve(table: OptionTable, budget_bytes: int, deadline: float) -> Solution:
    caps = table.transient_caps[table.transient_caps >= table.min_transient_cap]
    needs = table.min_peak_bytes(caps)
    if int(needs.min()) > budget_bytes:
        raise _infeasible_error(table, int(needs.min()), budget_bytes)
    fastest = _all_fastest(table, budget_bytes)
    if fastest is not None:
        return _to_solution(table, fastest)
    caps = caps[needs <= budget_bytes]
    first = _initial_incumbent(table, caps, budget_bytes)
    while first.cost > max(RELATIVE_TOLERANCE * table.min_time_s, MIN_DISTINCT_S):
        search = _BranchAndBound(table, caps, budget_bytes, first, deadline)
        finished = search.run()
        cost_s = _extra_time_s(table, search.incumbent)
        if not finished or cost_s > MIN_INCUMBENT_RATIO * first.cost:
            return _to_solution(table, search.incumbent, search.lower_bound_s, optimal=finished)
        first = replace(search.incumbent, cost=cost_s)  # once more, in units that tell such times apart
    return _to_solution(table, first)


def _extra_time_s(table: OptionTable, incumbent: Incumbent) -> float:
    """Seconds that a solution takes more than every operator's fastest option."""
    times = table.time_s[np.arange(len(table.count)), incumbent.reference] * table.count
    more = (
        count * (table.time_s[row, option] - table.time_s[row, incumbent.reference[row]])
        for (row, option), count in incumbent.deviations.items()
    )
    return math.fsum([*times.tolist(), *more])


def _infeasible_error(table: OptionTable, needed: int, budget: int) -> InfeasibleError:
    smallest = [min(option.resident_bytes + option.transient_bytes for option in menu) for menu in table.menus]
    largest = table.members[int(np.argmax(smallest))][0]
    return InfeasibleError(
        f"nothing fits into {budget:,} bytes: at least {needed:,} are needed. The operator that needs the most is "
        f"number {largest}, at least {max(smallest):,} bytes",
        needed_bytes=needed,
        budget_bytes=budget,
        largest=largest,
    )


def _min_peak_all_fastest(table: OptionTable) -> tuple[int, int]:
    """The least peak with every operator at its fastest, and the cap that it takes."""
    fast = table.time_s == 0
    least_cap = int(np.where(fast, table.transient, PADDING_BYTES).min(axis=1).max())
    caps = table.transient_caps[table.transient_caps >= least_cap]
    peaks = table.min_sums(np.where(fast, table.extra_bytes, PADDING_BYTES), caps) + table.min_resident_bytes + caps
    at = int(peaks.argmin())
    return int(peaks[at]), int(caps[at])


def _all_fastest(table: OptionTable, budget_bytes: int) -> Incumbent | None:
    """Every operator at its fastest, with the least peak that this can have; None if that is above the budget."""
    peak, cap = _min_peak_all_fastest(table)
    if peak > budget_bytes:
        return None
    fast = (table.time_s == 0) & (table.transient <= cap)
    return Incumbent(0.0, np.where(fast, table.extra_bytes, PADDING_BYTES).argmin(axis=1), {}, 0.0)


def _initial_incumbent(table: OptionTable, transient_caps: Ints, budget_bytes: int) -> Incumbent:
    """A good solution to start from: the best of the rounded relaxations at a few caps. Its cost is in seconds."""
    found: list[Incumbent] = []
    looks = 5 if table.time_s.size > SMALL_TABLE else 1
    for cap in np.unique(transient_caps[np.linspace(0, len(transient_caps) - 1, looks).astype(int)]).tolist():
        room = budget_bytes - cap - table.min_resident_bytes
        relaxed = solve_relaxation(table, table.time_s, table.transient <= cap, room)
        assert relaxed is not None, "the caps are those that something fits under"
        found.append(round_relaxation(relaxed, 1.0))
    return min(found, key=lambda solution: solution.cost)


class _BranchAndBound:
    """Best first over the caps; costs are in integer units, above the sum of the operators' fastest."""

    def __init__(
        self, table: OptionTable, transient_caps: Ints, budget_bytes: int, initial: Incumbent, deadline: float
    ) -> None:
        self.table = table
        self.transient_caps = transient_caps
        self.capacity = budget_bytes - table.min_resident_bytes - transient_caps
        self.deadline = deadline
        self.cost_unit_s = math.ldexp(initial.cost, -COST_UNITS_LOG2)
        # An option that alone adds more than the first solution does in all is in no better one.
        self.useful = table.time_s <= initial.cost
        scaled = np.ldexp(np.where(self.useful, table.time_s, 0.0) / initial.cost, COST_UNITS_LOG2)
        self.cost: Ints = np.rint(scaled).astype(np.int64)
        self.float_cost: Floats = np.where(self.useful, self.cost.astype(np.float64), EXCLUDED_COST)
        self.incumbent = Incumbent(
            float(1 << COST_UNITS_LOG2), initial.reference, initial.deviations, initial.memory_shadow_price
        )
        self.tolerance = RELATIVE_TOLERANCE * (initial.cost + table.min_time_s) / self.cost_unit_s
        self.lower_bounds: Floats = np.zeros(len(transient_caps))
        self.nodes: dict[int, Node] = {}

    @property
    def lower_bound_s(self) -> float:
        """No solution takes less; infinite if none takes less than the best."""
        bound = float(self.lower_bounds.min())
        return self.table.min_time_s + bound * self.cost_unit_s if bound < self.cutoff else math.inf

    @property
    def gap(self) -> float:
        """Relative to what the best solution takes in all."""
        return (self.incumbent.cost - float(self.lower_bounds.min())) * RELATIVE_TOLERANCE / self.tolerance

    @property
    def cutoff(self) -> float:
        """What a solution has to be below to be better than the best."""
        return self.incumbent.cost - self.tolerance

    def run(self) -> bool:
        """Whether the search came to its end."""
        try:
            while self.lower_bounds[at := int(self.lower_bounds.argmin())] < self.cutoff:
                self.check_deadline()
                node = self.nodes.get(at)
                if node is None:
                    self._relax_cap(at)
                elif node.max_entries > INITIAL_MAX_ENTRIES and self.gap <= OPTIMALITY_TOLERANCE:
                    return True
                elif node.max_entries > MAX_FRONT_ENTRIES or (
                    node.max_entries == MAX_FRONT_ENTRIES and self.gap <= EARLY_STOP_TOLERANCE
                ):
                    return False
                else:
                    self._expand(at, node)
        except _OutOfTimeError:
            return False
        return True

    def check_deadline(self) -> None:
        """Raises _OutOfTimeError after the deadline."""
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError

    def _update_incumbent(self, incumbent: Incumbent) -> None:
        if incumbent.cost < self.incumbent.cost:
            self.incumbent = incumbent

    def _relax_cap(self, node_index: int) -> None:
        """Relaxes one cap, and bounds all others at its price."""
        cap, room = int(self.transient_caps[node_index]), int(self.capacity[node_index])
        admitted = self.useful & (self.table.transient <= cap)
        relaxed = solve_relaxation(self.table, self.cost, admitted, room)
        if relaxed is None:
            self.lower_bounds[node_index] = math.inf
            return
        self._update_incumbent(round_relaxation(relaxed, self.cost_unit_s))
        others = self.table.lagrangian_bounds(self.float_cost, relaxed.shadow_price, self.transient_caps, self.capacity)
        self.lower_bounds[: len(self.transient_caps)] = np.maximum(
            self.lower_bounds[: len(self.transient_caps)], others
        )
        self._add_node(
            node_index,
            self._create_node(
                admitted,
                room,
                BranchSide(relaxed, None, 0, relaxed.lower_bound),
                relaxed.shadow_price * self.cost_unit_s,
            ),
        )

    def _create_node(
        self, admitted: NDArray[np.bool_], capacity: int, side: BranchSide, memory_shadow_price: float
    ) -> Node:
        return Node(self.table, self.cost, admitted, capacity, side, memory_shadow_price)

    def _add_node(self, node_index: int, node: Node) -> None:
        """Makes a first guess at a node and bounds it."""
        self._update_incumbent(node.record_solution(*node.best_two_swaps()))
        node.fix_by_reduced_cost(self.cutoff)
        self.nodes[node_index] = node
        self.lower_bounds[node_index] = max(float(self.lower_bounds[node_index]), node.lower_bound)

    def _branch(self, node_index: int, node: Node) -> bool:
        """Polishes the best solution of a node, and parts the node in two, if that raises its bound."""
        found = node.best
        for _ in range(MAX_FOUR_SWAP_SEARCHES):
            found = (
                four_swap_search(self.table, self.cost, node, found, self.cost_unit_s, self.check_deadline)
                if found is not None
                else None
            )
            if found is not None:
                self._update_incumbent(found)
        sides = branch(self.table, self.cost, node.admitted, node.capacity, node.relaxation)
        if (
            not sides
            or min(side.lower_bound for side in sides)
            < node.lower_bound + (self.cutoff - node.lower_bound) * MIN_GAP_CLOSED
        ):
            node.is_leaf = True
            return False
        self.lower_bounds[node_index] = math.inf
        for side in sides:
            self.lower_bounds = np.append(self.lower_bounds, side.lower_bound)
            self._add_node(
                len(self.lower_bounds) - 1,
                self._create_node(node.admitted, node.capacity, side, node.memory_shadow_price),
            )
        return True

    def _expand(self, node_index: int, node: Node) -> None:
        """Combines the options of small excess at one cap; raises its bound, or allows more in the next round."""
        node.fix_by_reduced_cost(self.cutoff)
        gap = self.cutoff - node.lower_bound
        if gap <= 0:
            self.lower_bounds[node_index] = math.inf
            return
        limits = MergeLimits(
            node.reduced_cost_limit(self.table.count, gap), node.is_branched, node.max_entries, self.check_deadline
        )
        left, right = merge_fronts(node.build_fronts(self.table.count, limits), limits)
        pair = best_pair(left, right, node.remaining_bytes)
        value = math.inf
        if pair is not None:
            value = node.reference_cost + pair[0]
            self._update_incumbent(node.record_solution(*pair))
        if not (left.is_complete and right.is_complete):
            if node.is_leaf or not self._branch(node_index, node):
                node.max_entries *= 8
        elif limits.max_reduced_cost >= gap or value <= node.lower_bound + limits.max_reduced_cost:
            self.lower_bounds[node_index] = math.inf
        else:
            self.lower_bounds[node_index] = max(
                float(self.lower_bounds[node_index]), node.lower_bound + limits.max_reduced_cost
            )
            node.max_deviations += node.max_deviations // 2


def _to_solution(
    table: OptionTable, incumbent: Incumbent, lower_bound_s: float = math.inf, *, optimal: bool = True
) -> Solution:
    """The choices of each operator."""
    taken = [
        {option: len(members)} for option, members in zip(incumbent.reference.tolist(), table.members, strict=True)
    ]
    for (row, option), count in incumbent.deviations.items():
        taken[row][option] = taken[row].get(option, 0) + count
        taken[row][int(incumbent.reference[row])] -= count
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
        lower_bound_s=min(lower_bound_s, time_s),
        optimal=optimal,
        memory_shadow_price=incumbent.memory_shadow_price,
    )

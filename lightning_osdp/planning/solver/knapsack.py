"""The face of the solver, and its branch and bound over the transient caps; the formulas are in the package header."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.solver.branching import BranchSide, branch
from lightning_osdp.planning.solver.node import INITIAL_MAX_ENTRIES, Incumbent, Node, round_relaxation
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
"""Solutions that are better by less than this are not searched for."""

OPTIMALITY_TOLERANCE = 1e-8
"""Relative: once lists have to be cut, a solution this close to the bound counts as optimal."""

COST_UNITS_LOG2 = 58
"""Times become integers: 2**58 units for the time that the first solution adds to every operator's fastest option.
Sums are exact then and do not depend on their order; rounding n operators moves a sum by at most n * 2**-59 of that."""

MIN_INCUMBENT_RATIO = 1e-3
"""The units are made finer if the best solution adds a smaller share of the first one's time than this."""

MIN_DISTINCT_S = 1e-290
"""Seconds below which times are not told apart: a double can't hold fractions of them."""

SMALL_TABLE = 256
"""Options up to which setting up several relaxations takes longer than a better start saves."""

MIN_GAP_CLOSED = 0.05
"""Part of the gap that a branch has to close."""

MAX_FRONT_ENTRIES = 1 << 21
"""Entries per front at which the search gives up proving (a quarter of a GiB)."""

EARLY_STOP_TOLERANCE = 1e-7
"""Relative gap below which the search gives up at an eighth of these entries."""


@dataclass(frozen=True)
class Solution:
    """The best options found.

    Attributes:
        choices: index into each operator's menu.
        time_s: sum of their times.
        peak_bytes: sum of their resident bytes plus the largest of their transients.
        lower_bound_s: no solution takes less (to a relative 1e-12); at most ``time_s``.
        optimal: whether the search finished instead of stopping at lists too long to hold.
            ``lower_bound_s`` equals ``time_s`` then; only where lists of millions would have been needed to prove
            that may it be lower, by a relative 1e-8 at most.
        memory_shadow_price: seconds that one more byte of budget would save, by the linear relaxation; 0 where every
            operator has its fastest option.
    """

    choices: tuple[int, ...]
    time_s: float
    peak_bytes: int
    lower_bound_s: float
    optimal: bool
    memory_shadow_price: float = 0.0


def solve(menus: Sequence[Sequence[Option]], budget_bytes: int, *, counts: Sequence[int] | None = None) -> Solution:
    """Return the options of least total time whose peak is within the budget.

    The same arguments give the same choices. Of solutions that take the same time, one of the smaller peak is preferred
    where both come up; among identical operators the lower options go to the earlier ones.

    Args:
        menus: the options of each operator.
        budget_bytes: for resident and transient bytes together.
        counts: number of operators with each menu, at least 1 each; None for one each. The operators of one menu
            are consecutive in ``Solution.choices``.

    Raises:
        InfeasibleError: no choice fits.
        ValueError: a menu is empty, or a time or a number of bytes is negative, not finite or too large.
    """
    if not menus:
        if budget_bytes < 0:
            raise InfeasibleError("the budget is negative", needed_bytes=0, budget_bytes=budget_bytes)
        return Solution((), 0.0, 0, 0.0, True)
    table = build_table(menus, counts)
    caps = table.transient_caps
    needed_bytes = table.min_peak_bytes(caps)
    if int(needed_bytes.min()) > budget_bytes:
        raise _infeasible_error(table, int(needed_bytes.min()), budget_bytes)
    fastest = _all_fastest(table, budget_bytes)
    if fastest is not None:
        return _to_solution(table, fastest)
    caps = caps[needed_bytes <= budget_bytes]
    initial = _initial_incumbent(table, caps, budget_bytes)
    while initial.cost > max(RELATIVE_TOLERANCE * table.min_time_s, MIN_DISTINCT_S):
        search = _BranchAndBound(table, caps, budget_bytes, initial)
        finished = search.run()
        cost_s = _extra_time_s(table, search.incumbent)
        if not finished or cost_s > MIN_INCUMBENT_RATIO * initial.cost:
            return _to_solution(table, search.incumbent, search.lower_bound_s, optimal=finished)
        initial = replace(search.incumbent, cost=cost_s)  # search again in units that tell such times apart
    return _to_solution(table, initial)


def _extra_time_s(table: OptionTable, incumbent: Incumbent) -> float:
    """Return the seconds that a solution adds to every operator's fastest option."""
    times = table.time_s[np.arange(len(table.count)), incumbent.reference] * table.count
    deviations = (
        count * (table.time_s[row, option] - table.time_s[row, incumbent.reference[row]])
        for (row, option), count in incumbent.deviations.items()
    )
    return math.fsum([*times.tolist(), *deviations])


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
    """Return the least peak with every operator at its fastest, and the cap of that peak."""
    fast = table.time_s == 0
    min_cap = int(np.where(fast, table.transient, PADDING_BYTES).min(axis=1).max())
    caps = table.transient_caps[table.transient_caps >= min_cap]
    peaks = table.min_sums(np.where(fast, table.extra_bytes, PADDING_BYTES), caps) + table.min_resident_bytes + caps
    best = int(peaks.argmin())
    return int(peaks[best]), int(caps[best])


def _all_fastest(table: OptionTable, budget_bytes: int) -> Incumbent | None:
    """Return every operator at its fastest with the least such peak; None if that exceeds the budget."""
    peak, cap = _min_peak_all_fastest(table)
    if peak > budget_bytes:
        return None
    fast = (table.time_s == 0) & (table.transient <= cap)
    return Incumbent(0.0, np.where(fast, table.extra_bytes, PADDING_BYTES).argmin(axis=1), {}, 0.0)


def _initial_incumbent(table: OptionTable, transient_caps: Ints, budget_bytes: int) -> Incumbent:
    """Return the best of the rounded relaxations at a few caps; its cost is in seconds."""
    incumbents: list[Incumbent] = []
    num_caps = 5 if table.time_s.size > SMALL_TABLE else 1
    for cap in np.unique(transient_caps[np.linspace(0, len(transient_caps) - 1, num_caps).astype(int)]).tolist():
        capacity = budget_bytes - cap - table.min_resident_bytes
        relaxed = solve_relaxation(table, table.time_s, table.transient <= cap, capacity)
        assert relaxed is not None, "something fits under each of these caps"
        incumbents.append(round_relaxation(relaxed, 1.0))
    return min(incumbents, key=lambda incumbent: incumbent.cost)


class _BranchAndBound:
    """Best-first search over the caps; costs are integer units above the sum of the operators' fastest."""

    def __init__(self, table: OptionTable, transient_caps: Ints, budget_bytes: int, initial: Incumbent) -> None:
        self.table = table
        self.transient_caps = transient_caps
        self.capacity = budget_bytes - table.min_resident_bytes - transient_caps
        self.cost_unit_s = math.ldexp(initial.cost, -COST_UNITS_LOG2)
        # An option that alone adds more time than the first solution does in all is in no better solution.
        self.useful = table.time_s <= initial.cost
        scaled = np.ldexp(np.where(self.useful, table.time_s, 0.0) / initial.cost, COST_UNITS_LOG2)
        self.cost: Ints = np.rint(scaled).astype(np.int64)
        self.float_cost: Floats = np.where(self.useful, self.cost.astype(np.float64), EXCLUDED_COST)
        self.incumbent = replace(initial, cost=float(1 << COST_UNITS_LOG2))
        self.tolerance = RELATIVE_TOLERANCE * (initial.cost + table.min_time_s) / self.cost_unit_s
        self.lower_bounds: Floats = np.zeros(len(transient_caps))
        self.nodes: dict[int, Node] = {}

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no solution undercuts; infinite if none is faster than the best."""
        bound = float(self.lower_bounds.min())
        return self.table.min_time_s + bound * self.cost_unit_s if bound < self.cutoff else math.inf

    @property
    def gap(self) -> float:
        """Distance from the bound to the best solution, relative to its total time."""
        return (self.incumbent.cost - float(self.lower_bounds.min())) * RELATIVE_TOLERANCE / self.tolerance

    @property
    def cutoff(self) -> float:
        """Cost that a solution has to be below to be better than the best."""
        return self.incumbent.cost - self.tolerance

    def run(self) -> bool:
        """Search, and return whether the search finished."""
        while self.lower_bounds[index := int(self.lower_bounds.argmin())] < self.cutoff:
            node = self.nodes.get(index)
            if node is None:
                self._relax_cap(index)
            elif node.max_entries > INITIAL_MAX_ENTRIES and self.gap <= OPTIMALITY_TOLERANCE:
                return True
            elif node.max_entries > MAX_FRONT_ENTRIES or (
                node.max_entries == MAX_FRONT_ENTRIES and self.gap <= EARLY_STOP_TOLERANCE
            ):
                return False
            else:
                self._expand(index, node)
        return True

    def _update_incumbent(self, incumbent: Incumbent) -> None:
        if incumbent.cost < self.incumbent.cost:
            self.incumbent = incumbent

    def _raise_bound(self, index: int, bound: float) -> None:
        self.lower_bounds[index] = max(float(self.lower_bounds[index]), bound)

    def _relax_cap(self, index: int) -> None:
        """Relax one cap, and bound all others at its price."""
        capacity = int(self.capacity[index])
        admitted = self.useful & (self.table.transient <= self.transient_caps[index])
        relaxed = solve_relaxation(self.table, self.cost, admitted, capacity)
        if relaxed is None:
            self.lower_bounds[index] = math.inf
            return
        self._update_incumbent(round_relaxation(relaxed, self.cost_unit_s))
        bounds = self.table.lagrangian_bounds(self.float_cost, relaxed.shadow_price, self.transient_caps, self.capacity)
        caps = slice(len(self.transient_caps))
        self.lower_bounds[caps] = np.maximum(self.lower_bounds[caps], bounds)
        side = BranchSide(relaxed, None, 0, relaxed.lower_bound)
        price = relaxed.shadow_price * self.cost_unit_s
        self._add_node(index, Node(self.table, self.cost, admitted, capacity, side, price))

    def _add_node(self, index: int, node: Node) -> None:
        """Make a first guess at a node and bound it."""
        self._update_incumbent(node.to_incumbent(*node.best_two_swaps()))
        node.fix_by_reduced_cost(self.cutoff)
        self.nodes[index] = node
        self._raise_bound(index, node.lower_bound)

    def _branch(self, index: int, node: Node) -> bool:
        """Part a node in two if that raises its bound enough."""
        sides = branch(self.table, self.cost, node.admitted, node.capacity, node.relaxation)
        enough = node.lower_bound + (self.cutoff - node.lower_bound) * MIN_GAP_CLOSED
        if not sides or min(side.lower_bound for side in sides) < enough:
            node.is_leaf = True
            return False
        self.lower_bounds[index] = math.inf
        for side in sides:
            self.lower_bounds = np.append(self.lower_bounds, side.lower_bound)
            child = Node(self.table, self.cost, node.admitted, node.capacity, side, node.memory_shadow_price)
            self._add_node(len(self.lower_bounds) - 1, child)
        return True

    def _expand(self, index: int, node: Node) -> None:
        """Combine the options of small reduced cost at one node; raise its bound, or allow more in the next round."""
        node.fix_by_reduced_cost(self.cutoff)
        gap = self.cutoff - node.lower_bound
        if gap <= 0:
            self.lower_bounds[index] = math.inf
            return
        limit = node.reduced_cost_limit(self.table.count, gap)
        limits = MergeLimits(limit, node.is_branched, node.max_entries)
        left, right = merge_fronts(node.build_fronts(self.table.count, limits), limits)
        pair = best_pair(left, right, node.remaining_bytes)
        cost = math.inf
        if pair is not None:
            cost = node.reference_cost + pair[0]
            self._update_incumbent(node.to_incumbent(*pair))
        if not (left.is_complete and right.is_complete):
            if node.is_leaf or not self._branch(index, node):
                node.max_entries *= 8
        elif limit >= gap or cost <= node.lower_bound + limit:
            self.lower_bounds[index] = math.inf
        else:
            self._raise_bound(index, node.lower_bound + limit)
            node.max_deviations += node.max_deviations // 2


def _to_solution(
    table: OptionTable, incumbent: Incumbent, lower_bound_s: float = math.inf, *, optimal: bool = True
) -> Solution:
    """Return the choices of each operator."""
    groups = zip(incumbent.reference.tolist(), table.members, strict=True)
    option_counts = [{option: len(members)} for option, members in groups]
    for (row, option), count in incumbent.deviations.items():
        option_counts[row][option] = option_counts[row].get(option, 0) + count
        option_counts[row][int(incumbent.reference[row])] -= count
    choices = [0] * int(table.count.sum())
    times: list[float] = []
    resident = transient = 0
    for row, (members, menu) in enumerate(zip(table.members, table.menus, strict=True)):
        counts = sorted((int(table.option[row, at]), count) for at, count in option_counts[row].items() if count)
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

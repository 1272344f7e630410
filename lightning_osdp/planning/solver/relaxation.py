"""The menus as arrays, and the two bounds that the search lives on: the linear relaxation and Lagrange's.

Arrays of shape (groups, options) have one row for each group of operators with the same menu, its options sorted by
their transient. Times and bytes are relative to the least of the row, which makes the numbers smaller and the sums
more exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.solver.pareto import Floats, Ints

PADDING_BYTES = 1 << 61
"""Bytes of places in a row that hold no option: more than any sum of real ones."""

EXCLUDED_COST = 1e300
"""Cost of options that are out, in sums of floats."""


class Option(NamedTuple):
    """One row of an operator's menu: what it costs to keep the operator in one way."""

    time_s: float
    resident_bytes: int
    """Held all the time: these add up."""
    transient_bytes: int
    """Held only while the operator itself is at work: of these the largest counts."""


@dataclass(frozen=True)
class OptionTable:
    """All menus.

    Attributes:
        menus: of each group.
        members: the operators of each group.
        count: how many these are, (groups,).
        time_s: relative to the row's least; infinite where there is no option.
        extra_bytes: resident bytes relative to the row's least; NONE_BYTES where there is no option.
        transient: bytes, ascending along the row.
        option: index into the menu.
        min_time_s: sum over all operators of their row's least time.
        min_resident_bytes: the same of the resident bytes.
    """

    menus: tuple[tuple[Option, ...], ...]
    members: tuple[tuple[int, ...], ...]
    count: Ints
    time_s: Floats
    extra_bytes: Ints
    transient: Ints
    option: Ints
    min_time_s: float
    min_resident_bytes: int

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """Where there is an option."""
        return self.extra_bytes < PADDING_BYTES

    @cached_property
    def transient_caps(self) -> Ints:
        """The distinct transients, ascending."""
        return np.unique(self.transient[self.valid])

    @cached_property
    def min_transient_cap(self) -> int:
        """The least cap that leaves each operator an option."""
        return int(self.transient[:, 0].max())

    @cached_property
    def _later_options(self) -> tuple[Ints, Ints]:
        """The transients of all but the rows' first options, ascending, and the order that sorts them."""
        transient = self.transient[:, 1:].ravel()
        order = np.argsort(transient, kind="stable")
        return transient[order], order

    def min_sums(self, values: NDArray[Any], transient_caps: Ints) -> NDArray[Any]:
        """For each cap, the sum over all operators of the least of ``values`` among the options it admits.

        One pass for all caps: from the highest cap down, each option that drops out raises the sum by what the best
        of its row is then worse. Integers wrap around where caps admit no option in some row.
        """
        least = np.minimum.accumulate(values, axis=1)
        transients, order = self._later_options
        rises = ((least[:, :-1] - least[:, 1:]) * self.count[:, None]).ravel()[order]
        raised = np.append(np.cumsum(rises[::-1])[::-1], rises.dtype.type(0))
        sums: NDArray[Any] = (least[:, -1] * self.count).sum() + raised[
            np.searchsorted(transients, transient_caps, side="right")
        ]
        return sums

    def min_peak_bytes(self, transient_caps: Ints) -> Ints:
        """The least peak at each cap, if the cap is used: bytes."""
        return self.min_sums(self.extra_bytes, transient_caps) + self.min_resident_bytes + transient_caps

    def lagrangian_bounds(self, cost: Floats, shadow_price: float, transient_caps: Ints, capacity: Ints) -> Floats:
        """A lower bound of the cost at each cap: bytes are paid for at ``shadow_price``, those that the budget has are free.

        Args:
            cost: (groups, options), NONE_COST where an option is out.
            shadow_price: cost per byte.
            transient_caps: bytes.
            capacity: what the budget leaves at each cap above ``least_bytes``.
        """
        paid = np.where(self.valid, cost + shadow_price * self.extra_bytes, EXCLUDED_COST)
        sums = self.min_sums(paid, transient_caps)
        allowance = shadow_price * capacity
        rounding = np.finfo(np.float64).eps * (self.time_s.size + 8)
        return np.asarray(sums * (1 - rounding) - allowance * (1 + rounding), dtype=np.float64)

    def breakpoints(self, transient_cap: int) -> Ints:
        """Peaks at which the linear relaxation changes the operator it spends on, if ``transient_cap`` is used; ascending."""
        walk = compute_hulls(self.time_s, self.extra_bytes, self.valid & (self.transient <= transient_cap))
        spent = np.cumsum(walk.added_bytes[walk.order] * self.count[walk.row[walk.order]])
        start = int(np.sum(self.extra_bytes[np.arange(len(self.count)), walk.start] * self.count))
        return np.asarray(spent + (start + self.min_resident_bytes + transient_cap), dtype=np.int64)


def build_table(menus: Sequence[Sequence[Option]], counts: Sequence[int] | None = None) -> OptionTable:
    """The menus as arrays.

    Args:
        menus: of the operators.
        counts: how many operators have each menu, one after the other; None for one each.

    Raises:
        ValueError: a menu is empty, or a time or a number of bytes is negative, not finite or too large.
    """
    groups: dict[tuple[Option, ...], list[int]] = {}
    known: dict[int, list[int]] = {}  # the same menu again need not be hashed
    first = 0
    for menu, number in zip(menus, counts or [1] * len(menus), strict=True):
        members = known.get(id(menu))
        if members is None:
            members = known[id(menu)] = groups.setdefault(tuple(menu), [])
        members.extend(range(first, first + number))
        first += number
    if () in groups:
        raise ValueError(f"the menu of operator {groups[()][0]} is empty")
    count = np.array([len(members) for members in groups.values()], dtype=np.int64)
    sizes = np.array([len(menu) for menu in groups])
    valid = np.arange(sizes.max()) < sizes[:, None]
    time_s, resident, transient = (_collect_column(groups, field) for field in range(3))
    _check_bytes(resident, transient, np.repeat(count, sizes))
    rows: dict[str, NDArray[Any]] = {}
    order = np.argsort(_scatter_to_rows(transient, valid, PADDING_BYTES), axis=1, kind="stable")
    for name, values, fill in (("time_s", time_s, math.inf), ("weight", resident, PADDING_BYTES)):
        rows[name] = np.take_along_axis(_scatter_to_rows(values, valid, fill), order, axis=1)
    least_time, least_weight = rows["time_s"].min(axis=1), rows["weight"].min(axis=1)
    present = np.take_along_axis(valid, order, axis=1)
    return OptionTable(
        menus=tuple(groups),
        members=tuple(map(tuple, groups.values())),
        count=count,
        time_s=rows["time_s"] - least_time[:, None],
        extra_bytes=np.where(present, rows["weight"] - least_weight[:, None], PADDING_BYTES),
        transient=np.take_along_axis(_scatter_to_rows(transient, valid, PADDING_BYTES), order, axis=1),
        option=order,
        min_time_s=math.fsum(np.repeat(least_time, count).tolist()),
        min_resident_bytes=int(least_weight @ count),
    )


def _collect_column(groups: dict[tuple[Option, ...], list[int]], field: int) -> NDArray[Any]:
    """One field of all options of all groups, checked."""
    values = np.array([option[field] for menu in groups for option in menu])
    name = Option._fields[field]
    if values.dtype.kind not in ("iuf" if name == "time_s" else "iu"):
        raise ValueError(f"{name} has to be a number{'' if name == 'time_s' else ' of bytes below 2**61, whole'}")
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        bad = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
        ends = np.cumsum([len(menu) for menu in groups])
        operator = list(groups.values())[int(np.searchsorted(ends, bad, side="right"))][0]
        raise ValueError(f"{name} of operator {operator} is {values[bad]}: it has to be finite and not negative")
    return values.astype(np.float64 if name == "time_s" else np.int64)


def _check_bytes(resident: Ints, transient: Ints, count: Ints) -> None:
    if float(resident.astype(np.float64) @ count) + float(transient.max()) >= PADDING_BYTES / 2:
        raise ValueError("the menus hold more bytes in all than the search can add up (2**60)")


def _scatter_to_rows(values: NDArray[Any], valid: NDArray[np.bool_], fill: float) -> NDArray[Any]:
    """Values of all options one after the other, as rows."""
    rows = np.full(valid.shape, fill, dtype=values.dtype)
    rows[valid] = values
    return rows


class Hulls(NamedTuple):
    """The lower convex hulls of all rows: where each starts, and its edges.

    Attributes:
        start: option of least weight, of equals the cheapest, (rows,).
        row, origin, target, weight, saved, slope: of each edge: its row, the options at its ends, what it adds in
            weight and saves in cost, and their quotient.
        order: edges by falling slope, those of one row in their order.
    """

    start: Ints
    row: Ints
    origin: Ints
    target: Ints
    added_bytes: Ints
    saved_cost: NDArray[Any]
    slope: Floats
    order: Ints


def compute_hulls(cost: NDArray[Any], weight: Ints, valid: NDArray[np.bool_]) -> Hulls:
    """Walks all rows at once, one edge of each at a time: the next is the steepest, of equals the longest."""
    worst = np.inf if cost.dtype.kind == "f" else np.iinfo(np.int64).max
    lightest = valid & (weight == np.where(valid, weight, PADDING_BYTES).min(axis=1, keepdims=True))
    start = np.where(lightest, cost, worst).argmin(axis=1)
    rows, at = np.arange(len(start)), start
    # What is out weighs nothing, so that no edge leads to it.
    heavy, left = np.where(valid, weight, 0), np.where(valid, cost, 0)
    edges: list[tuple[NDArray[Any], ...]] = []
    last = np.full(len(start), np.inf)
    while len(rows):
        here = np.arange(len(rows))
        more = heavy - heavy[here, at][:, None]
        saved = left[here, at][:, None] - left
        slope = np.where((more > 0) & (saved > 0), saved / np.maximum(more, 1), 0.0)
        steepest = slope.max(axis=1)
        target = np.where(slope == steepest[:, None], more, -1).argmax(axis=1)
        # A hull's slopes fall; rounding must not let a later edge overtake an earlier one.
        last = np.minimum(last, steepest)
        edge = (rows, at, target, more[here, target], saved[here, target], last)
        going = steepest > 0
        if not going.all():
            edge = tuple(column[going] for column in edge)
            heavy, left = heavy[going], left[going]
        edges.append(edge)
        rows, _, at, *_, last = edge
    row, origin, target, heavier, saved, slope = (np.concatenate(column) for column in zip(*edges, strict=True))
    return Hulls(start, row, origin, target, heavier, saved, slope, np.argsort(-slope, kind="stable"))


@dataclass(frozen=True)
class Relaxation:
    """The linear relaxation at one cap.

    Attributes:
        reference: the option that each group takes, all its operators alike, (groups,).
        extra_bytes: of the reference.
        shadow_price: what the next byte saves.
        cost: of the rounded solution: the reference, but ``split_count`` of one group take another option.
        fractional_saving: what a fraction of one more operator saves in the relaxation.
        split_item: (group, option) that the next bytes would be spent on; None if nothing is left to gain.
        split_count: how many of that group take that option in the rounded solution.
        split_fraction: how much of one more does in the relaxation.
    """

    reference: Ints
    extra_bytes: int
    shadow_price: float
    cost: float
    fractional_saving: float
    split_item: tuple[int, int] | None
    split_count: int
    split_fraction: float

    @property
    def lower_bound(self) -> float:
        """The relaxation's cost: no solution is cheaper."""
        return self.cost - self.fractional_saving

    def fractional_sum(self, step_counts: Ints, count: Ints) -> float:
        """Sum of ``step_counts``, (groups, options), over the relaxation's fractional choices."""
        taken = float(step_counts[np.arange(len(count)), self.reference] @ count)
        if self.split_item is None:
            return taken
        row, target = self.split_item
        return taken + (self.split_count + self.split_fraction) * float(
            step_counts[row, target] - step_counts[row, self.reference[row]]
        )


def solve_relaxation(
    table: OptionTable, cost: NDArray[Any], admitted: NDArray[np.bool_], capacity: int
) -> Relaxation | None:
    """Spends ``max_entries`` bytes on the steepest edges of the hulls, as far as they go.

    Args:
        table: the menus.
        cost: (groups, options): seconds, or the search's integer units (sums are exact then).
        admitted: the options that may be taken.
        capacity: bytes above ``table.least_bytes``.

    Returns:
        None if the lightest options do not fit, or some group has none.
    """
    if not admitted.any(axis=1).all():
        return None
    walk = compute_hulls(cost, table.extra_bytes, admitted)
    groups = np.arange(len(table.count))
    left = capacity - int(table.extra_bytes[groups, walk.start] @ table.count)
    if left < 0:
        return None
    order = walk.order
    spent = np.cumsum(walk.added_bytes[order] * table.count[walk.row[order]])
    whole = int(np.searchsorted(spent, left, side="right"))
    reference = walk.start.copy()
    # Where an index comes up repeatedly, the last assignment holds: the edge furthest along the row.
    reference[walk.row[order[:whole]]] = walk.target[order[:whole]]
    weight = int(table.extra_bytes[groups, reference] @ table.count)
    value = exact_dot(table.count, cost[groups, reference])
    if whole == len(order):
        return Relaxation(reference, weight, 0.0, value, 0.0, None, 0, 0.0)
    edge = order[whole]
    row, price = int(walk.row[edge]), float(walk.slope[edge])
    operators, remainder = divmod(capacity - weight, int(walk.added_bytes[edge]))
    rounded = value - operators * walk.saved_cost[edge].item()
    return Relaxation(
        reference=reference,
        extra_bytes=weight,
        shadow_price=price,
        cost=rounded,
        fractional_saving=price * remainder,
        split_item=(row, int(walk.target[edge])),
        split_count=operators,
        split_fraction=remainder / int(walk.added_bytes[edge]),
    )


def hull_step_counts(table: OptionTable, cost: NDArray[Any], admitted: NDArray[np.bool_]) -> Ints:
    """How many edges of its row's hull lead to an option or to less weight, (groups, options)."""
    walk = compute_hulls(cost, table.extra_bytes, admitted)
    steps = np.zeros(cost.shape, dtype=np.int64)
    np.add.at(steps, walk.row, table.extra_bytes[walk.row] >= table.extra_bytes[walk.row, walk.target][:, None])
    return np.where(table.valid, steps, 0)


def exact_dot(count: Ints, cost: NDArray[Any]) -> float:
    """Sum of the products; exact for integers, which may add up to more than 64 bits."""
    if cost.dtype.kind == "f":
        return math.fsum((count * cost).tolist())
    return (int(count @ (cost >> 30)) << 30) + int(count @ (cost & ((1 << 30) - 1)))

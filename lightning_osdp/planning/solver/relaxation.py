"""The options as arrays, their linear relaxation, and Lagrangian bounds.

Arrays of shape (groups, options) have one row per group of operators with equal options, sorted by transient bytes.
Times and bytes are relative to the least of the row: numbers are smaller and sums more exact.
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
"""Bytes of array places that hold no option: more than any sum of real ones."""

EXCLUDED_COST = 1e300
"""Cost of excluded options, in sums of floats."""


class Option(NamedTuple):
    """One way to run an operator, and its cost."""

    time_s: float
    resident_bytes: int
    """Bytes held during the whole step: they add up over operators."""
    transient_bytes: int
    """Bytes held only while the operator runs: the largest of all operators counts."""


@dataclass(frozen=True)
class OptionTable:
    """The options of all operators as arrays.

    Attributes:
        menus: the options of each group.
        members: the operators of each group.
        count: the number of operators of each group, (groups,).
        time_s: relative to the row's least; infinite in padding.
        extra_bytes: resident bytes relative to the row's least; PADDING_BYTES in padding.
        transient: bytes, ascending along the row.
        option: index into the menu.
        min_time_s: sum over all operators of their row's least time.
        min_resident_bytes: sum over all operators of their row's least resident bytes.
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
        """True where there is an option, False in padding."""
        return self.extra_bytes < PADDING_BYTES

    @cached_property
    def transient_caps(self) -> Ints:
        """The distinct transients that leave each operator an option, ascending."""
        caps = np.unique(self.transient[self.valid])
        return np.asarray(caps[caps >= self.transient[:, 0].max()], dtype=np.int64)

    @cached_property
    def _later_options(self) -> tuple[Ints, Ints]:
        """The transients of all but the rows' first options, ascending, and the order that sorts them."""
        transient = self.transient[:, 1:].ravel()
        order = np.argsort(transient, kind="stable")
        return transient[order], order

    def min_sums(self, values: NDArray[Any], transient_caps: Ints) -> NDArray[Any]:
        """Return, for each cap, the sum over all operators of the least of ``values`` among the options it admits.

        One pass serves all caps: from the highest cap down, each option that drops out raises the sum by how much
        worse the best of its row becomes. Integers wrap around where a cap admits no option of some row.
        """
        least = np.minimum.accumulate(values, axis=1)
        transients, order = self._later_options
        rises = ((least[:, :-1] - least[:, 1:]) * self.count[:, None]).ravel()[order]
        raised = np.append(np.cumsum(rises[::-1])[::-1], rises.dtype.type(0))
        position = np.searchsorted(transients, transient_caps, side="right")
        sums: NDArray[Any] = (least[:, -1] * self.count).sum() + raised[position]
        return sums

    def min_peak_bytes(self, transient_caps: Ints) -> Ints:
        """Return the least peak in bytes at each cap, if the cap is used."""
        return self.min_sums(self.extra_bytes, transient_caps) + self.min_resident_bytes + transient_caps

    def lagrangian_bounds(self, cost: Floats, shadow_price: float, transient_caps: Ints, capacity: Ints) -> Floats:
        """Return a lower bound of the cost at each cap: bytes cost ``shadow_price``, those of the budget are free.

        Args:
            cost: (groups, options), EXCLUDED_COST where an option is excluded.
            shadow_price: cost per byte.
            transient_caps: bytes.
            capacity: bytes above ``min_resident_bytes`` that the budget leaves at each cap.
        """
        priced = np.where(self.valid, cost + shadow_price * self.extra_bytes, EXCLUDED_COST)
        sums = self.min_sums(priced, transient_caps)
        rounding = np.finfo(np.float64).eps * (self.time_s.size + 8)
        return np.asarray(sums * (1 - rounding) - shadow_price * capacity * (1 + rounding), dtype=np.float64)


def build_table(menus: Sequence[Sequence[Option]], counts: Sequence[int] | None = None) -> OptionTable:
    """Group operators with equal options and return them as arrays; arguments and errors as in ``knapsack.solve``."""
    groups: dict[tuple[Option, ...], list[int]] = {}
    known: dict[int, list[int]] = {}  # the same menu object again need not be hashed
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
    total_bytes = float(resident.astype(np.float64) @ np.repeat(count, sizes)) + float(transient.max())
    if total_bytes >= PADDING_BYTES / 2:
        raise ValueError("the menus hold more bytes in all than the search can add up (2**60)")
    order = np.argsort(_scatter_to_rows(transient, valid, PADDING_BYTES), axis=1, kind="stable")

    def sorted_rows(values: NDArray[Any], fill: float) -> NDArray[Any]:
        return np.take_along_axis(_scatter_to_rows(values, valid, fill), order, axis=1)

    times, bytes_ = sorted_rows(time_s, math.inf), sorted_rows(resident, PADDING_BYTES)
    min_time, min_bytes = times.min(axis=1), bytes_.min(axis=1)
    return OptionTable(
        menus=tuple(groups),
        members=tuple(map(tuple, groups.values())),
        count=count,
        time_s=times - min_time[:, None],
        extra_bytes=np.where(bytes_ < PADDING_BYTES, bytes_ - min_bytes[:, None], PADDING_BYTES),
        transient=sorted_rows(transient, PADDING_BYTES),
        option=order,
        min_time_s=math.fsum(np.repeat(min_time, count).tolist()),
        min_resident_bytes=int(min_bytes @ count),
    )


def _collect_column(groups: dict[tuple[Option, ...], list[int]], field: int) -> NDArray[Any]:
    """Return one field of all options of all groups, checked."""
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


def _scatter_to_rows(values: NDArray[Any], valid: NDArray[np.bool_], fill: float) -> NDArray[Any]:
    rows = np.full(valid.shape, fill, dtype=values.dtype)
    rows[valid] = values
    return rows


class Hulls(NamedTuple):
    """The lower convex hulls of all rows: where each starts, and its edges.

    Attributes:
        start: the option of least weight, of equals the cheapest, (rows,).
        row: the row of each edge.
        target: the option at the end of each edge.
        added_bytes: weight that each edge adds.
        saved_cost: cost that each edge saves.
        slope: ``saved_cost / added_bytes``.
        order: the edges by falling slope, those of one row in their order.
    """

    start: Ints
    row: Ints
    target: Ints
    added_bytes: Ints
    saved_cost: NDArray[Any]
    slope: Floats
    order: Ints


def compute_hulls(cost: NDArray[Any], weight: Ints, valid: NDArray[np.bool_]) -> Hulls:
    """Walk all rows at once, one edge of each at a time: the next edge is the steepest, of equals the longest."""
    worst = np.inf if cost.dtype.kind == "f" else np.iinfo(np.int64).max
    lightest = valid & (weight == np.where(valid, weight, PADDING_BYTES).min(axis=1, keepdims=True))
    start = np.where(lightest, cost, worst).argmin(axis=1)
    rows, current = np.arange(len(start)), start
    # Excluded options weigh nothing, so no edge leads to them.
    weight, cost = np.where(valid, weight, 0), np.where(valid, cost, 0)
    edges: list[tuple[NDArray[Any], ...]] = []
    slope_limit = np.full(len(start), np.inf)
    while len(rows):
        index = np.arange(len(rows))
        added = weight - weight[index, current][:, None]
        saved = cost[index, current][:, None] - cost
        slopes = np.where((added > 0) & (saved > 0), saved / np.maximum(added, 1), 0.0)
        steepest = slopes.max(axis=1)
        target = np.where(slopes == steepest[:, None], added, -1).argmax(axis=1)
        # A hull's slopes fall; rounding must not let a later edge overtake an earlier one.
        slope_limit = np.minimum(slope_limit, steepest)
        continues = steepest > 0
        columns = (rows, target, added[index, target], saved[index, target], slope_limit)
        edges.append(tuple(column[continues] for column in columns))
        weight, cost = weight[continues], cost[continues]
        rows, current, _, _, slope_limit = edges[-1]
    row, target, added_bytes, saved_cost, slope = (np.concatenate(column) for column in zip(*edges, strict=True))
    return Hulls(start, row, target, added_bytes, saved_cost, slope, np.argsort(-slope, kind="stable"))


@dataclass(frozen=True)
class Relaxation:
    """The linear relaxation under one cap.

    Attributes:
        reference: the option of each group, the same for all its operators, (groups,).
        extra_bytes: bytes of the reference above ``OptionTable.min_resident_bytes``.
        shadow_price: cost that the next byte saves.
        cost: cost of the rounded solution: the reference, but ``split_count`` of one group take another option.
        fractional_saving: cost that a fraction of one more operator saves in the relaxation.
        split_item: (group, option) that the next bytes would be spent on; None if nothing is left to gain.
        split_count: operators of that group that take that option in the rounded solution.
        split_fraction: fraction of one more operator that takes it in the relaxation.
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
        """Return the sum of ``step_counts``, (groups, options), over the relaxation's fractional choices."""
        total = float(step_counts[np.arange(len(count)), self.reference] @ count)
        if self.split_item is None:
            return total
        row, target = self.split_item
        added = float(step_counts[row, target] - step_counts[row, self.reference[row]])
        return total + (self.split_count + self.split_fraction) * added


def solve_relaxation(
    table: OptionTable, cost: NDArray[Any], admitted: NDArray[np.bool_], capacity: int
) -> Relaxation | None:
    """Spend ``capacity`` bytes on the steepest edges of the hulls, as far as they go.

    Args:
        table: the options.
        cost: (groups, options), seconds or integer units (sums are exact then).
        admitted: the options that may be taken, (groups, options).
        capacity: bytes above ``table.min_resident_bytes``.

    Returns:
        The relaxation; None if the lightest options do not fit or some group has none.
    """
    if not admitted.any(axis=1).all():
        return None
    hulls = compute_hulls(cost, table.extra_bytes, admitted)
    groups, order = np.arange(len(table.count)), hulls.order
    remaining = capacity - int(table.extra_bytes[groups, hulls.start] @ table.count)
    if remaining < 0:
        return None
    spent = np.cumsum(hulls.added_bytes[order] * table.count[hulls.row[order]])
    whole_edges = int(np.searchsorted(spent, remaining, side="right"))
    reference = hulls.start.copy()
    # Where a row comes up repeatedly, the last assignment holds: the edge furthest along the row.
    reference[hulls.row[order[:whole_edges]]] = hulls.target[order[:whole_edges]]
    weight = int(table.extra_bytes[groups, reference] @ table.count)
    reference_cost = exact_dot(table.count, cost[groups, reference])
    if whole_edges == len(order):
        return Relaxation(reference, weight, 0.0, reference_cost, 0.0, None, 0, 0.0)
    edge = order[whole_edges]
    shadow_price, step_bytes = float(hulls.slope[edge]), int(hulls.added_bytes[edge])
    operators, remainder = divmod(capacity - weight, step_bytes)
    return Relaxation(
        reference=reference,
        extra_bytes=weight,
        shadow_price=shadow_price,
        cost=reference_cost - operators * hulls.saved_cost[edge].item(),
        fractional_saving=shadow_price * remainder,
        split_item=(int(hulls.row[edge]), int(hulls.target[edge])),
        split_count=operators,
        split_fraction=remainder / step_bytes,
    )


def hull_step_counts(table: OptionTable, cost: NDArray[Any], admitted: NDArray[np.bool_]) -> Ints:
    """Return the number of hull edges of its row that lead to an option or to less weight, (groups, options)."""
    hulls = compute_hulls(cost, table.extra_bytes, admitted)
    steps = np.zeros(cost.shape, dtype=np.int64)
    np.add.at(steps, hulls.row, table.extra_bytes[hulls.row] >= table.extra_bytes[hulls.row, hulls.target][:, None])
    return np.where(table.valid, steps, 0)


def exact_dot(count: Ints, cost: NDArray[Any]) -> float:
    """Return the sum of the products; exact for integers, which may add up to more than 64 bits."""
    if cost.dtype.kind == "f":
        return math.fsum((count * cost).tolist())
    return (int(count @ (cost >> 30)) << 30) + int(count @ (cost & ((1 << 30) - 1)))

"""Menus of the knapsack: one for each kind of operator, and one for each kind of scope.

The operators of a scope are tensor parallel together or not at all, so their choices are one choice for the solver:
seconds and resident bytes add up, and of transient bytes the largest counts, as they do between any operators. Where
each way to cut a scope is matched or bettered in everything by choices that don't cut it, no plan needs to cut it: its
operators have menus of their own then, which are far shorter than that of all their combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.moments import Floats, Ints
from lightning_osdp.planning.search.search_space import SearchSpace
from lightning_osdp.planning.solver import Option


class OptionRows(NamedTuple):
    """Options of an operator or a scope."""

    options: Ints
    """Positions in the space, one for each operator of the scope, (rows, operators)."""
    time_s: Floats
    resident: Ints
    transient: Ints

    @classmethod
    def of_operator(cls, options: Ints, time_s: Floats, resident: Ints, transient: Ints) -> OptionRows:
        """Return the options of a single operator, (rows,) each."""
        return cls(options[:, None], time_s, resident, transient)

    def select(self, rows: Ints) -> OptionRows:
        """Return some of the rows."""
        return OptionRows(self.options[rows], self.time_s[rows], self.resident[rows], self.transient[rows])

    def pareto(self) -> OptionRows:
        """Return the rows that no other matches or betters in everything."""
        return self.select(pareto_options(self.time_s, self.resident, self.transient))

    def combine(self, other: OptionRows) -> OptionRows:
        """Return all pairs of rows of these and of another operator."""
        first, second = np.divmod(np.arange(len(self.time_s) * len(other.time_s)), len(other.time_s))
        a, b = self.select(first), other.select(second)
        options = np.column_stack([a.options, b.options])
        transient = np.maximum(a.transient, b.transient)
        return OptionRows(options, a.time_s + b.time_s, a.resident + b.resident, transient)

    def of_degree(self, degree: int, degrees: Ints) -> OptionRows:
        """Return the rows of one degree, given that of each option of the space."""
        return self.select(np.flatnonzero(degrees[self.options[:, 0]] == degree))


class Menus:
    """The menus of all operators and scopes, equal ones counted together.

    Attributes:
        menus: the Pareto options of each kind.
        counts: how many have each menu.
    """

    def __init__(self, space: SearchSpace, codes: Ints, rows_of: Callable[[int], OptionRows]) -> None:
        """Build the menus.

        Args:
            space: the space of the options.
            codes: a number for each operator, equal for those with equal options, (operators,).
            rows_of: the options of the operators with a code.
        """
        self._num_operators, degrees = len(codes), space.option_degrees
        self._rows: list[OptionRows] = []
        self._members: list[Ints] = []
        known = {code: rows_of(code) for code in np.unique(codes).tolist()}
        scopes: dict[tuple[int, ...], list[Ints]] = {}
        for scope in space.scopes:
            scopes.setdefault(tuple(codes[scope].tolist()), []).append(scope)
        combined = {kinds: _combine_scope([known[code] for code in kinds], degrees) for kinds in scopes}
        is_together = {kinds: bool((degrees[rows.options] > 1).any()) for kinds, rows in combined.items()}
        singles: dict[tuple[int, bool], list[int]] = {}
        for operator in np.flatnonzero(space.scope_of < 0).tolist():
            singles.setdefault((int(codes[operator]), True), []).append(operator)
        for kinds, equal in scopes.items():
            for operator in () if is_together[kinds] else np.concatenate(equal).tolist():
                singles.setdefault((int(codes[operator]), False), []).append(operator)
        for (code, may_be_cut), operators in sorted(singles.items()):
            rows = known[code] if may_be_cut else known[code].of_degree(1, degrees)
            self._add(rows.pareto(), np.sort(np.array(operators))[:, None])
        for kinds, equal in scopes.items():
            if is_together[kinds]:
                self._add(combined[kinds], np.array(equal))
        self.counts = [len(members) for members in self._members]
        self.menus = [
            [Option(*row) for row in zip(*(column.tolist() for column in rows[1:]), strict=True)] for rows in self._rows
        ]

    def _add(self, rows: OptionRows, members: Ints) -> None:
        self._rows.append(rows)
        self._members.append(members)

    def selected_options(self, choices: Sequence[int]) -> Ints:
        """Return the solver's choices as one option per operator, (operators,)."""
        options, at = np.zeros(self._num_operators, dtype=np.int64), 0
        for rows, members in zip(self._rows, self._members, strict=True):
            options[members] = rows.options[list(choices[at : at + len(members)])]
            at += len(members)
        return options

    def least_options(self, first: str, second: str) -> Ints:
        """Return for each operator or scope the option with the least of one column, of equal ones of another."""
        choices: list[int] = []
        for rows, count in zip(self._rows, self.counts, strict=True):
            choices += [int(np.lexsort((getattr(rows, second), getattr(rows, first)))[0])] * count
        return self.selected_options(choices)


def _combine_scope(operators: Sequence[OptionRows], degrees: Ints) -> OptionRows:
    """Return the options of a scope: those of its operators in all combinations of one degree."""
    by_degree = []
    for degree in np.unique(degrees[operators[0].options]).tolist():
        combined, *others = (rows.of_degree(degree, degrees).pareto() for rows in operators)
        for rows in others:
            combined = combined.combine(rows).pareto()
        by_degree.append(combined)
    return OptionRows(*(np.concatenate(columns) for columns in zip(*by_degree, strict=True))).pareto()


def pareto_options(time_s: Floats, resident: Ints, transient: Ints) -> Ints:
    """Return the options that no other matches or betters in everything; of equals the first."""
    columns = (time_s, resident, transient)
    no_worse = np.all([column[:, None] <= column for column in columns], axis=0)
    better = np.any([column[:, None] < column for column in columns], axis=0)
    earlier = np.arange(len(time_s))[:, None] < np.arange(len(time_s))
    return np.flatnonzero(~(no_worse & (better | earlier)).any(axis=0))

"""Operators that are alike at one moment of the step, and what the search is given of them: menus of options."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.bounds import AFTER, BEFORE, RUNNING, own_run, weights
from lightning_osdp.planning.choices import Choice
from lightning_osdp.planning.search import Option, Solution, solve
from lightning_osdp.planning.space import Space, Times
from lightning_osdp.planning.timeline import COLUMN, Flags, Floats, Ints, Peak

STATES = 3
"""Of an operator at a moment: ``BEFORE``, ``RUNNING`` or ``AFTER`` its backward."""


class RowCosts:
    """The rows of a space at one batch size.

    Attributes:
        times: seconds.
        bytes: before, in and after an operator's backward, (3, rows).
        transient: bytes that are there only while the operator runs, by row.
        kept: bytes that stay from its forward to its backward, by row.
    """

    def __init__(self, space: Space, batch_size: int, accumulation: int) -> None:
        self.space, self.batch_size, self.accumulation = space, batch_size, accumulation
        self.times: Times = space.times(batch_size, accumulation)
        self.bytes = np.rint(weights(space, batch_size, accumulation)).astype(np.int64)
        self.transient = np.rint(own_run(space, batch_size, accumulation)).astype(np.int64)
        self.kept = np.rint(space.footprints[:, COLUMN["kept"]]).astype(np.int64)


class GroupCosts(NamedTuple):
    """What the rows of a group's menu cost.

    Attributes:
        choices: what each row stands for.
        first_row: of the menu, in the space.
        time_s, resident, transient: by row.
    """

    choices: tuple[Choice, ...]
    first_row: int
    time_s: Floats
    resident: Ints
    transient: Ints


class Groups:
    """Operators that are alike at the moment of a plan's peak: same menu, recomputed or not, before, in or after their
    backward.

    Attributes:
        member: the group of each operator.
        menus: what the search may choose from, of each group.
    """

    def __init__(self, at: RowCosts, flags: Flags, peak: Peak, *, wary: bool = False) -> None:
        """
        Args:
            at: the batch size.
            flags: which blocks are recomputed.
            peak: gives the moment.
            wary: whether parameters that stay from forward to backward count at every moment, as if the peak might be
                in between: what an exchange of rows would cost then holds at other moments, too.
        """
        self._at, space = at, at.space
        after, kept = at.bytes[AFTER], at.kept  # which are there until the operator's own backward ends
        self._bytes = np.array([at.bytes[BEFORE], after + kept, after + kept if wary else after])
        again = space.in_recomputed(flags)
        backward = space.timeline.backward
        state = np.where(backward.start <= peak.moment, RUNNING, BEFORE)
        state[backward.stop <= peak.moment] = AFTER
        self._codes, self.member, count = np.unique(
            (space.menu_of * 2 + again) * STATES + state, return_inverse=True, return_counts=True
        )
        self._order = np.argsort(self.member, kind="stable")
        self._counts = count.tolist()
        timeline = space.timeline
        heap = timeline.spare.at(at.batch_size) + (timeline.grown - 1) * peak.activations
        self._other = peak.activations + heap + peak.overhead + space.problem.model.buffer_bytes
        self._rows: list[Ints] = []
        self.menus: list[list[Option]] = []
        for group in range(len(self._codes)):
            costs = self.costs(group)
            rows = undominated(costs.time_s, costs.resident, costs.transient)
            self._rows.append(rows + costs.first_row)
            columns = (values[rows].tolist() for values in (costs.time_s, costs.resident, costs.transient))
            self.menus.append([Option(*values) for values in zip(*columns, strict=True)])

    def costs(self, group: int) -> GroupCosts:
        """All rows of a group's menu."""
        code = int(self._codes[group])
        code, state = divmod(code, STATES)
        menu = self._at.space.menus[code // 2]
        time_s = self._at.times.total[code % 2, menu.rows]
        resident, transient = self._bytes[state, menu.rows], self._at.transient[menu.rows]
        return GroupCosts(menu.choices, menu.rows.start, time_s, resident, transient)

    def budget(self, limit_bytes: int) -> int:
        """What the moment leaves to operators."""
        return int(limit_bytes - self._other)

    def taken_bytes(self, rows: Ints) -> int:
        """The budget that just admits a row for each operator."""
        state = self._codes[self.member] % STATES
        return int(self._bytes[state, rows].sum() + self._at.transient[rows].max(initial=0))

    def solve(self, budget_bytes: int) -> Solution | None:
        """The fastest rows within the budget; None if nothing fits."""
        try:
            return solve(self.menus, budget_bytes, counts=self._counts)
        except InfeasibleError:
            return None

    def rows(self, solution: Solution) -> Ints:
        """The solution as one row for each operator."""
        groups = np.repeat(np.arange(len(self._counts)), self._counts)
        chosen = [self._rows[group][choice] for group, choice in zip(groups, solution.choices, strict=True)]
        rows = np.zeros(len(chosen), dtype=np.int64)
        rows[self._order] = chosen
        return rows


def undominated(time_s: Floats, size: Ints, transient: Ints) -> Ints:
    """Rows that no other matches or betters in everything; of equals the first."""
    columns = (time_s, size, transient)
    no_worse = np.all([column[:, None] <= column for column in columns], axis=0)
    better = np.any([column[:, None] < column for column in columns], axis=0)
    earlier = np.arange(len(time_s))[:, None] < np.arange(len(time_s))
    return np.flatnonzero(~(no_worse & (better | earlier)).any(axis=0))

"""Operators that are alike at one moment of the step, and what the search is given of them: menus of options."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.footprint import COLUMN
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.search.lower_bounds import (
    AFTER_BACKWARD,
    BEFORE_BACKWARD,
    IN_BACKWARD,
    resident_bytes_by_phase,
    transient_bytes,
)
from lightning_osdp.planning.search.search_space import OptionTimes, SearchSpace
from lightning_osdp.planning.solver.knapsack import Option, Solution, solve
from lightning_osdp.planning.spec.choices import ShardingChoice

NUM_PHASES = 3
"""Of an operator at a moment: ``BEFORE_BACKWARD``, ``IN_BACKWARD`` or ``AFTER_BACKWARD`` its backward."""


class OptionCosts:
    """The rows of a space at one batch size.

    Attributes:
        times: seconds.
        resident_bytes: before, in and after an operator's backward, (3, rows).
        transient: bytes that are there only while the operator runs, by row.
        unsharded_between_passes: bytes that stay from its forward to its backward, by row.
    """

    def __init__(self, space: SearchSpace, batch_size: int, accumulation: int) -> None:
        self.space, self.batch_size, self.accumulation = space, batch_size, accumulation
        self.times: OptionTimes = space.option_times(batch_size, accumulation)
        self.resident_bytes = np.rint(resident_bytes_by_phase(space, batch_size, accumulation)).astype(np.int64)
        self.transient = np.rint(transient_bytes(space, batch_size, accumulation)).astype(np.int64)
        self.unsharded_between_passes = np.rint(space.footprints[:, COLUMN["unsharded_between_passes"]]).astype(
            np.int64
        )


class GroupOptions(NamedTuple):
    """What the rows of a group's menu cost.

    Attributes:
        choices: what each row stands for.
        first_option: of the menu, in the space.
        time_s, resident, transient: by row.
    """

    choices: tuple[ShardingChoice, ...]
    first_option: int
    time_s: Floats
    resident: Ints
    transient: Ints


class KnapsackSubproblem:
    """Operators that are alike at the moment of a plan's peak: same menu, recomputed or not, before, in or after their
    backward.

    Attributes:
        group_of_operator: the group of each operator.
        menus: what the search may choose from, of each group.
    """

    def __init__(
        self, option_costs: OptionCosts, recomputed_blocks: Flags, peak: Peak, *, conservative: bool = False
    ) -> None:
        """
        Args:
            option_costs: the batch size.
            recomputed_blocks: which blocks are recomputed.
            peak: gives the moment.
            conservative: whether parameters that stay from forward to backward count at every moment, as if the peak might be
                in between: what an exchange of rows would cost then holds at other moments, too.
        """
        self._option_costs, space = option_costs, option_costs.space
        after, kept = (
            option_costs.resident_bytes[AFTER_BACKWARD],
            option_costs.unsharded_between_passes,
        )  # which are there until the operator's own backward ends
        self._resident_bytes = np.array(
            [option_costs.resident_bytes[BEFORE_BACKWARD], after + kept, after + kept if conservative else after]
        )
        again = space.recompute_flags(recomputed_blocks)
        backward = space.timeline.backward
        state = np.where(backward.start <= peak.moment, IN_BACKWARD, BEFORE_BACKWARD)
        state[backward.stop <= peak.moment] = AFTER_BACKWARD
        self._codes, self.group_of_operator, count = np.unique(
            (space.group_of * 2 + again) * NUM_PHASES + state, return_inverse=True, return_counts=True
        )
        self._order = np.argsort(self.group_of_operator, kind="stable")
        self._counts = count.tolist()
        timeline = space.timeline
        heap = (
            timeline.heap_headroom.value_at(option_costs.batch_size)
            + (timeline.heap_growth_factor - 1) * peak.activations
        )
        self._other_bytes = peak.activations + heap + peak.overhead + space.problem.model.buffer_bytes
        self._options: list[Ints] = []
        self.menus: list[list[Option]] = []
        for group in range(len(self._codes)):
            costs = self.group_options(group)
            rows = pareto_options(costs.time_s, costs.resident, costs.transient)
            self._options.append(rows + costs.first_option)
            columns = (values[rows].tolist() for values in (costs.time_s, costs.resident, costs.transient))
            self.menus.append([Option(*values) for values in zip(*columns, strict=True)])

    def group_options(self, group: int) -> GroupOptions:
        """All rows of a group's menu."""
        code = int(self._codes[group])
        code, state = divmod(code, NUM_PHASES)
        menu = self._option_costs.space.option_groups[code // 2]
        time_s = self._option_costs.times.total[code % 2, menu.options]
        resident, transient = self._resident_bytes[state, menu.options], self._option_costs.transient[menu.options]
        return GroupOptions(menu.choices, menu.options.start, time_s, resident, transient)

    def available_bytes(self, limit_bytes: int) -> int:
        """What the moment leaves to operators."""
        return int(limit_bytes - self._other_bytes)

    def budget_used(self, options: Ints) -> int:
        """The budget that just admits a row for each operator."""
        state = self._codes[self.group_of_operator] % NUM_PHASES
        return int(self._resident_bytes[state, options].sum() + self._option_costs.transient[options].max(initial=0))

    def solve(self, budget_bytes: int) -> Solution | None:
        """The fastest rows within the budget; None if nothing fits."""
        try:
            return solve(self.menus, budget_bytes, counts=self._counts)
        except InfeasibleError:
            return None

    def selected_options(self, solution: Solution) -> Ints:
        """The solution as one row for each operator."""
        groups = np.repeat(np.arange(len(self._counts)), self._counts)
        chosen = [self._options[group][choice] for group, choice in zip(groups, solution.choices, strict=True)]
        rows = np.zeros(len(chosen), dtype=np.int64)
        rows[self._order] = chosen
        return rows


def pareto_options(time_s: Floats, resident: Ints, transient: Ints) -> Ints:
    """Rows that no other matches or betters in everything; of equals the first."""
    columns = (time_s, resident, transient)
    no_worse = np.all([column[:, None] <= column for column in columns], axis=0)
    better = np.any([column[:, None] < column for column in columns], axis=0)
    earlier = np.arange(len(time_s))[:, None] < np.arange(len(time_s))
    return np.flatnonzero(~(no_worse & (better | earlier)).any(axis=0))

"""The knapsack of one batch size at one moment of the step: groups of equal operators, and bytes at that moment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.footprint import COLUMN
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.search.search_space import (
    AFTER_BACKWARD,
    BEFORE_BACKWARD,
    IN_BACKWARD,
    NUM_PHASES,
    OptionTimes,
    SearchSpace,
)
from lightning_osdp.planning.solver import Option, Solution, solve
from lightning_osdp.planning.spec.choices import ShardingChoice


class OptionCosts:
    """The options of a space at one batch size.

    Attributes:
        times: seconds of each option.
        resident_bytes: bytes before, in and after an operator's backward, (phases, options).
        transient_bytes: bytes that exist only while the operator runs, (options,).
        unsharded_between_passes: bytes that stay from forward to backward, (options,).
    """

    def __init__(self, space: SearchSpace, batch_size: int, accumulation: int) -> None:
        self.space, self.batch_size, self.accumulation = space, batch_size, accumulation
        self.times: OptionTimes = space.option_times(batch_size, accumulation)
        self.resident_bytes = _to_int(space.resident_bytes(batch_size, accumulation))
        self.transient_bytes = _to_int(space.transient_bytes(batch_size, accumulation))
        self.unsharded_between_passes = _to_int(space.footprints[:, COLUMN["unsharded_between_passes"]])


class GroupOptions(NamedTuple):
    """The options of one group, the position of the first in the space, and their seconds and bytes, (options,)."""

    choices: tuple[ShardingChoice, ...]
    first_option: int
    time_s: Floats
    resident: Ints
    transient: Ints


class KnapsackSubproblem:
    """A knapsack over the bytes at the moment of a plan's peak.

    Operators form a group if they have the same options, are in the same phase, and are all recomputed or all not.

    Attributes:
        group_of_operator: the group of each operator.
        menus: the Pareto options of each group.
    """

    def __init__(
        self, option_costs: OptionCosts, recomputed_blocks: Flags, peak: Peak, *, conservative: bool = False
    ) -> None:
        """Group the operators.

        Args:
            option_costs: options at the batch size.
            recomputed_blocks: whether each block is recomputed.
            peak: gives the moment.
            conservative: whether parameters that stay from forward to backward count at every moment, as if the peak
                might lie in between: the costs of other options then hold at other moments, too.
        """
        self._option_costs, space = option_costs, option_costs.space
        # Parameters that stay from forward to backward stay until the operator's own backward ends.
        in_backward = option_costs.resident_bytes[AFTER_BACKWARD] + option_costs.unsharded_between_passes
        after = in_backward if conservative else option_costs.resident_bytes[AFTER_BACKWARD]
        self._resident_bytes = np.array([option_costs.resident_bytes[BEFORE_BACKWARD], in_backward, after])
        backward = space.timeline.backward
        phase = np.where(backward.start <= peak.moment, IN_BACKWARD, BEFORE_BACKWARD)
        phase[backward.stop <= peak.moment] = AFTER_BACKWARD
        codes = (space.group_of * 2 + space.recompute_flags(recomputed_blocks)) * NUM_PHASES + phase
        self._codes, self.group_of_operator, counts = np.unique(codes, return_inverse=True, return_counts=True)
        self._counts = counts.tolist()
        timeline = space.timeline
        heap = timeline.heap_headroom.value_at(option_costs.batch_size)
        heap += (timeline.heap_growth_factor - 1) * peak.activations
        self._other_bytes = peak.activations + heap + peak.overhead + space.problem.model.buffer_bytes
        self._options: list[Ints] = []
        self.menus: list[list[Option]] = []
        for group in range(len(self._codes)):
            costs = self.group_options(group)
            pareto = pareto_options(costs.time_s, costs.resident, costs.transient)
            self._options.append(pareto + costs.first_option)
            columns = (values[pareto].tolist() for values in (costs.time_s, costs.resident, costs.transient))
            self.menus.append([Option(*values) for values in zip(*columns, strict=True)])

    def group_options(self, group: int) -> GroupOptions:
        """Return all options of a group."""
        code, phase = divmod(int(self._codes[group]), NUM_PHASES)
        option_group = self._option_costs.space.option_groups[code // 2]
        options = option_group.options
        time_s = self._option_costs.times.total[code % 2, options]
        resident, transient = self._resident_bytes[phase, options], self._option_costs.transient_bytes[options]
        return GroupOptions(option_group.choices, options.start, time_s, resident, transient)

    def available_bytes(self, limit_bytes: int) -> int:
        """Return the bytes that the moment leaves to operators under a memory limit."""
        return int(limit_bytes - self._other_bytes)

    def budget_used(self, options: Ints) -> int:
        """Return the smallest budget that admits one option per operator, (operators,)."""
        phase = self._codes[self.group_of_operator] % NUM_PHASES
        transient = self._option_costs.transient_bytes[options].max(initial=0)
        return int(self._resident_bytes[phase, options].sum() + transient)

    def solve(self, budget_bytes: int) -> Solution | None:
        """Return the fastest options within the budget; None if nothing fits."""
        try:
            return solve(self.menus, budget_bytes, counts=self._counts)
        except InfeasibleError:
            return None

    def selected_options(self, solution: Solution) -> Ints:
        """Return a solution as one option per operator, (operators,)."""
        groups = np.repeat(np.arange(len(self._counts)), self._counts)
        selected = [self._options[group][choice] for group, choice in zip(groups, solution.choices, strict=True)]
        options = np.zeros(len(selected), dtype=np.int64)
        options[np.argsort(self.group_of_operator, kind="stable")] = selected
        return options


def pareto_options(time_s: Floats, resident: Ints, transient: Ints) -> Ints:
    """Return the options that no other matches or betters in everything; of equals the first."""
    columns = (time_s, resident, transient)
    no_worse = np.all([column[:, None] <= column for column in columns], axis=0)
    better = np.any([column[:, None] < column for column in columns], axis=0)
    earlier = np.arange(len(time_s))[:, None] < np.arange(len(time_s))
    return np.flatnonzero(~(no_worse & (better | earlier)).any(axis=0))


def min_memory_options(space: SearchSpace) -> list[Ints]:
    """Return three plans of little memory, one option per operator each.

    They minimise resident plus transient bytes, resident bytes first, and transient bytes first. They differ where one
    operator dominates: gathering it whole costs more memory than sharding its states saves.
    """
    between_passes = space.footprints[:, COLUMN["unsharded_between_passes"]]
    resident = _to_int(space.resident_bytes(0, 1)[AFTER_BACKWARD] + between_passes)
    transient = _to_int(space.transient_bytes(0, 1))
    slices = [group.options for group in space.option_groups]
    menus = [
        [Option(0.0, *pair) for pair in zip(resident[at].tolist(), transient[at].tolist(), strict=True)]
        for at in slices
    ]
    counts = np.bincount(space.group_of, minlength=len(menus)).tolist()
    try:
        solution = solve(menus, 0, counts=counts)
    except InfeasibleError as error:
        solution = solve(menus, error.needed_bytes, counts=counts)
    smallest = np.zeros(len(space.group_of), dtype=np.int64)
    smallest[np.argsort(space.group_of, kind="stable")] = solution.choices
    plans = [smallest + space.first_option[space.group_of]]
    for first, second in ((resident, transient), (transient, resident)):
        least = [int(np.lexsort((second[at], first[at]))[0]) for at in slices]
        plans.append((np.array(least, dtype=np.int64) + space.first_option)[space.group_of])
    return plans


def _to_int(values: Floats) -> Ints:
    return np.rint(values).astype(np.int64)

"""The knapsack of one batch size at one moment of the step: groups of equal operators, and bytes at that moment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.search.menus import Menus, OptionRows
from lightning_osdp.planning.search.search_space import (
    AFTER_BACKWARD,
    BEFORE_BACKWARD,
    IN_BACKWARD,
    NUM_PHASES,
    OptionTimes,
    SearchSpace,
)
from lightning_osdp.planning.solver import Solution, solve
from lightning_osdp.planning.spec.choices import ShardingChoice


class OptionCosts:
    """The options of a space at one batch size.

    Attributes:
        times: seconds of each option.
        resident_bytes: bytes before, in and after an operator's backward, plain and recomputed, (phases, 2, options).
        transient_bytes: bytes that exist only while the operator runs, (options,).
        between_passes_bytes: bytes that stay from forward to backward, (options,).
    """

    def __init__(self, space: SearchSpace, batch_size: int, accumulation: int) -> None:
        self.space, self.batch_size, self.accumulation = space, batch_size, accumulation
        self.times: OptionTimes = space.option_times(batch_size, accumulation)
        self.resident_bytes = _to_int(space.resident_bytes(batch_size, accumulation))
        self.transient_bytes = _to_int(space.transient_bytes(batch_size, accumulation))
        self.between_passes_bytes = _to_int(space.between_passes_bytes(batch_size))


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
        num_groups: number of groups.
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
        in_backward = option_costs.resident_bytes[AFTER_BACKWARD] + option_costs.between_passes_bytes
        after = in_backward if conservative else option_costs.resident_bytes[AFTER_BACKWARD]
        self._resident_bytes = np.array([option_costs.resident_bytes[BEFORE_BACKWARD], in_backward, after])
        backward = space.timeline.backward
        phase = np.where(backward.start <= peak.moment, IN_BACKWARD, BEFORE_BACKWARD)
        phase[backward.stop <= peak.moment] = AFTER_BACKWARD
        codes = (space.group_of * 2 + space.recompute_flags(recomputed_blocks)) * NUM_PHASES + phase
        self._codes, self.group_of_operator = np.unique(codes, return_inverse=True)
        self.num_groups = len(self._codes)
        timeline = space.timeline
        heap = timeline.heap_headroom.value_at(option_costs.batch_size)
        heap += (timeline.heap_growth_factor - 1) * peak.activations
        self._other_bytes = peak.activations + heap + peak.overhead + space.problem.model.buffer_bytes
        self._menus = Menus(space, self.group_of_operator, self._rows_of)

    def _rows_of(self, group: int) -> OptionRows:
        costs = self.group_options(group)
        options = np.arange(len(costs.choices), dtype=np.int64) + costs.first_option
        return OptionRows.of_operator(options, costs.time_s, costs.resident, costs.transient)

    def group_options(self, group: int) -> GroupOptions:
        """Return all options of a group."""
        code, phase = divmod(int(self._codes[group]), NUM_PHASES)
        option_group = self._option_costs.space.option_groups[code // 2]
        options = option_group.options
        time_s = self._option_costs.times.total[code % 2, options]
        resident = self._resident_bytes[phase, code % 2, options]
        transient = self._option_costs.transient_bytes[options]
        return GroupOptions(option_group.choices, options.start, time_s, resident, transient)

    def available_bytes(self, limit_bytes: int) -> int:
        """Return the bytes that the moment leaves to operators under a memory limit."""
        return int(limit_bytes - self._other_bytes)

    def budget_used(self, options: Ints) -> int:
        """Return the smallest budget that admits one option per operator, (operators,)."""
        code, phase = np.divmod(self._codes[self.group_of_operator], NUM_PHASES)
        transient = self._option_costs.transient_bytes[options].max(initial=0)
        return int(self._resident_bytes[phase, code % 2, options].sum() + transient)

    def solve(self, budget_bytes: int) -> Solution | None:
        """Return the fastest options within the budget; None if nothing fits."""
        try:
            return solve(self._menus.menus, budget_bytes, counts=self._menus.counts)
        except InfeasibleError:
            return None

    def selected_options(self, solution: Solution) -> Ints:
        """Return a solution as one option per operator, (operators,)."""
        return self._menus.selected_options(solution.choices)


def min_memory_options(space: SearchSpace, batch_size: int = 0) -> list[Ints]:
    """Return plans of little memory, one option per operator each.

    They minimise resident plus transient bytes, resident bytes first, and transient bytes first. They differ where one
    operator dominates: gathering it whole costs more memory than sharding its states saves. Another one has nothing
    tensor parallel, which may take more memory in evaluation.
    """
    in_backward = space.resident_bytes(batch_size, 1)[AFTER_BACKWARD, 0] + space.between_passes_bytes(batch_size)
    resident, transient = _to_int(in_backward), _to_int(space.transient_bytes(batch_size, 1))

    def rows_of(group: int) -> OptionRows:
        at = space.option_groups[group].options
        options = np.arange(at.start, at.stop, dtype=np.int64)
        return OptionRows.of_operator(options, np.zeros(len(options)), resident[at], transient[at])

    menus = Menus(space, space.group_of, rows_of)
    try:
        solution = solve(menus.menus, 0, counts=menus.counts)
    except InfeasibleError as error:
        solution = solve(menus.menus, error.needed_bytes, counts=menus.counts)
    plans = [
        menus.selected_options(solution.choices),
        menus.least_options("resident", "transient"),
        menus.least_options("transient", "resident"),
    ]
    is_cut = space.option_degrees > 1
    if is_cut.any():
        needed = np.where(is_cut, np.inf, in_backward + space.transient_bytes(batch_size, 1))
        least = [group.options.start + int(needed[group.options].argmin()) for group in space.option_groups]
        plans.append(np.array(least, dtype=np.int64)[space.group_of])
    return plans


def _to_int(values: Floats) -> Ints:
    return np.rint(values).astype(np.int64)

"""The best plan at one batch size.

The knapsack (``planning.solver``) counts bytes at one moment of the step: the one of a first plan's peak. The memory
timeline then gives the true peak. Its slack is given back to the knapsack's budget and its excess taken away, and if
another moment turns out to be worse, that one takes its place (``BudgetBisection``). Models of few operators are then
searched at all moments together (``label_setting``). How many blocks of a kind are recomputed is enumerated, in the
order of lower bounds (``lower_bounds``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_osdp.planning.cost.link_schedule import can_be_played, exposed_communication_s
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.cost.step_time import calibration_time
from lightning_osdp.planning.search.label_setting import LabelProblem, enumerate_plans
from lightning_osdp.planning.search.lower_bounds import LagrangianBounds
from lightning_osdp.planning.search.search_space import SearchSpace
from lightning_osdp.planning.search.subproblem import KnapsackSubproblem, OptionCosts, min_memory_options
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.wrapping import WrapAssignment, WrappedModel

MAX_SOLVES, MAX_HEURISTIC_SOLVES = 12, 3
"""Knapsacks per way to recompute blocks, in a complete search and in a first look [M-search-1]."""

BUDGET_STEPS = 2000
"""A change of the budget by less than the memory limit over this is not worth another knapsack."""

SMALL_MODEL = 64
"""Up to this number of operators, each way to recompute blocks that is tried is searched exactly; above it, the one of
the best plan [M-search-1]."""

MAX_RECOMPUTE_COUNTS_TRIED = 24
"""Ways to recompute blocks that are tried at one batch size, of those that lower bounds do not exclude."""

MIN_IMPROVEMENT = 1e-3
"""Relative gain below which other ways to recompute blocks are not tried."""


@dataclass(frozen=True)
class Candidate:
    """A plan at one batch size and its predicted costs.

    Attributes:
        batch_size: samples per device and micro-batch.
        accumulation: micro-batches per optimizer step.
        recomputed: names of the recomputed blocks.
        communication_s: communication that compute does not hide.
        lower_bound_s: no plan at this batch size is known to take less.
        wrap_assignment: the block whose unit each operator shares; empty for its own unit and for replicated operators.
    """

    batch_size: int
    accumulation: int
    choices: tuple[ShardingChoice, ...]
    recomputed: tuple[str, ...]
    compute_s: float
    communication_s: float
    peak: Peak
    ranks: int
    lower_bound_s: float = 0.0
    wrap_assignment: WrapAssignment = ()

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.compute_s + self.communication_s

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def samples_per_s(self) -> float:
        """Throughput over all ranks."""
        return self.global_batch_size / self.step_time_s


@dataclass(frozen=True)
class _ScoredPlan:
    """One option per operator, with the plan's step time and true peak."""

    options: Ints
    time_s: float
    peak: Peak


class PlanSearch:
    """Searches of one problem at all batch sizes, for one assignment of operators to shared units.

    Args:
        problem: the problem.
        wrap_assignment: the block whose unit each operator shares; None if none do.

    Raises:
        ConfigurationError: a constraint's pattern matches nothing.
    """

    def __init__(self, problem: Problem, wrap_assignment: WrapAssignment | None = None) -> None:
        problem.constraints.check(problem.model, problem.cluster)
        self.problem = problem
        self.wrap_assignment = wrap_assignment or ("",) * len(problem.model.operators)
        self.wrapped_model = WrappedModel.from_assignment(problem.model, self.wrap_assignment)
        compute = self.wrapped_model.merge_times(problem.compute)
        forced_modes = self.wrapped_model.merge_modes(map(problem.constraints.forced_mode, problem.model.operators))
        self.space = SearchSpace(replace(problem, model=self.wrapped_model.model, compute=compute), forced_modes)
        self._by_batch_size: dict[tuple[int, int], BatchSizeSearch] = {}

    @cached_property
    def lagrangian_bounds(self) -> LagrangianBounds:
        """Lower bounds at all batch sizes."""
        return LagrangianBounds(self.space)

    @cached_property
    def min_memory_options(self) -> list[Ints]:
        """See the function of this name."""
        return min_memory_options(self.space)

    def best_plan_below(
        self, upper_bound_s: float, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False
    ) -> Candidate | None:
        """Return the fastest plan that fits, leaving out ways to recompute blocks that can't beat a step time.

        Args:
            upper_bound_s: only plans faster than this are of use.
            batch_size: samples per device and micro-batch.
            accumulation: micro-batches per optimizer step.
            heuristic_only: whether a good plan is enough; its ``lower_bound_s`` says what the best may reach.

        Returns:
            The plan, which may be slower than ``upper_bound_s``; None if nothing is left or nothing fits.
        """
        search = self.for_batch_size(batch_size, accumulation)
        bounds = search.lower_bounds_s
        plans: dict[int, _ScoredPlan] = {}
        unsolved: list[int] = []
        best_s = np.inf
        for index in np.argsort(bounds, kind="stable").tolist():
            if bounds[index] >= min(upper_bound_s, best_s * (1 - MIN_IMPROVEMENT)):
                break
            if len(plans) >= (1 if heuristic_only else MAX_RECOMPUTE_COUNTS_TRIED):
                break
            plan = search.solve_with_recompute(index, MAX_HEURISTIC_SOLVES if heuristic_only else MAX_SOLVES)
            if plan is None:
                unsolved.append(index)
            else:
                plans[index] = plan
                best_s = min(best_s, plan.time_s)
        if not (heuristic_only and plans):  # where knapsacks find nothing, an exact search still may
            ranking = sorted(plans, key=lambda index: plans[index].time_s)
            for index in [*ranking, *unsolved] if len(self.space.group_of) <= SMALL_MODEL else ranking[:1]:
                known_s = min([upper_bound_s, *(plan.time_s for plan in plans.values())])
                if bounds[index] < known_s * (1 - MIN_IMPROVEMENT):
                    plan = search.exact_small_search(self.space.recompute_mask(index), known_s)
                    plans |= {} if plan is None else {index: plan}
        if not plans:
            return None
        best = min(plans, key=lambda index: plans[index].time_s)
        return search.to_candidate(plans[best].options, self.space.recompute_mask(best), float(bounds.min()))

    def min_memory_plan(self, batch_size: int, accumulation: int = 1) -> Candidate:
        """Return the plan of least memory, whatever the limit."""
        search = self.for_batch_size(batch_size, accumulation)
        most_recomputed = int(self.space.recompute_counts.sum(axis=1).argmax())
        least_bound = int(self.lagrangian_bounds.least_bytes(batch_size, accumulation).argmin())
        candidates = (
            search.to_candidate(options, self.space.recompute_mask(index))
            for index in sorted({0, most_recomputed, least_bound})
            for options in search.min_memory_options
        )
        return min(candidates, key=lambda candidate: candidate.peak.max_bytes)

    def evaluate_choices(
        self,
        choices: tuple[ShardingChoice, ...],
        batch_size: int,
        accumulation: int = 1,
        recomputed: tuple[str, ...] = (),
    ) -> Candidate:
        """Return a given plan with its costs, whether it fits or not."""
        search = self.for_batch_size(batch_size, accumulation)
        return search.to_candidate(self.options_of(choices), self.recompute_mask(recomputed))

    def played(self, candidate: Candidate) -> Candidate:
        """Return a plan with the communication that its collectives leave exposed when they are played in order."""
        cluster, wrapped, recomputed = self.problem.cluster, self.wrapped_model, set(candidate.recomputed)
        if not can_be_played(cluster):
            return candidate
        size, accumulation = candidate.batch_size, candidate.accumulation
        choices, compute = wrapped.merge_choices(candidate.choices), self.space.problem.compute
        exposed_s = exposed_communication_s(wrapped.model, choices, recomputed, cluster, compute, size, accumulation)
        again = {index for block in wrapped.model.blocks if block.name in recomputed for index in block.operators}
        for index, own in enumerate(zip(wrapped.model.operators, choices, strict=True)):
            exposed_s += calibration_time(*own, cluster, recomputed=index in again).total_s(accumulation)
        return replace(candidate, communication_s=exposed_s)

    def lower_bound_s(self, batch_size: int, accumulation: int = 1) -> float:
        """Return the seconds of an optimizer step that no plan that fits undercuts."""
        return float(self.for_batch_size(batch_size, accumulation).lower_bounds_s.min())

    def for_batch_size(self, batch_size: int, accumulation: int = 1) -> BatchSizeSearch:
        """Return the search at one batch size; it is made once."""
        key = (batch_size, accumulation)
        if key not in self._by_batch_size:
            self._by_batch_size[key] = BatchSizeSearch(self, *key)
        return self._by_batch_size[key]

    def min_memory_options_at(self, batch_size: int) -> list[Ints]:
        """Return plans of little memory at one batch size (see the function ``min_memory_options``)."""
        return [*self.min_memory_options, *min_memory_options(self.space, batch_size)]

    def options_of(self, choices: Sequence[ShardingChoice]) -> Ints:
        """Return one option per operator of the space, from one choice per operator of the model."""
        return self.space.options_of(self.wrapped_model.merge_choices(choices))

    def recompute_mask(self, recomputed: Sequence[str]) -> Flags:
        """Return whether each block is among those of the given names, (blocks,)."""
        return np.array([block.name in recomputed for block in self.problem.model.blocks], dtype=bool)


class BudgetBisection:
    """Search for the knapsack budget whose plan just fits the memory limit by its true peak.

    The budget moves by the slack or the excess of the last plan's true peak while only one side is known, and halves
    the interval between the largest budget that fits and the smallest that does not where that step leaves it.

    Attributes:
        budget: bytes of the next knapsack.
    """

    def __init__(self, initial_budget: int, tolerance: int) -> None:
        self.budget = initial_budget
        self._tolerance = tolerance
        self._largest_fitting = self._smallest_exceeding = 0

    def advance(self, slack: int) -> bool:
        """Move the budget after a plan with ``slack`` bytes below the limit (or above); return False at the end."""
        fits = slack >= 0
        if fits:
            self._largest_fitting = self.budget
        else:
            self._smallest_exceeding = self.budget
        proposal = self.budget + (slack if fits else min(slack, -self._tolerance))
        low, high = self._largest_fitting, self._smallest_exceeding
        if low and high and not low < proposal < high:
            proposal = (low + high) // 2
        if fits and proposal - self.budget <= self._tolerance:
            return False
        self.budget = proposal
        return True

    def update_infeasible(self) -> bool:
        """Move the budget after a knapsack that nothing fits, less than one that exceeded; return False at the end."""
        if self._smallest_exceeding - self.budget <= self._tolerance:
            return False
        self._largest_fitting = self.budget
        self.budget = (self.budget + self._smallest_exceeding) // 2
        return True


class BatchSizeSearch(OptionCosts):
    """The search of one problem at one batch size."""

    def __init__(self, plan_search: PlanSearch, batch_size: int, accumulation: int) -> None:
        super().__init__(plan_search.space, batch_size, accumulation)
        self.plan_search = plan_search

    @cached_property
    def min_memory_options(self) -> list[Ints]:
        """Plans of little memory; what slices and tensor parallel operators take depends on the batch size."""
        return self.plan_search.min_memory_options_at(self.batch_size)

    @cached_property
    def lower_bounds_s(self) -> Floats:
        """See ``LagrangianBounds.lower_bounds_s``."""
        return self.plan_search.lagrangian_bounds.lower_bounds_s(self.times, self.batch_size, self.accumulation)

    def solve_with_recompute(self, counts_index: int, max_solves: int) -> _ScoredPlan | None:
        """Return the fastest plan that fits in one way to recompute blocks; None if none does."""
        mask, limit = self.space.recompute_mask(counts_index), self.plan_search.problem.memory_limit_bytes
        smallest = [self.score(options, mask) for options in self.min_memory_options]
        best = min(smallest, key=lambda plan: plan.peak.max_bytes)
        if best.peak.max_bytes > limit:
            return None
        moments = {best.peak.moment}
        subproblem, bisection = self._start_at(best.peak, mask)
        for _ in range(max_solves):
            solution = subproblem.solve(bisection.budget)
            if solution is None:
                if not bisection.update_infeasible():
                    break
                continue
            plan = self.score(subproblem.selected_options(solution), mask)
            slack = limit - plan.peak.max_bytes
            if slack < 0 and plan.peak.moment not in moments:
                moments.add(plan.peak.moment)
                subproblem, bisection = self._start_at(plan.peak, mask)
                continue
            if slack >= 0:
                best = min(best, plan, key=lambda plan: plan.time_s)
                if not solution.memory_shadow_price:
                    break
            if not bisection.advance(slack):
                break
        return best

    def _start_at(self, peak: Peak, mask: Flags) -> tuple[KnapsackSubproblem, BudgetBisection]:
        limit = self.plan_search.problem.memory_limit_bytes
        subproblem = KnapsackSubproblem(self, mask, peak)
        return subproblem, BudgetBisection(subproblem.available_bytes(limit), limit // BUDGET_STEPS)

    def exact_small_search(self, recomputed_blocks: Flags, upper_bound_s: float) -> _ScoredPlan | None:
        """Return the fastest of all plans that beat ``upper_bound_s``, or None; models of few operators only."""
        labels = LabelProblem.create(self, recomputed_blocks)
        if labels is None:
            return None
        limit, bound_s = self.plan_search.problem.memory_limit_bytes, upper_bound_s - self._other_s(recomputed_blocks)
        faster = (self.score(options, recomputed_blocks) for options in enumerate_plans(labels, bound_s * (1 - 1e-9)))
        return next((plan for plan in faster if plan.peak.max_bytes <= limit), None)

    def score(self, options: Ints, recomputed_blocks: Flags) -> _ScoredPlan:
        """Return a plan with its step time and true peak."""
        is_recomputed = self.space.recompute_flags(recomputed_blocks)
        operators_s = float(self.times.total[is_recomputed, options].sum())
        return _ScoredPlan(
            options, operators_s + self._other_s(recomputed_blocks), self._peak(options, recomputed_blocks)
        )

    def to_candidate(self, options: Ints, recomputed_blocks: Flags, lower_bound_s: float = 0.0) -> Candidate:
        """Return a plan with all its costs."""
        problem, is_recomputed = self.plan_search.problem, self.space.recompute_flags(recomputed_blocks)
        choices = self.plan_search.wrapped_model.expand_choices(self.space.choices_of(options))
        blocks = zip(problem.model.blocks, recomputed_blocks, strict=True)
        return Candidate(
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            choices=choices,
            recomputed=tuple(block.name for block, flag in blocks if flag),
            compute_s=self._other_s(recomputed_blocks) + float(self.times.compute[is_recomputed, options].sum()),
            communication_s=float(self.times.communication[is_recomputed, options].sum()),
            peak=self._peak(options, recomputed_blocks),
            ranks=problem.cluster.ranks,
            lower_bound_s=lower_bound_s,
            wrap_assignment=tuple(
                unit if any(mode != Mode.DP for mode in choice.slices) else ""
                for unit, choice in zip(self.plan_search.wrap_assignment, choices, strict=True)
            ),
        )

    def _other_s(self, recomputed_blocks: Flags) -> float:
        """Return the seconds outside operators."""
        recompute_s = self.space.recompute_s(self.batch_size, self.accumulation)
        return self.space.unattributed_s(self.batch_size, self.accumulation) + float(
            recompute_s[recomputed_blocks].sum()
        )

    def _peak(self, options: Ints, recomputed_blocks: Flags) -> Peak:
        return self.space.timeline.peak_of_footprints(
            self.space.footprints[options], self.batch_size, self.accumulation, recomputed_blocks
        )

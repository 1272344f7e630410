"""The best plan at one batch size.

Each is found by the exact search (``knapsack.solve``) on the bytes that count at one moment of the step, the one where a
first plan has its peak. The timeline then gives the true peak; what it leaves unused is given back to the search, what
it exceeds is taken away, and where another moment turns out to be worse that one takes its place. Where operators are
few, all moments are then looked at together (``max_labels``). How many blocks of a kind are recomputed is enumerated, those
of the least lower bound first (``lower_bounds``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.search.infeasibility import infeasible_error
from lightning_osdp.planning.search.label_setting import LabelProblem, enumerate_plans
from lightning_osdp.planning.search.lower_bounds import LagrangianBounds, min_memory_options
from lightning_osdp.planning.search.search_space import SearchSpace
from lightning_osdp.planning.search.subproblem import KnapsackSubproblem, OptionCosts
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.wrapping import WrapAssignment, WrappedModel

MAX_SOLVES = 12
"""Solutions at most, while budget and true peak are brought together."""

MAX_HEURISTIC_SOLVES = 3
"""The same for a first look at a batch size."""

SMALL_MODEL, MAX_LOCAL_SEARCHES = 64, 4
"""Up to so many operators, the best plans of so many ways to recompute blocks are polished, else only the very best."""

MAX_PAIRED_OPTIONS = 256
"""Up to so many rows to exchange, pairs of them are looked at, too."""

MAX_RECOMPUTE_COUNTS_TRIED = 24
"""Ways to recompute blocks that are tried at one batch size, of those that the bound does not rule out."""

MAX_SWAPS, EXTRA_SWAPS = 32, 1024
"""Exchanges that are tried on the best plan of a batch size, to use what its true peak still leaves: so many, and so
many more over the number of operators. Where these are few, each one counts, and a try takes little."""

MIN_IMPROVEMENT = 1e-3
"""Relative: other ways to recompute blocks are not tried for less than this."""


@dataclass(frozen=True)
class Candidate:
    """The best plan found at one batch size."""

    batch_size: int
    accumulation: int
    choices: tuple[ShardingChoice, ...]
    recomputed: tuple[str, ...]
    """Names of the blocks that are."""
    compute_s: float
    communication_s: float
    peak: Peak
    ranks: int
    lower_bound_s: float = 0.0
    """No plan at this batch size takes less, as far as is known."""
    wrap_assignment: WrapAssignment = ()
    """Which operators share units; what is replicated shares none."""

    @property
    def step_time_s(self) -> float:
        """Of one optimizer step."""
        return self.compute_s + self.communication_s

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.global_batch_size / self.step_time_s


@dataclass(frozen=True)
class _ScoredPlan:
    """A plan as rows of the space."""

    options: Ints
    time_s: float
    peak: Peak


class PlanSearch:
    """Finds candidates for one problem; what does not depend on the batch size is prepared once.

    Args:
        problem: what there is.
        wrap_assignment: which operators share units (``joining``); None if none do.

    Raises:
        ConfigurationError: a wish's pattern matches nothing.
    """

    def __init__(self, problem: Problem, wrap_assignment: WrapAssignment | None = None) -> None:
        problem.constraints.check(problem.model)
        self.problem = problem
        self.wrap_assignment = wrap_assignment or ("",) * len(problem.model.operators)
        self.wrapped_model = WrappedModel.from_assignment(problem.model, self.wrap_assignment)
        self.space = SearchSpace(
            replace(problem, model=self.wrapped_model.model, compute=self.wrapped_model.merge_times(problem.compute))
        )
        self.bounds = LagrangianBounds(self.space)
        self._by_batch_size: dict[tuple[int, int], BatchSizeSearch] = {}
        self.min_memory_options = list(min_memory_options(self.space))

    def best_plan(self, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False) -> Candidate:
        """The fastest plan whose true peak is within the limit.

        Args:
            batch_size: samples per device and micro-batch.
            accumulation: micro-batches per optimizer step.
            heuristic_only: whether a good plan is enough; its ``lower_bound_s`` tells what the best may reach.

        Raises:
            InfeasibleError: none is.
        """
        found = self.best_plan_below(np.inf, batch_size, accumulation, heuristic_only=heuristic_only)
        if found is None:
            raise infeasible_error(self.problem, self.min_memory_plan(batch_size, accumulation).peak, batch_size)
        return found

    def best_plan_below(
        self, upper_bound_s: float, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False
    ) -> Candidate | None:
        """``best`` where only a plan that takes less than ``upper_bound_s`` is of use: ways to recompute blocks that can't
        are left out. None where that leaves nothing."""
        at = self.for_batch_size(batch_size, accumulation)
        bounds = at.lower_bounds_s
        found: dict[int, _ScoredPlan] = {}
        for vector in self._recompute_counts_to_try(
            np.where(bounds < upper_bound_s, bounds, np.inf), found, heuristic_only
        ):
            one = at.solve_with_recompute(vector, MAX_HEURISTIC_SOLVES if heuristic_only else MAX_SOLVES)
            if one is not None:
                found[vector] = one
        if not found:
            return None
        ranking = sorted(found, key=lambda vector: found[vector].time_s)
        few = len(self.space.group_of) <= SMALL_MODEL
        for vector in ranking[: 0 if heuristic_only else MAX_LOCAL_SEARCHES if few else 1]:
            flags = self.space.recompute_mask(vector)
            known_s = min(upper_bound_s, *(one.time_s for one in found.values()))
            found[vector] = at.exact_small_search(at.local_search(found[vector], flags), flags, known_s)
        vector = min(found, key=lambda vector: found[vector].time_s)
        return at.to_candidate(found[vector].options, self.space.recompute_mask(vector), float(bounds.min()))

    def min_memory_plan(self, batch_size: int, accumulation: int = 1) -> Candidate:
        """The plan that takes least memory, whatever the limit."""
        at = self.for_batch_size(batch_size, accumulation)
        vectors = self.space.recompute_counts
        ways = {0, int(vectors.sum(axis=1).argmax())}
        plans = [(rows, self.space.recompute_mask(way)) for way in sorted(ways) for rows in self.min_memory_options]
        found = [at.to_candidate(rows, flags) for rows, flags in plans]
        return min(found, key=lambda candidate: candidate.peak.max_bytes)

    def evaluate_choices(
        self,
        choices: tuple[ShardingChoice, ...],
        batch_size: int,
        accumulation: int = 1,
        recomputed: tuple[str, ...] = (),
    ) -> Candidate:
        """What a given plan costs, whether it fits or not."""
        names = [block.name for block in self.problem.model.blocks]
        flags = np.array([name in recomputed for name in names], dtype=bool)
        return self.for_batch_size(batch_size, accumulation).to_candidate(self.options_of(choices), flags)

    def lower_bound_s(self, batch_size: int, accumulation: int = 1) -> float:
        """Seconds of an optimizer step that no plan undercuts, whether one fits or not."""
        return float(self.for_batch_size(batch_size, accumulation).lower_bounds_s.min())

    def for_batch_size(self, batch_size: int, accumulation: int = 1) -> BatchSizeSearch:
        """The desk at one batch size, made once."""
        key = (batch_size, accumulation)
        if key not in self._by_batch_size:
            self._by_batch_size[key] = BatchSizeSearch(self, *key)
        return self._by_batch_size[key]

    def options_of(self, choices: Sequence[ShardingChoice]) -> Ints:
        """One row for each operator of the space, from one choice for each of the model."""
        return self.space.options_of(self.wrapped_model.merge_choices(choices))

    def _recompute_counts_to_try(
        self, lower_bounds_s: Floats, scored_plans: dict[int, _ScoredPlan], heuristic_only: bool
    ) -> Iterator[int]:
        """Vectors to try: the one of least bound, then around the best one found, then any that may be better yet."""
        order = np.argsort(lower_bounds_s, kind="stable").tolist()
        tried: set[int] = set()

        def is_worthwhile(recompute_index: int) -> bool:
            best = min((one.time_s for one in scored_plans.values()), default=np.inf)
            return recompute_index not in tried and lower_bounds_s[recompute_index] < best * (1 - MIN_IMPROVEMENT)

        def try_once(recompute_index: int) -> Iterator[int]:
            if is_worthwhile(recompute_index) and len(scored_plans) < MAX_RECOMPUTE_COUNTS_TRIED:
                tried.add(recompute_index)
                yield recompute_index

        for vector in order:  # up to the first that fits; that one does not is soon seen
            yield from try_once(vector)
            if scored_plans:
                break
        step = max(1, int(self.space.recompute_counts.max(initial=1)) // 2)
        while step and scored_plans and not heuristic_only:
            best = min(scored_plans, key=lambda vector: scored_plans[vector].time_s)
            for vector in self._neighbours(best, step):
                yield from try_once(vector)
            step //= 2
        for vector in order if not heuristic_only else ():
            yield from try_once(vector)

    def _neighbours(self, recompute_index: int, step: int) -> Iterator[int]:
        """The vectors that differ in one kind by about ``run_step`` blocks."""
        vectors = self.space.recompute_counts
        for kind in range(vectors.shape[1]):
            others = np.delete(vectors == vectors[recompute_index], kind, axis=1).all(axis=1)
            for sign in (1, -1):
                wanted = vectors[recompute_index, kind] + sign * step
                near = np.where(others, np.abs(vectors[:, kind] - wanted), np.inf)
                yield int(near.argmin())


class BatchSizeSearch(OptionCosts):
    """The desk at one batch size."""

    def __init__(self, plan_search: PlanSearch, batch_size: int, accumulation: int) -> None:
        super().__init__(plan_search.space, batch_size, accumulation)
        self.plan_search = plan_search

    @cached_property
    def lower_bounds_s(self) -> Floats:
        """See ``LagrangianBounds.lower_bounds_s``."""
        return self.plan_search.bounds.lower_bounds_s(self.times, self.batch_size, self.accumulation)

    def solve_with_recompute(self, recompute_index: int, max_solves: int) -> _ScoredPlan | None:
        """The fastest plan that fits with these blocks recomputed; None if none does."""
        flags, limit = self.space.recompute_mask(recompute_index), self.plan_search.problem.memory_limit_bytes
        smallest = [self.score(rows, flags) for rows in self.plan_search.min_memory_options]
        best = min(smallest, key=lambda one: one.peak.max_bytes)
        if best.peak.max_bytes > limit:
            return None
        moments = {best.peak.moment}
        groups = KnapsackSubproblem(self, flags, best.peak)
        near = limit // 2000
        low, high, budget = 0, 0, groups.available_bytes(limit)
        for _ in range(max_solves):
            solution = groups.solve(budget)
            if solution is None:  # less than the least, as these groups count; the last one exceeded the limit
                if high - budget <= near:
                    break
                low, budget = budget, (budget + high) // 2
                continue
            found = self.score(groups.selected_options(solution), flags)
            slack = limit - found.peak.max_bytes
            if slack >= 0:
                best = min(best, found, key=lambda one: one.time_s)
                if not solution.memory_shadow_price:
                    break
                low = budget
            elif found.peak.moment not in moments:
                moments.add(found.peak.moment)
                groups = KnapsackSubproblem(self, flags, found.peak)
                low, high, budget = 0, 0, groups.available_bytes(limit)
                continue
            else:
                high = budget
            proposal = budget + slack if slack >= 0 else budget + min(slack, -near)
            if low and high and not low < proposal < high:
                proposal = (low + high) // 2
            if slack >= 0 and proposal - budget <= near:  # a plan that exceeds the limit by little does not fit either
                break
            budget = proposal
        return best

    def local_search(self, plan: _ScoredPlan, recomputed_blocks: Flags) -> _ScoredPlan:
        """The plan with a faster row for one operator, or another row for each of two, while the true peak allows it.

        Operators that are alike for the search differ in when they run: of those with the same row only the first and
        the last are tried.
        """
        if not len(plan.options):
            return plan
        tries, again = MAX_SWAPS + EXTRA_SWAPS // len(plan.options), self.space.recompute_flags(recomputed_blocks)
        gaining = True
        while gaining:
            gaining = False
            for exchange in self._candidate_swaps(plan.options, again, tries):
                tries -= 1
                rows = plan.options.copy()
                for operator, row in exchange:
                    rows[operator] = row
                other = self.score(rows, recomputed_blocks)
                if other.peak.max_bytes <= self.plan_search.problem.memory_limit_bytes:
                    plan, gaining = other, True
                    break
        return plan

    def exact_small_search(self, plan: _ScoredPlan, recomputed_blocks: Flags, upper_bound_s: float) -> _ScoredPlan:
        """The fastest of all plans if it is faster than this one and than what is known; where operators are few."""
        limit, again = self.plan_search.problem.memory_limit_bytes, self.space.recompute_flags(recomputed_blocks)
        rows = LabelProblem.create(self.space, self.times, self.batch_size, self.accumulation, recomputed_blocks)
        if rows is None:
            return plan
        other_s = plan.time_s - float(self.times.total[again, plan.options].sum())
        under_s = (min(plan.time_s, upper_bound_s) - other_s) * (1 - 1e-9)
        faster = (self.score(chosen, recomputed_blocks) for chosen in enumerate_plans(rows, under_s))
        return next((one for one in faster if one.peak.max_bytes <= limit), plan)

    def _candidate_swaps(self, options: Ints, is_recomputed: Ints, max_swaps: int) -> list[tuple[tuple[int, int], ...]]:
        """One or two of (operator, row), those that save most first."""
        _, first, inverse = np.unique(options * 2 + is_recomputed, return_index=True, return_inverse=True)
        last = np.zeros(len(first), dtype=np.int64)
        last[inverse] = np.arange(len(options))
        saved_s: list[float] = []
        moves: list[tuple[int, int]] = []
        for operator in sorted({*first.tolist(), *last.tolist()}):
            menu, own = self.space.option_groups[self.space.group_of[operator]].options, options[operator]
            saved = self.times.total[is_recomputed[operator], own] - self.times.total[is_recomputed[operator], menu]
            saved_s += saved.tolist()
            moves += [(operator, row) for row in range(menu.start, menu.stop)]
        single, operators = np.array(saved_s), np.array([operator for operator, _ in moves])
        few = slice(len(moves) if len(moves) <= MAX_PAIRED_OPTIONS else 0)
        pairs = np.where(operators[:, None] < operators[few], single[:, None] + single[few], 0.0)
        gains = np.concatenate([single, pairs.ravel()])
        best = np.argsort(-gains, kind="stable")[:max_swaps]
        width = pairs.shape[1]
        chosen = [divmod(at - len(moves), width) if at >= len(moves) else (at, at) for at in best.tolist()]
        worth = (gains[best] > 1e-12 * float(self.times.total.max())).tolist()
        return [tuple({moves[one], moves[two]}) for (one, two), gain in zip(chosen, worth, strict=True) if gain]

    def score(self, options: Ints, recomputed_blocks: Flags) -> _ScoredPlan:
        """A plan's time and true peak."""
        again = self.space.recompute_flags(recomputed_blocks)
        seconds = float(self.times.total[again, options].sum())
        blocks = float(self.space.recompute_s(self.batch_size, self.accumulation)[recomputed_blocks].sum())
        peak = self.space.timeline.peak_of_footprints(
            self.space.footprints[options], self.batch_size, self.accumulation, recomputed_blocks
        )
        return _ScoredPlan(
            options, seconds + blocks + self.space.unattributed_s(self.batch_size, self.accumulation), peak
        )

    def to_candidate(self, options: Ints, recomputed_blocks: Flags, lower_bound_s: float = 0.0) -> Candidate:
        """The plan with all that it costs."""
        problem, again = self.plan_search.problem, self.space.recompute_flags(recomputed_blocks)
        outside = self.space.unattributed_s(self.batch_size, self.accumulation)
        blocks = float(self.space.recompute_s(self.batch_size, self.accumulation)[recomputed_blocks].sum())
        choices = self.plan_search.wrapped_model.expand_choices(self.space.choices_of(options))
        return Candidate(
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            choices=choices,
            recomputed=tuple(
                block.name for block, flag in zip(problem.model.blocks, recomputed_blocks, strict=True) if flag
            ),
            compute_s=outside + blocks + float(self.times.compute[again, options].sum()),
            communication_s=float(self.times.communication[again, options].sum()),
            peak=self.space.timeline.peak_of_footprints(
                self.space.footprints[options], self.batch_size, self.accumulation, recomputed_blocks
            ),
            ranks=problem.cluster.ranks,
            lower_bound_s=lower_bound_s,
            wrap_assignment=tuple(
                unit if any(mode != Mode.DP for mode in choice.slices) else ""
                for unit, choice in zip(self.plan_search.wrap_assignment, choices, strict=True)
            ),
        )

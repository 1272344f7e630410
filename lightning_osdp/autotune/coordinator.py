"""Ranks that plan together: how much memory they have, the first one's plan on all of them, and that a start ends in
time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_osdp.autotune import measure
from lightning_osdp.autotune.measure import Profile, RankGroup
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.autotune.trials import run_plan_trial
from lightning_osdp.backend.agree import all_reduce_max, broadcast_object, raise_on_all_ranks
from lightning_osdp.backend.allocator import retain_freed_memory
from lightning_osdp.backend.memory import MemoryLimit, growth_reserve, memory_in_use, process_overhead
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.planning.cost.caching_allocator import fragmentation_bytes, persistent_tensor_sizes
from lightning_osdp.planning.cost.cpu_effects import max_retained_batch_size
from lightning_osdp.planning.cost.run_correction import correct_cluster, correct_compute
from lightning_osdp.planning.cost.trial_correction import (
    TRIAL_RELATIVE_ERROR,
    Trial,
    apply_trial,
    fit_calibration,
    trials_of_plan,
)
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, no_deadline
from lightning_osdp.planning.search.plan_selection import CachedPlan, find_cached_plan, prune_trials, select_plan
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.tracing.trace import TracedStep

STARTUP_BUDGET_S = 30.0
"""What a start is to take, from the beginning of the set-up to the first step."""

APPLY_RESERVE_S = 3.0
"""Of that, what is kept for applying a plan. [measured: 60 M parameters, 4 ranks on 2 cores: 2.3 s from the end of a
search]"""

MAX_PLAN_TRIALS = 2
"""Plans that one start finds and rehearses."""

FIRST_SEARCH_FRACTION = 0.4
"""Share of what is left that a search may take which is to be followed by a rehearsal and another search."""

MAX_RETAIN_BATCH_FACTOR = 2
"""Times the largest batch size that was traced, up to which freed tensors may stay in the heap. [measured, natural
language model, traced at 2 and 8 samples: a step of 2 takes 0.72 of the time, of 8 0.76, of 46 all of it]"""

UNTRIED_PLAN_MARGIN = 0.25
"""Share by which a plan has to promise more than what was rehearsed, to be taken as it is where there is no time to
rehearse it as well. What nobody has run is seldom predicted that much too fast; plans of earlier starts, which may have
had less memory, can be that much slower."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of the rank that has least.

    Attributes:
        limit: what a rank may take.
        non_model: of that, what is not the model's.
        estimated: of ``non_model``, what is not there yet but kept for the first steps and for evaluation.
        file_pages: of ``limit``, what stands for pages of files (``MemoryLimit.file_pages``).
    """

    limit: int
    non_model: int
    estimated: int
    file_pages: int = 0

    def with_observed_usage(self, cached_plan: CachedPlan) -> MemoryBudget:
        """With what an earlier start has seen steps leave behind, if it has and that is within what is guessed now."""
        seen = (
            not cached_plan.estimated_bytes
            and self.non_model - self.estimated <= cached_plan.non_model_bytes <= self.non_model
        )
        return replace(self, non_model=cached_plan.non_model_bytes, estimated=0) if seen else self


@dataclass(frozen=True)
class PlanningCoordinator:
    """Ranks that plan together; what stays the same while they do."""

    traced: TracedStep
    rank_group: RankGroup
    cluster: Cluster | None
    limit: MemoryLimit
    model_bytes: int
    constraints: SearchConstraints
    non_training: NonTrainingWork
    started_at_s: float
    """When the start began, on the monotonic clock."""

    def free_bytes(self) -> int:
        """What this rank may take now."""
        return max(0, self.limit.current() - memory_in_use(self.rank_group.device))

    def memory_budget(self, after_trial: bool) -> MemoryBudget:
        """What there is now; ``after_trial``: after steps of a plan that was found. Collective."""
        device = self.rank_group.device
        used = non_model_bytes(self.traced, device, self.model_bytes, self.non_training, after_trial)
        coming = self.limit.expected_file_pages(after_trial)
        limit, files = self.limit.current() + coming, self.limit.file_pages() + coming
        limit, used, files = self.all_reduce_min_max([limit], [used, files])
        return MemoryBudget(limit, used, min(used, self._reserved_bytes(after_trial)), files)

    def cached_memory_budget(self, cached_plan: CachedPlan) -> MemoryBudget | None:
        """What an earlier start was left with when all was there, and kept for its first steps, if this one is on its
        way to that: then nothing has to be run and no garbage looked for to see how much memory there is. None if it
        has taken more already. Collective."""
        device = self.rank_group.device
        held = (
            memory_in_use(device)
            - self.model_bytes
            + _fragmentation_margin(self.traced, device)
            + self._reserved_bytes(after_trial=False)
        )
        limit, held = self.all_reduce_min_max([self.limit.current() - self.limit.file_pages()], [held])
        if held > cached_plan.non_model_bytes:
            return None
        return MemoryBudget(
            limit + cached_plan.file_page_bytes,
            cached_plan.non_model_bytes,
            cached_plan.estimated_bytes,
            cached_plan.file_page_bytes,
        )

    def _reserved_bytes(self, after_trial: bool) -> int:
        """For what is not there yet."""
        return growth_reserve(self.rank_group.device, after_trial, self.non_training.has_own_evaluation_batch_size)

    def all_reduce_min_max(self, minima: Sequence[int], maxima: Sequence[int]) -> list[int]:
        """The least of any rank of some numbers, then the most of others. Collective."""
        numbers = [*(-each for each in minima), *maxima]
        found = [int(each) for each in all_reduce_max(numbers, self.rank_group.group, self.rank_group.device)]
        return [*(-each for each in found[: len(minima)]), *found[len(minima) :]]

    def search_and_trial(
        self, profile: Profile, policy: BatchSizePolicy, memory_budget: MemoryBudget, trial_context: TrialContext | None
    ) -> tuple[ExecutionPlan, Profile, MemoryBudget]:
        """The plan that is found, rehearsed where it can be; the measurements with the rehearsals, and the room that
        these have left. Collective."""
        before_s = self.remaining_s()
        plan = self.plan_on_rank_zero(profile, policy, memory_budget, time_fraction=FIRST_SEARCH_FRACTION)
        search_s = before_s - self.remaining_s()
        cut_short = search_s >= FIRST_SEARCH_FRACTION * (before_s - APPLY_RESERVE_S)
        for left in reversed(range(MAX_PLAN_TRIALS)):
            before_s = self.remaining_s()
            shown = self.run_trial(trial_context, profile, plan, search_s)
            if shown is None:
                # for a rehearsal that there is not; what is found anew in no more time than before is no better
                if cut_short and self.remaining_s() - APPLY_RESERVE_S > search_s:
                    plan = self.plan_on_rank_zero(
                        profile, policy, memory_budget, UNTRIED_PLAN_MARGIN, time_fraction=1.0
                    )
                break
            profile = profile.model_copy(update={"trials": prune_trials((*profile.trials, shown))})
            memory_budget = self.memory_budget(after_trial=True)
            left_s = self.remaining_s()
            if left_s - APPLY_RESERVE_S < search_s:  # what was rehearsed is known; to look for more would take too long
                known = self.repredict(profile, policy, plan, memory_budget)
                if known is not None:
                    return known, profile, memory_budget
            again = (
                left and left_s - APPLY_RESERVE_S - 2 * search_s > before_s - left_s
            )  # it would search before and after
            try:
                gain, share = (TRIAL_RELATIVE_ERROR, FIRST_SEARCH_FRACTION) if again else (UNTRIED_PLAN_MARGIN, 1.0)
                plan = self.plan_on_rank_zero(profile, policy, memory_budget, gain, share)
            except InfeasibleError:  # for what the rehearsal has left behind: the plan was the last that fits
                return apply_trial(plan, profile.trials), profile, memory_budget
            if not again:
                break
        return plan, profile, memory_budget

    def repredict(
        self, profile: Profile, policy: BatchSizePolicy, plan: ExecutionPlan, memory_budget: MemoryBudget
    ) -> ExecutionPlan | None:
        """``make_plan`` as it is predicted now, without a search; None if there is no room for it any more. Collective."""

        def look_up(problem: Problem) -> ExecutionPlan | None:
            return find_cached_plan(problem, policy, "", [CachedPlan(request_key="", plan=plan)], profile.trials)

        return self._on_rank_zero(look_up, profile, memory_budget)

    def remaining_s(self) -> float:
        """Seconds that the start may still take, on the rank that has fewest. Collective."""
        (took_s,) = all_reduce_max(
            [time.monotonic() - self.started_at_s], self.rank_group.group, self.rank_group.device
        )
        return STARTUP_BUDGET_S - took_s

    def plan_on_rank_zero(
        self,
        profile: Profile,
        policy: BatchSizePolicy,
        memory_budget: MemoryBudget,
        required_gain: float = TRIAL_RELATIVE_ERROR,
        time_fraction: float | None = None,
    ) -> ExecutionPlan:
        """The first rank's plan, on every rank; if a ``time_fraction`` of what is left of the start is given, the search takes
        little more. Collective."""
        now_s = time.monotonic()
        left_s = self.started_at_s + STARTUP_BUDGET_S - APPLY_RESERVE_S - now_s

        def deadline_reached() -> bool:
            return time_fraction is not None and time.monotonic() - now_s > time_fraction * left_s

        def search(problem: Problem) -> ExecutionPlan:
            with retain_freed_memory():
                return plan_or_fallback(
                    problem, policy, profile.trials, memory_budget.estimated, required_gain, deadline_reached
                )

        plan = self._on_rank_zero(search, profile, memory_budget)
        assert plan is not None
        return plan

    def reuse_cached_plan(
        self, profile: Profile, policy: BatchSizePolicy, request_key: str
    ) -> tuple[ExecutionPlan | None, MemoryBudget]:
        """What an earlier start has come to, if that is still right, and the room that there is. Collective."""

        def look_up(problem: Problem) -> ExecutionPlan | None:
            return find_cached_plan(problem, policy, request_key, profile.cached_plans, profile.trials)

        earlier = [one for one in profile.cached_plans if one.request_key == request_key]
        room = self.cached_memory_budget(earlier[-1]) if earlier else None
        plan = self._on_rank_zero(look_up, profile, room) if room is not None else None
        if room is None or plan is None:
            raise_on_all_ranks(self.rank_group.group, lambda: compute.warm_up(self.traced, self.rank_group.device))
            room = self.memory_budget(after_trial=False)
            room = room.with_observed_usage(earlier[-1]) if earlier else room
            plan = self._on_rank_zero(look_up, profile, room)
        return plan, room

    def _on_rank_zero(
        self, work: Callable[[Problem], ExecutionPlan | None], profile: Profile, memory_budget: MemoryBudget
    ) -> ExecutionPlan | None:
        """What ``work`` makes of the problem there, on every rank. Collective."""

        def run_to_json() -> str | None:
            if not self.rank_group.is_rank_zero:
                return None
            engine = fit_calibration(profile.engine, profile.trials)
            hardware = measure.resolve_cluster(
                self.rank_group, self.cluster, profile.model_copy(update={"engine": engine})
            )
            problem = build_problem(
                self.traced,
                hardware,
                profile,
                memory_budget.limit,
                memory_budget.non_model,
                self.constraints,
                self.non_training,
            )
            plan = work(problem)
            return None if plan is None else plan.to_json()

        text = broadcast_object(self.rank_group.group, raise_on_all_ranks(self.rank_group.group, run_to_json))
        return None if text is None else ExecutionPlan.from_json(text)

    def run_trial(
        self, trial_context: TrialContext | None, profile: Profile, plan: ExecutionPlan, search_s: float
    ) -> Trial | None:
        """What ``make_plan`` takes; None if that is known, or can't be. Collective. One more search comes after it, of
        ``search_s``."""
        if trial_context is None or trials_of_plan(plan, profile.trials):
            return None
        known = measure.resolve_cluster(self.rank_group, self.cluster, profile)

        def remaining_s() -> float:
            return self.remaining_s() - search_s - APPLY_RESERVE_S

        compute = (profile.compute_with_retained_heap if plan.retain_freed_memory else None) or profile.compute
        return run_plan_trial(
            trial_context, self.traced, self.rank_group.group, known, compute, plan, self.free_bytes(), remaining_s
        )


def plan_or_fallback(
    problem: Problem,
    policy: BatchSizePolicy,
    trials: Sequence[Trial],
    estimated_bytes: int,
    required_gain: float = TRIAL_RELATIVE_ERROR,
    deadline_reached: Callable[[], bool] = no_deadline,
) -> ExecutionPlan:
    """The plan for ``problem``. Where nothing fits for want of no more than ``estimated_bytes``, which may not be taken,
    the plan of least memory is tried: without it there would be no training at all."""
    try:
        return select_plan(problem, policy, trials, required_gain, deadline_reached)
    except InfeasibleError as error:
        if error.needed_bytes > problem.memory_limit_bytes + estimated_bytes:
            raise
        warnings.warn(
            f"{error}. {estimated_bytes >> 20} MiB are kept for what the process has yet to take, which may be less: "
            "training is tried, and ends where it does run out of memory",
            OSDPWarning,
            stacklevel=2,
        )
        least = replace(problem, memory_limit_bytes=error.needed_bytes)
        plan = select_plan(least, policy, trials, required_gain, deadline_reached)
        return plan.model_copy(update={"memory_limit_bytes": problem.memory_limit_bytes})


def build_problem(
    traced: TracedStep,
    cluster: Cluster,
    profile: Profile,
    limit_bytes: int,
    overhead_bytes: int,
    constraints: SearchConstraints,
    non_training: NonTrainingWork,
) -> Problem:
    """What is to be solved, with all that was measured and all that runs have taught."""
    correction = profile.correction
    kept_size = int(
        min(MAX_RETAIN_BATCH_FACTOR * max(traced.batch_sizes, default=1), max_retained_batch_size(traced.model_profile))
    )
    kept = profile.compute_with_retained_heap if kept_size else None
    return Problem(
        profile.compute.with_workspace(traced.model_profile),
        correct_cluster(cluster, correction),
        correct_compute(profile.compute, correction),
        limit_bytes,
        max(0, overhead_bytes + correction.memory_bytes),
        constraints,
        non_training,
        None if kept is None else correct_compute(kept, correction),
        kept_size,
    )


def non_model_bytes(
    traced: TracedStep, device: torch.device, model_bytes: int, non_training: NonTrainingWork, after_trial: bool = False
) -> int:
    """The process's own memory, and on CUDA what the caching allocator can't use of the segments that it takes."""
    return process_overhead(
        device, model_bytes, after_trial, non_training.has_own_evaluation_batch_size
    ) + _fragmentation_margin(traced, device)


def _fragmentation_margin(traced: TracedStep, device: torch.device) -> int:
    return fragmentation_bytes(persistent_tensor_sizes(traced.model_profile)) if device.type == "cuda" else 0

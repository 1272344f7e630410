"""What ranks do together while they plan: agree on their memory, and take the first rank's plan.

Every public method is collective: every rank must call it, and gets the same result.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.ranks import RankGroup, Result, resolve_cluster
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.backend.allocator import retain_freed_memory
from lightning_osdp.backend.memory import MemoryLimit, Progress, growth_reserve, memory_in_use, process_overhead
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.planning.cost.caching_allocator import fragmentation_bytes, persistent_tensor_sizes
from lightning_osdp.planning.cost.cpu_effects import max_retained_batch_size
from lightning_osdp.planning.cost.run_correction import Correction, correct_cluster, correct_compute
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, fit_calibration
from lightning_osdp.planning.search.baselines import find_baselines
from lightning_osdp.planning.search.batch_size_search import no_deadline
from lightning_osdp.planning.search.finalists import choose_tried_plan, find_finalists
from lightning_osdp.planning.search.plan_selection import CachedPlan, find_cached_plan, repredict_memory, select_plan
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.formatting import format_seconds
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, ModelProfile, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.search_record import Baseline

log_info = rank_zero_only(logging.getLogger(__name__).info)

UNTRIED_PLAN_MARGIN = 0.25
"""Gain that a plan must promise over a tried one, relative, if there is no time to try it as well. Predictions of
untried plans are seldom that much too fast; plans of earlier starts, made with less memory, can be that much slower."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for, beside the model and the ranks.

    Attributes:
        policy: which batch sizes to search.
        memory_limit: memory limit of a device; the smallest over the ranks counts. It is read when all is measured: it
            may count pages of libraries, which grow by what measuring runs.
        model_bytes: bytes of parameters and buffers on the device now.
        cluster: hardware that is known already, whose links are not measured; None for that of the ranks.
        constraints: what is not left to the search.
        non_training: what the run does between steps.
    """

    policy: BatchSizePolicy
    memory_limit: MemoryLimit
    model_bytes: int
    cluster: Cluster | None = None
    constraints: SearchConstraints = UNCONSTRAINED
    non_training: NonTrainingWork = NO_NON_TRAINING_WORK


@dataclass(frozen=True)
class MemoryBudget:
    """The memory in bytes of the rank with least.

    Attributes:
        limit: what a rank may take.
        non_model: part of ``limit`` that is not the model's.
        estimated: part of ``non_model`` that is not in use yet, but reserved for the first steps and for evaluation.
        file_pages: part of ``limit`` that stands for pages of files (``MemoryLimit.file_pages``).
        progress: how far the start was.
    """

    limit: int
    non_model: int
    estimated: int
    file_pages: int = 0
    progress: Progress = field(default="measured", compare=False)

    @property
    def model(self) -> int:
        """Return the bytes that are left for the model."""
        return self.limit - self.non_model

    def with_observed_usage(self, cached_plan: CachedPlan) -> MemoryBudget:
        """Return the budget with the usage that an earlier start has observed after its search or its trials.

        Unchanged if that is not within what is estimated now.
        """
        least = self.non_model - self.estimated + cached_plan.estimated_bytes
        if not least <= cached_plan.non_model_bytes <= self.non_model:
            return self
        return replace(self, non_model=cached_plan.non_model_bytes, estimated=cached_plan.estimated_bytes)


@dataclass(frozen=True)
class PlanningCoordinator:
    """The ranks, and what stays the same while they plan. It holds no kernels and no tensors.

    Attributes:
        request: what the plan is asked for.
        ranks: the ranks.
        budget: the time of the start.
        model: the traced step.
        batch_sizes: the traced batch sizes.
    """

    request: PlanRequest
    ranks: RankGroup
    budget: StartupBudget
    model: ModelProfile
    batch_sizes: tuple[int, ...] = field(default=())

    def free_bytes(self) -> int:
        """Return what this rank may take now: within the limit of training, if it trains afterwards. Not collective."""
        limit = self.request.memory_limit
        limit = replace(limit, user_limit=None) if self.ranks.is_offline else limit
        return max(0, limit.current() - memory_in_use(self.ranks.device))

    def memory_budget(self, progress: Progress) -> MemoryBudget:
        """Return the memory that there is now; ``progress``: how far the start is."""
        limit, device = self.request.memory_limit, self.ranks.device
        reserved = self._reserved_bytes(progress)
        used = process_overhead(device, self.request.model_bytes, reserved) + self._fragmentation_margin()
        coming = limit.expected_file_pages(progress)
        minimum, used, file_pages = self._min_and_max(limit.current() + coming, [used, limit.file_pages() + coming])
        return MemoryBudget(minimum, used, min(used, reserved), file_pages, progress)

    def cached_memory_budget(self, cached_plan: CachedPlan) -> MemoryBudget | None:
        """Return the budget of the start that chose ``cached_plan``; None if this process has taken more already.

        Then nothing has to be run and no garbage collected to see how much memory there is.
        """
        request = self.request
        own = memory_in_use(self.ranks.device) - request.model_bytes + self._fragmentation_margin()
        limit, used = self._min_and_max(
            request.memory_limit.current() - request.memory_limit.file_pages(), [own + self._reserved_bytes("measured")]
        )
        if used > cached_plan.non_model_bytes:
            return None
        pages = cached_plan.file_page_bytes
        return MemoryBudget(limit + pages, cached_plan.non_model_bytes, cached_plan.estimated_bytes, pages)

    def search(
        self,
        profile: Profile,
        memory_budget: MemoryBudget,
        required_gain: float = TRIAL_RELATIVE_ERROR,
        time_fraction: float | None = None,
    ) -> ExecutionPlan:
        """Return the plan that the first rank finds.

        Args:
            profile: the measurements and trials.
            memory_budget: the memory.
            required_gain: relative gain that a plan must promise over one that was tried.
            time_fraction: fraction of the remaining time after which the search ends; None for no deadline.

        Raises:
            InfeasibleError: nothing fits.
        """
        self.budget.begin_stage("searching a plan")
        began_s, deadline_reached = time.monotonic(), self.budget.deadline(time_fraction)
        # Training may be tried without what is only estimated; a plan made offline must fit.
        estimated_bytes = 0 if self.ranks.is_offline else memory_budget.estimated

        def find_plan(problem: Problem) -> ExecutionPlan:
            with retain_freed_memory():
                policy, trials = self.request.policy, profile.trials
                return plan_or_fallback(problem, policy, trials, estimated_bytes, required_gain, deadline_reached)

        plan = self._on_rank_zero(find_plan, profile, memory_budget)
        text = f"batch size {plan.batch_size}, predicted {format_seconds(plan.predicted.step_time_s)}"
        searched_s = format_seconds(time.monotonic() - began_s)
        log_info("searched %d batch sizes in %s: %s", len(plan.frontier), searched_s, text)
        return plan

    def look_up_plan(
        self, profile: Profile, memory_budget: MemoryBudget, request_key: str, cached_plans: Sequence[CachedPlan]
    ) -> ExecutionPlan | None:
        """Return the cached plan for nearly the same problem, as predicted now; None if there is none that fits."""

        def look_up(problem: Problem) -> ExecutionPlan | None:
            return find_cached_plan(problem, self.request.policy, request_key, cached_plans, profile.trials)

        return self._on_rank_zero(look_up, profile, memory_budget)

    def find_finalists(
        self, profile: Profile, memory_budget: MemoryBudget, found: ExecutionPlan
    ) -> list[ExecutionPlan]:
        """Return the plans to try in turns, ``found`` first (see ``search.finalists``)."""

        def find(problem: Problem) -> list[ExecutionPlan]:
            return find_finalists(problem, self.request.policy, found)

        return self._on_rank_zero(find, profile, memory_budget)

    def choose_tried_plan(
        self, profile: Profile, memory_budget: MemoryBudget, plans: Sequence[ExecutionPlan]
    ) -> ExecutionPlan | None:
        """Return the plan to take of those that were tried; None if none fits any more."""

        def choose(problem: Problem) -> ExecutionPlan | None:
            return choose_tried_plan(problem, self.request.policy, plans, profile.trials)

        plan = self._on_rank_zero(choose, profile, memory_budget)
        if plan is not None and plan.tried:
            took = ", ".join(f"{one.name} {format_seconds(one.step_time_s)}" for one in plan.tried)
            log_info("tried plans in turns: %s", took)
        return plan

    def repredict_memory(self, profile: Profile, memory_budget: MemoryBudget, plan: ExecutionPlan) -> ExecutionPlan:
        """Return ``plan`` with its memory as predicted now."""
        policy = self.request.policy
        return self._on_rank_zero(lambda problem: repredict_memory(problem, policy, plan), profile, memory_budget)

    def with_baselines(self, profile: Profile, memory_budget: MemoryBudget, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan with what DDP, ZeRO-2 and FSDP would do in its place (see ``search.baselines``)."""

        def find(problem: Problem) -> tuple[Baseline, ...]:
            return find_baselines(plan, problem, self.request.policy, profile.trials)

        return plan.model_copy(update={"baselines": self._on_rank_zero(find, profile, memory_budget)})

    def build_problem(self, profile: Profile, memory_budget: MemoryBudget) -> Problem:
        """Return the problem to solve, with all that was measured and all that trials and runs have shown."""
        correction, engine = profile.correction, fit_calibration(profile.engine, profile.trials)
        cluster = resolve_cluster(self.ranks, self.request.cluster, profile.model_copy(update={"engine": engine}))
        retained_batch_size = max_retained_batch_size(self.model)
        retained = profile.compute_with_retained_heap if retained_batch_size else None
        non_training = self.request.non_training
        return Problem(
            model=profile.compute.with_workspace(self.model),
            cluster=correct_cluster(cluster, correction),
            compute=correct_compute(profile.compute, correction),
            memory_limit_bytes=memory_budget.limit,
            overhead_bytes=max(0, memory_budget.non_model + correction.memory_bytes) + non_training.copied_bytes,
            constraints=self.request.constraints,
            non_training=non_training,
            compute_with_retained_heap=None if retained is None else correct_compute(retained, correction),
            max_retained_batch_size=None if math.isinf(retained_batch_size) else int(retained_batch_size),
        )

    def _on_rank_zero(self, work: Callable[[Problem], Result], profile: Profile, memory_budget: MemoryBudget) -> Result:
        """Return on every rank what ``work`` makes of the problem on the first one."""

        def run() -> Any:
            return work(self.build_problem(profile, memory_budget)) if self.ranks.is_rank_zero else None

        found: Result = self.ranks.broadcast_object(self.ranks.raise_on_all_ranks(run))
        return found

    def _min_and_max(self, minimum: int, maxima: Sequence[int]) -> list[int]:
        """Return the smallest value of one number over the ranks, and the largest ones of others."""
        negated, *largest = self.ranks.all_reduce_max([-minimum, *maxima])
        return [-int(negated), *map(int, largest)]

    def _reserved_bytes(self, progress: Progress) -> int:
        between, shapes = self.request.non_training, len(self.model.low_precision_shapes)
        saves_whole = between.checkpoint_memory != "nothing"
        return growth_reserve(self.ranks.device, progress, between.has_own_evaluation_batch_size, shapes, saves_whole)

    def _fragmentation_margin(self) -> int:
        """Return what the caching allocator can't use of its segments on CUDA."""
        return fragmentation_bytes(persistent_tensor_sizes(self.model)) if self.ranks.device.type == "cuda" else 0


@dataclass(frozen=True)
class Replanner:
    """Plans again during training, from the measurements of the start.

    Attributes:
        coordinator: the ranks and the request.
        profile: the measurements.
        memory_budget: the memory.
    """

    coordinator: PlanningCoordinator
    profile: Profile
    memory_budget: MemoryBudget

    def replan(self, correction: Correction, policy: BatchSizePolicy) -> ExecutionPlan:
        """Return a plan with freed tensors released, as memory is short. Collective: every rank must call it.

        Raises:
            InfeasibleError: nothing fits.
        """
        coordinator = replace(self.coordinator, request=replace(self.coordinator.request, policy=policy))
        profile = self.profile.model_copy(update={"correction": correction, "compute_with_retained_heap": None})
        plan = coordinator.search(profile, self.memory_budget, UNTRIED_PLAN_MARGIN)
        return coordinator.with_baselines(profile, self.memory_budget, plan)


def plan_or_fallback(
    problem: Problem,
    policy: BatchSizePolicy,
    trials: Sequence[Trial],
    estimated_bytes: int,
    required_gain: float = TRIAL_RELATIVE_ERROR,
    deadline_reached: Callable[[], bool] = no_deadline,
) -> ExecutionPlan:
    """Return the plan for ``problem``, or the plan of least memory if nothing fits for want of an estimate.

    The fallback is used if at most ``estimated_bytes`` are missing, which the process may never take: without it there
    would be no training at all.

    Raises:
        InfeasibleError: more is missing.
    """
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
        minimum = replace(problem, memory_limit_bytes=error.needed_bytes)
        plan = select_plan(minimum, policy, trials, required_gain, deadline_reached)
        return plan.model_copy(update={"memory_limit_bytes": problem.memory_limit_bytes})

"""Choose between the plan that a search finds and plans that were already trialled, also from earlier starts.

A search among plans that were never run prefers those that are predicted too fast. A trialled plan therefore wins
unless another one is predicted to be faster by more than the error of a trial.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, apply_trial, trials_of_plan
from lightning_osdp.planning.search.batch_size_search import WrapPolicySearch, no_deadline, search_batch_sizes, to_plan
from lightning_osdp.planning.spec.batch_sizes import MAX_BATCH_SIZE, BatchSizePolicy
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.model import NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem

BUDGET_TOLERANCE, BUDGET_TOLERANCE_BYTES = 0.1, 12 << 20
"""Difference of the model's memory budget (a fraction, or bytes if these are more) up to which two starts have the same
problem: the memory of the process itself differs by a few MiB from start to start."""

CORRECTION_BUCKET = 0.6
"""Bucket width (natural log) of ``correction.communication / correction.compute``. Requests whose ratios fall into the
same bucket, about +-35 % around 1, share a cached plan."""

MIN_GAIN_IN_BACKWARD = 0.05
"""Relative throughput gain that updating parameters during backward must bring: gradients can't be inspected then, and
an interrupted step leaves parameters half updated."""

MIN_GAIN_RETAIN = 0.05
"""Relative throughput gain that a retained heap must bring: its growth is known less exactly than live memory."""

MAX_CACHED_PLANS = 8
"""Plans of earlier starts that are kept."""

MAX_TRIALS = 16
"""Trials of searched plans that are kept."""


class CachedPlan(FrozenModel):
    """The plan of an earlier start."""

    request_key: str
    """The request that it answers (see ``request_key``)."""
    plan: ExecutionPlan
    non_model_bytes: int = 0
    """Part of the memory limit that was not the model's; 0 if unknown."""
    estimated_bytes: int = 0
    """Part of ``non_model_bytes`` that was reserved for first steps by estimate, without a trial."""
    file_page_bytes: int = 0
    """Part of the memory limit that was taken by pages of files."""


class Variant(NamedTuple):
    """Whether units are prefetched, freed tensors stay in the heap, and sharded parameters are updated in backward."""

    prefetch: bool = False
    retained_heap: bool = False
    optimizer_in_backward: bool = False

    @classmethod
    def of_problem(cls, problem: Problem) -> Variant:
        """Return the variant of a problem."""
        return cls(problem.has_prefetch, problem.has_retained_heap, problem.has_optimizer_in_backward)

    @classmethod
    def of_plan(cls, plan: ExecutionPlan) -> Variant:
        """Return the variant of a plan."""
        return cls(plan.cluster.prefetch_max_bytes > 0, plan.retain_freed_memory, plan.update_in_backward)

    def apply(self, problem: Problem) -> Problem:
        """Return the problem in this variant."""
        if self.prefetch:
            problem = problem.with_prefetch()
        if self.retained_heap:
            problem = problem.with_retained_heap()
        return problem.with_optimizer_in_backward() if self.optimizer_in_backward else problem

    def required_gain(self, other: Variant) -> float:
        """Return the relative throughput gain that this variant must bring over another; below 0 if it may lose."""
        return (1 + self._gain_over(other)) / (1 + other._gain_over(self)) - 1

    def _gain_over(self, other: Variant) -> float:
        gains = (gain for name, gain in REQUIRED_GAINS.items() if getattr(self, name) and not getattr(other, name))
        return max(gains, default=0.0)


REQUIRED_GAINS = {"retained_heap": MIN_GAIN_RETAIN, "optimizer_in_backward": MIN_GAIN_IN_BACKWARD}
"""Relative throughput gain that each property of a variant must bring over plans without it; prefetching needs none."""

VARIANTS = (Variant(), Variant(retained_heap=True), Variant(optimizer_in_backward=True))
"""Variants that are searched, each with and without prefetching. A retained heap is for ample memory and an update
during backward for scarce memory, so they are not combined."""


def variant_of_plan(plan: ExecutionPlan, problem: Problem) -> Problem:
    """Return ``problem`` in the variant in which ``plan`` was made."""
    return Variant.of_plan(plan).apply(problem)


def request_key(
    policy: BatchSizePolicy, constraints: SearchConstraints, non_training: NonTrainingWork, correction: Correction
) -> str:
    """Return a key of everything a plan depends on except the model, the ranks and their memory.

    Corrections learned from runs count only as far as other plans may be better for them.
    """
    bucket = round(math.log(correction.communication / correction.compute) / CORRECTION_BUCKET)
    return hashlib.sha256(repr((policy, constraints, non_training, bucket)).encode()).hexdigest()[:16]


def append_cached_plan(cached_plans: Sequence[CachedPlan], new_plan: CachedPlan) -> tuple[CachedPlan, ...]:
    """Return the latest cached plans with ``new_plan`` in place of one for the same request and a similar budget."""
    budget = _model_budget(new_plan.plan)
    others = (
        cached
        for cached in cached_plans
        if cached.request_key != new_plan.request_key or not _has_similar_budget(cached.plan, budget)
    )
    return (*others, new_plan)[-MAX_CACHED_PLANS:]


def add_trials(trials: Sequence[Trial], new_trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the latest trials, with new ones in place of earlier ones of the same plans."""
    keys = {trial.plan_key for trial in new_trials}
    return (*(trial for trial in trials if trial.plan_key not in keys), *new_trials)[-MAX_TRIALS:]


def find_cached_plan(
    problem: Problem, policy: BatchSizePolicy, key: str, cached_plans: Sequence[CachedPlan], trials: Sequence[Trial]
) -> ExecutionPlan | None:
    """Return the plan of an earlier start that solved nearly the same problem, as predicted now.

    Another search and more trials would take longer than the rest of a start and know no more.

    Args:
        problem: the problem to solve.
        policy: the batch sizes.
        key: the ``request_key`` of this start.
        cached_plans: plans of earlier starts.
        trials: all trials.

    Returns:
        The plan; None if there is none, or if it is no longer possible.
    """
    budget = problem.memory_limit_bytes - problem.overhead_bytes
    similar = [c.plan for c in cached_plans if c.request_key == key and _has_similar_budget(c.plan, budget)]
    if not similar:
        return None
    plan = repredict(WrapPolicySearch(variant_of_plan(similar[-1], problem)), policy, similar[-1], similar[-1])
    return None if plan is None else apply_trial(plan, trials)


def _has_similar_budget(plan: ExecutionPlan, budget_bytes: int) -> bool:
    return abs(_model_budget(plan) - budget_bytes) <= max(BUDGET_TOLERANCE * budget_bytes, BUDGET_TOLERANCE_BYTES)


def _model_budget(plan: ExecutionPlan) -> int:
    return plan.memory_limit_bytes - plan.predicted.overhead_bytes


def select_plan(
    problem: Problem,
    policy: BatchSizePolicy,
    trials: Sequence[Trial],
    min_gain: float = TRIAL_RELATIVE_ERROR,
    deadline_reached: Callable[[], bool] = no_deadline,
) -> ExecutionPlan:
    """Return the best plan of all variants: the one that the search finds, or one that was trialled.

    Args:
        problem: the problem to solve.
        policy: the batch sizes.
        trials: all trials.
        min_gain: relative throughput gain that a plan without a trial must promise over the best with one.
        deadline_reached: once True, the best plan found so far is returned.

    Raises:
        InfeasibleError: no plan fits in any variant.
        ConfigurationError: as ``make_plan``.
    """
    selection = _Selection(policy, trials, min_gain, deadline_reached)
    best: ExecutionPlan | None = None
    errors: list[InfeasibleError] = []
    promised = max(trials, key=lambda trial: trial.plan.predicted.samples_per_s, default=None)
    first = None if promised is None else Variant.of_plan(promised.plan)  # time may be short
    for variant in sorted(problem_variants(problem, policy), key=lambda each: Variant.of_problem(each) != first):
        if best is not None and deadline_reached():
            break
        try:
            best = selection.search(variant, best)
        except InfeasibleError as error:
            errors.append(error)
    if best is None:
        raise min(errors, key=lambda error: error.needed_bytes)
    return best


def problem_variants(problem: Problem, policy: BatchSizePolicy) -> Iterator[Problem]:
    """Yield the problem in each variant that is possible, the usual ones first."""
    prefetching = problem.with_prefetch()
    for base in (prefetching, problem) if prefetching.has_prefetch else (problem,):
        for variant in VARIANTS:
            if variant.retained_heap and not _can_retain_heap(problem, policy):
                continue
            if variant.optimizer_in_backward and not _can_update_in_backward(problem, policy):
                continue
            yield variant.apply(base)


def _can_retain_heap(problem: Problem, policy: BatchSizePolicy) -> bool:
    """Return whether the compute times of a retained heap are known, at the batch size if it is fixed."""
    max_batch_size = problem.max_retained_batch_size or math.inf
    return problem.compute_with_retained_heap is not None and (policy.batch_size or 1) <= max_batch_size


def _can_update_in_backward(problem: Problem, policy: BatchSizePolicy) -> bool:
    """Return whether user, engine and optimizer allow it, and gradients are not accumulated over several passes."""
    step, ranks = problem.model.optimizer_step, problem.cluster.ranks
    accumulates = any(accumulation > 1 for _, accumulation in policy.candidates(ranks))
    is_allowed = problem.constraints.update_in_backward and problem.constraints.capabilities.in_backward
    return is_allowed and step.per_parameter and ranks > 1 and not accumulates


def variant_policy(variant: Problem, policy: BatchSizePolicy) -> BatchSizePolicy:
    """Return ``policy`` limited to the batch sizes that ``variant`` is possible at."""
    limit = variant.max_retained_batch_size
    if not variant.has_retained_heap or limit is None or policy.batch_size is not None:
        return policy
    if (policy.max_batch_size or MAX_BATCH_SIZE) <= limit:
        return policy
    return replace(policy, max_batch_size=limit, bounding_setting="freed memory that is retained")


@dataclass(frozen=True)
class _Selection:
    """What all variants are searched with; see ``select_plan``."""

    policy: BatchSizePolicy
    trials: Sequence[Trial]
    min_gain: float
    deadline_reached: Callable[[], bool]

    def search(self, problem: Problem, best: ExecutionPlan | None) -> ExecutionPlan | None:
        """Return the plan of a variant if it is enough better than ``best`` or there is no best yet, else ``best``."""
        wrap_search, policy = WrapPolicySearch(problem), variant_policy(problem, self.policy)
        if best is None:
            found = search_batch_sizes(wrap_search, policy, self.deadline_reached)
            return None if found is None else self._prefer_trialled(wrap_search, found)
        variant = Variant.of_problem(problem)
        required_gain, samples_per_s = variant.required_gain(Variant.of_plan(best)), best.predicted.samples_per_s
        is_trialled = any(Variant.of_plan(trial.plan) == variant for trial in self.trials)
        above = 0.0 if is_trialled else samples_per_s * (1 + required_gain)
        found = search_batch_sizes(wrap_search, policy, self.deadline_reached, above)
        if found is None:
            return best
        other = self._prefer_trialled(wrap_search, found)
        margin = self._margin(best, other, required_gain)
        return other if other.predicted.samples_per_s > samples_per_s * (1 + margin) else best

    def _margin(self, best: ExecutionPlan, other: ExecutionPlan, required_gain: float) -> float:
        """Return the relative gain that ``other`` must promise; below 0 if it alone was trialled."""
        best_trialled, other_trialled = (bool(trials_of_plan(plan, self.trials)) for plan in (best, other))
        if best_trialled == other_trialled:
            return required_gain
        return max(required_gain, self.min_gain) if best_trialled else -self.min_gain

    def _prefer_trialled(self, wrap_search: WrapPolicySearch, found_plan: ExecutionPlan) -> ExecutionPlan:
        """Return the best trialled plan that is possible, or ``found_plan`` if it promises more by ``min_gain``."""
        found_plan = apply_trial(found_plan, self.trials)
        earlier = (repredict(wrap_search, self.policy, trial.plan, found_plan) for trial in self.trials)
        trialled = [apply_trial(plan, self.trials) for plan in earlier if plan is not None]
        best = max(trialled, key=lambda plan: plan.predicted.samples_per_s, default=found_plan)
        needed = best.predicted.samples_per_s * (1 + self.min_gain)
        return found_plan if found_plan.predicted.samples_per_s > needed else best


def repredict(
    wrap_search: WrapPolicySearch, policy: BatchSizePolicy, earlier_plan: ExecutionPlan, found_plan: ExecutionPlan
) -> ExecutionPlan | None:
    """Return an earlier plan as it is predicted now; None if the limit, the policy or a constraint excludes it.

    Args:
        wrap_search: searches of the present problem.
        policy: the batch sizes.
        earlier_plan: a plan for the same model and ranks.
        found_plan: the plan whose frontier and search stop are taken over.
    """
    problem, batch = wrap_search.problem, (earlier_plan.batch_size, earlier_plan.accumulate_grad_batches)
    if Variant.of_plan(earlier_plan) != Variant.of_problem(problem):
        return None
    if batch not in set(variant_policy(problem, policy).candidates(problem.cluster.ranks)):
        return None
    for block in problem.model.blocks:
        forced = None if block.recompute_blocker else problem.constraints.forced_recompute(block.name)
        if forced not in (None, block.name in earlier_plan.recomputed):
            return None
    for operator, planned in zip(problem.model.operators, earlier_plan.operators, strict=True):
        mode = problem.constraints.forced_mode(operator)
        if mode is not None and set(planned.slices) != {mode}:
            return None
    plan_search = wrap_search.for_assignment(tuple(operator.unit for operator in earlier_plan.operators))
    choices = tuple(operator.choice for operator in earlier_plan.operators)
    try:
        candidate = plan_search.evaluate_choices(choices, *batch, earlier_plan.recomputed)
    except ValueError:  # the operator no longer has that option
        return None
    if candidate.peak.max_bytes > problem.memory_limit_bytes:
        return None
    plan = to_plan(wrap_search, candidate, found_plan.frontier, found_plan.search_stop)
    return plan.model_copy(update={"tried": earlier_plan.tried})


def repredict_memory(problem: Problem, policy: BatchSizePolicy, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with the memory that it is predicted to take now; as it is where it does not fit any more.

    Args:
        problem: the problem with the memory that there is now.
        policy: the batch sizes.
        plan: a plan for this problem.
    """
    again = repredict(WrapPolicySearch(variant_of_plan(plan, problem)), policy, plan, plan)
    if again is None:
        return plan
    names = ("peak_memory_bytes", "overhead_bytes", "saving_memory_bytes", "evaluation_memory_bytes")
    predicted = plan.predicted.model_copy(update={name: getattr(again.predicted, name) for name in names})
    return plan.model_copy(
        update={"predicted": predicted, "peak": again.peak, "memory_limit_bytes": again.memory_limit_bytes}
    )

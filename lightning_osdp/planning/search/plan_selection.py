"""Which plan to take where some were rehearsed: one that was found, or one of those.

A search among plans that nobody has run picks those that are predicted too cheap. So a plan that was rehearsed is taken
again, at the next start too, unless another promises more than the clock's error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, apply_trial, trials_of_plan
from lightning_osdp.planning.search.batch_size_search import (
    BatchSizePolicy,
    Problem,
    WrapPolicySearch,
    no_deadline,
    search_batch_sizes,
    search_batch_sizes_above,
    to_plan,
)
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import FrozenModel, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan

BUDGET_TOLERANCE, BUDGET_TOLERANCE_BYTES = 0.1, 12 << 20
"""Share, or bytes if these are more, by which the memory for the model may differ between two starts of what counts as
the same problem: what a process takes by itself is another few MiB each time."""

CORRECTION_BUCKET = 0.6
"""Width of what counts as the same in how much slower than compute collectives are corrected to be, as a logarithm: a
third to either side of no correction, since machines are noisy."""

MIN_GAIN_IN_BACKWARD = 0.05
"""Share of samples a second that updating parameters in the backward pass has to bring: nobody can look at the
gradients then, and a step that is broken off leaves parameters half updated."""

MIN_GAIN_RETAIN = 0.05
"""Share of samples a second that keeping freed tensors in the heap has to bring: how far the heap grows is less sure
than what is live."""

MAX_CACHED_PLANS = 8
"""Plans of earlier starts that are kept."""

MAX_TRIALS = 16
"""Rehearsals of plans that were found that are kept."""


class CachedPlan(FrozenModel):
    """What a start has come to."""

    request_key: str
    """For what (``asked``)."""
    plan: ExecutionPlan
    non_model_bytes: int = 0
    """Of the limit, what was not the model's; 0 if that is not known."""
    estimated_bytes: int = 0
    """Of these, what was kept for first steps, where no steps on a copy had shown what they leave behind."""
    file_page_bytes: int = 0
    """Of the limit, what stood for pages of files."""


def request_key(
    policy: BatchSizePolicy, constraints: SearchConstraints, non_training: NonTrainingWork, correction: Correction
) -> str:
    """A name for all that a plan is made for beside the model, the ranks and their memory: the same if that is. What
    runs have taught counts in so far as other plans may be better for it."""
    pace = round(math.log(correction.communication / correction.compute) / CORRECTION_BUCKET)
    return hashlib.sha256(repr((policy, constraints, non_training, pace)).encode()).hexdigest()[:16]


def append_cached_plan(cached_plans: Sequence[CachedPlan], new_plan: CachedPlan) -> tuple[CachedPlan, ...]:
    """The latest, ``new_plan`` among them."""
    others = (
        one
        for one in cached_plans
        if one.request_key != new_plan.request_key or not _has_similar_budget(one.plan, _model_budget(new_plan.plan))
    )
    return (*others, new_plan)[-MAX_CACHED_PLANS:]


def prune_trials(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Those of plans that no search had found, and of the others the latest."""
    found = [one for one in trials if one.plan is not None]
    dropped = found[:-MAX_TRIALS]
    return tuple(one for one in trials if one not in dropped)


def find_cached_plan(
    problem: Problem, policy: BatchSizePolicy, key: str, cached_plans: Sequence[CachedPlan], trials: Sequence[Trial]
) -> ExecutionPlan | None:
    """The plan of an earlier start that solved nearly the same problem, as predicted now; None if there is none, or if
    it may no longer be had. The parts are as well known as one more search and rehearsals would make them, which would
    take longer than all else of a start.

    Args:
        problem: to solve.
        policy: which batch sizes there are.
        key: what is asked for now (``asked``).
        cached_plans: what starts have come to.
        trials: all that there were.
    """
    room = problem.memory_limit_bytes - problem.overhead_bytes
    near = [one.plan for one in cached_plans if one.request_key == key and _has_similar_budget(one.plan, room)]
    if not near:
        return None
    plan = repredict(WrapPolicySearch(variant_of_plan(near[-1], problem)), policy, near[-1], near[-1])
    return None if plan is None else apply_trial(plan, trials)


def _has_similar_budget(plan: ExecutionPlan, budget_bytes: int) -> bool:
    return abs(_model_budget(plan) - budget_bytes) <= max(BUDGET_TOLERANCE * budget_bytes, BUDGET_TOLERANCE_BYTES)


def _model_budget(plan: ExecutionPlan) -> int:
    """Bytes that the model could take."""
    return plan.memory_limit_bytes - plan.predicted.overhead_bytes


def select_plan(
    problem: Problem,
    policy: BatchSizePolicy,
    trials: Sequence[Trial],
    min_gain: float = TRIAL_RELATIVE_ERROR,
    deadline_reached: Callable[[], bool] = no_deadline,
) -> ExecutionPlan:
    """What the search finds, or the best of the plans that were rehearsed and still may be had, as predicted now: with
    units that run ahead or without; with freed memory that is handed back, unless a plan that keeps it is better by
    ``MIN_GAIN_RETAIN``; and with gradients that wait for the optimizer's step, unless one that need not keep them is
    better by ``MIN_GAIN_IN_BACKWARD``.

    Args:
        problem: to solve.
        policy: which batch sizes there are.
        trials: all that there were.
        min_gain: share by which another plan has to promise more samples a second than the best that was rehearsed.
        deadline_reached: from when on what is found so far has to do.

    Raises:
        InfeasibleError, ConfigurationError: as ``make_plan``.
    """
    best: ExecutionPlan | None = None
    errors: list[InfeasibleError] = []
    for way in _problem_variants(problem, policy):
        if best is not None and deadline_reached():
            break
        try:
            if best is None:
                desks = WrapPolicySearch(way)
                best = _prefer_trialled(
                    desks, policy, search_batch_sizes(desks, policy, deadline_reached), trials, min_gain
                )
            else:
                best = _try_variant(best, way, policy, trials, min_gain, deadline_reached) or best
        except InfeasibleError as error:
            errors.append(error)
    if best is None:
        raise min(errors, key=lambda each: each.needed_bytes)
    return best


def _problem_variants(problem: Problem, policy: BatchSizePolicy) -> list[Problem]:
    """The problem with units that run ahead, if there is a link to hide; with freed tensors that stay in the heap, if
    it is known what that takes, or updates in the backward pass, if they may be; and without: what is usual first.
    Both are not needed: one is for much memory, the other for little."""
    ways: list[Problem] = []
    for way in [problem.with_prefetch(), problem] if problem.with_prefetch().has_prefetch else [problem]:
        ways.append(way)
        if problem.compute_with_retained_heap is not None and (policy.batch_size or 1) <= (
            problem.max_retained_batch_size or math.inf
        ):
            ways.append(way.with_retained_heap())
        if _can_update_in_backward(problem, policy):
            ways.append(way.with_optimizer_in_backward())
    return ways


def variant_of_plan(plan: ExecutionPlan, problem: Problem) -> Problem:
    """``problem`` in the way in which ``make_plan`` solves it."""
    if plan.cluster.prefetch_max_bytes:
        problem = problem.with_prefetch()
    if plan.retain_freed_memory:
        problem = problem.with_retained_heap()
    return problem.with_optimizer_in_backward() if plan.update_in_backward else problem


def _plan_variant(plan: ExecutionPlan) -> tuple[bool, bool, bool]:
    """Which of ``_ways`` a plan is of."""
    return plan.update_in_backward, plan.cluster.prefetch_max_bytes > 0, plan.retain_freed_memory


def _problem_variant(variant: Problem) -> tuple[bool, bool, bool]:
    return variant.has_optimizer_in_backward, variant.has_prefetch, variant.has_retained_heap


def _variant_policy(variant: Problem, policy: BatchSizePolicy) -> BatchSizePolicy:
    """``policy`` for the batch sizes at which ``variant`` may be gone."""
    if not variant.has_retained_heap or variant.max_retained_batch_size is None or policy.batch_size is not None:
        return policy
    return replace(
        policy,
        max_batch_size=min(variant.max_retained_batch_size, policy.max_batch_size or variant.max_retained_batch_size),
    )


def _required_gain(variant: Problem, best: ExecutionPlan) -> float:
    """Share by which a plan of ``variant`` has to be better than ``best``, since it does what that need not do."""
    updating = MIN_GAIN_IN_BACKWARD if variant.has_optimizer_in_backward and not best.update_in_backward else 0.0
    keeping = MIN_GAIN_RETAIN if variant.has_retained_heap and not best.retain_freed_memory else 0.0
    return max(updating, keeping)


def _try_variant(
    best: ExecutionPlan,
    variant: Problem,
    policy: BatchSizePolicy,
    trials: Sequence[Trial],
    min_gain: float,
    deadline_reached: Callable[[], bool],
) -> ExecutionPlan | None:
    """A plan of another of ``_ways``, if one is enough better. Where only one of the two was rehearsed, the other has
    to promise more by ``min_gain``, as everywhere."""
    desks, samples_per_s = WrapPolicySearch(variant), best.predicted.samples_per_s
    policy = _variant_policy(variant, policy)
    worth = _required_gain(variant, best)
    seen = any(one.plan is not None and _plan_variant(one.plan) == _problem_variant(variant) for one in trials)
    found = search_batch_sizes_above(0.0 if seen else samples_per_s * (1 + worth), desks, policy, deadline_reached)
    if found is None:
        return None
    other = _prefer_trialled(desks, policy, found, trials, min_gain)
    best_was, other_was = (bool(trials_of_plan(plan, trials)) for plan in (best, other))
    margin = worth
    if best_was != other_was:
        margin = max(worth, min_gain) if best_was else -min_gain
    return other if other.predicted.samples_per_s > samples_per_s * (1 + margin) else None


def _can_update_in_backward(problem: Problem, policy: BatchSizePolicy) -> bool:
    """Whether sharded parameters may be updated in the backward pass: the user and the optimizer allow it, and
    gradients are not to be summed over several passes first."""
    step, ranks = problem.model.optimizer_step, problem.cluster.ranks
    once = all(accumulation == 1 for _, accumulation in policy.candidates(ranks))
    is_allowed = problem.constraints.update_in_backward and problem.constraints.capabilities.in_backward
    return is_allowed and step.per_parameter and ranks > 1 and once


def _prefer_trialled(
    wrap_search: WrapPolicySearch,
    policy: BatchSizePolicy,
    found_plan: ExecutionPlan,
    trials: Sequence[Trial],
    min_gain: float,
) -> ExecutionPlan:
    """What a search has ``found_plan``, or the best of those that were rehearsed."""
    found_plan = apply_trial(found_plan, trials)
    plans = [one.plan for one in trials if one.plan is not None]
    if not plans:
        return found_plan
    earlier = (repredict(wrap_search, policy, plan, found_plan) for plan in plans)
    known = [apply_trial(plan, trials) for plan in earlier if plan is not None]
    if not known:
        return found_plan
    best = max(known, key=lambda plan: plan.predicted.samples_per_s)
    promised, shown = found_plan.predicted.samples_per_s, best.predicted.samples_per_s
    return found_plan if promised > shown * (1 + min_gain) else best


def repredict(
    wrap_search: WrapPolicySearch, policy: BatchSizePolicy, earlier_plan: ExecutionPlan, found_plan: ExecutionPlan
) -> ExecutionPlan | None:
    """A plan of earlier, as it is predicted now; None where the limit, ``policy`` or a wish no longer allows it.

    Args:
        wrap_search: of the problem that there is now.
        policy: which batch sizes there are.
        earlier_plan: for the same model and ranks.
        found_plan: what a search has said: the other batch sizes are as it has them.
    """
    problem, pair = wrap_search.problem, (earlier_plan.batch_size, earlier_plan.accumulate_grad_batches)
    policy = _variant_policy(problem, policy)
    if _plan_variant(earlier_plan) != _problem_variant(problem):
        return None
    wishes = (
        (block, problem.constraints.forced_recompute(block.name))
        for block in problem.model.blocks
        if not block.recompute_blocker
    )
    as_wished = all(wish in (None, block.name in earlier_plan.recomputed) for block, wish in wishes)
    if not as_wished or pair not in set(policy.candidates(problem.cluster.ranks)):
        return None
    desk = wrap_search.for_assignment(tuple(op.unit for op in earlier_plan.operators))
    try:
        candidate = desk.evaluate_choices(
            tuple(op.choice for op in earlier_plan.operators), *pair, earlier_plan.recomputed
        )
    except ValueError:  # no menu has that choice any more
        return None
    if candidate.peak.max_bytes > problem.memory_limit_bytes:
        return None
    return to_plan(wrap_search, candidate, found_plan.frontier, found_plan.search_stop)

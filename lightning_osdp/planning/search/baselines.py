"""What else there was: plans that treat all operators alike, each at its own best batch size.

They are predicted like the plan itself: from the same measurements and corrections, with the same memory and under the
same limit. One that was tried counts as it was measured, and one that was not is never shown as better than a plan
that was: the search among all plans, these among them, has then found no other that promises enough to be tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.moments import Flags
from lightning_osdp.planning.cost.trial_correction import Trial, apply_trial, trials_of_plan
from lightning_osdp.planning.search.batch_size_search import WrapPolicySearch, pick_batch_size
from lightning_osdp.planning.search.plan_search import Candidate, PlanSearch
from lightning_osdp.planning.search.plan_selection import (
    Variant,
    problem_variants,
    repredict,
    variant_of_plan,
    variant_policy,
)
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, legal_modes
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.search_record import Baseline
from lightning_osdp.planning.spec.wrapping import wrap_assignments


class BaselineKind(NamedTuple):
    """A way to treat all operators alike; ``per_block`` says which units it may have, of which the faster count."""

    name: str
    mode: Mode
    per_block: tuple[bool, ...]


KINDS = (
    BaselineKind("DDP", Mode.DP, (False,)),
    BaselineKind("ZeRO-2", Mode.ZDP2, (False, True)),
    BaselineKind("FSDP per operator", Mode.ZDP, (False,)),
    BaselineKind("FSDP per block", Mode.ZDP, (True,)),
)
"""Without and with all blocks recomputed, these are the baselines."""


class UniformPlan(NamedTuple):
    """The best plan of one kind; at the smallest batch size if it does not fit at any."""

    candidate: Candidate
    fits: bool

    def decides_like(self, plan: ExecutionPlan) -> bool:
        """Return whether ``plan`` treats operators and blocks as this one does."""
        own = self.candidate
        return (own.choices, own.wrap_assignment, set(own.recomputed)) == (
            tuple(op.choice for op in plan.operators),
            tuple(op.unit for op in plan.operators),
            set(plan.recomputed),
        )


def find_baselines(
    plan: ExecutionPlan, problem: Problem, policy: BatchSizePolicy, trials: Sequence[Trial] = ()
) -> tuple[Baseline, ...]:
    """Return what the baselines would do in the place of ``plan``.

    Args:
        plan: the plan that was chosen.
        problem: the problem that it solves. Of its constraints, the batch sizes, the recomputed blocks, the sharding
            group and the engine's capabilities hold for the baselines too.
        policy: the batch sizes.
        trials: all trials.
    """
    plans: dict[str, list[UniformPlan]] = {}
    for name, uniform in _best_uniform_plans(problem, policy):
        plans.setdefault(name, []).append(uniform)
    pace = _pace_of_trial(plan, problem, policy, trials)
    return tuple(_describe(name, uniforms, plan, problem, policy, trials, pace) for name, uniforms in plans.items())


def _pace_of_trial(plan: ExecutionPlan, problem: Problem, policy: BatchSizePolicy, trials: Sequence[Trial]) -> float:
    """Return the factor by which the trial of ``plan`` was faster than predicted; 1 if it was not tried.

    What was not tried is shown at the same pace: measurements in parts may have come from a busier machine.
    """
    if not trials_of_plan(plan, trials):
        return 1.0
    again = repredict(WrapPolicySearch(variant_of_plan(plan, problem)), policy, plan, plan)
    return plan.predicted.samples_per_s / again.predicted.samples_per_s if again is not None else 1.0


def _describe(
    name: str,
    uniforms: Sequence[UniformPlan],
    plan: ExecutionPlan,
    problem: Problem,
    policy: BatchSizePolicy,
    trials: Sequence[Trial],
    pace: float,
) -> Baseline:
    """Return the best of the plans of one kind, as measured if one of them was tried."""
    is_plan_tried = bool(trials_of_plan(plan, trials))
    if any(uniform.decides_like(plan) for uniform in uniforms):
        return _as_baseline(name, plan, is_tried=is_plan_tried, is_plan=True)
    earlier = [trial.plan for trial in trials if any(uniform.decides_like(trial.plan) for uniform in uniforms)]
    tried = [
        apply_trial(again, trials)
        for one in earlier
        if (again := repredict(WrapPolicySearch(variant_of_plan(one, problem)), policy, one, plan)) is not None
    ]
    if tried:
        return _as_baseline(name, max(tried, key=lambda one: one.predicted.samples_per_s), is_tried=True)
    best, fits = max(
        uniforms, key=lambda each: (each.fits, each.candidate.samples_per_s, -each.candidate.peak.max_bytes)
    )
    own_rate = plan.predicted.samples_per_s
    rate = pace * best.samples_per_s
    is_uncertain = fits and is_plan_tried and rate >= own_rate
    return Baseline(
        name=name,
        fits=fits,
        batch_size=best.batch_size,
        samples_per_s=(own_rate if is_uncertain else rate) if fits else 0.0,
        peak_memory_bytes=best.peak.max_bytes,
        missing_bytes=max(0, best.peak.max_bytes - problem.memory_limit_bytes),
        is_uncertain=is_uncertain,
    )


def _as_baseline(name: str, plan: ExecutionPlan, is_tried: bool, is_plan: bool = False) -> Baseline:
    return Baseline(
        name=name,
        fits=True,
        batch_size=plan.batch_size,
        samples_per_s=plan.predicted.samples_per_s,
        peak_memory_bytes=plan.predicted.max_memory_bytes,
        is_tried=is_tried,
        is_plan=is_plan,
    )


def _best_uniform_plans(problem: Problem, policy: BatchSizePolicy) -> Iterator[tuple[str, UniformPlan]]:
    """Yield the name of each baseline with the best of all variants of the problem, for each way to share units."""
    given, blocks = problem.constraints, problem.model.blocks
    constraints = SearchConstraints(
        1, given.activation_checkpointing, given.sharding_group, capabilities=given.capabilities
    )
    problem = replace(problem, constraints=constraints)
    wrapped = wrap_assignments(problem.model, constraints)[-1]
    assignments = {False: ("",) * len(wrapped), True: wrapped} if any(wrapped) else {False: wrapped}
    searches = [
        (Variant.of_problem(variant), variant_policy(variant, policy), per_block, PlanSearch(variant, units))
        for variant in problem_variants(problem, policy)
        for per_block, units in assignments.items()
    ]
    kinds = [kind for kind in KINDS if kind.mode == Mode.DP or problem.cluster.ranks > 1]
    requests = [(bool(block.recompute_blocker), constraints.forced_recompute(block.name)) for block in blocks]
    masks = {tuple(not blocked and (request is None or request) for blocked, request in requests)}
    masks |= {tuple(not blocked and request is True for blocked, request in requests)}
    for kind, mask in product(kinds, sorted(masks)):
        if kind.mode not in constraints.capabilities.modes:
            continue
        for per_block in kind.per_block:
            best: tuple[Variant, UniformPlan] | None = None
            for variant, sizes, is_wrapped, search in searches:
                if is_wrapped == per_block:
                    found = best_uniform_plan(search, kind.mode, np.array(mask, dtype=bool), sizes)
                    best = (variant, found) if best is None or _is_better(variant, found, *best) else best
            if best is not None:
                yield kind.name + ", recomputed" * any(mask), best[1]


def _is_better(variant: Variant, plan: UniformPlan, best_variant: Variant, best: UniformPlan) -> bool:
    """Return whether a plan of one variant is better than that of an earlier one, by what its variant must gain."""
    if not (plan.fits and best.fits):
        return plan.fits or (not best.fits and plan.candidate.peak.max_bytes < best.candidate.peak.max_bytes)
    return plan.candidate.samples_per_s > best.candidate.samples_per_s * (1 + variant.required_gain(best_variant))


def best_uniform_plan(search: PlanSearch, mode: Mode, recomputed_blocks: Flags, policy: BatchSizePolicy) -> UniformPlan:
    """Return the plan in one mode, at the smallest batch size whose throughput is as good as the best.

    An operator that can't have the mode takes the nearest one: ``zdp2`` for ``zdp`` if it runs more than once in a
    step, ``dp`` if it must be replicated.
    """
    limit, sizes = search.problem.memory_limit_bytes, list(policy.candidates(search.problem.cluster.ranks))
    operators = search.wrapped_model.model.operators
    options = search.space.options_of([_choice(operator, mode, search.problem) for operator in operators])

    @cache
    def plan_at(index: int) -> Candidate:
        return search.for_batch_size(*sizes[index]).to_candidate(options, recomputed_blocks)

    def exceeds_limit(index: int) -> bool:
        return plan_at(index).peak.max_bytes > limit

    # More samples take more memory, but a step of fewer micro-batches may take less.
    if policy.global_batch_size is None:
        count = bisect_left(range(len(sizes)), True, key=exceeds_limit)
    else:
        count = next(filter(exceeds_limit, range(len(sizes))), len(sizes))
    best = pick_batch_size([plan_at(index) for index in range(max(1, count))])
    return UniformPlan(search.played(best), count > 0)


def _choice(operator: Operator, mode: Mode, problem: Problem) -> ShardingChoice:
    modes = [one for one in legal_modes(operator) if one in problem.constraints.capabilities.modes]
    mode = mode if mode in modes else modes[-1]
    if mode == Mode.DP:
        return ShardingChoice()
    scope, hierarchical = problem.constraints.allowed_scopes(problem.cluster)[0]
    return ShardingChoice((mode,), None, scope, hierarchical)

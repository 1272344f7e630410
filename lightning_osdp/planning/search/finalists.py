"""The plans that are tried before one is taken, and which of them that is.

A prediction may be wrong, and so may be what it was made from. The plan that the search has found is therefore tried
beside simple ones, in turns; one that shards, recomputes or splits must be faster by more than the rounds differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.trial_correction import (
    TRIAL_RELATIVE_ERROR,
    Trial,
    apply_trial,
    plan_key,
    trials_of_plan,
)
from lightning_osdp.planning.search.batch_size_search import WrapPolicySearch, search_batch_sizes
from lightning_osdp.planning.search.plan_selection import repredict, select_plan, variant_of_plan
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.search_record import TriedPlan
from lightning_osdp.planning.spec.tensor import TensorRole

PREDICTION_RELATIVE_ERROR = 0.15
"""Largest usual error of a predicted step time that no trial has checked."""


class Finalist(NamedTuple):
    """A plan, and the seconds of an optimizer step in each round of its trial."""

    plan: ExecutionPlan
    rounds_s: tuple[float, ...]


def find_finalists(problem: Problem, policy: BatchSizePolicy, found: ExecutionPlan) -> list[ExecutionPlan]:
    """Return the plans to try: ``found`` first, the best with all operators replicated, and the best with shared units.

    Only those that differ, fit the limit, and that the user's constraints allow. If ``found`` returns freed memory to
    the system, which takes time with every tensor, it is also tried with that memory retained. If it has tensor
    parallel operators, the best plan without is tried too: while activations are exchanged, nothing else goes on.
    """
    plans = [found, *_find_with_retained_heap(problem, policy, found)]
    if is_tensor_parallel(found):
        plans += _find_without_tensor_parallelism(problem, policy)
    for find in (_find_replicated, _find_with_shared_units):
        with suppress(InfeasibleError):
            plans += find(problem, policy)
    distinct: dict[str, ExecutionPlan] = {}
    for plan in plans:
        distinct.setdefault(plan_key(plan), plan)
    return list(distinct.values())


def pick_untried(plans: Sequence[ExecutionPlan]) -> ExecutionPlan:
    """Return the plan to take where none could be tried: the first, or the best simpler one.

    The first must promise more throughput than a simpler one by more than predictions err. Where the same plan with
    freed memory retained fits and promises any gain, it stands for the first: that is what training as DDP does.
    """
    first, *others = plans
    released = [plan_key(plan.model_copy(update={"retain_freed_memory": False})) for plan in others]
    alike = [plan for plan, key in zip(others, released, strict=True) if key == plan_key(first)]
    found = max([first, *alike], key=lambda plan: plan.predicted.samples_per_s)
    simpler = [plan for plan in others if complexity(plan) < complexity(found)]
    best = max(simpler, key=lambda plan: plan.predicted.samples_per_s, default=None)
    if best is None or found.predicted.samples_per_s > (1 + PREDICTION_RELATIVE_ERROR) * best.predicted.samples_per_s:
        return found
    return best


def _find_with_retained_heap(problem: Problem, policy: BatchSizePolicy, found: ExecutionPlan) -> list[ExecutionPlan]:
    twin = found.model_copy(update={"retain_freed_memory": True})
    if found.retain_freed_memory or found.update_in_backward or problem.compute_with_retained_heap is None:
        return []
    plan = repredict(WrapPolicySearch(variant_of_plan(twin, problem)), policy, twin, found)
    return [] if plan is None else [plan]


def _find_without_tensor_parallelism(problem: Problem, policy: BatchSizePolicy) -> list[ExecutionPlan]:
    if any(operator.tensor is not None and operator.tensor.is_required for operator in problem.model.operators):
        return []
    constraints = replace(problem.constraints, tensor_parallel=False)
    with suppress(InfeasibleError):
        return [select_plan(replace(problem, constraints=constraints), policy, ())]
    return []


def _find_replicated(problem: Problem, policy: BatchSizePolicy) -> list[ExecutionPlan]:
    constraints = problem.constraints
    if any(constraints.forced_mode(operator) not in (None, Mode.DP) for operator in problem.model.operators):
        return []
    recompute = constraints.activation_checkpointing
    simple = replace(
        constraints, modes=Mode.DP.value, activation_checkpointing=False if recompute == "auto" else recompute
    )
    return [select_plan(replace(problem, constraints=simple), policy, ())]


def _find_with_shared_units(problem: Problem, policy: BatchSizePolicy) -> list[ExecutionPlan]:
    wrapped = WrapPolicySearch(problem.with_prefetch()).with_shared_units()
    plan = None if wrapped is None else search_batch_sizes(wrapped, policy, deadline_reached=lambda: True)
    return [] if plan is None else [plan]


def choose_tried_plan(
    problem: Problem, policy: BatchSizePolicy, plans: Sequence[ExecutionPlan], trials: Sequence[Trial]
) -> ExecutionPlan | None:
    """Return the plan to take of those that were tried, as predicted now, with what each took.

    Args:
        problem: the problem to solve.
        policy: the batch sizes.
        plans: the plans, the one whose frontier is shown first.
        trials: all trials.

    Returns:
        The plan; None if none of them was tried, or fits any more.
    """
    finalists = []
    for plan in plans:
        trial = next(reversed(trials_of_plan(plan, trials)), None)
        again = repredict(WrapPolicySearch(variant_of_plan(plan, problem)), policy, plan, plans[0])
        if trial is None or again is None:
            continue
        known = apply_trial(again, [trial])
        step_s, accumulation = known.predicted.step_time_s, plan.accumulate_grad_batches
        rounds_s = (step_s + accumulation * (one_s - trial.measured_s) for one_s in trial.rounds_s)
        finalists.append(Finalist(known, tuple(rounds_s) or (step_s,)))
    if not finalists:
        return None
    chosen = pick_finalist(finalists)
    tried = tuple(_describe(finalist, is_chosen=finalist is chosen) for finalist in finalists)
    return chosen.plan.model_copy(update={"tried": tried})


def pick_finalist(finalists: Sequence[Finalist]) -> Finalist:
    """Return the plan of best throughput by the median of its rounds; the simpler one if the rounds differ by more.

    After a single round, the difference must exceed the error of a trial. Times that can't be are ignored.
    """
    valid = [Finalist(plan, tuple(s for s in rounds_s if 0 < s < math.inf)) for plan, rounds_s in finalists]
    ranked = sorted(
        (index for index, finalist in enumerate(valid) if finalist.rounds_s),
        key=lambda index: (complexity(valid[index].plan), _sample_s(valid[index])),
    )
    samples_s = [_sample_s(valid[index]) for index in ranked]
    frontier = [one for at, one in enumerate(ranked) if at == 0 or samples_s[at] < min(samples_s[:at])]
    best, *others = frontier or [0]
    for other in others:  # each is less simple and faster than those before it
        margin_s = max(_spread_s(valid[best]), _spread_s(valid[other]))
        if _sample_s(valid[best]) - _sample_s(valid[other]) > margin_s:
            best = other
    return finalists[best]


def complexity(plan: ExecutionPlan) -> int:
    """Return how many of sharding, recomputing, splitting and tensor parallelism a plan uses."""
    is_split = any(len(op.slices) > 1 for op in plan.operators)
    return is_sharded(plan) + bool(plan.recomputed) + is_split + is_tensor_parallel(plan)


def is_tensor_parallel(plan: ExecutionPlan) -> bool:
    """Return whether any operator of a plan is cut over ranks that exchange activations."""
    return any(operator.tensor is not None for operator in plan.operators)


def is_sharded(plan: ExecutionPlan) -> bool:
    """Return whether any operator is sharded, so that its weights or gradients travel."""
    return any(mode in (Mode.ZDP2, Mode.ZDP) for op in plan.operators for mode in op.slices)


def spread_s(rounds_s: Sequence[float]) -> float:
    """Return by how much rounds differ: twice the median distance from their median, which one outlier can't change."""
    median_s = statistics.median(rounds_s)
    return 2 * statistics.median(abs(one_s - median_s) for one_s in rounds_s)


def _sample_s(finalist: Finalist) -> float:
    return statistics.median(finalist.rounds_s) / finalist.plan.global_batch_size


def _spread_s(finalist: Finalist) -> float:
    """Return the spread per sample."""
    if len(finalist.rounds_s) < 2:
        return TRIAL_RELATIVE_ERROR * _sample_s(finalist)
    return spread_s(finalist.rounds_s) / finalist.plan.global_batch_size


def _count_tensor_parallel(plan: ExecutionPlan) -> str:
    """Return what is tensor parallel, as ``4 embeddings and 2 MLPs``."""
    cut = [operator.tensor for operator in plan.operators if operator.tensor is not None]
    roles = [split.role for split in cut]
    scopes = [plan.tensor_scopes[scope] for scope in {split.scope for split in cut if split.scope is not None}]
    num_found = sum(scope.needs_agreement for scope in scopes)
    counts = {
        "embedding": sum(role.is_table for role in roles),
        "linear layer": roles.count(TensorRole.LINEAR),
        "MLP": len(scopes) - num_found,
        "attention": num_found + roles.count(TensorRole.ATTENTION),
    }
    texts = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _describe(finalist: Finalist, is_chosen: bool) -> TriedPlan:
    plan = finalist.plan
    name = "replicated"
    if is_sharded(plan):
        name = "sharded per block" if any(op.unit for op in plan.operators) else "sharded per operator"
    if is_tensor_parallel(plan):
        name = f"{_count_tensor_parallel(plan)} tensor parallel, the rest {name}"
    elif not is_sharded(plan):
        name = "all replicated"
    name += ", blocks recomputed" if plan.recomputed and not is_sharded(plan) else ""
    name += ", freed memory retained" if plan.retain_freed_memory else ""
    return TriedPlan(
        name=name,
        batch_size=plan.batch_size,
        step_time_s=plan.predicted.step_time_s,
        samples_per_s=plan.predicted.samples_per_s,
        spread_s=spread_s(finalist.rounds_s),
        num_rounds=len(finalist.rounds_s),
        is_chosen=is_chosen,
    )

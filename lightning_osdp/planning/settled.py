"""Which plan to take where some were rehearsed: one that was found, or one of those.

A search among plans that nobody has run picks those that are predicted too cheap. So a plan that was rehearsed is taken
again, at the next start too, unless another promises more than the clock's error.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import STEP_ERROR, Rehearsal, as_rehearsed
from lightning_osdp.planning.schedule import BatchRule, Desks, Problem, found_at, to_plan

MOST_REHEARSED = 2
"""Plans that are found and rehearsed for one problem: after so many the best of them is taken."""

SAME_ROOM = 0.1
"""Share by which the memory for the model may differ between two starts of what counts as the same problem: what a
process takes by itself is another few MiB each time."""


def rehearsed_before(found: ExecutionPlan, rehearsals: Sequence[Rehearsal]) -> bool:
    """Whether a plan was found and rehearsed for nearly the problem that ``found`` solves. Then the parts are as well
    known as one more rehearsal would make them, which would take longer than all else of a start."""

    def room(plan: ExecutionPlan) -> int:
        return plan.memory_limit_bytes - plan.predicted.overhead_bytes

    def asked(plan: ExecutionPlan) -> tuple[object, ...]:
        by_memory = plan.search_end is not None and plan.search_end.reason == "memory"
        return () if by_memory else (plan.search_end, plan.batch_size, plan.accumulate_grad_batches)

    earlier = [one.plan for one in rehearsals if one.plan is not None]
    return any(
        asked(plan) == asked(found) and abs(room(plan) - room(found)) <= SAME_ROOM * room(found) for plan in earlier
    )


def settled(problem: Problem, rule: BatchRule, rehearsals: Sequence[Rehearsal]) -> ExecutionPlan:
    """What the search finds, or the best of the plans that were rehearsed and still may be had, as predicted now.

    Args:
        problem: to solve.
        rule: which batch sizes there are.
        rehearsals: all that there were.

    Raises:
        InfeasibleError, ConfigurationError: as ``make_plan``.
    """
    desks = Desks(problem)
    found = as_rehearsed(found_at(desks, rule), rehearsals)
    plans = [one.plan for one in rehearsals if one.plan is not None]
    if not plans:
        return found
    earlier = (predicted_now(desks, rule, plan, found) for plan in plans)
    known = [as_rehearsed(plan, rehearsals) for plan in earlier if plan is not None]
    if not known:
        return found
    best = max(known, key=lambda plan: plan.predicted.samples_per_s)
    promised, shown = found.predicted.samples_per_s, best.predicted.samples_per_s
    return found if len(known) < MOST_REHEARSED and promised > shown * (1 + STEP_ERROR) else best


def predicted_now(desks: Desks, rule: BatchRule, earlier: ExecutionPlan, found: ExecutionPlan) -> ExecutionPlan | None:
    """A plan of earlier, as it is predicted now; None where the limit, ``rule`` or a wish no longer allows it.

    Args:
        desks: of the problem that there is now.
        rule: which batch sizes there are.
        earlier: for the same model and ranks.
        found: what the search says now: the other batch sizes are as it has them.
    """
    problem, pair = desks.problem, (earlier.batch_size, earlier.accumulate_grad_batches)
    wishes = ((block, problem.wishes.recompute(block.name)) for block in problem.model.blocks if not block.pinned)
    as_wished = all(wish in (None, block.name in earlier.recomputed) for block, wish in wishes)
    if not as_wished or pair not in set(rule.pairs(problem.cluster.ranks)):
        return None
    desk = desks.of(tuple(op.unit for op in earlier.operators))
    try:
        candidate = desk.candidate(tuple(op.choice for op in earlier.operators), *pair, earlier.recomputed)
    except ValueError:  # no menu has that choice any more
        return None
    if candidate.peak.most_bytes > problem.memory_limit_bytes:
        return None
    return to_plan(desks, candidate, found.frontier, found.search_end)

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
from lightning_osdp.planning.calibration import Correction
from lightning_osdp.planning.operators import BetweenSteps, Frozen
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import STEP_ERROR, Rehearsal, as_rehearsed, of_plan
from lightning_osdp.planning.schedule import BatchRule, Desks, Problem, found_above, found_at, never, to_plan
from lightning_osdp.planning.wishes import Wishes

SAME_ROOM, SAME_BYTES = 0.1, 12 << 20
"""Share, or bytes if these are more, by which the memory for the model may differ between two starts of what counts as
the same problem: what a process takes by itself is another few MiB each time."""

SAME_PACE = 0.6
"""Width of what counts as the same in how much slower than compute collectives are corrected to be, as a logarithm: a
third to either side of no correction, since machines are noisy."""

WORTH_UPDATING = 0.05
"""Share of samples a second that updating parameters in the backward pass has to bring: nobody can look at the
gradients then, and a step that is broken off leaves parameters half updated."""

WORTH_KEEPING = 0.05
"""Share of samples a second that keeping freed tensors in the heap has to bring: how far the heap grows is less sure
than what is live."""

MOST_SETTLED = 8
"""Plans of earlier starts that are kept."""

MOST_FOUND = 16
"""Rehearsals of plans that were found that are kept."""


class Settled(Frozen):
    """What a start has come to."""

    asked: str
    """For what (``asked``)."""
    plan: ExecutionPlan
    used_bytes: int = 0
    """Of the limit, what was not the model's; 0 if that is not known."""
    guessed_bytes: int = 0
    """Of these, what was kept for first steps, where no steps on a copy had shown what they leave behind."""
    file_bytes: int = 0
    """Of the limit, what stood for pages of files."""


def asked(rule: BatchRule, wishes: Wishes, between: BetweenSteps, correction: Correction) -> str:
    """A name for all that a plan is made for beside the model, the ranks and their memory: the same if that is. What
    runs have taught counts in so far as other plans may be better for it."""
    pace = round(math.log(correction.communication / correction.compute) / SAME_PACE)
    return hashlib.sha256(repr((rule, wishes, between, pace)).encode()).hexdigest()[:16]


def kept(earlier: Sequence[Settled], new: Settled) -> tuple[Settled, ...]:
    """The latest, ``new`` among them."""
    others = (one for one in earlier if one.asked != new.asked or not _near(one.plan, _room(new.plan)))
    return (*others, new)[-MOST_SETTLED:]


def latest(rehearsals: Sequence[Rehearsal]) -> tuple[Rehearsal, ...]:
    """Those of plans that no search had found, and of the others the latest."""
    found = [one for one in rehearsals if one.plan is not None]
    dropped = found[:-MOST_FOUND]
    return tuple(one for one in rehearsals if one not in dropped)


def settled_before(
    problem: Problem, rule: BatchRule, question: str, earlier: Sequence[Settled], rehearsals: Sequence[Rehearsal]
) -> ExecutionPlan | None:
    """The plan of an earlier start that solved nearly the same problem, as predicted now; None if there is none, or if
    it may no longer be had. The parts are as well known as one more search and rehearsals would make them, which would
    take longer than all else of a start.

    Args:
        problem: to solve.
        rule: which batch sizes there are.
        question: what is asked for now (``asked``).
        earlier: what starts have come to.
        rehearsals: all that there were.
    """
    room = problem.memory_limit_bytes - problem.overhead_bytes
    near = [one.plan for one in earlier if one.asked == question and _near(one.plan, room)]
    if not near:
        return None
    plan = predicted_now(Desks(way_of(near[-1], problem)), rule, near[-1], near[-1])
    return None if plan is None else as_rehearsed(plan, rehearsals)


def _near(plan: ExecutionPlan, room: int) -> bool:
    return abs(_room(plan) - room) <= max(SAME_ROOM * room, SAME_BYTES)


def _room(plan: ExecutionPlan) -> int:
    """Bytes that the model could take."""
    return plan.memory_limit_bytes - plan.predicted.overhead_bytes


def settled(
    problem: Problem,
    rule: BatchRule,
    rehearsals: Sequence[Rehearsal],
    gain: float = STEP_ERROR,
    late: Callable[[], bool] = never,
) -> ExecutionPlan:
    """What the search finds, or the best of the plans that were rehearsed and still may be had, as predicted now: with
    units that run ahead or without; with freed memory that is handed back, unless a plan that keeps it is better by
    ``WORTH_KEEPING``; and with gradients that wait for the optimizer's step, unless one that need not keep them is
    better by ``WORTH_UPDATING``.

    Args:
        problem: to solve.
        rule: which batch sizes there are.
        rehearsals: all that there were.
        gain: share by which another plan has to promise more samples a second than the best that was rehearsed.
        late: from when on what is found so far has to do.

    Raises:
        InfeasibleError, ConfigurationError: as ``make_plan``.
    """
    best: ExecutionPlan | None = None
    errors: list[InfeasibleError] = []
    for way in _ways(problem, rule):
        if best is not None and late():
            break
        try:
            if best is None:
                desks = Desks(way)
                best = _best(desks, rule, found_at(desks, rule, late), rehearsals, gain)
            else:
                best = _better(best, way, rule, rehearsals, gain, late) or best
        except InfeasibleError as error:
            errors.append(error)
    if best is None:
        raise min(errors, key=lambda each: each.needed_bytes)
    return best


def _ways(problem: Problem, rule: BatchRule) -> list[Problem]:
    """The problem with units that run ahead, if there is a link to hide; with freed tensors that stay in the heap, if
    it is known what that takes, or updates in the backward pass, if they may be; and without: what is usual first.
    Both are not needed: one is for much memory, the other for little."""
    ways: list[Problem] = []
    for way in [problem.running_ahead(), problem] if problem.running_ahead().runs_ahead else [problem]:
        ways.append(way)
        if problem.kept_compute is not None and (rule.batch_size or 1) <= (problem.kept_batch_size or math.inf):
            ways.append(way.keeping_heap())
        if _may_update_in_backward(problem, rule):
            ways.append(way.updating_in_backward())
    return ways


def way_of(plan: ExecutionPlan, problem: Problem) -> Problem:
    """``problem`` in the way in which ``plan`` solves it."""
    if plan.cluster.ahead_bytes:
        problem = problem.running_ahead()
    if plan.keep_heap:
        problem = problem.keeping_heap()
    return problem.updating_in_backward() if plan.update_in_backward else problem


def _kind(plan: ExecutionPlan) -> tuple[bool, bool, bool]:
    """Which of ``_ways`` a plan is of."""
    return plan.update_in_backward, plan.cluster.ahead_bytes > 0, plan.keep_heap


def _kind_of(way: Problem) -> tuple[bool, bool, bool]:
    return way.updates_in_backward, way.runs_ahead, way.keeps_heap


def _rule_of(way: Problem, rule: BatchRule) -> BatchRule:
    """``rule`` for the batch sizes at which ``way`` may be gone."""
    if not way.keeps_heap or way.kept_batch_size is None or rule.batch_size is not None:
        return rule
    return replace(rule, max_batch_size=min(way.kept_batch_size, rule.max_batch_size or way.kept_batch_size))


def _worth(way: Problem, best: ExecutionPlan) -> float:
    """Share by which a plan of ``way`` has to be better than ``best``, since it does what that need not do."""
    updating = WORTH_UPDATING if way.updates_in_backward and not best.update_in_backward else 0.0
    keeping = WORTH_KEEPING if way.keeps_heap and not best.keep_heap else 0.0
    return max(updating, keeping)


def _better(
    best: ExecutionPlan,
    way: Problem,
    rule: BatchRule,
    rehearsals: Sequence[Rehearsal],
    gain: float,
    late: Callable[[], bool],
) -> ExecutionPlan | None:
    """A plan of another of ``_ways``, if one is enough better. Where only one of the two was rehearsed, the other has
    to promise more by ``gain``, as everywhere."""
    desks, samples_per_s = Desks(way), best.predicted.samples_per_s
    rule = _rule_of(way, rule)
    worth = _worth(way, best)
    seen = any(one.plan is not None and _kind(one.plan) == _kind_of(way) for one in rehearsals)
    found = found_above(0.0 if seen else samples_per_s * (1 + worth), desks, rule, late)
    if found is None:
        return None
    other = _best(desks, rule, found, rehearsals, gain)
    best_was, other_was = (bool(of_plan(plan, rehearsals)) for plan in (best, other))
    margin = worth
    if best_was != other_was:
        margin = max(worth, gain) if best_was else -gain
    return other if other.predicted.samples_per_s > samples_per_s * (1 + margin) else None


def _may_update_in_backward(problem: Problem, rule: BatchRule) -> bool:
    """Whether sharded parameters may be updated in the backward pass: the user and the optimizer allow it, and
    gradients are not to be summed over several passes first."""
    step, ranks = problem.model.optimizer_step, problem.cluster.ranks
    once = all(accumulation == 1 for _, accumulation in rule.pairs(ranks))
    return problem.wishes.update_in_backward and step.separable and ranks > 1 and once


def _best(
    desks: Desks, rule: BatchRule, found: ExecutionPlan, rehearsals: Sequence[Rehearsal], gain: float
) -> ExecutionPlan:
    """What a search has ``found``, or the best of those that were rehearsed."""
    found = as_rehearsed(found, rehearsals)
    plans = [one.plan for one in rehearsals if one.plan is not None]
    if not plans:
        return found
    earlier = (predicted_now(desks, rule, plan, found) for plan in plans)
    known = [as_rehearsed(plan, rehearsals) for plan in earlier if plan is not None]
    if not known:
        return found
    best = max(known, key=lambda plan: plan.predicted.samples_per_s)
    promised, shown = found.predicted.samples_per_s, best.predicted.samples_per_s
    return found if promised > shown * (1 + gain) else best


def predicted_now(desks: Desks, rule: BatchRule, earlier: ExecutionPlan, found: ExecutionPlan) -> ExecutionPlan | None:
    """A plan of earlier, as it is predicted now; None where the limit, ``rule`` or a wish no longer allows it.

    Args:
        desks: of the problem that there is now.
        rule: which batch sizes there are.
        earlier: for the same model and ranks.
        found: what a search has said: the other batch sizes are as it has them.
    """
    problem, pair = desks.problem, (earlier.batch_size, earlier.accumulate_grad_batches)
    rule = _rule_of(problem, rule)
    if _kind(earlier) != _kind_of(problem):
        return None
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

"""The paper's Algorithm 1: walks the batch sizes, finds the best plan for each, keeps the one of best throughput.

The paper raises the batch size until not even the plan of least memory fits. Here each batch size gets a good plan and
a lower bound of its step time first; only those that may still be chosen are searched to the end (``candidates``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.batches import BatchRule
from lightning_osdp.planning.candidates import WORTH_TRYING, Candidate, Desk
from lightning_osdp.planning.joining import Units, ways
from lightning_osdp.planning.plan import (
    ExecutionPlan,
    FrontierPoint,
    ModelIdentity,
    OperatorPlan,
    PeakMoment,
    Prediction,
    SearchEnd,
)
from lightning_osdp.planning.reasons import Reasons, reasons
from lightning_osdp.planning.remedies import nothing_fits, with_remedies
from lightning_osdp.planning.space import Problem

__all__ = ["BatchRule", "Candidate", "Problem", "best_candidate", "choose", "least_bytes", "make_plan", "to_plan"]

THROUGHPUT_TOLERANCE = 0.01
"""Of the batch sizes whose throughput is within this share of the best, the smallest is chosen: communication is
amortised ever further by larger batches, but the last percent is not worth fewer optimizer steps."""


def make_plan(problem: Problem, rule: BatchRule) -> ExecutionPlan:
    """Algorithm 1 over the batch sizes of ``rule``.

    Raises:
        InfeasibleError: not even the smallest batch fits; says what is needed, what there is, the largest operator,
            and what would fit.
        ConfigurationError: the batch sizes of ``rule`` contradict each other, or a wish matches nothing.
    """
    return found_at(Desks(problem), rule)


def never() -> bool:
    """The search may take as long as it needs."""
    return False


def found_at(desks: Desks, rule: BatchRule, late: Callable[[], bool] = never) -> ExecutionPlan:
    """``make_plan`` where there are desks already; once it is ``late``, with the good plans that batch sizes get before
    they are searched to the end."""
    plan = found_above(0.0, desks, rule, late)
    assert plan is not None
    return plan


def found_above(
    samples_per_s: float, desks: Desks, rule: BatchRule, late: Callable[[], bool] = never
) -> ExecutionPlan | None:
    """The same; None if no plan makes more than ``samples_per_s``, which is known before the search ends."""
    problem = desks.problem
    if samples_per_s and not _may_exceed(samples_per_s, desks, rule):
        return None
    found: list[Candidate] = []
    end: SearchEnd | None = None
    for batch_size, accumulation in rule.pairs(problem.cluster.ranks):
        try:
            found.append(desks.best(batch_size, accumulation, quick=True))
        except InfeasibleError as error:
            if not found:
                raise with_remedies(error, problem, rule, least_bytes) from None
            end = SearchEnd(reason="memory", batch_size=batch_size, needed_bytes=error.needed_bytes)
            break
    candidates = _finished(desks, found, late)
    frontier = tuple(
        FrontierPoint(batch_size=c.batch_size, samples_per_s=c.samples_per_s, peak_memory_bytes=c.peak.total_bytes)
        for c in candidates
    )
    return to_plan(desks, choose(candidates), frontier, end or rule.end())


def _may_exceed(samples_per_s: float, desks: Desks, rule: BatchRule) -> bool:
    """Whether bounds leave a plan that makes more, at a batch size at which something fits."""
    ranks, limit = desks.problem.cluster.ranks, desks.problem.memory_limit_bytes
    for batch_size, accumulation in rule.pairs(ranks):
        least = desks.least(batch_size, accumulation)
        if least.peak.most_bytes > limit:
            return False
        if least.global_batch_size > samples_per_s * desks.bound_s(batch_size, accumulation):
            return True
    return False


class Desks:
    """A desk for each way in which operators may share units, and for others that were asked for.

    They are made when they are needed: to look one plan up takes one or two of them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._desks: dict[Units, Desk | None] = dict.fromkeys(ways(problem.model, problem.wishes))

    @property
    def apart(self) -> Desk:
        """The one at which no operators share units."""
        return self.of(next(iter(self._desks)))

    def of(self, units: Units) -> Desk:
        """The one at which exactly these share units."""
        desk = self._desks.get(units)
        if desk is None:
            desk = self._desks[units] = Desk(self.problem, units)
        return desk

    def _all(self) -> list[Desk]:
        return [self.of(units) for units in self._desks]

    def best(self, batch_size: int, accumulation: int = 1, *, quick: bool = False) -> Candidate:
        """See ``Desk.best``: the fastest of all desks.

        Raises:
            InfeasibleError: nothing fits, at no desk.
        """
        found = self.under(math.inf, batch_size, accumulation, quick=quick)
        if found is not None:
            return found
        raise nothing_fits(self.problem, self.least(batch_size, accumulation).peak, batch_size)

    def least(self, batch_size: int, accumulation: int = 1) -> Candidate:
        """See ``Desk.least``: of all desks."""
        found = (desk.least(batch_size, accumulation) for desk in self._all())
        return min(found, key=lambda one: one.peak.most_bytes)

    def bound_s(self, batch_size: int, accumulation: int = 1) -> float:
        """See ``Desk.bound_s``: of all desks."""
        return min(desk.bound_s(batch_size, accumulation) for desk in self._all())

    def under(self, seconds: float, batch_size: int, accumulation: int = 1, *, quick: bool = False) -> Candidate | None:
        """See ``Desk.under``: of all desks."""
        bounds = {desk: desk.bound_s(batch_size, accumulation) for desk in self._all()}
        found: list[Candidate] = []
        for desk in sorted(bounds, key=bounds.__getitem__):
            if found and bounds[desk] >= min(one.step_time_s for one in found) * (1 - WORTH_TRYING):
                break
            one = desk.under(seconds, batch_size, accumulation, quick=quick)
            found += [one] if one is not None else []
        if not found:
            return None
        return replace(min(found, key=lambda one: one.step_time_s), bound_s=min(bounds.values()))


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The smallest batch size whose throughput is within ``THROUGHPUT_TOLERANCE`` of the best."""
    best = max(candidate.samples_per_s for candidate in candidates)
    enough = [c for c in candidates if c.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * best]
    return min(enough, key=lambda candidate: candidate.batch_size)


def best_candidate(problem: Problem, batch_size: int, accumulation: int = 1) -> Candidate:
    """The fastest plan at one batch size whose true peak is within the limit.

    Raises:
        InfeasibleError: none is.
        ConfigurationError: a wish matches nothing.
    """
    return Desks(problem).best(batch_size, accumulation)


def least_bytes(problem: Problem, batch_size: int, accumulation: int = 1) -> int:
    """Peak of the plan that takes least memory at one batch size, whatever the limit."""
    return Desk(problem).least(batch_size, accumulation).peak.most_bytes


def _finished(desks: Desks, found: Sequence[Candidate], late: Callable[[], bool]) -> list[Candidate]:
    """The same with those searched to the end, until it is ``late``, that may be chosen or decide what is chosen."""
    candidates = list(found)
    open_ = {index for index, one in enumerate(candidates) if one.step_time_s > one.bound_s * (1 + WORTH_TRYING)}
    while not late() and (next_ := _undecided(candidates, open_)) is not None:
        index, seconds = next_
        better = desks.under(seconds, candidates[index].batch_size, candidates[index].accumulation)
        if better is not None and better.step_time_s < candidates[index].step_time_s:
            candidates[index] = better
        if math.isinf(seconds) or candidates[index].step_time_s < seconds:
            open_.discard(index)
        else:  # it may matter yet, when a smaller one is chosen
            candidates[index] = replace(candidates[index], bound_s=seconds)
    return candidates


def _undecided(candidates: Sequence[Candidate], open_: AbstractSet[int]) -> tuple[int, float] | None:
    """Which of the open ones to search to the end next, and below how many seconds that changes anything.

    First the one that would be chosen, then those that might be: a smaller one by being good enough, a larger one by
    being so good that what would be chosen is not.
    """
    chosen, share = choose(candidates), 1 - THROUGHPUT_TOLERANCE
    at = candidates.index(chosen)
    if at in open_:
        return at, math.inf
    best = max(one.samples_per_s for one in candidates)

    def matters_s(index: int) -> float:
        return candidates[index].global_batch_size / (share * best if index < at else chosen.samples_per_s / share)

    likely = [index for index in open_ if candidates[index].bound_s < matters_s(index)]
    if not likely:
        return None
    index = min(likely, key=lambda index: candidates[index].bound_s / candidates[index].global_batch_size)
    return index, matters_s(index)


def to_plan(
    desks: Desks, chosen: Candidate, frontier: tuple[FrontierPoint, ...], end: SearchEnd | None
) -> ExecutionPlan:
    """A candidate with the reasons for its choices.

    Args:
        desks: of the problem that it solves.
        chosen: the candidate.
        frontier: the best plan at each batch size.
        end: why there are no larger ones.
    """
    problem, desk = desks.problem, desks.of(chosen.units)
    chosen = desk.candidate(chosen.choices, chosen.batch_size, chosen.accumulation, chosen.recomputed)
    model, known = problem.model, reasons(desk, chosen, desks.apart)
    return ExecutionPlan(
        model=ModelIdentity(
            fingerprint=model.fingerprint,
            num_parameters=model.num_parameters,
            flops_per_sample=model.flops_per_sample,
        ),
        cluster=problem.cluster,
        memory_limit_bytes=problem.memory_limit_bytes,
        batch_size=chosen.batch_size,
        accumulate_grad_batches=chosen.accumulation,
        global_batch_size=chosen.global_batch_size,
        operators=_operator_plans(desk, chosen, known),
        recomputed=chosen.recomputed,
        blocks=known.blocks,
        update_in_backward=problem.updates_in_backward,
        keep_heap=problem.keeps_heap,
        predicted=_prediction(problem, chosen),
        frontier=frontier,
        price_s_per_byte=known.price_s_per_byte,
        peak=_peak_moment(chosen),
        search_end=end,
    )


def _operator_plans(desk: Desk, chosen: Candidate, known: Reasons) -> tuple[OperatorPlan, ...]:
    """What is done with each operator; the first of a unit says what else there was for all of it."""
    model, place, recomputed = desk.problem.model, desk.joined.place, set(chosen.recomputed)
    inside = {index for block in model.blocks if block.name in recomputed for index in block.operators}
    return tuple(
        OperatorPlan(
            name=operator.name,
            slices=choice.slices,
            split_dim=choice.split_dim,
            sharding_group=choice.group,
            two_stage=choice.two_stage,
            unit=chosen.units[index],
            checkpoint=index in inside,
            num_parameters=operator.num_parameters,
            pinned=operator.pinned,
            unsplittable=operator.unsplittable,
            alternatives=known.alternatives[index] if place.index(place[index]) == index else (),
        )
        for index, (operator, choice) in enumerate(zip(model.operators, chosen.choices, strict=True))
    )


def _prediction(problem: Problem, chosen: Candidate) -> Prediction:
    return Prediction(
        step_time_s=chosen.step_time_s,
        compute_time_s=chosen.compute_s,
        communication_time_s=chosen.communication_s,
        samples_per_s=chosen.samples_per_s,
        peak_memory_bytes=chosen.peak.total_bytes,
        overhead_bytes=problem.overhead_bytes,
        saving_memory_bytes=chosen.peak.saving_bytes,
        evaluation_memory_bytes=chosen.peak.evaluation_bytes,
        heap_spare_bytes=round(problem.heap.spare.at(chosen.batch_size)),
    )


def _peak_moment(chosen: Candidate) -> PeakMoment:
    """When a step takes most, and what that consists of."""
    peak = chosen.peak
    return PeakMoment(
        where=peak.where,
        states=round(peak.states),
        gradients=round(peak.gradients),
        gathered=round(peak.gathered),
        transient=round(peak.transient),
        activations=round(peak.activations),
        overhead=round(peak.overhead),
        heap=round(peak.heap),
    )

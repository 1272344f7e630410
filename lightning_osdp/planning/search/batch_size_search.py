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
from lightning_osdp.planning.cost.cpu_effects import HeapModel
from lightning_osdp.planning.search.alternatives import PlanRationale, explain_choices
from lightning_osdp.planning.search.infeasibility import infeasible_error, with_suggestions
from lightning_osdp.planning.search.plan_search import MIN_IMPROVEMENT, Candidate, PlanSearch
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.plan import (
    BatchSizePoint,
    ExecutionPlan,
    ModelIdentity,
    OperatorPlan,
    PeakMoment,
    Prediction,
    SearchStop,
)
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.wrapping import WrapAssignment, wrap_assignments

__all__ = [
    "BatchSizePolicy",
    "Candidate",
    "Problem",
    "find_best_candidate",
    "make_plan",
    "min_memory_bytes",
    "pick_batch_size",
    "to_plan",
]

THROUGHPUT_TOLERANCE = 0.01
"""Of the batch sizes whose throughput is within this share of the best, the smallest is chosen: communication is
amortised ever further by larger batches, but the last percent is not worth fewer optimizer steps."""


def make_plan(problem: Problem, policy: BatchSizePolicy) -> ExecutionPlan:
    """Algorithm 1 over the batch sizes of ``policy``.

    Raises:
        InfeasibleError: not even the smallest batch fits; says what is needed, what there is, the largest operator,
            and what would fit.
        ConfigurationError: the batch sizes of ``policy`` contradict each other, or a wish matches nothing.
    """
    return search_batch_sizes(WrapPolicySearch(problem), policy)


def no_deadline() -> bool:
    """The search may take as long as it needs."""
    return False


def search_batch_sizes(
    wrap_search: WrapPolicySearch, policy: BatchSizePolicy, deadline_reached: Callable[[], bool] = no_deadline
) -> ExecutionPlan:
    """``make_plan`` where there are desks already; once it is ``deadline_reached``, with the good plans that batch sizes get before
    they are searched to the end."""
    plan = search_batch_sizes_above(0.0, wrap_search, policy, deadline_reached)
    assert plan is not None
    return plan


def search_batch_sizes_above(
    samples_per_s: float,
    wrap_search: WrapPolicySearch,
    policy: BatchSizePolicy,
    deadline_reached: Callable[[], bool] = no_deadline,
) -> ExecutionPlan | None:
    """The same; None if no plan makes more than ``samples_per_s``, which is known before the search ends."""
    problem = wrap_search.problem
    if samples_per_s and not _could_exceed(samples_per_s, wrap_search, policy):
        return None
    found: list[Candidate] = []
    end: SearchStop | None = None
    for batch_size, accumulation in policy.candidates(problem.cluster.ranks):
        try:
            found.append(wrap_search.best_plan(batch_size, accumulation, heuristic_only=True))
        except InfeasibleError as error:
            if not found:
                raise with_suggestions(error, problem, policy, min_memory_bytes) from None
            end = SearchStop(reason="memory", batch_size=batch_size, needed_bytes=error.needed_bytes)
            break
    candidates = _complete_searches(wrap_search, found, deadline_reached)
    frontier = tuple(
        BatchSizePoint(batch_size=c.batch_size, samples_per_s=c.samples_per_s, peak_memory_bytes=c.peak.total_bytes)
        for c in candidates
    )
    return to_plan(wrap_search, pick_batch_size(candidates), frontier, end or policy.stop_reason())


def _could_exceed(samples_per_s: float, wrap_search: WrapPolicySearch, policy: BatchSizePolicy) -> bool:
    """Whether bounds leave a plan that makes more, at a batch size at which something fits."""
    ranks, limit = wrap_search.problem.cluster.ranks, wrap_search.problem.memory_limit_bytes
    for batch_size, accumulation in policy.candidates(ranks):
        least = wrap_search.min_memory_plan(batch_size, accumulation)
        if least.peak.max_bytes > limit:
            return False
        if least.global_batch_size > samples_per_s * wrap_search.lower_bound_s(batch_size, accumulation):
            return True
    return False


class WrapPolicySearch:
    """A desk for each way in which operators may share units, and for others that were asked for.

    They are made when they are needed: to look one plan up takes one or two of them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._searches: dict[WrapAssignment, PlanSearch | None] = dict.fromkeys(
            wrap_assignments(problem.model, problem.constraints)
        )

    @property
    def unwrapped(self) -> PlanSearch:
        """The one at which no operators share units."""
        return self.for_assignment(next(iter(self._searches)))

    def for_assignment(self, wrap_assignment: WrapAssignment) -> PlanSearch:
        """The one at which exactly these share units."""
        desk = self._searches.get(wrap_assignment)
        if desk is None:
            desk = self._searches[wrap_assignment] = PlanSearch(self.problem, wrap_assignment)
        return desk

    def _all_searches(self) -> list[PlanSearch]:
        return [self.for_assignment(units) for units in self._searches]

    def best_plan(self, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False) -> Candidate:
        """See ``PlanSearch.best``: the fastest of all desks.

        Raises:
            InfeasibleError: nothing fits, at no desk.
        """
        found = self.best_plan_below(math.inf, batch_size, accumulation, heuristic_only=heuristic_only)
        if found is not None:
            return found
        raise infeasible_error(self.problem, self.min_memory_plan(batch_size, accumulation).peak, batch_size)

    def min_memory_plan(self, batch_size: int, accumulation: int = 1) -> Candidate:
        """See ``PlanSearch.min_memory_plan``: of all desks."""
        found = (desk.min_memory_plan(batch_size, accumulation) for desk in self._all_searches())
        return min(found, key=lambda one: one.peak.max_bytes)

    def lower_bound_s(self, batch_size: int, accumulation: int = 1) -> float:
        """See ``PlanSearch.lower_bound_s``: of all desks."""
        return min(desk.lower_bound_s(batch_size, accumulation) for desk in self._all_searches())

    def best_plan_below(
        self, upper_bound_s: float, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False
    ) -> Candidate | None:
        """See ``PlanSearch.best_plan_below``: of all desks."""
        bounds = {desk: desk.lower_bound_s(batch_size, accumulation) for desk in self._all_searches()}
        found: list[Candidate] = []
        for desk in sorted(bounds, key=bounds.__getitem__):
            if found and bounds[desk] >= min(one.step_time_s for one in found) * (1 - MIN_IMPROVEMENT):
                break
            one = desk.best_plan_below(upper_bound_s, batch_size, accumulation, heuristic_only=heuristic_only)
            found += [one] if one is not None else []
        if not found:
            return None
        return replace(min(found, key=lambda one: one.step_time_s), lower_bound_s=min(bounds.values()))


def pick_batch_size(candidates: Sequence[Candidate]) -> Candidate:
    """The smallest batch size whose throughput is within ``THROUGHPUT_TOLERANCE`` of the best."""
    best = max(candidate.samples_per_s for candidate in candidates)
    enough = [c for c in candidates if c.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * best]
    return min(enough, key=lambda candidate: candidate.batch_size)


def find_best_candidate(problem: Problem, batch_size: int, accumulation: int = 1) -> Candidate:
    """The fastest plan at one batch size whose true peak is within the limit.

    Raises:
        InfeasibleError: none is.
        ConfigurationError: a wish matches nothing.
    """
    return WrapPolicySearch(problem).best_plan(batch_size, accumulation)


def min_memory_bytes(problem: Problem, batch_size: int, accumulation: int = 1) -> int:
    """Peak of the plan that takes least memory at one batch size, whatever the limit."""
    return PlanSearch(problem).min_memory_plan(batch_size, accumulation).peak.max_bytes


def _complete_searches(
    wrap_search: WrapPolicySearch, heuristic_candidates: Sequence[Candidate], deadline_reached: Callable[[], bool]
) -> list[Candidate]:
    """The same with those searched to the end, until it is ``deadline_reached``, that may be chosen or decide what is chosen."""
    candidates = list(heuristic_candidates)
    open_ = {
        index for index, one in enumerate(candidates) if one.step_time_s > one.lower_bound_s * (1 + MIN_IMPROVEMENT)
    }
    while not deadline_reached() and (next_ := _next_to_complete(candidates, open_)) is not None:
        index, seconds = next_
        better = wrap_search.best_plan_below(seconds, candidates[index].batch_size, candidates[index].accumulation)
        if better is not None and better.step_time_s < candidates[index].step_time_s:
            candidates[index] = better
        if math.isinf(seconds) or candidates[index].step_time_s < seconds:
            open_.discard(index)
        else:  # it may matter yet, when a smaller one is chosen
            candidates[index] = replace(candidates[index], lower_bound_s=seconds)
    return candidates


def _next_to_complete(candidates: Sequence[Candidate], incomplete: AbstractSet[int]) -> tuple[int, float] | None:
    """Which of the open ones to search to the end next, and below how many seconds that changes anything.

    First the one that would be chosen, then those that might be: a smaller one by being good enough, a larger one by
    being so good that what would be chosen is not.
    """
    chosen, share = pick_batch_size(candidates), 1 - THROUGHPUT_TOLERANCE
    at = candidates.index(chosen)
    if at in incomplete:
        return at, math.inf
    best = max(one.samples_per_s for one in candidates)

    def threshold_s(index: int) -> float:
        return candidates[index].global_batch_size / (share * best if index < at else chosen.samples_per_s / share)

    likely = [index for index in incomplete if candidates[index].lower_bound_s < threshold_s(index)]
    if not likely:
        return None
    index = min(likely, key=lambda index: candidates[index].lower_bound_s / candidates[index].global_batch_size)
    return index, threshold_s(index)


def to_plan(
    wrap_search: WrapPolicySearch,
    chosen: Candidate,
    frontier: tuple[BatchSizePoint, ...],
    search_stop: SearchStop | None,
) -> ExecutionPlan:
    """A candidate with the reasons for its choices.

    Args:
        wrap_search: of the problem that it solves.
        chosen: the candidate.
        frontier: the best plan at each batch size.
        search_stop: why there are no larger ones.
    """
    problem, desk = wrap_search.problem, wrap_search.for_assignment(chosen.wrap_assignment)
    chosen = desk.evaluate_choices(chosen.choices, chosen.batch_size, chosen.accumulation, chosen.recomputed)
    model, known = problem.model, explain_choices(desk, chosen, wrap_search.unwrapped)
    return ExecutionPlan(
        model=ModelIdentity(
            fingerprint=model.fingerprint, num_parameters=model.num_parameters, flops_per_sample=model.flops_per_sample
        ),
        cluster=problem.cluster,
        memory_limit_bytes=problem.memory_limit_bytes,
        batch_size=chosen.batch_size,
        accumulate_grad_batches=chosen.accumulation,
        global_batch_size=chosen.global_batch_size,
        operators=_build_operator_plans(desk, chosen, known),
        recomputed=chosen.recomputed,
        blocks=known.blocks,
        update_in_backward=problem.has_optimizer_in_backward,
        retain_freed_memory=problem.has_retained_heap,
        predicted=_build_prediction(problem, chosen),
        frontier=frontier,
        memory_shadow_price=known.memory_shadow_price,
        peak=_build_peak_moment(chosen),
        search_stop=search_stop,
    )


def _build_operator_plans(
    plan_search: PlanSearch, chosen: Candidate, rationale: PlanRationale
) -> tuple[OperatorPlan, ...]:
    """What is done with each operator; the first of a unit says what else there was for all of it."""
    model, place, recomputed = (
        plan_search.problem.model,
        plan_search.wrapped_model.wrapped_index,
        set(chosen.recomputed),
    )
    inside = {index for block in model.blocks if block.name in recomputed for index in block.operators}
    return tuple(
        OperatorPlan(
            name=operator.name,
            slices=choice.slices,
            split_dim=choice.split_dim,
            sharding_group=choice.scope,
            hierarchical=choice.hierarchical,
            unit=chosen.wrap_assignment[index],
            is_recomputed=index in inside,
            num_parameters=operator.num_parameters,
            replicated_reason=operator.replicated_reason,
            unsplittable_reason=operator.unsplittable_reason,
            alternatives=rationale.alternatives[index] if place.index(place[index]) == index else (),
        )
        for index, (operator, choice) in enumerate(zip(model.operators, chosen.choices, strict=True))
    )


def _build_prediction(problem: Problem, chosen: Candidate) -> Prediction:
    return Prediction(
        step_time_s=chosen.step_time_s,
        compute_time_s=chosen.compute_s,
        communication_time_s=chosen.communication_s,
        samples_per_s=chosen.samples_per_s,
        peak_memory_bytes=chosen.peak.total_bytes,
        overhead_bytes=problem.overhead_bytes,
        saving_memory_bytes=chosen.peak.saving_bytes,
        evaluation_memory_bytes=chosen.peak.evaluation_bytes,
        heap_headroom_bytes=round(
            HeapModel.for_model(problem.model, retained=problem.has_retained_heap).headroom.value_at(chosen.batch_size)
        ),
    )


def _build_peak_moment(chosen: Candidate) -> PeakMoment:
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

"""The paper's Algorithm 1: walk the batch sizes, find the best plan of each, keep the one of best throughput.

The paper raises the batch size until not even the plan of least memory fits. Here each batch size first gets a good
plan and a lower bound of its step time; only the searches that may change the chosen batch size are completed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.activation_exchange import exchanged_bytes
from lightning_osdp.planning.cost.cpu_effects import HeapModel
from lightning_osdp.planning.search.alternatives import PlanRationale, explain_choices
from lightning_osdp.planning.search.infeasibility import infeasible_error, with_suggestions
from lightning_osdp.planning.search.plan_search import MIN_IMPROVEMENT, Candidate, PlanSearch
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import ModelProfile, Operator
from lightning_osdp.planning.spec.plan import ExecutionPlan, ModelIdentity, OperatorPlan, Prediction, planned_types
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.search_record import BatchSizePoint, PeakMoment, SearchStop
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorScope, index_candidates
from lightning_osdp.planning.spec.wrapping import WrapAssignment, wrap_assignments

THROUGHPUT_TOLERANCE = 0.01
"""The smallest batch size whose throughput is within this fraction of the best is chosen: larger batches amortise
communication further, but the last percent is not worth fewer optimizer steps."""


def make_plan(problem: Problem, policy: BatchSizePolicy) -> ExecutionPlan:
    """Search the batch sizes of ``policy`` for the plan of best throughput.

    Raises:
        InfeasibleError: not even the smallest batch fits; says what is needed, the limit, the largest operator, and
            what would fit.
        ConfigurationError: the batch sizes of ``policy`` contradict each other, or a constraint matches nothing.
    """
    plan = search_batch_sizes(WrapPolicySearch(problem), policy)
    assert plan is not None, "there is a plan or an error where no throughput is asked for"
    return plan


def no_deadline() -> bool:
    """Return False: the search may take as long as it needs."""
    return False


def search_batch_sizes(
    wrap_search: WrapPolicySearch,
    policy: BatchSizePolicy,
    deadline_reached: Callable[[], bool] = no_deadline,
    above_samples_per_s: float = 0.0,
) -> ExecutionPlan | None:
    """Search the batch sizes like ``make_plan``, with a deadline and a throughput to exceed.

    Args:
        wrap_search: searches of the problem.
        policy: the batch sizes.
        deadline_reached: once True, batch sizes keep the good plans found before their searches are completed.
        above_samples_per_s: throughput that a plan must exceed.

    Returns:
        The plan; None if lower bounds show that no plan exceeds ``above_samples_per_s``.
    """
    problem = wrap_search.problem
    if above_samples_per_s and not _could_exceed(above_samples_per_s, wrap_search, policy):
        return None
    heuristic_candidates: list[Candidate] = []
    stop: SearchStop | None = None
    for batch_size, accumulation in policy.candidates(problem.cluster.ranks):
        try:
            heuristic_candidates.append(wrap_search.best_plan(batch_size, accumulation, heuristic_only=True))
        except InfeasibleError as error:
            if not heuristic_candidates:
                raise with_suggestions(error, problem, policy, min_memory_bytes) from None
            stop = SearchStop(reason="memory", batch_size=batch_size, needed_bytes=error.needed_bytes)
            break
    candidates = _complete_searches(wrap_search, heuristic_candidates, deadline_reached)
    chosen = pick_batch_size(candidates)
    played = wrap_search.for_assignment(chosen.wrap_assignment).played(chosen)
    pace = played.samples_per_s / chosen.samples_per_s  # the others are taken to be off as much
    frontier = tuple(
        BatchSizePoint(
            batch_size=c.batch_size,
            samples_per_s=pace * c.samples_per_s,
            peak_memory_bytes=c.peak.with_heap_within(problem.memory_limit_bytes).total_bytes,
        )
        for c in candidates
    )
    return to_plan(wrap_search, chosen, frontier, stop or policy.stop_reason())


def _could_exceed(samples_per_s: float, wrap_search: WrapPolicySearch, policy: BatchSizePolicy) -> bool:
    """Return whether bounds leave a faster plan at a batch size at which something fits."""
    problem = wrap_search.problem
    for batch_size, accumulation in policy.candidates(problem.cluster.ranks):
        smallest = wrap_search.min_memory_plan(batch_size, accumulation)
        if smallest.peak.max_bytes > problem.memory_limit_bytes:
            return False
        if smallest.global_batch_size > samples_per_s * wrap_search.lower_bound_s(batch_size, accumulation):
            return True
    return False


class WrapPolicySearch:
    """A `PlanSearch` for each way in which operators may share units, each made when it is first needed."""

    def __init__(self, problem: Problem, assignments: Sequence[WrapAssignment] = ()) -> None:
        self.problem = problem
        self._assignments = assignments or wrap_assignments(problem.model, problem.constraints)
        self._searches: dict[WrapAssignment, PlanSearch] = {}

    def with_shared_units(self) -> WrapPolicySearch | None:
        """Return the searches in which operators share units; None if none may."""
        shared = [units for units in self._assignments if any(units)]
        return WrapPolicySearch(self.problem, shared) if shared else None

    @property
    def unwrapped(self) -> PlanSearch:
        """The search in which no operators share units."""
        return self.for_assignment(("",) * len(self.problem.model.operators))

    def for_assignment(self, wrap_assignment: WrapAssignment) -> PlanSearch:
        """Return the search in which exactly these operators share units."""
        search = self._searches.get(wrap_assignment)
        if search is None:
            search = self._searches[wrap_assignment] = PlanSearch(self.problem, wrap_assignment)
        return search

    def _all_searches(self) -> list[PlanSearch]:
        return [self.for_assignment(assignment) for assignment in self._assignments]

    def best_plan(self, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False) -> Candidate:
        """Return the fastest plan of all searches (see ``PlanSearch.best_plan_below``).

        Raises:
            InfeasibleError: nothing fits in any of them.
        """
        best = self.best_plan_below(math.inf, batch_size, accumulation, heuristic_only=heuristic_only)
        if best is None:
            raise infeasible_error(self.problem, self.min_memory_plan(batch_size, accumulation).peak, batch_size)
        return best

    def min_memory_plan(self, batch_size: int, accumulation: int = 1) -> Candidate:
        """Return the plan of least memory of all searches."""
        plans = (search.min_memory_plan(batch_size, accumulation) for search in self._all_searches())
        return min(plans, key=lambda plan: plan.peak.max_bytes)

    def lower_bound_s(self, batch_size: int, accumulation: int = 1) -> float:
        """Return the least lower bound of all searches."""
        return min(search.lower_bound_s(batch_size, accumulation) for search in self._all_searches())

    def best_plan_below(
        self, upper_bound_s: float, batch_size: int, accumulation: int = 1, *, heuristic_only: bool = False
    ) -> Candidate | None:
        """Return the fastest plan of all searches below a step time (see ``PlanSearch.best_plan_below``)."""
        bounds = {search: search.lower_bound_s(batch_size, accumulation) for search in self._all_searches()}
        best: Candidate | None = None
        for search in sorted(bounds, key=bounds.__getitem__):
            if best is not None and bounds[search] >= best.step_time_s * (1 - MIN_IMPROVEMENT):
                break
            plan = search.best_plan_below(upper_bound_s, batch_size, accumulation, heuristic_only=heuristic_only)
            if plan is not None and (best is None or plan.step_time_s < best.step_time_s):
                best = plan
        return None if best is None else replace(best, lower_bound_s=min(bounds.values()))


def pick_batch_size(candidates: Sequence[Candidate]) -> Candidate:
    """Return the smallest batch size whose throughput is within ``THROUGHPUT_TOLERANCE`` of the best."""
    best = max(candidate.samples_per_s for candidate in candidates)
    enough = [c for c in candidates if c.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * best]
    return min(enough, key=lambda candidate: candidate.batch_size)


def find_best_candidate(problem: Problem, batch_size: int, accumulation: int = 1) -> Candidate:
    """Return the fastest plan at one batch size whose predicted peak is within the limit.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: a constraint matches nothing.
    """
    return WrapPolicySearch(problem).best_plan(batch_size, accumulation)


def min_memory_bytes(problem: Problem, batch_size: int, accumulation: int = 1) -> int:
    """Return the peak of the plan of least memory at one batch size, whatever the limit."""
    return PlanSearch(problem).min_memory_plan(batch_size, accumulation).peak.max_bytes


def _complete_searches(
    wrap_search: WrapPolicySearch, heuristic_candidates: Sequence[Candidate], deadline_reached: Callable[[], bool]
) -> list[Candidate]:
    """Complete the searches that may decide which batch size is chosen, until the deadline."""
    candidates = list(heuristic_candidates)
    incomplete = {i for i, c in enumerate(candidates) if c.step_time_s > c.lower_bound_s * (1 + MIN_IMPROVEMENT)}
    while not deadline_reached() and (work := _next_to_complete(candidates, incomplete)) is not None:
        index, threshold_s = work
        candidate = candidates[index]
        better = wrap_search.best_plan_below(threshold_s, candidate.batch_size, candidate.accumulation)
        if better is not None and better.step_time_s < candidate.step_time_s:
            candidates[index] = candidate = better
        if math.isinf(threshold_s) or candidate.step_time_s < threshold_s:
            incomplete.discard(index)
        else:  # it may matter again once a smaller batch size is chosen
            candidates[index] = replace(candidate, lower_bound_s=threshold_s)
    return candidates


def _next_to_complete(candidates: Sequence[Candidate], incomplete: AbstractSet[int]) -> tuple[int, float] | None:
    """Return the next search to complete, and the step time below which its result could change the chosen batch size.

    First comes the batch size that would be chosen; then a smaller one that may be good enough, or a larger one that
    may be so good that the chosen one is not. None if the choice is certain.
    """
    chosen = pick_batch_size(candidates)
    chosen_index = candidates.index(chosen)
    if chosen_index in incomplete:
        return chosen_index, math.inf
    good_enough = (1 - THROUGHPUT_TOLERANCE) * max(candidate.samples_per_s for candidate in candidates)
    too_good = chosen.samples_per_s / (1 - THROUGHPUT_TOLERANCE)
    threshold_s = {
        index: candidates[index].global_batch_size / (good_enough if index < chosen_index else too_good)
        for index in incomplete
    }
    relevant = [index for index in incomplete if candidates[index].lower_bound_s < threshold_s[index]]
    if not relevant:
        return None
    index = min(relevant, key=lambda index: candidates[index].lower_bound_s / candidates[index].global_batch_size)
    return index, threshold_s[index]


def to_plan(
    wrap_search: WrapPolicySearch,
    chosen: Candidate,
    frontier: tuple[BatchSizePoint, ...],
    search_stop: SearchStop | None,
) -> ExecutionPlan:
    """Return a candidate as a plan, with the reasons for its choices.

    Args:
        wrap_search: searches of the problem that it solves.
        chosen: the candidate.
        frontier: the best plan at each batch size.
        search_stop: why no larger batch sizes were tried.
    """
    problem, search = wrap_search.problem, wrap_search.for_assignment(chosen.wrap_assignment)
    chosen = search.evaluate_choices(chosen.choices, chosen.batch_size, chosen.accumulation, chosen.recomputed)
    model, rationale = problem.model, explain_choices(search, chosen, wrap_search.unwrapped)
    chosen = search.played(chosen)
    chosen = replace(chosen, peak=chosen.peak.with_heap_within(problem.memory_limit_bytes))
    return ExecutionPlan(
        model=ModelIdentity(
            fingerprint=model.fingerprint, num_parameters=model.num_parameters, flops_per_sample=model.flops_per_sample
        ),
        cluster=problem.cluster,
        memory_limit_bytes=problem.memory_limit_bytes,
        batch_size=chosen.batch_size,
        accumulate_grad_batches=chosen.accumulation,
        global_batch_size=chosen.global_batch_size,
        operators=_build_operator_plans(search, chosen, rationale),
        recomputed=chosen.recomputed,
        tensor_scopes=_tensor_scopes(model, chosen),
        blocks=rationale.blocks,
        reduce_dtype=model.reduce_dtype,
        update_in_backward=problem.has_optimizer_in_backward,
        retain_freed_memory=problem.has_retained_heap,
        predicted=_build_prediction(problem, chosen),
        frontier=frontier,
        memory_shadow_price=rationale.memory_shadow_price,
        peak=_build_peak_moment(chosen),
        search_stop=search_stop,
    )


def _build_operator_plans(
    plan_search: PlanSearch, chosen: Candidate, rationale: PlanRationale
) -> tuple[OperatorPlan, ...]:
    """Return the operators' plans; of operators that share a unit, the first has the alternatives."""
    model, wrapped_index = plan_search.problem.model, plan_search.wrapped_model.wrapped_index
    recomputed = {i for block in model.blocks if block.name in chosen.recomputed for i in block.operators}
    candidates = index_candidates(model.tensor_candidates)
    return tuple(
        OperatorPlan(
            name=operator.name,
            slices=choice.slices,
            split_dim=choice.split_dim,
            sharding_group=choice.scope,
            hierarchical=choice.hierarchical,
            **_tensor_fields(candidates.get(operator.name), operator, choice.tensor_degree, chosen.batch_size),
            tensor_refusal=model.tensor_refusals.get(operator.name, "") if operator.tensor is None else "",
            tensor_group_refusal=model.tensor_group_refusals.get(operator.name, ""),
            unit=chosen.wrap_assignment[index],
            is_recomputed=index in recomputed,
            num_parameters=operator.num_parameters,
            requested_mode=_requested_mode(plan_search.problem.constraints, operator),
            replicated_reason=operator.replicated_reason,
            unsplittable_reason=operator.unsplittable_reason,
            alternatives=rationale.alternatives[index] if wrapped_index.index(wrapped_index[index]) == index else (),
            **planned_types(operator),
        )
        for index, (operator, choice) in enumerate(zip(model.operators, chosen.choices, strict=True))
    )


def _requested_mode(constraints: SearchConstraints, operator: Operator) -> Mode | None:
    is_required = operator.tensor is not None and operator.tensor.is_required
    is_cut = is_required or (constraints.requested_degree(operator.name) or 1) > 1
    return Mode.TP if is_cut else constraints.requested_mode(operator.name)


def _tensor_fields(
    place: tuple[TensorCandidate, int] | None, operator: Operator, degree: int, batch_size: int
) -> dict[str, Any]:
    """Return the fields of an operator's plan that say how it is, or could be, tensor parallel.

    Args:
        place: The operator's candidate and its position there; None if it has none.
        operator: The operator.
        degree: Number of ranks that it is cut over.
        batch_size: Samples of each rank in a micro-batch.
    """
    if operator.tensor is None or place is None:
        return {}
    candidate, index = place
    fields: dict[str, Any] = {"tensor_group": candidate.operators if len(candidate.operators) > 1 else ()}
    if degree > 1:
        fields |= {
            "tensor": candidate.split(index, degree),
            "activation_bytes": round(batch_size * exchanged_bytes(operator.tensor, degree)),
            "weight_bytes": sum(parameter.parameter_bytes for parameter in operator.parameters),
        }
    return fields


def _tensor_scopes(model: ModelProfile, chosen: Candidate) -> dict[str, TensorScope]:
    """Return what the scopes need whose operators the candidate has tensor parallel."""
    cut = {op.name for op, choice in zip(model.operators, chosen.choices, strict=True) if choice.tensor_degree > 1}
    scopes = (each for each in model.tensor_candidates if each.scope is not None and cut.issuperset(each.operators))
    return {candidate.scope: candidate.tensor_scope for candidate in scopes if candidate.scope is not None}


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
    peak = chosen.peak
    parts = ("states", "gradients", "gathered", "transient", "activations", "overhead", "heap")
    return PeakMoment(where=peak.where, **{part: round(getattr(peak, part)) for part in parts})

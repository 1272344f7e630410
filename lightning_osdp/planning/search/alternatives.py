"""What a plan records of its search for ``explain``: alternatives of each operator, and the value of memory."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.moments import Ints
from lightning_osdp.planning.search.menus import pareto_options
from lightning_osdp.planning.search.plan_search import BatchSizeSearch, Candidate, PlanSearch
from lightning_osdp.planning.search.subproblem import KnapsackSubproblem
from lightning_osdp.planning.spec.plan import BlockPlan, ChoiceCost


class PlanRationale(NamedTuple):
    """The reasons for a candidate's choices.

    The memory shadow price is in seconds per byte, at the budget that just admits the candidate.
    """

    alternatives: list[tuple[ChoiceCost, ...]]
    memory_shadow_price: float
    blocks: tuple[BlockPlan, ...]


def explain_choices(plan_search: PlanSearch, candidate: Candidate, unwrapped_search: PlanSearch) -> PlanRationale:
    """Return the alternatives at the candidate's batch size, with the bytes of the moment of its peak.

    Args:
        plan_search: the search with the candidate's wrap assignment.
        candidate: the plan.
        unwrapped_search: the search in which no operators share units.
    """
    search = plan_search.for_batch_size(candidate.batch_size, candidate.accumulation)
    options = plan_search.options_of(candidate.choices)
    mask = plan_search.recompute_mask(candidate.recomputed)
    subproblem = KnapsackSubproblem(search, mask, candidate.peak, conservative=True)
    solution = subproblem.solve(subproblem.budget_used(options))
    shadow_price = solution.memory_shadow_price if solution is not None else 0.0
    by_group = [_collect_alternatives(subproblem, group, options) for group in range(subproblem.num_groups)]
    groups = subproblem.group_of_operator.tolist()
    blocks = _add_wrapping(unwrapped_search, candidate, _build_block_plans(search, options, candidate.recomputed))
    alternatives = [by_group[groups[index]] for index in plan_search.wrapped_model.wrapped_index]
    return PlanRationale(alternatives, shadow_price, blocks)


def _add_wrapping(
    unwrapped_search: PlanSearch, candidate: Candidate, blocks: tuple[BlockPlan, ...]
) -> tuple[BlockPlan, ...]:
    """Return the blocks with what shared units save in time and cost in memory."""
    members = Counter(unit for unit in candidate.wrap_assignment if unit)
    if not members:
        return blocks
    batch = (candidate.batch_size, candidate.accumulation, candidate.recomputed)
    unwrapped = unwrapped_search.evaluate_choices(candidate.choices, *batch)
    changes = {
        "wrapping_saves_s": (unwrapped.step_time_s - candidate.step_time_s) / len(members),
        "wrapping_bytes": candidate.peak.total_bytes - unwrapped.peak.total_bytes,
    }
    return tuple(
        block.model_copy(update={"num_wrapped": members[block.name], **(changes if members[block.name] else {})})
        for block in blocks
    )


def _collect_alternatives(subproblem: KnapsackSubproblem, group: int, options: Ints) -> tuple[ChoiceCost, ...]:
    """Return a group's options that are Pareto-optimal, chosen, or split nothing."""
    costs = subproblem.group_options(group)
    shown = set(pareto_options(costs.time_s, costs.resident, costs.transient).tolist())
    shown |= set((options[subproblem.group_of_operator == group] - costs.first_option).tolist())
    return tuple(
        ChoiceCost(
            slices=choice.slices,
            split_dim=choice.split_dim,
            sharding_group=choice.scope,
            hierarchical=choice.hierarchical,
            tensor_degree=choice.tensor_degree,
            time_s=float(costs.time_s[index]),
            resident_bytes=int(costs.resident[index]),
            transient_bytes=int(costs.transient[index]),
        )
        for index, choice in enumerate(costs.choices)
        if index in shown or choice.split_dim is None
    )


def _build_block_plans(search: BatchSizeSearch, options: Ints, recomputed: tuple[str, ...]) -> tuple[BlockPlan, ...]:
    space, problem = search.space, search.space.problem
    saved_bytes = space.timeline.recompute_saves.value_at(search.batch_size)
    own_s = space.recompute_s(search.batch_size, search.accumulation)
    added_s = np.diff(search.times.total, axis=0)[0]
    return tuple(
        BlockPlan(
            name=block.name,
            kind=block.kind,
            recomputed=block.name in recomputed,
            recompute_blocker=block.recompute_blocker,
            user_requested=problem.constraints.forced_recompute(block.name) is not None,
            recompute_saves_bytes=max(0, round(float(saved_bytes[index]))),
            time_s=float(own_s[index] + added_s[options[list(block.operators)]].sum()),
        )
        for index, block in enumerate(problem.model.blocks)
    )

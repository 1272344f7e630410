"""What a plan keeps of its search, for ``explain``: what else there was to choose, and what memory is worth."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.moments import Ints
from lightning_osdp.planning.search.plan_search import BatchSizeSearch, Candidate, PlanSearch
from lightning_osdp.planning.search.subproblem import KnapsackSubproblem, pareto_options
from lightning_osdp.planning.spec.choices import ShardingChoice
from lightning_osdp.planning.spec.plan import BlockPlan, ChoiceCost


class PlanRationale(NamedTuple):
    """Why a candidate is what it is."""

    alternatives: list[tuple[ChoiceCost, ...]]
    """Of each operator."""
    memory_shadow_price: float
    """What the search's linear relaxation would pay for memory at the budget that just admits the candidate."""
    blocks: tuple[BlockPlan, ...]


def explain_choices(plan_search: PlanSearch, candidate: Candidate, unwrapped_search: PlanSearch) -> PlanRationale:
    """What there was to choose at the candidate's batch size, with bytes as they count about when its peak is.

    Args:
        plan_search: at which operators share units as the candidate has it.
        candidate: the plan.
        unwrapped_search: the desk at which none do.
    """
    at = plan_search.for_batch_size(candidate.batch_size, candidate.accumulation)
    rows = plan_search.options_of(candidate.choices)
    names = set(candidate.recomputed)
    flags = np.array([block.name in names for block in plan_search.problem.model.blocks], dtype=bool)
    groups = KnapsackSubproblem(at, flags, candidate.peak, conservative=True)
    solution = groups.solve(groups.budget_used(rows))
    price = solution.memory_shadow_price if solution is not None else 0.0
    shared = [_collect_alternatives(at, groups, group, rows) for group in range(len(groups.menus))]
    groups_of = [groups.group_of_operator.tolist()[place] for place in plan_search.wrapped_model.wrapped_index]
    blocks = _with_wrapping(unwrapped_search, candidate, _build_block_plans(at, rows, names))
    return PlanRationale([shared[group] for group in groups_of], price, blocks)


def _with_wrapping(
    unwrapped_search: PlanSearch, candidate: Candidate, blocks: tuple[BlockPlan, ...]
) -> tuple[BlockPlan, ...]:
    """The same with what shared units bring."""
    members = Counter(unit for unit in candidate.wrap_assignment if unit)
    if not members:
        return blocks
    batch = (candidate.batch_size, candidate.accumulation, candidate.recomputed)
    alone = unwrapped_search.evaluate_choices(candidate.choices, *batch)
    changes = {
        "wrapping_saves_s": (alone.step_time_s - candidate.step_time_s) / len(members),
        "wrapping_bytes": candidate.peak.total_bytes - alone.peak.total_bytes,
    }
    return tuple(
        block.model_copy(update={"num_wrapped": members[block.name], **(changes if members[block.name] else {})})
        for block in blocks
    )


def _collect_alternatives(
    batch_size_search: BatchSizeSearch, subproblem: KnapsackSubproblem, group: int, options: Ints
) -> tuple[ChoiceCost, ...]:
    """Those of one group's rows that are no worse than any other, that are chosen, or that split nothing."""
    costs = subproblem.group_options(group)
    useful = set(pareto_options(costs.time_s, costs.resident, costs.transient).tolist())
    useful |= set((options[subproblem.group_of_operator == group] - costs.first_option).tolist())
    return tuple(
        _to_choice_cost(choice, *row)
        for index, (choice, row) in enumerate(
            zip(
                costs.choices,
                zip(costs.time_s.tolist(), costs.resident.tolist(), costs.transient.tolist(), strict=True),
                strict=True,
            )
        )
        if index in useful or choice.split_dim is None
    )


def _to_choice_cost(choice: ShardingChoice, time_s: float, resident_bytes: int, transient_bytes: int) -> ChoiceCost:
    return ChoiceCost(
        slices=choice.slices,
        split_dim=choice.split_dim,
        sharding_group=choice.scope,
        hierarchical=choice.hierarchical,
        time_s=time_s,
        resident_bytes=resident_bytes,
        transient_bytes=transient_bytes,
    )


def _build_block_plans(
    batch_size_search: BatchSizeSearch, options: Ints, recomputed: set[str]
) -> tuple[BlockPlan, ...]:
    space, problem = batch_size_search.space, batch_size_search.space.problem
    saved, own = (
        space.timeline.recompute_saves.value_at(batch_size_search.batch_size),
        space.recompute_s(batch_size_search.batch_size, batch_size_search.accumulation),
    )
    found = []
    for index, block in enumerate(problem.model.blocks):
        members = options[list(block.operators)]
        more = batch_size_search.times.total[1, members].sum() - batch_size_search.times.total[0, members].sum()
        found.append(
            BlockPlan(
                name=block.name,
                kind=block.kind,
                recomputed=block.name in recomputed,
                recompute_blocker=block.recompute_blocker,
                user_requested=problem.constraints.forced_recompute(block.name) is not None,
                recompute_saves_bytes=max(0, round(float(saved[index]))),
                time_s=float(own[index] + more),
            )
        )
    return tuple(found)

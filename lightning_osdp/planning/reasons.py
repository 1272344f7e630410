"""What a plan keeps of its search, for ``explain``: what else there was to choose, and what memory is worth."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.candidates import AtBatchSize, Candidate, Desk
from lightning_osdp.planning.choices import Choice
from lightning_osdp.planning.groups import Groups, undominated
from lightning_osdp.planning.plan import BlockPlan, ChoiceCost
from lightning_osdp.planning.timeline import Ints


class Reasons(NamedTuple):
    """Why a candidate is what it is."""

    alternatives: list[tuple[ChoiceCost, ...]]
    """Of each operator."""
    price_s_per_byte: float
    """What the search's linear relaxation would pay for memory at the budget that just admits the candidate."""
    blocks: tuple[BlockPlan, ...]


def reasons(desk: Desk, candidate: Candidate, apart: Desk) -> Reasons:
    """What there was to choose at the candidate's batch size, with bytes as they count about when its peak is.

    Args:
        desk: at which operators share units as the candidate has it.
        candidate: the plan.
        apart: the desk at which none do.
    """
    at = desk.at(candidate.batch_size, candidate.accumulation)
    rows = desk.rows_of(candidate.choices)
    names = set(candidate.recomputed)
    flags = np.array([block.name in names for block in desk.problem.model.blocks], dtype=bool)
    groups = Groups(at, flags, candidate.peak, wary=True)
    solution = groups.solve(groups.taken_bytes(rows))
    price = solution.price_s_per_byte if solution is not None else 0.0
    shared = [_alternatives(at, groups, group, rows) for group in range(len(groups.menus))]
    groups_of = [groups.member.tolist()[place] for place in desk.joined.place]
    blocks = _with_joining(apart, candidate, _blocks(at, rows, names))
    return Reasons([shared[group] for group in groups_of], price, blocks)


def _with_joining(apart: Desk, candidate: Candidate, blocks: tuple[BlockPlan, ...]) -> tuple[BlockPlan, ...]:
    """The same with what shared units bring."""
    members = Counter(unit for unit in candidate.units if unit)
    if not members:
        return blocks
    batch = (candidate.batch_size, candidate.accumulation, candidate.recomputed)
    alone = apart.candidate(candidate.choices, *batch)
    changes = {
        "joining_s": (alone.step_time_s - candidate.step_time_s) / len(members),
        "joining_bytes": candidate.peak.total_bytes - alone.peak.total_bytes,
    }
    return tuple(
        block.model_copy(update={"joined": members[block.name], **(changes if members[block.name] else {})})
        for block in blocks
    )


def _alternatives(at: AtBatchSize, groups: Groups, group: int, rows: Ints) -> tuple[ChoiceCost, ...]:
    """Those of one group's rows that are no worse than any other, that are chosen, or that split nothing."""
    costs = groups.costs(group)
    useful = set(undominated(costs.time_s, costs.resident, costs.transient).tolist())
    useful |= set((rows[groups.member == group] - costs.first_row).tolist())
    return tuple(
        _cost(choice, *row)
        for index, (choice, row) in enumerate(
            zip(
                costs.choices,
                zip(costs.time_s.tolist(), costs.resident.tolist(), costs.transient.tolist(), strict=True),
                strict=True,
            )
        )
        if index in useful or choice.split_dim is None
    )


def _cost(choice: Choice, time_s: float, resident_bytes: int, transient_bytes: int) -> ChoiceCost:
    return ChoiceCost(
        slices=choice.slices,
        split_dim=choice.split_dim,
        sharding_group=choice.group,
        two_stage=choice.two_stage,
        time_s=time_s,
        resident_bytes=resident_bytes,
        transient_bytes=transient_bytes,
    )


def _blocks(at: AtBatchSize, rows: Ints, recomputed: set[str]) -> tuple[BlockPlan, ...]:
    space, problem = at.space, at.space.problem
    saved, own = space.timeline.saved.at(at.batch_size), space.block_s(at.batch_size, at.accumulation)
    found = []
    for index, block in enumerate(problem.model.blocks):
        members = rows[list(block.operators)]
        more = at.times.total[1, members].sum() - at.times.total[0, members].sum()
        found.append(
            BlockPlan(
                name=block.name,
                kind=block.kind,
                recomputed=block.name in recomputed,
                pinned=block.pinned,
                wished=problem.wishes.recompute(block.name) is not None,
                saved_bytes=max(0, round(float(saved[index]))),
                time_s=float(own[index] + more),
            )
        )
    return tuple(found)

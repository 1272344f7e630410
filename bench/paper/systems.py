"""The ways to shard that are compared, each at its own best batch size under the same costs.

FSDP per operator is what the authors' scripts run as their baseline (one FairScale unit around each Linear). FSDP per
block is how FSDP is used today: one gather for all that a block holds, fewer latencies and a larger transient. OSDP may
choose that, too (``planning.joining``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan, pick_batch_size
from lightning_osdp.planning.search.plan_search import Candidate, PlanSearch
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, legal_modes
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.wrapping import wrap_assignments
from lightning_osdp.planning.whatif.simulate import BASELINE_CONSTRAINTS


@dataclass(frozen=True)
class Result:
    """What one way to shard reaches."""

    batch_size: int
    samples_per_s: float
    """Over all devices."""
    peak_memory_bytes: int
    compute_s: float
    communication_s: float
    recomputed: float = 0.0
    """Share of the blocks."""


System = Callable[[Problem, BatchSizePolicy], Result | None]
"""None: nothing fits."""


def fsdp_per_operator(problem: Problem, rule: BatchSizePolicy, *, recomputed: bool = False) -> Result | None:
    """Every operator a unit of its own, gathered for forward and for backward (and for the recomputation between)."""
    search = PlanSearch(replace(problem, constraints=BASELINE_CONSTRAINTS))
    choices = tuple(map(_sharded, problem.model.operators))
    names = tuple(block.name for block in problem.model.blocks) if recomputed else ()
    return _best(problem, rule, lambda batch_size: search.evaluate_choices(choices, batch_size, 1, names))


def fsdp_per_block(problem: Problem, rule: BatchSizePolicy, *, recomputed: bool = False) -> Result | None:
    """Every block a unit. Where blocks are recomputed, a unit is around that: one gather serves both."""
    units = wrap_assignments(problem.model, BASELINE_CONSTRAINTS)[-1]
    search = PlanSearch(replace(problem, constraints=BASELINE_CONSTRAINTS), units)
    choices = tuple(map(_sharded, problem.model.operators))
    names = tuple(block.name for block in problem.model.blocks) if recomputed else ()
    return _best(problem, rule, lambda batch_size: search.evaluate_choices(choices, batch_size, 1, names))


def osdp(problem: Problem, rule: BatchSizePolicy, *, wishes: SearchConstraints) -> Result | None:
    """The plan of this package."""
    try:
        plan = make_plan(replace(problem, constraints=wishes), rule)
    except InfeasibleError:
        return None
    predicted = plan.predicted
    return Result(
        batch_size=plan.batch_size,
        samples_per_s=predicted.samples_per_s,
        peak_memory_bytes=predicted.peak_memory_bytes,
        compute_s=predicted.compute_time_s,
        communication_s=predicted.communication_time_s,
        recomputed=len(plan.recomputed) / max(1, len(problem.model.blocks)),
    )


def _sharded(operator: Operator) -> ShardingChoice:
    """As FSDP has it; what may not be sharded throughout takes the nearest."""
    legal = legal_modes(operator)
    return ShardingChoice((Mode.ZDP if Mode.ZDP in legal else legal[-1],))


def _best(problem: Problem, rule: BatchSizePolicy, candidate: Callable[[int], Candidate]) -> Result | None:
    found: list[Candidate] = []
    for batch_size, _ in rule.candidates(problem.cluster.ranks):
        one = candidate(batch_size)
        if one.peak.total_bytes > problem.memory_limit_bytes:
            break
        found.append(one)
    if not found:
        return None
    best = pick_batch_size(found)
    return Result(
        batch_size=best.batch_size,
        samples_per_s=best.samples_per_s,
        peak_memory_bytes=best.peak.total_bytes,
        compute_s=best.compute_s,
        communication_s=best.communication_s,
        recomputed=len(best.recomputed) / max(1, len(problem.model.blocks)),
    )

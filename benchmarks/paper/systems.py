"""The ways to shard that are compared, each at its own best batch size under the same costs.

FSDP per operator is what the authors' scripts run as their baseline (one FairScale unit around each Linear). FSDP per
block is how FSDP is used today: one gather for all that a block holds, fewer latencies and a larger transient. OSDP may
choose that, too (``planning.joining``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.candidates import Candidate, Desk
from lightning_osdp.planning.choices import Choice, Mode, legal_modes
from lightning_osdp.planning.joining import ways
from lightning_osdp.planning.operators import Operator
from lightning_osdp.planning.schedule import BatchRule, Problem, choose, make_plan
from lightning_osdp.planning.simulate import PLAIN
from lightning_osdp.planning.wishes import Wishes


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


System = Callable[[Problem, BatchRule], Result | None]
"""None: nothing fits."""


def fsdp_per_operator(problem: Problem, rule: BatchRule, *, recomputed: bool = False) -> Result | None:
    """Every operator a unit of its own, gathered for forward and for backward (and for the recomputation between)."""
    desk = Desk(replace(problem, wishes=PLAIN))
    choices = tuple(map(_sharded, problem.model.operators))
    names = tuple(block.name for block in problem.model.blocks) if recomputed else ()
    return _best(problem, rule, lambda batch_size: desk.candidate(choices, batch_size, 1, names))


def fsdp_per_block(problem: Problem, rule: BatchRule, *, recomputed: bool = False) -> Result | None:
    """Every block a unit. Where blocks are recomputed, a unit is around that: one gather serves both."""
    units = ways(problem.model, PLAIN)[-1]
    desk = Desk(replace(problem, wishes=PLAIN), units)
    choices = tuple(map(_sharded, problem.model.operators))
    names = tuple(block.name for block in problem.model.blocks) if recomputed else ()
    return _best(problem, rule, lambda batch_size: desk.candidate(choices, batch_size, 1, names))


def osdp(problem: Problem, rule: BatchRule, *, wishes: Wishes) -> Result | None:
    """The plan of this package."""
    try:
        plan = make_plan(replace(problem, wishes=wishes), rule)
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


def _sharded(operator: Operator) -> Choice:
    """As FSDP has it; what may not be sharded throughout takes the nearest."""
    legal = legal_modes(operator)
    return Choice((Mode.ZDP if Mode.ZDP in legal else legal[-1],))


def _best(problem: Problem, rule: BatchRule, candidate: Callable[[int], Candidate]) -> Result | None:
    found: list[Candidate] = []
    for batch_size, _ in rule.pairs(problem.cluster.ranks):
        one = candidate(batch_size)
        if one.peak.total_bytes > problem.memory_limit_bytes:
            break
        found.append(one)
    if not found:
        return None
    best = choose(found)
    return Result(
        batch_size=best.batch_size,
        samples_per_s=best.samples_per_s,
        peak_memory_bytes=best.peak.total_bytes,
        compute_s=best.compute_s,
        communication_s=best.communication_s,
        recomputed=len(best.recomputed) / max(1, len(problem.model.blocks)),
    )

"""The ways to shard that are compared, each at its own best batch size under the same costs.

FSDP per operator is what the authors' scripts run as their baseline (one FairScale unit around each Linear). FSDP per
block is how FSDP is used today: one gather for all that a block holds, fewer latencies and a larger transient. It is
the same planner on a description in which each block is one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.candidates import Candidate, Desk
from lightning_osdp.planning.choices import Choice, Mode, legal_modes
from lightning_osdp.planning.cluster import ComputeTimes, OperatorTime
from lightning_osdp.planning.operators import OUTSIDE, Block, Line, Operator, ParameterInfo
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
    merged = blocks_as_operators(problem)
    desk = Desk(replace(merged, wishes=PLAIN))
    choices = tuple(map(_sharded, merged.model.operators))
    names = tuple(block.name for block in merged.model.blocks) if recomputed else ()

    def candidate(batch_size: int) -> Candidate:
        found = desk.candidate(choices, batch_size, 1, names)
        return replace(found, communication_s=desk.candidate(choices, batch_size).communication_s)

    return _best(problem, rule, candidate)


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


def blocks_as_operators(problem: Problem) -> Problem:
    """The same problem where each block is one operator that holds and takes what its operators do."""
    model, times = problem.model, problem.compute.operators
    block_of = {index: block for block in model.blocks for index in block.operators}
    operators: list[Operator] = []
    merged: list[OperatorTime] = []
    place: dict[int, int] = {OUTSIDE: OUTSIDE}
    for index, operator in enumerate(model.operators):
        block = block_of.get(index)
        if block is None:
            place[index] = len(operators)
            operators.append(operator)
            merged.append(times[index])
        elif index == min(block.operators):
            place |= dict.fromkeys(block.operators, len(operators))
            operators.append(_merged([model.operators[one] for one in block.operators], block))
            merged.append(_together([times[one] for one in block.operators]))
    moments = tuple(one.model_copy(update={"operator": place[one.operator]}) for one in model.moments)
    blocks = tuple(one.model_copy(update={"operators": (place[one.operators[0]],)}) for one in model.blocks)
    changes = {"operators": tuple(operators), "moments": moments, "blocks": blocks}
    compute = problem.compute.model_copy(update={"operators": tuple(merged)})
    return replace(problem, model=model.model_copy(update=changes), compute=ComputeTimes.model_validate(compute))


def _merged(operators: list[Operator], block: Block) -> Operator:
    """With one flat parameter, as FSDP makes it: one collective moves it all."""
    parameters = [p for operator in operators for p in operator.parameters]
    assert len({(p.element_bytes, p.trainable) for p in parameters}) == 1, (
        "minGPT is fp32 throughout, and trained whole"
    )
    flat = ParameterInfo(
        name=f"{block.name}.flat",
        shape=(sum(p.num_elements for p in parameters),),
        optimizer_bytes=sum(p.optimizer_bytes for p in parameters),
    )
    return Operator(
        name=block.name,
        kind=block.kind,
        parameters=(flat,),
        flops_per_sample=sum(operator.flops_per_sample for operator in operators),
    )


def _together(times: list[OperatorTime]) -> OperatorTime:
    def total(lines: Iterator[Line]) -> Line:
        found = list(lines)
        return Line(fixed=sum(line.fixed for line in found), per_sample=sum(line.per_sample for line in found))

    return OperatorTime(forward=total(time.forward for time in times), backward=total(time.backward for time in times))


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

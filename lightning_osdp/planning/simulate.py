"""What planning would give on hardware that is not at hand, for several numbers of devices, beside the baselines.

The baselines keep every operator alike, each at its own best batch size: ``dp`` is plain data parallelism (DDP),
``zdp`` is what FSDP does with one unit for each operator. The paper compares with the same two (section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.candidates import Candidate, Desk
from lightning_osdp.planning.choices import Choice, Group, Mode, legal_modes
from lightning_osdp.planning.cost import sharded_elements
from lightning_osdp.planning.hardware import USABLE_MEMORY, Hardware, cluster_of
from lightning_osdp.planning.operators import Frozen, ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.roofline import compute_times
from lightning_osdp.planning.schedule import BatchRule, Problem, best_candidate, choose
from lightning_osdp.planning.settled import settled
from lightning_osdp.planning.wishes import NO_WISHES, Wishes

PLAIN = Wishes(slice_granularity=1, activation_checkpointing=False)
"""The baselines neither split nor recompute."""


class Simulated(Frozen):
    """What one way of sharding is predicted to reach."""

    batch_size: int
    """Per device and micro-batch."""
    global_batch_size: int
    samples_per_s: float
    """Over all devices."""
    step_time_s: float
    peak_memory_bytes: int
    """Of one device."""
    sharded_share: float
    """Of all parameters, those whose states are sharded."""
    in_node_share: float = 0.0
    """Those that are sharded inside nodes only."""
    split_share: float = 0.0
    """Those of operators that are cut into slices."""
    recomputed_blocks: int = 0


class SimulatedPoint(Frozen):
    """One number of devices; None stands for what does not fit even at the smallest batch size."""

    devices: int
    nodes: int
    memory_limit_bytes: int
    plan: ExecutionPlan | None
    osdp: Simulated | None
    """The plan's numbers."""
    dp: Simulated | None
    zdp: Simulated | None
    needed_bytes: int = 0
    """The smallest peak that any plan reaches, where ``plan`` is None."""


def simulate(
    model: ModelDescription,
    hardware: Hardware,
    devices: Sequence[int],
    memory_limit_bytes: int | None = None,
    rule: BatchRule | None = None,
    dtype: str = "fp32",
    wishes: Wishes = NO_WISHES,
) -> tuple[SimulatedPoint, ...]:
    """The plan and the baselines for each number of devices, in the order given.

    Args:
        model: as traced.
        hardware: the nodes and the network between them.
        devices: numbers of devices that train together.
        memory_limit_bytes: per device; None for ``USABLE_MEMORY`` of what the device has.
        rule: which batch sizes to try; None for all.
        dtype: of the matrix products (``Hardware.peak_flops``).
        wishes: what is not left to the search; the baselines don't know them.

    Raises:
        ConfigurationError: the hardware has no such number of devices, no peak FLOP/s for ``dtype``, or the batch
            sizes of ``rule`` can't be made from a number of devices.
    """
    return tuple(
        simulate_one(problem_on(model, hardware, count, memory_limit_bytes, dtype, wishes), rule or BatchRule())
        for count in devices
    )


def problem_on(
    model: ModelDescription,
    hardware: Hardware,
    devices: int | None = None,
    memory_limit_bytes: int | None = None,
    dtype: str = "fp32",
    wishes: Wishes = NO_WISHES,
) -> Problem:
    """What a search needs, with nothing measured.

    Raises:
        ConfigurationError: as ``simulate``.
    """
    return Problem(
        model=model,
        cluster=cluster_of(hardware, devices),
        compute=compute_times(model, hardware, dtype),
        memory_limit_bytes=memory_limit_bytes or int(hardware.memory_bytes * USABLE_MEMORY),
        wishes=wishes,
    )


def simulate_one(problem: Problem, rule: BatchRule) -> SimulatedPoint:
    """The plan and the baselines for one cluster.

    Raises:
        ConfigurationError: the batch sizes of ``rule`` contradict each other or the number of devices.
    """
    plan, needed_bytes = None, 0
    try:
        plan = settled(problem, rule, ())
    except InfeasibleError as error:
        needed_bytes = error.needed_bytes
    return SimulatedPoint(
        devices=problem.cluster.ranks,
        nodes=problem.cluster.nodes,
        memory_limit_bytes=problem.memory_limit_bytes,
        plan=plan,
        osdp=_of_plan(problem.model, plan) if plan is not None else None,
        dp=_baseline(problem, rule, Mode.DP),
        zdp=_baseline(problem, rule, Mode.ZDP),
        needed_bytes=needed_bytes,
    )


def best_uniform(problem: Problem, rule: BatchRule, mode: Mode) -> Candidate:
    """Every operator in ``mode``, at the batch size that ``schedule.choose`` would take.

    An operator that may not take ``mode`` takes the nearest that it may: one that runs more than once in a step is
    ``zdp2`` for ``zdp``, one that is pinned stays ``dp``.

    Raises:
        InfeasibleError: not even the smallest batch fits.
        ConfigurationError: the batch sizes of ``rule`` contradict each other.
    """
    desk = Desk(replace(problem, wishes=PLAIN))
    choices = tuple(Choice((_nearest(legal_modes(operator), mode),)) for operator in problem.model.operators)
    found: list[Candidate] = []
    for batch_size, accumulation in rule.pairs(problem.cluster.ranks):
        candidate = desk.candidate(choices, batch_size, accumulation)
        if candidate.peak.total_bytes > problem.memory_limit_bytes:
            if not found:
                raise _does_not_fit(problem, candidate, mode)
            break
        found.append(candidate)
    return choose(found)


def tradeoff(problem: Problem, batch_size: int, accumulation: int = 1, points: int = 16) -> tuple[Candidate, ...]:
    """The fastest plan at one batch size under each of a series of memory limits, by rising peak.

    The limits run from the smallest that can be met to what plain data parallelism needs, ``problem``'s own among
    them. A plan that is no faster than one of a smaller peak is left out, so step times fall strictly.
    """
    least = Desk(problem).least(batch_size, accumulation).peak.total_bytes
    whole = tuple(Choice() for _ in problem.model.operators)
    plain = Desk(replace(problem, wishes=PLAIN)).candidate(whole, batch_size, accumulation)
    most = max(least, plain.peak.total_bytes)
    found: list[Candidate] = []
    limits = np.append(np.linspace(least, most, points).astype(np.int64), problem.memory_limit_bytes)
    for limit in np.unique(limits[limits >= least]).tolist():
        candidate = best_candidate(replace(problem, memory_limit_bytes=limit), batch_size, accumulation)
        if not found or candidate.step_time_s < found[-1].step_time_s:
            found.append(candidate)
    return tuple(found)


def _nearest(legal: tuple[Mode, ...], mode: Mode) -> Mode:
    return mode if mode in legal else legal[-1]


def _does_not_fit(problem: Problem, smallest: Candidate, mode: Mode) -> InfeasibleError:
    needed, limit = smallest.peak.total_bytes, problem.memory_limit_bytes
    return InfeasibleError(
        f"with every operator in {mode.value}, batch size {smallest.batch_size} needs {needed / (1 << 20):,.0f} MiB "
        f"per device, the limit is {limit / (1 << 20):,.0f} MiB",
        needed_bytes=needed,
        budget_bytes=limit,
    )


def _baseline(problem: Problem, rule: BatchRule, mode: Mode) -> Simulated | None:
    try:
        candidate = best_uniform(problem, rule, mode)
    except InfeasibleError:
        return None
    return Simulated(
        batch_size=candidate.batch_size,
        global_batch_size=candidate.global_batch_size,
        samples_per_s=candidate.samples_per_s,
        step_time_s=candidate.step_time_s,
        peak_memory_bytes=candidate.peak.total_bytes,
        recomputed_blocks=len(candidate.recomputed),
        **_shares(problem.model, candidate.choices),
    )


def _of_plan(model: ModelDescription, plan: ExecutionPlan) -> Simulated:
    return Simulated(
        batch_size=plan.batch_size,
        global_batch_size=plan.global_batch_size,
        samples_per_s=plan.predicted.samples_per_s,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        recomputed_blocks=len(plan.recomputed),
        **_shares(model, [operator.choice for operator in plan.operators]),
    )


def _shares(model: ModelDescription, choices: Sequence[Choice]) -> dict[str, float]:
    """Of the model's parameters."""
    pairs = list(zip(model.operators, choices, strict=True))
    elements = {
        "sharded_share": sum(sharded_elements(*pair) for pair in pairs),
        "in_node_share": sum(sharded_elements(*pair) for pair in pairs if pair[1].group == Group.NODE),
        "split_share": sum(pair[0].num_parameters for pair in pairs if pair[1].split_dim is not None),
    }
    return {name: count / max(1, model.num_parameters) for name, count in elements.items()}

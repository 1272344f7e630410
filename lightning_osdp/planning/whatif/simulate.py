"""What planning would give on hardware that is not at hand, for several numbers of devices, beside the baselines.

The baselines keep every operator alike, each at its own best batch size: ``dp`` is plain data parallelism (DDP),
``zdp`` is what FSDP does with one unit for each operator. The paper compares with the same two (section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.shards import num_sharded_elements
from lightning_osdp.planning.search.batch_size_search import (
    BatchSizePolicy,
    Problem,
    find_best_candidate,
    pick_batch_size,
)
from lightning_osdp.planning.search.plan_search import Candidate, PlanSearch
from lightning_osdp.planning.search.plan_selection import select_plan
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope, legal_modes
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import FrozenModel, ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.whatif.hardware import USABLE_MEMORY_FRACTION, Hardware, build_cluster
from lightning_osdp.planning.whatif.roofline import compute_times

BASELINE_CONSTRAINTS = SearchConstraints(slice_granularity=1, activation_checkpointing=False)
"""The baselines neither split nor recompute."""


class SimulatedResult(FrozenModel):
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


class SimulatedPoint(FrozenModel):
    """One number of devices; None stands for what does not fit even at the smallest batch size."""

    devices: int
    nodes: int
    memory_limit_bytes: int
    plan: ExecutionPlan | None
    osdp: SimulatedResult | None
    """The plan's numbers."""
    dp: SimulatedResult | None
    zdp: SimulatedResult | None
    needed_bytes: int = 0
    """The smallest peak that any plan reaches, where ``make_plan`` is None."""


def simulate(
    model: ModelProfile,
    hardware: Hardware,
    devices: Sequence[int],
    memory_limit_bytes: int | None = None,
    policy: BatchSizePolicy | None = None,
    dtype: str = "fp32",
    constraints: SearchConstraints = UNCONSTRAINED,
) -> tuple[SimulatedPoint, ...]:
    """The plan and the baselines for each number of devices, in the order given.

    Args:
        model: as traced.
        hardware: the nodes and the network between them.
        devices: numbers of devices that train together.
        memory_limit_bytes: per device; None for ``USABLE_MEMORY_FRACTION`` of what the device has.
        policy: which batch sizes to try; None for all.
        dtype: of the matrix products (``Hardware.peak_flops``).
        constraints: what is not left to the search; the baselines don't know them.

    Raises:
        ConfigurationError: the hardware has no such number of devices, no peak FLOP/s for ``dtype``, or the batch
            sizes of ``policy`` can't be made from a number of devices.
    """
    return tuple(
        simulate_one(
            problem_for_hardware(model, hardware, count, memory_limit_bytes, dtype, constraints),
            policy or BatchSizePolicy(),
        )
        for count in devices
    )


def problem_for_hardware(
    model: ModelProfile,
    hardware: Hardware,
    devices: int | None = None,
    memory_limit_bytes: int | None = None,
    dtype: str = "fp32",
    constraints: SearchConstraints = UNCONSTRAINED,
) -> Problem:
    """What a search needs, with nothing measured.

    Raises:
        ConfigurationError: as ``simulate``.
    """
    return Problem(
        model=model,
        cluster=build_cluster(hardware, devices),
        compute=compute_times(model, hardware, dtype),
        memory_limit_bytes=memory_limit_bytes or int(hardware.memory_bytes * USABLE_MEMORY_FRACTION),
        constraints=constraints,
    )


def simulate_one(problem: Problem, policy: BatchSizePolicy) -> SimulatedPoint:
    """The plan and the baselines for one cluster.

    Raises:
        ConfigurationError: the batch sizes of ``policy`` contradict each other or the number of devices.
    """
    plan, needed_bytes = None, 0
    try:
        plan = select_plan(problem, policy, ())
    except InfeasibleError as error:
        needed_bytes = error.needed_bytes
    return SimulatedPoint(
        devices=problem.cluster.ranks,
        nodes=problem.cluster.nodes,
        memory_limit_bytes=problem.memory_limit_bytes,
        plan=plan,
        osdp=_summarize_plan(problem.model, plan) if plan is not None else None,
        dp=_simulate_baseline(problem, policy, Mode.DP),
        zdp=_simulate_baseline(problem, policy, Mode.ZDP),
        needed_bytes=needed_bytes,
    )


def best_uniform_plan(problem: Problem, policy: BatchSizePolicy, mode: Mode) -> Candidate:
    """Every operator in ``mode``, at the batch size that ``batch_size_search.pick_batch_size`` would take.

    An operator that may not take ``mode`` takes the nearest that it may: one that runs more than once in a step is
    ``zdp2`` for ``zdp``, one that is pinned stays ``dp``.

    Raises:
        InfeasibleError: not even the smallest batch fits.
        ConfigurationError: the batch sizes of ``policy`` contradict each other.
    """
    desk = PlanSearch(replace(problem, constraints=BASELINE_CONSTRAINTS))
    choices = tuple(
        ShardingChoice((_closest_mode(legal_modes(operator), mode),)) for operator in problem.model.operators
    )
    found: list[Candidate] = []
    for batch_size, accumulation in policy.candidates(problem.cluster.ranks):
        candidate = desk.evaluate_choices(choices, batch_size, accumulation)
        if candidate.peak.total_bytes > problem.memory_limit_bytes:
            if not found:
                raise _infeasible_error(problem, candidate, mode)
            break
        found.append(candidate)
    return pick_batch_size(found)


def sweep_memory_limits(
    problem: Problem, batch_size: int, accumulation: int = 1, points: int = 16
) -> tuple[Candidate, ...]:
    """The fastest plan at one batch size under each of a series of memory limits, by rising peak.

    The limits run from the smallest that can be met to what plain data parallelism needs, ``problem``'s own among
    them. A plan that is no faster than one of a smaller peak is left out, so step times fall strictly.
    """
    least = PlanSearch(problem).min_memory_plan(batch_size, accumulation).peak.total_bytes
    whole = tuple(ShardingChoice() for _ in problem.model.operators)
    plain = PlanSearch(replace(problem, constraints=BASELINE_CONSTRAINTS)).evaluate_choices(
        whole, batch_size, accumulation
    )
    most = max(least, plain.peak.total_bytes)
    found: list[Candidate] = []
    limits = np.append(np.linspace(least, most, points).astype(np.int64), problem.memory_limit_bytes)
    for limit in np.unique(limits[limits >= least]).tolist():
        candidate = find_best_candidate(replace(problem, memory_limit_bytes=limit), batch_size, accumulation)
        if not found or candidate.step_time_s < found[-1].step_time_s:
            found.append(candidate)
    return tuple(found)


def _closest_mode(legal: tuple[Mode, ...], mode: Mode) -> Mode:
    return mode if mode in legal else legal[-1]


def _infeasible_error(problem: Problem, smallest: Candidate, mode: Mode) -> InfeasibleError:
    needed, limit = smallest.peak.total_bytes, problem.memory_limit_bytes
    return InfeasibleError(
        f"with every operator in {mode.value}, batch size {smallest.batch_size} needs {needed / (1 << 20):,.0f} MiB "
        f"per device, the limit is {limit / (1 << 20):,.0f} MiB",
        needed_bytes=needed,
        budget_bytes=limit,
    )


def _simulate_baseline(problem: Problem, policy: BatchSizePolicy, mode: Mode) -> SimulatedResult | None:
    try:
        candidate = best_uniform_plan(problem, policy, mode)
    except InfeasibleError:
        return None
    return SimulatedResult(
        batch_size=candidate.batch_size,
        global_batch_size=candidate.global_batch_size,
        samples_per_s=candidate.samples_per_s,
        step_time_s=candidate.step_time_s,
        peak_memory_bytes=candidate.peak.total_bytes,
        recomputed_blocks=len(candidate.recomputed),
        **_parameter_shares(problem.model, candidate.choices),
    )


def _summarize_plan(model: ModelProfile, plan: ExecutionPlan) -> SimulatedResult:
    return SimulatedResult(
        batch_size=plan.batch_size,
        global_batch_size=plan.global_batch_size,
        samples_per_s=plan.predicted.samples_per_s,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        recomputed_blocks=len(plan.recomputed),
        **_parameter_shares(model, [operator.choice for operator in plan.operators]),
    )


def _parameter_shares(model: ModelProfile, choices: Sequence[ShardingChoice]) -> dict[str, float]:
    """Of the model's parameters."""
    pairs = list(zip(model.operators, choices, strict=True))
    elements = {
        "sharded_share": sum(num_sharded_elements(*pair) for pair in pairs),
        "in_node_share": sum(num_sharded_elements(*pair) for pair in pairs if pair[1].scope == ShardingScope.NODE),
        "split_share": sum(pair[0].num_parameters for pair in pairs if pair[1].split_dim is not None),
    }
    return {name: count / max(1, model.num_parameters) for name, count in elements.items()}

"""Plans for hardware that is not at hand, for several numbers of devices, next to two baselines.

The baselines treat all operators alike, each at its own best batch size: ``dp`` is plain data parallelism (DDP), and
``zdp`` is FSDP with one unit per operator. The paper compares with the same two (section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.shards import num_sharded_elements
from lightning_osdp.planning.search.baselines import best_uniform_plan, find_baselines
from lightning_osdp.planning.search.batch_size_search import find_best_candidate
from lightning_osdp.planning.search.plan_search import Candidate, PlanSearch
from lightning_osdp.planning.search.plan_selection import select_plan
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.search_record import Baseline
from lightning_osdp.planning.whatif.hardware import Hardware, build_cluster
from lightning_osdp.planning.whatif.roofline import compute_times

BASELINE_CONSTRAINTS = SearchConstraints(slice_granularity=1, activation_checkpointing=False)
"""The baselines neither slice operators nor recompute blocks."""


class SimulatedResult(FrozenModel):
    """The prediction for one way of sharding."""

    batch_size: int
    """Samples per device and micro-batch."""
    global_batch_size: int
    samples_per_s: float
    """Throughput of all devices."""
    step_time_s: float
    peak_memory_bytes: int
    """Peak of one device."""
    sharded_share: float
    """Fraction of the parameters whose states are sharded."""
    in_node_share: float = 0.0
    """Fraction of the parameters that are sharded inside nodes only."""
    split_share: float = 0.0
    """Fraction of the parameters whose operators are sliced."""
    recomputed_blocks: int = 0


class SimulatedPoint(FrozenModel):
    """The predictions for one number of devices; None where not even the smallest batch size fits."""

    devices: int
    nodes: int
    memory_limit_bytes: int
    plan: ExecutionPlan | None
    osdp: SimulatedResult | None
    """Prediction of the plan."""
    dp: SimulatedResult | None
    zdp: SimulatedResult | None
    needed_bytes: int = 0
    """The smallest peak of any plan, where ``plan`` is None."""
    baselines: tuple[Baseline, ...] = ()
    """What else there was, where there is a plan."""


def problem_for_hardware(
    model: ModelProfile,
    hardware: Hardware,
    devices: int | None = None,
    memory_limit_bytes: int | None = None,
    dtype: str = "fp32",
    constraints: SearchConstraints = UNCONSTRAINED,
) -> Problem:
    """Return the problem of a model on described hardware.

    Args:
        model: as profiled.
        hardware: the nodes and the network between them.
        devices: the number of devices that train together; None for all.
        memory_limit_bytes: per device; None for ``Hardware.usable_bytes``.
        dtype: type of the matrix products (``Hardware.peak_flops``).
        constraints: constraints of the plan's search; the baselines ignore them.

    Raises:
        ConfigurationError: the hardware has no such number of devices or no peak FLOP/s for ``dtype``.
    """
    return Problem(
        model=model,
        cluster=build_cluster(hardware, devices),
        compute=compute_times(model, hardware, dtype),
        memory_limit_bytes=memory_limit_bytes or hardware.usable_bytes(),
        constraints=constraints,
    )


def simulate_one(problem: Problem, policy: BatchSizePolicy) -> SimulatedPoint:
    """Return the plan and the baselines for one cluster.

    Raises:
        ConfigurationError: the batch sizes of ``policy`` can't be made from the number of devices.
    """
    plan, needed_bytes = None, 0
    try:
        plan = select_plan(problem, policy, ())
        plan = plan.model_copy(update={"baselines": find_baselines(plan, problem, policy)})
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
        baselines=plan.baselines if plan is not None else (),
    )


def sweep_memory_limits(
    problem: Problem, batch_size: int, accumulation: int = 1, points: int = 16
) -> tuple[Candidate, ...]:
    """Return the fastest plan at one batch size under each of a series of memory limits, by rising peak.

    The limits run from the smallest possible one to the peak of plain data parallelism, and include ``problem``'s own.
    A plan that is no faster than one of a smaller peak is left out, so step times fall strictly.
    """
    least = PlanSearch(problem).min_memory_plan(batch_size, accumulation).peak.total_bytes
    replicated = (ShardingChoice(),) * len(problem.model.operators)
    baseline = PlanSearch(replace(problem, constraints=BASELINE_CONSTRAINTS))
    most = max(least, baseline.evaluate_choices(replicated, batch_size, accumulation).peak.total_bytes)
    limits = np.append(np.linspace(least, most, points).astype(np.int64), problem.memory_limit_bytes)
    candidates: list[Candidate] = []
    for limit in np.unique(limits[limits >= least]).tolist():
        candidate = find_best_candidate(replace(problem, memory_limit_bytes=limit), batch_size, accumulation)
        if not candidates or candidate.step_time_s < candidates[-1].step_time_s:
            candidates.append(candidate)
    return tuple(candidates)


def _simulate_baseline(problem: Problem, policy: BatchSizePolicy, mode: Mode) -> SimulatedResult | None:
    search = PlanSearch(replace(problem, constraints=BASELINE_CONSTRAINTS))
    candidate, fits = best_uniform_plan(search, mode, np.zeros(len(problem.model.blocks), dtype=bool), policy)
    if not fits:
        return None
    return SimulatedResult(
        batch_size=candidate.batch_size,
        global_batch_size=candidate.global_batch_size,
        samples_per_s=candidate.samples_per_s,
        step_time_s=candidate.step_time_s,
        peak_memory_bytes=candidate.peak.total_bytes,
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
    """Return the fractions of the model's parameters that are sharded, sharded in nodes, and sliced."""
    pairs = list(zip(model.operators, choices, strict=True))
    elements = {
        "sharded_share": sum(num_sharded_elements(*pair) for pair in pairs),
        "in_node_share": sum(num_sharded_elements(*pair) for pair in pairs if pair[1].scope == ShardingScope.NODE),
        "split_share": sum(operator.num_parameters for operator, choice in pairs if choice.split_dim is not None),
    }
    return {name: count / max(1, model.num_parameters) for name, count in elements.items()}

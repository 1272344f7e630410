"""Measure the engine's own time for each mode, beyond compute and collectives: its Python code, copies, page faults.

A few operators are trained through the engine, and as plain modules that communicate nothing. The difference is all
that a mode costs; what the planner predicts for the mode's collectives is subtracted, and the rest is the engine's own.
So the planner's sum is right at the measured sizes, or too high where fitted collectives alone are: no engine takes
less than nothing. Replicated gradients share one all-reduce: only what more operators add to it counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.backend import agree
from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.backend.timer import CORE_SHARING, synchronize, typical_time_s
from lightning_osdp.engine.base import create_engine
from lightning_osdp.planning.cost.activation_exchange import exchange_s, handled_bytes
from lightning_osdp.planning.cost.step_time import communication_time
from lightning_osdp.planning.cost.trial_correction import fit_nonnegative_line
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, tensor_degrees
from lightning_osdp.planning.spec.cluster import (
    NO_ENGINE_OVERHEAD,
    CalibrationFactors,
    Cluster,
    CollectiveFit,
    EngineOverhead,
    Link,
    ModeOverhead,
)
from lightning_osdp.planning.spec.model import Operator, ParameterInfo
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorSplit, TensorUse

WIDTHS = {Mode.DP: (128, 448), Mode.ZDP2: (128, 768), Mode.ZDP: (128, 768)}
"""Widths of the square weights: 64 KiB, and 784 KiB (small enough for a bucket when replicated) or 2.25 MiB."""

TENSOR_WIDTH, TENSOR_ROWS = 256, (32, 768)
"""Width of the weights that are tensor parallel, or the next that the degree divides, and rows of each rank: their
activations have 32 KiB, and 768 KiB."""

MAX_LIVE_COPIES, MEMORY_FRACTION = 5, 0.8
"""How often all weights are in memory at most (gradients, plain modules and shards included), and the fraction of the
available memory that they may take. The larger weights are made smaller where they do not fit."""

MIN_WIDTH_STEP = 64
"""Minimum difference of the two widths: a line takes two points."""

NUM_OPERATORS, NUM_REPLICATED, FEW_REPLICATED = 6, 24, 6
"""Operators that run one after the other: the time of a single one would be lost in noise. What replicated ones take is
the difference of two steps to two others: these have many operators, and few of them; fewer where there is little
memory. [M-engine-34]"""

SHARED_CORES_DIVISOR = 2
"""Divisor of these numbers where ranks share cores: everything takes longer there, and trials tell more."""

FLOPS_PER_OPERATOR = {"cpu": 1 << 25, "cuda": 0}
"""Floating point operations of each operator's forward. On a CPU, collectives between stretches of compute take longer
than in a row; on CUDA they must not be hidden by compute."""

FLOPS_PER_REPLICATED = {"cpu": 1 << 22, "cuda": 0}
"""The same of replicated operators, which wait for no collective."""

MIN_REPEATS, MAX_REPEATS, TIMING_BUDGET_S = 3, 5, 0.45
"""Number of timed steps for each mode and size, after one warm-up step, and how long they may take in all."""

ASSUMED_CALIBRATION, SHARED_CORES_CALIBRATION = {"cpu": 0.15}, 0.3
"""Fraction by which collectives and the engine are assumed to take longer within a step than in parts, until a trial
measures it, and the same where ranks share cores. On a CPU ranks wait for each other (emulated ones do not), and gloo's
threads compute beside them; there may be no memory or time for a trial. [M-engine-2] [M-engine-35]"""


class EngineStep(NamedTuple):
    """One training step of some operators."""

    run: Callable[[], None]
    close: Callable[[], None]
    """Frees the operators' memory."""


def measure_engine_overhead(
    group: dist.ProcessGroup,
    device: torch.device,
    cluster: Cluster,
    available_bytes: int | None = None,
    capabilities: EngineCapabilities = ALL_CAPABILITIES,
) -> EngineOverhead:
    """Return the engine's own time per operator and micro-batch for each mode. Collective.

    Args:
        group: the ranks.
        device: where this rank computes.
        cluster: with the links as measured.
        available_bytes: memory that may be taken on this rank; the minimum over ranks counts. None: no limit.
        capabilities: name the engine and its modes.

    Returns:
        The same numbers on every rank; zeros on a single rank, where nothing is sharded.
    """
    if group.size() == 1:
        return NO_ENGINE_OVERHEAD
    fits = dict.fromkeys(Mode, ModeOverhead())
    usable_bytes = MEMORY_FRACTION * agree.all_reduce_min(available_bytes, group, device)
    for mode, (narrow, wide) in WIDTHS.items():
        if mode not in capabilities.modes:
            continue
        counts = _counts(mode, usable_bytes)
        widths = (narrow, max(narrow + MIN_WIDTH_STEP, min(wide, _max_width(sum(counts), usable_bytes))))
        own_s = [
            _measure_per_operator_s(mode, width, counts, group, device, capabilities.engine)
            - _predicted_communication_s(mode, width, cluster)
            for width in widths
        ]
        line = fit_nonnegative_line(list(zip((4 * width * width for width in widths), own_s, strict=True)))
        fits[mode] = ModeOverhead(fixed_s=line.fixed, s_per_byte=line.per_sample)
    if Mode.TP in capabilities.modes:
        fits[Mode.TP] = _measure_tensor_parallel(group, device, cluster, capabilities.engine)
    factor = 0.0 if is_emulated(group) else ASSUMED_CALIBRATION.get(device.type, 0.0)
    factor = SHARED_CORES_CALIBRATION if CORE_SHARING.is_shared else factor
    calibration = CalibrationFactors(**{mode.value: factor for mode in Mode})
    return EngineOverhead(**{mode.value: fit for mode, fit in fits.items()}, calibration=calibration)


def _measure_tensor_parallel(
    group: dist.ProcessGroup, device: torch.device, cluster: Cluster, engine: str
) -> ModeOverhead:
    """Return the engine's own time of a run of tensor parallel operators, and per byte of its collectives."""
    degree, points = max(tensor_degrees(cluster), default=1), []
    if degree == 1:
        return ModeOverhead()
    width = math.ceil(TENSOR_WIDTH / degree) * degree
    for rows in TENSOR_ROWS:
        use = _tensor_use(rows, width, degree)
        operator = _operator_of(width, use)
        step, counts = _TensorStep(rows, degree), _counts(Mode.TP, math.inf)
        own_s = _measure_per_operator_s(Mode.TP, width, counts, group, device, engine, step)
        own_s -= sum(communication_time(operator, ShardingChoice((Mode.TP,), tensor_degree=degree), cluster))
        own_s -= exchange_s(operator, degree, cluster, recomputed=False).value_at(1)
        points.append((round(handled_bytes(use, degree)), own_s))
    line = fit_nonnegative_line(points)
    return ModeOverhead(fixed_s=line.fixed, s_per_byte=line.per_sample)


class _TensorStep(NamedTuple):
    """What tells a tensor parallel step from others."""

    num_rows: int
    degree: int


def _tensor_use(rows: int, width: int, degree: int) -> TensorUse:
    num_bytes = 4 * rows * width
    return TensorUse(role=TensorRole.LINEAR, degrees=(degree,), input_bytes=num_bytes, output_bytes=num_bytes)


def _operator_of(width: int, use: TensorUse | None = None) -> Operator:
    weight = ParameterInfo(name="weight", shape=(width, width))
    return Operator(name="operator", kind="Linear", parameters=(weight,), tensor=use)


def warm_up(
    group: dist.ProcessGroup, device: torch.device, capabilities: EngineCapabilities = ALL_CAPABILITIES
) -> None:
    """Run one step in each mode, so that code is loaded and buffers are allocated. Collective.

    Where measurements come from a cache this has not happened yet, and the process's own memory would be read too low.
    """
    if group.size() > 1:
        for mode in [mode for mode in WIDTHS if mode in capabilities.modes]:
            step = _make_engine_step(mode, 2, WIDTHS[mode][0], group, device, capabilities.engine)
            step.run()
            step.close()


def _max_width(count: int, usable_bytes: float) -> int:
    """Return the largest width of so many operators for which there is memory."""
    weight_bytes = usable_bytes / (MAX_LIVE_COPIES * count)
    return int(min(weight_bytes / 4, 1 << 40) ** 0.5)


def _counts(mode: Mode, usable_bytes: float) -> tuple[int, int]:
    """Return how many operators are timed, and how many others are subtracted from them."""
    many, few = NUM_OPERATORS, 0
    if mode == Mode.DP:
        many, few = NUM_REPLICATED, FEW_REPLICATED
        if _max_width(many + few, usable_bytes) < WIDTHS[mode][0] + MIN_WIDTH_STEP:
            many, few = NUM_OPERATORS, NUM_OPERATORS // 2
    divisor = SHARED_CORES_DIVISOR if CORE_SHARING.is_shared else 1
    return many // divisor, few // divisor


def _predicted_communication_s(mode: Mode, width: int, cluster: Cluster) -> float:
    """Return what the planner predicts for the collectives of such an operator."""
    return sum(communication_time(_operator_of(width), ShardingChoice((mode,)), cluster))


def _measure_per_operator_s(
    mode: Mode,
    width: int,
    counts: tuple[int, int],
    group: dist.ProcessGroup,
    device: torch.device,
    engine: str,
    tensor: _TensorStep | None = None,
) -> float:
    """Return what the mode adds to an operator's compute on the slowest rank."""
    # What operators share, the bucket of replicated gradients, cancels out in the difference to fewer of them.
    count, fewer = counts
    steps: list[EngineStep] = []
    for number in (count, fewer) if fewer else (count,):
        steps.append(_make_engine_step(mode, number, width, group, device, engine, tensor))
        steps.append(_make_plain_step(mode, number, width, device, tensor))
    first_s = sum(agree.all_reduce_max([_time_once_s(step, group, device) for step in steps], group, device))
    num_repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(TIMING_BUDGET_S / first_s)))
    times_s = [[_time_once_s(step, group, device) for step in steps] for _ in range(num_repeats)]
    typical_s = [typical_time_s(step_times_s) for step_times_s in zip(*times_s, strict=True)]
    engine_s, plain_s, *fewer_s = agree.all_reduce_max(typical_s, group, device)
    for step in steps:
        step.close()
    shared_s = fewer_s[0] - fewer_s[1] if fewer else 0.0
    return (engine_s - plain_s - shared_s) / (count - fewer)


def _time_once_s(step: EngineStep, group: dist.ProcessGroup, device: torch.device) -> float:
    synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    step.run()
    synchronize(device)
    return time.perf_counter() - start


def _make_operators(
    mode: Mode, count: int, width: int, device: torch.device, tensor: _TensorStep | None
) -> tuple[nn.Sequential, Tensor]:
    """Return square operators and an input: of the rows that are given, or with which they take a number of FLOPs."""
    flops = (FLOPS_PER_REPLICATED if mode == Mode.DP else FLOPS_PER_OPERATOR).get(device.type, 0)
    rows = tensor.num_rows if tensor is not None else max(1, flops // (2 * width * width))
    operators = (nn.Linear(width, width, bias=False, device=device) for _ in range(count))
    return nn.Sequential(*operators), torch.ones(rows, width, device=device)


def _make_engine_step(
    mode: Mode,
    count: int,
    width: int,
    group: dist.ProcessGroup,
    device: torch.device,
    engine_name: str,
    tensor: _TensorStep | None = None,
) -> EngineStep:
    model, sample = _make_operators(mode, count, width, device, tensor)
    engine = create_engine(engine_name, device, group)
    split = None if tensor is None else TensorSplit(degree=tensor.degree, role=TensorRole.LINEAR)
    operators = [
        OperatorPlan(name=str(index), slices=(mode,), num_parameters=0, tensor=split) for index in range(len(model))
    ]
    engine.apply(model, ExecutionPlan.minimal(operators, _minimal_cluster(group.size())))

    def run() -> None:
        engine.before_forward()
        model(sample).sum().backward()
        engine.finish_backward()
        engine.after_optimizer_step()
        model.zero_grad(set_to_none=True)

    return EngineStep(run, engine.close)


def _make_plain_step(
    mode: Mode, count: int, width: int, device: torch.device, tensor: _TensorStep | None
) -> EngineStep:
    model, sample = _make_operators(mode, count, width, device, tensor)

    def run() -> None:
        model(sample).sum().backward()
        model.zero_grad(set_to_none=True)

    return EngineStep(run, lambda: None)


def _minimal_cluster(world_size: int) -> Cluster:
    """Return a cluster of which only the number of ranks is known."""
    nothing = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    link = Link(all_reduce=nothing, all_gather=nothing, reduce_scatter=nothing)
    return Cluster(devices_per_node=world_size, device="", backend="", link=link)

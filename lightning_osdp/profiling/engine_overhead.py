"""Measures what carrying out a mode takes beside compute and collectives: the engine's own Python, copies, page faults.

A few operators are trained through the engine, and as plain modules that communicate nothing. The difference is what
a mode costs in all; less what the planner counts for its collectives, it is the engine's own. So the planner's sum is
right at the measured sizes, whatever the errors of the collectives' fits (and the engine's own may be negative, where
they are too high). Replicated gradients share one all-reduce: what counts of it is what more operators add.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.backend import agree
from lightning_osdp.backend.timer import CORE_SHARING, synchronize, typical_time_s
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.sliced_operator import release_storage
from lightning_osdp.planning.cost.step_time import communication_time
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
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

WIDTHS = {Mode.DP: (128, 448), Mode.ZDP2: (128, 768), Mode.ZDP: (128, 768)}
"""Of the square weights: 64 KiB, and 784 KiB, small enough to ride in buckets when replicated, or 2.25 MiB."""

MAX_LIVE_COPIES, MEMORY_FRACTION = 5, 0.8
"""Of all weights that are there at once at most, with gradients, those of the plain modules and what is sharded of them
included; and how much of the room they may take. Where it is less, the larger weights are smaller."""

MIN_WIDTH_STEP = 64
"""By which the larger weights are wider at least: a line takes two points."""

NUM_OPERATORS, NUM_OPERATORS_SHARED_CORES = 6, 3
"""How many are run one after the other: a single one would be lost in the clock's noise. Fewer where ranks share cores,
where all takes longer, and rehearsals of whole steps tell more (``trial_with_overheads``)."""

FLOPS_PER_OPERATOR = {"cpu": 1 << 25, "cuda": 0}
"""Of each operator's forward. On a CPU, collectives between stretches of compute take longer than in a row; on CUDA
they must not hide behind it."""

MIN_REPEATS, MAX_REPEATS, TIMING_BUDGET_S = 3, 5, 0.45
"""Timed steps in each mode at each size, after one to warm up, and how long they are to take."""

SHARED_CORES_CALIBRATION = 0.3
"""By what share collectives and the engine take more in a step than in parts where ranks share cores, until a rehearsal
shows it: a start of many ranks on few cores may have no time for any. [measured, 4 ranks on 2 cores, rehearsals of the
paper's models add 0.25 to 0.43; LLaMA-like at 2 Gbit/s, without one: 1.1 to 1.4 s foreseen, 1.5 to 2.0 s waited]"""


class EngineStep(NamedTuple):
    """One training step of some operators."""

    run: Callable[[], None]
    model: nn.Module


def measure_engine_overhead(
    group: dist.ProcessGroup, device: torch.device, cluster: Cluster, available_bytes: int | None = None
) -> EngineOverhead:
    """What each mode takes for an operator in one micro-batch. Collective: all ranks call it alike.

    Args:
        group: the ranks.
        device: of this rank.
        cluster: with the links as measured.
        available_bytes: that it may take on this rank; the smallest of any rank counts. None: as much as it likes.

    Returns:
        The same numbers on every rank; zeros on a single rank, where nothing is sharded.
    """
    if group.size() == 1:
        return NO_ENGINE_OVERHEAD
    fits, widest = {}, _max_width(group, device, available_bytes)
    for mode, (narrow, wide) in WIDTHS.items():
        widths = (narrow, max(narrow + MIN_WIDTH_STEP, min(wide, widest)))
        own_s = [
            _measure_per_operator_s(mode, width, group, device) - _predicted_communication_s(mode, width, cluster)
            for width in widths
        ]
        fits[mode] = _fit_line([4 * width * width for width in widths], own_s)
    # Counted for each norm and bias, so an error would add up; and a gradient's hook can't take less than nothing.
    # Where ranks share cores, collectives wait for those whose turn it is not, the longer the more there is to compute:
    # that they wait less for the little that is computed here does not make them shorter in a step.
    for mode in Mode if CORE_SHARING.is_shared else (Mode.DP,):
        fits[mode] = fits[mode].model_copy(update={"fixed_s": max(0.0, fits[mode].fixed_s)})
    more = SHARED_CORES_CALIBRATION if CORE_SHARING.is_shared else 0.0
    excess = CalibrationFactors(dp=more, zdp2=more, zdp=more)
    return EngineOverhead(dp=fits[Mode.DP], zdp2=fits[Mode.ZDP2], zdp=fits[Mode.ZDP], calibration=excess)


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """One step in each mode, forgotten: code and buffers are loaded at their first use.

    Where measurements come from a cache this has not happened yet, and the process's own memory would be read too low.
    Collective: all ranks call it alike.
    """
    if group.size() > 1:
        for mode in Mode:
            step = _make_engine_step(mode, 2, WIDTHS[mode][0], group, device)
            step.run()
            release_storage(step.model.parameters())


def _max_width(group: dist.ProcessGroup, device: torch.device, available_bytes: int | None) -> int:
    """The width for which there is room. Collective."""
    weight_bytes = (
        MEMORY_FRACTION * agree.all_reduce_min(available_bytes, group, device) / (MAX_LIVE_COPIES * NUM_OPERATORS)
    )
    return int(min(weight_bytes / 4, 1 << 40) ** 0.5)


def _fit_line(sizes: list[int], times_s: list[float]) -> ModeOverhead:
    """Through two points; level where the larger one takes less."""
    slope = max(0.0, (times_s[1] - times_s[0]) / (sizes[1] - sizes[0]))
    rests = [seconds - slope * size for seconds, size in zip(times_s, sizes, strict=True)]
    return ModeOverhead(fixed_s=sum(rests) / len(rests), s_per_byte=slope)


def _predicted_communication_s(mode: Mode, width: int, cluster: Cluster) -> float:
    """What the planner adds for the collectives of such an operator."""
    weight = ParameterInfo(name="weight", shape=(width, width))
    operator = Operator(name="operator", kind="Linear", parameters=(weight,))
    return sum(communication_time(operator, ShardingChoice((mode,)), cluster))


def _measure_per_operator_s(mode: Mode, width: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """What the mode adds to an operator's compute on the slowest rank."""
    count = NUM_OPERATORS_SHARED_CORES if CORE_SHARING.is_shared else NUM_OPERATORS
    steps: tuple[EngineStep, ...] = _make_steps(mode, count, width, group, device)
    fewer = count // 2 if mode == Mode.DP else 0
    steps += _make_steps(mode, fewer, width, group, device) if fewer else ()
    first_s = sum(agree.all_reduce_max([_time_once_s(step, group, device) for step in steps], group, device))
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(TIMING_BUDGET_S / first_s)))
    seconds = [[_time_once_s(step, group, device) for step in steps] for _ in range(repeats)]
    slowest = agree.all_reduce_max([typical_time_s(each) for each in zip(*seconds, strict=True)], group, device)
    for step in steps:
        release_storage(step.model.parameters())
    engine_s, plain_s, *less = slowest
    without_s = less[0] - less[1] if less else 0.0
    return (engine_s - plain_s - without_s) / (count - fewer)


def _time_once_s(step: EngineStep, group: dist.ProcessGroup, device: torch.device) -> float:
    synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    step.run()
    synchronize(device)
    return time.perf_counter() - start


def _make_steps(
    mode: Mode, count: int, width: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[EngineStep, EngineStep]:
    """The same compute with and without sharing."""
    return _make_engine_step(mode, count, width, group, device), _make_unsharded_step(count, width, device)


def _make_operators(count: int, width: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(count)))


def _make_sample(width: int, device: torch.device) -> Tensor:
    rows = FLOPS_PER_OPERATOR.get(device.type, 0) // (2 * width * width)
    return torch.ones(max(1, rows), width, device=device)


def _train(model: nn.Module, sample: Tensor) -> None:
    model(sample).sum().backward()


def _make_engine_step(mode: Mode, count: int, width: int, group: dist.ProcessGroup, device: torch.device) -> EngineStep:
    model, sample = _make_operators(count, width, device), _make_sample(width, device)
    engine = FairScaleEngine(device, group)
    operators = [OperatorPlan(name=str(index), slices=(mode,), num_parameters=0) for index in range(len(model))]
    engine.apply(model, ExecutionPlan.minimal(operators, _minimal_cluster(group.size())))

    def step() -> None:
        engine.before_forward()
        _train(model, sample)
        engine.finish_backward()
        engine.after_optimizer_step()
        model.zero_grad(set_to_none=True)

    return EngineStep(step, model)


def _make_unsharded_step(count: int, width: int, device: torch.device) -> EngineStep:
    model, sample = _make_operators(count, width, device), _make_sample(width, device)

    def step() -> None:
        _train(model, sample)
        model.zero_grad(set_to_none=True)

    return EngineStep(step, model)


def _minimal_cluster(world_size: int) -> Cluster:
    """Ranks of which nothing else need be known."""
    nothing = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    link = Link(all_reduce=nothing, all_gather=nothing, reduce_scatter=nothing)
    return Cluster(devices_per_node=world_size, device="", backend="", link=link)

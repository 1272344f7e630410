"""Measures what carrying out a mode takes beside compute and collectives: the engine's own Python, copies, page faults.

A few operators are trained through the engine, and as plain modules that communicate nothing. The difference is what
a mode costs in all; less what the planner counts for its collectives, it is the engine's own. So the planner's sum is
right at the measured sizes, whatever the errors of the collectives' fits (and the engine's own may be negative, where
they are too high). Replicated gradients share one all-reduce: what counts of it is what more operators add.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp import collectives
from lightning_osdp.instants import synchronize
from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.cluster import (
    NO_OVERHEAD,
    Cluster,
    CollectiveFit,
    EngineOverhead,
    Excess,
    Link,
    ModeOverhead,
)
from lightning_osdp.planning.cost import communication
from lightning_osdp.planning.operators import Operator, ParameterInfo
from lightning_osdp.planning.plan import ExecutionPlan, ModelIdentity, OperatorPlan, Prediction
from lightning_osdp.repeats import CORES, typical_s
from lightning_osdp.sharding.fairscale import FairScaleEngine
from lightning_osdp.sharding.splitting import forget

WIDTHS = {Mode.DP: (128, 448), Mode.ZDP2: (128, 768), Mode.ZDP: (128, 768)}
"""Of the square weights: 64 KiB, and 784 KiB, small enough to ride in buckets when replicated, or 2.25 MiB."""

COPIES, ROOM_SHARE = 5, 0.8
"""Of all weights that are there at once at most, with gradients, those of the plain modules and what is sharded of them
included; and how much of the room they may take. Where it is less, the larger weights are smaller."""

NARROW_STEP = 64
"""By which the larger weights are wider at least: a line takes two points."""

OPERATORS, SHARED_OPERATORS = 6, 3
"""How many are run one after the other: a single one would be lost in the clock's noise. Fewer where ranks share cores,
where all takes longer, and rehearsals of whole steps tell more (``rehearsal``)."""

FLOPS = {"cpu": 1 << 25, "cuda": 0}
"""Of each operator's forward. On a CPU, collectives between stretches of compute take longer than in a row; on CUDA
they must not hide behind it."""

FEWEST_REPEATS, MOST_REPEATS, BUDGET_S = 3, 5, 0.45
"""Timed steps in each mode at each size, after one to warm up, and how long they are to take."""

SHARED_EXCESS = 0.3
"""By what share collectives and the engine take more in a step than in parts where ranks share cores, until a rehearsal
shows it: a start of many ranks on few cores may have no time for any. [measured, 4 ranks on 2 cores, rehearsals of the
paper's models add 0.25 to 0.43; LLaMA-like at 2 Gbit/s, without one: 1.1 to 1.4 s foreseen, 1.5 to 2.0 s waited]"""


class Step(NamedTuple):
    """One training step of some operators."""

    run: Callable[[], None]
    model: nn.Module


def measure(
    group: dist.ProcessGroup, device: torch.device, cluster: Cluster, room_bytes: int | None = None
) -> EngineOverhead:
    """What each mode takes for an operator in one micro-batch. Collective: all ranks call it alike.

    Args:
        group: the ranks.
        device: of this rank.
        cluster: with the links as measured.
        room_bytes: that it may take on this rank; the smallest of any rank counts. None: as much as it likes.

    Returns:
        The same numbers on every rank; zeros on a single rank, where nothing is sharded.
    """
    if group.size() == 1:
        return NO_OVERHEAD
    fits, widest = {}, _widest(group, device, room_bytes)
    for mode, (narrow, wide) in WIDTHS.items():
        widths = (narrow, max(narrow + NARROW_STEP, min(wide, widest)))
        own_s = [_per_operator_s(mode, width, group, device) - _counted_s(mode, width, cluster) for width in widths]
        fits[mode] = _line([4 * width * width for width in widths], own_s)
    # Counted for each norm and bias, so an error would add up; and a gradient's hook can't take less than nothing.
    # Where ranks share cores, collectives wait for those whose turn it is not, the longer the more there is to compute:
    # that they wait less for the little that is computed here does not make them shorter in a step.
    for mode in Mode if CORES.shared else (Mode.DP,):
        fits[mode] = fits[mode].model_copy(update={"fixed_s": max(0.0, fits[mode].fixed_s)})
    more = SHARED_EXCESS if CORES.shared else 0.0
    excess = Excess(dp=more, zdp2=more, zdp=more)
    return EngineOverhead(dp=fits[Mode.DP], zdp2=fits[Mode.ZDP2], zdp=fits[Mode.ZDP], excess=excess)


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """One step in each mode, forgotten: code and buffers are loaded at their first use.

    Where measurements come from a cache this has not happened yet, and the process's own memory would be read too low.
    Collective: all ranks call it alike.
    """
    if group.size() > 1:
        for mode in Mode:
            step = _with_engine(mode, 2, WIDTHS[mode][0], group, device)
            step.run()
            forget(step.model.parameters())


def _widest(group: dist.ProcessGroup, device: torch.device, room_bytes: int | None) -> int:
    """The width for which there is room. Collective."""
    weight_bytes = ROOM_SHARE * collectives.least_room(room_bytes, group, device) / (COPIES * OPERATORS)
    return int(min(weight_bytes / 4, 1 << 40) ** 0.5)


def _line(sizes: list[int], times_s: list[float]) -> ModeOverhead:
    """Through two points; level where the larger one takes less."""
    slope = max(0.0, (times_s[1] - times_s[0]) / (sizes[1] - sizes[0]))
    rests = [seconds - slope * size for seconds, size in zip(times_s, sizes, strict=True)]
    return ModeOverhead(fixed_s=sum(rests) / len(rests), s_per_byte=slope)


def _counted_s(mode: Mode, width: int, cluster: Cluster) -> float:
    """What the planner adds for the collectives of such an operator."""
    weight = ParameterInfo(name="weight", shape=(width, width))
    operator = Operator(name="operator", kind="Linear", parameters=(weight,))
    return sum(communication(operator, Choice((mode,)), cluster))


def _per_operator_s(mode: Mode, width: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """What the mode adds to an operator's compute on the slowest rank."""
    count = SHARED_OPERATORS if CORES.shared else OPERATORS
    steps: tuple[Step, ...] = _steps(mode, count, width, group, device)
    fewer = count // 2 if mode == Mode.DP else 0
    steps += _steps(mode, fewer, width, group, device) if fewer else ()
    first_s = sum(collectives.largest_of_ranks([_once_s(step, group, device) for step in steps], group, device))
    repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, int(BUDGET_S / first_s)))
    seconds = [[_once_s(step, group, device) for step in steps] for _ in range(repeats)]
    slowest = collectives.largest_of_ranks([typical_s(each) for each in zip(*seconds, strict=True)], group, device)
    for step in steps:
        forget(step.model.parameters())
    engine_s, plain_s, *less = slowest
    without_s = less[0] - less[1] if less else 0.0
    return (engine_s - plain_s - without_s) / (count - fewer)


def _once_s(step: Step, group: dist.ProcessGroup, device: torch.device) -> float:
    synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    step.run()
    synchronize(device)
    return time.perf_counter() - start


def _steps(mode: Mode, count: int, width: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Step, Step]:
    """The same compute with and without sharing."""
    return _with_engine(mode, count, width, group, device), _plain(count, width, device)


def _operators(count: int, width: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(count)))


def _sample(width: int, device: torch.device) -> Tensor:
    rows = FLOPS.get(device.type, 0) // (2 * width * width)
    return torch.ones(max(1, rows), width, device=device)


def _train(model: nn.Module, sample: Tensor) -> None:
    model(sample).sum().backward()


def _with_engine(mode: Mode, count: int, width: int, group: dist.ProcessGroup, device: torch.device) -> Step:
    model, sample = _operators(count, width, device), _sample(width, device)
    engine = FairScaleEngine(device, group)
    operators = [OperatorPlan(name=str(index), slices=(mode,), num_parameters=0) for index in range(len(model))]
    engine.apply(model, bare_plan(operators, _one_level(group.size())))

    def step() -> None:
        engine.before_forward()
        _train(model, sample)
        engine.finish_backward()
        engine.after_optimizer_step()
        model.zero_grad(set_to_none=True)

    return Step(step, model)


def _plain(count: int, width: int, device: torch.device) -> Step:
    model, sample = _operators(count, width, device), _sample(width, device)

    def step() -> None:
        _train(model, sample)
        model.zero_grad(set_to_none=True)

    return Step(step, model)


def _one_level(ranks: int) -> Cluster:
    """Ranks of which nothing else need be known."""
    nothing = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    link = Link(all_reduce=nothing, all_gather=nothing, reduce_scatter=nothing)
    return Cluster(devices_per_node=ranks, device="", backend="", link=link)


def bare_plan(operators: Iterable[OperatorPlan], cluster: Cluster) -> ExecutionPlan:
    """A plan that says what is done with operators on these ranks, and nothing else."""
    return ExecutionPlan(
        model=ModelIdentity(fingerprint="", num_parameters=0),
        cluster=cluster,
        memory_limit_bytes=1,
        batch_size=1,
        global_batch_size=cluster.ranks,
        operators=tuple(operators),
        predicted=Prediction(
            step_time_s=0.0,
            compute_time_s=0.0,
            communication_time_s=0.0,
            samples_per_s=0.0,
            peak_memory_bytes=0,
            overhead_bytes=0,
        ),
    )

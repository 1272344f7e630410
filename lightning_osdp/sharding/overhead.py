"""Measures what carrying out a mode takes beside compute and collectives: the engine's own Python, copies, page faults.

A few small operators are trained through the engine, and beside that the same operators as plain modules with the same
collectives called by hand. The difference, at two sizes, gives seconds per operator and seconds per byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp import collectives
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import NO_OVERHEAD, Cluster, CollectiveFit, EngineOverhead, Link, ModeOverhead
from lightning_osdp.planning.plan import ExecutionPlan, ModelIdentity, OperatorPlan, Prediction
from lightning_osdp.sharding.fairscale import FairScaleEngine

WIDTHS = (128, 448)
"""Of the square weights: 64 KiB and 784 KiB, both small enough to ride in buckets when replicated."""

OPERATORS = 6
"""How many are run one after the other: a single one would be lost in the clock's noise."""

REPEATS, WARM_UP = 15, 2


def measure(group: dist.ProcessGroup, device: torch.device) -> EngineOverhead:
    """What each mode takes for an operator in one micro-batch. Collective: all ranks call it alike.

    Returns:
        The slowest rank's numbers, the same on every rank; zeros on a single rank, where nothing is sharded.
    """
    if group.size() == 1:
        return NO_OVERHEAD
    found = {mode: [_per_operator_s(mode, width, group, device) for width in WIDTHS] for mode in Mode}
    sizes = [4 * width * width for width in WIDTHS]
    fits = {mode: _line(sizes, times) for mode, times in found.items()}
    return EngineOverhead(dp=fits[Mode.DP], zdp2=fits[Mode.ZDP2], zdp=fits[Mode.ZDP])


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """One step in each mode, forgotten: code and buffers are loaded at their first use.

    Where measurements come from a cache this has not happened yet, and the process's own memory would be read too low.
    Collective: all ranks call it alike.
    """
    if group.size() > 1:
        for mode in Mode:
            _with_engine(mode, WIDTHS[0], group, device)()


def _line(sizes: list[int], times_s: list[float]) -> ModeOverhead:
    """Through two points, with neither part below zero."""
    slope = max(0.0, (times_s[1] - times_s[0]) / (sizes[1] - sizes[0]))
    return ModeOverhead(fixed_s=max(0.0, min(times_s[0] - slope * sizes[0], times_s[1])), s_per_byte=slope)


def _per_operator_s(mode: Mode, width: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Difference between the engine and doing the same by hand, each at its quickest, on the slowest rank."""
    steps = (_with_engine(mode, width, group, device), _by_hand(mode, width, group, device))
    seconds = [[_once_s(step, group, device) for step in steps] for _ in range(WARM_UP + REPEATS)]
    # The quickest of each: what others do on the machine meanwhile only ever adds.
    ours, theirs = (min(each) for each in zip(*seconds[WARM_UP:], strict=True))
    slowest = torch.tensor((ours - theirs) / OPERATORS, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _once_s(step: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    _synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def _operators(width: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(OPERATORS)))


def _train(model: nn.Module, sample: Tensor) -> None:
    model(sample).sum().backward()


def _with_engine(mode: Mode, width: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    model, sample = _operators(width, device), torch.ones(1, width, device=device)
    engine = FairScaleEngine(device, group)
    engine.apply(model, _plan(mode, len(model), group))

    def step() -> None:
        engine.before_forward()
        _train(model, sample)
        engine.finish_backward()
        engine.after_optimizer_step()
        model.zero_grad(set_to_none=True)

    return step


def _by_hand(mode: Mode, width: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    """The same compute and the same collectives."""
    model, sample = _operators(width, device), torch.ones(1, width, device=device)
    ranks, numel = group.size(), width * width
    part = torch.zeros(-(-numel // ranks), device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    every = torch.zeros(numel * OPERATORS, device=device)

    def step() -> None:
        _train(model, sample)
        model.zero_grad(set_to_none=True)
        if mode == Mode.DP:
            collectives.all_reduce_mean(every, group)
            return
        for _ in range(OPERATORS):
            for _ in range(2 if mode == Mode.ZDP else 1):
                collectives.all_gather(torch.empty_like(whole), part, group)
            collectives.reduce_scatter(torch.empty_like(part), whole, group)

    return step


def _plan(mode: Mode, operators: int, group: Any) -> ExecutionPlan:
    """That keeps all operators of a ``Sequential`` in one mode."""
    nothing = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    plan = partial(OperatorPlan, slices=(mode,), num_parameters=0)
    return ExecutionPlan(
        model=ModelIdentity(fingerprint="", num_parameters=0),
        cluster=Cluster(
            devices_per_node=group.size(),
            device="",
            backend="",
            link=Link(all_reduce=nothing, all_gather=nothing, reduce_scatter=nothing),
        ),
        memory_limit_bytes=1,
        batch_size=1,
        global_batch_size=group.size(),
        operators=tuple(plan(name=str(index)) for index in range(operators)),
        predicted=Prediction(
            step_time_s=0.0,
            compute_time_s=0.0,
            communication_time_s=0.0,
            samples_per_s=0.0,
            peak_memory_bytes=0,
            overhead_bytes=0,
        ),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

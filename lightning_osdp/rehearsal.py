"""Rehearses the module's own training step, on a copy: as it is, and with all operators in each mode.

What was measured in parts (kernels, collectives, the engine) is then scaled to what the step really takes
(``planning.rehearsed``). The copy needs memory for its parameters, gradients and activations, but no optimizer states;
where there is no room for it, the parts are all that is known.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_osdp.collectives import on_all_ranks
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import Cluster, ComputeTimes, EngineOverhead
from lightning_osdp.planning.joining import Units, ways
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.rehearsed import (
    JOINED_MODE,
    added_s,
    alike,
    compute_s,
    rehearsed_compute,
    rehearsed_engine,
)
from lightning_osdp.planning.wishes import NO_WISHES
from lightning_osdp.profiling.optimizers import configured
from lightning_osdp.profiling.standins import (
    kept_randomness,
    loss_of,
    real_batch,
    real_copy,
    silenced,
    step_arguments,
    transferred,
)
from lightning_osdp.profiling.trace import Trace
from lightning_osdp.sharding.fairscale import FairScaleEngine
from lightning_osdp.sharding.overhead import bare_plan, forget, synchronize

SECONDS, LONGEST_S = 2.5, 8.0
"""About how long each rehearsal takes, and at most. Where the plain steps take longer, there is none."""

FEWEST, MOST, WARM_UP = 5, 9, 1
"""Steps that are timed within that, if time allows, and those before them."""

ODD = 1.4
"""Factor between parts and a rehearsal from which on it is made once more, and the less counts: other work on the
machine lasts for some seconds at times."""

MARGIN = 1.1
"""Room for a rehearsal, as a multiple of what it is thought to need."""


@dataclass(frozen=True)
class Stage:
    """What a step is rehearsed with.

    Attributes:
        module: the user's; it is copied.
        batch: as the data loader gives it.
        batch_size: samples in it.
        device: of this rank.
        step_context: what ``training_step`` runs in (autocast).
    """

    module: LightningModule
    batch: Any
    batch_size: int
    device: torch.device
    step_context: Callable[[], AbstractContextManager[Any]]

    def why_not(self, description: ModelDescription, sizes: Sequence[int], room_bytes: int) -> str:
        """Why there is no rehearsal; empty if there may be one."""
        if not self.module.automatic_optimization:
            return "the module steps its optimizers itself"
        if any(parameter.is_meta for parameter in self.module.parameters()):
            return "the module has no values yet"
        if any(isinstance(each, torch._dynamo.OptimizedModule) for each in self.module.modules()):
            return "compiling the copy would take too long"
        if needed_bytes(description, max(sizes)) > room_bytes:
            return "a copy of the module does not fit"
        return ""


def needed_bytes(description: ModelDescription, batch_size: int) -> int:
    """Of a replicated copy at most: parameters, gradients and their copies in buckets, buffers, activations; and some
    more for what is not counted, since a control group's limit ends the process."""
    states = sum(p.parameter_bytes + 2 * p.gradient_bytes for one in description.operators for p in one.parameters)
    live = max((moment.live.at(batch_size) for moment in description.moments), default=0.0)
    return int(MARGIN * (states + description.buffer_bytes + live))


def rehearse(
    stage: Stage, traced: Trace, group: dist.ProcessGroup, cluster: Cluster, compute: ComputeTimes, room_bytes: int
) -> tuple[ComputeTimes, EngineOverhead]:
    """Times whose sums are those of the step. Collective: all ranks call it alike.

    Args:
        stage: what to rehearse.
        traced: the step, at one or two batch sizes: those are rehearsed.
        group: the ranks.
        cluster: with links and engine as measured.
        compute: as measured in parts.
        room_bytes: that a rehearsal may take on this rank.

    Returns:
        Both as they were where a rehearsal is not possible, or would take too long.
    """
    sizes = sorted(traced.kernels)
    reasons: list[str] = [""] * group.size()
    dist.all_gather_object(reasons, stage.why_not(traced.description, sizes, room_bytes), group=group)
    if any(reasons):
        return compute, cluster.engine
    try:
        with kept_randomness(stage.device):
            plain = on_all_ranks(group, partial(_timed, stage, sizes, group, None))
            if sum(plain.values()) > LONGEST_S:
                return compute, cluster.engine
            rehearsed = rehearsed_compute(compute, plain)
            if group.size() == 1:
                return rehearsed, cluster.engine
            return rehearsed, _rehearsed_modes(stage, traced.description, sizes, group, cluster, rehearsed)
    except Exception as error:  # whatever the user's code raises: it will in training, too, or it minds being copied
        warnings.warn(f"the step can't be rehearsed, so its time is less sure: {error}", OSDPWarning, stacklevel=2)
        return compute, cluster.engine


def _rehearsed_modes(
    stage: Stage,
    description: ModelDescription,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    cluster: Cluster,
    compute: ComputeTimes,
) -> EngineOverhead:
    """All operators in each mode, and blocks that share units where there are such, at a batch size in between."""
    size = sum(sizes) // len(sizes)
    apart, *joined = ways(description, NO_WISHES)

    def rehearsed_s(mode: Mode, units: Units) -> float:
        plan = _plan(description, mode, units, group.size())
        return on_all_ranks(group, partial(_timed, stage, [size], group, plan))[size] - compute_s(compute, size)

    def sure_s(mode: Mode, units: Units) -> float:
        found, parts = rehearsed_s(mode, units), added_s(description, cluster, mode, units)
        if parts / ODD <= found <= parts * ODD:
            return found
        return min(found, rehearsed_s(mode, units))

    seconds = {mode: sure_s(mode, apart) for mode in Mode}
    if not joined:
        return rehearsed_engine(description, cluster, seconds)
    return rehearsed_engine(description, cluster, seconds, joined[-1], sure_s(JOINED_MODE, joined[-1]))


def _timed(
    stage: Stage, sizes: Sequence[int], group: dist.ProcessGroup, plan: ExecutionPlan | None
) -> dict[int, float]:
    """Median seconds of forward and backward of the slowest rank, by batch size; as a plain module without a plan."""
    twin = real_copy(stage.module)
    engine = None if plan is None else FairScaleEngine(stage.device, group)
    if engine is None or plan is None:
        twin.to(stage.device)
    else:
        engine.apply(twin, plan)
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    with silenced(twin, optimizers, schedulers), torch.compiler.set_stance("force_eager"):
        with engine.whole_shapes() if engine is not None else nullcontext():
            optimizers[:], schedulers[:] = configured(twin)
        batches = [transferred(twin, real_batch(stage.batch, stage.batch_size, size), stage.device) for size in sizes]
        seconds = _medians([partial(_step, stage, twin, batch, engine) for batch in batches], group, stage.device)
    forget(twin)
    return dict(zip(sizes, seconds, strict=True))


def _step(stage: Stage, twin: LightningModule, batch: Any, engine: FairScaleEngine | None) -> None:
    """Forward and backward; gradients are freed."""
    if engine is not None:
        engine.before_forward()
    with stage.step_context():
        output = twin.training_step(*step_arguments(twin, batch))
    twin.backward(loss_of(output))
    if engine is not None:
        engine.finish_backward()
        engine.after_optimizer_step()
    twin.zero_grad(set_to_none=True)


def _medians(steps: Sequence[Callable[[], None]], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Of some repetitions in turn, on the slowest rank."""

    def once() -> list[float]:
        seconds = []
        for step in steps:
            synchronize(device)
            dist.barrier(group)
            start = time.perf_counter()
            step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return seconds

    def slowest(seconds: list[float]) -> list[float]:
        numbers = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        return [float(number) for number in numbers]

    for _ in range(WARM_UP):
        first = slowest(once())
    least = min(FEWEST, int(LONGEST_S / sum(first)))
    repeats = min(MOST, max(least, int(SECONDS / sum(first))))
    if not repeats:
        return first
    return slowest([statistics.median(each) for each in zip(*(once() for _ in range(repeats)), strict=True)])


def _plan(description: ModelDescription, mode: Mode, units: Units, ranks: int) -> ExecutionPlan:
    """All operators in one mode, as far as they can."""
    return bare_plan(
        (
            OperatorPlan(
                name=operator.name,
                slices=alike(operator, mode).slices,
                unit=unit,
                num_parameters=operator.num_parameters,
                pinned=operator.pinned,
            )
            for operator, unit in zip(description.operators, units, strict=True)
        ),
        ranks,
    )

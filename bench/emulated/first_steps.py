"""A cell of a GPU's first minutes: steps of one model under one engine, without links and over links of two kinds.

Each figure is of this process, which stands for the first of eight ranks. ``units`` are this package's, planned as a
start plans them, from the traced step; ``fully_shard`` has groups of the same blocks. A name may have a toggle behind a
plus, which undoes one thing in the units, to see what that thing is worth.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.comparison.models import MODELS, Decoder, Task, next_byte_loss
from bench.emulated.queue import Cell
from lightning_osdp.backend import memory, streams
from lightning_osdp.backend.streams import GatherMemory
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale import context
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.gradient_buckets import BucketedAllReduce
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.wrapping import WrappedModel
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace
from tests.support.sent_bytes import count_sent

GPT, GPT_WIDTHS, GPT_TOKENS = "gpt-1.3b", (2048,) * 24, 1024
BATCH_SIZES = {GPT: 4}
LINKS_GB_S = {"nvlink": 350.0, "pcie": 20.0}
LATENCY_S = 2e-5
STEPS = {"cuda": (3, 5), "cpu": (1, 1)}
"""Untimed and timed ones, by device: a CPU only shows that all is ready."""

HARDWARE = "h100-80gb-nvlink"
TOGGLES = ("casts", "priority", "events", "flags")
"""What is undone: gathers in bf16, streams of high priority, hosts that don't wait for gathers, flags made on the
device."""

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


class Links:
    """Links of all collectives, which take no time until a bandwidth is set."""

    def __init__(self) -> None:
        self.gb_s = 0.0

        def seconds(_: EmulatedLinks, *args: Any, **kwargs: Any) -> float:
            return self.seconds(*args, **kwargs)

        patch.object(EmulatedLinks, "seconds", seconds).start()

    def seconds(self, collective: str, num_bytes: int, ranks: Any, tensors: int = 1) -> float:
        """Of one collective as a ring."""
        passes = 2 if collective == "all_reduce" else 1
        sent = passes * num_bytes * (len(ranks) - 1) / len(ranks)
        return LATENCY_S + sent / (self.gb_s * 1e9) if self.gb_s and len(ranks) > 1 else 0.0


def run(cell: Cell, machine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Time steps and read their memory."""
    device = torch.device(cell.device, 0) if cell.device == "cuda" else torch.device("cpu")
    links, cluster = Links(), resolve_cluster(HARDWARE, cell.ranks)
    if device.type == "cpu":
        cluster = cluster.model_copy(update={"device": "cpu"})
    join(EmulatedLinks(cluster))
    torch.manual_seed(1)
    task = Task(Decoder(GPT_WIDTHS, GPT_TOKENS) if cell.model == GPT else MODELS[cell.model].build())
    tokens = GPT_TOKENS if cell.model == GPT else MODELS[cell.model].tokens
    batch = torch.randint(0, 256, (BATCH_SIZES.get(cell.model, 2), tokens + 1))
    before = memory.memory_in_use(device)
    step, found = prepare(cell, task, batch, device, cluster)
    for _ in range(STEPS[device.type][0]):
        step()
    memory.reset_peak(device)
    found |= measured(step, device)
    found |= memory_of(device, before)
    for name, gb_s in LINKS_GB_S.items():
        links.gb_s = gb_s
        step()
        found[f"{name}_s"] = measured(step, device)["step_s"]
    links.gb_s = 0.0
    with count_sent() as sent:
        step()
    found |= {"calls": sent["calls"], "sent_bytes": sent["bytes"]}
    if device.type == "cuda":
        found["waits"] = waits(step)
        found |= profiled(step, found["step_s"])
    dist.destroy_process_group()
    return found


def prepare(
    cell: Cell, task: Task, batch: torch.Tensor, device: torch.device, cluster: Cluster
) -> tuple[Callable[[], None], dict[str, Any]]:
    """What makes a step, and what was predicted for it."""
    system, _, toggle = cell.system.partition("+")
    kind, _, policy = system.partition(" ")
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    found: dict[str, Any] = {}
    engine = None
    if kind == "units":
        profile = trace(TrainingStep(task, batch, len(batch), device, step_context=autocast)).model_profile
        plan, found["predicted_bytes"] = planned(profile, policy, cluster, len(batch))
        optimizer = task.configure_optimizers()
        engine = apply_units(task, plan, optimizer, device, toggle)
    else:
        if kind == "fully_shard":
            apply_fully_shard(task, device, policy)
        task.to(device)
        optimizer = task.configure_optimizers()
    batch = batch.to(device)

    def step() -> None:
        if engine is not None:
            engine.before_forward()
        with autocast(enabled=kind != "fully_shard"):
            loss = next_byte_loss(task(batch[:, :-1]), batch)
        loss.backward()
        if engine is not None:
            engine.before_optimizer_step(optimizer)
        optimizer.step()
        if engine is not None:
            engine.after_optimizer_step()
        optimizer.zero_grad()

    return step, found


def planned(profile: ModelProfile, policy: str, cluster: Cluster, batch_size: int) -> tuple[ExecutionPlan, int]:
    """All sharded, ``zdp`` or ``zdp2``, per ``operator`` or ``block``; and the peak of tensors that is predicted."""
    unit_kind, _, mode = policy.partition(" ")
    block_of = {index: block.name for block in profile.blocks for index in block.operators}
    operators = []
    for index, operator in enumerate(profile.operators):
        own = Mode(mode or "zdp") if operator.is_shardable else Mode.DP
        unit = block_of.get(index, "") if unit_kind == "block" and own != Mode.DP else ""
        operators.append(OperatorPlan(name=operator.name, slices=(own,), unit=unit, num_parameters=0))
    plan = ExecutionPlan.minimal(operators, cluster).with_types_of(profile)
    wrapped = WrappedModel.from_assignment(profile, [each.unit for each in operators])
    choices = wrapped.merge_choices([each.choice for each in operators])
    return plan, Timeline(wrapped.model, cluster, 0).peak(choices, batch_size).total_bytes


def apply_units(
    task: Task, plan: ExecutionPlan, optimizer: torch.optim.Optimizer, device: torch.device, toggle: str
) -> FairScaleEngine:
    """Shard the module, with one thing undone if ``toggle`` says so."""
    undo(toggle)
    if toggle == "casts":
        operators = tuple(each.model_copy(update={"compute_dtype": ""}) for each in plan.operators)
        plan = plan.model_copy(update={"operators": operators})
    engine = FairScaleEngine(device, broadcast=False)
    engine.apply(task, plan, [optimizer])
    return engine


def undo(toggle: str) -> None:
    """Undo one of ``TOGGLES`` for this process."""
    if toggle == "priority":

        def plain(device: torch.device, names: Any, module: Any) -> dict[str, Any]:
            made = streams.create_streams(device, names, module)
            return {name: torch.cuda.Stream(device) for name in made} if device.type == "cuda" else made

        patch.object(context, "create_streams", plain).start()
    if toggle == "events":
        free = GatherMemory._free_oldest

        def wait_and_free(self: GatherMemory) -> int:
            next(iter(self._used.values()))[0].synchronize()
            return free(self)

        patch.object(GatherMemory, "_free_oldest", wait_and_free).start()
    if toggle == "flags":

        def copied(self: BucketedAllReduce, like: torch.Tensor) -> torch.Tensor:
            flags = [float(p in bucket.present) for bucket in self._buckets for p in bucket.parameters]
            return torch.tensor(flags, dtype=like.dtype, device=like.device)

        patch.object(BucketedAllReduce, "_presence_flags", copied).start()


def apply_fully_shard(task: Task, device: torch.device, policy: str) -> None:
    """Groups of the blocks, and one of the rest, with gathers in bf16 and reductions in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    resharded = not policy.endswith("zdp2")
    for block in task.net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=resharded, mp_policy=precision)
    fully_shard(task.net, mesh=mesh, reshard_after_forward=resharded, mp_policy=precision)


def measured(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Seconds of a step, and those after which the host has launched it."""
    count = STEPS[device.type][1]
    _wait(device)
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    launched_s = time.perf_counter() - began_s
    _wait(device)
    return {"step_s": (time.perf_counter() - began_s) / count, "host_s": launched_s / count}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of(device: torch.device, before: int) -> dict[str, int]:
    """Bytes at the peak of all steps so far, by the allocator's counters on CUDA; and how often it had to try again."""
    if device.type == "cpu":
        return {"active_bytes": memory.peak_memory(device) - before}
    stats = torch.cuda.memory_stats(device)
    names = {"active_bytes": "active_bytes", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
    peaks = {name: stats[f"{key}.all.peak"] - before * (name != "reserved") for name, key in names.items()}
    return peaks | {"retries": stats["num_alloc_retries"]}


@contextmanager
def _debugging(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(step: Callable[[], None]) -> list[str]:
    """Where a step has the host wait for the device, as torch notices it."""
    with warnings.catch_warnings(record=True) as found, _debugging("warn"):
        warnings.simplefilter("always")
        step()
    return sorted({f"{Path(each.filename).name}:{each.lineno}" for each in found})


def profiled(step: Callable[[], None], step_s: float) -> dict[str, Any]:
    """The share of a step in which the device is idle, and the seconds that the host is blocked in it."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events = found.events() or []
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    spans = sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    busy_us = end = 0.0
    for first, last in spans:
        busy_us += max(0.0, last - max(first, end))
        end = max(end, last)
    # The last wait is that of this function.
    blocked = [event.time_range.elapsed_us() for event in events if event.name in WAITS]
    return {"idle": max(0.0, 1.0 - busy_us / 1e6 / step_s), "blocked_s": sum(blocked[:-1]) / 1e6}

"""One cell in a process of its own: train as rank 0 of the emulated ranks, and write what came out.

python -m bench.emulated.cell JSON
"""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import MixedPrecision
from torch.utils.data import DataLoader, Dataset, Sampler

from bench.comparison import fairscale_loop, lightning_loop
from bench.comparison.jobs import Job, Setting
from bench.comparison.models import Task, adamw, next_byte_loss
from bench.comparison.worker import expand_segments, fix_allocator
from bench.emulated.climb import LARGEST, Climb
from bench.emulated.links import NETWORK, scaled_cluster
from bench.emulated.models import net_of, tokens_of, vocabulary_of
from bench.emulated.queue import Cell
from bench.processes import LOADED_BYTES
from lightning_osdp.backend import memory
from lightning_osdp.emulation import EmulatedCluster
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.planning.spec.cluster import Cluster

WARM_UP, TIMED = 3, 14
"""Steps of OSDP, which chooses its batch size itself. A heap that is retained grows for about eight of them."""

QUIET: dict[str, Any] = {
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "max_epochs": -1,
}


class EmulatedJob(Job):
    """What ``bench.comparison`` asks of a job, for ranks that are not there."""

    @property
    def where(self) -> Setting:
        """All ranks; nobody starts them."""
        return Setting(1, int(self.setting))


class Switch:
    """Lets links take their time or none; adds up the seconds that they would take."""

    def __init__(self) -> None:
        self.is_on, self.seconds = True, 0.0
        original = EmulatedLinks.seconds

        def seconds(links: EmulatedLinks, *args: Any, **kwargs: Any) -> float:
            value = original(links, *args, **kwargs)
            self.seconds += value
            return value if self.is_on else 0.0

        patch.object(EmulatedLinks, "seconds", seconds).start()


class Text(Dataset[torch.Tensor]):
    """Random tokens of a model's vocabulary."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, vocabulary_of(model), (256, tokens_of(model) + 1), generator=generator)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % 256]


class Climbing(Sampler[list[int]]):
    """Batches of the size that is wanted next."""

    def __init__(self, climb: Climb) -> None:
        self.climb = climb

    def __len__(self) -> int:
        return 1 << 16  # a known length: Lightning does not read ahead

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield list(range(self.climb.size))


class Meter:
    """Times steps and reads their peaks.

    Args:
        climb: is told of them.
        switch: the links.
        device: whose memory counts.
        before_bytes: what the process took before.
    """

    def __init__(self, climb: Climb, switch: Switch, device: torch.device, before_bytes: int) -> None:
        self.climb, self.switch, self.device, self.before_bytes = climb, switch, device, before_bytes
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        memory.reset_peak(self.device)
        self.switch.is_on, self.switch.seconds = self.climb.has_links, 0.0
        self.start_s = time.perf_counter()

    def end(self) -> bool:
        """A step ended; whether there is another one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, size = time.perf_counter() - self.start_s, self.climb.size
        link_s = self.switch.seconds
        self.climb.link_s = lambda: link_s
        goes_on = self.climb.after_step(seconds, memory.peak_memory(self.device) - self.before_bytes)
        if self.device.type == "cuda" and self.climb.size != size:
            torch.cuda.empty_cache()
        self.begin()
        return goes_on


class Steps(pl.Callback):
    """Tells the meter of Lightning's steps."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_start(self, *_: Any) -> None:
        self.meter.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.meter.end():
            trainer.should_stop = True


def cluster_of(cell: Cell, machine: dict[str, Any]) -> Cluster:
    """The links of a cell."""
    if cell.links.startswith("scaled"):
        _, _, network = cell.links.partition("+")
        return scaled_cluster(cell.ranks, machine["flops"], network or NETWORK)
    return resolve_cluster(cell.links, cell.ranks)


def prepare(cell: Cell) -> torch.device:
    """The device, with the memory limit that all systems have on CUDA."""
    torch.set_num_threads(1)
    if cell.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    if cell.limit_mib:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cell.limit_mib << 20) / total), device)
    return device


def limits(cell: Cell, device: torch.device) -> tuple[int, int]:
    """What the process takes before the model, and the limit of all that it may take."""
    before = memory.memory_in_use(device)
    if device.type == "cuda" or not cell.limit_mib:
        return before, memory.memory_limit(device, 1)
    return before, before + LOADED_BYTES + (cell.limit_mib << 20)


def compare(cell: Cell, machine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A system at its best batch size."""
    device = prepare(cell)
    job = EmulatedJob(
        "final", cell.model, str(cell.ranks), cell.system.replace("osdp-plain", "osdp"), (1,), device=cell.device
    )
    if job.how.base == "osdp":
        return osdp(cell, machine, folder, device)
    (expand_segments if device.type == "cuda" else fix_allocator)()
    switch, environment = Switch(), EmulatedCluster(cluster_of(cell, machine))
    before, limit = limits(cell, device)
    climb = Climb(limit - before)
    meter = Meter(climb, switch, device, before)
    goes_on = True
    while goes_on:
        try:
            train_peer(cell, job, device, environment, meter, folder)
            goes_on = False
        except torch.OutOfMemoryError:  # on CUDA, where a size took more than the line through smaller ones said
            traceback.print_exc()
            goes_on = climb.after_out_of_memory()
        memory.trim(device)  # before another module is made
    if not climb.final_s:
        least = min(climb.peaks.values(), default=0)
        return {"error": "does not fit", "needed_bytes": least, "limit_bytes": limit - before}
    return {
        "batch_size": climb.best,
        "step_s": climb.step_s,
        "samples_per_s": cell.ranks * climb.best / climb.step_s,
        "peak_bytes": climb.final_peak,
        "limit_bytes": limit - before,
        "compute_s": climb.compute_s,
        "peaks": climb.peaks,
        "link_s": climb.link_s(),
    }


def train_peer(
    cell: Cell, job: Job, device: torch.device, environment: EmulatedCluster, meter: Meter, folder: Path
) -> None:
    """Train a new module until the climb has seen enough."""
    torch.manual_seed(1)
    kind = lightning_loop.ShardedTask if job.how.base.startswith("shard") else Task
    task = kind(net_of(cell.model))
    if job.how.base.startswith("fairscale"):
        train_fairscale(task, job, device, meter, cell)
        return
    strategy: Any = lightning_loop.strategy(job, task, folder)
    plugins: list[Any] = [environment]
    precision: Any = cell.precision
    if precision == "bf16-mixed" and isinstance(task, lightning_loop.ShardedTask):
        task.weights_dtype = torch.bfloat16
    elif precision == "bf16-mixed" and isinstance(strategy, FSDPStrategy):
        strategy.mixed_precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        if cell.device == "cpu":
            plugins.append(lightning_loop.FSDPPrecisionOnCpu(precision))
            precision = None
    trainer = pl.Trainer(
        accelerator=cell.device,
        precision=precision,
        strategy=strategy,
        plugins=plugins,
        callbacks=[Steps(meter)],
        **QUIET,
    )
    trainer.fit(task, loader(cell, meter.climb))


def loader(cell: Cell, climb: Climb) -> DataLoader[torch.Tensor]:
    """Batches of the size that the climb wants."""
    return DataLoader(Text(cell.model), batch_sampler=Climbing(climb))


def train_fairscale(task: Task, job: Job, device: torch.device, meter: Meter, cell: Cell) -> None:
    """FairScale as its documentation has it, in a plain loop."""
    warnings.filterwarnings("ignore")
    if device.type == "cpu":
        fairscale_loop.show_no_cuda()
    if cell.precision == "bf16-true":
        task.to(torch.bfloat16)
    root = fairscale_loop.wrapped(task, job, device)
    optimizer = adamw(root)
    for batch in loader(cell, meter.climb):
        meter.begin()
        tokens = batch.to(device)
        optimizer.zero_grad()
        next_byte_loss(root(tokens[:, :-1]), tokens).backward()
        optimizer.step()
        if not meter.end():
            break


def osdp(cell: Cell, machine: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    """OSDP, with blocks recomputed as it chooses (``osdp``), never (``osdp-plain``) or all (``osdp+ckpt``)."""
    from lightning_osdp import InfeasibleError, OSDPCallback, OSDPStrategy

    environment = EmulatedCluster(cluster_of(cell, machine))
    before, limit = limits(cell, device)
    torch.manual_seed(1)
    task = Task(net_of(cell.model))
    recomputes: Any = {"osdp": "auto", "osdp-plain": False, "osdp+ckpt": True}[cell.system]
    strategy = OSDPStrategy(
        memory_limit="auto" if device.type == "cuda" else limit, max_batch_size=LARGEST, cache=str(folder)
    )
    trainer = pl.Trainer(
        accelerator=cell.device,
        precision=cell.precision,  # type: ignore[arg-type]
        strategy=strategy,
        plugins=[environment],
        callbacks=[OSDPCallback(activation_checkpointing=recomputes, progress_bar=False)],
        max_steps=WARM_UP + TIMED,
        **QUIET,
    )
    start = time.perf_counter()
    try:
        trainer.fit(task, DataLoader(Text(cell.model), batch_size=1))
    except InfeasibleError as error:
        return {"error": "does not fit", "needed_bytes": error.needed_bytes - before, "limit_bytes": limit - before}
    return measured(strategy, before) | {"limit_bytes": limit - before, "run_s": time.perf_counter() - start}


def measured(strategy: Any, before: int) -> dict[str, Any]:
    """What OSDP predicted and took."""
    plan, step = strategy.execution_plan, strategy.measured_step
    modes: dict[str, int] = {}
    for operator in plan.operators:
        for mode in operator.slices:
            modes[mode.value] = modes.get(mode.value, 0) + operator.num_parameters // len(operator.slices)
    return {
        "batch_size": plan.batch_size,
        "step_s": step.step_time_s,
        "samples_per_s": strategy.world_size * plan.batch_size / step.step_time_s,
        "peak_bytes": step.peak_memory_bytes - before,
        "before_bytes": before,
        "predicted_s": plan.predicted.step_time_s,
        "predicted_bytes": plan.predicted.peak_memory_bytes - before,
        "predicted_communication_s": plan.predicted.communication_time_s,
        "communication_s": step.communication_s,
        "modes": modes,
        "recomputed": len(plan.recomputed),
        "where": plan.peak.where if plan.peak is not None else "",
    }

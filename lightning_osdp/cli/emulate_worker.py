"""The process of ``osdp emulate`` that trains some steps under one strategy, as rank 0 of a cluster that is not there.

It reads a ``Task`` as JSON from its standard input, and writes a ``StrategyResult`` as JSON to the file it names.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from pydantic import BaseModel
from torch import nn
from typing_extensions import override

from lightning_osdp.backend.memory import memory_in_use, memory_limit, trim
from lightning_osdp.backend.work import COMM_WAIT
from lightning_osdp.cli import offline_plan
from lightning_osdp.cli.large_modules import ModuleMaker
from lightning_osdp.emulation.environment import EmulatedCluster
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPError
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state.atomic_files import write_text
from lightning_osdp.strategy import offline
from lightning_osdp.strategy.dataloader import TrainData, apply_batch_size
from lightning_osdp.strategy.osdp import OSDPStrategy
from lightning_osdp.strategy.step_timer import WARMUP_STEPS, StepTimer

PARENT_POLL_S = 1.0
"""Seconds between two looks for the command that started this process."""

_NOT_CALLED = (Checkpoint, ProgressBar)
"""Callbacks that a Trainer refuses which neither saves nor shows anything."""

_NEVER = 1 << 62
"""The number of steps before which no callback may end the run."""

StrategyName = Literal["osdp", "ddp", "fsdp", "fsdp2"]


class Task(BaseModel):
    """What to train, and as what."""

    config: str
    """Path of the LightningCLI file."""
    cluster: Cluster
    strategy: StrategyName
    num_steps: int
    """Optimizer steps that are timed."""
    batch_size: int | None = None
    """Per device; None: OSDP searches it, others keep the loader's."""
    global_batch_size: int | None = None
    """Over all ranks, which strategies other than OSDP accumulate; None: they keep the file's accumulation."""
    settings: dict[str, bool] = {}
    """Arguments of DDPStrategy."""
    planning_args: dict[str, Any] = {}
    """Arguments of OSDPStrategy, before those of the file."""
    result: str
    """Path of the file to write."""
    parent: int
    """Number of the process that waits for that file."""


class StrategyResult(BaseModel):
    """What was measured, or why nothing was."""

    strategy: StrategyName
    batch_size: int = 0
    accumulate_grad_batches: int = 1
    step_time_s: float = 0.0
    """Median of the timed steps."""
    communication_s: float | None = None
    """Seconds of it that the process waited for collectives; None on CUDA."""
    peak_memory_bytes: int = 0
    before_bytes: int = 0
    """Memory of the process before the model was there."""
    settings: dict[str, bool] = {}
    """Arguments that DDPStrategy needs for this module."""
    plan: ExecutionPlan | None = None
    failure: str = ""
    needed_bytes: int = 0
    """What the smallest plan takes, if nothing fits."""
    budget_bytes: int = 0
    """What there is then."""

    def samples_per_s(self, ranks: int) -> float:
        """Return the throughput of all ranks."""
        return ranks * self.batch_size * self.accumulate_grad_batches / self.step_time_s


class _Measure(pl.Callback):
    """Times optimizer steps, and ends the run after enough of them, not where others would on metrics without meaning.

    Attributes:
        num_steps: optimizer steps so far; batches where the module has several optimizers, or steps them itself.
    """

    def __init__(self, steps: int) -> None:
        self._needed_steps = steps + WARMUP_STEPS
        self._steps_before_epoch = 0
        self.num_steps = 0
        self.timer: StepTimer | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.timer = StepTimer(trainer.strategy.root_device, lambda: COMM_WAIT.seconds)
        for reader in (*trainer.callbacks, *trainer.lr_scheduler_configs):  # type: ignore[attr-defined]
            if hasattr(reader, "strict"):  # of EarlyStopping and ReduceLROnPlateau: no validation gives their metric
                reader.strict = False

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        assert self.timer is not None
        self.timer.on_microbatch_start()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert self.timer is not None
        if trainer.fit_loop._should_accumulate():
            return
        self.timer.on_step_end()
        self.num_steps += 1
        if self.num_steps >= self._needed_steps:
            trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.num_steps == self._steps_before_epoch:  # a stream that can be read once, for example
            raise self.too_few_steps()
        self._steps_before_epoch = self.num_steps

    def too_few_steps(self) -> ConfigurationError:
        """Return the error of a run that had no data for its steps."""
        return ConfigurationError(
            f"the train dataloader has batches for {self.num_steps} optimizer steps of a rank, "
            f"{self._needed_steps} are needed: {WARMUP_STEPS} to warm up, and those of --steps"
        )


class _FSDPOnAnyDevice(FSDPStrategy):
    """FSDPStrategy where Lightning refuses it, on a CPU: torch's FSDP is told the device."""

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            model, device_id=self.root_device, sharding_strategy=self.sharding_strategy, **self.kwargs
        )


def block_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of blocks: members of a list or sequence that holds several alike ones with parameters."""
    found: set[type[nn.Module]] = set()
    for container in module.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            kinds = [type(child) for child in container if next(child.parameters(), None) is not None]
            found.update(kind for kind in kinds if kinds.count(kind) > 1)
    return found


def _shard_blocks(module: pl.LightningModule, configure: Callable[[], None]) -> None:
    """Apply ``fully_shard`` to each block and to each child, after the module's own ``configure_model``.

    Not to the module itself, for a training step need not call its ``forward``.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    configure()
    if any(isinstance(inner, FSDPModule) for inner in module.modules()):
        return
    assert module.device_mesh is not None
    mesh, classes = module.device_mesh["data_parallel"], tuple(block_classes(module))
    for block in [inner for inner in module.modules() if isinstance(inner, classes)]:
        fully_shard(block, mesh=mesh)
    for child in module.children():
        if not isinstance(child, classes) and next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh)


def _make_strategy(task: Task, module: pl.LightningModule, file_args: Mapping[str, Any]) -> Strategy:
    if task.strategy == "osdp":
        own = {name: value for name, value in file_args.items() if name != "cluster"}  # its links are others
        fixed = {} if task.batch_size is None else {"batch_size": task.batch_size}
        return OSDPStrategy(**own | task.planning_args | fixed)
    if task.strategy == "ddp":
        return DDPStrategy(**task.settings)  # type: ignore[arg-type]
    if task.strategy == "fsdp":
        return _FSDPOnAnyDevice(auto_wrap_policy=block_classes(module) or None)
    module.configure_model = partial(_shard_blocks, module, module.configure_model)  # type: ignore[method-assign]
    return ModelParallelStrategy(data_parallel_size=task.cluster.ranks, tensor_parallel_size=1)


def _set_batch_sizes_in_setup(strategy: Strategy, task: Task) -> None:
    """Have the loader's batch size and the Trainer's accumulation changed where OSDPStrategy changes them."""
    original = strategy.setup

    def setup(trainer: pl.Trainer) -> None:
        if task.batch_size is not None:
            data = TrainData(trainer, trainer.lightning_module)
            apply_batch_size(data, task.batch_size, task.cluster.ranks)
            data.reset_dataloader()
        if task.global_batch_size is not None:
            batch_size = task.batch_size or _loader_batch_size(trainer)
            samples = batch_size * task.cluster.ranks
            trainer.accumulate_grad_batches = _accumulation(trainer, task.global_batch_size, samples)
        original(trainer)

    strategy.setup = setup  # type: ignore[method-assign]


def _accumulation(trainer: pl.Trainer, global_batch_size: int, samples: int) -> int:
    """Return how many batches of all ranks, of ``samples`` together, make the global batch size.

    Raises:
        ConfigurationError: they do not, or the module would have to accumulate itself.
    """
    steps, rest = divmod(global_batch_size, samples)
    if rest or not steps:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is no multiple of the ranks' {samples} samples"
        )
    if steps > 1 and not trainer.lightning_module.automatic_optimization:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} takes {steps} batches a step, but this module steps its optimizers "
            "itself"
        )
    return steps


def train(task: Task) -> StrategyResult:
    """Train the task's steps and return what they took."""
    config = offline_plan.load_config(Path(task.config))
    device = offline.local_device(config.accelerator)
    make_module = ModuleMaker(memory_limit(torch.device("cpu"), local_ranks=1), is_for_planning=False)
    config = replace(config, make_module=make_module)
    with offline.quiet_lightning():  # the command has said what it is
        environment = EmulatedCluster(task.cluster)
    trim(device)
    before_bytes = memory_in_use(device)
    measure = _Measure(task.num_steps)

    def make_trainer(module: pl.LightningModule, arguments: dict[str, Any]) -> pl.Trainer:
        strategy = _make_strategy(task, module, config.strategy)
        if task.strategy != "osdp":
            _set_batch_sizes_in_setup(strategy, task)
        own: dict[str, Any] = {
            "strategy": strategy,
            "accelerator": "cuda" if device.type == "cuda" else "cpu",
            "plugins": [environment],
            "callbacks": [*(each for each in arguments.pop("callbacks") if not isinstance(each, _NOT_CALLED)), measure],
            "max_epochs": -1,
            "max_steps": -1,
            "min_epochs": 0,
            "min_steps": _NEVER,
            "max_time": None,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        if config.trainer.get("logger") is not False:
            own["logger"] = DummyLogger()  # the module's own code may use it
        return pl.Trainer(**arguments | offline.QUIET_TRAINER_ARGS | own)

    trainer = offline_plan.fit_config(config, make_trainer)
    measured = measure.timer.summarize() if measure.timer is not None else None
    if measured is None:
        raise measure.too_few_steps()
    strategy: Any = trainer.strategy
    plan = strategy.execution_plan if task.strategy == "osdp" else None
    return StrategyResult(
        strategy=task.strategy,
        batch_size=plan.batch_size if plan is not None else _loader_batch_size(trainer),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        step_time_s=measured.step_time_s,
        communication_s=measured.communication_s,
        peak_memory_bytes=measured.peak_memory_bytes,
        before_bytes=before_bytes,
        settings=task.settings,
        plan=plan,
    )


def _loader_batch_size(trainer: pl.Trainer) -> int:
    size = TrainData(trainer, trainer.lightning_module).loader_batch_size
    if size is None:
        raise ConfigurationError("the train dataloader has no batch size: samples per second can't be told")
    return size


def _exit_with_parent(parent: int) -> None:
    """End this process when the command that started it has been killed."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def main() -> int:
    """Run the task on the standard input; return the exit status."""
    task = Task.model_validate_json(sys.stdin.read())
    threading.Thread(target=_exit_with_parent, args=(task.parent,), daemon=True).start()
    sys.path[:0] = [str(Path.cwd()), str(Path(task.config).resolve().parent)]
    try:
        result = train(task)
    except OSDPError as error:
        result = StrategyResult(strategy=task.strategy, failure=str(error))
        if isinstance(error, InfeasibleError):
            sizes = {"needed_bytes": error.needed_bytes, "budget_bytes": error.budget_bytes}
            result = result.model_copy(update=sizes)
    write_text(Path(task.result), result.model_dump_json(), lambda _: True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

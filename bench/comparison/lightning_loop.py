"""OSDP and the systems that Lightning brings, each in one Trainer that differs by its strategy alone.

Lightning refuses FSDPStrategy on a CPU, though torch's FSDP runs there on gloo (losses equal DDP's; ``--verify``). A
subclass that passes the device on is let through; the loop is Lightning's, as for all others. FSDP2's
ModelParallelStrategy runs on a CPU as it is.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.fsdp import _setup_activation_checkpointing
from torch import nn

from bench.comparison.data import ladder_loader, plain_loader
from bench.comparison.jobs import Job
from bench.comparison.models import MODELS, Task, block_classes, build
from bench.comparison.step_log import INFEASIBLE_STATUS, Recorder
from bench.comparison.systems import ALONE, NO_TP, OWN


def train(job: Job, recorder: Recorder, cache: Path) -> None:
    """Fits the job's model; ``recorder`` stamps each step."""
    warnings.filterwarnings("ignore")
    picks_itself = not job.sizes
    tokens = MODELS[job.model].tokens
    task = build(job.model, ShardedTask if job.how.base.startswith("shard") else Task)
    loader = plain_loader(tokens) if picks_itself else ladder_loader(tokens, job.batches, recorder.rank, recorder.ranks)
    alone = job.how.base == ALONE
    trainer = pl.Trainer(
        accelerator=job.device,
        devices=1 if alone else int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if alone else int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy(job, task, cache),
        max_steps=job.warm_up + job.steps if picks_itself else -1,
        max_epochs=1,
        use_distributed_sampler=picks_itself,
        callbacks=[Stamps(recorder), *wishes(job)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader)


class Stamps(pl.Callback):
    """Tells the recorder what happens when."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.recorder.begin_setup()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan = getattr(trainer.strategy, "execution_plan", None)
        if plan is not None:
            self.recorder.write("plan", **plan_in_short(plan))
        self.recorder.ready()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.recorder.after_step(len(batch), pl_module.losses[-1]):
            trainer.should_stop = True
        pl_module.losses.clear()


def strategy(job: Job, task: Task, cache: Path) -> Strategy | str:
    """The system's strategy, as its users set it up."""
    how = job.how
    if how.base in OWN:
        return osdp(job, cache)
    backend = "gloo" if job.device == "cpu" or shares_a_gpu(job) else None
    classes = block_classes(task)
    if how.base.startswith("fsdp"):
        own = FSDPOnCpu if job.device == "cpu" else FSDPStrategy
        return own(
            auto_wrap_policy=classes,
            activation_checkpointing_policy=classes if how.checkpointing else None,
            sharding_strategy="FULL_SHARD" if how.base == "fsdp-full" else "SHARD_GRAD_OP",
            process_group_backend=backend,
        )
    if how.checkpointing:
        recompute(task, classes)
    if how.base == ALONE:
        return "auto"
    if how.base == "ddp":
        return DDPStrategy(process_group_backend=backend)
    task.reshard_after_forward = how.base == "shard"  # type: ignore[assignment]
    ranks = job.where.ranks
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend=backend)


def shares_a_gpu(job: Job) -> bool:
    """Whether several ranks have one GPU, which NCCL refuses."""
    return job.device == "cuda" and torch.cuda.device_count() < job.where.ranks


def osdp(job: Job, cache: Path) -> Strategy:
    """OSDP as it is; it finds the limit of the control group, or of the caching allocator, itself."""
    from lightning_osdp import InfeasibleError, OSDPStrategy

    class OrExit(OSDPStrategy):
        """Ends the rank with a status that tells "nothing fits" from a failure."""

        def setup(self, trainer: pl.Trainer) -> None:
            try:
                super().setup(trainer)
            except InfeasibleError as error:
                print(error, flush=True)
                os._exit(INFEASIBLE_STATUS)

    backend = {"process_group_backend": "gloo"} if shares_a_gpu(job) else {}
    return OrExit(cache=cache, **backend)


def wishes(job: Job) -> list[pl.Callback]:
    """What OSDP is told."""
    if job.how.base != NO_TP:
        return []
    from lightning_osdp import OSDPCallback

    return [OSDPCallback(tensor_parallel=False)]


class FSDPOnCpu(FSDPStrategy):
    """FSDPStrategy on a CPU: as it is, but that torch's FSDP is told the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        options: dict[str, Any] = {"sharding_strategy": self.sharding_strategy, **self.kwargs}
        options |= {"mixed_precision": self.mixed_precision} if self.mixed_precision is not None else {}
        wrapped = FullyShardedDataParallel(model, device_id=self.root_device, **options)
        _setup_activation_checkpointing(wrapped, self._activation_checkpointing_kwargs)
        return wrapped


class FSDPPrecisionOnCpu(FSDPPrecision):
    """FSDP's mixed precision with autocast for the CPU; Lightning's has that of CUDA, whatever the device."""

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class ShardedTask(Task):
    """The model of a user of ModelParallelStrategy: ``fully_shard`` on every block and on the rest."""

    reshard_after_forward = True
    weights_dtype: torch.dtype | None = None
    """In which weights are gathered, while gradients are reduced in fp32; None for their own."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if isinstance(self, FSDPModule):
            return
        policy = MixedPrecisionPolicy(param_dtype=self.weights_dtype, reduce_dtype=self.weights_dtype and torch.float32)
        shard = partial(fully_shard, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
        mesh, classes = self.device_mesh["data_parallel"], tuple(block_classes(self))
        for block in [module for module in self.modules() if isinstance(module, classes)]:
            shard(block, mesh=mesh)
        shard(self, mesh=mesh)


def recompute(task: Task, classes: set[type[nn.Module]]) -> None:
    """Activation checkpointing of every block, with torch's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(task, check_fn=lambda module: isinstance(module, tuple(classes)))


def plan_in_short(plan: Any) -> dict[str, Any]:
    """What was decided and predicted."""
    modes: dict[str, int] = {}
    for operator in plan.operators:
        mode = "+".join(sorted({str(mode.value) for mode in operator.slices}))
        modes[mode] = modes.get(mode, 0) + operator.num_parameters
    return {
        "batch_size": plan.batch_size,
        "parameters": modes,
        "operators": len(plan.operators),
        "predicted": plan.predicted.model_dump(mode="json"),
    }

"""A training script of which one rank fails, in the way that its first argument names."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy import failure_detector
from tests.support.modules import GPTModule, dataset, trainer
from tests.support.plans import plan_for

STEPS = 1000
"""More than any run gets to."""


class Stream(IterableDataset[Any]):
    """Rows without a known number; fewer of them on rank 1. One rank may be killed as they end."""

    def __init__(self, rank: int, killed: int | None = None) -> None:
        self._rows = dataset(64 if rank == 0 and killed is None else 24).tensors[0]
        self._is_killed = rank == killed

    def __iter__(self) -> Iterator[Any]:
        yield from ((row,) for row in self._rows)
        if self._is_killed and torch.distributed.is_initialized():
            note_fault()
            os.kill(os.getpid(), signal.SIGKILL)


def note_fault() -> None:
    """Write down when the fault comes."""
    Path(os.environ["FAULT_FOLDER"], "fault").touch()


class BadRows(TensorDataset):
    """One row can't be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            note_fault()
            raise OSError("row 12 is unreadable")
        return super().__getitem__(index)


class RaisingCallback(pl.Callback):
    """Makes it worse."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, ValueError):
            raise KeyError("nobody expects this")


class Failing(GPTModule):
    """Fails as ``how`` says, on one rank."""

    def __init__(self, how: str, folder: str) -> None:
        super().__init__(batch_size=4, rows=4 * STEPS)
        self.how, self.folder = how, folder

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if self.trainer.global_step == 3 and not isinstance(loss, torch._subclasses.FakeTensor):
            if f"raise on {self.global_rank}" in self.how:
                note_fault()
                raise ValueError("the third step is unlucky")
            if self.how == f"swallow on {self.global_rank}":
                note_fault()
                raise ValueError("nobody ends this process")
            if self.how == f"exit on {self.global_rank}":
                note_fault()
                sys.exit(3)
            if self.how == f"Ctrl-C on {self.global_rank}":
                note_fault()
                signal.raise_signal(signal.SIGINT)
            if self.how == f"kill {self.global_rank}":
                note_fault()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == f"two SIGTERMs to {self.global_rank}":
                note_fault()
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            Path(self.folder, f"step-3-of-rank-{self.global_rank}").touch()
        if self.how == "interrupt":
            time.sleep(0.02)
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        super().validation_step(batch, batch_index)
        if batch_index == 3 and self.how == f"SIGTERM to {self.global_rank} in validate":
            note_fault()
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [RaisingCallback()] if "on_exception" in self.how else []

    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.global_rank
        if self.how == "stream":
            return DataLoader(Stream(rank), batch_size=4)
        if self.how == "uneven":
            return DataLoader(dataset(24 if rank else 64), batch_size=4)
        if self.how.startswith("stream, kill "):
            return DataLoader(Stream(rank, int(self.how[-1])), batch_size=4)
        if self.how == f"worker {rank}":
            return DataLoader(BadRows(*dataset(4 * STEPS).tensors), batch_size=4, num_workers=1)
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(24 if self.how == "uneven validation" and self.global_rank else 64), batch_size=4)


def main(how: str, folder: str) -> None:
    os.environ["FAULT_FOLDER"] = folder
    if how.startswith("swallow"):
        # The other rank is ended by it. Elsewhere it would hide what ends a rank by itself.
        failure_detector.FAILURE_GRACE_S = 2.0
    # A shell has what it starts in the background ignore Ctrl-C, and the tests with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = Failing(how, folder)
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 2))
    other = how == "plan" and rank == 1
    plan = plan_for(module, [dataset(4).tensors[0]], ranks, "zdp" if other else "mixed", 4)
    strategy = OSDPStrategy(plan=plan)
    checkpoints: dict[str, Any] = {}
    if how.startswith("checkpoint"):
        checkpoints = {"callbacks": [OnExceptionCheckpoint(folder, "after")], "enable_checkpointing": True}
    validates = "valid" in how
    checks = checkpoints | ({"limit_val_batches": 1.0, "val_check_interval": 2} if validates else {})
    fitting = trainer(folder, strategy, devices=ranks, max_steps=STEPS, use_distributed_sampler=False, **checks)
    try:
        fitting.validate(module) if how.endswith("in validate") else fitting.fit(module)
    except ValueError:
        if how != f"swallow on {rank}":
            raise
        time.sleep(10)  # the process and its connections go on


if __name__ == "__main__":
    main(*sys.argv[1:])

"""LightningModules for whole runs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.support.models import TinyGPT, gpt_batches, gpt_loss, two_groups


class GPTModule(pl.LightningModule):
    """TinyGPT with two parameter groups told apart by name and shape, and a schedule that asks the Trainer."""

    def __init__(self, batch_size: int = 4, rows: int = 32, schedule: bool = False, own_rows: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters("schedule")
        self.batch_size = batch_size
        self.rows = rows
        self.schedule = schedule
        self.own_rows = own_rows
        self.model = TinyGPT()
        self.losses: list[float] = []
        self.batch_sizes: list[int] = []

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        (tokens,) = batch
        loss = gpt_loss(self.model, tokens)
        self.log("train_loss", loss)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.losses.append(float(loss.detach()))
            self.batch_sizes.append(len(tokens))
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("val_loss", gpt_loss(self.model, batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = two_groups(self)
        if not self.schedule:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 2e-3], total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        rows = dataset(self.rows)
        mine = range(self.global_rank, self.rows, self.trainer.world_size) if self.own_rows else range(self.rows)
        return DataLoader(Subset(rows, mine), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(8, 2, seed=9)


class FixedLoader(GPTModule):
    """Its loader follows no attribute."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.rows, 2)


class DataDependent(GPTModule):
    """Its step looks at values, which fake tensors don't have."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        (tokens,) = batch
        if int(tokens.sum()) > 0:
            return super().training_step(batch, batch_index)
        raise AssertionError("tokens are not negative")


class LateParameter(GPTModule):
    """Adds a parameter to its optimizer when training has begun."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        if batch_index == 1:
            late = torch.nn.Parameter(torch.zeros(3))
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": [late]})  # type: ignore[union-attr]


def dataset(rows: int, seed: int = 0) -> TensorDataset:
    """Rows of token ids."""
    return TensorDataset(gpt_batches(rows, 1, seed)[:, 0])


def loader(rows: int, batch_size: int, seed: int = 0) -> DataLoader[Any]:
    """In order, so that rank r of N gets rows r, r + N, ..."""
    return DataLoader(dataset(rows, seed), batch_size=batch_size)


def trainer(folder: str, strategy: Any, **options: Any) -> pl.Trainer:
    """Two CPU processes, quiet."""
    values: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": strategy,
        "max_steps": 4,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return pl.Trainer(**(values | options))

"""Trains a recommender with large embedding tables on two processes, under a memory limit that DDP does not fit.

    python examples/recommender.py

The model is a small DLRM (Naumov et al., 2019): categories are looked up in tables, numbers go through an MLP, and the
scalar products of all these vectors tell how likely a click is. Almost all parameters are in the tables, of which a
batch reads a few rows: the plan printed at the start, and again as one line per table at the end, says which of them
are replicated, sharded, or tensor parallel (each process holds some columns of a table and they exchange what they
looked up, which is far less than the table).

The clicks are made up: users and items have a hidden taste, and like what is near to it.
"""

import argparse
import os
from itertools import combinations, pairwise

import lightning as L
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_osdp

TABLES = {"user": 160_000, "item": 120_000, "shop": 40_000, "city": 2_000, "hour": 24}  # rows of each table
NUMBERS = 8  # features that are no categories

FIRST_STEPS_BYTES = 32 << 20  # what libraries take besides at the first steps
LIMIT_VARIABLE = "RECOMMENDER_MEMORY_LIMIT"  # tells the processes that are started the limit of the first


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Recommender(L.LightningModule):
    def __init__(self, width: int = 64, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, width) for name, rows in TABLES.items()})
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.1)
        self.bottom = mlp(NUMBERS, 256, width)
        vectors = len(TABLES) + 1
        self.top = mlp(width + vectors * (vectors - 1) // 2, 256, 1)
        self.register_buffer("pairs", torch.tensor(list(combinations(range(vectors), 2))).T.contiguous())

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(numbers)  # (batch, width)
        looked_up = [table(ids) for table, ids in zip(self.tables.values(), categories.unbind(1), strict=True)]
        vectors = torch.stack([bottom, *looked_up], dim=1)  # (batch, tables + 1, width)
        products = vectors @ vectors.transpose(1, 2)  # (batch, tables + 1, tables + 1)
        return self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)  # (batch,)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self(batch[0], batch[1]), batch[2])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0], batch[1])
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, batch[2]), prog_bar=True, sync_dist=True)
        hits = ((logits > 0) == (batch[2] > 0.5)).float().mean()
        self.log("val_accuracy", hits, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.0)


class Clicks(L.LightningDataModule):
    """Made-up clicks: a few users, items and shops are in most of them, as in real ones."""

    def __init__(self, batch_size: int = 512, training_rows: int = 1 << 16) -> None:
        super().__init__()
        self.batch_size = batch_size  # the strategy sets it when it is asked to choose
        self.training_rows = training_rows

    def setup(self, stage: str) -> None:
        tastes = torch.Generator().manual_seed(0)
        hidden = [torch.randn(rows, 4, generator=tastes) for rows in TABLES.values()]
        weights = torch.randn(NUMBERS, generator=tastes)
        self.train = self.draw(hidden, weights, self.training_rows, seed=1)
        self.validation = self.draw(hidden, weights, 4096, seed=2)

    def draw(self, hidden: list[Tensor], weights: Tensor, rows: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(rows, NUMBERS, generator=generator)  # (rows, NUMBERS)
        often = torch.rand(rows, len(TABLES), generator=generator) ** 4  # small ones are frequent
        categories = (often * torch.tensor(list(TABLES.values()))).long()  # (rows, tables)
        user, item, *others = (table[ids] for table, ids in zip(hidden, categories.unbind(1), strict=True))
        likes = 3 * (user * item).mean(1) + sum(other[:, 0] for other in others) + 0.5 * numbers @ weights  # (rows,)
        return TensorDataset(numbers, categories, torch.bernoulli(likes.sigmoid(), generator=generator))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=1024)


def memory_limit(model: Recommender, data: Clicks, devices: int) -> str:
    """A limit between what FSDP and what DDP needs, by prediction: a model of this size would fit any machine.

    What the model takes is the same on every machine, unlike what Python and its libraries take.
    """
    if LIMIT_VARIABLE not in os.environ:
        plan = lightning_osdp.plan(
            model, data, hardware="titan-rtx-pcie3", devices=devices, batch_size=data.batch_size, callback=callback()
        )
        needed = {baseline.name: baseline.peak_memory_bytes for baseline in plan.baselines}
        least = needed.get("FSDP per operator", needed["DDP"] // 2)
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        used = psutil.Process().memory_info().rss - parameters + FIRST_STEPS_BYTES
        os.environ[LIMIT_VARIABLE] = str(used + least + (needed["DDP"] - least) // 4)
    return os.environ[LIMIT_VARIABLE]


def callback() -> lightning_osdp.OSDPCallback:
    return lightning_osdp.OSDPCallback(progress_bar=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a recommender under a memory limit.")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--memory-limit", help="per process: 700MiB, auto; default: less than DDP needs, by prediction")
    parser.add_argument("--max-steps", type=int, default=60)
    args = parser.parse_args()
    L.seed_everything(1)
    model, data = Recommender(), Clicks()
    limit = args.memory_limit or memory_limit(model, data, args.devices)
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=lightning_osdp.OSDPStrategy(memory_limit=limit, batch_size=data.batch_size),
        callbacks=[callback()],
        max_steps=args.max_steps,
        val_check_interval=min(args.max_steps, 30),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,  # the plan's table says more
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        plan = trainer.strategy.execution_plan
        print(f"\nvalidation accuracy {trainer.callback_metrics['val_accuracy']:.3f}; how the plan has each operator:")
        for operator in plan.operators:
            modes = " + ".join(sorted({mode.value for mode in operator.slices}))
            print(f"{operator.name:>20}: {modes:<10} {operator.num_parameters:>12,} parameters")


if __name__ == "__main__":
    main()

"""What the tests of Lightning's contract share: small modules, hand-made plans for them, and quiet Trainers."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_osdp import OSDPStrategy
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.modules import trainer
from tests.support.plans import plan_for

RANKS = 2
FEATURES, HIDDEN, CLASSES = 6, 10, 3


class Net(pl.LightningModule):
    """Three layers, told apart by a mixed plan: replicated, gathered once, gathered twice."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.first, self.second, self.last = (
            nn.Linear(FEATURES, HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, CLASSES),
        )
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        if not is_fake(loss):
            self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class ManualOptimization(pl.LightningModule):
    """Comes before another module among the bases of a class, which then steps its one optimizer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_index))
        self.on_gradients()
        optimizer.step()

    def on_gradients(self) -> None:
        """Look at the gradients, or change them, before the optimizer's step."""


def is_fake(tensor: Tensor) -> bool:
    """Whether the step is being traced."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def rows(count: int, seed: int = 0) -> TensorDataset:
    """``world_size`` labelled points."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(points, torch.randint(0, CLASSES, (count,), generator=generator))


def batches(count: int, size: int, seed: int = 0) -> DataLoader[Any]:
    """In order: rank r of N gets rows r, r + N, ... ``world_size`` batches of ``size`` for each rank."""
    data = rows(count * size * RANKS, seed)
    sampler = DistributedSampler(data, shuffle=False) if torch.distributed.is_initialized() else None
    return DataLoader(data, batch_size=size, sampler=sampler)


def build_seeded(module_class: Any, *args: Any, **options: Any) -> Any:
    """An instance with the same first values on every rank and in the test's own process."""
    torch.manual_seed(1)
    return module_class(*args, **options)


def mixed_plan(
    module: pl.LightningModule, batch: Any, batch_size: int, accumulation: int = 1, shift: int = 2, ranks: int = RANKS
) -> ExecutionPlan:
    """A plan that deals out all modes in turn over the operators that can be sharded."""
    return plan_for(module, batch, ranks, "mixed", batch_size, accumulation=accumulation, shift=shift)


def make_planned_trainer(
    folder: str, module: pl.LightningModule, data: Any, *, accumulation: int = 1, shift: int = 2, **options: Any
) -> pl.Trainer:
    """A Trainer with a mixed plan for ``module`` and the batches of ``data``."""
    batch = next(iter(data))
    size = len(batch[0])
    plan = mixed_plan(copy.deepcopy(module), batch, size, accumulation, shift)
    own = {"limit_val_batches": 1.0, "max_steps": -1, "max_epochs": 1}
    own["use_distributed_sampler"] = False  # Lightning's shuffles, which plain training could not follow
    options = own | options
    return trainer(folder, OSDPStrategy(plan=plan), **options)


def train_plain(module: Any, data: Any, epochs: int = 1) -> None:
    """Trains ``module`` in this process as its configure_optimizers says, on the global batches of ``RANKS`` ranks."""
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for batch in global_batches(data):
            optimizer.zero_grad()
            functional.cross_entropy(module(batch[0]), batch[1]).backward()
            optimizer.step()


def global_batches(data: Any) -> list[tuple[Tensor, ...]]:
    """What all ranks together see in one step."""
    size = data.batch_size * RANKS
    return list(zip(*(tensor.split(size) for tensor in data.dataset.tensors), strict=True))

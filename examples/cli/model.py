"""A module and its data, small enough to read at a glance: the class of points in space, told by an MLP."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    """``depth`` hidden layers of ``width``."""

    def __init__(self, features: int = 64, width: int = 1024, depth: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))  # (B, width)
        for layer in self.hidden:
            x = x + F.relu(layer(x))
        return self.last(x)  # (B, classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        points, labels = batch
        loss = F.cross_entropy(self(points), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Points(L.LightningDataModule):
    """Random points; the class is the octant of the first three coordinates."""

    def __init__(self, samples: int = 4096, features: int = 64, batch_size: int = 16) -> None:
        super().__init__()
        self.samples = samples
        self.features = features
        self.batch_size = batch_size  # the strategy sets it when it is asked to choose

    def setup(self, stage: str) -> None:
        points = torch.randn(self.samples, self.features, generator=torch.Generator().manual_seed(0))
        octant = (points[:, :3] > 0).long() @ torch.tensor([4, 2, 1])  # (samples,)
        self.train = TensorDataset(points, octant)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

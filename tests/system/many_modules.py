"""Trains 1,000 small layers under a limit that replicating does not fit: each rank's peak is within it.

    make test-many

Each unit costs some KiB beside its tensors, which count at such numbers. Arguments: layers, width, limit, steps.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy
from lightning_osdp.planning.spec.formatting import format_bytes, parse_memory_limit
from tests.support.modules import trainer
from tests.support.ranks import run_ranks


class Many(pl.LightningModule):
    """One small layer after the other, with Adam."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(512, self.width)), batch_size=4)


def train(rank: int, ranks: int, layers: int, width: int, limit: str, steps: int) -> tuple[int, int, int]:
    """Return the peak, the predicted peak and the number of sharded operators."""
    with tempfile.TemporaryDirectory() as folder:
        strategy = OSDPStrategy(memory_limit=limit, batch_size="keep", cache=f"{folder}/cache")
        made = trainer(folder, strategy, max_steps=steps)
        made.fit(Many(layers, width))
    assert strategy._monitor is not None
    plan = strategy.execution_plan
    assert plan is not None
    sharded = sum(operator.slices[0] != "dp" for operator in plan.operators)
    return strategy._monitor.peak_memory_bytes, plan.predicted.peak_memory_bytes, sharded


def main(layers: int = 1000, width: int = 256, limit: str = "1000MiB", steps: int = 25) -> int:
    """Return 0 if the peak of each rank is within the limit."""
    limit_bytes, _ = parse_memory_limit(limit)
    assert limit_bytes is not None
    found = run_ranks(train, 2, layers, width, limit, steps, timeout_s=1800, collective_timeout=timedelta(minutes=20))
    for rank, (peak, predicted, sharded) in enumerate(found):
        print(
            f"rank {rank}: {sharded} of {layers} layers sharded, peak {format_bytes(peak)} of "
            f"{format_bytes(limit_bytes)} ({peak / limit_bytes:.1%}), predicted {format_bytes(predicted)}"
        )
    return int(any(peak > limit_bytes for peak, _, _ in found))


if __name__ == "__main__":
    sys.exit(main(*(kind(word) for kind, word in zip((int, int, str, int), sys.argv[1:], strict=False))))

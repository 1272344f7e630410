"""What evaluation and saving take between steps, predicted beside measured."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_osdp import OSDPStrategy, OSDPWarning
from lightning_osdp.backend.cpu.malloc import configure_cpu_allocator
from lightning_osdp.backend.memory import memory_in_use, peak_memory, reset_peak
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
MIB = 1 << 20
WIDTH, WIDER = 1024, 4096
EVALUATED = 1024
"""Samples in a batch of evaluation, many more than in one of training."""

ROOM_BYTES = 240 * MIB
"""For the model, which takes 256 MiB replicated and half of that sharded, and for what measuring leaves behind."""

SLACK = 24 * MIB
"""Of what is predicted, so much is kept for first steps and for kernels of evaluation, which may leave less behind."""


class Wide(pl.LightningModule):
    """Four large matrices of 16 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.again, self.head = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(x)))
        return self.head(torch.relu(self.again(x)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.training_step(batch, index)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), foreach=False)


class Peaks(pl.Callback):
    """The peak of each validation, and of the steps of each epoch."""

    def __init__(self) -> None:
        self.evaluation: list[int] = []
        self.steps: list[int] = []

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reset_peak(CPU)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps.append(peak_memory(CPU))
        reset_peak(CPU)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.evaluation.append(peak_memory(CPU))


class Measured(OSDPStrategy):
    """Notes the peak of each checkpoint that it saves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.saving: list[int] = []

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        reset_peak(CPU)
        super().save_checkpoint(*args, **kwargs)
        self.saving.append(peak_memory(CPU))


def random_loader(count: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(count, WIDTH)), batch_size=batch_size)


def fit_and_measure_peaks(rank: int, ranks: int, folder: str, save_format: str) -> dict[str, Any]:
    configure_cpu_allocator()
    torch.manual_seed(1)
    module, peaks = Wide(), Peaks()
    limit = memory_in_use(CPU) - sum(p.nbytes for p in module.parameters()) + ROOM_BYTES
    strategy = Measured(batch_size=2, memory_limit=limit, cache="", trial_steps=False, save_format=save_format)
    options = {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 1.0, "enable_checkpointing": True}
    made = trainer(folder, strategy, callbacks=[peaks], **options)
    made.fit(module, random_loader(8, 2), random_loader(2 * EVALUATED, EVALUATED))
    plan = strategy.execution_plan
    assert plan is not None
    return {
        "predicted": plan.predicted,
        "limit": plan.memory_limit_bytes,
        "modes": [op.slices[0].value for op in plan.operators],
        "saving": strategy.saving[-1],
        "evaluation": peaks.evaluation[-1],
        "steps": peaks.steps[-1],
    }


@pytest.mark.parametrize("save_format", ["full", "sharded"])
def test_predicted_memory_covers_peaks_of_evaluation_steps_and_saving(tmp_path: Path, save_format: str) -> None:
    for found in run_ranks(fit_and_measure_peaks, 2, str(tmp_path), save_format):
        predicted = found["predicted"]
        assert "dp" not in found["modes"]
        assert predicted.max_memory_bytes <= found["limit"]
        assert -SLACK < found["evaluation"] - predicted.evaluation_memory_bytes <= 0
        assert -SLACK < found["steps"] - predicted.peak_memory_bytes <= 0  # after what evaluation has left behind
        if save_format == "full":
            assert -SLACK < found["saving"] - predicted.saving_memory_bytes <= 0
        else:
            assert predicted.saving_memory_bytes == 0
            assert found["saving"] < predicted.max_memory_bytes


class PeakOfAveraging(EMAWeightAveraging):
    """Notes the peak of each update of the averages."""

    def __init__(self) -> None:
        super().__init__(decay=0.9)
        self.peaks: list[int] = []

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        reset_peak(CPU)
        super().on_train_batch_end(*args, **kwargs)
        self.peaks.append(peak_memory(CPU))


def average_and_measure_peaks(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    configure_cpu_allocator()
    torch.manual_seed(1)
    module, averaging = Wide(), PeakOfAveraging()
    limit = memory_in_use(CPU) + ROOM_BYTES  # the copy takes as much as the module
    strategy = OSDPStrategy(batch_size=2, memory_limit=limit, cache="", trial_steps=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(folder, strategy, callbacks=[averaging]).fit(module, random_loader(16, 2))
    plan = strategy.execution_plan
    assert plan is not None
    return {
        "predicted": plan.predicted,
        "limit": plan.memory_limit_bytes,
        "modes": [op.slices[0].value for op in plan.operators],
        "averaging": max(averaging.peaks),
        "warnings": [str(each.message) for each in caught if issubclass(each.category, OSDPWarning)],
    }


def test_predicted_memory_covers_copy_of_averages_and_their_update(tmp_path: Path) -> None:
    for found in run_ranks(average_and_measure_peaks, 2, str(tmp_path)):
        predicted = found["predicted"]
        assert "dp" not in found["modes"]
        assert predicted.max_memory_bytes <= found["limit"]
        assert -40 * MIB < found["averaging"] - predicted.saving_memory_bytes <= 0
        assert not any("WeightAveraging" in text for text in found["warnings"])

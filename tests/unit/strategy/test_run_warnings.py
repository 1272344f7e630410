"""Batches and peaks beyond what was planned for are said with their figures, once each."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_osdp.autotune.pipeline import profile_model
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.strategy.dataloader import read_data
from lightning_osdp.strategy.run_warnings import RunWarnings
from tests.support.models import hand_made_plan
from tests.support.traced_models import Regression

CPU = torch.device("cpu")
MIB = 1 << 20


def make_warnings() -> RunWarnings:
    plan = hand_made_plan({}, 2, batch_size=4).model_copy(update={"memory_limit_bytes": 520 * MIB})
    predicted = plan.predicted.model_copy(update={"peak_memory_bytes": 470 * MIB})
    return RunWarnings(plan.model_copy(update={"predicted": predicted}), bytes_per_sample=1024.0, rank=1)


def test_larger_batch_warns_with_both_sizes_once_per_size() -> None:
    run = make_warnings()
    with pytest.warns(OSDPWarning, match=r"rank 1 got a batch of 8(.0)? KiB, 2 times the 4(.0)? KiB .* sample_batch"):
        run.on_batch({"a": torch.zeros(4, 512)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on_batch([torch.zeros(4, 256)])
        run.on_batch({"a": torch.zeros(4, 512)})


def test_peak_above_the_limit_warns_with_limit_and_prediction_once() -> None:
    run = make_warnings()
    text = r"took 775(.0)? MiB of memory at its peak, above the limit of 520(.0)? MiB \(predicted: 470(.0)? MiB\)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on_step_end(520 * MIB)
    with pytest.warns(OSDPWarning, match=text):
        run.on_step_end(775 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.on_step_end(775 * MIB)


class Lengths(LightningModule):
    """Rows of changing length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 32), nn.Linear(32, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch.unsqueeze(-1)).relu()).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batches_of_changing_length_plan_memory_by_the_largest_and_time_by_the_typical() -> None:
    lengths = [8, 9, 10, 11, 12, 13, 14, 200]
    rows = [torch.zeros(length) for length in lengths for _ in range(4)]
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    trainer, module = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False), Lengths()
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
    data, batch, batch_size = read_data(trainer, module, 8)
    assert (batch.shape, data.typical_batch.shape, batch_size) == ((4, 200), (4, 12), 4)
    context = TrialContext(module, data.typical_batch, 4, CPU, largest_batch=batch)
    found = profile_model(context)
    typical, largest = (profile_model(TrialContext(module, each, 4, CPU)) for each in (data.typical_batch, batch))
    assert found.model_profile.moments == largest.model_profile.moments
    assert found.model_profile.flops_per_sample == typical.model_profile.flops_per_sample
    assert found.kernels == typical.kernels


def test_batches_of_other_steps_plan_all_by_the_largest() -> None:
    class Branching(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch[:, 0], batch_idx)
            return loss if batch.shape[1] < 4 else loss + self.net(batch).square().mean()

    module = Branching(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    small, large = torch.zeros(4, 2, 8), torch.zeros(4, 8, 8)
    found = profile_model(TrialContext(module, small, 4, CPU, largest_batch=large))
    assert found.model_profile == profile_model(TrialContext(module, large, 4, CPU)).model_profile

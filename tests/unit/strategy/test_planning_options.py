"""What the arguments of OSDPStrategy make of a device's memory, and of batches that differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from lightning_osdp.autotune.pipeline import profile_model
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.backend import memory
from lightning_osdp.profiling.tracing import profile_store
from lightning_osdp.strategy.planning_options import PlanningOptions
from tests.support.traced_models import Regression

CPU = torch.device("cpu")


@pytest.mark.parametrize(("argument", "expected"), [("auto", 8 << 30), ("50%", 4 << 30), ("1GiB", 1 << 30), (77, 77)])
def test_limit_on_device_is_the_amount_or_the_share_that_the_user_allows(
    argument: int | str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda *_: 8 << 30)
    assert PlanningOptions(memory_limit=argument).limit_on(CPU, 2).current() == expected


def test_end_of_a_run_may_use_the_share_that_planning_may() -> None:
    strategy = OSDPStrategy(memory_limit="50%", parallel_devices=[CPU], cluster_environment=LightningEnvironment())
    assert strategy._memory_limit() == memory.MemoryLimit(CPU, 1, share=0.5)


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
    _, context = PlanningOptions(sample_batches=8).read_step(trainer, CPU)
    assert (context.largest_batch.shape, context.batch.shape, context.batch_size) == ((4, 200), (4, 12), 4)
    found = profile_model(context)
    typical, largest = (
        profile_model(TrialContext(module, each, 4, CPU)) for each in (context.batch, context.largest_batch)
    )
    assert found.model_profile.moments == largest.model_profile.moments
    assert found.model_profile.flops_per_sample == typical.model_profile.flops_per_sample
    assert found.kernels == typical.kernels


def test_largest_batch_of_a_known_step_is_not_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, lengths = Lengths(), (12, 200)
    typical, largest = (torch.zeros(4, length) for length in lengths)
    context = TrialContext(module, typical, 4, CPU, largest_batch=largest)
    first = profile_model(context, cache=tmp_path)
    assert len(list(tmp_path.glob("step-*.json"))) == 2
    assert first.model_profile == profile_model(context).model_profile
    known = profile_model(context, cache=tmp_path)
    monkeypatch.setattr(profile_store, "start_fake_trace", lambda *_: pytest.fail("it is traced again"))
    again = profile_model(context, cache=tmp_path, key=known.key)
    assert again.model_profile == known.model_profile == first.model_profile
    assert again.key == known.key


def test_batches_of_other_steps_plan_all_by_the_largest() -> None:
    class Branching(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch[:, 0], batch_idx)
            return loss if batch.shape[1] < 4 else loss + self.net(batch).square().mean()

    module = Branching(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    small, large = torch.zeros(4, 2, 8), torch.zeros(4, 8, 8)
    found = profile_model(TrialContext(module, small, 4, CPU, largest_batch=large))
    assert found.model_profile == profile_model(TrialContext(module, large, 4, CPU)).model_profile

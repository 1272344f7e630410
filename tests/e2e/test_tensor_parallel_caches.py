"""A model of transformers with its default configuration and all that can be cut, through the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_osdp import OSDPCallback, OSDPStrategy
from tests.support import zoo
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

STEPS = 3


class Cached(pl.LightningModule):
    """Gives the whole output of the model, the cache included, as its step's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.with_cache(zoo.gpt2()).net
        self.losses: list[float] = []
        self.lengths: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.lengths.append(self.model(input_ids=batch).past_key_values.get_seq_length())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 96, (12, 12), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(ids, batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def fit(folder: str, strategy: Any, *callbacks: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(1)
    module = Cached()
    run = trainer(folder, strategy, max_steps=STEPS, limit_val_batches=1, callbacks=list(callbacks))
    run.fit(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "lengths": module.lengths, "state": state}, run


def run_both(rank: int, ranks: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """What DDP and OSDP have, and the scopes of the plan."""
    expected, _ = fit(folder, DDPStrategy())
    strategy = OSDPStrategy(cache=None, batch_size="keep", trial_steps=False)
    found, run = fit(folder, strategy, OSDPCallback(tensor_parallel={"*.attn.*": 2}))
    return expected, found, set(run.strategy.execution_plan.tensor_scopes)


def test_transformer_with_its_default_cache_trains_with_attentions_cut(tmp_path: Path) -> None:
    for expected, found, scopes in run_ranks(run_both, 2, str(tmp_path)):
        assert {f"model.transformer.h.{block}.attn" for block in range(2)} <= scopes
        assert found["lengths"] == expected["lengths"] != []
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-5, atol=1e-6)

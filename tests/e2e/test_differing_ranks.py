"""Ranks that run the model differently in callbacks and in evaluation: the right values, or an error on all of them."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_osdp import OSDPStrategy
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import RankError, run_ranks

WIDTH, BATCH = 12, 4


class Model(pl.LightningModule):
    """Rank ``who`` runs it once more where ``where`` says, and each in validation as often as ``runs`` says."""

    def __init__(self, where: str = "", who: int = 0, runs: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.where, self.who, self.runs, self.outputs = where, who, runs, []

    def run_again(self, x: Tensor) -> Tensor:
        for _ in range(self.runs[int(os.environ["RANK"])]):
            x = self.layers(x)
        return x

    def run_alone(self, where: str) -> None:
        is_run = where == self.where and self.trainer.global_rank == self.who and not self.trainer.sanity_checking
        if is_run and self.trainer.global_step > 1:
            with torch.no_grad():
                self.layers(torch.ones(1, WIDTH))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.run_alone("a batch's end")

    def validation_step(self, batch: Any, batch_index: int) -> None:
        x = self.run_again(batch[0])
        self.outputs.append((batch[0], x))
        self.log("mean", x.mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.run_alone("an epoch's end")

    def on_train_end(self) -> None:
        self.run_alone("training's end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8 * BATCH, WIDTH)), batch_size=BATCH)

    val_dataloader = train_dataloader


class Writer(pl.LightningModule):
    """Generates as many tokens in validation as its rank says."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=41, n_positions=32, n_embd=16, n_layer=2, n_head=2))
        self.model.generation_config.eos_token_id = None
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.outputs.append((batch[0], self.run_again(batch[0])))

    def run_again(self, x: Tensor) -> Tensor:
        options = {"max_new_tokens": 3 + 4 * int(os.environ["RANK"]), "do_sample": False, "pad_token_id": 0}
        return self.model.generate(x[:, :4], **options)

    configure_optimizers = Model.configure_optimizers

    def train_dataloader(self) -> Any:
        rows = torch.randint(0, 41, (8 * BATCH, 8), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(rows), batch_size=BATCH)

    val_dataloader = train_dataloader


RUNS = [(1, 3), (2, 0)]
MODES = ("zdp", "zdp2")
CASES = [(mode, what) for mode in MODES for what in (*RUNS, "generate")]


def fit(module: pl.LightningModule, mode: str) -> pl.Trainer:
    batch = [next(iter(module.train_dataloader()))[0]]
    strategy = OSDPStrategy(plan=plan_for(module, batch, 2, mode, BATCH))
    with tempfile.TemporaryDirectory() as folder:
        fitting = trainer(folder, strategy, max_steps=4, limit_val_batches=2, val_check_interval=2)
        fitting.fit(module)
    return fitting


def evaluate(rank: int, ranks: int) -> dict[Any, bool]:
    """Whether what the last validation computed is what one process computes with the final weights."""
    is_right = {}
    for mode, what in CASES:
        torch.manual_seed(1)
        module, plain = (Writer(), Writer()) if what == "generate" else (Model(runs=what), Model(runs=what))
        fitting = fit(module, mode)
        with fitting.strategy.summon_full_params():
            plain.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
        with torch.no_grad():
            plain.eval()
            is_right[mode, what] = all(torch.allclose(plain.run_again(x), y) for x, y in module.outputs[-2:])
    return is_right


@pytest.fixture(scope="module")
def evaluated() -> list[dict[Any, bool]]:
    return run_ranks(evaluate, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_run_the_model_unequally_often_in_validation_get_right_values(
    evaluated: list[dict[Any, bool]], case: Any
) -> None:
    assert [is_right[case] for is_right in evaluated] == [True, True]


def run_alone(rank: int, ranks: int, where: str, who: int) -> None:
    fit(Model(where, who), "zdp")


@pytest.mark.parametrize(("where", "who"), [("a batch's end", 0), ("an epoch's end", 1)])
def test_rank_that_runs_the_model_alone_is_an_error_on_all_ranks(where: str, who: int) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(run_alone, 2, where, who, timeout_s=200)
    for text in re.split(r"rank \d \(exit code", str(raised.value))[1:]:
        assert f"rank {who} runs layers.0 without gradients, after" in text
        assert "run the model on every rank equally often" in text

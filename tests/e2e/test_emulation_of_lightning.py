"""What Lightning itself, and users through it, do between ranks, in a cluster that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_osdp.emulation import EmulatedCluster
from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.strategy.callback import OSDPCallback
from lightning_osdp.strategy.osdp import OSDPStrategy
from tests.support.plans import plan_for

RANKS, WIDTH, BATCH_SIZE, SAMPLES = 16, 32, 4, 512
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.mean = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("two", torch.tensor(2.0), sync_dist=True)
        self.log("sum of two", torch.tensor(2.0), sync_dist=True, reduce_fx="sum")
        self.mean.update(torch.tensor(3.0))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validated", torch.tensor(5.0), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Asks(pl.Callback):
    """Calls what users call of a strategy, once."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.found:
            return
        strategy, found = trainer.strategy, self.found
        strategy.barrier("here")
        found["mean"] = float(strategy.reduce(torch.tensor(3.0), reduce_op="mean"))
        found["sum"] = float(strategy.reduce(torch.tensor(3.0), reduce_op="sum"))
        found["gathered"] = strategy.all_gather(torch.ones(2)).shape
        found["gathered by the module"] = pl_module.all_gather({"a": torch.ones(3)}, sync_grads=True)["a"].shape
        found["broadcast"] = strategy.broadcast({"a": [1]})
        found["all agree"] = strategy.reduce_boolean_decision(True), strategy.reduce_boolean_decision(False)
        found["any agrees"] = strategy.reduce_boolean_decision(False, all=False)
        found["ranks"] = trainer.world_size, trainer.global_rank, trainer.num_nodes
        sampler: Any = trainer.train_dataloader.sampler  # type: ignore[union-attr]
        found["sampler"] = sampler.num_replicas, sampler.rank, len(trainer.train_dataloader)  # type: ignore[arg-type]


EXPECTED = {
    "mean": 3.0,
    "sum": 3.0 * RANKS,
    "gathered": (RANKS, 2),
    "gathered by the module": (RANKS, 3),
    "broadcast": {"a": [1]},
    "all agree": (True, False),
    "any agrees": False,
    "ranks": (RANKS, 0, 1),
    "sampler": (RANKS, 0, SAMPLES // RANKS // BATCH_SIZE),
    "logged two": 2.0,
    "logged sum of two": 2.0 * RANKS,
    "logged metric": 3.0,
    "logged validated": 5.0,
    "steps": SAMPLES // RANKS // BATCH_SIZE,
}


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(SAMPLES, WIDTH)), batch_size=BATCH_SIZE)


def osdp() -> OSDPStrategy:
    return OSDPStrategy(plan=plan_for(Net(), next(iter(data())), RANKS, "mixed", BATCH_SIZE))


@pytest.fixture(scope="module", params=[osdp, DDPStrategy], ids=["osdp", "ddp"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    asks = Asks()
    try:
        environment = EmulatedCluster("2xa100-80gb-nvlink+200gbit", RANKS)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            strategy=request.param(),
            plugins=[environment],
            callbacks=[asks, EarlyStopping("validated", mode="max")],
            gradient_clip_val=1.0,
            num_sanity_val_steps=1,
            limit_val_batches=2,
            **QUIET,
        )
        trainer.fit(Net(), data(), data())
    finally:
        dist.destroy_process_group()
    logged = {f"logged {name}": float(value) for name, value in trainer.callback_metrics.items()}
    return asks.found | logged | {"steps": trainer.global_step}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_lightning_asks_of_ranks_is_what_equal_ranks_would_say(found: dict[str, Any], name: str) -> None:
    assert found[name] == EXPECTED[name]


@pytest.mark.parametrize(
    "make", [lambda: OSDPStrategy(batch_size=BATCH_SIZE, cache=""), DDPStrategy], ids=["osdp", "ddp"]
)
def test_cluster_of_one_rank_trains_without_collectives_that_take_time(make: Callable[[], Any]) -> None:
    try:
        environment = EmulatedCluster("a100-80gb-nvlink", 1)
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=2, strategy=make(), plugins=[environment], **QUIET, limit_val_batches=0
        )
        trainer.fit(Net(), data(), data())
        assert (trainer.global_step, trainer.world_size) == (2, 1)
    finally:
        dist.destroy_process_group()


def test_links_are_known_and_not_measured_and_a_plan_is_not_kept_for_other_ones(tmp_path: Any) -> None:
    plans = {}
    for hardware in ("a100-80gb-nvlink", "titan-rtx-pcie3"):
        try:
            environment = EmulatedCluster(hardware, 8)
            strategy = OSDPStrategy(batch_size=BATCH_SIZE, cache=str(tmp_path), trial_steps=False)
            options = {
                "accelerator": "cpu",
                "max_steps": 1,
                "limit_val_batches": 0,
                "strategy": strategy,
                "plugins": [environment],
            }
            pl.Trainer(**options, callbacks=[OSDPCallback(progress_bar=False)], **QUIET).fit(Net(), data(), data())
            plans[hardware] = strategy.execution_plan
        finally:
            dist.destroy_process_group()
    for hardware, plan in plans.items():
        described = resolve_cluster(hardware, 8).link
        assert plan is not None
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            fit = getattr(described, name)
            assert getattr(plan.cluster.link, name) == fit.model_copy(update={"overlap_fraction": 1.0})

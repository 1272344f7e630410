"""Features of Lightning's Trainer, with all operators ``zdp``, give what they give under DDP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_osdp import OSDPCallback, OSDPStrategy
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

WIDTH, CLASSES = 32, 4


def rows(count: int = 32, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, WIDTH, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    )


class Net(pl.LightningModule):
    """A small classifier with every loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lr = 0.05
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    @override
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    @override
    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch[0])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=4)

    @override
    def val_dataloader(self) -> Any:
        return DataLoader(rows(16, 1), batch_size=4)


class Contrast(Net):
    """A loss over the outputs of all ranks."""

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        own = functional.normalize(self(batch[0]), dim=-1)
        every = self.all_gather(own, sync_grads=True).reshape(-1, CLASSES)
        return (own @ every.T).logsumexp(-1).mean()


class Exchanging(Net):
    """Collectives of its own; the cache knows steps of such modules, which the first rank traces by itself."""

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        dist.barrier()
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, self.global_rank)
        total = torch.tensor([1.0 + self.global_rank])
        dist.all_reduce(total)
        return super().training_step(batch, index) * total * (1 + sum(ranks))


class ByRows(Net):
    """Weighs its loss by the number of all rows."""

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        loader: Any = self.trainer.train_dataloader
        return super().training_step(batch, index) * 4 * len(loader) / len(loader.dataset)


class Packed(Net):
    """Sequences of other lengths on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        lengths, steps = batch[1] + 1, torch.arange(1, CLASSES + 1)[None, :, None]
        packed = pack_padded_sequence(batch[0].unsqueeze(1) * steps, lengths, batch_first=True, enforce_sorted=False)
        outputs, (last, _) = self.rnn(packed)
        first = pad_packed_sequence(outputs, batch_first=True)[0][:, 0]
        return functional.cross_entropy(self(last[-1] + first), batch[1])


class Carried(Net):
    """A state that is carried from batch to batch, with as many rows as each has."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.state = torch.zeros(1, 4, WIDTH)

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        outputs, state = self.rnn(batch[0].unsqueeze(1), self.state.to(self.device))
        self.state = state.detach()
        return functional.cross_entropy(self(outputs[:, -1]), batch[1])


class EachEpoch(Net):
    """Other data in each epoch."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(rows(16, self.current_epoch), batch_size=4)


class Writer(BasePredictionWriter):
    """Keeps what it would write."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.written: Any = None

    @override
    def write_on_epoch_end(self, *args: Any) -> None:
        self.written = [torch.cat(args[2]), torch.tensor(args[3])]  # outputs, and the rows that they are of


Make = Callable[..., pl.Trainer]


def fit(make: Make, module: pl.LightningModule, **options: Any) -> Any:
    made = make(**options)
    made.fit(module)
    return made.global_step, unsharded(made, module), float(made.callback_metrics.get("val", 0.0))


def unsharded(made: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    states = made.strategy.lightning_module_state_dict() if made.is_global_zero else {}
    return {name: value.clone() for name, value in states.items()}


def find_learning_rate(make: Make) -> Any:
    module, made = Net(), make()
    found = Tuner(made).lr_find(module, num_training=8)
    assert found is not None
    made.fit(module)
    return found.results["loss"], module.lr, unsharded(made, module)


def predict(make: Make) -> Any:
    module, writer = Net(), Writer()
    made = make(callbacks=[writer])
    made.fit(module)
    made.predict(module, DataLoader(rows(16, 1), batch_size=4), return_predictions=False)
    return writer.written


FEATURES: dict[str, Callable[[Make], Any]] = {
    "lr_find": find_learning_rate,
    "prediction writer": predict,
    "fast_dev_run": lambda make: fit(make, Net(), fast_dev_run=2),
    "overfit_batches": lambda make: fit(make, Net(), overfit_batches=2, max_epochs=3),
    "limited batches": lambda make: fit(make, Net(), limit_train_batches=0.5, val_check_interval=1, max_epochs=2),
    "detect_anomaly": lambda make: fit(make, Net(), detect_anomaly=True),
    "inference_mode": lambda make: fit(make, Net(), inference_mode=False),
    "reloaded data": lambda make: fit(make, EachEpoch(), reload_dataloaders_every_n_epochs=1, max_epochs=3),
    "accumulation by epoch": lambda make: fit(
        make, Net(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=3
    ),
    "all_gather with gradients": lambda make: fit(make, Contrast()),
    "collectives of its own": lambda make: fit(make, Exchanging(), modes="auto"),
    "reads of the loader": lambda make: fit(make, ByRows()),
    "packed sequences": lambda make: fit(make, Packed()),
    "carried state": lambda make: fit(make, Carried()),
    "carried state, any batch size": lambda make: fit(make, Carried(), batch_size=None),
}


def use_features(rank: int, ranks: int, folder: str) -> dict[tuple[str, str], Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def make(way: str, **options: Any) -> pl.Trainer:
        callbacks: list[Callback] = [*options.pop("callbacks", [])]
        strategy: Any = DDPStrategy()
        batch_size, modes = options.pop("batch_size", "keep"), options.pop("modes", {"net.*": "zdp"})
        if way == "zdp":
            strategy = OSDPStrategy(batch_size=batch_size, trial_steps=False, cache=f"{folder}/cache")
            callbacks.append(OSDPCallback(modes=modes))
        options = {"max_steps": -1, "max_epochs": 1, "limit_val_batches": 1.0} | options
        return trainer(folder, strategy, callbacks=callbacks, **options)

    return {
        (name, way): use(lambda way=way, **options: make(way, **options))  # type: ignore[misc]
        for name, use in FEATURES.items()
        for way in ("ddp", "zdp")
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    return run_ranks(use_features, 2, str(tmp_path_factory.mktemp("features")))


@pytest.mark.parametrize("name", FEATURES)
def test_feature_of_trainer_gives_what_it_gives_under_ddp(results: list[dict[tuple[str, str], Any]], name: str) -> None:
    for found in results:
        torch.testing.assert_close(found[name, "zdp"], found[name, "ddp"], rtol=1e-5, atol=1e-6)

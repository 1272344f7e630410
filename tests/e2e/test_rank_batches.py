"""Ranks whose loaders give batches of other sizes plan with the largest of all, and train as under DDP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_osdp import ConfigurationError, OSDPCallback, OSDPStrategy
from tests.support.models import some_cluster
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

WIDTH, BATCH, STEPS = 256, 4, 3


class Sequences(IterableDataset[Tensor]):
    """Sequences of one length: those of a rank, as where each rank reads files of its own."""

    def __init__(self, length: int, seed: int, batch_size: int = BATCH) -> None:
        self.length, self.seed, self.batch_size = length, seed, batch_size

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        yield from torch.randn(self.batch_size * STEPS, self.length, WIDTH, generator=generator)


class Unsendable(list[Tensor]):
    """A batch of a class of the user's that can't be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no pickle of this")


class Model(pl.LightningModule):
    def __init__(self, length: int, batch_class: type = list) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.length, self.batch_class = length, batch_class
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        def collate(rows: list[Tensor]) -> Any:
            return self.batch_class([torch.stack(rows)])

        return DataLoader(Sequences(self.length, self.global_rank), batch_size=BATCH, collate_fn=collate)


class OwnBatchSize(Model):
    """Each rank's loader has a batch size of its own."""

    def train_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return DataLoader(Sequences(self.length, rank, BATCH - rank), batch_size=BATCH - rank)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if not isinstance(batch, torch._subclasses.FakeTensor):
            self.batch_sizes = [*getattr(self, "batch_sizes", []), len(batch)]
        return super().training_step([batch], batch_index)


def fit_twice(folder: str, modes: str, batch_size: Any) -> tuple[list[int], dict[str, Tensor]]:
    """Fit a module in two runs, and return the batch sizes of this rank and the weights."""
    module = OwnBatchSize(8)
    for _ in range(2):
        strategy: Any = "ddp"
        if modes:
            options: dict[str, Any] = {"trial_steps": False, "cluster": some_cluster(2), "cache": ""}
            strategy = OSDPStrategy(batch_size=batch_size, memory_limit="900MiB", **options)
        callbacks = [OSDPCallback(modes=modes)] if modes else []
        made = trainer(folder, strategy, max_steps=STEPS, callbacks=callbacks)
        made.fit(module, module.train_dataloader())
    return module.batch_sizes, module.state_dict()


def fit(folder: str, length: int, modes: str, batch_class: type = list) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Fit, and return the problem that was solved, the weights and our warnings."""
    strategy: Any = "ddp"
    if modes:
        options = {"trial_steps": False, "replan": "on_drift", "cluster": some_cluster(2), "cache": ""}
        strategy = OSDPStrategy(batch_size="keep", memory_limit="900MiB", **options)
    module = Model(length, batch_class)
    callbacks = [OSDPCallback(modes=modes)] if modes else []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = trainer(folder, strategy, max_steps=STEPS, callbacks=callbacks)
        made.fit(module)
    problem = made.strategy._planning_result.problem if modes else None
    return problem, module.state_dict(), [str(each.message) for each in told]


class Rows(Model):
    """Each rank has a data set of its own, of another length."""

    def train_dataloader(self) -> Any:
        rows = 48 if self.global_rank == 0 else 12
        self.batch_size = getattr(self, "batch_size", 2)
        return DataLoader([torch.ones(WIDTH) for _ in range(rows)], batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.layers(batch).square().mean()


def find_bound(folder: str) -> int:
    """Return the largest batch size that is searched."""
    strategy = OSDPStrategy(
        memory_limit="900MiB", trial_steps=False, cluster=some_cluster(2), cache="", min_steps_per_epoch=1
    )
    made = trainer(folder, strategy, max_steps=1, use_distributed_sampler=False)
    module = Rows(1)
    module.batch_size = 2
    with pytest.raises(ConfigurationError, match="the number of training batches differs"):
        made.fit(module)
    plan = strategy.execution_plan
    assert plan is not None
    assert plan.search_stop is not None
    return plan.search_stop.batch_size


def fit_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    short_and_long = (8, 64)[rank]
    found: dict[str, Any] = {"ddp": fit(folder, short_and_long, "")}
    for modes in ("zdp", "zdp2", "dp"):
        found[modes] = fit(folder, short_and_long, modes)
    found["all long"], found["all short"] = fit(folder, 64, "dp"), fit(folder, 8, "dp")
    found["unsendable"] = fit(folder, short_and_long, "dp", Unsendable)
    found["bound"] = find_bound(folder)
    found["kept ddp"], found["kept zdp"] = (fit_twice(folder, modes, "keep") for modes in ("", "zdp"))
    found["fixed"] = fit_twice(folder, "zdp", BATCH)[0]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return run_ranks(fit_all, 2, str(tmp_path_factory.mktemp("batches")))


def test_rank_with_longest_sequences_decides_memory_of_all(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        planned, longest, shortest = (found[name][0].model for name in ("dp", "all long", "all short"))
        assert [each.live for each in planned.moments] == [each.live for each in longest.moments]
        assert max(each.live.value_at(BATCH) for each in planned.moments) > 4 * max(
            each.live.value_at(BATCH) for each in shortest.moments
        )


def test_batch_of_the_longest_sequences_is_none_larger_than_planned(runs: list[dict[str, Any]]) -> None:
    assert not [text for found in runs for text in found["dp"][2] if "got a batch of" in text]


@pytest.mark.parametrize("modes", ["zdp", "zdp2", "dp"])
def test_ranks_with_sequences_of_other_length_train_as_under_ddp(runs: list[dict[str, Any]], modes: str) -> None:
    for found in runs:
        torch.testing.assert_close(found[modes][1], found["ddp"][1], rtol=1e-5, atol=1e-6)


def test_batch_that_cannot_be_sent_is_told_and_each_rank_plans_with_its_own(runs: list[dict[str, Any]]) -> None:
    told = [text for text in runs[0]["unsendable"][2] if "can't be sent to the other ranks" in text]
    assert len(told) == 1
    assert "TypeError: no pickle of this" in told[0]
    assert "sample_batch as large as any" in told[0]
    for found in runs:
        torch.testing.assert_close(found["unsendable"][1], found["ddp"][1], rtol=1e-5, atol=1e-6)


def test_rank_with_least_data_bounds_the_search(runs: list[dict[str, Any]]) -> None:
    assert [found["bound"] for found in runs] == [12, 12]


def test_ranks_keep_batch_sizes_of_their_own_and_train_as_under_ddp(runs: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(runs):
        assert found["kept zdp"][0] == found["kept ddp"][0] == [BATCH - rank] * 2 * STEPS
        torch.testing.assert_close(found["kept zdp"][1], found["kept ddp"][1], rtol=1e-5, atol=1e-6)


def test_batch_size_that_one_rank_has_already_is_set_on_the_other(runs: list[dict[str, Any]]) -> None:
    assert all(found["fixed"][:2] == [BATCH, BATCH] for found in runs)

"""Loaders made anew with another batch size are what they were."""

from __future__ import annotations

import itertools
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_osdp import ConfigurationError
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy
from lightning_osdp.strategy.dataloader import TrainData, batch_bytes, read_data
from tests.support.modules import GPTModule

ROWS = TensorDataset(torch.arange(12))


def train_data(loader: Any) -> TrainData:
    trainer, module = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False), GPTModule()
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
    return TrainData(trainer, module)


def resize(loader: Any, batch_size: int) -> Any:
    data = train_data(loader)
    assert data.fixed_batch_size_reason() == ""
    data.set_batch_size(batch_size)
    return data._trainer.fit_loop._data_source.dataloader()


class Doubled(DataLoader[Any]):
    """A loader with an argument and a property of its own."""

    def __init__(self, dataset: Any, factor: int = 2, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.factor = factor
        self.note = "default"

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        for (batch,) in super().__iter__():
            yield self.factor * batch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


def test_resized_loader_has_all_options_of_the_given_one() -> None:
    options = {
        "num_workers": 1,
        "in_order": False,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "drop_last": True,
        "timeout": 5,
        "generator": torch.Generator(),
        "worker_init_fn": print,
        "collate_fn": list,
        "multiprocessing_context": "fork",
    }
    made = DataLoader(ROWS, batch_size=2, **options)  # type: ignore[arg-type]
    found = resize(made, 5)
    assert (type(found), found.batch_size, found.dataset) == (DataLoader, 5, ROWS)
    for name in (*options, "pin_memory"):
        assert getattr(found, name) == getattr(made, name), name


def test_resized_loader_keeps_sampler_and_order() -> None:
    sampler = WeightedRandomSampler([1.0] * 12, 12)
    assert resize(DataLoader(ROWS, batch_size=2, sampler=sampler), 4).sampler is sampler
    plain = resize(DataLoader(ROWS, batch_size=2), 5)
    assert [batch.tolist() for (batch,) in plain] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    shuffled = resize(DataLoader(ROWS, batch_size=2, shuffle=True), 6)
    assert sorted(itertools.chain(*(batch.tolist() for (batch,) in shuffled))) == list(range(12))


def test_resized_loader_of_a_class_of_its_own_keeps_class_and_arguments() -> None:
    made = Doubled(ROWS, factor=3, batch_size=2)
    found = resize(made, 6)
    assert (type(found), found.factor, found.batch_size) == (Doubled, 3, 6)
    assert [batch.tolist() for batch in found] == [[0, 3, 6, 9, 12, 15], [18, 21, 24, 27, 30, 33]]


def test_resized_loader_of_an_iterable_dataset_gives_its_items() -> None:
    found = resize(DataLoader(Stream(), batch_size=2), 4)
    assert [batch.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_loader_that_can_not_be_resized_says_why() -> None:
    class Fixed(DataLoader[Any]):
        def __init__(self) -> None:
            super().__init__(ROWS, batch_size=3)

    data = train_data(Fixed())
    assert "can't be made anew with another batch size" in data.fixed_batch_size_reason()
    with pytest.raises(ConfigurationError, match="batch_size=4 can't be set: the train dataloader can't be made anew"):
        data.batch_size_policy(3, BatchSizePolicy(batch_size=4), 1)


def test_size_of_a_batch_counts_tensors_in_containers_and_objects_of_any_class() -> None:
    class Rows(list[Tensor]):
        pass

    tensor = torch.zeros(3, 4)
    for batch in (tensor, [tensor], Rows([tensor]), UserDict(x=tensor), {"a": (SimpleNamespace(y=tensor), "text", 1)}):
        assert batch_bytes(batch) == 48


def test_loader_with_a_sampler_of_batches_of_its_own_keeps_its_batch_size_and_says_so() -> None:
    sampler = BatchSampler(WeightedRandomSampler([1.0] * 12, 12), 3, drop_last=False)
    data = train_data(DataLoader(ROWS, batch_sampler=sampler))
    with pytest.warns(OSDPWarning, match="the batch size stays 3: the train dataloader has a batch_sampler of its own"):
        assert data.batch_size_policy(3, BatchSizePolicy(), 1).batch_size == 3


@pytest.mark.parametrize(
    ("num_rows", "loader_batch_size", "min_steps", "given", "largest", "setting"),
    [
        (1000, 2, 100, None, 5, "min_steps_per_epoch"),
        (1000, 2, 1000, None, 2, "min_steps_per_epoch"),
        (1000, 2, 100, 3, 3, "max_batch_size"),
        (1000, 2, 1, None, 500, "the length of the data"),
    ],
)
def test_bounded_policy_leaves_an_epoch_its_steps_and_says_what_bounds_it(
    num_rows: int, loader_batch_size: int, min_steps: int, given: int | None, largest: int, setting: str
) -> None:
    data = train_data(DataLoader(TensorDataset(torch.zeros(num_rows)), batch_size=loader_batch_size))
    policy = data.bounded_policy(loader_batch_size, BatchSizePolicy(max_batch_size=given), 2, min_steps)
    assert (policy.max_batch_size, policy.bounding_setting) == (largest, setting)


class OwnBatches(LightningDataModule):
    """Makes batches of a size of its own, which only happens to be the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        self.made.append(4)
        torch.rand(3)
        return DataLoader(ROWS, batch_size=4)


class Follows(OwnBatches):
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return DataLoader(ROWS, batch_size=self.trainer.lightning_module.batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [OwnBatches, Follows])
def test_loader_that_does_not_follow_the_batch_size_of_the_module_keeps_its_own_and_says_so(kind: Any) -> None:
    trainer, module = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False), GPTModule()
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_data(module, datamodule=kind())
    data = TrainData(trainer, module)
    made, state = list(trainer.datamodule.made), torch.get_rng_state()  # type: ignore[attr-defined]
    reason = "" if kind is Follows else "train_dataloader() makes batches of 4 whatever batch_size is"
    assert data.fixed_batch_size_reason() == reason
    assert module.batch_size == 4
    assert trainer.datamodule.made == made  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), state)
    if reason:
        with pytest.raises(ConfigurationError, match=r"batch_size=8 can.t be set: train_dataloader"):
            data.batch_size_policy(4, BatchSizePolicy(batch_size=8), 1)
    assert data.batch_size_policy(4, BatchSizePolicy(batch_size=4), 1).batch_size == 4


class KnownLength(Stream):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("loader", "is_split", "samples"),
    [
        # Under several ranks Lightning puts a sampler of all rows in the place of torch's random one.
        (lambda: DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, num_samples=500)), True, 6),
        (lambda: DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, num_samples=4)), True, 6),
        (lambda: DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, num_samples=4)), False, 4),
        (lambda: DataLoader(ROWS, 3, sampler=WeightedRandomSampler([1.0] * 12, 4)), True, 2),
        (lambda: DataLoader(ROWS, 3, sampler=DistributedSampler(ROWS, 4, 0)), True, 3),
        (lambda: DataLoader(KnownLength(), 3), True, 10),
        (lambda: DataLoader(Stream(), 3), True, None),
    ],
    ids=["random, more", "random, fewer", "random, kept", "weighted", "own", "stream of known length", "stream"],
)
def test_epoch_has_the_samples_that_training_will_see(
    loader: Callable[[], Any], is_split: bool, samples: int | None
) -> None:
    data = train_data(loader())
    data._trainer._accelerator_connector.use_distributed_sampler = is_split
    assert data.epoch(2).num_samples == samples


class Collate:
    """Draws from generators of its own, and counts."""

    def __init__(self) -> None:
        self.generator, self.calls = torch.Generator().manual_seed(1), 0

    def __call__(self, samples: Any) -> Tensor:
        self.calls += 1
        return torch.stack([row for (row,) in samples]) + torch.rand(1, generator=self.generator)


class ByEpoch:
    """Loaders of other libraries number their epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        yield from torch.arange(12).split(3)


class ByEpochLoader(DataLoader[Any]):
    """Keeps the iterator that it reads from."""

    epoch = 0

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        self.epoch += 1
        self._iterator = super().__iter__()
        for (batch,) in self._iterator:
            yield batch


class Locked(TensorDataset):
    """Counts what is read, under a lock."""

    def __init__(self) -> None:
        super().__init__(torch.arange(12))
        self.reads, self.lock = 0, threading.Lock()

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        with self.lock:
            self.reads += 1
        return super().__getitem__(index)


READ: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "collate function": (
        lambda: DataLoader(ROWS, batch_size=2, collate_fn=Collate()),
        lambda loader: (loader.collate_fn.calls, loader.collate_fn.generator.get_state().tolist()),
    ),
    "iterable": (ByEpoch, lambda loader: loader.epoch),
    "loader of its own class": (lambda: ByEpochLoader(ROWS, batch_size=3), lambda loader: loader.epoch),
    "dataset with a lock": (lambda: DataLoader(Locked(), batch_size=3), lambda loader: loader.dataset.reads),
    "generator of the loader": (
        lambda: DataLoader(Stream(), batch_size=2, num_workers=1, generator=torch.Generator().manual_seed(2)),
        lambda loader: loader.generator.get_state().tolist(),
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_reading_batches_leaves_all_parts_of_a_loader_as_they_were(kind: str) -> None:
    make, look = READ[kind]
    loader = make()
    trainer = train_data(loader)._trainer
    assert read_data(trainer, trainer.lightning_module, count=3)[2] in (2, 3)
    assert look(loader) == look(make())


@pytest.mark.parametrize(("injects", "size"), [(True, 1), (False, 4)])
def test_plain_batch_sampler_of_a_hook_is_read_at_the_size_that_lightning_trains(
    injects: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 4, drop_last=False))
    trainer = train_data(loader)._trainer
    module = trainer.lightning_module
    monkeypatch.setattr(module, "train_dataloader", lambda: loader)
    trainer._data_connector.attach_data(module)
    monkeypatch.setattr(trainer._data_connector, "_requires_distributed_sampler", lambda _: injects)
    data, _, read = read_data(trainer, module, count=3)
    assert read == size
    assert data.fixed_batch_size_reason()


class OwnGroups(BatchSampler):
    """A sampler of batches that does not say how large they are."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"batch_size": 5}, 5),
        ({"batch_sampler": BatchSampler(RandomSampler(ROWS), 6, drop_last=False)}, 6),
        ({"batch_sampler": OwnGroups()}, 0),
        ({"batch_size": None}, 0),
    ],
)
def test_evaluation_batch_size_is_that_of_the_loader_or_of_its_sampler_of_batches(
    options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = train_data(DataLoader(ROWS, batch_size=2))
    monkeypatch.setattr(type(data._module), "validation_step", lambda *_: None)
    data._trainer._data_connector.attach_data(data._module, val_dataloaders=[DataLoader(ROWS, **options)])
    assert data.evaluation_batch_size() == size

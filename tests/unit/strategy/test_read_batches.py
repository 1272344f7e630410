"""What is read before training is there again for training, from every kind of loader."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiling.tracing.isolation import restored
from lightning_osdp.strategy.read_batches import is_repeatable, read_first_batches

ROWS = torch.arange(16.0).view(16, 1)


class OneShot(IterableDataset[Tensor]):
    """Gives rows once."""

    def __init__(self) -> None:
        self.rows = iter(ROWS)

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


class FromGenerator(IterableDataset[Tensor]):
    """Its iterators are new, what they read from is not."""

    def __init__(self) -> None:
        self.source = {"rows": (row for row in ROWS)}

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.source["rows"]


class FromQueue(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for row in ROWS:
            self.queue.put(row)

    def __iter__(self) -> Iterator[Tensor]:
        while not self.queue.empty():
            yield self.queue.get()


class Positioned(IterableDataset[Tensor]):
    """Goes on where the last iteration has ended."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < len(ROWS):
            self.position += 1
            yield ROWS[self.position - 1]


class Repeatable(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.rows, self.started = ROWS, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.started += 1
        yield from self.rows


class OwnLoader:
    """Batches by itself, once."""

    def __init__(self) -> None:
        self.batches = iter(ROWS.split(4))

    def __iter__(self) -> OwnLoader:
        return self

    def __next__(self) -> Tensor:
        return next(self.batches)


class GoesOn(Sampler[int]):
    """Begins where its last iteration has ended."""

    def __init__(self) -> None:
        self.order = itertools.cycle(range(16))

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.order, 10)


class StreamLoader(DataLoader[Any]):
    """Gives what a stream of its own has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stream = iter(ROWS.split(4))

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        return self.stream


def closure_dataset() -> IterableDataset[Tensor]:
    rows = iter(ROWS)

    class Closure(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from rows

    return Closure()


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(ROWS), **({"batch_size": 4} | options))


LOADERS: dict[str, Callable[[], Any]] = {
    "one-shot dataset": lambda: DataLoader(OneShot(), batch_size=4),
    "generator in a dataset": lambda: DataLoader(FromGenerator(), batch_size=4),
    "queue": lambda: DataLoader(FromQueue(), batch_size=4),
    "position": lambda: DataLoader(Positioned(), batch_size=4),
    "repeatable": lambda: DataLoader(Repeatable(), batch_size=4),
    "closure": lambda: DataLoader(closure_dataset(), batch_size=4),
    "batches of a dataset": lambda: DataLoader(OneShot(), batch_size=None),
    "generator": lambda: (batch for batch in ROWS.split(4)),
    "list of batches": lambda: list(ROWS.split(4)),
    "own iterator": OwnLoader,
    "sampler that goes on": lambda: plain(sampler=GoesOn()),
    "loader with a stream": lambda: StreamLoader(TensorDataset(ROWS), batch_size=4),
    "map": plain,
    "shuffled": lambda: plain(shuffle=True, generator=torch.Generator().manual_seed(1)),
    "batch sampler": lambda: DataLoader(
        TensorDataset(ROWS), batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, False)
    ),
    "batch sampler that is a list": lambda: DataLoader(TensorDataset(ROWS), batch_sampler=[[0, 1], [2, 3, 4]]),
    "batch sampler that is an iterator": lambda: DataLoader(
        TensorDataset(ROWS), batch_sampler=iter([[0, 1], [2, 3, 4]])
    ),
    "one by one": lambda: plain(batch_size=None),
    "dict": lambda: {"a": plain(), "b": DataLoader(OneShot(), batch_size=2)},
    "list": lambda: [plain(), (batch for batch in ROWS.split(4))],
    "combined": lambda: CombinedLoader({"a": plain(), "b": DataLoader(OneShot(), batch_size=2)}, "min_size"),
    "sequential": lambda: CombinedLoader([plain(), plain(batch_size=2)], "sequential"),
}


def items(loaders: Any) -> list[Any]:
    """All batches of a first epoch, as lists of numbers."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    for loader in combined.flattened:
        if not isinstance(loader, DataLoader):
            iter(loader)  # as Lightning looks whether it can be iterated
    numbers = lambda batch: torch.utils._pytree.tree_map(lambda leaf: leaf.flatten().tolist(), batch)  # noqa: E731
    return [numbers(batch) for batch, *_ in combined]


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("kind", LOADERS)
def test_training_gets_every_batch_that_was_read_before(kind: str, count: int) -> None:
    expected = items(LOADERS[kind]())
    loaders = LOADERS[kind]()
    is_combined = isinstance(loaders, CombinedLoader)
    parts = [loaders, *([] if is_combined else [getattr(loaders, "dataset", None), getattr(loaders, "sampler", None)])]
    with restored(*filter(is_repeatable, parts)):
        batches, after = read_first_batches(loaders, count)
    assert items(after) == expected
    assert len(batches) <= count
    if not is_combined and hasattr(loaders, "dataset"):
        assert after is loaders
        assert type(after.dataset).__name__ == type(loaders.dataset).__name__
        assert type(after.dataset) in (TensorDataset, *IterableDataset.__subclasses__()), "it is of its own class again"


def test_read_second_epoch_of_a_given_back_dataset_is_its_own() -> None:
    class Doubling(IterableDataset[int]):
        """Its epochs differ, and a queue says that it can't be read twice."""

        def __init__(self) -> None:
            self.queue: Any = queue.SimpleQueue()
            self.epochs = 0

        def __iter__(self) -> Iterator[int]:
            self.epochs += 1
            yield from range(10 * self.epochs, 10 * self.epochs + 3)

    dataset = Doubling()
    read_first_batches(DataLoader(dataset, batch_size=2), 1)
    assert [list(dataset), list(dataset)] == [[10, 11, 12], [20, 21, 22]]


def test_read_persistent_workers_leaves_no_iterator_behind() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    loader = Own(TensorDataset(ROWS), batch_size=4, num_workers=1, persistent_workers=True)
    batches, after = read_first_batches(loader, 2)
    assert [batch[0].flatten().tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert after._iterator is None


@pytest.mark.parametrize("loaders", [[], iter(()), {"a": iter([1]), "b": iter(())}])
def test_read_empty_loader_is_an_error(loaders: Any) -> None:
    with pytest.raises(ConfigurationError, match="the train dataloader is empty"):
        read_first_batches(loaders, 1)


def test_read_batches_of_a_sorted_dataset_come_from_all_its_parts() -> None:
    batches, _ = read_first_batches(plain(shuffle=True), 4)
    assert [batch[0][0].item() for batch in batches] == [0, 4, 8, 12]
    assert list(itertools.chain(*(batch[0].flatten().tolist() for batch in batches))) == list(range(16))

"""Read batches before training does, such that training still gets every one of them."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiling.tracing.isolation import ATOMS, is_users, referenced_values

MAX_DEPTH = 6
"""Levels of attributes that are searched for something that gives its items once only."""

HEAP_TYPE = 1 << 9
"""Flag (Py_TPFLAGS_HEAPTYPE) of classes that a class statement has made: an object of another one keeps its class."""

REPEATABLE = (*ATOMS, torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, random.Random, type)
"""Types of plain data, which reading does not change, and of what is put back after reading."""


def read_first_batches(loaders: Any, count: int) -> tuple[list[Any], Any]:
    """Return up to ``count`` batches, and the loaders to train with: others where one gives its items once only.

    Args:
        loaders: a DataLoader, another iterable, or a list, dict or CombinedLoader of them.
        count: number of batches.

    Raises:
        ConfigurationError: a loader is empty.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else None
    flat, spec = tree_flatten(loaders if combined is None else combined.iterables, is_leaf=_is_loader)
    read = [_read(loader, count) for loader in flat]
    batches = [list(each) for each in zip(*(batches for batches, _ in read), strict=False)]
    if not batches:
        raise ConfigurationError("the train dataloader is empty")
    after = [loader for _, loader in read]
    is_sequential = combined is not None and combined._mode == "sequential"
    made = [each[0] if is_sequential else tree_unflatten(each, spec) for each in batches]
    if all(new is old for new, old in zip(after, flat, strict=True)):
        return made, loaders
    rebuilt = tree_unflatten(after, spec)
    return made, rebuilt if combined is None else CombinedLoader(rebuilt, combined._mode)


def _is_loader(value: Any) -> bool:
    """Return whether a value is a loader by itself: a list of batches is, a list of loaders is not."""
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return not any(isinstance(each, DataLoader | dict | list) or hasattr(each, "__next__") for each in inner)
    return True


def _read(loader: Any, count: int) -> tuple[list[Any], Any]:
    """Return up to ``count`` batches of one loader, and what to train with."""
    kind = type(loader)
    if isinstance(loader, str | bytes | type) or not (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")):
        raise ConfigurationError(
            "train data are a LightningDataModule, a DataLoader, another iterable of batches, or several of these, "
            f"not {kind.__name__}: {loader!r:.80}"
        )
    if not isinstance(loader, DataLoader):
        return _take(loader, count)
    own_iterator = type(loader).__iter__ is not DataLoader.__iter__
    if own_iterator and not is_repeatable(loader):
        return _take(loader, count)
    if own_iterator or (loader.num_workers and isinstance(loader.dataset, IterableDataset)):
        return _read_by_workers(loader, count), loader  # workers read copies of the dataset
    collate: Any = loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size
        samples, _ = _take(loader.dataset, count * (size or 1))
        if size is None:
            return [collate(sample) for sample in samples], loader
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        return [collate(part) for part in parts if len(part) == size or part is parts[0]], loader
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        indices, vars(loader)["sampler"] = _take(loader.sampler, count)
        return [collate(dataset[index]) for index in indices], loader
    groups: Any = _spread_groups(loader, count)
    if groups is None and type(loader.batch_sampler) is BatchSampler and not is_repeatable(loader.sampler):
        indices, sampler = _take(loader.sampler, count * loader.batch_sampler.batch_size)
        loader.batch_sampler.sampler = vars(loader)["sampler"] = sampler
        groups = BatchSampler(indices, loader.batch_sampler.batch_size, drop_last=False)
    elif groups is None:
        groups, vars(loader)["batch_sampler"] = _take(loader.batch_sampler, count)
    return [collate(_fetch(dataset, group)) for group in groups], loader


def _spread_groups(loader: DataLoader[Any], count: int) -> list[list[int]] | None:
    """Return the rows of batches from all parts of the dataset, the same on all ranks; None for samplers of its own."""
    known = type(loader.sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) is BatchSampler
    length = sized_len(loader.dataset)
    if not known or not length or loader.batch_size is None:
        return None
    size = min(loader.batch_size, length)
    starts = sorted({part * (length - size) // max(1, count - 1) for part in range(count)})
    return [list(range(start, start + size)) for start in starts]


def _fetch(dataset: Any, indices: Any) -> Any:
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def _read_by_workers(loader: Any, count: int) -> list[Any]:
    iterator = iter(loader)
    try:
        return list(itertools.islice(iterator, count))
    finally:
        if getattr(loader, "_iterator", None) is not None:  # persistent workers would go on where this has ended
            getattr(loader._iterator, "_shutdown_workers", lambda: None)()
            loader._iterator = None


def _take(source: Any, count: int) -> tuple[list[Any], Any]:
    """Return up to ``count`` items, and what gives all of them once more: ``source``, but for plain iterators."""
    iterator = iter(source)
    items = list(itertools.islice(iterator, count))
    if is_repeatable(source):
        return items, source
    if not type(source).__flags__ & HEAP_TYPE:
        return items, itertools.chain(items, iterator)
    _give_back(source, items, iterator)
    return items, source


def _give_back(source: Any, items: list[Any], iterator: Iterator[Any]) -> None:
    """Make the next iteration over ``source`` begin with ``items`` and go on with ``iterator``."""
    kind = type(source)

    def replay(self: Any) -> Iterator[Any]:
        if (
            self is not source or type(self) is kind
        ):  # a loader made anew, or a second iterator before the first is used
            yield from kind.__iter__(self)
            return
        self.__class__ = kind
        yield from items
        yield from iterator

    source.__class__ = type(kind.__name__, (kind,), {"__iter__": replay, "__module__": kind.__module__})


def is_repeatable(value: Any, depth: int = 0) -> bool:
    """Return whether iterating over ``value`` twice surely gives the same twice: all that it holds is plain data."""
    if isinstance(value, REPEATABLE) or depth > MAX_DEPTH:
        return True
    if hasattr(value, "__next__"):
        return False
    if isinstance(value, list | tuple | set | frozenset | dict):
        inner = value.values() if isinstance(value, dict) else value
        return all(is_repeatable(each, depth + 1) for each in itertools.islice(inner, 100))
    if isinstance(value, types.FunctionType):
        return all(is_repeatable(each, depth + 1) for each in referenced_values(value))
    if isinstance(value, types.MethodType):
        return is_repeatable(value.__self__, depth + 1)
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return True
    if is_users(type(value)):
        method = getattr(type(value), "__iter__", None)
        return is_repeatable(method, depth + 1) and all(is_repeatable(each, depth + 1) for each in vars(value).values())
    return hasattr(value, "__getitem__") or isinstance(value, Dataset | torch.utils.data.Sampler)

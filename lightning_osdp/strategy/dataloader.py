"""Read one batch of a Trainer's train dataloader, and read and change its batch size."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_osdp.errors import ConfigurationError, OSDPWarning
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.profiling.tracing.isolation import restored
from lightning_osdp.strategy.batch_size_change import Epoch, update_hyperparameters
from lightning_osdp.strategy.read_batches import is_repeatable, read_first_batches

MAX_BATCH_DEPTH = 6
"""Levels of containers and objects in which a batch's tensors are looked for."""


class TrainData:
    """The train dataloader of a Trainer, read before the loops ask for it.

    Args:
        trainer: the Trainer in ``fit``, after the setup hooks.
        module: the LightningModule, whose ``batch_size`` its loader may use.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._source = trainer.fit_loop._data_source
        if not self._source.is_defined():
            raise ConfigurationError("there is no train dataloader: pass one to fit() or define train_dataloader()")
        self._loader = self._source.dataloader()
        if self._source.is_module() and _loses_batch_sampler(trainer, self._loader):
            options = {"num_workers": self._loader.num_workers, "collate_fn": self._loader.collate_fn}
            self._loader = DataLoader(self._loader.dataset, batch_size=1, **options)
        self._follows_attribute: bool | None = None
        self.typical_batch: Any = None
        """The batch of median size among those that were read; None before they are."""
        self.bytes_per_sample = 0.0
        """Size of the largest of these batches, divided by its number of samples."""

    def epoch(self, ranks: int) -> Epoch:
        """Return what an epoch of the loader is for each of ``ranks``."""
        return Epoch.from_trainer(self._trainer, self._loader, ranks)

    def first_batch(self, count: int = 1, sample: Any = None) -> tuple[Any, int]:
        """Return the largest of the first ``count`` batches as the loader makes them, and its number of samples.

        If ``sample`` is given, it is that batch, and nothing is read. No worker is started for a map-style dataset.
        Whatever is read is there again for training.

        Raises:
            ConfigurationError: the loader is empty, or the number of samples can't be told.
        """
        batches, loader = ([sample], self._loader) if sample is not None else read_first_batches(self._loader, count)
        if loader is not self._loader:
            self._replace_loader(loader)
        by_size = sorted(batches, key=batch_bytes)
        batch, self.typical_batch = by_size[-1], by_size[len(by_size) // 2]
        num_samples = _count_samples(batch)
        if _count_samples(self.typical_batch) != num_samples:
            self.typical_batch = batch
        self.bytes_per_sample = batch_bytes(batch) / num_samples
        return batch, num_samples

    def _replace_loader(self, loader: Any) -> None:
        """Let training use ``loader``, which gives what was read once more."""
        if not self._source.is_module():
            self._source.instance = loader
        else:
            holder = vars(self._source.instance)
            holder.update({name: loader for name, value in holder.items() if value is self._loader})
        self._loader = loader

    @property
    def loader_batch_size(self) -> int | None:
        """The batch size that the loader is set to; None if it has none."""
        return self._loader.batch_size if isinstance(self._loader, DataLoader) else None

    def fixed_batch_size_reason(self) -> str:
        """Say why the batch size can't be changed, for the user; empty if it can."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return f"the train dataloader is a {type(loader).__name__}, not a single DataLoader"
        if loader.batch_size is None:
            has_sampler = loader.batch_sampler is not None
            own = "has a batch_sampler of its own" if has_sampler else "batches by itself (batch_size=None)"
            return f"the train dataloader {own}"
        if not self._source.is_module():
            return _rebuilding_blocker(loader)
        if not lightning_hasattr(self._module, "batch_size"):
            return "neither the module, its hparams nor the datamodule has a batch_size that its loader could follow"
        value = lightning_getattr(self._module, "batch_size")
        if value != loader.batch_size:
            return f"batch_size is {value}, but the train dataloader uses {loader.batch_size}"
        if self._follows_attribute is None:
            self._follows_attribute = self._makes_larger_batches(2 * value)
        return "" if self._follows_attribute else f"train_dataloader() makes batches of {value} whatever batch_size is"

    def _makes_larger_batches(self, batch_size: int) -> bool:
        """Return whether the module's loader follows its ``batch_size``, by asking for such a loader."""
        before = lightning_getattr(self._module, "batch_size")
        with isolate_rng(), restored(self._module, self._trainer.datamodule):  # type: ignore[attr-defined]
            lightning_setattr(self._module, "batch_size", batch_size)
            try:
                loader = self._source.dataloader()
            finally:
                lightning_setattr(self._module, "batch_size", before)
        return isinstance(loader, DataLoader) and loader.batch_size == batch_size

    def batch_size_policy(
        self,
        loader_batch_size: int,
        user_requested: BatchSizePolicy,
        ranks: int,
        quiet: bool = False,
        min_steps_per_epoch: int = 1,
    ) -> BatchSizePolicy:
        """Restrict what the user requested to what the data allow.

        Args:
            loader_batch_size: the batch size of the loader now.
            user_requested: the batch sizes that the user allows.
            ranks: number of ranks that share the dataset.
            quiet: whether to suppress the warning that the batch size can't be searched.
            min_steps_per_epoch: optimizer steps that a searched batch size leaves in an epoch of known length.

        Returns:
            The batch sizes to search, per rank, and the present one where it can't be changed.

        Raises:
            ConfigurationError: the user requested a batch size that can't be set.
        """
        fixed = user_requested.batch_size
        reason = "" if fixed == loader_batch_size else self.fixed_batch_size_reason()
        if reason and fixed not in (None, loader_batch_size):
            raise ConfigurationError(f"batch_size={fixed} can't be set: {reason}")
        if reason and fixed is None:
            if not quiet:
                warnings.warn(f"the batch size stays {loader_batch_size}: {reason}", OSDPWarning, stacklevel=2)
            fixed = loader_batch_size
        if fixed is not None:
            self.epoch(ranks).check(fixed, loader_batch_size)
            return replace(user_requested, batch_size=fixed)
        return self.bounded_policy(loader_batch_size, user_requested, ranks, min_steps_per_epoch)

    def bounded_policy(
        self, loader_batch_size: int, user_requested: BatchSizePolicy, ranks: int, min_steps_per_epoch: int
    ) -> BatchSizePolicy:
        """Restrict a search to what the length of the data allows; arguments as in ``batch_size_policy``."""
        epoch = self.epoch(ranks)
        bounds = [
            (user_requested.max_batch_size, "max_batch_size"),
            (epoch.largest_valid(loader_batch_size), "the length of the data"),
        ]
        if user_requested.global_batch_size is None:
            largest = epoch.largest_batch_size(loader_batch_size, user_requested.accumulation, min_steps_per_epoch)
            bounds.append((largest, "min_steps_per_epoch"))
        known = [(bound, setting) for bound, setting in bounds if bound is not None]
        if not known:
            return user_requested
        bound, setting = min(known, key=lambda each: each[0])
        return replace(user_requested, max_batch_size=bound, bounding_setting=setting)

    def evaluation_batch_size(self) -> int:
        """Return the largest batch size of the validation loaders.

        It is 0 if there are none, or if they only use the module's ``batch_size``, as the train loader does.
        """
        source, module = self._trainer.fit_loop.epoch_loop.val_loop._data_source, self._module
        if (
            not source.is_defined()
            or not is_overridden("validation_step", module)
            or not self._trainer.limit_val_batches
        ):
            return 0
        try:
            loaders = tree_leaves(source.dataloader())
        except Exception:  # the user's val_dataloader may rely on hooks that have not run yet, and raise anything
            return 0
        sizes = {_size_of_batches(loader) for loader in loaders if isinstance(loader, DataLoader)}
        if source.is_module() and lightning_hasattr(module, "batch_size"):
            sizes.discard(lightning_getattr(module, "batch_size"))
        return max(sizes, default=0)

    def set_batch_size(self, batch_size: int) -> None:
        """Make the Trainer's loops get batches of ``batch_size`` per device.

        Sets the ``batch_size`` of module, hparams or datamodule (Lightning's convention), or rebuilds a DataLoader
        that was passed to ``fit`` with its dataset, sampler, workers and collate function kept.
        """
        before = self.loader_batch_size
        if self._source.is_module():
            lightning_setattr(self._module, "batch_size", batch_size)
        else:
            self._loader = self._source.instance = _rebuild_loader(self._loader, batch_size)
        if before is not None:
            update_hyperparameters(self._trainer, before, batch_size)
        self.reset_dataloader()

    def reset_dataloader(self) -> None:
        """Make the loops request the loader again: tracing ``configure_optimizers`` may have made them build one."""
        loop = self._trainer.fit_loop
        if loop._combined_loader is not None:
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
                loop._data_fetcher = None
            loop._combined_loader = None


def read_data(
    trainer: pl.Trainer, module: pl.LightningModule, count: int = 1, sample: Any = None
) -> tuple[TrainData, Any, int]:
    """Return the train data, the largest of ``count`` batches and its number of samples; change nothing by reading.

    If ``sample`` is given, it is that batch.

    Raises:
        ConfigurationError: there are no train data, or they can't be read.
    """
    parts = _find_parts(trainer.fit_loop._data_source.instance)
    with restored(module, trainer.datamodule, *parts):  # type: ignore[attr-defined]
        data = TrainData(trainer, module)
        return data, *data.first_batch(count, sample)


def apply_batch_size(data: TrainData, batch_size: int, ranks: int) -> None:
    """Make the Trainer's loops get batches of ``batch_size`` per device, as a plan requires.

    Raises:
        ConfigurationError: the batch size can't be changed, or leaves too few batches to validate.
    """
    reason = data.fixed_batch_size_reason()
    if reason:
        raise ConfigurationError(f"the plan's batch size is {batch_size}, but it can't be set: {reason}")
    if data.loader_batch_size is not None:
        data.epoch(ranks).check(batch_size, data.loader_batch_size)
    data.set_batch_size(batch_size)


def batch_bytes(batch: Any) -> int:
    """Return the size of all tensors in a batch, which may be of a class of its own (``BatchEncoding``, a graph)."""
    return sum(tensor.nbytes for tensor in _find_tensors(batch))


def _count_samples(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        ConfigurationError: it has none, or no tensor tells how many.
    """
    try:
        num_samples = extract_batch_size(batch)
    except (RecursionError, MisconfigurationException):  # Lightning looks into containers and dataclasses alone
        num_samples = next((len(tensor) for tensor in _find_tensors(batch) if tensor.dim()), 0)
    if not num_samples:
        raise ConfigurationError(
            "the number of samples in a batch can't be told, since no tensor in it has a first dimension of that size: "
            f"it is a {type(batch).__name__}: {batch!r:.80}"
        )
    return num_samples


def _find_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < MAX_BATCH_DEPTH and not isinstance(value, str | bytes | type | ModuleType):
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, Sequence):
            inner = value
        elif hasattr(value, "__dict__"):
            inner = vars(value).values()
        for each in inner:
            yield from _find_tensors(each, depth + 1)


def _find_parts(source: Any) -> Iterator[Any]:
    """Yield the loaders of a class of their own and the parts of all, but for what is given back by other means."""
    for loader in tree_leaves(source.iterables if isinstance(source, CombinedLoader) else source):
        if type(loader) is not DataLoader and is_repeatable(loader):
            yield loader
        if isinstance(loader, DataLoader):
            yield from (loader.collate_fn, loader.generator)
            if not isinstance(loader.dataset, IterableDataset) or is_repeatable(loader.dataset):
                yield loader.dataset
            yield from filter(is_repeatable, (loader.sampler, loader.batch_sampler))


def _size_of_batches(loader: DataLoader[Any]) -> int:
    """Return the batch size that a loader or its batch sampler is set to; 0 if neither tells."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0)
    return size if isinstance(size, int) else 0


def _loses_batch_sampler(trainer: pl.Trainer, loader: Any) -> bool:
    """Return whether Lightning trains a loader of a hook at batch size 1 beside its distributed sampler, as in DDP."""
    return (
        type(loader) is DataLoader
        and loader.batch_size is None
        and type(loader.batch_sampler) is BatchSampler
        and trainer._data_connector._requires_distributed_sampler(loader)
    )


def _loader_arguments(loader: DataLoader[Any], batch_size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, options = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    return args, options | {"batch_size": batch_size}


def _rebuilding_blocker(loader: DataLoader[Any]) -> str:
    """Say why a loader can't be made anew with another batch size; empty if it can."""
    if not isinstance(loader.dataset, IterableDataset) and type(loader.batch_sampler) is not BatchSampler:
        return "the train dataloader has a sampler of batches of its own"
    kind = type(loader)
    try:
        _, options = _loader_arguments(loader, 1)
        signature(kind.__init__).bind_partial(None, **options)
    except (MisconfigurationException, TypeError) as error:
        return f"the train dataloader can't be made anew with another batch size: {error}"
    return ""


def _rebuild_loader(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return the loader as Lightning makes it anew, of its own class, with another batch size.

    Raises:
        ConfigurationError: its class takes no batch size.
    """
    args, options = _loader_arguments(loader, batch_size)
    rebuilt: DataLoader[Any] = _reinstantiate_wrapped_cls(loader, *args, **options)
    if rebuilt.batch_size != batch_size:
        raise ConfigurationError(
            f"{type(loader).__name__} makes batches of {rebuilt.batch_size} where it was asked for {batch_size}: give "
            "OSDPStrategy batch_size='keep'"
        )
    return rebuilt

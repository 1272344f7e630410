"""The train dataloader of a Trainer: one batch from it, its batch size, and how to change that."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_osdp.errors import ConfigurationError, OSDPWarning
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy


class TrainData:
    """Reads the train dataloader that a Trainer was given, before its loops have asked for it.

    Args:
        trainer: in ``fit``, after the setup hooks.
        module: the LightningModule, whose ``batch_size`` may be the one that its loader uses.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._source = trainer.fit_loop._data_source
        if not self._source.is_defined():
            raise ConfigurationError("there is no train dataloader: pass one to fit() or define train_dataloader()")
        self._loader = self._source.dataloader()

    @property
    def num_samples(self) -> int | None:
        """Samples in the train dataset over all ranks; None if it has no length."""
        if isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset):
            return sized_len(self._loader.dataset)
        return None

    def first_batch(self) -> tuple[Any, int]:
        """A batch as the loader gives it, and how many samples it has.

        A map-style dataset is read directly: no worker is started.

        Raises:
            ConfigurationError: the loader is empty, or the number of samples can't be told.
        """
        loader = self._loader
        if _is_plain(loader) and sized_len(loader.dataset):
            size = min(loader.batch_size, len(loader.dataset))
            return loader.collate_fn([loader.dataset[i] for i in range(size)]), size
        try:
            batch = next(iter(loader)) if isinstance(loader, DataLoader) else next(iter(_as_combined_loader(loader)))[0]
        except StopIteration:
            raise ConfigurationError("the train dataloader is empty") from None
        try:
            return batch, extract_batch_size(batch)
        except RuntimeError as error:
            raise ConfigurationError(f"the number of samples in a batch can't be told: {error}") from error

    def fixed_batch_size_reason(self) -> str:
        """Why the batch size can't be changed, in words for the user; empty if it can."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return f"the train dataloader is a {type(loader).__name__}, not a single DataLoader"
        if loader.batch_size is None:
            return "the train dataloader batches by itself (batch_size=None)"
        if not self._source.is_module():
            return "" if _is_plain(loader) else "the train dataloader has a sampler of batches or a class of its own"
        if not lightning_hasattr(self._module, "batch_size"):
            return "neither the module, its hparams nor the datamodule has a batch_size that its loader could follow"
        value = lightning_getattr(self._module, "batch_size")
        if value != loader.batch_size:
            return f"batch_size is {value}, but the train dataloader uses {loader.batch_size}"
        return ""

    def batch_size_policy(
        self, loader_batch_size: int, user_requested: BatchSizePolicy, ranks: int, quiet: bool = False
    ) -> BatchSizePolicy:
        """``user_requested``, with what the data allow: no more than there is, and no change where none is possible.

        Args:
            loader_batch_size: what the loader gives now.
            user_requested: what the user asked for.
            ranks: that share the dataset.
            quiet: whether to keep back the warning that the batch size can't be searched.

        Raises:
            ConfigurationError: a batch size was asked for that can't be set.
        """
        fixed, most, why = user_requested.batch_size, user_requested.max_batch_size, self.fixed_batch_size_reason()
        if why and fixed not in (None, loader_batch_size):
            raise ConfigurationError(f"batch_size={fixed} can't be set: {why}")
        if why and fixed is None:
            if not quiet:
                warnings.warn(f"the batch size stays {loader_batch_size}: {why}", OSDPWarning, stacklevel=2)
            fixed = loader_batch_size
        if most is None and self.num_samples is not None:
            most = max(1, self.num_samples // ranks)
        return replace(user_requested, batch_size=fixed, max_batch_size=most)

    def evaluation_batch_size(self) -> int:
        """Samples in the largest batch that the validation loaders give; 0 if there are none, or none tells a size
        other than the module's own ``batch_size``, which the train loader follows, too."""
        source, module = self._trainer.fit_loop.epoch_loop.val_loop._data_source, self._module
        if (
            not source.is_defined()
            or not is_overridden("validation_step", module)
            or not self._trainer.limit_val_batches
        ):
            return 0
        try:
            loaders = tree_leaves(source.dataloader())
        except Exception:  # of the user's code, which may count on what has not happened yet
            return 0
        sizes = {loader.batch_size or 0 for loader in loaders if isinstance(loader, DataLoader)}
        if source.is_module() and lightning_hasattr(module, "batch_size"):
            sizes.discard(lightning_getattr(module, "batch_size"))
        return max(sizes, default=0)

    def set_batch_size(self, batch_size: int) -> None:
        """Makes the Trainer's loops get batches of ``batch_size`` per device.

        Sets the ``batch_size`` of module, hparams or datamodule (Lightning's convention), or rebuilds a DataLoader
        that was passed to ``fit`` with its dataset, sampler, workers and collate function kept.
        """
        if self._source.is_module():
            lightning_setattr(self._module, "batch_size", batch_size)
        else:
            self._source.instance = _rebuild_loader(self._loader, batch_size)
        self.reset_dataloader()

    def reset_dataloader(self) -> None:
        """Lets the loops ask for the loader anew: tracing ``configure_optimizers`` may have made them build one."""
        loop = self._trainer.fit_loop
        if loop._combined_loader is not None:
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
                loop._data_fetcher = None
            loop._combined_loader = None


def read_data(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[TrainData, Any, int]:
    """The train data, a first batch of them and its size.

    Raises:
        ConfigurationError: there are none, or they can't be read.
    """
    data = TrainData(trainer, module)
    return data, *data.first_batch()


def apply_batch_size(data: TrainData, batch_size: int) -> None:
    """Makes the Trainer's loops get batches of ``batch_size`` per device, as a plan asks.

    Raises:
        ConfigurationError: the data don't allow it.
    """
    why = data.fixed_batch_size_reason()
    if why:
        raise ConfigurationError(f"the plan's batch size is {batch_size}, but it can't be set: {why}")
    data.set_batch_size(batch_size)


def _as_combined_loader(loader: Any) -> CombinedLoader:
    return loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")


def _is_plain(loader: Any) -> bool:
    """A DataLoader over a map-style dataset whose batches are cut by batch_size alone."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
    )


def _rebuild_loader(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """The same loader with another batch size."""
    own_sampler = type(loader.sampler) not in (RandomSampler, SequentialSampler)
    order: dict[str, Any] = (
        {"sampler": loader.sampler} if own_sampler else {"shuffle": isinstance(loader.sampler, RandomSampler)}
    )
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **order,
        **workers,
    )

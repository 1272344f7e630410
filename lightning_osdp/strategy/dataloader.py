"""Read one batch of a Trainer's train dataloader, and read and change its batch size."""

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

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the train dataset over all ranks; None if it has no length."""
        if isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset):
            return sized_len(self._loader.dataset)
        return None

    def first_batch(self) -> tuple[Any, int]:
        """Return a batch as the loader makes it, and its number of samples.

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
        """Say why the batch size can't be changed, for the user; empty if it can."""
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
        """Restrict what the user requested to what the data allow.

        Args:
            loader_batch_size: the batch size of the loader now.
            user_requested: the batch sizes that the user allows.
            ranks: number of ranks that share the dataset.
            quiet: whether to suppress the warning that the batch size can't be searched.

        Returns:
            The batch sizes to search, per rank: at most the dataset, and the present one where it can't be changed.

        Raises:
            ConfigurationError: the user requested a batch size that can't be set.
        """
        fixed, largest, reason = (
            user_requested.batch_size,
            user_requested.max_batch_size,
            self.fixed_batch_size_reason(),
        )
        if reason and fixed not in (None, loader_batch_size):
            raise ConfigurationError(f"batch_size={fixed} can't be set: {reason}")
        if reason and fixed is None:
            if not quiet:
                warnings.warn(f"the batch size stays {loader_batch_size}: {reason}", OSDPWarning, stacklevel=2)
            fixed = loader_batch_size
        if largest is None and self.num_samples is not None:
            largest = max(1, self.num_samples // ranks)
        return replace(user_requested, batch_size=fixed, max_batch_size=largest)

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
        sizes = {loader.batch_size or 0 for loader in loaders if isinstance(loader, DataLoader)}
        if source.is_module() and lightning_hasattr(module, "batch_size"):
            sizes.discard(lightning_getattr(module, "batch_size"))
        return max(sizes, default=0)

    def set_batch_size(self, batch_size: int) -> None:
        """Make the Trainer's loops get batches of ``batch_size`` per device.

        Sets the ``batch_size`` of module, hparams or datamodule (Lightning's convention), or rebuilds a DataLoader
        that was passed to ``fit`` with its dataset, sampler, workers and collate function kept.
        """
        if self._source.is_module():
            lightning_setattr(self._module, "batch_size", batch_size)
        else:
            self._source.instance = _rebuild_loader(self._loader, batch_size)
        self.reset_dataloader()

    def reset_dataloader(self) -> None:
        """Make the loops request the loader again: tracing ``configure_optimizers`` may have made them build one."""
        loop = self._trainer.fit_loop
        if loop._combined_loader is not None:
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
                loop._data_fetcher = None
            loop._combined_loader = None


def read_data(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[TrainData, Any, int]:
    """Return the train data, a first batch and its number of samples.

    Raises:
        ConfigurationError: there are no train data, or they can't be read.
    """
    data = TrainData(trainer, module)
    return data, *data.first_batch()


def apply_batch_size(data: TrainData, batch_size: int) -> None:
    """Make the Trainer's loops get batches of ``batch_size`` per device, as a plan requires.

    Raises:
        ConfigurationError: the batch size can't be changed.
    """
    reason = data.fixed_batch_size_reason()
    if reason:
        raise ConfigurationError(f"the plan's batch size is {batch_size}, but it can't be set: {reason}")
    data.set_batch_size(batch_size)


def _as_combined_loader(loader: Any) -> CombinedLoader:
    return loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")


def _is_plain(loader: Any) -> bool:
    """Return whether this is a DataLoader over a map-style dataset whose batches depend on batch_size alone."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
    )


def _rebuild_loader(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
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

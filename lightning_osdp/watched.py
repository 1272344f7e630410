"""The part of the strategy that keeps any rank from waiting for one that is gone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies.parallel import ParallelStrategy
from typing_extensions import override

from lightning_osdp.failures import EvenlyEnding, Watch, check_same


class WatchedStrategy(ParallelStrategy):
    """Tells the other ranks why this one fails, and finds uneven data."""

    _watch: Watch | None = None
    _loaders = 0

    def _start_watch(self, timeout: timedelta) -> None:
        """To be called on every rank once the process group is there."""
        self._stop_watch()
        self._loaders = 0
        self._watch = Watch(self.global_rank, self.world_size, timeout)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leaves the cause for the other ranks, or finds theirs and puts it into the message."""
        if self._watch is not None:
            self._watch.tell(exception)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Has data of unknown length end on all ranks at the same batch."""
        self._loaders += 1
        if self._watch is None or self.world_size == 1 or sized_len(dataloader) is not None:
            return dataloader
        return EvenlyEnding(dataloader, self._watch, f"dataloader {self._loaders}")

    @override
    def on_train_start(self) -> None:
        self._check_batches("num_training_batches", "training")

    @override
    def on_validation_start(self) -> None:
        sanity = self.lightning_module is not None and self.lightning_module.trainer.sanity_checking
        self._check_batches("num_sanity_val_batches" if sanity else "num_val_batches", "validation")

    @override
    def on_test_start(self) -> None:
        self._check_batches("num_test_batches", "test")

    @override
    def on_predict_start(self) -> None:
        self._check_batches("num_predict_batches", "prediction")

    def _check_batches(self, attribute: str, what: str) -> None:
        assert self.lightning_module is not None
        count: Any = getattr(self.lightning_module.trainer, attribute)
        check_same(dist.group.WORLD, f"the number of {what} batches", count)

"""What a batch size means for an epoch: its optimizer steps, its bounds, and one line about a change."""

from __future__ import annotations

import re
from argparse import Namespace
from bisect import bisect
from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import dataclass, is_dataclass
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from rich.text import Text
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import tables

BATCH_SIZE_NAME = re.compile(
    r"(micro|local|train|training)?_?(per_(device|gpu|rank)_)?(train_)?(batch_?size|bs)(_?per_(device|gpu|rank))?", re.I
)
"""Names of hyperparameters that mean a rank's batch size in training."""

EVALUATION_NAME = re.compile(r"(^|_)(val|valid|validation|eval|evaluation|test|predict|inference)", re.I)
"""Names of hyperparameters that hold what is not about training."""

MAX_DEPTH = 6
"""Levels of hyperparameters in which it is looked for."""


@dataclass(frozen=True)
class Epoch:
    """One rank's share of an epoch.

    Attributes:
        num_samples: samples of a rank; None if that is not known.
        drop_last: whether an incomplete batch is left out.
        limit: the Trainer's ``limit_train_batches``.
        validation_interval: batches that an epoch needs at least, as validation comes after so many; 1 for any number.
    """

    num_samples: int | None
    drop_last: bool = False
    limit: int | float = 1.0
    validation_interval: int = 1

    @classmethod
    def from_trainer(cls, trainer: Any, loader: Any, ranks: int) -> Epoch:
        """Return the epoch of ``loader`` under the Trainer's settings."""
        interval = trainer.val_check_interval
        is_counted = isinstance(interval, int) and not isinstance(interval, bool)
        is_checked = is_counted and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
        num_samples = None
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            num_samples = sized_len(loader.dataset)
        elif isinstance(loader, DataLoader):
            is_split = trainer._accelerator_connector.use_distributed_sampler
            is_split = is_split and not isinstance(loader.sampler, DistributedSampler)
            is_replaced = is_split and isinstance(loader.sampler, SequentialSampler | RandomSampler)
            num_samples = sized_len(loader.dataset if is_replaced else loader.sampler)
            if num_samples is not None and is_split:
                num_samples = -(-num_samples // ranks)
        drop_last = bool(getattr(loader, "drop_last", False))
        return cls(num_samples, drop_last, trainer.limit_train_batches, interval if is_checked else 1)

    def num_batches(self, batch_size: int) -> int | None:
        """Return the batches of an epoch; None if that is not known."""
        if self.num_samples is None:
            return None
        batches = self.num_samples // batch_size if self.drop_last else -(-self.num_samples // batch_size)
        return min(batches, self.limit) if isinstance(self.limit, int) else int(batches * self.limit)

    def num_steps(self, batch_size: int, accumulation: int) -> int | None:
        """Return the optimizer steps of an epoch; None if that is not known."""
        batches = self.num_batches(batch_size)
        return None if batches is None else -(-batches // accumulation)

    def largest_batch_size(self, present: int, accumulation: int, min_steps: int) -> int | None:
        """Return the largest batch size that leaves enough steps, or the present one; None for any.

        Args:
            present: the loader's own batch size.
            accumulation: batches per optimizer step.
            min_steps: optimizer steps that an epoch should have.
        """
        if self.num_samples is None:
            return None
        if (self.num_steps(present, accumulation) or 0) <= min_steps:
            return max(1, min(present, self.num_samples))
        return self._largest(lambda size: (self.num_steps(size, accumulation) or 0) >= min_steps)

    def largest_valid(self, present: int) -> int | None:
        """Return the largest batch size with which an epoch has a batch, and validation comes; None for any."""
        if self.num_samples is None or (self.num_batches(present) or 0) < self.validation_interval:
            return None  # the epoch is too short with the loader's own size, too: Lightning says so
        return self._largest(lambda size: (self.num_batches(size) or 0) >= self.validation_interval)

    def check(self, batch_size: int, present: int) -> None:
        """Refuse a batch size with which Lightning would refuse to validate.

        Raises:
            ConfigurationError: the epoch has too few batches.
        """
        largest = self.largest_valid(present)
        if largest is None or (self.num_batches(batch_size) or 0) >= self.validation_interval:
            return
        text = f"a batch size of {batch_size} per device (the loader's is {present}) leaves "
        if self.validation_interval == 1:
            raise ConfigurationError(f"{text}no whole batch in an epoch: use a batch size up to {largest}")
        raise ConfigurationError(
            f"{text}{self.num_batches(batch_size)} batches per epoch, fewer than val_check_interval="
            f"{self.validation_interval} needs: use a batch size up to {largest}, a smaller val_check_interval, or "
            "check_val_every_n_epoch=None"
        )

    def _largest(self, is_enough: Callable[[int], bool]) -> int:
        sizes = range(1, max(1, self.num_samples or 1) + 1)
        return max(1, bisect(sizes, False, key=lambda size: not is_enough(size)))


def describe_change(epoch: Epoch, present: int, accumulation: int, plan: ExecutionPlan, ranks: int, remedy: str) -> str:
    """Return the line that says what the plan changes; empty if it trains what the loader and the Trainer say.

    Args:
        epoch: the epoch.
        present: the loader's batch size.
        accumulation: the Trainer's accumulation before the plan.
        plan: the plan.
        ranks: number of ranks.
        remedy: what keeps the present ones; empty if they are changed as the user asked for.
    """
    if (plan.batch_size, plan.accumulate_grad_batches) == (present, accumulation):
        return ""
    before = epoch.num_steps(present, accumulation)
    after = epoch.num_steps(plan.batch_size, plan.accumulate_grad_batches)
    steps = "" if before is None else f", {before} -> {after} optimizer steps per epoch"
    accumulated = ""
    if plan.accumulate_grad_batches != accumulation:
        accumulated = f", accumulate_grad_batches {accumulation} -> {plan.accumulate_grad_batches}"
    total, new_total = present * ranks * accumulation, plan.batch_size * ranks * plan.accumulate_grad_batches
    advice = "" if new_total == total else "the learning rate is yours to adapt"
    change = f"batch size per device {present} -> {plan.batch_size} (global {total} -> {new_total}){accumulated}{steps}"
    return "; ".join(filter(None, (change, advice, remedy)))


def announce_change(trainer: Any, epoch: Epoch, present: int, plan: ExecutionPlan, ranks: int, remedy: str) -> None:
    """Print ``describe_change`` on rank 0, if there is one."""
    change = describe_change(epoch, present, trainer.accumulate_grad_batches, plan, ranks, remedy)
    if change and trainer.is_global_zero:
        tables.print_output(Text(change), soft_wrap=True)


def update_hyperparameters(trainer: pl.Trainer, before: int, after: int) -> None:
    """Set the batch size in the hyperparameters that loggers and checkpoints get, where it was the loader's.

    Names such as ``batch_size``, ``train_bs`` and ``data.batch_size`` mean it; ``val.batch_size`` does not.
    """
    for holder in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        for name in ("_hparams", "_hparams_initial"):
            values = getattr(holder, name, None)
            if isinstance(values, MutableMapping):
                values.update(_with_batch_size(values, before, after))


def _with_batch_size(value: Any, before: int, after: int, depth: int = 0) -> Any:
    """Return hyperparameters with the new batch size: copies of all that contain it, which may be the user's own."""
    is_object = isinstance(value, Namespace | SimpleNamespace) or (is_dataclass(value) and hasattr(value, "__dict__"))
    if depth > MAX_DEPTH or isinstance(value, type) or not (is_object or isinstance(value, MutableMapping)):
        return value
    changes = {}
    for name, own in (vars(value) if is_object else value).items():
        if isinstance(own, Integral):
            new: Any = after if own == before and BATCH_SIZE_NAME.fullmatch(str(name)) else own
        else:
            new = own if EVALUATION_NAME.search(str(name)) else _with_batch_size(own, before, after, depth + 1)
        if new is not own:
            changes[name] = new
    if not changes:
        return value
    copied = copy(value)
    (vars(copied) if is_object else copied).update(changes)
    return copied

"""Lightning's side of checkpoints: which ones this package writes and reads itself, and which a plugin does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_osdp.collectives import on_all_ranks
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.sharding.checkpoint import Checkpoints


def collect_when_saving(trainer: pl.Trainer, checkpoints: Checkpoints, plugin: CheckpointIO) -> None:
    """Lets ``trainer.save_checkpoint`` put checkpoints together from handles. Idempotent.

    Lightning asks the strategy for states before it tells where they go, and asks in the same way as a user who wants
    whole tensors. Hooks and plugins that see the checkpoint are given whole tensors, too.
    """
    original = trainer.save_checkpoint
    if getattr(original, "collects", False):
        return

    @functools.wraps(original)
    def save_checkpoint(filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
        at_once = _hooks_look(trainer) or not is_ours(plugin, filepath)
        with checkpoints.collecting(trainer.is_global_zero, at_once):
            original(filepath, weights_only, storage_options)

    save_checkpoint.collects = True  # type: ignore[attr-defined]
    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def is_ours(plugin: CheckpointIO, path: Any) -> bool:
    """Whether this package writes there itself: a local path, and no plugin of the user's."""
    return type(plugin) is TorchCheckpointIO and _is_local_file_protocol(path)


def save(
    checkpoints: Checkpoints,
    plugin: CheckpointIO,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any | None,
    group: Any,
) -> None:
    """Saves to ``path``; all ranks raise if one fails. Collective.

    Raises:
        ConfigurationError: a sharded checkpoint is to go where only a plugin writes.
        CheckpointError: the disk is full, or the path can't be written.
    """
    if is_ours(plugin, path) and storage_options is None:
        checkpoints.save(checkpoint, _local(path), group)
        return
    if checkpoints.is_sharded:
        raise ConfigurationError(
            f"save_format='sharded' writes to file systems that all ranks share, not to {path} with "
            f"{type(plugin).__name__}: use save_format='full'"
        )

    def write() -> None:
        if group.rank() == 0:
            plugin.save_checkpoint(checkpoint, path, storage_options=storage_options)

    on_all_ranks(group, write)


def load(
    checkpoints: Checkpoints, plugin: CheckpointIO, path: Any, weights_only: bool | None, group: Any
) -> dict[str, Any]:
    """Loads from ``path``; all ranks raise if one fails. Collective.

    Raises:
        CheckpointError: it is damaged or foreign.
    """
    if is_ours(plugin, path):
        return checkpoints.load(_local(path), weights_only, group)
    return on_all_ranks(group, lambda: plugin.load_checkpoint(path, weights_only=weights_only))


def states_by_optimizer(optimizers: Sequence[Optimizer], checkpoint: dict[str, Any]) -> dict[Optimizer, dict[str, Any]]:
    """The saved state of each optimizer.

    Raises:
        ConfigurationError: the checkpoint has none, or for another number of optimizers.
    """
    states = checkpoint.get("optimizer_states")
    if states is None:
        raise ConfigurationError(
            "the checkpoint holds the model only (ModelCheckpoint(save_weights_only=True)), so training can't go on "
            "from it: load it with load_from_checkpoint and fit without ckpt_path"
        )
    if len(states) != len(optimizers):
        raise ConfigurationError(
            f"the checkpoint holds the state of {len(states)} optimizers, the module has {len(optimizers)}"
        )
    return dict(zip(optimizers, states, strict=True))


def _local(path: Any) -> Path:
    return Path(str(path).removeprefix("file://"))


def _hooks_look(trainer: pl.Trainer) -> bool:
    """Whether code of the user's sees the checkpoint before it is written."""
    hook = "on_save_checkpoint"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return is_overridden(hook, trainer.lightning_module, pl.LightningModule) or any(
        is_overridden(hook, callback, pl.Callback) for callback in callbacks
    )

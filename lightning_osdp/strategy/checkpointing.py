"""Save and load checkpoints for Lightning: with this package's formats, or through the user's plugin."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.backend.agree import raise_on_all_ranks
from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.errors import CheckpointError, ConfigurationError, OSDPWarning
from lightning_osdp.planning.spec.model import CheckpointMemory
from lightning_osdp.state import atomic_files
from lightning_osdp.state.checkpoint import CheckpointFormat
from lightning_osdp.state.state_dict import ShardedParameters, load_model_state
from lightning_osdp.strategy.failure_aware import FailureAwareStrategy

SAVE_WAIT_S = 3.0
"""Seconds that a rank which saves after an error waits for the others."""


_KINDS_OF_TRAINER_STATE: dict[str, Any] = {
    "epoch": int,
    "global_step": int,
    "loops": Mapping,
    "callbacks": Mapping,
    "optimizer_states": (list, tuple),
    "lr_schedulers": (list, tuple),
}


def handles_natively(plugin: CheckpointIO, path: Any) -> bool:
    """Return whether this package writes ``path`` itself: it is local, and the user has no plugin."""
    return type(plugin) is TorchCheckpointIO and _is_local_file_protocol(path)


def save(
    checkpoint_format: CheckpointFormat,
    plugin: CheckpointIO,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any | None,
    group: Any,
) -> None:
    """Save a checkpoint; all ranks raise if one fails. Collective.

    Args:
        checkpoint_format: the format of this run.
        plugin: the CheckpointIO of the Trainer.
        checkpoint: the checkpoint; that of rank 0 counts.
        path: where it goes.
        storage_options: options of the plugin.
        group: all ranks.

    Raises:
        ConfigurationError: only a plugin can write to ``path``, and the checkpoint is sharded.
        CheckpointError: the disk is full, or the path can't be written.
    """
    if handles_natively(plugin, path) and storage_options is None:
        checkpoint_format.save(checkpoint, local_path(path), group)
        return
    if checkpoint_format.is_sharded:
        raise ConfigurationError(
            f"save_format='sharded' writes to file systems that all ranks share, not to {path} with "
            f"{type(plugin).__name__}: use save_format='full'"
        )

    def write() -> None:
        if group.rank() == 0:
            plugin.save_checkpoint(checkpoint, path, storage_options=storage_options)

    raise_on_all_ranks(group, write)


def load(
    checkpoint_format: CheckpointFormat, plugin: CheckpointIO, path: Any, weights_only: bool | None, group: Any
) -> dict[str, Any]:
    """Load a checkpoint; all ranks raise if one fails. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged or foreign.
    """
    if handles_natively(plugin, path):
        checkpoint = checkpoint_format.load(local_path(path), weights_only, group)
        _check_trainer_state(checkpoint, path)
        return checkpoint
    return raise_on_all_ranks(group, lambda: plugin.load_checkpoint(path, weights_only=weights_only))


def _check_trainer_state(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuse what a Trainer did not write, or what was damaged since."""
    if not isinstance(checkpoint.get("pytorch-lightning_version"), str):
        raise CheckpointError(f"{path} is not a checkpoint of a Trainer: it holds no pytorch-lightning_version")
    for key, kind in _KINDS_OF_TRAINER_STATE.items():
        if key in checkpoint and not isinstance(checkpoint[key], kind):
            raise CheckpointError(f"{path} is damaged: its {key} is a {type(checkpoint[key]).__name__}")


def states_by_optimizer(optimizers: Sequence[Optimizer], checkpoint: dict[str, Any]) -> dict[Optimizer, dict[str, Any]]:
    """Return the saved state of each optimizer.

    Raises:
        ConfigurationError: the checkpoint has no optimizer states, or those of another number of optimizers.
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


class CheckpointingStrategy(FailureAwareStrategy):
    """A strategy that saves and loads sharded state."""

    _checkpoint_format: CheckpointFormat

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return unsharded tensors on rank 0, nothing on others; while a checkpoint is saved, placeholders on all."""
        if self._engine is None:
            return super().lightning_module_state_dict()
        return self._engine.model_state(self._checkpoint_format.deferred_tensors)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, in the same way as the state of the module."""
        assert self._engine is not None
        plain = getattr(optimizer, "_optimizer", optimizer)
        index = next((i for i, known in enumerate(self.optimizers) if known is plain), 0)
        return self._engine.optimizer_state(plain, index, self._checkpoint_format.deferred_tensors)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save on every rank, or fail on every rank."""
        save(self._checkpoint_format, self.checkpoint_io, checkpoint, filepath, storage_options, dist.group.WORLD)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of either format; its large tensors are not read yet."""
        return load(self._checkpoint_format, self.checkpoint_io, checkpoint_path, weights_only, dist.group.WORLD)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and nothing else: the path may come from the callbacks' state in a checkpoint."""
        if not handles_natively(self.checkpoint_io, filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            path = local_path(filepath)
            if foreign := atomic_files.find_foreign(path):
                rank_zero_warn(f"{path} is not removed: {foreign}", category=OSDPWarning)
            else:
                atomic_files.try_remove(path)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load unsharded state, saved under any plan, once all of the checkpoint is known to fit."""
        assert self.lightning_module is not None
        model, fill = checkpoint["state_dict"], self._checkpoint_format.fill
        engine, module, group = self._engine, self.lightning_module, dist.group.WORLD
        if engine is None:
            sharded = ShardedParameters({}, None)
            raise_on_all_ranks(group, lambda: load_model_state(module, sharded, model, strict, fill))
            return
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        states = states_by_optimizer(self.optimizers, checkpoint) if fitting else {}
        raise_on_all_ranks(group, lambda: engine.check_state(model, strict, states))
        raise_on_all_ranks(group, lambda: engine.load_model_state(model, strict, fill))

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state of all optimizers, or fail on every rank."""
        assert self._engine is not None
        engine, fill = self._engine, self._checkpoint_format.fill
        for optimizer, state in states_by_optimizer(self.optimizers, checkpoint).items():
            load = functools.partial(engine.load_optimizer_state, optimizer, state, fill)
            raise_on_all_ranks(dist.group.WORLD, load)
        _optimizers_to_device(self.optimizers, self.root_device)

    def _defer_gathers_on_save(self, trainer: pl.Trainer) -> None:
        """Make ``trainer.save_checkpoint`` assemble checkpoints from placeholders. Idempotent.

        Lightning requests states before it says where they go, and in the same way as a user who wants unsharded
        tensors. Hooks and plugins that see the checkpoint still get unsharded tensors.
        """
        original = trainer.save_checkpoint
        if getattr(original, "defers_gathers", False):
            return

        @functools.wraps(original)
        def save_checkpoint(
            filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None
        ) -> None:
            if is_emulated(dist.group.WORLD):  # its values mean nothing
                return
            if trainer.state.status == TrainerStatus.INTERRUPTED and not self._can_all_ranks_save():
                rank_zero_warn(f"{filepath} is not saved: not all ranks are there to save it", category=OSDPWarning)
                return
            eager = _hooks_inspect_checkpoint(trainer) or not handles_natively(self.checkpoint_io, filepath)
            with self._checkpoint_format.deferred_gathers(self.is_global_zero, eager):
                original(filepath, weights_only, storage_options)

        save_checkpoint.defers_gathers = True  # type: ignore[attr-defined]
        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]

    def _checkpoint_memory_mode(self, trainer: pl.Trainer) -> CheckpointMemory:
        """Return how much a rank gathers on its device while the Trainer's callbacks save checkpoints."""
        callbacks = trainer.checkpoint_callbacks
        if self._checkpoint_format.is_sharded or not callbacks:
            return "nothing"
        folders = [getattr(callback, "dirpath", None) or trainer.default_root_dir for callback in callbacks]
        eager = _hooks_inspect_checkpoint(trainer) or not all(
            handles_natively(self.checkpoint_io, folder) for folder in folders
        )
        return "gathered" if eager and self.root_device.type == "cpu" else "streamed"

    def _can_all_ranks_save(self) -> bool:
        """Return whether all ranks come to save after an error: some may be gone or wait for something else."""
        return self._failure_detector is not None and self._failure_detector.can_meet_after_failure(
            sys.exc_info()[1], SAVE_WAIT_S
        )


def explain_folders_in_load_from_checkpoint() -> None:
    """Make ``load_from_checkpoint`` say what to do with a sharded checkpoint, which it can't open. Idempotent."""
    original = saving.pl_load  # type: ignore[attr-defined]
    if getattr(original, "explains_folders", False):
        return

    @functools.wraps(original)
    def load_file(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(path_or_url, str | Path)
        if is_path and (local_path(path_or_url) / atomic_files.TRAINER_FILE).is_file():
            raise CheckpointError(
                f"{path_or_url} is a folder of save_format='sharded', load_from_checkpoint reads one file: make one "
                f"with `osdp consolidate {path_or_url} FILE`, or give the folder to a Trainer with "
                "strategy='osdp' as ckpt_path"
            )
        return original(path_or_url, *args, **kwargs)

    load_file.explains_folders = True  # type: ignore[attr-defined]
    saving.pl_load = load_file  # type: ignore[attr-defined]


def local_path(path: Any) -> Path:
    """Return a local path that may be given as a URL."""
    return Path(str(path).removeprefix("file://"))


def _hooks_inspect_checkpoint(trainer: pl.Trainer) -> bool:
    """Return whether a hook of the user sees the checkpoint before it is written."""
    hook = "on_save_checkpoint"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return is_overridden(hook, trainer.lightning_module, pl.LightningModule) or any(
        is_overridden(hook, callback, pl.Callback) for callback in callbacks
    )

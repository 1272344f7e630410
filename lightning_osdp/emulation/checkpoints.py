"""Trainers save no checkpoint in a process whose other ranks are not there: what they would hold is not known."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_osdp.backend.emulated import is_emulated

_FILE_METHODS = (
    (pl.Trainer, "save_checkpoint"),
    (ModelCheckpoint, "_save_checkpoint"),
    (ModelCheckpoint, "_link_checkpoint"),
    (ModelCheckpoint, "_remove_checkpoint"),
)
"""What writes, links and removes checkpoints: those of an earlier, real run may have the same names."""


def forbid_checkpoints() -> None:
    """Make all Trainers and their callbacks leave files as they are while the process group is emulated. Idempotent."""
    for owner, name in _FILE_METHODS:
        original: Any = getattr(owner, name)
        if not getattr(original, "is_skipped_if_emulated", False):
            is_static = isinstance(vars(owner)[name], staticmethod)
            replaced = _skip_if_emulated(original)
            setattr(owner, name, staticmethod(replaced) if is_static else replaced)


def _skip_if_emulated(original: Any) -> Any:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return None if is_emulated(dist.group.WORLD) else original(*args, **kwargs)

    method.is_skipped_if_emulated = True  # type: ignore[attr-defined]
    return method

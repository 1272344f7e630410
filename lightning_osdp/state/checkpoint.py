"""Checkpoints independent of the plan: one ordinary Lightning file, or a folder that every rank writes to.

``state.folder`` is imported on use: torch.distributed.checkpoint takes 2.4 MiB of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend.agree import broadcast_object, raise_on_all_ranks
from lightning_osdp.errors import CheckpointError, ConfigurationError, OSDPError, format_error
from lightning_osdp.state import atomic_files, single_file
from lightning_osdp.state.deferred_tensor import DeferredTensors, LoadTarget
from lightning_osdp.state.opened_file import OpenedFile

if TYPE_CHECKING:
    from lightning_osdp.state.folder import CheckpointFolder

SAVE_FORMATS = ("full", "sharded")

OPEN_ATTEMPTS = 3
"""Number of times that a checkpoint is opened if it is being replaced just then."""

_DONE = -1
"""Sent instead of a tensor's index once all of them are written."""


class CheckpointFormat:
    """Saving and loading of one run's checkpoints.

    Args:
        save_format: ``"full"``: one file, as any Lightning run writes it; ``"sharded"``: a folder.

    Raises:
        ConfigurationError: there is no such format.
    """

    def __init__(self, save_format: str) -> None:
        if save_format not in SAVE_FORMATS:
            raise ConfigurationError(f"save_format={save_format!r} is not known: use 'full' or 'sharded'")
        self.is_sharded = save_format == "sharded"
        self.deferred_tensors: DeferredTensors | None = None
        """The placeholders of the checkpoint that is being saved, if any."""
        self._opened: OpenedFile | CheckpointFolder | None = None

    @contextmanager
    def deferred_gathers(self, is_rank_zero: bool, eager: bool) -> Iterator[None]:
        """Defer gathers while a checkpoint is collected and saved within the block.

        Args:
            is_rank_zero: whether this is the first rank.
            eager: whether to gather tensors while they are collected, before they are written.
        """
        self.deferred_tensors = DeferredTensors(
            includes_replicated=self.is_sharded,
            eager=eager and not self.is_sharded,
            is_rank_zero=is_rank_zero,
            group=dist.group.WORLD if dist.is_initialized() else None,
        )
        try:
            yield
        finally:
            self.deferred_tensors = None

    def save(self, checkpoint: dict[str, Any], path: Path, group: Any) -> None:
        """Write a checkpoint to a local path. Collective.

        Raises:
            CheckpointError: a rank could not write; it is raised on every rank, and ``path`` is unchanged.
        """
        deferred_tensors = self.deferred_tensors or DeferredTensors()
        if self.is_sharded:
            from lightning_osdp.state import folder

            folder.save(checkpoint, path, deferred_tensors, group)
        else:
            _save_file(checkpoint, path, deferred_tensors, group)

    def load(self, path: Path, weights_only: bool | None, group: Any) -> dict[str, Any]:
        """Open a checkpoint of either format and verify it. Collective.

        Its tensors are mapped from the file, or are placeholders: ``fill`` reads them.

        Raises:
            CheckpointError: it is damaged or foreign; it is raised on every rank.
        """
        for attempt in range(OPEN_ATTEMPTS):
            self._opened = opened = self._open(path, weights_only, group)
            fingerprints: list[str] = [""] * group.size()
            dist.all_gather_object(fingerprints, raise_on_all_ranks(group, opened.fingerprint), group=group)
            if len(set(fingerprints)) == 1:
                break
            if attempt == OPEN_ATTEMPTS - 1:
                raise CheckpointError(f"{path} is another checkpoint on each rank: it was replaced while it was loaded")
        if isinstance(opened, OpenedFile):
            raise_on_all_ranks(group, lambda: opened.verify() if group.rank() == 0 else None)
            return raise_on_all_ranks(group, lambda: _validate_checkpoint(opened.load(weights_only), path))
        raise_on_all_ranks(group, lambda: opened.verify(group.rank(), group.size()))
        return raise_on_all_ranks(group, lambda: _validate_checkpoint(opened.checkpoint, path))

    def _open(self, path: Path, weights_only: bool | None, group: Any) -> OpenedFile | CheckpointFolder:
        """Open a checkpoint on all ranks, as what the first one sees. Collective."""

        def restore_and_look() -> bool:
            if group.rank() != 0:
                return False
            try:
                atomic_files.restore(path)
            except OSError as error:
                raise CheckpointError(f"the checkpoint {path} can't be read: {error}") from error
            return path.is_dir()

        if not broadcast_object(group, raise_on_all_ranks(group, restore_and_look)):
            return raise_on_all_ranks(group, lambda: OpenedFile(path))
        from lightning_osdp.state.folder import CheckpointFolder

        return raise_on_all_ranks(group, lambda: CheckpointFolder(path, weights_only))

    def close(self) -> None:
        """Close the checkpoint that was loaded last, whose disk space is not free before, even if it is deleted."""
        self._opened = None

    def fill(self, targets: Sequence[LoadTarget]) -> None:
        """Fill targets with values of the checkpoint that was loaded last."""
        stored = [target for target in targets if target.value.is_meta]
        for target in targets:
            if not target.value.is_meta:
                target.fill()
        opened = self._opened
        folder = None if isinstance(opened, OpenedFile) else opened
        if not all(folder is not None and folder.has_tensor(target.value) for target in stored):
            raise CheckpointError("the checkpoint holds a meta tensor, which has no values")
        if isinstance(opened, OpenedFile):
            opened.assert_unchanged()
        elif opened is not None:
            opened.fill(stored)


def read_checkpoint(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint of either format as one rank sees it, with placeholders or tensors that are not read yet.

    Args:
        path: the file or folder.
        weights_only: as of ``torch.load``.

    Raises:
        CheckpointError: it is damaged or foreign.
    """
    if not path.is_dir():
        return _validate_checkpoint(OpenedFile(path).load(weights_only), path)
    from lightning_osdp.state.folder import CheckpointFolder

    return _validate_checkpoint(CheckpointFolder(path, weights_only).checkpoint, path)


def consolidate(source: Path, target: Path, weights_only: bool | None = None) -> None:
    """Convert a folder to one ordinary file, with one tensor in memory at a time and without a process group.

    Args:
        source: the folder.
        target: the file.
        weights_only: as of ``torch.load``.

    Raises:
        CheckpointError: the folder is damaged or no checkpoint, or the file can't be written.
    """
    from lightning_osdp.state.folder import CheckpointFolder

    opened = CheckpointFolder(source, weights_only)
    if source.resolve() in target.resolve().parents:
        raise CheckpointError(f"{target} can't be written: it lies in the checkpoint {source}")
    atomic_files.check_replaceable(target)
    opened.verify(0, 1)
    try:
        with atomic_files.atomic_write(target) as unfinished:
            single_file.save(opened.checkpoint, unfinished, lambda handle: lambda: opened.read_full_tensor(handle))
    except OSError as error:
        raise CheckpointError(f"{target} can't be written: {error}") from error


def _save_file(checkpoint: dict[str, Any], path: Path, deferred_tensors: DeferredTensors, group: Any) -> None:
    """Write a file on the first rank, which tells the others before each tensor which one to gather with it."""
    entries = deferred_tensors.entries
    if group.rank() != 0:
        error: OSDPError | None
        while True:
            index, error = broadcast_object(group, (_DONE, None))
            if error is not None:
                raise error
            if index == _DONE:
                return
            entries[index].unshard(group)
    gathering = False

    def gather(index: int) -> Tensor:
        nonlocal gathering
        gathering = True
        broadcast_object(group, (index, None))
        full_tensor = entries[index].unshard(group)
        gathering = False
        return full_tensor

    failure: OSDPError | None = None
    try:
        try:
            with atomic_files.atomic_write(path) as unfinished:
                single_file.save(
                    checkpoint, unfinished, lambda handle: lambda: gather(deferred_tensors.index_of(handle))
                )
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} can't be written: {error}") from error
    except Exception as error:  # whatever it is, the other ranks must hear of it
        if not gathering:
            failure = error if isinstance(error, OSDPError) else OSDPError(f"rank 0 failed: {format_error(error)}")
        raise
    finally:
        if not gathering:  # else the others have the same error
            broadcast_object(group, (_DONE, failure))


def _validate_checkpoint(checkpoint: Any, path: Path) -> dict[str, Any]:
    """Reject what is no Lightning checkpoint; copy small tensors, so that they keep no file open."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        is_dict = isinstance(checkpoint, dict)
        content = f"the keys {sorted(map(str, checkpoint))[:5]}" if is_dict else f"{type(checkpoint)}"
        raise CheckpointError(f"{path} is not a Lightning checkpoint: it holds {content}, no state_dict")
    if not isinstance(checkpoint["state_dict"], Mapping):
        raise CheckpointError(f"{path} is damaged: its state_dict is a {type(checkpoint['state_dict']).__name__}")
    large = ("state_dict", "optimizer_states")
    return {key: value if key in large else _clone_tensors(value) for key, value in checkpoint.items()}


def _clone_tensors(value: Any) -> Any:
    """Copy the tensors in plain containers."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.clone()
    if type(value) is dict:
        return {key: _clone_tensors(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_clone_tensors(inner) for inner in value)
    return value

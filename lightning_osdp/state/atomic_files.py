"""Atomic replacement of files and folders.

A checkpoint is written next to its target under a hidden name that contains the host and the process, and replaces the
target in one step once it is on the disk. What a killed process left behind is recognised by that name and removed by
the next save into the same folder.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import socket
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from lightning_osdp.errors import CheckpointError

UNFINISHED_SUFFIX = ".osdp-saving"
"""Ending of the names of unfinished checkpoints."""

ABANDONED_AFTER_S = 24 * 3600.0
"""Age from which another host's unfinished checkpoint counts as abandoned."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def unfinished_path(target: Path) -> Path:
    """Return where this process writes what is to become ``target``."""
    return target.parent / f".{target.name}.{socket.gethostname()}.{os.getpid()}{UNFINISHED_SUFFIX}"


def start(target: Path) -> Path:
    """Create and clean the folder of ``target``; return the path to write to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    restore(target)
    return unfinished_path(target)


def commit(unfinished: Path, target: Path) -> None:
    """Flush what was written to the disk, and replace ``target`` by it."""
    _sync_all(unfinished)
    replace(unfinished, target)


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yield a path for a file or folder, which replaces ``target`` unless the block raises; then it is removed."""
    unfinished = start(target)
    try:
        yield unfinished
        commit(unfinished, target)
    except BaseException:
        remove(unfinished)
        raise


def replace(complete: Path, target: Path) -> None:
    """Replace ``target``, if there is one, by ``complete`` in one step; a kill leaves the one or the other."""
    if not _is_folder(complete) and not _is_folder(target):
        os.replace(complete, target)
    elif not os.path.lexists(target):
        os.rename(complete, target)
    elif _exchange(complete, target):
        remove(complete)
    else:
        previous = _previous_path(target)
        os.rename(target, previous)
        os.rename(complete, target)
        remove(previous)
    _sync(target.parent)


def restore(target: Path) -> None:
    """Restore ``target`` if a process was killed after moving it away and before replacing it."""
    previous = _previous_path(target)
    if previous.exists() and not os.path.lexists(target):
        os.rename(previous, target)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what dead processes did not finish."""
    for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
        target_and_host, _, pid = path.name.removesuffix(UNFINISHED_SUFFIX).rpartition(".")
        if target_and_host.endswith(f".{socket.gethostname()}") and pid.isdigit():
            abandoned = int(pid) == os.getpid() or not _is_alive(int(pid))
        else:
            abandoned = time.time() - path.lstat().st_mtime > ABANDONED_AFTER_S
        if abandoned:
            remove(path)


def verify_zip(file: IO[bytes], description: str) -> None:
    """Compare a file that ``torch.save`` wrote with its checksums.

    Args:
        file: open at its beginning.
        description: its name in error messages.

    Raises:
        CheckpointError: it is no such file, or it is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            if not any(info.filename.endswith("data.pkl") for info in infos):
                raise CheckpointError(
                    f"{description} is not a checkpoint: it holds no data.pkl as torch.save writes it"
                )
            has_checksums = any(info.CRC for info in infos)  # not after torch.serialization.set_crc32_options(False)
            damaged = archive.testzip() if has_checksums else None
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{description} is damaged or cut short: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{description} is damaged: the checksum of {damaged} does not match")


def verify(path: Path) -> None:
    """Compare a local file with its checksums; files of PyTorch's old format have none.

    Raises:
        CheckpointError: it can't be read, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                verify_zip(file, str(path))
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} can't be read: {error}") from error


def load(path: Path, weights_only: bool | None) -> Any:
    """Load a local file with ``torch.load``; its tensors are mapped from the file, not read.

    Raises:
        CheckpointError: it is not a PyTorch file, or contains what ``weights_only`` forbids.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower():
            raise CheckpointError(
                f"the checkpoint {path} holds more than tensors and plain values: {error}\n"
                "If you trust it, load it with weights_only=False, as in trainer.fit(..., weights_only=False)"
            ) from error
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {type(error).__name__}: {error}") from error


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _previous_path(target: Path) -> Path:
    return target.parent / f".{target.name}.osdp-previous"


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step; return False if the system or the file system can't."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    return bool(swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


def _sync_all(path: Path) -> None:
    """Flush a file, or a folder and all files in it, to the disk."""
    if _is_folder(path):
        for inner in path.iterdir():
            _sync(inner)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

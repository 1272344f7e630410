"""Files that are there whole or not at all.

A checkpoint is written beside its target under a hidden name that says which process of which host writes it, and
takes the target's place in one step once it is on the disk. What a killed process left behind is recognised by that
name and removed by the next save into the same folder.
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
"""Of what is not complete yet."""

ABANDONED_AFTER_S = 24 * 3600.0
"""Age from which another host's unfinished checkpoint counts as left behind."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def unfinished_path(target: Path) -> Path:
    """Where this process writes what is to become ``target``."""
    return target.parent / f".{target.name}.{socket.gethostname()}.{os.getpid()}{UNFINISHED_SUFFIX}"


def start(target: Path) -> Path:
    """Where to write what is to become ``target``; its folder is there then, and free of what killed processes left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    restore(target)
    return unfinished_path(target)


def commit(unfinished: Path, target: Path) -> None:
    """Has the disk hold what was written, and puts it in place."""
    _sync_all(unfinished)
    replace(unfinished, target)


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yields a path to write to, a file or a folder; what is there in the end takes the place of ``target``.

    If the body raises, nothing is left of it and ``target`` is as it was.
    """
    unfinished = start(target)
    try:
        yield unfinished
        commit(unfinished, target)
    except BaseException:
        remove(unfinished)
        raise


def replace(complete: Path, target: Path) -> None:
    """Makes ``is_complete`` the new ``target`` in one step, whatever was there; a kill leaves the one or the other."""
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
    """Brings back what a killed process moved out of the way of a new ``target`` that never came."""
    previous = _previous_path(target)
    if previous.exists() and not os.path.lexists(target):
        os.rename(previous, target)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what processes that are gone did not finish."""
    for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
        target_and_host, _, pid = path.name.removesuffix(UNFINISHED_SUFFIX).rpartition(".")
        if target_and_host.endswith(f".{socket.gethostname()}") and pid.isdigit():
            abandoned = int(pid) == os.getpid() or not _is_alive(int(pid))
        else:
            abandoned = time.time() - path.lstat().st_mtime > ABANDONED_AFTER_S
        if abandoned:
            remove(path)


def verify_zip(file: IO[bytes], description: str) -> None:
    """Reads all of a file that ``torch.save`` wrote and compares it with its checksums.

    Raises:
        CheckpointError: it is no such file, or not as it was written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.infolist()
            if not any(info.filename.endswith("data.pkl") for info in names):
                raise CheckpointError(
                    f"{description} is not a checkpoint: it holds no data.pkl as torch.save writes it"
                )
            unchecked = all(info.CRC == 0 for info in names)  # torch.serialization.set_crc32_options(False)
            damaged = None if unchecked else archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{description} is damaged or cut short: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{description} is damaged: the checksum of {damaged} does not match")


def verify(path: Path) -> None:
    """``verify_zip`` for a local file; files of PyTorch's old format have no checksums.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                verify_zip(file, str(path))
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} can't be read: {error}") from error


def load(path: Path, weights_only: bool | None) -> Any:
    """``torch.load`` of a local file, its tensors mapped from the file, not read.

    Raises:
        CheckpointError: it is no file of PyTorch's, or holds what ``weights_only`` does not allow.
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
    except Exception as error:  # a damaged pickle raises anything
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


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two paths in one step; False where the system or the file system can't."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    return bool(swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _sync_all(path: Path) -> None:
    """Has the disk hold a file, or a folder and all files in it."""
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

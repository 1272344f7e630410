"""Atomic replacement of files and folders, and of nothing but what was written as a checkpoint.

A checkpoint is written next to its target under a hidden name that contains the host and the process, and replaces the
target in one step once it is on the disk. What a killed process left behind is recognised by that name and removed by
the next save into the same folder. A target, or something left behind, that holds anything else is never touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from lightning_osdp.backend.liveness import has_process
from lightning_osdp.errors import CheckpointError, ConfigurationError

FORMAT_NAME = "lightning_osdp sharded checkpoint"
"""The mark of our folders, at the beginning of their ``TRAINER_FILE``."""

TRAINER_FILE = "trainer.pt"
"""Name of the file with everything but the tensors of the model and of the optimizers."""

CHECKSUM_FILE = "checksums.json"
"""Name of the file with the checksums of all others in a folder."""

UNFINISHED_SUFFIX = ".osdp-saving"
"""Ending of the names of unfinished checkpoints."""

ABANDONED_AFTER_S = 24 * 3600.0
"""Age from which another host's unfinished checkpoint counts as abandoned."""

_MAX_NAME_BYTES = 255
_MARK_BYTES = 4096
"""A mark lies within the first bytes of a file."""

_FOLDER_ENTRY = re.compile(
    rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{re.escape(TRAINER_FILE)}|{re.escape(CHECKSUM_FILE)}|\.nfs[0-9a-f]+"
)
"""Names of the files in our folders; NFS gives the last one to a removed file that is still open."""

_TORCH_ZIP = re.compile(rb"PK\x03\x04.{26}[^\0]*/data\.pkl", re.DOTALL)
_TORCH_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TEXT_STARTS = (b"{", b"<")
"""How our own text files begin."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

_ATTEMPTS, _RETRY_S = 5, 0.02
"""How often, and after how many seconds, a step is tried again that another process may be in the middle of."""


def unfinished_path(target: Path) -> Path:
    """Return where this process writes what is to become ``target``."""
    return _hidden_path(target, f".{_machine_id()}.{_host()}.{os.getpid()}{UNFINISHED_SUFFIX}")


def start(target: Path) -> Path:
    """Create and clean the folder of ``target``; return the path to write to.

    Raises:
        CheckpointError: there is something else than a checkpoint at ``target``.
    """
    check_replaceable(target)
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
        try_remove(unfinished)
        raise


def replace(complete: Path, target: Path) -> None:
    """Replace ``target``, if there is one, by ``complete`` in one step; a kill leaves the one or the other.

    Raises:
        CheckpointError: there is something else than a checkpoint at ``target``.
    """
    check_replaceable(target)
    if not _is_folder(complete) and not _is_folder(target):
        os.replace(complete, target)
    elif os.path.lexists(target) and _exchange(complete, target):
        if find_foreign(complete):  # put there since it was looked at
            _exchange(complete, target)
            check_replaceable(target)
        try_remove(complete)
    else:
        _replace_in_two_steps(complete, target)
    with suppress(OSError):  # some file systems can't flush folders
        _sync(target.parent)


def restore(target: Path) -> None:
    """Restore ``target`` if a process was killed after moving it away and before replacing it."""
    previous = _previous_path(target)
    if not os.path.lexists(previous) or find_foreign(previous):
        return
    if os.path.lexists(target):
        try_remove(previous)  # the process was killed after replacing it
    else:
        try:
            os.rename(previous, target)
        except OSError:
            if not os.path.lexists(target):  # else another process was faster
                raise


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder without folders in it, if it exists."""
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    for entry in path.iterdir():
        if not entry.name.startswith(".nfs"):
            entry.unlink(missing_ok=True)
    path.rmdir()


def try_remove(path: Path) -> None:
    """Remove as ``remove`` does, or leave what can't be removed to the next clean-up."""
    with suppress(OSError):
        remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what dead processes did not finish, as far as possible: others may remove it too, or it may be theirs."""
    for path in _list_folder(folder):
        if path.name.startswith(".") and path.name.endswith(UNFINISHED_SUFFIX):
            with suppress(OSError):
                if _is_leftover(path):
                    remove(path)


def check_replaceable(target: Path) -> None:
    """Refuse a target that a checkpoint must not replace.

    Raises:
        CheckpointError: there is something else than a checkpoint at ``target``.
    """
    for attempt in range(_ATTEMPTS):
        if not (foreign := find_foreign(target)):
            return
        if attempt < _ATTEMPTS - 1:
            time.sleep(_RETRY_S)  # another process may be replacing it, without an exchange
    raise CheckpointError(
        f"no checkpoint is written to {target}: {foreign}, and only checkpoints are replaced. Give another path, "
        "or move it away"
    )


def find_foreign(path: Path) -> str:
    """Say what there is at a path that is no checkpoint; empty if there is a checkpoint, nothing or an empty file."""
    try:
        if path.is_dir():
            return _find_foreign_in_folder(path)
        if not path.exists():
            return ""
        if not path.is_file():
            return "it is not an ordinary file"
        head = _read_head(path)
    except OSError as error:
        return f"it can't be read ({error})"
    return "" if _is_torch_file(head) else "it is a file that torch.save did not write"


def write_text(path: Path, text: str, is_own: Callable[[str], bool] | None) -> None:
    """Write a file of ours, completely or not at all.

    Args:
        path: the file; a device or a pipe is written to as it is.
        text: its content.
        is_own: tells from the content of a file whether it may be replaced; None if its name says so.

    Raises:
        ConfigurationError: there is another file.
        OSError: it can't be written.
    """
    if is_own is not None:
        check_text_replaceable(path, is_own)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    unfinished = unfinished_path(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException:
        try_remove(unfinished)
        raise


def check_text_replaceable(path: Path, is_own: Callable[[str], bool]) -> None:
    """Refuse to replace a file that we did not write.

    Args:
        path: where a file is to be written.
        is_own: as of ``write_text``.

    Raises:
        ConfigurationError: there is a folder, or a file with other content.
    """
    try:
        is_folder = path.is_dir()
        content = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}") from error
    if is_folder:
        raise ConfigurationError(f"{path} can't be written: it is a folder")
    if content.strip() and not is_own(content):
        raise ConfigurationError(
            f"{path} is not replaced: it holds something that osdp did not write there. Give another path, or move it "
            "away"
        )


def check_text_writable(path: Path, is_own: Callable[[str], bool]) -> None:
    """Refuse a place where ``write_text`` would fail, before there is anything to write.

    Args:
        path: where a file is to be written.
        is_own: as of ``write_text``.

    Raises:
        ConfigurationError: the folder is missing or takes no file, or there is another file.
    """
    check_text_replaceable(path, is_own)
    if path.exists() and not path.is_file():  # a device or a pipe
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ConfigurationError(f"{path} can't be written: there is no folder {target.parent}")
    unfinished = unfinished_path(target)
    try:
        unfinished.write_text("\n")
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}") from error
    finally:
        try_remove(unfinished)


def _replace_in_two_steps(complete: Path, target: Path) -> None:
    """Move ``target`` away first: the file system has no exchange. ``restore`` mends it after a kill in between."""
    previous = _previous_path(target)
    for attempt in range(_ATTEMPTS):
        is_last = attempt == _ATTEMPTS - 1
        if attempt:
            time.sleep(_RETRY_S)  # another process replaces or restores it, too
        try:
            if os.path.lexists(target):
                check_replaceable(previous)
                try_remove(previous)  # left by a kill
                os.rename(target, previous)
        except OSError:
            if is_last:
                raise
            continue
        try:
            os.rename(complete, target)
            break
        except OSError:
            if not os.path.lexists(target):
                os.rename(previous, target)
                raise
            if is_last:
                raise
    try_remove(previous)


def _hidden_path(target: Path, suffix: str) -> Path:
    name = target.name
    if len(os.fsencode(f".{name}{suffix}")) > _MAX_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return target.parent / f".{name}{suffix}"


def _previous_path(target: Path) -> Path:
    return _hidden_path(target, ".osdp-previous")


def _host() -> str:
    return socket.gethostname()[:64]


@cache
def _machine_id() -> str:
    """Tell hosts and containers with the same name apart: a process id counts among the processes of one of them."""
    facts = ""
    with suppress(OSError):
        facts = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(facts.encode()).hexdigest()[:8]


def _is_leftover(path: Path) -> bool:
    """Return whether a process that is gone left an unfinished file or folder, and nothing else is in it."""
    rest, _, pid = path.name.removesuffix(UNFINISHED_SUFFIX).rpartition(".")
    if not pid.isdigit() or path.is_symlink():
        return False
    entries = list(path.iterdir()) if path.is_dir() else []
    if any(map(_is_folder, entries)):
        return False
    if rest.endswith(f".{_host()}"):
        machine = rest.removesuffix(f".{_host()}").rpartition(".")[2]
        if machine == _machine_id() or not re.fullmatch("[0-9a-f]{8}", machine):  # earlier releases wrote none
            return int(pid) == os.getpid() or not has_process(int(pid))
    if path.is_dir():
        is_own = all(_FOLDER_ENTRY.fullmatch(entry.name) for entry in entries)
    else:
        is_own = _is_torch_file(head := _read_head(path)) or head.startswith((b"PK", *_TEXT_STARTS))
    return is_own and time.time() - path.lstat().st_mtime > ABANDONED_AFTER_S


def _find_foreign_in_folder(path: Path) -> str:
    for entry in sorted(path.iterdir()):
        if not _FOLDER_ENTRY.fullmatch(entry.name) or _is_folder(entry):
            return f"it is a folder that holds {entry.name}"
    trainer_file = path / TRAINER_FILE
    if not trainer_file.is_file() or FORMAT_NAME.encode() not in _read_head(trainer_file):
        return "it is a folder without the mark of a sharded checkpoint"
    return ""


def _is_torch_file(head: bytes) -> bool:
    return not head or _TORCH_ZIP.match(head) is not None or head.startswith(_TORCH_LEGACY)


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MARK_BYTES)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step; return False if the system or the file system can't."""
    swap = None
    with suppress(OSError, TypeError):  # a static program, or Windows
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

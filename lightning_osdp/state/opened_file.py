"""One file of a checkpoint, read through one descriptor: what replaces it at its path meanwhile is not read."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_osdp.errors import CheckpointError, format_error

_BLOCK_BYTES = 1 << 20
_FINGERPRINT_BYTES = 1 << 16


class OpenedFile:
    """An ordinary file that is open for reading until it is garbage.

    Args:
        path: the file.
        folder: descriptor of the folder to look in for its name, where a link is refused; None to go by its path.

    Raises:
        CheckpointError: there is no such file, or it can't be read.
    """

    def __init__(self, path: Path, folder: int | None = None) -> None:
        self.path = path
        flags = [] if folder is None else ["O_NOFOLLOW"]
        try:
            # Not blocking, since it may be a pipe. Windows has none of these.
            flags += ["O_RDONLY", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY"]
            name = path if folder is None else path.name
            descriptor = os.open(name, sum(getattr(os, flag, 0) for flag in flags), dir_fd=folder)
            self.file = os.fdopen(descriptor, "rb")
            self._identity = self._stat()
        except OSError as error:
            if folder is not None and path.is_symlink():
                raise CheckpointError(f"{path} is a link: a checkpoint's files lie in its folder") from error
            raise CheckpointError(f"the checkpoint {path} can't be read: {error}") from error

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.file.close()

    @property
    def size(self) -> int:
        """Size in bytes when it was opened."""
        return self._identity[0]

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self.file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not an ordinary file")
        return found.st_size, found.st_mtime_ns

    def assert_unchanged(self) -> None:
        """Make sure that nothing was written into the file since it was opened.

        Raises:
            CheckpointError: something was.
        """
        if self._stat() != self._identity:
            raise CheckpointError(f"{self.path} was changed while it was loaded: load it again")

    def read(self, position: int = 0, length: int | None = None) -> bytes:
        """Return ``length`` bytes from ``position``, or all from there."""
        return os.pread(self.file.fileno(), self.size if length is None else length, position)

    def view(self, position: int, length: int) -> IO[bytes]:
        """Return a part of it as a file."""
        from torch.distributed.checkpoint.utils import _create_file_view  # takes MiB of every rank

        view: Any = _create_file_view(self.file, position, length)
        return cast("IO[bytes]", view)

    def fingerprint(self) -> str:
        """Return what tells this content from another one: a checkpoint's ends hold its plain values and checksums."""
        ends = self.read(0, _FINGERPRINT_BYTES) + self.read(max(0, self.size - _FINGERPRINT_BYTES), _FINGERPRINT_BYTES)
        return hashlib.sha256(ends + str(self.size).encode()).hexdigest()

    def checksum(self) -> int:
        """Return the CRC-32 of the content."""
        crc = 0
        for position in range(0, self.size, _BLOCK_BYTES):
            crc = zlib.crc32(self.read(position, _BLOCK_BYTES), crc)
        return crc

    def verify(self) -> None:
        """Compare a file that ``torch.save`` wrote with its checksums; files of PyTorch's old format have none.

        Raises:
            CheckpointError: it can't be read, or it is damaged.
        """
        try:
            if self.read(0, 4) == b"PK\x03\x04":
                verify_zip(self.file, str(self.path))
        except OSError as error:
            raise CheckpointError(f"the checkpoint {self.path} can't be read: {error}") from error

    def load(self, weights_only: bool | None) -> Any:
        """Load it with ``torch.load``; its tensors are mapped from the file, not read.

        Raises:
            CheckpointError: it is not a PyTorch file, or contains what ``weights_only`` forbids.
        """
        opened = f"/proc/self/fd/{self.file.fileno()}"
        can_map = zipfile.is_zipfile(self.file) and os.path.exists(opened)
        self.file.seek(0)
        source: Any = opened if can_map else self.file
        try:
            return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=can_map)
        except pickle.UnpicklingError as error:
            if "weights_only" in str(error).lower():
                raise CheckpointError(
                    f"the checkpoint {self.path} holds more than tensors and plain values: {error}\n"
                    "If you trust it, load it with weights_only=False, as in trainer.fit(..., weights_only=False)"
                ) from error
            raise CheckpointError(f"{self.path} is damaged or not a checkpoint: {error}") from error
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{self.path} is damaged or not a checkpoint: {format_error(error)}") from error


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
    except Exception as error:  # a damaged archive may raise anything, such as an error of another compression
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{description} is damaged or cut short: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{description} is damaged: the checksum of {damaged} does not match")

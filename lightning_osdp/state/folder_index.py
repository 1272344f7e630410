"""What a checkpoint's folder says about its files: where each part of a tensor is, and the checksums of the files.

``.metadata`` is a pickle, which could run code. It is read with stand-ins for the classes of
torch.distributed.checkpoint and with nothing else, and every value in it is checked.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lightning_osdp.errors import CheckpointError, format_error

ChunkBounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""

_FILE_NAME = re.compile(r"[\w.-]+")
_MODULE = "torch.distributed.checkpoint."


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor and where it is stored.

    Attributes:
        offsets: indices of its first element in the tensor.
        sizes: extent along each dimension.
        file: name of the file.
        position: first byte in the file.
        length: number of bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: chunks that hold every element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def read_index(content: bytes, source: str) -> dict[str, StoredTensor]:
    """Return the tensors that a ``.metadata`` file describes, by name.

    Args:
        content: the content of the file.
        source: its name in errors.

    Raises:
        CheckpointError: it is damaged, or holds anything but what torch.distributed.checkpoint writes.
    """
    try:
        return dict(_read_tensors(_MetadataUnpickler(io.BytesIO(content)).load()))
    except _ForbiddenGlobalError as error:
        raise CheckpointError(f"{source} is refused, nothing of it was run: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{source} is damaged: {format_error(error)}") from error


def covers_once(chunks: Sequence[ChunkBounds], shape: tuple[int, ...]) -> bool:
    """Return whether chunks hold every element of a tensor exactly once."""
    if not shape:
        return len(chunks) == 1
    if 0 in shape:
        return all(prod(sizes) == 0 for _, sizes in chunks)
    pending = sorted((bounds for bounds in chunks if prod(bounds[1])), reverse=True)
    edges = sorted({edge for offsets, sizes in pending for edge in (offsets[0], offsets[0] + sizes[0])})
    if not edges or edges[0] != 0 or edges[-1] != shape[0]:
        return False
    present: list[ChunkBounds] = []
    for start in edges[:-1]:
        present = [bounds for bounds in present if bounds[0][0] + bounds[1][0] > start]
        while pending and pending[-1][0][0] == start:
            present.append(pending.pop())
        if not covers_once([(offsets[1:], sizes[1:]) for offsets, sizes in present], shape[1:]):
            return False
    return True


def format_checksums(checksums: Mapping[str, tuple[int, int]]) -> str:
    """Return the text of a file with the size and the CRC-32 of each file of a checkpoint."""
    files = {name: list(checksums[name]) for name in sorted(checksums)}
    return json.dumps({"files": files, "crc32": _crc_of_files(files)}, indent=1)


def read_checksums(content: bytes, source: str) -> dict[str, tuple[int, int]]:
    """Return what ``format_checksums`` was given.

    Args:
        content: the content of the file.
        source: its name in errors.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        data = json.loads(content)
        files = data["files"]
        if data["crc32"] != _crc_of_files(files):
            raise ValueError("its own checksum does not match")
        return {_check_file_name(name): (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source} is damaged: {error}") from error


def _crc_of_files(files: Any) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


class _ForbiddenGlobalError(Exception):
    """A pickle names something that torch.distributed.checkpoint does not write."""


class _Record:
    """A stand-in for an object of torch.distributed.checkpoint: it holds the object's state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler in which nothing can be called but harmless stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a global."""
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        stand_ins: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch", "Size"): lambda *sizes: tuple(*sizes),
            ("torch.serialization", "_get_layout"): lambda name: name,
            (f"{_MODULE}metadata", "_MEM_FORMAT_ENCODING"): lambda value: value,
            ("pathlib", "PosixPath"): lambda *parts: parts,
            ("pathlib", "WindowsPath"): lambda *parts: parts,
            ("pathlib._local", "PosixPath"): lambda *parts: parts,
        }
        harmless = stand_ins.get((module, name))
        if harmless is None and module in (f"{_MODULE}metadata", f"{_MODULE}filesystem") and name in _RECORDS:
            return type(name, (_Record,), {})
        if harmless is None:
            raise _ForbiddenGlobalError(f"it names {module}.{name}, which is no part of a checkpoint's index")
        return harmless


_RECORDS = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_StorageInfo",
}


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise TypeError(f"a {type(record).__name__} in the place of a {kind}")
    return record.state


def _read_tensors(metadata: Any) -> Iterator[tuple[str, StoredTensor]]:
    fields = _state(metadata, "Metadata")
    places: dict[Any, tuple[str, int, int]] = {}
    for index, place in fields["storage_data"].items():
        where, info = _state(index, "MetadataIndex"), _state(place, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError("its files are compressed or encrypted")
        position, length = _whole_numbers((info["offset"], info["length"]))
        offset = where.get("offset")
        places[where["fqn"], None if offset is None else tuple(offset)] = (
            _check_file_name(info["relative_path"]),
            position,
            length,
        )
    for name, stored in fields["state_dict_metadata"].items():
        if type(stored).__name__ == "TensorStorageMetadata":
            yield name, _read_tensor(name, _state(stored, "TensorStorageMetadata"), places)


def _read_tensor(name: str, fields: Any, places: Mapping[Any, tuple[str, int, int]]) -> StoredTensor:
    dtype, shape = _state(fields["properties"], "TensorProperties")[0], _whole_numbers(fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has the dtype {dtype!r}")
    chunks = []
    for chunk in fields["chunks"]:
        bounds = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _whole_numbers(bounds["offsets"]), _whole_numbers(bounds["sizes"])
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of {name} has another number of dimensions")
        chunks.append(StoredChunk(offsets, sizes, *places[name, offsets]))
    if not covers_once([(chunk.offsets, chunk.sizes) for chunk in chunks], shape):
        raise ValueError(f"its parts do not hold each element of {name} once")
    return StoredTensor(dtype, shape, tuple(chunks))


def _whole_numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"sizes {values!r}")
    return tuple(values)


def _check_file_name(name: str) -> str:
    """Refuse names that lead out of the folder."""
    if not _FILE_NAME.fullmatch(name) or set(name) == {"."}:
        raise ValueError(f"it names the file {name!r}, which is not in the folder")
    return name

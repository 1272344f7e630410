"""A checkpoint as a folder to which every rank writes its shards, through torch.distributed.checkpoint.

Tensors are stored as chunks of the full tensor, so any number of ranks with any plan can read them. Everything else is
in one small file, written by ``torch.save`` with placeholders (meta tensors) for the tensors.
"""

from __future__ import annotations

import io
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from lightning_osdp.backend.agree import broadcast_object, raise_on_all_ranks
from lightning_osdp.errors import CheckpointError, format_error
from lightning_osdp.state import atomic_files, single_file
from lightning_osdp.state.atomic_files import CHECKSUM_FILE, FORMAT_NAME, TRAINER_FILE
from lightning_osdp.state.deferred_tensor import DeferredTensor, DeferredTensors, LoadTarget
from lightning_osdp.state.folder_index import StoredChunk, format_checksums, read_checksums, read_index
from lightning_osdp.state.opened_file import OpenedFile, verify_zip
from lightning_osdp.state.shard_layout import ReplicatedLayout, TensorChunk
from lightning_osdp.state.stored_tensor import defer_reading

METADATA_FILE = ".metadata"
"""Name of the index of torch.distributed.checkpoint."""

FORMAT_VERSION = 1

MAX_OPEN_FILES = 128
"""Number of files up to which all are opened at once, so that a checkpoint may be replaced while it is loaded."""


def save(checkpoint: Mapping[str, Any], target: Path, deferred_tensors: DeferredTensors, group: Any) -> None:
    """Write ``checkpoint`` as the folder ``target``, to which every rank adds its shards. Collective.

    Args:
        checkpoint: the first rank's is written.
        target: a path on a file system that all ranks share.
        deferred_tensors: the placeholders in the checkpoint.
        group: all ranks.

    Raises:
        CheckpointError: a rank could not write; it is raised on every rank, and ``target`` is unchanged.
    """
    is_first = group.rank() == 0

    def start() -> Path | None:
        if not is_first:
            return None
        with _as_checkpoint_error(target):
            unfinished = atomic_files.start(target)
            unfinished.mkdir()
            return unfinished

    unfinished = cast(Path, broadcast_object(group, raise_on_all_ranks(group, start)))
    contents = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "has_checksums": True,
        "checkpoint": dict(checkpoint),
        "tensors": deferred_tensors.placeholders_by_name(),
    }

    def commit(checksums: dict[str, tuple[int, int]]) -> None:
        for meta_tensor in _find_meta_tensors(checkpoint):
            deferred_tensors.index_of(meta_tensor)  # raises if it is no placeholder
        with _as_checkpoint_error(target):
            single_file.save(contents, unfinished / TRAINER_FILE, None)
            for name in (METADATA_FILE, TRAINER_FILE):
                file = OpenedFile(unfinished / name)
                checksums[name] = file.size, file.checksum()
            (unfinished / CHECKSUM_FILE).write_text(format_checksums(checksums), encoding="utf-8")
            atomic_files.commit(unfinished, target)

    try:
        checksums = _write_shards(deferred_tensors.entries, unfinished, group)
        raise_on_all_ranks(group, lambda: commit(checksums) if is_first else None)
    except BaseException as error:
        if is_first:
            atomic_files.try_remove(unfinished)
        if isinstance(error, CheckpointError):  # raised on every rank: none goes on before the folder is removed
            dist.barrier(group=group)
        raise


@contextmanager
def _as_checkpoint_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint {target} can't be written: {error}") from error


def _write_shards(deferred_tensors: Sequence[DeferredTensor], folder: Path, group: Any) -> dict[str, tuple[int, int]]:
    """Write the shards of all ranks; return the size and the checksum of each file."""
    writer = _CheckpointWriter(folder)
    try:
        save_state_dict({}, storage_writer=writer, planner=_ChunkSavePlanner(deferred_tensors), process_group=group)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {_format_cause(cause)}" for rank, cause in sorted(error.failures.items()))
        raise CheckpointError(f"the checkpoint can't be written: {causes}") from error
    by_rank: list[dict[str, tuple[int, int]]] = [{}] * group.size()
    dist.all_gather_object(by_rank, writer.checksums, group=group)
    return {name: checksum for checksums in by_rank for name, checksum in checksums.items()}


def _format_cause(wrapped: Any) -> str:
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return format_error(cause)


def _find_meta_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _find_meta_tensors(inner)]
    return [value] if isinstance(value, Tensor) and value.is_meta else []


class _ChecksumStream:
    """A file being written that computes its own size and checksum."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = self.crc = 0

    def write(self, data: Any) -> int:
        """Write as a file does."""
        self.crc = crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return cast(int, self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _ChecksumFileSystem(FileSystem):
    """The local file system, which notes the size and the checksum of each file of tensors."""

    def __init__(self, checksums: dict[str, tuple[int, int]]) -> None:
        self._checksums = checksums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file of a checkpoint."""
        with super().create_stream(path, mode) as file:
            stream = _ChecksumStream(file)
            yield stream
        if Path(path).suffix == ".distcp":
            self._checksums[Path(path).name] = stream.size, stream.crc


class _CheckpointWriter(FileSystemWriter):
    """A writer that reports why a write failed (the disk is full), not the error that follows from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.checksums: dict[str, tuple[int, int]] = {}
        """Size and checksum of the files that this rank has written."""
        self.fs = _ChecksumFileSystem(self.checksums)

    def write_data(
        self, plan: dcp_planner.SavePlan, planner: dcp_planner.SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's chunks."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ or error from None


class _ChunkSavePlanner(DefaultSavePlanner):
    """Plan of this rank's chunks. What several ranks hold is written by the rank that has the least to write."""

    def __init__(self, deferred_tensors: Sequence[DeferredTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunk_values: dict[tuple[str, torch.Size], Tensor] = {}
        self._deferred_tensors = deferred_tensors

    def set_up_planner(
        self, state_dict: Any, storage_meta: dcp_metadata.StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the tensors are known already."""

    def create_local_plan(self) -> dcp_planner.SavePlan:
        """Return a plan with one item for each chunk."""
        return dcp_planner.SavePlan(
            [
                self._make_write_item(tensor, chunk)
                for tensor in self._deferred_tensors
                for chunk in tensor.layout.local_chunks()
            ]
        )

    def _make_write_item(self, deferred_tensor: DeferredTensor, tensor_chunk: TensorChunk) -> dcp_planner.WriteItem:
        metadata = dcp_metadata.ChunkStorageMetadata(torch.Size(tensor_chunk.offsets), torch.Size(tensor_chunk.sizes))
        local_shard = deferred_tensor.local_shard.detach()
        self._chunk_values[deferred_tensor.name, metadata.offsets] = tensor_chunk.view(local_shard)
        properties = dcp_metadata.TensorProperties(dtype=local_shard.dtype)
        data = dcp_planner.TensorWriteData(chunk=metadata, properties=properties, size=deferred_tensor.layout.shape)
        return dcp_planner.WriteItem(
            dcp_metadata.MetadataIndex(deferred_tensor.name, metadata.offsets),
            dcp_planner.WriteItemType.SHARD,
            tensor_data=data,
        )

    def resolve_data(self, write_item: dcp_planner.WriteItem) -> Tensor:
        """Return the values of a chunk."""
        index = write_item.index
        assert index.offset is not None
        return self._chunk_values[index.fqn, index.offset]


class CheckpointFolder:
    """A folder that ``save`` wrote, opened on one rank; what replaces it at its path afterwards is not read.

    Attributes:
        checkpoint: what was saved, with placeholders for the tensors.

    Raises:
        CheckpointError: the folder is damaged, or was not written by ``save``.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self.path = path
        self._files: dict[str, OpenedFile] = {}
        if not hasattr(os, "O_DIRECTORY"):
            raise CheckpointError(f"{path} can't be read on Windows: sharded checkpoints need Linux, macOS, or WSL2")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            names = set(os.listdir(self._descriptor))
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} can't be read: {error}") from error
        for name in (METADATA_FILE, TRAINER_FILE):
            if name not in names:
                raise CheckpointError(f"{path} is not a checkpoint of lightning_osdp: there is no {name} in it")
        self._checksums = None
        if CHECKSUM_FILE in names:
            self._checksums = read_checksums(self._open(CHECKSUM_FILE).read(), str(path / CHECKSUM_FILE))
        self._verify_file(METADATA_FILE)
        self._verify_file(TRAINER_FILE)
        self._index = read_index(self._open(METADATA_FILE).read(), str(path / METADATA_FILE))
        stored = {chunk.file for tensor in self._index.values() for chunk in tensor.chunks}
        for name in sorted(stored)[:MAX_OPEN_FILES]:
            self._open(name)
        contents = self._read_trainer_file(weights_only)
        self.checkpoint: dict[str, Any] = contents["checkpoint"]
        self._placeholders: dict[str, Tensor] = contents["tensors"]
        self._names = {id(placeholder): name for name, placeholder in self._placeholders.items()}
        read = _reader(weakref.ref(self), path)
        for placeholder in self._placeholders.values():
            defer_reading(placeholder, read)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._descriptor)

    def _open(self, name: str) -> OpenedFile:
        """Open a file of the folder, and leave it open if there are not too many."""
        file = self._files.get(name) or OpenedFile(self.path / name, self._descriptor)
        if len(self._files) < MAX_OPEN_FILES:
            self._files[name] = file
        return file

    def _verify_file(self, name: str) -> None:
        """Compare a file with its checksum, if the release that wrote it stored one."""
        if self._checksums is None:
            return
        if name not in self._checksums:
            raise CheckpointError(f"{self.path / CHECKSUM_FILE} is damaged: there is no {name} in it")
        file = self._open(name)
        if (file.size, file.checksum()) != self._checksums[name]:
            raise CheckpointError(f"{self.path / name} is damaged: its checksum does not match")

    def _read_trainer_file(self, weights_only: bool | None) -> dict[str, Any]:
        file = self._open(TRAINER_FILE)
        file.verify()
        contents = file.load(weights_only)
        if not isinstance(contents, dict) or contents.get("format") != FORMAT_NAME:
            raise CheckpointError(f"{file.path} is not of a checkpoint of lightning_osdp")
        if contents.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.path} has version {contents.get('version')}, this package reads {FORMAT_VERSION}"
            )
        if contents.get("has_checksums") and self._checksums is None:
            raise CheckpointError(f"{self.path} is damaged: there is no {CHECKSUM_FILE} in it")
        if not isinstance(contents.get("checkpoint"), dict) or not isinstance(contents.get("tensors"), dict):
            raise CheckpointError(f"{file.path} is damaged: it holds no checkpoint")
        for name, placeholder in contents["tensors"].items():
            if not isinstance(placeholder, Tensor) or not placeholder.is_meta:
                raise CheckpointError(f"{file.path} is damaged: it holds {type(placeholder)} for {name}")
            stored = self._index.get(name)
            if stored is None and not placeholder.numel():
                continue  # a tensor without elements has no chunks
            if stored is None or (stored.shape, stored.dtype) != (tuple(placeholder.shape), placeholder.dtype):
                raise CheckpointError(f"{self.path} is damaged: {METADATA_FILE} and {TRAINER_FILE} differ on {name}")
        return contents

    def fingerprint(self) -> str:
        """Return what tells this checkpoint from another one."""
        names = (METADATA_FILE, TRAINER_FILE, *([] if self._checksums is None else [CHECKSUM_FILE]))
        return " ".join(self._open(name).fingerprint() for name in names)

    def verify(self, rank: int, world_size: int) -> None:
        """Compare this rank's share of the files, or of the stored chunks, with their checksums.

        Args:
            rank: this rank.
            world_size: number of ranks that share the work.

        Raises:
            CheckpointError: a chunk is damaged.
        """
        stored = {chunk for tensor in self._index.values() for chunk in tensor.chunks}
        if self._checksums is not None:
            for name in sorted({chunk.file for chunk in stored})[rank::world_size]:
                self._verify_file(name)
            return
        for chunk in sorted(stored, key=lambda chunk: (chunk.file, chunk.position))[rank::world_size]:
            file = self._open(chunk.file)
            verify_zip(io.BytesIO(file.read(chunk.position, chunk.length)), str(file.path))

    def has_tensor(self, placeholder: Tensor) -> bool:
        """Return whether a placeholder stands for a tensor in the folder."""
        return id(placeholder) in self._names

    def fill(self, targets: Sequence[LoadTarget]) -> None:
        """Read the values of each target, from no more than the chunks that overlap it."""
        overlaps: dict[StoredChunk, list[tuple[LoadTarget, TensorChunk]]] = {}
        for target in targets:
            stored = self._index.get(self._names[id(target.value)])
            chunks = stored.chunks if stored is not None else ()
            for chunk, part in itertools.product(chunks, target.layout.local_chunks()):
                if _find_overlap(chunk, part) is not None:
                    overlaps.setdefault(chunk, []).append((target, part))
        with torch.no_grad():
            for chunk in sorted(overlaps, key=lambda chunk: (chunk.file, chunk.position)):
                values = self._read_chunk(chunk, overlaps[chunk][0][0].value.dtype)
                for target, part in overlaps[chunk]:
                    overlap = _find_overlap(chunk, part)
                    assert overlap is not None
                    part.view(target.local_shard)[overlap[1]].copy_(values[overlap[0]])
        for file in self._files.values():
            file.assert_unchanged()

    def _read_chunk(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        file = self._open(chunk.file)
        try:
            values = torch.load(file.view(chunk.position, chunk.length), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{file.path} is damaged: {format_error(error)}") from error
        if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != (chunk.sizes, dtype):
            raise CheckpointError(f"{file.path} is damaged: it holds other tensors than {METADATA_FILE} says")
        return values

    def read_full_tensor(self, placeholder: Tensor) -> Tensor:
        """Read a full tensor to the CPU."""
        full_tensor = torch.empty(placeholder.shape, dtype=placeholder.dtype)
        self.fill([LoadTarget(ReplicatedLayout(placeholder.shape), full_tensor, placeholder)])
        return full_tensor


def _reader(opened: weakref.ref[CheckpointFolder], path: Path) -> Callable[[Tensor], Tensor]:
    """Return a function that reads a tensor while its folder is open."""

    def read(placeholder: Tensor) -> Tensor:
        folder = opened()
        if folder is None:
            raise CheckpointError(f"a tensor of the checkpoint {path} is used after the load: copy it in your hook")
        return folder.read_full_tensor(placeholder)

    return read


def _find_overlap(chunk: StoredChunk, part: TensorChunk) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where the common elements lie in a stored chunk and in a part of a target; None if there are none."""
    in_chunk, in_part = [], []
    for offset, size, first, extent in zip(chunk.offsets, chunk.sizes, part.offsets, part.sizes, strict=True):
        start, stop = max(offset, first), min(offset + size, first + extent)
        if start >= stop:
            return None
        in_chunk.append(slice(start - offset, stop - offset))
        in_part.append(slice(start - first, stop - first))
    return tuple(in_chunk), tuple(in_part)

"""A checkpoint as a folder that every rank writes its part of, through torch.distributed.checkpoint.

Tensors are described by where they lie in the whole (``boxes``), so any number of ranks with any plan reads them.
Everything else is in one small file, an ordinary ``torch.save`` in which the tensors are meta tensors.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from lightning_osdp.backend.collectives import broadcast_object, raise_on_all_ranks
from lightning_osdp.errors import CheckpointError
from lightning_osdp.state import atomic_files, single_file
from lightning_osdp.state.deferred_tensor import DeferredTensor, DeferredTensors, LoadTarget
from lightning_osdp.state.shard_layout import ReplicatedLayout, TensorChunk

TRAINER_FILE = "trainer.pt"
"""What is no tensor of the model or of an optimizer."""

FORMAT_NAME, FORMAT_VERSION = "lightning_osdp sharded checkpoint", 1


def save(checkpoint: Mapping[str, Any], target: Path, deferred_tensors: DeferredTensors, group: Any) -> None:
    """Writes ``is_recomputed`` as the folder ``target``: every rank what it has of the sources of ``deferred_tensors``. Collective.

    Args:
        checkpoint: that of the first rank counts.
        target: on a file system that all ranks share.
        deferred_tensors: the handles in it.
        group: all ranks.

    Raises:
        CheckpointError: a rank could not write, on every rank; ``target`` is as it was then.
    """
    is_first = group.rank() == 0

    def start() -> Path | None:
        with _as_checkpoint_error(target):
            return atomic_files.start(target) if is_first else None

    unfinished = cast(Path, broadcast_object(group, raise_on_all_ranks(group, start)))
    contents = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "checkpoint": dict(checkpoint),
        "tensors": deferred_tensors.placeholders_by_name(),
    }

    def commit() -> None:
        for value in _find_meta_tensors(checkpoint):
            deferred_tensors.index_of(value)
        with _as_checkpoint_error(target):
            single_file.save(contents, unfinished / TRAINER_FILE, None)
            atomic_files.commit(unfinished, target)

    try:
        _write_shards(deferred_tensors.entries, unfinished, group)
        raise_on_all_ranks(group, lambda: commit() if is_first else None)
    except BaseException as error:
        if is_first:
            atomic_files.remove(unfinished)
        if isinstance(error, CheckpointError):  # on every rank: none goes on while there is something left
            dist.barrier(group=group)
        raise


@contextmanager
def _as_checkpoint_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the checkpoint {target} can't be written: {error}") from error


def _write_shards(deferred_tensors: Sequence[DeferredTensor], folder: Path, group: Any) -> None:
    try:
        save_state_dict(
            {},
            storage_writer=_CheckpointWriter(folder),
            planner=_ChunkSavePlanner(deferred_tensors),
            process_group=group,
        )
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {_format_cause(cause)}" for rank, cause in sorted(error.failures.items()))
        raise CheckpointError(f"the checkpoint can't be written: {causes}") from error


def _format_cause(wrapped: Any) -> str:
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return f"{type(cause).__name__}: {cause}"


def _find_meta_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Mapping):
        return [found for inner in value.values() for found in _find_meta_tensors(inner)]
    if isinstance(value, list | tuple):
        return [found for inner in value for found in _find_meta_tensors(inner)]
    return [value] if isinstance(value, Tensor) and value.is_meta else []


class _CheckpointWriter(FileSystemWriter):
    """Says that the disk is full, not that the end of a file is not where it should be."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes this rank's boxes."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ or error from None


class _ChunkSavePlanner(DefaultSavePlanner):
    """Says where this rank's boxes lie. What several ranks hold is written by the one with the least to write."""

    def __init__(self, deferred_tensors: Sequence[DeferredTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunk_values: dict[tuple[str, torch.Size], Tensor] = {}
        self._deferred_tensors = deferred_tensors

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to set up: the sources were given."""

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        return SavePlan(
            [
                self._make_write_item(source, box)
                for source in self._deferred_tensors
                for box in source.layout.local_chunks()
            ]
        )

    def _make_write_item(self, deferred_tensor: DeferredTensor, tensor_chunk: TensorChunk) -> WriteItem:
        chunk = _to_chunk_metadata(tensor_chunk)
        self._chunk_values[deferred_tensor.name, chunk.offsets] = tensor_chunk.view(
            deferred_tensor.local_shard.detach()
        )
        properties = TensorProperties(dtype=deferred_tensor.local_shard.dtype)
        data = TensorWriteData(chunk=chunk, properties=properties, size=deferred_tensor.layout.shape)
        return WriteItem(MetadataIndex(deferred_tensor.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a box."""
        index = write_item.index
        assert index.offset is not None
        return self._chunk_values[index.fqn, index.offset]


def _to_chunk_metadata(tensor_chunk: TensorChunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(tensor_chunk.offsets), torch.Size(tensor_chunk.sizes))


class CheckpointFolder:
    """A folder that ``save`` wrote, opened on one rank.

    Attributes:
        checkpoint: what was saved, with handles in place of the tensors.

    Raises:
        CheckpointError: it is damaged, or no such folder.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        self._metadata = self._read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        contents = self._read_trainer_file(weights_only)
        self.checkpoint: dict[str, Any] = contents["checkpoint"]
        self._names = {id(handle): name for name, handle in contents["tensors"].items()}
        self._placeholders = contents["tensors"]

    def _read_metadata(self) -> Metadata:
        for name in (".metadata", TRAINER_FILE):
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path} is not a checkpoint of lightning_osdp: there is no {name} in it")
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{self.path}/.metadata is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}/.metadata is damaged: it holds a {type(metadata).__name__}")
        return metadata

    def _read_trainer_file(self, weights_only: bool | None) -> dict[str, Any]:
        contents = atomic_files.load(self.path / TRAINER_FILE, weights_only)
        if not isinstance(contents, dict) or contents.get("format") != FORMAT_NAME:
            raise CheckpointError(f"{self.path}/{TRAINER_FILE} is not of a checkpoint of lightning_osdp")
        if contents["version"] != FORMAT_VERSION:
            raise CheckpointError(f"{self.path} has version {contents['version']}, this package reads {FORMAT_VERSION}")
        for name, handle in contents["tensors"].items():
            known = self._metadata.state_dict_metadata.get(name)
            if not isinstance(known, TensorStorageMetadata) or known.size != handle.shape:
                raise CheckpointError(f"{self.path} is damaged: .metadata and {TRAINER_FILE} differ on {name}")
        return contents

    def verify(self, rank: int, world_size: int) -> None:
        """Compares this rank's share of the stored boxes with their checksums.

        Raises:
            CheckpointError: something is not as it was written.
        """
        stored = sorted(self._reader.storage_data.values(), key=lambda info: (info.relative_path, info.offset))
        for info in stored[rank::world_size]:
            path = self.path / info.relative_path
            try:
                with path.open("rb") as file:
                    file.seek(info.offset)
                    content = io.BytesIO(file.read(info.length))
            except OSError as error:
                raise CheckpointError(f"{path} can't be read: {error}") from error
            atomic_files.verify_zip(content, str(path))

    def has_tensor(self, placeholder: Tensor) -> bool:
        """Whether ``placeholder`` stands for a tensor in here."""
        return id(placeholder) in self._names

    def fill(self, targets: Sequence[LoadTarget]) -> None:
        """Reads what each target needs, and no more than the boxes that hold some of it."""
        reading = _ChunkLoadPlanner([(self._names[id(target.value)], target) for target in targets], self._metadata)
        with torch.no_grad():
            self._reader.read_data(reading.plan, reading).wait()

    def read_full_tensor(self, placeholder: Tensor) -> Tensor:
        """All of a tensor, on the CPU."""
        whole = torch.empty(placeholder.shape, dtype=placeholder.dtype)
        self.fill([LoadTarget(ReplicatedLayout(placeholder.shape), whole, placeholder)])
        return whole


class _ChunkLoadPlanner(DefaultLoadPlanner):
    """Says which boxes this rank wants, and where their values go."""

    def __init__(self, named_targets: Sequence[tuple[str, LoadTarget]], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunk_buffers: dict[tuple[str, torch.Size], Tensor] = {}
        items: list[ReadItem] = []
        for name, target in named_targets:
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            boxes = list(target.layout.local_chunks())
            self._chunk_buffers |= {(name, torch.Size(box.offsets)): box.view(target.local_shard) for box in boxes}
            items += create_read_items_for_chunk_list(name, stored, [_to_chunk_metadata(box) for box in boxes])
        self.plan = LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a box that a stored one holds."""
        index = read_item.dest_index
        assert index.offset is not None
        tensor = self._chunk_buffers[index.fqn, index.offset]
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        return tensor

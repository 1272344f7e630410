"""A checkpoint as a folder to which every rank writes its shards, through torch.distributed.checkpoint.

Tensors are stored as chunks of the full tensor, so any number of ranks with any plan can read them. Everything else is
in one small file, written by ``torch.save`` with placeholders (meta tensors) for the tensors.
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
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from lightning_osdp.backend.agree import broadcast_object, raise_on_all_ranks
from lightning_osdp.errors import CheckpointError
from lightning_osdp.state import atomic_files, single_file
from lightning_osdp.state.deferred_tensor import DeferredTensor, DeferredTensors, LoadTarget
from lightning_osdp.state.shard_layout import ReplicatedLayout, TensorChunk

TRAINER_FILE = "trainer.pt"
"""Name of the file with everything but the tensors of the model and of the optimizers."""

FORMAT_NAME, FORMAT_VERSION = "lightning_osdp sharded checkpoint", 1


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
        for meta_tensor in _find_meta_tensors(checkpoint):
            deferred_tensors.index_of(meta_tensor)  # raises if it is no placeholder
        with _as_checkpoint_error(target):
            single_file.save(contents, unfinished / TRAINER_FILE, None)
            atomic_files.commit(unfinished, target)

    try:
        _write_shards(deferred_tensors.entries, unfinished, group)
        raise_on_all_ranks(group, lambda: commit() if is_first else None)
    except BaseException as error:
        if is_first:
            atomic_files.remove(unfinished)
        if isinstance(error, CheckpointError):  # raised on every rank: none goes on before the folder is removed
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
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _find_meta_tensors(inner)]
    return [value] if isinstance(value, Tensor) and value.is_meta else []


class _CheckpointWriter(FileSystemWriter):
    """A writer that reports why a write failed (the disk is full), not the error that follows from it."""

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
        metadata, local_shard = _to_chunk_metadata(tensor_chunk), deferred_tensor.local_shard.detach()
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


def _to_chunk_metadata(tensor_chunk: TensorChunk) -> dcp_metadata.ChunkStorageMetadata:
    return dcp_metadata.ChunkStorageMetadata(torch.Size(tensor_chunk.offsets), torch.Size(tensor_chunk.sizes))


class CheckpointFolder:
    """A folder that ``save`` wrote, opened on one rank.

    Attributes:
        checkpoint: what was saved, with placeholders for the tensors.

    Raises:
        CheckpointError: the folder is damaged, or was not written by ``save``.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        self._metadata = self._read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        contents = self._read_trainer_file(weights_only)
        self.checkpoint: dict[str, Any] = contents["checkpoint"]
        self._placeholders: dict[str, Tensor] = contents["tensors"]
        self._names = {id(placeholder): name for name, placeholder in self._placeholders.items()}

    def _read_metadata(self) -> dcp_metadata.Metadata:
        for name in (".metadata", TRAINER_FILE):
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path} is not a checkpoint of lightning_osdp: there is no {name} in it")
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{self.path}/.metadata is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, dcp_metadata.Metadata):
            raise CheckpointError(f"{self.path}/.metadata is damaged: it holds a {type(metadata).__name__}")
        return metadata

    def _read_trainer_file(self, weights_only: bool | None) -> dict[str, Any]:
        contents = atomic_files.load(self.path / TRAINER_FILE, weights_only)
        if not isinstance(contents, dict) or contents.get("format") != FORMAT_NAME:
            raise CheckpointError(f"{self.path}/{TRAINER_FILE} is not of a checkpoint of lightning_osdp")
        if contents["version"] != FORMAT_VERSION:
            raise CheckpointError(f"{self.path} has version {contents['version']}, this package reads {FORMAT_VERSION}")
        for name, placeholder in contents["tensors"].items():
            stored = self._metadata.state_dict_metadata.get(name)
            if not isinstance(stored, dcp_metadata.TensorStorageMetadata) or stored.size != placeholder.shape:
                raise CheckpointError(f"{self.path} is damaged: .metadata and {TRAINER_FILE} differ on {name}")
        return contents

    def verify(self, rank: int, world_size: int) -> None:
        """Compare this rank's share of the stored chunks with their checksums.

        Args:
            rank: this rank.
            world_size: number of ranks that share the work.

        Raises:
            CheckpointError: a chunk is damaged.
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
        """Return whether a placeholder stands for a tensor in the folder."""
        return id(placeholder) in self._names

    def fill(self, targets: Sequence[LoadTarget]) -> None:
        """Read the values of each target, from no more than the chunks that overlap it."""
        planner = _ChunkLoadPlanner([(self._names[id(target.value)], target) for target in targets], self._metadata)
        with torch.no_grad():
            self._reader.read_data(planner.plan, planner).wait()

    def read_full_tensor(self, placeholder: Tensor) -> Tensor:
        """Read a full tensor to the CPU."""
        full_tensor = torch.empty(placeholder.shape, dtype=placeholder.dtype)
        self.fill([LoadTarget(ReplicatedLayout(placeholder.shape), full_tensor, placeholder)])
        return full_tensor


class _ChunkLoadPlanner(DefaultLoadPlanner):
    """Plan of the chunks that this rank reads, and where their values go."""

    def __init__(self, named_targets: Sequence[tuple[str, LoadTarget]], metadata: dcp_metadata.Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunk_buffers: dict[tuple[str, torch.Size], Tensor] = {}
        items: list[dcp_planner.ReadItem] = []
        for name, target in named_targets:
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, dcp_metadata.TensorStorageMetadata)
            chunks = list(target.layout.local_chunks())
            self._chunk_buffers |= {
                (name, torch.Size(chunk.offsets)): chunk.view(target.local_shard) for chunk in chunks
            }
            items += create_read_items_for_chunk_list(name, stored, [_to_chunk_metadata(chunk) for chunk in chunks])
        self.plan = dcp_planner.LoadPlan(items)

    def resolve_tensor(self, read_item: dcp_planner.ReadItem) -> Tensor:
        """Return the part of a chunk that a stored chunk overlaps."""
        index = read_item.dest_index
        assert index.offset is not None
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        overlap = tuple(slice(start, start + length) for start, length in ranges)
        return self._chunk_buffers[index.fqn, index.offset][overlap]

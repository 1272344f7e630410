"""FairScale's layout: slices of a parameter, each flattened, padded and cut into equal shards.

A parameter consists of slices along one dimension (of a single slice, if its operator is not split). A slice is either
on every rank, or flattened and cut into equal shards, one for each rank of its group, the last one padded with zeros.
A rank's local shard holds its part of every slice, one after the other, flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.backend import collectives
from lightning_osdp.state.shard_layout import TensorChunk


@dataclass(frozen=True)
class Slice:
    """Rows ``start`` to ``stop`` of the full tensor along the layout's dimension.

    Attributes:
        start: first index along the dimension.
        stop: one past the last index.
        num_shards: number of ranks that hold one shard each; 1 if every rank holds the slice in full.
        shard_index: index of this rank's shard.
        group: process group of those ranks; None if every rank holds the slice in full.
    """

    start: int
    stop: int
    num_shards: int = 1
    shard_index: int = 0
    group: Any = None

    @property
    def size(self) -> int:
        """Extent along the layout's dimension."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatPaddedLayout:
    """A parameter in slices, each of them replicated or flattened, padded and sharded. See ``ShardLayout``.

    Attributes:
        shape: shape of the full tensor.
        slices: in order, without gaps, along ``dim``.
        dim: dimension of the full tensor that the slices divide.
    """

    shape: torch.Size
    slices: tuple[Slice, ...]
    dim: int = 0

    @classmethod
    def create_sharded(cls, shape: torch.Size, group: Any) -> FlatPaddedLayout:
        """Return the layout of a parameter in one slice that is sharded over the ranks of ``group``."""
        return cls.create_sliced(shape, 0, [shape[0]], [True], group)

    @classmethod
    def create_sliced(
        cls, shape: torch.Size, dim: int, sizes: Sequence[int], slice_is_sharded: Sequence[bool], group: Any
    ) -> FlatPaddedLayout:
        """Return the layout of slices of ``sizes`` along ``dim``, some of which are sharded over ``group``."""
        shard = dist.get_world_size(group), dist.get_rank(group), group
        slices, start = [], 0
        for size, is_sharded in zip(sizes, slice_is_sharded, strict=True):
            slices.append(Slice(start, start + size, *(shard if is_sharded else ())))
            start += size
        return cls(shape, tuple(slices), dim)

    @property
    def groups(self) -> tuple[Any, ...]:
        """See ``ShardLayout.groups``."""
        return tuple(slice_.group for slice_ in self.slices)

    def slice_shape(self, slice_: Slice) -> torch.Size:
        """Return the shape of a slice in full."""
        return torch.Size((*self.shape[: self.dim], slice_.size, *self.shape[self.dim + 1 :]))

    def local_slice_numel(self, slice_: Slice) -> int:
        """Return the number of elements, with padding, that this rank holds of a slice."""
        return -(-self.slice_shape(slice_).numel() // slice_.num_shards)

    @property
    def local_shard_numel(self) -> int:
        """Number of elements of this rank's local shard, with padding."""
        return sum(map(self.local_slice_numel, self.slices))

    def slice_ranges(self) -> Iterator[tuple[Slice, int, int]]:
        """Yield (slice, first element, one past the last) for each slice's place in the local shard."""
        begin = 0
        for slice_ in self.slices:
            end = begin + self.local_slice_numel(slice_)
            yield slice_, begin, end
            begin = end

    def split_by_group(self, local_shard: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """See ``ShardLayout.split_by_group``."""
        flat = local_shard.reshape(-1)
        for slice_, begin, end in self.slice_ranges():
            yield slice_.group, flat[begin:end]

    def local_chunks(self) -> Iterator[TensorChunk]:
        """See ``ShardLayout.local_chunks``: a slice's flat range is several boxes, each contiguous in the range."""
        for slice_, shard_offset, _ in self.slice_ranges():
            shape, size = self.slice_shape(slice_), self.local_slice_numel(slice_)
            begin = min(slice_.shard_index * size, shape.numel())
            for offsets, sizes in chunks_of_flat_range(tuple(shape), begin, min(begin + size, shape.numel())):
                shifted = (*offsets[: self.dim], offsets[self.dim] + slice_.start, *offsets[self.dim + 1 :])
                yield TensorChunk(shifted, sizes, shard_offset)
                shard_offset += prod(sizes)

    def shard(self, full_tensor: Tensor) -> Tensor:
        """See ``ShardLayout.shard``; the result is flat."""
        return torch.cat([self._shard_slice(full_tensor, slice_) for slice_ in self.slices])

    def _shard_slice(self, full_tensor: Tensor, slice_: Slice) -> Tensor:
        flat = full_tensor.detach().narrow(self.dim, slice_.start, slice_.size).reshape(-1)
        size = self.local_slice_numel(slice_)
        shard = flat[slice_.shard_index * size : (slice_.shard_index + 1) * size]
        return nn.functional.pad(shard, (0, size - shard.numel())) if shard.numel() < size else shard.clone()

    def unshard(self, local_shard: Tensor) -> Tensor:
        """See ``ShardLayout.unshard``; one slice at a time is there in addition to the full tensor."""
        flat = local_shard.detach().reshape(-1)
        if len(self.slices) == 1:
            return self._unshard_slice(flat, self.slices[0])
        full_tensor = flat.new_empty(self.shape)
        for slice_, begin, end in self.slice_ranges():
            target = full_tensor.narrow(self.dim, slice_.start, slice_.size)
            target.copy_(self._unshard_slice(flat[begin:end], slice_))
        return full_tensor

    def _unshard_slice(self, local_shard: Tensor, slice_: Slice) -> Tensor:
        shape = self.slice_shape(slice_)
        if slice_.group is None:
            return local_shard.view(shape)
        padded = local_shard.new_empty(local_shard.numel() * slice_.num_shards)
        collectives.all_gather(padded, local_shard.contiguous(), slice_.group)
        return padded[: shape.numel()].view(shape)


def chunks_of_flat_range(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes (offsets, sizes) that make up elements ``begin`` to ``end`` of a contiguous tensor, in order.

    There are at most 2n - 1 of them for n dimensions: the end of a row, full rows, and the beginning of a row (and so
    on inside a row).
    """
    if begin >= end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row_shape = shape[1:]
    row = prod(row_shape)
    first_full, end_full = -(-begin // row), end // row
    if first_full > end_full:  # all in the middle of one row
        yield from _chunks_in_row(end_full, row_shape, begin, end)
        return
    if begin < first_full * row:
        yield from _chunks_in_row(first_full - 1, row_shape, begin, first_full * row)
    if first_full < end_full:
        yield (first_full, *(0 for _ in row_shape)), (end_full - first_full, *row_shape)
    if end_full * row < end:
        yield from _chunks_in_row(end_full, row_shape, end_full * row, end)


def _chunks_in_row(
    index: int, row_shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    start = index * prod(row_shape)
    for offsets, sizes in chunks_of_flat_range(row_shape, begin - start, end - start):
        yield (index, *offsets), (1, *sizes)

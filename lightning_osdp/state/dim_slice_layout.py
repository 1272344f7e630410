"""A parameter cut along one dimension, as tensor parallelism has it: each rank of a group holds one slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend import collectives
from lightning_osdp.state.shard_layout import TensorChunk


@dataclass(frozen=True)
class DimSliceLayout:
    """Equal slices of dimension ``dim``, one for each rank of ``group``; see ``ShardLayout``.

    Attributes:
        shape: shape of the full tensor; ``parts * num_shards`` divides its extent along ``dim``.
        dim: the dimension that is cut.
        num_shards: number of ranks that hold one slice each.
        shard_index: index of this rank's slice.
        group: process group of those ranks.
        parts: number of equal parts along ``dim``, each of which is cut; a slice has its piece of every part.
    """

    shape: torch.Size
    dim: int
    num_shards: int
    shard_index: int
    group: Any = None
    parts: int = 1

    @classmethod
    def create(cls, shape: torch.Size, dim: int, group: Any, parts: int = 1) -> DimSliceLayout:
        """Return the layout of a tensor that is cut over the ranks of ``group``."""
        return cls(shape, dim, dist.get_world_size(group), dist.get_rank(group), group, parts)

    @property
    def groups(self) -> tuple[Any]:
        """See ``ShardLayout.groups``."""
        return (self.group,)

    @property
    def piece_size(self) -> int:
        """Extent along ``dim`` of a slice's piece of one part."""
        return self.shape[self.dim] // (self.parts * self.num_shards)

    def cut(self, tensor: Tensor, index: int, dim: int) -> Tensor:
        """Return slice ``index`` along ``dim`` of a tensor that has the extent of the full one there."""
        size, stride = self.piece_size, self.piece_size * self.num_shards
        pieces = [tensor.narrow(dim, part * stride + index * size, size) for part in range(self.parts)]
        return pieces[0] if self.parts == 1 else torch.cat(pieces, dim)

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the full tensor of all slices."""
        by_part = zip(*(torch.chunk(one, self.parts, self.dim) for one in slices), strict=True)
        return torch.cat([piece for pieces in by_part for piece in pieces], self.dim)

    def shard(self, full_tensor: Tensor) -> Tensor:
        """See ``ShardLayout.shard``."""
        own = self.cut(full_tensor.detach(), self.shard_index, self.dim)
        return own.clone(memory_format=torch.contiguous_format)

    def unshard(self, local_shard: Tensor) -> Tensor:
        """See ``ShardLayout.unshard``."""
        gathered = local_shard.new_empty(self.num_shards, local_shard.numel())
        collectives.all_gather(gathered.view(-1), local_shard.detach().contiguous().view(-1), self.group)
        return self.join(list(gathered.view(self.num_shards, *self._slice_shape)))

    def reduce_scatter(self, full_tensor: Tensor) -> Tensor:
        """Return this rank's slice of the sum of ``full_tensor`` over the ranks. Collective over ``group``."""
        slices = torch.cat([self.cut(full_tensor, index, self.dim).flatten() for index in range(self.num_shards)])
        own = slices.new_empty(self._slice_shape)
        collectives.reduce_scatter(own.view(-1), slices, self.group)
        return own

    def split_by_group(self, local_shard: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """See ``ShardLayout.split_by_group``."""
        yield self.group, local_shard

    def local_chunks(self) -> Iterator[TensorChunk]:
        """See ``ShardLayout.local_chunks``."""
        size, shape = self.piece_size, self._slice_shape
        if not prod(shape):
            return
        strides = torch.empty(shape, device="meta").stride()
        for part in range(self.parts):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[self.dim] = (part * self.num_shards + self.shard_index) * size
            sizes[self.dim] = size
            yield TensorChunk(tuple(offsets), tuple(sizes), part * size * strides[self.dim], strides)

    @property
    def _slice_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.parts * self.piece_size, *self.shape[self.dim + 1 :])

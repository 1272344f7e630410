"""How a parameter lies over the ranks: which elements of the whole a rank's flat part holds, and in what order.

A parameter is cut into slices along one dimension (one slice, if its operator is not split). A slice is either on
every rank, or flattened and cut into equal pieces, one for each rank of its group, the last padded with zeros
(FairScale's layout). A rank's part is what it holds of each slice, one after the other, flat. Gradients and optimizer
states lie like the parameter they belong to.
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


@dataclass(frozen=True)
class Slice:
    """Rows ``start`` to ``stop`` of the whole along the layout's dimension.

    Attributes:
        start: first index along the dimension.
        stop: one past the last.
        num_shards: ranks that hold one piece each; 1 if every rank holds all of it.
        shard_index: which piece this rank holds.
        group: process group of those ranks; None if every rank holds all of it.
    """

    start: int
    stop: int
    num_shards: int = 1
    shard_index: int = 0
    group: Any = None

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only a piece of it."""
        return self.group is not None


@dataclass(frozen=True)
class ShardLayout:
    """Where the elements of one parameter are.

    Attributes:
        shape: of the whole parameter.
        slices: in order, without gaps, along ``dim``.
        dim: dimension of the whole that the slices divide.
    """

    shape: torch.Size
    slices: tuple[Slice, ...]
    dim: int = 0

    @classmethod
    def create_sharded(cls, shape: torch.Size, group: Any) -> ShardLayout:
        """Of a parameter in one slice, cut into a piece for each rank of ``scope``."""
        return cls(shape, (Slice(0, shape[0], dist.get_world_size(group), dist.get_rank(group), group),))

    @classmethod
    def create_sliced(
        cls, shape: torch.Size, dim: int, sizes: Sequence[int], slice_is_sharded: Sequence[bool], group: Any
    ) -> ShardLayout:
        """Of a parameter in slices of ``sizes`` along ``dim``, those ``slice_is_sharded`` cut into pieces over ``scope``."""
        pieces, index = dist.get_world_size(group), dist.get_rank(group)
        slices, start = [], 0
        for size, cut in zip(sizes, slice_is_sharded, strict=True):
            slices.append(Slice(start, start + size, *((pieces, index, group) if cut else ())))
            start += size
        return cls(shape, tuple(slices), dim)

    @classmethod
    def create_replicated(cls, shape: torch.Size) -> ShardLayout:
        """Of a tensor that every rank holds whole."""
        return cls(shape, (Slice(0, shape[0] if shape else 1),))

    def slice_numel(self, slice_: Slice) -> int:
        """Elements of a slice when whole, without padding."""
        return prod(self.slice_shape(slice_))

    def slice_shape(self, slice_: Slice) -> torch.Size:
        """Shape of a slice when whole."""
        if not self.shape:
            return self.shape
        return torch.Size((*self.shape[: self.dim], slice_.stop - slice_.start, *self.shape[self.dim + 1 :]))

    def local_slice_numel(self, slice_: Slice) -> int:
        """Elements that this rank holds of a slice, with padding."""
        return -(-self.slice_numel(slice_) // slice_.num_shards)

    @property
    def local_shard_numel(self) -> int:
        """Elements of this rank's part, with padding."""
        return sum(self.local_slice_numel(piece) for piece in self.slices)

    def slice_ranges(self) -> Iterator[tuple[Slice, int, int]]:
        """Each slice with where this rank's part has it: (slice, first element, one past the last)."""
        offset = 0
        for piece in self.slices:
            end = offset + self.local_slice_numel(piece)
            yield piece, offset, end
            offset = end

    def shard(self, full_tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor: flat, padded, a copy."""
        return torch.cat([self._shard_slice(full_tensor, piece) for piece in self.slices])

    def _shard_slice(self, full_tensor: Tensor, slice_: Slice) -> Tensor:
        flat = full_tensor.detach().narrow(self.dim, slice_.start, slice_.stop - slice_.start).reshape(-1)
        size = self.local_slice_numel(slice_)
        mine = flat[slice_.shard_index * size : (slice_.shard_index + 1) * size]
        return nn.functional.pad(mine, (0, size - mine.numel())) if mine.numel() < size else mine.clone()

    def unshard(self, local_shard: Tensor) -> Tensor:
        """The whole of what ``local_shard`` is this rank's part of. Collective over the groups of its slices."""
        flat = local_shard.detach().reshape(-1)
        if len(self.slices) == 1:
            return self._unshard_slice(flat, self.slices[0])
        whole = flat.new_empty(self.shape)
        for piece, first, last in self.slice_ranges():  # beside the whole, one slice at a time
            whole.narrow(self.dim, piece.start, piece.stop - piece.start).copy_(
                self._unshard_slice(flat[first:last], piece)
            )
        return whole

    def _unshard_slice(self, local_shard: Tensor, slice_: Slice) -> Tensor:
        shape = self.slice_shape(slice_)
        if not slice_.is_sharded:
            return local_shard.view(shape)
        whole = torch.empty(local_shard.numel() * slice_.num_shards, dtype=local_shard.dtype, device=local_shard.device)
        collectives.all_gather(whole, local_shard.contiguous(), slice_.group)
        return whole[: shape.numel()].view(shape)

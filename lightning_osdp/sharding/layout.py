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

from lightning_osdp import collectives


@dataclass(frozen=True)
class Slice:
    """Rows ``start`` to ``stop`` of the whole along the layout's dimension.

    Attributes:
        start: first index along the dimension.
        stop: one past the last.
        pieces: ranks that hold one piece each; 1 if every rank holds all of it.
        index: which piece this rank holds.
        group: process group of those ranks; None if every rank holds all of it.
    """

    start: int
    stop: int
    pieces: int = 1
    index: int = 0
    group: Any = None

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only a piece of it."""
        return self.group is not None


@dataclass(frozen=True)
class Layout:
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
    def sharded(cls, shape: torch.Size, group: Any) -> Layout:
        """Of a parameter in one slice, cut into a piece for each rank of ``group``."""
        return cls(shape, (Slice(0, shape[0], dist.get_world_size(group), dist.get_rank(group), group),))

    @classmethod
    def split(cls, shape: torch.Size, dim: int, sizes: Sequence[int], sharded: Sequence[bool], group: Any) -> Layout:
        """Of a parameter in slices of ``sizes`` along ``dim``, those ``sharded`` cut into pieces over ``group``."""
        pieces, index = dist.get_world_size(group), dist.get_rank(group)
        slices, start = [], 0
        for size, cut in zip(sizes, sharded, strict=True):
            slices.append(Slice(start, start + size, *((pieces, index, group) if cut else ())))
            start += size
        return cls(shape, tuple(slices), dim)

    @classmethod
    def replicated(cls, shape: torch.Size) -> Layout:
        """Of a tensor that every rank holds whole."""
        return cls(shape, (Slice(0, shape[0] if shape else 1),))

    def numel(self, piece: Slice) -> int:
        """Elements of a slice when whole, without padding."""
        return prod(self.slice_shape(piece))

    def slice_shape(self, piece: Slice) -> torch.Size:
        """Shape of a slice when whole."""
        if not self.shape:
            return self.shape
        return torch.Size((*self.shape[: self.dim], piece.stop - piece.start, *self.shape[self.dim + 1 :]))

    def local_numel(self, piece: Slice) -> int:
        """Elements that this rank holds of a slice, with padding."""
        return -(-self.numel(piece) // piece.pieces)

    @property
    def part_numel(self) -> int:
        """Elements of this rank's part, with padding."""
        return sum(self.local_numel(piece) for piece in self.slices)

    def ranges(self) -> Iterator[tuple[Slice, int, int]]:
        """Each slice with where this rank's part has it: (slice, first element, one past the last)."""
        offset = 0
        for piece in self.slices:
            end = offset + self.local_numel(piece)
            yield piece, offset, end
            offset = end

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor: flat, padded, a copy."""
        return torch.cat([self._piece_of(whole, piece) for piece in self.slices])

    def _piece_of(self, whole: Tensor, piece: Slice) -> Tensor:
        flat = whole.detach().narrow(self.dim, piece.start, piece.stop - piece.start).reshape(-1)
        size = self.local_numel(piece)
        mine = flat[piece.index * size : (piece.index + 1) * size]
        return nn.functional.pad(mine, (0, size - mine.numel())) if mine.numel() < size else mine.clone()

    def gather(self, part: Tensor) -> Tensor:
        """The whole of what ``part`` is this rank's part of. Collective over the groups of its slices."""
        flat = part.detach().reshape(-1)
        if len(self.slices) == 1:
            return self._whole_of(flat, self.slices[0])
        whole = flat.new_empty(self.shape)
        for piece, first, last in self.ranges():  # beside the whole, one slice at a time
            whole.narrow(self.dim, piece.start, piece.stop - piece.start).copy_(self._whole_of(flat[first:last], piece))
        return whole

    def _whole_of(self, local: Tensor, piece: Slice) -> Tensor:
        shape = self.slice_shape(piece)
        if not piece.sharded:
            return local.view(shape)
        whole = torch.empty(local.numel() * piece.pieces, dtype=local.dtype, device=local.device)
        collectives.all_gather(whole, local.contiguous(), piece.group)
        return whole[: shape.numel()].view(shape)

"""Where a rank's part lies in the whole tensor, as boxes: what torch.distributed.checkpoint describes tensors by.

A part is made of flat ranges of slices. A flat range of a tensor of n dimensions is at most 2n - 1 boxes, each of
which is contiguous in the range: the end of a row, whole rows, and the beginning of a row (and so on inside a row).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_osdp.state.shard_layout import ShardLayout


@dataclass(frozen=True)
class TensorChunk:
    """A block of the whole tensor that a rank holds in one stretch.

    Attributes:
        offsets: of its first element, one for each dimension of the whole.
        sizes: along each dimension.
        shard_offset: where its elements begin in the rank's flat part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard_offset: int

    def view(self, local_shard: Tensor) -> Tensor:
        """The elements of ``local_shard`` that are this box, in its shape."""
        return local_shard.reshape(-1)[self.shard_offset : self.shard_offset + prod(self.sizes)].view(self.sizes)


def local_chunks(layout: ShardLayout) -> Iterator[TensorChunk]:
    """What this rank holds of a tensor that lies like ``layout``, padding left out."""
    for piece, first, _ in layout.slice_ranges():
        numel, size = layout.slice_numel(piece), layout.local_slice_numel(piece)
        begin = min(piece.shard_index * size, numel)
        for offsets, sizes in chunks_of_flat_range(tuple(layout.slice_shape(piece)), begin, min(begin + size, numel)):
            if offsets:
                shifted = (*offsets[: layout.dim], offsets[layout.dim] + piece.start, *offsets[layout.dim + 1 :])
            else:
                shifted = offsets
            yield TensorChunk(shifted, sizes, first)
            first += prod(sizes)


def chunks_of_flat_range(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offsets, sizes) that elements ``shard_offset`` to ``last`` of a contiguous tensor are made of, in order."""
    if first >= last:
        return
    if len(shape) < 2:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    inner = shape[1:]
    row = prod(inner)
    head, tail = -(-first // row), last // row  # rows that are whole
    if head > tail:  # all in the middle of one row
        yield from _chunks_in_row(tail, inner, first, last)
        return
    if first < head * row:
        yield from _chunks_in_row(head - 1, inner, first, head * row)
    if head < tail:
        yield (head, *(0 for _ in inner)), (tail - head, *inner)
    if tail * row < last:
        yield from _chunks_in_row(tail, inner, tail * row, last)


def _chunks_in_row(
    index: int, row_shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    start = index * prod(row_shape)
    for offsets, sizes in chunks_of_flat_range(row_shape, first - start, last - start):
        yield (index, *offsets), (1, *sizes)

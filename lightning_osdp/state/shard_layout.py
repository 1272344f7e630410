"""How one parameter lies over the ranks.

A layout maps between the full tensor and the part of it that this rank holds, its local shard. Gradients and optimizer
states lie like the parameter they belong to. Everything in ``state`` and the norm over all gradients work with any
layout; an engine brings the one that it uses (``flat_layout.FlatPaddedLayout`` for FairScale's).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorChunk:
    """A box of the full tensor that lies in a rank's local shard.

    Attributes:
        offsets: indices of the box's first element in the full tensor, one for each dimension.
        sizes: extent of the box along each dimension.
        shard_offset: index of its first element in the flattened local shard.
        strides: its strides there; None if its elements are contiguous.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard_offset: int
    strides: tuple[int, ...] | None = None

    def view(self, local_shard: Tensor) -> Tensor:
        """Return the elements of ``local_shard`` that belong to this chunk, in the chunk's shape."""
        elements = local_shard.reshape(-1)[self.shard_offset :]
        if self.strides is not None:
            return elements.as_strided(self.sizes, self.strides)
        return elements[: prod(self.sizes)].view(self.sizes)


class ShardLayout(Protocol):
    """Where the elements of one parameter are."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        ...

    @property
    def groups(self) -> Sequence[Any]:
        """Process groups over which parts of the tensor are distributed; None stands for parts on every rank."""
        ...

    def shard(self, full_tensor: Tensor) -> Tensor:
        """Return a copy of this rank's part of ``full_tensor``, with padding where the layout has it."""
        ...

    def unshard(self, local_shard: Tensor) -> Tensor:
        """Gather the full tensor. Collective over ``groups``."""
        ...

    def split_by_group(self, local_shard: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield each part of a local shard with its group, as in ``groups``; padding may be in it, as zeros."""
        ...

    def local_chunks(self) -> Iterator[TensorChunk]:
        """Yield the boxes of the full tensor that this rank holds, without padding."""
        ...


@dataclass(frozen=True)
class ReplicatedLayout:
    """A tensor that every rank holds in full."""

    shape: torch.Size

    @property
    def groups(self) -> tuple[None]:
        """See ``ShardLayout.groups``."""
        return (None,)

    def shard(self, full_tensor: Tensor) -> Tensor:
        """Return a copy of the tensor."""
        return full_tensor.detach().clone()

    def unshard(self, local_shard: Tensor) -> Tensor:
        """Return the tensor as it is."""
        return local_shard.detach().view(self.shape)

    def split_by_group(self, local_shard: Tensor) -> Iterator[tuple[None, Tensor]]:
        """Yield the tensor once, as a part that every rank holds."""
        yield None, local_shard

    def local_chunks(self) -> Iterator[TensorChunk]:
        """Yield the whole tensor as one chunk."""
        if self.shape.numel():
            yield TensorChunk((0,) * len(self.shape), tuple(self.shape), 0)

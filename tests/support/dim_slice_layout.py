"""A second layout, as tensor parallelism or DTensor has it: rank r holds block r of one dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.state.shard_layout import TensorChunk


@dataclass(frozen=True)
class DimSliceLayout:
    """Equal blocks of dimension ``dim``, one for each rank of ``group``; see ``ShardLayout``."""

    shape: torch.Size
    dim: int
    num_shards: int
    shard_index: int
    group: Any = None

    @classmethod
    def create(cls, shape: torch.Size, dim: int, group: Any) -> DimSliceLayout:
        return cls(shape, dim, dist.get_world_size(group), dist.get_rank(group), group)

    @property
    def groups(self) -> tuple[Any]:
        return (self.group,)

    @property
    def block_size(self) -> int:
        return self.shape[self.dim] // self.num_shards

    def shard(self, full_tensor: Tensor) -> Tensor:
        start = self.shard_index * self.block_size
        block = full_tensor.detach().narrow(self.dim, start, self.block_size)
        return block.clone(memory_format=torch.contiguous_format)

    def unshard(self, local_shard: Tensor) -> Tensor:
        blocks = [torch.empty_like(local_shard) for _ in range(self.num_shards)]
        dist.all_gather(blocks, local_shard.detach().contiguous(), group=self.group)
        return torch.cat(blocks, self.dim)

    def split_by_group(self, local_shard: Tensor) -> Iterator[tuple[Any, Tensor]]:
        yield self.group, local_shard

    def local_chunks(self) -> Iterator[TensorChunk]:
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        offsets[self.dim], sizes[self.dim] = self.shard_index * self.block_size, self.block_size
        yield TensorChunk(tuple(offsets), tuple(sizes), 0)

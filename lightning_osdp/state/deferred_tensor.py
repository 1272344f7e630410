"""Tensors of a checkpoint that are not gathered yet, or not read yet.

While a checkpoint is put together or taken apart, such a tensor is a handle: a meta tensor of the whole shape. So hooks
may rename, reorder or drop entries, and nothing is gathered or read until it has a place to go, one tensor at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.errors import CheckpointError
from lightning_osdp.state.shard_layout import ShardLayout


@dataclass(frozen=True)
class DeferredTensor:
    """What a handle stands for while saving.

    Attributes:
        name: of the tensor, unique in the checkpoint.
        layout: how it lies over the ranks.
        local_shard: what this rank has of it.
    """

    name: str
    layout: ShardLayout
    local_shard: Tensor

    def unshard(self) -> Tensor:
        """All of it, on this rank. Collective."""
        return self.layout.unshard(self.local_shard)


@dataclass(frozen=True)
class LoadTarget:
    """Where a tensor of a checkpoint goes while loading.

    Attributes:
        layout: how it is to lie over the ranks.
        local_shard: this rank's memory for it.
        value: the whole tensor, or a handle.
    """

    layout: ShardLayout
    local_shard: Tensor
    value: Tensor

    def fill(self) -> None:
        """Cuts this rank's part out of a whole tensor."""
        with torch.no_grad():
            self.local_shard.copy_(self.layout.shard(self.value).view(self.local_shard.shape))


class DeferredTensors:
    """The handles of one checkpoint being saved. Every rank makes the same ones in the same order.

    Args:
        includes_replicated: replicated tensors get a handle too, for a format in which every rank writes.
        at_once: gathers at once: the first rank gets whole tensors on the CPU, the others handles without use.
        is_first: whether this rank is the one that gets them.
    """

    def __init__(self, *, includes_replicated: bool = False, eager: bool = False, is_rank_zero: bool = True) -> None:
        self.includes_replicated = includes_replicated
        self._eager = eager
        self._is_rank_zero = is_rank_zero
        self._tensors_by_name: dict[str, Tensor] = {}
        self._index_by_id: dict[int, int] = {}
        self.entries: list[DeferredTensor] = []

    def placeholder(self, deferred_tensor: DeferredTensor) -> Tensor:
        """What the checkpoint holds for ``deferred_tensor``; the same object again for the same name. Collective."""
        if deferred_tensor.name not in self._tensors_by_name:
            if self._eager and self._is_rank_zero:
                self._tensors_by_name[deferred_tensor.name] = deferred_tensor.unshard().cpu()
                return self._tensors_by_name[deferred_tensor.name]
            if self._eager:
                deferred_tensor.unshard()
            self._tensors_by_name[deferred_tensor.name] = handle = torch.empty(
                deferred_tensor.layout.shape, dtype=deferred_tensor.local_shard.dtype, device="meta"
            )
            self._index_by_id[id(handle)] = len(self.entries)
            self.entries.append(deferred_tensor)
        return self._tensors_by_name[deferred_tensor.name]

    def index_of(self, placeholder: Tensor) -> int:
        """Which of ``entries`` a handle stands for.

        Raises:
            CheckpointError: it is no handle of this checkpoint, but was computed from one.
        """
        if id(placeholder) not in self._index_by_id:
            raise CheckpointError(
                f"a tensor of shape {tuple(placeholder.shape)} in the checkpoint has no values: it is on the meta device, "
                "or a hook computed it from values that are not gathered. save_format='full' gathers them for hooks"
            )
        return self._index_by_id[id(placeholder)]

    def placeholders_by_name(self) -> dict[str, Any]:
        """By name."""
        return {source.name: self._tensors_by_name[source.name] for source in self.entries}

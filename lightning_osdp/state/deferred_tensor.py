"""Tensors of a checkpoint that are not gathered yet (saving) or not read yet (loading).

In the checkpoint a placeholder stands for such a tensor: a meta tensor of the full shape. So hooks may rename, reorder
or drop entries, and tensors are gathered or read one at a time, when their destination is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.backend.agree import raise_on_all_ranks
from lightning_osdp.errors import CheckpointError
from lightning_osdp.state.shard_layout import ShardLayout


@dataclass(frozen=True)
class DeferredTensor:
    """The tensor that a placeholder stands for while saving.

    Attributes:
        name: unique in the checkpoint.
        layout: how the tensor lies over the ranks.
        local_shard: what this rank holds of it.
    """

    name: str
    layout: ShardLayout
    local_shard: Tensor

    def unshard(self, group: Any) -> Tensor:
        """Gather the full tensor on this rank. Collective.

        Args:
            group: all ranks; None if this process is alone.

        Raises:
            CheckpointError: a rank has no memory for it; it is raised on every rank, before anything is sent.
        """
        if group is not None and any(part is not None for part in self.layout.groups):
            raise_on_all_ranks(group, lambda: self._try_memory(group.rank()))
        return self.layout.unshard(self.local_shard)

    def _try_memory(self, rank: int) -> None:
        """Allocate the full tensor: a rank that fails while others gather would leave them waiting."""
        try:
            self.local_shard.new_empty(self.layout.shape)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"rank {rank} has no memory to gather {self.name} for a checkpoint: {error}"
            ) from error


@dataclass(frozen=True)
class LoadTarget:
    """The destination of a tensor while loading.

    Attributes:
        layout: how the tensor is to lie over the ranks.
        local_shard: this rank's memory for it.
        value: the full tensor, or its placeholder.
    """

    layout: ShardLayout
    local_shard: Tensor
    value: Tensor

    def fill(self) -> None:
        """Copy this rank's shard of the full tensor."""
        with torch.no_grad():
            self.local_shard.copy_(self.layout.shard(self.value).view(self.local_shard.shape))


class DeferredTensors:
    """The placeholders of one checkpoint being saved, the same ones in the same order on every rank.

    Args:
        includes_replicated: whether replicated tensors get one too, for a format in which every rank writes.
        eager: whether to gather at once: the first rank gets full tensors on the CPU, the others unused placeholders.
        is_rank_zero: whether this is the first rank.
        group: all ranks; None if this process is alone.
    """

    def __init__(
        self, *, includes_replicated: bool = False, eager: bool = False, is_rank_zero: bool = True, group: Any = None
    ) -> None:
        self._group = group
        self.includes_replicated = includes_replicated
        self._eager = eager
        self._is_rank_zero = is_rank_zero
        self._tensors_by_name: dict[str, Tensor] = {}
        self._index_by_id: dict[int, int] = {}
        self.entries: list[DeferredTensor] = []

    def placeholder(self, deferred_tensor: DeferredTensor) -> Tensor:
        """Return what the checkpoint holds for a tensor; the same object again for the same name. Collective."""
        name = deferred_tensor.name
        if name in self._tensors_by_name:
            return self._tensors_by_name[name]
        if self._eager:
            full_tensor = deferred_tensor.unshard(self._group)
            if self._is_rank_zero:
                self._tensors_by_name[name] = full_tensor.cpu()
                return self._tensors_by_name[name]
        dtype = deferred_tensor.local_shard.dtype
        self._tensors_by_name[name] = handle = torch.empty(deferred_tensor.layout.shape, dtype=dtype, device="meta")
        self._index_by_id[id(handle)] = len(self.entries)
        self.entries.append(deferred_tensor)
        return handle

    def index_of(self, placeholder: Tensor) -> int:
        """Return the index in ``entries`` of a placeholder.

        Raises:
            CheckpointError: it is no placeholder of this checkpoint, but was computed from one.
        """
        if id(placeholder) not in self._index_by_id:
            raise CheckpointError(
                f"a tensor of shape {tuple(placeholder.shape)} in the checkpoint has no values: it is on the meta "
                "device, or a hook computed it from values that are not gathered. save_format='full' gathers them "
                "for hooks"
            )
        return self._index_by_id[id(placeholder)]

    def placeholders_by_name(self) -> dict[str, Any]:
        """Return the placeholders of all ``entries`` by name."""
        return {entry.name: self._tensors_by_name[entry.name] for entry in self.entries}

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
from lightning_osdp.sharding.layout import Layout


@dataclass(frozen=True)
class Source:
    """What a handle stands for while saving.

    Attributes:
        name: of the tensor, unique in the checkpoint.
        layout: how it lies over the ranks.
        part: what this rank has of it.
    """

    name: str
    layout: Layout
    part: Tensor

    def whole(self) -> Tensor:
        """All of it, on this rank. Collective."""
        return self.layout.gather(self.part)


@dataclass(frozen=True)
class Target:
    """Where a tensor of a checkpoint goes while loading.

    Attributes:
        layout: how it is to lie over the ranks.
        part: this rank's memory for it.
        value: the whole tensor, or a handle.
    """

    layout: Layout
    part: Tensor
    value: Tensor

    def fill(self) -> None:
        """Cuts this rank's part out of a whole tensor."""
        with torch.no_grad():
            self.part.copy_(self.layout.part_of(self.value).view(self.part.shape))


class Pending:
    """The handles of one checkpoint being saved. Every rank makes the same ones in the same order.

    Args:
        everything: replicated tensors get a handle too, for a format in which every rank writes.
        at_once: gathers at once: the first rank gets whole tensors on the CPU, the others handles without use.
        is_first: whether this rank is the one that gets them.
    """

    def __init__(self, *, everything: bool = False, at_once: bool = False, is_first: bool = True) -> None:
        self.everything = everything
        self._at_once = at_once
        self._is_first = is_first
        self._made: dict[str, Tensor] = {}
        self._index: dict[int, int] = {}
        self.sources: list[Source] = []

    def stand_in(self, source: Source) -> Tensor:
        """What the checkpoint holds for ``source``; the same object again for the same name. Collective."""
        if source.name not in self._made:
            if self._at_once and self._is_first:
                self._made[source.name] = source.whole().cpu()
                return self._made[source.name]
            if self._at_once:
                source.whole()
            self._made[source.name] = handle = torch.empty(source.layout.shape, dtype=source.part.dtype, device="meta")
            self._index[id(handle)] = len(self.sources)
            self.sources.append(source)
        return self._made[source.name]

    def index(self, handle: Tensor) -> int:
        """Which of ``sources`` a handle stands for.

        Raises:
            CheckpointError: it is no handle of this checkpoint, but was computed from one.
        """
        if id(handle) not in self._index:
            raise CheckpointError(
                f"a tensor of shape {tuple(handle.shape)} in the checkpoint has no values: it is on the meta device, "
                "or a hook computed it from values that are not gathered. save_format='full' gathers them for hooks"
            )
        return self._index[id(handle)]

    def handles(self) -> dict[str, Any]:
        """By name."""
        return {source.name: self._made[source.name] for source in self.sources}

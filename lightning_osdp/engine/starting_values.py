"""Rank 0's parameters and buffers on every rank."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StartingValues:
    """Moves parameters and buffers to the device, with rank 0's values. Collective: every rank must create one.

    On the CPU, tensors that already hold the same bytes on all ranks, as most do since modules are made from one seed,
    are not sent [M-engine-1]. On CUDA, sending takes no longer than comparing.

    Args:
        tensors: all that will be moved; they may still be on the meta device.
        device: where they are moved.
        group: the ranks that get rank 0's values; None if each rank keeps its own.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, group: Any) -> None:
        self._device, self._group = device, group
        compare = group is not None and device.type == "cpu"
        self._equal_on_all_ranks = _find_equal_on_all_ranks(list(tensors), group) if compare else set()

    def move_to_device(self, tensor: Tensor) -> None:
        """Move a tensor in place and give it rank 0's values. Collective."""
        tensor.data = tensor.data.to(self._device)
        if self._group is not None and tensor not in self._equal_on_all_ranks:
            dist.broadcast(tensor.data, src=dist.get_global_rank(self._group, 0), group=self._group)


def _find_equal_on_all_ranks(tensors: Sequence[Tensor], group: Any) -> set[Tensor]:
    digests = bytearray(b"".join(_digest(tensor) for tensor in tensors))
    if not digests:
        return set()
    own = torch.frombuffer(digests, dtype=torch.uint8).view(len(tensors), -1)
    by_rank = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(by_rank, own, group=group)
    equal = torch.stack([(other == own).all(1) for other in by_rank]).all(0).tolist()
    return {tensor for tensor, is_equal in zip(tensors, equal, strict=True) if is_equal and _is_readable(tensor)}


def _digest(tensor: Tensor) -> bytes:
    if not _is_readable(tensor):
        return bytes(hashlib.sha256().digest_size)
    # Through ctypes: the storage of a tensor that numpy has seen can't be freed any more.
    return hashlib.sha256((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).digest()


def _is_readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()

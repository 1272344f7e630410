"""The collectives of the engine, which are also those that profiling measures.

CUDA tensors use NCCL's collectives, CPU tensors rings of messages over gloo (``cpu.ring``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend.cpu import ring
from lightning_osdp.backend.emulated import BACKEND as EMULATED
from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.backend.work import COMM_WAIT, Work
from lightning_osdp.planning.cost.sharding_scopes import DIRECT_REDUCE_SCATTER_BYTES

NATIVE_GATHER_BYTES = 2 << 20
"""On a CPU, full tensors up to this size are gathered by gloo itself, which wakes fewer threads [M-backend-3]."""

COALESCE_BYTES = {"cpu": NATIVE_GATHER_BYTES, "cuda": 16 << 20}
"""Tensors that are gathered together are copied into one up to this total size: the copies cost less than the
latencies. Larger ones share a ring without being copied on a CPU, and a call of NCCL on CUDA."""

# torch 2.13 renamed these; the old names still work there but warn.
_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_native_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce_async(tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to replace ``tensor`` by its mean over the ranks.

    Args:
        tensor: contiguous, any shape, the same on all ranks. Neither to be read nor written before ``wait``.
        group: the ranks to average over.

    Returns:
        A handle. ``wait`` must be called exactly once.
    """
    if backend_of(group, tensor.device) == "nccl":
        work: Work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
        return work
    return _MeanWork(dist.all_reduce(tensor, group=group, async_op=True), tensor, group.size())


class _MeanWork:
    """A sum in flight that is divided on completion, for backends that can't average."""

    def __init__(self, work: Work, tensor: Tensor, num_ranks: int) -> None:
        self._work = work
        self._tensor = tensor
        self._num_ranks = num_ranks

    def wait(self) -> None:
        with COMM_WAIT.measure():
            self._work.wait()
            self._tensor.div_(self._num_ranks)


def all_reduce_mean(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace ``tensor`` (contiguous, any shape) by its mean over the ranks."""
    with torch.no_grad():
        all_reduce_async(tensor, group).wait()


def all_gather(output_flat: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output_flat`` with all ranks' shards in rank order, without further memory.

    Args:
        output_flat: contiguous, 1-D, ``N * shard.numel()`` elements.
        shard: contiguous, 1-D, the same size on all ranks; it may be this rank's own part of ``output_flat``.
        group: the N ranks.
    """
    assert output_flat.numel() == group.size() * shard.numel(), (output_flat.shape, shard.shape, group.size())
    with torch.no_grad(), COMM_WAIT.measure():
        if not _uses_rings(group, shard) or output_flat.nbytes <= NATIVE_GATHER_BYTES:
            _native_all_gather(output_flat, shard, group=group)
        else:
            ring.ring_all_gather([output_flat], [shard], group)


def all_gather_coalesced(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gather several tensors of one dtype, at the latency of one where possible.

    Args:
        outputs_flat: as of ``all_gather``, one for each of ``shards``.
        shards: as of ``all_gather``; the same number and sizes on all ranks.
        group: the N ranks.
    """
    device, total_bytes = shards[0].device.type, sum(output.nbytes for output in outputs_flat)
    is_large = total_bytes > COALESCE_BYTES[device]
    if len(shards) > 1 and is_large and coalesces(group, shards[0].device):
        all_gather_async(outputs_flat, shards, group).wait()
        return
    if len(shards) == 1 or (is_large and not _uses_rings(group, shards[0])):
        for output, shard in zip(outputs_flat, shards, strict=True):
            all_gather(output, shard, group)
        return
    with torch.no_grad(), COMM_WAIT.measure():
        if is_large:
            ring.ring_all_gather(outputs_flat, shards, group)
            return
        packed = torch.cat([shard.flatten() for shard in shards])
        gathered = packed.new_empty(group.size(), packed.numel())
        _native_all_gather(gathered.view(-1), packed, group=group)
        columns = torch.split(gathered, [shard.numel() for shard in shards], dim=1)
        for output, column in zip(outputs_flat, columns, strict=True):
            output.view(group.size(), -1).copy_(column)


def reduce_scatter(output_shard: Tensor, full_flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``full_flat`` over the ranks and write this rank's shard of the sum (not of the mean).

    On a CPU shard p is added in the order of ranks p + 1, p + 2, ..., p (modulo N), so equal inputs give equal bits.
    Besides its arguments it takes ``reduce_buffer_bytes`` at most.

    Args:
        output_shard: contiguous, 1-D, ``full_flat.numel() / N`` elements; no part of ``full_flat``.
        full_flat: contiguous, 1-D, the same size on all ranks, divisible by N. It is not changed.
        group: the N ranks.
    """
    assert full_flat.numel() == group.size() * output_shard.numel(), (full_flat.shape, output_shard.shape)
    with torch.no_grad(), COMM_WAIT.measure():
        if not _uses_rings(group, full_flat):
            _native_reduce_scatter(output_shard, full_flat, group=group)
        elif group.size() > 2 and full_flat.nbytes <= DIRECT_REDUCE_SCATTER_BYTES:
            ring.direct_reduce_scatter(output_shard, full_flat, group)
        else:
            ring.ring_reduce_scatter(output_shard, full_flat, group)


def reduce_scatter_coalesced(
    output_shards: Sequence[Tensor], full_flats: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Reduce-scatter several tensors at the latency of one, to the same bits as ``reduce_scatter``.

    On a CPU each rank sends every other its shards at once, which takes (N - 2) / N of the tensors besides arguments.

    Args:
        output_shards: as of ``reduce_scatter``, one for each of ``full_flats``.
        full_flats: as of ``reduce_scatter``; the same number and sizes on all ranks.
        group: the N ranks.
    """
    if _uses_rings(group, full_flats[0]) or coalesces(group, full_flats[0].device):
        reduce_scatter_async(output_shards, full_flats, group).wait()
    else:
        for output, full_flat in zip(output_shards, full_flats, strict=True):
            reduce_scatter(output, full_flat, group)


def all_gather_async(outputs_flat: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> Work:
    """Start ``all_gather_coalesced``; on a CPU see ``ring.all_gather_async``."""
    if _uses_rings(group, shards[0]):
        return ring.all_gather_async(outputs_flat, shards, group)
    return _CoalescedWork(group, "allgather_into_tensor_coalesced", outputs_flat, shards)


def reduce_scatter_async(
    output_shards: Sequence[Tensor], full_flats: Sequence[Tensor], group: dist.ProcessGroup
) -> Work:
    """Start ``reduce_scatter_coalesced``; on a CPU see ``ring.reduce_scatter_async``."""
    if _uses_rings(group, full_flats[0]):
        return ring.reduce_scatter_async(output_shards, full_flats, group)
    return _CoalescedWork(group, "reduce_scatter_tensor_coalesced", output_shards, full_flats)


class _CoalescedWork:
    """A call for several tensors in flight, whose waiting counts as that of a ring does."""

    def __init__(self, group: Any, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self._work: Work = getattr(group, name)(list(outputs), list(inputs))

    def wait(self) -> None:
        with COMM_WAIT.measure():
            self._work.wait()


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether one call of the backend gathers or reduces several tensors, without copies."""
    return backend_of(group, device) in ("nccl", EMULATED)


def _uses_rings(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not is_emulated(group)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of ``group`` for tensors on ``device``: ``gloo`` or ``nccl``; a group may have both."""
    return str(group._get_backend(device).name())


def reduce_scatter_copy_factor(backend: str, ranks: int, device: str = "cpu") -> float:
    """Return the memory of a reduce-scatter besides its input and output, as a fraction of the full tensor's.

    It is 0 for the ring on CPUs, whose buffers are constant (``reduce_buffer_bytes``), and for NCCL, which sums into
    the output. Others, gloo on CUDA among them, stage a full copy if there is anything to exchange.
    """
    sums_into_output = backend in ("nccl", EMULATED) or (backend, device) == ("gloo", "cpu")
    return 0.0 if ranks == 1 or sums_into_output else 1.0


def reduce_buffer_bytes(backend: str, ranks: int, device: str = "cpu") -> int:
    """Return the largest size of a reduce-scatter's buffers on the device, whatever the tensor's size."""
    uses_ring = (backend, device) == ("gloo", "cpu") and ranks > 2
    return min(2, ranks - 2) * ring.CHUNKS_IN_FLIGHT * ring.CHUNK_BYTES if uses_ring else 0


def all_reduce_buffer_bytes(backend: str, ranks: int, device: str = "cpu") -> int:
    """Return the largest size of all-reduces' buffers on the device, whatever the tensors' number and size.

    Gloo holds two segments of 1 MiB in each of its two threads [M-backend-4]; what it stages for CUDA lies on the host.
    """
    return 4 << 20 if (backend, device) == ("gloo", "cpu") and ranks > 1 else 0

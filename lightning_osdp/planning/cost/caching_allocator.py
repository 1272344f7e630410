"""How PyTorch's caching allocator on CUDA turns tensors into memory of the device. Pure arithmetic, for any machine.

It takes segments from the driver and cuts them into blocks. [torch 2.x, c10/cuda/CUDACachingAllocator.cpp]

    a block is a multiple of 512 B
    up to 1 MiB       blocks share segments of 2 MiB
    up to 10 MiB      blocks share segments of 20 MiB
    more              a segment of its own, a multiple of 2 MiB
    what is left of a segment is cut off for later blocks if it is at least 512 B (small) or more than 1 MiB (large)

So it is unless segments may grow (``expandable_segments``), as the strategy has them where the user has set nothing
else: that wastes less. Each stream has segments of its own. Before it gives up, the allocator hands wholly unused
segments back to the driver and tries again: so transients of the past cost nothing, and what is lost for good is in
segments that hold a tensor that stays. ``fragmentation_bytes`` is that loss: the packing of the tensors that stay, and one
open segment of each of the two sizes per stream. A plan on CUDA keeps that much free. What it does not cover: pinned
segments of a user's own streams, and memory outside of the allocator (context, NCCL), which ``hardware.USABLE_MEMORY_FRACTION``
leaves room for.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_osdp.planning.spec.model import ModelProfile

BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MEDIUM_BYTES = 10 << 20
MEDIUM_SEGMENT_BYTES = 20 << 20
LARGE_ROUND_BYTES = 2 << 20

NUM_STREAMS = 3
"""That the engine allocates on: compute, gathers, reductions."""


def block_bytes(size: int) -> int:
    """Bytes of the block for a tensor of ``size`` bytes."""
    return max(BLOCK_BYTES, _round_up(size, BLOCK_BYTES)) if size else 0


def segment_bytes(size: int) -> int:
    """Bytes taken from the driver for a tensor that fits in no segment there is."""
    block = block_bytes(size)
    if block <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES if block else 0
    return MEDIUM_SEGMENT_BYTES if block < MEDIUM_BYTES else _round_up(block, LARGE_ROUND_BYTES)


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes taken from the driver for tensors of ``sizes`` that are allocated in this order on one stream and stay."""
    reserved = 0
    free: dict[bool, list[int]] = {True: [], False: []}
    for size in sizes:
        block = block_bytes(size)
        small = block <= SMALL_BYTES
        rest = min((left for left in free[small] if left >= block), default=None)  # best fit
        if rest is None:
            rest = segment_bytes(size)
            reserved += rest
        else:
            free[small].remove(rest)
        left = rest - block
        if left >= BLOCK_BYTES if small else left > SMALL_BYTES:
            free[small].append(left)
    return reserved


def fragmentation_bytes(sizes: Iterable[int], streams: int = NUM_STREAMS) -> int:
    """Bytes to keep free on CUDA beside tensors of ``sizes`` that stay, and whatever comes and goes on ``streams``."""
    staying = list(sizes)
    return reserved_bytes(staying) - sum(staying) + streams * (SMALL_SEGMENT_BYTES + MEDIUM_SEGMENT_BYTES)


def persistent_tensor_sizes(model: ModelProfile) -> list[int]:
    """Sizes of the tensors that live as long as the training when nothing is sharded: parameters, then their states."""
    parameters = [parameter for operator in model.operators for parameter in operator.parameters]
    sizes = [parameter.parameter_bytes for parameter in parameters]
    for parameter in parameters:  # states are as large as the parameter, or a few bytes (a step count)
        states = round(parameter.optimizer_bytes / max(1, parameter.parameter_bytes))
        sizes += [parameter.parameter_bytes] * states
    return sizes


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""How PyTorch's caching allocator on CUDA turns tensors into memory of the device.

It takes segments from the driver and cuts them into blocks. [torch 2.x, c10/cuda/CUDACachingAllocator.cpp]

    a block is a multiple of 512 B
    up to 1 MiB       blocks share segments of 2 MiB
    up to 10 MiB      blocks share segments of 20 MiB
    more              a segment of its own, a multiple of 2 MiB
    the rest of a segment is cut off for later blocks if it is at least 512 B (small) or more than 1 MiB (large)

Expandable segments, which the strategy selects unless the user has set something else, waste less. Each stream has its
own segments. Before it gives up, the allocator returns unused segments to the driver and tries again, so past
transients cost nothing: only segments that hold a persistent tensor are lost. ``fragmentation_bytes`` is that loss: the
packing of persistent tensors, and one open segment of each of the two sizes per stream. A plan on CUDA keeps it free.
Not covered are pinned segments of a user's own streams, and memory outside the allocator (context, NCCL), for which
``hardware.USABLE_MEMORY_FRACTION`` leaves room.
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
"""Streams that the engine allocates on: compute, gathers, reductions."""


def block_bytes(size: int) -> int:
    """Return the bytes of the block for a tensor of ``size`` bytes."""
    return _round_up(size, BLOCK_BYTES)


def segment_bytes(size: int) -> int:
    """Return the bytes taken from the driver for a tensor that fits in no existing segment."""
    block = block_bytes(size)
    if block <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES if block else 0
    return MEDIUM_SEGMENT_BYTES if block < MEDIUM_BYTES else _round_up(block, LARGE_ROUND_BYTES)


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes taken from the driver for persistent tensors that are allocated in this order on one stream."""
    reserved = 0
    free: dict[bool, list[int]] = {True: [], False: []}
    for size in sizes:
        block = block_bytes(size)
        is_small = block <= SMALL_BYTES
        source = min((rest for rest in free[is_small] if rest >= block), default=None)  # best fit
        if source is None:
            source = segment_bytes(size)
            reserved += source
        else:
            free[is_small].remove(source)
        rest = source - block
        if rest >= BLOCK_BYTES if is_small else rest > SMALL_BYTES:
            free[is_small].append(rest)
    return reserved


def fragmentation_bytes(sizes: Iterable[int], streams: int = NUM_STREAMS) -> int:
    """Return the bytes to keep free beside persistent tensors of ``sizes`` and transients on ``streams`` streams."""
    persistent = list(sizes)
    return reserved_bytes(persistent) - sum(persistent) + streams * (SMALL_SEGMENT_BYTES + MEDIUM_SEGMENT_BYTES)


def persistent_tensor_sizes(model: ModelProfile) -> list[int]:
    """Return the sizes of all parameters, then of their optimizer states, as if nothing were sharded."""
    parameters = [parameter for operator in model.operators for parameter in operator.parameters]
    sizes = [parameter.parameter_bytes for parameter in parameters]
    for parameter in parameters:  # states are as large as the parameter, or a few bytes (a step count)
        states = round(parameter.optimizer_bytes / max(1, parameter.parameter_bytes))
        sizes += [parameter.parameter_bytes] * states
    return sizes


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

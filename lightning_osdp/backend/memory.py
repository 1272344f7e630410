"""Memory of a device: the limit, what is in use, the peak, and what the process itself takes."""

from __future__ import annotations

import gc
import linecache
import mmap
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lightning_osdp.backend.cpu import process_memory
from lightning_osdp.backend.cpu.malloc import HEAP
from lightning_osdp.planning.whatif.hardware import USABLE_MEMORY_FRACTION

Progress = Literal["measured", "searched", "tried", "compiled"]
"""How far a start is: all is measured; a plan was searched, too; steps of plans were tried, too; they were so at the
batch size that is planned, so that all that is compiled for its shapes is there."""

GROWTH_BYTES: dict[str, dict[Progress, int]] = {
    "cpu": {"measured": 14 << 20, "searched": 8 << 20, "tried": 6 << 20, "compiled": 6 << 20}
}
"""What the rest of the start and the first training steps leave behind besides tensors: small heap allocations, objects
of autograd and of the loops [M-backend-5, M-backend-6]."""

SAVING_GROWTH_BYTES = {"cpu": 3 << 20}
"""What saving whole checkpoints leaves behind in addition, where the reserve is for a searched plan [M-backend-6]."""

KEPT_BYTES = {"cpu": {"unit_bytes": 16 << 10, "tensor_bytes": 1900, "page_bytes": mmap.PAGESIZE}}
"""What one more unit takes besides tensors (hooks, nodes of autograd), what one more tensor takes that is kept from
step to step, and the size of the pages that large ones fill: fields of ``Cluster`` [M-engine-3]."""

EVALUATION_GROWTH_BYTES = {"cpu": 10 << 20}
"""What kernels leave behind in libraries if evaluation runs them with more rows than training does [M-backend-7]."""

COMPILED_KERNEL_BYTES = {"cpu": 3 * (700 << 10)}
"""What the three products with a weight in 16 bits, of forward and backward, leave behind for each shape of one
[M-backend-19]."""

CAPPED_USABLE_FRACTION, SINGLE_RANK_USABLE_FRACTION = 0.88, 0.97
"""Fraction of what the caching allocator may take that tensors can use, the rest lies between them; and the same for a
rank that has no others to gather from [M-backend-8]."""

EXPECTED_FILE_PAGE_BYTES = 3 << 20
"""Pages of libraries that the first steps on a CPU read at least; a control group does not run short of them
[M-backend-10]."""


def trim(device: torch.device, generation: int = 2) -> None:
    """Return unused memory to the system, and keep none that is freed from then on.

    Args:
        device: whose memory.
        generation: oldest generation of Python objects to collect; all of them take 0.3 s if many libraries are loaded.
    """
    gc.collect(generation)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    HEAP.release()


def clear_linecache() -> None:
    """Drop the source text that Python keeps for tracebacks, if it can be read from its file again.

    Importing torch and Lightning leaves 40,000 such lines (4 MiB). Tracing a step takes some MiB for a moment, which
    Python's allocator retains; with these lines dropped before, it has them already.
    """
    for name, entry in list(linecache.cache.items()):
        is_from_file = len(entry) > 1 and entry[1] is not None  # the time of its last change
        if is_from_file:
            del linecache.cache[name]


def memory_limit(device: torch.device, local_ranks: int, group_ranks: int | None = None) -> int:
    """Return the bytes that one rank may use on ``device``.

    CUDA: ``USABLE_MEMORY_FRACTION`` of what is free on the device or held by this process's caching allocator, and at
    most ``CAPPED_USABLE_FRACTION`` (or ``SINGLE_RANK_USABLE_FRACTION``) of what that may take
    (``torch.cuda.set_per_process_memory_fraction``). CPU: see ``process_memory.usable_bytes``.

    Args:
        device: the rank's device.
        local_ranks: ranks on this machine.
        group_ranks: ranks in this process's control group; all of this machine if None.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        usable = int(USABLE_MEMORY_FRACTION * (free + torch.cuda.memory_reserved(device)))
        is_single = dist.is_initialized() and dist.get_world_size() == 1
        share = SINGLE_RANK_USABLE_FRACTION if is_single else CAPPED_USABLE_FRACTION
        return min(usable, int(share * allowed_bytes(device)))
    return process_memory.usable_bytes(local_ranks, group_ranks or local_ranks)


def total_bytes(device: torch.device) -> int:
    """Return the bytes of memory that the device has, for a CPU the machine, whoever uses them."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return process_memory.total_bytes()


def allowed_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that this process may take, whoever else uses it."""
    return int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes(device))


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that one rank may use.

    Attributes:
        device, local_ranks, group_ranks: as in ``memory_limit``.
        user_limit: bytes that the user allows; None: as detected.
        share: fraction of what is detected that may be used.
    """

    device: torch.device
    local_ranks: int
    group_ranks: int | None = None
    user_limit: int | None = None
    share: float = 1.0

    def current(self) -> int:
        """Return the present limit in bytes."""
        if self.user_limit:
            return self.user_limit
        return int(self.share * memory_limit(self.device, self.local_ranks, self.group_ranks))

    def file_pages(self) -> int:
        """Return the bytes of ``current`` that stand for pages of files: a process goes on to read more."""
        return process_memory.file_pages() if self._has_file_pages else 0

    def expected_file_pages(self, progress: Progress) -> int:
        """Return the bytes of files that the first steps will read, which come on top of ``current``.

        Args:
            progress: how far the start is.
        """
        return EXPECTED_FILE_PAGE_BYTES if self._has_file_pages and progress not in ("tried", "compiled") else 0

    @property
    def _has_file_pages(self) -> bool:
        return not self.user_limit and self.device.type == "cpu"


def control_group(device: torch.device) -> str:
    """Return a text that is the same for processes that share a memory limit besides the device's; empty on CUDA."""
    return process_memory.control_group() if device.type == "cpu" else ""


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use: allocated on CUDA, resident in the process on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_memory.resident_bytes()


def page_faults(device: torch.device) -> int:
    """Return how often this process has touched a page that the system had to provide first; 0 on CUDA."""
    return process_memory.page_faults() if device.type == "cpu" else 0


def reset_peak(device: torch.device) -> None:
    """Restart the counter of ``peak_memory``, if possible (see ``can_reset_peak``)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        process_memory.reset_peak()


def can_reset_peak(device: torch.device) -> bool:
    """Return whether ``reset_peak`` restarts the counter; not every kernel lets it."""
    reset_peak(device)
    return peak_memory(device) - memory_in_use(device) < 1 << 20


def peak_memory(device: torch.device) -> int:
    """Return the largest ``memory_in_use`` since ``reset_peak``; on CUDA with what is freed but waits for a stream."""
    if device.type == "cuda":
        return int(torch.cuda.memory_stats(device)["active_bytes.all.peak"])
    return process_memory.peak_resident_bytes()


def peak_reserved(device: torch.device) -> int:
    """Return the largest number of bytes since ``reset_peak`` that count in a limit, on CUDA with unused segments."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)


def process_overhead(device: torch.device, model_bytes: int, reserved_bytes: int = 0) -> int:
    """Return the bytes that do not belong to the model: libraries, interpreter, buffers of the process group.

    Args:
        device: the rank's device.
        model_bytes: size of parameters and buffers that are on the device now.
        reserved_bytes: what is not there yet (see ``growth_reserve``).
    """
    trim(device)
    return max(0, memory_in_use(device) - model_bytes) + reserved_bytes


def growth_reserve(
    device: torch.device, progress: Progress, evaluates: bool = False, low_precision: int = 0, saves_whole: bool = False
) -> int:
    """Return the bytes that training will take besides tensors, and that are not there yet.

    Args:
        device: the rank's device.
        progress: how far the start is.
        evaluates: whether it will evaluate batches of another size than it trains in.
        low_precision: number of different shapes of weights that products in 16 bits read.
        saves_whole: whether it will save checkpoints in one piece.
    """
    steps = GROWTH_BYTES[device.type][progress] if device.type in GROWTH_BYTES else 0
    saving = SAVING_GROWTH_BYTES.get(device.type, 0) if saves_whole and progress == "searched" else 0
    evaluation = EVALUATION_GROWTH_BYTES.get(device.type, 0) if evaluates else 0
    kernels = COMPILED_KERNEL_BYTES.get(device.type, 0) if progress != "compiled" else 0
    return steps + saving + evaluation + low_precision * kernels

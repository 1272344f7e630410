"""What the device's own memory counters say: the limit, what is in use, the peak, and the process's fixed overhead."""

from __future__ import annotations

import ctypes
import gc
import linecache
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.hardware import USABLE_MEMORY

FIRST_STEP_BYTES = {"cpu": 10 << 20}
"""What the search and the first training steps leave behind beside tensors: small allocations in the heap, autograd's
and the loops' objects. [measured, models of 60 to 200 operators, 2 and 4 ranks: 2 to 9 MiB, the search up to 4]"""

LATER_STEPS_BYTES = {"cpu": 6 << 20}
"""The same where steps were made on a copy before, under a plan that was found: most of it is there. [measured, ten
models: 0 to 6 MiB; where all operators were replicated in those steps, 9]"""

PAGES_TO_COME_BYTES = 3 << 20
"""Of what first steps take on a CPU, pages of libraries at least, which a control group does not run short of.
[measured, five models, 2 and 4 ranks: 3.4 to 5.4 MiB]"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES, _MMAP_THRESHOLD_BYTES = 128 << 10, 64 << 10
_HEAP_BYTES = 32 << 20
"""The most that glibc lets either threshold be."""

_IS_MMAPPED = 2
"""Bit in the word before a block from malloc: it has a mapping of its own."""


def fix_cpu_allocator() -> None:
    """Makes glibc hand freed tensors back to the system, so that a rank's memory is what its live tensors take.

    glibc raises its mmap threshold as large blocks are freed, and freed tensors then stay in the heap. Measured on a
    GPT of 78 M parameters: peaks fell from 1317-1412 MiB to 870. It costs time, as every tensor's pages are then new
    ones (``benchmarks/allocator.py``). Where there is no glibc (macOS, musl), nothing is done and predictions of peak
    memory are too low there: a warning says so.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        fixed = bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES))
    except (OSError, AttributeError):
        fixed = False
    if not fixed:
        warnings.warn(
            "glibc's allocator can't be set here: freed tensors may stay in the heap, and a rank on the CPU may take "
            "more memory than predicted",
            OSDPWarning,
            stacklevel=2,
        )


def release_unused(device: torch.device, generation: int = 2) -> None:
    """Hands unused memory back: what was allocated before ``fix_cpu_allocator`` may lie freed in the heap.

    Args:
        device: whose memory.
        generation: of Python's objects up to which garbage is looked for. All of them take 0.3 s where many libraries
            are loaded.
    """
    gc.collect(generation)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    _empty_heap(ctypes.CDLL(None))


@contextmanager
def arrays_kept(device: torch.device) -> Iterator[None]:
    """Within it freed arrays stay in the heap for the next ones, and are handed back at its end: for work that makes
    many of them, after ``fix_cpu_allocator``.

    Else each one's pages would be new ones. [measured, search for GPT-2 of 20 M parameters: 0.7 M page faults, 4.5 s;
    so 3.0 s, and 0 to 4 MiB more for a moment]
    """
    libc = ctypes.CDLL(None)
    if device.type != "cpu" or not hasattr(libc, "mallopt"):
        yield
        return
    for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        libc.mallopt(threshold, _HEAP_BYTES)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        _empty_heap(libc)


def drop_source_lines() -> None:
    """Forgets the source text that Python keeps for tracebacks, where it can be read from its file again.

    Importing torch and Lightning leaves 40,000 such lines behind [measured: 4 MiB]. Reading a step takes some MiB for a
    moment, which Python's allocator keeps: with these dropped before, it has them already.
    """
    for name, entry in list(linecache.cache.items()):
        from_file = len(entry) > 1 and entry[1] is not None  # the time of its last change
        if from_file:
            del linecache.cache[name]


def _empty_heap(libc: Any) -> None:
    """Hands back what lies freed in glibc's heap, and keeps tensors from being put there."""
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
        _plug_holes(libc)


def _plug_holes(libc: Any) -> None:
    """Takes the free stretches of glibc's heap that could hold a large tensor out of use, without touching them.

    glibc fills them before it asks the system for a mapping of its own, and what a tensor leaves there when it is freed
    stays resident. A plug is never written to, so that it costs one page for its header: large ones come first.
    [measured, GPT of 13.7 M parameters in 66 units: 15 MiB that stayed after the first step; of 19.1 M parameters, 55
    MiB freed by sharding: 3.4 MiB of headers, where all plugs were of 64 KiB]
    """
    if not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _MallInfo
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    left = int(libc.mallinfo2().fordblks)  # no more than that, if the heap can grow as well
    size = _MMAP_THRESHOLD_BYTES << max(0, (left // _MMAP_THRESHOLD_BYTES).bit_length() - 1)
    while size >= _MMAP_THRESHOLD_BYTES:
        if size <= left and _plugged(libc, size):
            left -= size
        else:
            size //= 2


def _plugged(libc: Any, size: int) -> bool:
    """Whether the heap had a free stretch of ``size`` bytes, which is then taken."""
    plug = libc.malloc(size)
    if plug is None:
        return False
    if ctypes.c_size_t.from_address(plug - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MMAPPED:
        libc.free(plug)
        return False
    return True


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``fordblks`` is the number of free bytes in the heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def memory_limit(device: torch.device, local_ranks: int, group_ranks: int | None = None) -> int:
    """Bytes that one rank may use on ``device``.

    CUDA: ``USABLE_MEMORY`` of the device. CPU: an equal share of the machine's free memory, or of the control group's
    limit if that is less. Pages of files (libraries) come on top of the group's: the kernel drops them when the group
    runs short, so they never end a process, while the resident size that is planned with counts them.

    Args:
        device: the rank's device.
        local_ranks: ranks on this machine.
        group_ranks: ranks in this process's control group; all of this machine if None.
    """
    if device.type == "cuda":
        return int(USABLE_MEMORY * torch.cuda.get_device_properties(device).total_memory)
    limits = [_meminfo("MemAvailable") // local_ranks + memory_in_use(device)]
    limits += [limit // (group_ranks or local_ranks) + file_pages() for limit in _cgroup_limits()]
    return min(limits)


@dataclass(frozen=True)
class Limit:
    """Bytes that one rank may use.

    Attributes:
        device, local_ranks, group_ranks: as in ``memory_limit``.
        given: by the user; None: as found.
    """

    device: torch.device
    local_ranks: int
    group_ranks: int | None = None
    given: int | None = None

    def now(self) -> int:
        """As there are now."""
        return self.given or memory_limit(self.device, self.local_ranks, self.group_ranks)

    def file_pages(self) -> int:
        """Of those, what stands for pages of files: more are read while a process goes on."""
        return file_pages() if self._counts_pages else 0

    def pages_to_come(self, stepped: bool) -> int:
        """Further pages of files that first steps will read, and that come on top of ``now``; ``stepped`` as in
        ``overhead``."""
        return PAGES_TO_COME_BYTES if self._counts_pages and not stepped else 0

    @property
    def _counts_pages(self) -> bool:
        return not self.given and self.device.type == "cpu"


def file_pages() -> int:
    """Bytes of this process that are pages of files, libraries above all: they are shared, and can be dropped."""
    return _status("RssFile")


def control_group() -> str:
    """Of this process: the same text for processes that share a limit."""
    return Path("/proc/self/cgroup").read_text()


def memory_in_use(device: torch.device) -> int:
    """Bytes now: of the caching allocator on CUDA, resident in the process (VmRSS) on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Starts the peak counter anew. Where the kernel can't reset VmHWM, the peak since the process's start remains."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        clear_refs.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Largest number of bytes since ``reset_peak``: the allocator's peak on CUDA, VmHWM on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def overhead(device: torch.device, model_bytes: int, stepped: bool = False) -> int:
    """Bytes in use that do not belong to the model: libraries, interpreter, buffers of the process group.

    ``allowance`` is added for what is not there yet.

    Args:
        device: the rank's device.
        model_bytes: of parameters and buffers that are on the device now.
        stepped: whether this process has made training steps on a copy, under a plan that was found.
    """
    release_unused(device)
    return max(0, memory_in_use(device) - model_bytes) + allowance(device, stepped)


def allowance(device: torch.device, stepped: bool) -> int:
    """Bytes that the process will take beside tensors once it trains."""
    return (LATER_STEPS_BYTES if stepped else FIRST_STEP_BYTES).get(device.type, 0)


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, f"/proc/self/status has no {field}"
    return int(match[1]) << 10


def _meminfo(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None, f"/proc/meminfo has no {field}"
    return int(match[1]) << 10


def _cgroup_limits() -> list[int]:
    """Limits of the control groups (v1 and v2) that this process is in; none where there are none."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [Path(f"/sys/fs/cgroup{path}/memory.max"), Path("/sys/fs/cgroup/memory.max")]
        elif "memory" in controllers.split(","):
            name = "memory.limit_in_bytes"
            files = [Path(f"/sys/fs/cgroup/memory{path}/{name}"), Path(f"/sys/fs/cgroup/memory/{name}")]
        else:
            continue
        texts = [file.read_text().strip() for file in files if file.exists()]
        limits += [int(text) for text in texts if text != "max"]
    return limits

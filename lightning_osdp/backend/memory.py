"""What the device's own memory counters say: the limit, what is in use, the peak, and the process's fixed overhead."""

from __future__ import annotations

import gc
import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_osdp.backend.cpu.malloc import HEAP
from lightning_osdp.planning.whatif.hardware import USABLE_MEMORY_FRACTION

FIRST_STEP_GROWTH_BYTES = {"cpu": 14 << 20}
"""What the search and the first training steps leave behind beside tensors: small allocations in the heap, autograd's
and the loops' objects. [measured, models of 60 to 200 operators, 2 and 4 ranks: 2 to 11 MiB, the search up to 6]"""

LATER_STEPS_GROWTH_BYTES = {"cpu": 6 << 20}
"""The same where steps were made on a copy before, under a plan that was found: most of it is there. [measured, ten
models: 0 to 6 MiB; where all operators were replicated in those steps, 9]"""

EVALUATION_GROWTH_BYTES = {"cpu": 10 << 20}
"""What kernels leave behind in libraries, for good, where evaluation runs them with more rows than steps do. [measured,
MKL, matrix products with 1024 rows after ones with 2: 7 MiB, of weights in slices 11]"""

CAPPED_USABLE_FRACTION = 0.88
"""Of what the caching allocator may take at most: the rest is for what lies between tensors in its segments. [measured,
H100, of what tensors take: one rank 1.4 %; two that gather, with 6.8 GiB each and segments that grow, 12 %, and where
0.97 was planned with they ran out of memory]"""

ALLOCATOR_ENV_VARS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables in which users set the caching allocator."""

RESIDENT_BYTES_PER_PAGE_TABLE_BYTE = 512
"""Resident bytes for which the kernel keeps one byte of page tables (8 for 4 KiB). They count in a control group's
limit, but not in what is resident. [measured: 2.1 MiB of a rank with a peak of 1162]"""

EXPECTED_FILE_PAGE_BYTES = 3 << 20
"""Of what first steps take on a CPU, pages of libraries at least, which a control group does not run short of.
[measured, five models, 2 and 4 ranks: 3.4 to 5.4 MiB]"""


def enable_expandable_segments(device: torch.device) -> None:
    """Lets segments of the caching allocator grow and shrink on CUDA, unless the user has set that up
    (``ALLOCATOR_ENV_VARS``).

    Segments of fixed size are cut up for smaller tensors that stay, and what is left of them is too small for the next
    batch's. [measured, H100, 72 samples a step, 6.77 GiB allowed: none of 1.58 GiB that were free could be used for
    288 MiB] The cap of ``set_per_process_memory_fraction`` stays.
    """
    if any(name in os.environ for name in ALLOCATOR_ENV_VARS):
        return
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.13 warns of the other name
    (configure or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    torch.cuda.set_per_process_memory_fraction(fraction, device)  # which is a setting, too


def trim(device: torch.device, generation: int = 2) -> None:
    """Hands unused memory back: what was allocated before ``configure_cpu_allocator`` may lie freed in the heap.
    From then on nothing freed stays there.

    Args:
        device: whose memory.
        generation: of Python's objects up to which garbage is looked for. All of them take 0.3 s where many libraries
            are loaded.
    """
    gc.collect(generation)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    HEAP.release()


def clear_linecache() -> None:
    """Forgets the source text that Python keeps for tracebacks, where it can be read from its file again.

    Importing torch and Lightning leaves 40,000 such lines behind [measured: 4 MiB]. Reading a step takes some MiB for a
    moment, which Python's allocator keeps: with these dropped before, it has them already.
    """
    for name, entry in list(linecache.cache.items()):
        from_file = len(entry) > 1 and entry[1] is not None  # the time of its last change
        if from_file:
            del linecache.cache[name]


def memory_limit(device: torch.device, local_ranks: int, group_ranks: int | None = None) -> int:
    """Bytes that one rank may use on ``device``.

    CUDA: ``USABLE_MEMORY_FRACTION`` of what is free on the device or held by this process's caching allocator, and no more than
    ``CAPPED_USABLE_FRACTION`` of what that may take (``torch.cuda.set_per_process_memory_fraction``). CPU: an equal share of the
    machine's free memory, or of the control group's limit if that is less. Pages of files (libraries) come on top of
    the group's: the kernel drops them when the group runs short, so they never end a process, while the resident size
    that is planned with counts them.

    Args:
        device: the rank's device.
        local_ranks: ranks on this machine.
        group_ranks: ranks in this process's control group; all of this machine if None.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        usable = int(USABLE_MEMORY_FRACTION * (free + torch.cuda.memory_reserved(device)))
        return min(usable, int(CAPPED_USABLE_FRACTION * allowed_bytes(device)))
    limits = [_meminfo("MemAvailable") // local_ranks + memory_in_use(device)]
    shares = [limit // (group_ranks or local_ranks) for limit in _cgroup_limits()]
    limits += [share - share // RESIDENT_BYTES_PER_PAGE_TABLE_BYTE + file_pages() for share in shares]
    return min(limits)


def allowed_bytes(device: torch.device) -> int:
    """Of a CUDA device, what this process may take there, whoever else uses it."""
    total = torch.cuda.get_device_properties(device).total_memory
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that one rank may use.

    Attributes:
        device, local_ranks, group_ranks: as in ``memory_limit``.
        user_limit: by the user; None: as found.
    """

    device: torch.device
    local_ranks: int
    group_ranks: int | None = None
    user_limit: int | None = None

    def current(self) -> int:
        """As there are now."""
        return self.user_limit or memory_limit(self.device, self.local_ranks, self.group_ranks)

    def file_pages(self) -> int:
        """Of those, what stands for pages of files: more are read while a process goes on."""
        return file_pages() if self._has_file_pages else 0

    def expected_file_pages(self, after_trial: bool) -> int:
        """Further pages of files that first steps will read, and that come on top of ``current``; ``after_trial`` as in
        ``process_overhead``."""
        return EXPECTED_FILE_PAGE_BYTES if self._has_file_pages and not after_trial else 0

    @property
    def _has_file_pages(self) -> bool:
        return not self.user_limit and self.device.type == "cpu"


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


def can_reset_peak(device: torch.device) -> bool:
    """Whether ``reset_peak`` starts the counter anew."""
    reset_peak(device)
    return peak_memory(device) - memory_in_use(device) < 1 << 20


def peak_memory(device: torch.device) -> int:
    """Largest number of bytes since ``reset_peak``: the allocator's peak on CUDA, VmHWM on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def peak_reserved(device: torch.device) -> int:
    """Most bytes since ``reset_peak`` that count in a limit: on CUDA, what the caching allocator could not use, too."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)


def process_overhead(device: torch.device, model_bytes: int, after_trial: bool = False, evaluates: bool = False) -> int:
    """Bytes in use that do not belong to the model: libraries, interpreter, buffers of the process group.

    ``growth_reserve`` is added for what is not there yet.

    Args:
        device: the rank's device.
        model_bytes: of parameters and buffers that are on the device now.
        after_trial: whether this process has made training steps on a copy, under a plan that was found.
        evaluates: whether it will evaluate batches of another size than it trains in.
    """
    trim(device)
    return max(0, memory_in_use(device) - model_bytes) + growth_reserve(device, after_trial, evaluates)


def growth_reserve(device: torch.device, after_trial: bool, evaluates: bool = False) -> int:
    """Bytes that the process will take beside tensors once it trains; arguments as in ``process_overhead``."""
    steps = (LATER_STEPS_GROWTH_BYTES if after_trial else FIRST_STEP_GROWTH_BYTES).get(device.type, 0)
    return steps + (EVALUATION_GROWTH_BYTES.get(device.type, 0) if evaluates else 0)


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

"""Train on one rank as a job says."""

from __future__ import annotations

import ctypes
import os
import traceback
from pathlib import Path

import torch

from bench.comparison.jobs import Job
from bench.comparison.step_log import OUT_OF_MEMORY_STATUS, Recorder

_M_MMAP_THRESHOLD = -3


def expand_segments() -> None:
    """The caching allocator's setting that OSDP makes on CUDA (``backend.allocator.enable_expandable_segments``)."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def fix_allocator() -> None:
    """Make the setting of ``backend.cpu.malloc.configure_cpu_allocator`` without importing OSDP.

    Its engine hands FairScale faster collectives when it is imported, which a baseline must not profit from.
    """
    if not ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 65536):
        raise RuntimeError("glibc refuses the mmap threshold")


def run_rank(job: Job, folder: Path, cache: Path, kind: type[Recorder] | None = None) -> int:
    """Trains; returns the exit status.

    Args:
        job: what to run.
        folder: for this rank's lines.
        cache: OSDP's folder of measurements.
        kind: of recorder.
    """
    torch.set_num_threads(1)
    device = torch.device(job.device, int(os.environ["LOCAL_RANK"]) if job.device == "cuda" else None)
    if job.how.allocator:
        (expand_segments if device.type == "cuda" else fix_allocator)()
    if device.type == "cuda":
        _cap(device, job.memory_bytes)
    with (kind or Recorder)(job, folder, device) as recorder:
        try:
            if job.how.base.startswith("fairscale"):
                from bench.comparison import fairscale_loop

                fairscale_loop.train(job, recorder)
            else:
                from bench.comparison import lightning_loop

                lightning_loop.train(job, recorder, cache)
        except RuntimeError as error:  # OSDP's own has the allocator's for its cause
            if not isinstance(error, torch.OutOfMemoryError) and not isinstance(
                error.__cause__, torch.OutOfMemoryError
            ):
                raise
            traceback.print_exc()
            return OUT_OF_MEMORY_STATUS
        recorder.write("done")
    return 0


def _cap(device: torch.device, limit: int | None) -> None:
    torch.cuda.set_device(device)
    if limit is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total, device)

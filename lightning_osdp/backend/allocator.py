"""The allocator's policy: segments that grow on CUDA, and whether freed memory stays in glibc's heap on a CPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch

from lightning_osdp.backend.cpu.compiled_kernels import run_and_free_kernels as run_and_free_kernels
from lightning_osdp.backend.cpu.heap_controller import HeapController as HeapController
from lightning_osdp.backend.cpu.malloc import HEAP, configure_cpu_allocator
from lightning_osdp.backend.memory import can_reset_peak, clear_linecache

ALLOCATOR_ENV_VARS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables in which users configure the caching allocator."""


def configure(device: torch.device) -> None:
    """Prepare the allocator of ``device`` for training, before anything large is allocated."""
    if device.type == "cuda":
        enable_expandable_segments(device)
    elif device.type == "cpu":
        configure_cpu_allocator()
        clear_linecache()


def enable_expandable_segments(device: torch.device) -> None:
    """Let segments of the caching allocator grow and shrink, unless the user has configured it.

    Segments of a fixed size are cut up for smaller tensors that stay, and what is left of them is too small for the
    next batch's tensors [M-backend-11]. The cap of ``set_per_process_memory_fraction`` stays.
    """
    if any(name in os.environ for name in ALLOCATOR_ENV_VARS):
        return
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    apply_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.13 warns of the other name
    (apply_settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    torch.cuda.set_per_process_memory_fraction(fraction, device)  # this is reset by the settings above


def can_measure_retention(device: torch.device) -> bool:
    """Return whether freed memory can be retained, and it can be measured how much a process then takes."""
    return device.type == "cpu" and HEAP.can_retain and can_reset_peak(device)


def retain_freed_memory(max_bytes: int | None = None) -> AbstractContextManager[None]:
    """Return a context in which freed memory stays in glibc's heap, for work that makes many tensors on a CPU.

    Where ``configure`` has not set up glibc's heap, as on CUDA, it does nothing.

    Args:
        max_bytes: largest amount to retain; None: no bound.
    """
    return HEAP.retained(max_bytes)

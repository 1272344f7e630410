"""Kernels that oneDNN compiles for each shape, and keeps: 0.7 MiB for each product in bfloat16 [M-backend-19].

Two caches of 1024 entries hold them, one of torch in each thread and one of oneDNN, and torch exports no function that
empties them. The first goes with its thread, and other entries drive those of the second out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from lightning_osdp.backend.cpu import process_memory
from lightning_osdp.backend.cpu.malloc import HEAP

T = TypeVar("T")

_CAPACITY_ENV_VARS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
_DEFAULT_CAPACITY = 1024

_FILLING_BYTES = 28 << 20
"""What small entries in the whole cache take."""

_LOW_PRECISION = {torch.bfloat16, torch.float16}


def run_and_free_kernels(device: torch.device, dtypes: Collection[torch.dtype], function: Callable[[], T]) -> T:
    """Return the result of a function that runs many kernels once, and free those that were compiled meanwhile.

    Args:
        device: where they run. Nothing is compiled for each shape but on a CPU.
        dtypes: data types of their arguments. Products in full precision are compiled for no shape.
        function: runs in a thread of its own, unless nothing is compiled.
    """
    if device.type != "cpu" or _LOW_PRECISION.isdisjoint(dtypes):
        return function()
    before = _resident_bytes()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(function).result()
    if torch._C._has_mkldnn and _resident_bytes() - before > 2 * _FILLING_BYTES:
        _fill_cache()
    return result


def _resident_bytes() -> int:
    HEAP.release()
    return process_memory.resident_bytes()


def _fill_cache() -> None:
    """Drive all entries out of oneDNN's cache, by as many small ones as it holds."""
    settings = (os.environ.get(name, "") for name in _CAPACITY_ENV_VARS)
    capacity = next((int(text) for text in settings if text.isdecimal()), _DEFAULT_CAPACITY)
    for size in range(1, capacity + 1):
        torch.ones(size).to_mkldnn().relu()

"""glibc's heap, in a process of its own: its settings can't be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_osdp.backend.cpu import malloc

HOLES = """
import ctypes
import torch
from lightning_osdp.backend import memory
from lightning_osdp.backend.cpu import malloc

cpu, libc = torch.device("cpu"), ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 1 << 25)  # large blocks lie in the heap, as before the strategy's setup
blocks = [(libc.malloc(100_000), libc.malloc(60_000)) for _ in range(400)]
for block, _ in blocks:
    ctypes.memset(block, 1, 100_000)
malloc.configure_cpu_allocator()
for block, _ in blocks:
    libc.free(block)
memory.trim(cpu)
before = memory.memory_in_use(cpu)
tensors = [torch.ones(20_000) for _ in range(400)]
held = memory.memory_in_use(cpu) - before
del tensors
print(held, memory.memory_in_use(cpu) - before)
"""


def test_configured_heap_with_holes_leaves_no_freed_tensors_resident() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=200, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 30e6  # 400 x 80 kB
    assert left < 2e6


ONE_HOLE = """
import ctypes
import torch
from lightning_osdp.backend import memory
from lightning_osdp.backend.cpu import malloc

cpu, libc = torch.device("cpu"), ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 1 << 25)  # large blocks lie in the heap, as before the strategy's setup
blocks = [libc.malloc(1 << 20) for _ in range(128)]
guard = libc.malloc(1 << 20)  # the hole does not end where the heap does
before = memory.memory_in_use(cpu)
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
malloc.configure_cpu_allocator()
for block in blocks:
    libc.free(block)
memory.trim(cpu)
print(memory.memory_in_use(cpu) - before)
"""


def test_trim_fills_large_heap_hole_with_few_pages() -> None:
    """Of 128 MiB, a page for each 64 KiB would be 8 MiB."""
    done = subprocess.run([sys.executable, "-c", ONE_HOLE], capture_output=True, text=True, timeout=200, check=True)
    assert int(done.stdout) < 1e6


MANY_ARRAYS = """
import resource, sys
import numpy as np
import torch
from lightning_osdp.backend import memory
from lightning_osdp.backend.cpu import malloc

cpu = torch.device("cpu")
malloc.configure_cpu_allocator()
kept = []

def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for turn in range(200):
        np.full(1 << 18, 1.0)
        kept.append(np.full(100, 1.0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

work()
memory.trim(cpu)
held = memory.memory_in_use(cpu)
outside = work()
with malloc.HEAP.retained():
    within = work()
left = memory.memory_in_use(cpu) - held
again = work()
print(outside, within, again, left)
"""


def test_heap_retained_reuses_pages_and_leaves_none_behind() -> None:
    """200 arrays of 512 pages, one after the other."""
    done = subprocess.run([sys.executable, "-c", MANY_ARRAYS], capture_output=True, text=True, timeout=200, check=True)
    outside, within, again, left = map(int, done.stdout.split())
    assert within < 5 * 512
    assert min(outside, again) > 100 * 512
    assert left < 1e6


BOUNDED = """
import resource, sys
import torch
from lightning_osdp.backend import memory
from lightning_osdp.backend.cpu import malloc

cpu, mib = torch.device("cpu"), 1 << 20
malloc.configure_cpu_allocator()
memory.trim(cpu)

def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.reset_peak(cpu)
    tensors = [torch.ones(mib // 4) for _ in range(64)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, memory.peak_memory(cpu) - resting

resting = memory.memory_in_use(cpu)
for most in (None, 128 * mib, 32 * mib):
    work()
    usual = work()
    malloc.HEAP.retain(most)
    for _ in range(6):  # it may use another part of its room each time, until all was touched
        work()
    faults, peak = work()
    held = memory.memory_in_use(cpu) - resting
    malloc.HEAP.release()
    again, left = work()[0], memory.memory_in_use(cpu) - resting
    print(*usual, faults, peak, held, again, left)
malloc.HEAP.retain(64 * mib)
work()
malloc.HEAP.retain(8 * mib)
print(memory.memory_in_use(cpu) - resting)
"""


def test_heap_retain_keeps_at_most_given_bytes_and_release_or_a_smaller_heap_frees_them() -> None:
    """64 tensors of 1 MiB: the pages of those that stay are there for the next ones."""
    done = subprocess.run([sys.executable, "-c", BOUNDED], capture_output=True, text=True, timeout=200, check=True)
    *lines, held_after_shrinking = done.stdout.splitlines()
    assert int(held_after_shrinking) < 12 << 20
    for most_mib, line in zip((128, 128, 32), lines, strict=True):
        usual, usual_peak, faults, peak, held, again, left = map(int, line.split())
        staying = min(64, most_mib) << 20
        assert min(usual, again) >= 64 * 256
        assert faults < usual - 0.75 * staying / 4096
        assert 0.75 * staying < held < (most_mib + 8) << 20
        assert peak < usual_peak + (most_mib << 20)
        assert left < 2 << 20


CYCLES = """
import torch
from lightning_osdp.backend import memory
import psutil

from lightning_osdp.backend.cpu import malloc

cpu, mib = torch.device("cpu"), 1 << 20
malloc.configure_cpu_allocator()
memory.trim(cpu)
pins, sizes = [], []
for cycle in range(12):
    malloc.HEAP.retain(64 * mib)
    tensors = [torch.ones(mib // 4) for _ in range(40)]
    pins.append(torch.ones(100))  # the heap's end can't be handed back
    del tensors
    malloc.HEAP.release()
    sizes.append((psutil.Process().memory_info().vms, memory.memory_in_use(cpu)))
print(*sizes[1], *sizes[-1])
"""


def test_heap_repeated_retain_and_release_does_not_grow() -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=200, check=True)
    virtual, resident, later_virtual, later_resident = map(int, done.stdout.split())
    assert later_virtual - virtual < 64 << 20
    assert later_resident - resident < 2 << 20


def test_heap_retain_before_configure_does_nothing() -> None:
    """On CUDA the host's allocator is the user's."""
    own = malloc.GlibcHeap()
    own.retain()
    assert not own.retains
    assert not own.can_retain


@pytest.mark.parametrize("libc", [None, object()])
def test_heap_without_glibc_does_nothing(libc: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "_load_libc", lambda: libc)
    own = malloc.GlibcHeap()
    assert not own.configure()
    with own.retained():
        assert not own.retains

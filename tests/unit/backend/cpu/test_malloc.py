"""glibc's heap, in processes of its own: its settings can't be taken back."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from resource import RUSAGE_SELF, getrusage

import numpy as np
import psutil
import pytest
import torch

from lightning_osdp.backend import memory
from lightning_osdp.backend.cpu import malloc
from tests.support.ranks import run_ranks

CPU, MIB = torch.device("cpu"), 1 << 20


def heap_of_blocks() -> ctypes.CDLL:
    """C's library, where large blocks lie in the heap, as before the strategy's setup."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.mallopt(-3, 1 << 25)
    return libc


def count_faults() -> int:
    return getrusage(RUSAGE_SELF).ru_minflt


def fill_holes(rank: int, ranks: int) -> tuple[int, int]:
    """Bytes of tensors that lie between blocks in use, and what they leave."""
    libc = heap_of_blocks()
    blocks = [(libc.malloc(100_000), libc.malloc(60_000)) for _ in range(400)]
    for block, _ in blocks:
        ctypes.memset(block, 1, 100_000)
    malloc.configure_cpu_allocator()
    for block, _ in blocks:
        libc.free(block)
    memory.trim(CPU)
    before = memory.memory_in_use(CPU)
    tensors = [torch.ones(20_000) for _ in range(400)]
    held = memory.memory_in_use(CPU) - before
    del tensors
    return held, memory.memory_in_use(CPU) - before


def test_configured_heap_with_holes_leaves_no_freed_tensors_resident() -> None:
    ((held, left),) = run_ranks(fill_holes, 1)
    assert held > 30e6  # 400 x 80 kB
    assert left < 4e6


def trim_one_hole(rank: int, ranks: int) -> int:
    """Bytes that are resident of a hole of 128 MiB."""
    libc = heap_of_blocks()
    blocks = [libc.malloc(MIB) for _ in range(128)]
    libc.malloc(MIB)  # the hole does not end where the heap does
    before = memory.memory_in_use(CPU)
    for block in blocks:
        ctypes.memset(block, 1, MIB)
    malloc.configure_cpu_allocator()
    for block in blocks:
        libc.free(block)
    memory.trim(CPU)
    return memory.memory_in_use(CPU) - before


def test_trim_fills_large_heap_hole_with_few_pages() -> None:
    """Of 128 MiB, a page for each 64 KiB would be 8 MiB."""
    assert run_ranks(trim_one_hole, 1)[0] < 1e6


def make_many_arrays(rank: int, ranks: int) -> tuple[int, int, int, int]:
    """Page faults of the same work outside, within and after a retained heap, and what that has left."""
    malloc.configure_cpu_allocator()
    kept = []

    def work() -> int:
        before = count_faults()
        for _ in range(200):
            np.full(1 << 18, 1.0)
            kept.append(np.full(100, 1.0))
        return count_faults() - before

    work()
    memory.trim(CPU)
    held = memory.memory_in_use(CPU)
    outside = work()
    with malloc.HEAP.retained():
        within = work()
    left = memory.memory_in_use(CPU) - held
    return outside, within, work(), left


def test_heap_retained_reuses_pages_and_leaves_none_behind() -> None:
    """200 arrays of 512 pages, one after the other."""
    ((outside, within, again, left),) = run_ranks(make_many_arrays, 1)
    assert within < 5 * 512
    assert min(outside, again) > 100 * 512
    assert left < 1e6


def make_arrays_in_thread(rank: int, ranks: int) -> tuple[int, int]:
    """Page faults of the same work in a thread of its own, before the heap is retained and once it is."""
    malloc.configure_cpu_allocator()

    def work() -> int:
        before = count_faults()
        for _ in range(50):
            np.full(1 << 18, 1.0)
        return count_faults() - before

    with ThreadPoolExecutor(1) as thread:
        outside = thread.submit(work).result()
        with malloc.HEAP.retained(64 * MIB):
            thread.submit(work).result()
            return outside, thread.submit(work).result()


def test_heap_retained_reuses_pages_of_other_threads() -> None:
    """50 arrays of 512 pages, as gloo's threads make them for reductions."""
    ((outside, within),) = run_ranks(make_arrays_in_thread, 1)
    assert outside > 25 * 512
    assert within < 5 * 512


def retain_at_most(rank: int, ranks: int) -> tuple[list[list[int]], int]:
    """Page faults and bytes of 64 tensors of 1 MiB for several limits, and bytes that are held by a smaller heap."""
    malloc.configure_cpu_allocator()
    memory.trim(CPU)
    resting = memory.memory_in_use(CPU)

    def work() -> tuple[int, int]:
        before = count_faults()
        memory.reset_peak(CPU)
        tensors = [torch.ones(MIB // 4) for _ in range(64)]
        del tensors
        return count_faults() - before, memory.peak_memory(CPU) - resting

    found = []
    for most in (None, 128 * MIB, 32 * MIB):
        work()
        usual = work()
        malloc.HEAP.retain(most)
        for _ in range(6):  # it may use another part of its room each time, until all was touched
            work()
        retained = work()
        held = memory.memory_in_use(CPU) - resting
        malloc.HEAP.release()
        again, left = work()[0], memory.memory_in_use(CPU) - resting
        found.append([*usual, *retained, held, again, left])
    malloc.HEAP.retain(64 * MIB)
    work()
    malloc.HEAP.retain(8 * MIB)
    return found, memory.memory_in_use(CPU) - resting


def test_heap_retain_keeps_at_most_given_bytes_and_release_or_a_smaller_heap_frees_them() -> None:
    """64 tensors of 1 MiB: the pages of those that stay are there for the next ones."""
    ((lines, held_after_shrinking),) = run_ranks(retain_at_most, 1)
    assert held_after_shrinking < 12 * MIB
    for most_mib, (usual, usual_peak, faults, peak, held, again, left) in zip((128, 128, 32), lines, strict=True):
        staying = min(64, most_mib) * MIB
        assert min(usual, again) >= 64 * 256
        assert faults < usual - 0.75 * staying / 4096
        assert 0.75 * staying < held < (most_mib + 8) * MIB
        assert peak < usual_peak + most_mib * MIB
        assert left < 4 * MIB


def retain_and_release(rank: int, ranks: int) -> list[tuple[int, int]]:
    """Virtual and resident bytes after each of 12 turns."""
    malloc.configure_cpu_allocator()
    memory.trim(CPU)
    pins, sizes = [], []
    for _ in range(12):
        malloc.HEAP.retain(64 * MIB)
        tensors = [torch.ones(MIB // 4) for _ in range(40)]
        pins.append(torch.ones(100))  # the heap's end can't be handed back
        del tensors
        malloc.HEAP.release()
        sizes.append((psutil.Process().memory_info().vms, memory.memory_in_use(CPU)))
    return sizes


def test_heap_repeated_retain_and_release_does_not_grow() -> None:
    (sizes,) = run_ranks(retain_and_release, 1)
    (virtual, resident), (later_virtual, later_resident) = sizes[1], sizes[-1]
    assert later_virtual - virtual < 64 * MIB
    assert later_resident - resident < 2 * MIB


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

"""The allocator's behaviour on the CPU, in a process of its own: settings of glibc can't be taken back."""

from __future__ import annotations

import linecache
import subprocess
import sys

import torch

from lightning_osdp.profiling import memory

HOLES = """
import ctypes
import torch
from lightning_osdp.profiling import memory

cpu, libc = torch.device("cpu"), ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 1 << 25)  # large blocks lie in the heap, as before the strategy's setup
blocks = [(libc.malloc(100_000), libc.malloc(60_000)) for _ in range(400)]
for block, _ in blocks:
    ctypes.memset(block, 1, 100_000)
memory.fix_cpu_allocator()
for block, _ in blocks:
    libc.free(block)
memory.release_unused(cpu)
before = memory.memory_in_use(cpu)
tensors = [torch.ones(20_000) for _ in range(400)]
held = memory.memory_in_use(cpu) - before
del tensors
print(held, memory.memory_in_use(cpu) - before)
"""


def test_freed_tensors_leave_nothing_resident_even_where_the_heap_has_holes() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=200, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 30e6  # 400 x 80 kB
    assert left < 2e6


ONE_HOLE = """
import ctypes
import torch
from lightning_osdp.profiling import memory

cpu, libc = torch.device("cpu"), ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallopt(-3, 1 << 25)  # large blocks lie in the heap, as before the strategy's setup
blocks = [libc.malloc(1 << 20) for _ in range(128)]
guard = libc.malloc(1 << 20)  # the hole does not end where the heap does
before = memory.memory_in_use(cpu)
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
memory.fix_cpu_allocator()
for block in blocks:
    libc.free(block)
memory.release_unused(cpu)
print(memory.memory_in_use(cpu) - before)
"""


def test_plugging_a_large_hole_takes_few_pages() -> None:
    """Of 128 MiB, a page for each 64 KiB would be 8 MiB."""
    done = subprocess.run([sys.executable, "-c", ONE_HOLE], capture_output=True, text=True, timeout=200, check=True)
    assert int(done.stdout) < 1e6


MANY_ARRAYS = """
import resource, sys
import numpy as np
import torch
from lightning_osdp.profiling import memory

cpu = torch.device("cpu")
memory.fix_cpu_allocator()
kept = []

def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for turn in range(200):
        np.full(1 << 18, 1.0)
        kept.append(np.full(100, 1.0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

work()
memory.release_unused(cpu)
held = memory.memory_in_use(cpu)
outside = work()
with memory.arrays_kept(cpu):
    within = work()
left = memory.memory_in_use(cpu) - held
again = work()
with memory.arrays_kept(torch.device("cuda")):
    elsewhere = work()
print(outside, within, again, elsewhere, left)
"""


def test_arrays_that_come_and_go_may_take_the_same_pages_and_leave_none_behind() -> None:
    """200 arrays of 512 pages, one after the other."""
    done = subprocess.run([sys.executable, "-c", MANY_ARRAYS], capture_output=True, text=True, timeout=200, check=True)
    outside, within, again, elsewhere, left = map(int, done.stdout.split())
    assert within < 5 * 512
    assert min(outside, again, elsewhere) > 100 * 512
    assert left < 1e6


def test_source_lines_are_dropped_where_their_file_has_them() -> None:
    made_up = ["x = 1\n"]
    linecache.cache["<made up>"] = (6, None, made_up, "<made up>")
    try:
        line = linecache.getline(__file__, 1)
        assert line
        memory.drop_source_lines()
        assert __file__ not in linecache.cache
        assert linecache.getline("<made up>", 1) == made_up[0]  # as notebooks keep theirs: there is no file
        assert linecache.getline(__file__, 1) == line
    finally:
        del linecache.cache["<made up>"]


def test_pages_to_come_count_only_on_top_of_a_limit_that_was_found_and_before_first_steps() -> None:
    cpu = torch.device("cpu")
    found, given = memory.Limit(cpu, 1), memory.Limit(cpu, 1, given=1 << 30)
    assert found.pages_to_come(stepped=False) == memory.PAGES_TO_COME_BYTES > 0
    assert found.pages_to_come(stepped=True) == given.pages_to_come(stepped=False) == 0
    assert memory.Limit(torch.device("cuda"), 1).pages_to_come(stepped=False) == 0
    assert found.file_pages() > given.file_pages() == 0

"""glibc's heap: whether freed tensors go back to the system, or stay in the heap for the next ones.

Handed back, a process takes what its live tensors take, as predicted; but every tensor's pages are new ones, which the
kernel clears at their first touch. Kept, the heap grows to more than what is live, since what is freed is seldom as
large as what comes next; but its pages are there. In a heap that may grow to some size only, what finds no room gets a
mapping of its own, and is handed back: so a process takes no more for it than that size.

Measured, natural language model of 19 M parameters that takes 780 MiB and 1.17 s a step: with a heap of 64 MiB, 792 and
1.10; of 128 MiB, 806 and 1.05; of 192 MiB, 817 and 0.99; of 256 MiB, 864 and 0.93; of any size, 876 and 0.89.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.cpu_effects import MAX_MMAP_THRESHOLD

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 128 << 10, 64 << 10
_NEVER_TRIM, _RETAINED_MMAP_BYTES = -1, MAX_MMAP_THRESHOLD
"""The heap's end is not handed back by itself; the most that glibc lets the other threshold be."""

_BLOCK_BYTES = 1 << 20
"""Of what is put into the heap to make room in it: each touches a page."""

_IS_MMAPPED = 2
"""Bit in the word before a block from malloc: it has a mapping of its own."""


def configure_cpu_allocator() -> None:
    """Makes glibc hand freed tensors back to the system, so that a rank's memory is what its live tensors take.

    glibc raises its mmap threshold as large blocks are freed, and freed tensors then stay in the heap. Measured on a
    GPT of 78 M parameters: peaks fell from 1317-1412 MiB to 870. It costs time, as every tensor's pages are then new
    ones (``benchmarks/allocator.py``). Where there is no glibc (macOS, musl), nothing is done and predictions of peak
    memory are too low there: a warning says so.
    """
    if not HEAP.configure():
        warnings.warn(
            "glibc's allocator can't be set here: freed tensors may stay in the heap, and a rank on the CPU may take "
            "more memory than predicted",
            OSDPWarning,
            stacklevel=2,
        )


class GlibcHeap:
    """The heap of this process, of which there is one: ``HEAP``."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._fillers: list[int] = []
        self._configured = False
        self.retains = False
        """Whether freed tensors stay in it."""

    def configure(self) -> bool:
        """Freed tensors are handed back from now on; False where that can't be set."""
        self._configured = hasattr(self._libc, "mallopt") and self._set_thresholds(_MMAP_BYTES, _TRIM_BYTES)
        return self._configured

    @property
    def can_retain(self) -> bool:
        """Whether freed tensors may stay: it is glibc's, and they would not else."""
        return self._configured and self._is_glibc

    @property
    def _is_glibc(self) -> bool:
        return all(hasattr(self._libc, name) for name in ("malloc_trim", "mallinfo2"))

    def retain(self, max_bytes: int | None = None) -> None:
        """Freed tensors stay from now on, in so many bytes beside what is in use now; if None, in as many as it takes,
        but for tensors of more than 32 MiB."""
        if not self.can_retain:
            return
        self.retains = self._set_thresholds(_RETAINED_MMAP_BYTES, _NEVER_TRIM)
        self._free_fillers()
        if max_bytes is not None:
            self._make_free_space(max_bytes)

    def _make_free_space(self, free_bytes: int) -> None:
        """Has the heap, whose end is not handed back, hold so much that is not in use, and no more."""
        blocks = [self._libc.malloc(_BLOCK_BYTES) for _ in range(free_bytes // _BLOCK_BYTES)]
        self._set_thresholds(_MMAP_BYTES, _NEVER_TRIM)
        self._fill_holes()
        for block in blocks:
            self._libc.free(block)

    def release(self) -> None:
        """Hands back what lies freed in it, and keeps tensors from being put there, from now on."""
        if self.retains:
            self.retains = False
            self._set_thresholds(_MMAP_BYTES, _TRIM_BYTES)
        if self._is_glibc:
            self._libc.malloc_trim(0)
            self._fill_holes()

    @contextmanager
    def retained(self, max_bytes: int | None = None) -> Iterator[None]:
        """Within it freed tensors stay, and are handed back at its end: for work that makes many of them. [measured,
        search for GPT-2 of 20 M parameters: 0.7 M page faults, 4.5 s; so 3.0 s, and 0 to 4 MiB more for a moment]"""
        self.retain(max_bytes)
        try:
            yield
        finally:
            self.release()

    def _set_thresholds(self, mmap_bytes: int, trim_bytes: int) -> bool:
        """Blocks from ``mmap_bytes`` on get a mapping of their own where no stretch of the heap is free for them; and
        the heap's end is handed back once so much of it is free."""
        mallopt = self._libc.mallopt
        done = mallopt(_M_MMAP_THRESHOLD, mmap_bytes), mallopt(_M_TRIM_THRESHOLD, trim_bytes)
        return all(done)

    def _fill_holes(self) -> None:
        """Takes the free stretches that could hold a large tensor out of use, without touching them.

        glibc fills them before it asks the system for a mapping of its own, and what a tensor leaves there when it is
        freed stays resident. A plug is never written to, so that it costs one page for its header: large ones come
        first. [measured, GPT of 13.7 M parameters in 66 units: 15 MiB that stayed after the first step; of 19.1 M
        parameters, 55 MiB freed by sharding: 3.4 MiB of headers, where all plugs were of 64 KiB]
        """
        left = int(self._libc.mallinfo2().fordblks)  # no more than that, if the heap can grow as well
        size = _MMAP_BYTES << max(0, (left // _MMAP_BYTES).bit_length() - 1)
        while size >= _MMAP_BYTES:
            if size <= left and self._try_fill_hole(size):
                left -= size
            else:
                size //= 2

    def _try_fill_hole(self, size: int) -> bool:
        """Whether the heap had a free stretch of ``size`` bytes, which is then taken."""
        plug = self._libc.malloc(size)
        if plug is None:
            return False
        if ctypes.c_size_t.from_address(plug - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MMAPPED:
            self._libc.free(plug)
            return False
        self._fillers.append(plug)
        return True

    def _free_fillers(self) -> None:
        for plug in self._fillers:
            self._libc.free(plug)
        self._fillers.clear()


def _libc() -> Any:
    """What of the C library is used here, as far as it is there."""
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _MallInfo
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
    return libc


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``fordblks`` is the number of free bytes in the heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


HEAP = GlibcHeap()

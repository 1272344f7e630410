"""Glibc's heap: whether freed tensors are released to the system, or retained for the next ones.

Release: a process takes what its live tensors take, as predicted; but every tensor's pages are new, and the kernel
clears them on first touch. Retain: the pages are there already; but the heap grows to more than what is live, since
what is freed seldom has the size of what comes next. If the heap may grow to a given size only, a tensor that does not
fit gets a mapping of its own, which is released when it is freed. Measured trade-off: [M-backend-14].
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.cpu_effects import MAX_MMAP_THRESHOLD, MIN_MAPPED_BYTES

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_TRIM_BYTES, _MMAP_BYTES = 128 << 10, MIN_MAPPED_BYTES
_NEVER_TRIM, _RETAINED_MMAP_BYTES = -1, MAX_MMAP_THRESHOLD
"""Thresholds of a heap that retains: its end is never released, and the largest that glibc accepts for mappings."""

_BLOCK_BYTES = 1 << 20
"""Size of the blocks that reserve space in the heap; each touches one page."""

_IS_MMAPPED = 2
"""Bit in the word before a block from malloc which says that the block has a mapping of its own."""


def configure_cpu_allocator() -> None:
    """Make glibc release freed tensors to the system, so that a rank's memory is what its live tensors take.

    By itself glibc raises its mmap threshold as large blocks are freed, and freed tensors then stay in the heap. Peaks
    fall by a third [M-backend-15], but every tensor's pages are then new ones, which takes time. Without glibc (macOS,
    musl) nothing is done and a warning says that predictions of peak memory are too low.
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
        self._libc = _load_libc()
        self._fillers: list[int] = []
        self._is_configured = False
        self.retains = False
        """Whether freed tensors stay in the heap."""

    def configure(self) -> bool:
        """Release freed tensors from now on; return False if that can't be set.

        New threads allocate in the one heap, which can retain what they free: gloo's take a tensor of the size of a
        gradient for each reduction [M-backend-20].
        """
        self._is_configured = hasattr(self._libc, "mallopt") and self._set_thresholds(_MMAP_BYTES, _TRIM_BYTES)
        if self._is_configured:
            self._libc.mallopt(_M_ARENA_MAX, 1)
        return self._is_configured

    @property
    def can_retain(self) -> bool:
        """Return whether retention can be chosen: the heap is glibc's and was configured."""
        return self._is_configured and self._is_glibc

    @property
    def _is_glibc(self) -> bool:
        return all(hasattr(self._libc, name) for name in ("malloc_trim", "mallinfo2"))

    def retain(self, max_bytes: int | None = None) -> None:
        """Retain freed tensors of up to 32 MiB from now on, if possible.

        Args:
            max_bytes: size of the heap besides what is in use now; None: no bound.
        """
        if not self.can_retain:
            return
        self.retains = self._set_thresholds(_RETAINED_MMAP_BYTES, _NEVER_TRIM)
        self._free_fillers()
        if max_bytes is not None:
            self._libc.malloc_trim(0)  # what it has retained beyond that would stay resident, and of no use
            self._make_free_space(max_bytes)

    def _make_free_space(self, free_bytes: int) -> None:
        """Give the heap, whose end is not released, this much unused space, and no more."""
        blocks = [self._libc.malloc(_BLOCK_BYTES) for _ in range(free_bytes // _BLOCK_BYTES)]
        self._set_thresholds(_MMAP_BYTES, _NEVER_TRIM)
        self._fill_holes()
        for block in blocks:
            self._libc.free(block)

    def release(self) -> None:
        """Return what lies freed in the heap to the system, and release tensors from now on."""
        if self.retains:
            self.retains = False
            self._set_thresholds(_MMAP_BYTES, _TRIM_BYTES)
        if self._is_glibc:
            self._libc.malloc_trim(0)
            self._fill_holes()

    @contextmanager
    def retained(self, max_bytes: int | None = None) -> Iterator[None]:
        """Retain freed tensors within the block, for work that makes many of them [M-backend-16].

        Args:
            max_bytes: as of ``retain``.
        """
        if not self.can_retain:
            yield
            return
        self.retain(max_bytes)
        try:
            yield
        finally:
            self.release()

    def _set_thresholds(self, mmap_bytes: int, trim_bytes: int) -> bool:
        """Set the block size from which a block that fits nowhere is mapped, and the free end that is released."""
        mallopt = self._libc.mallopt
        results = mallopt(_M_MMAP_THRESHOLD, mmap_bytes), mallopt(_M_TRIM_THRESHOLD, trim_bytes)
        return all(results)

    def _fill_holes(self) -> None:
        """Occupy the free stretches that could hold a large tensor, without touching them.

        Glibc fills these before it maps memory, and what a tensor leaves there when it is freed stays resident. A
        filler is never written to, so it costs one page for its header: large ones come first [M-backend-17].
        """
        left = int(self._libc.mallinfo2().fordblks)  # an upper bound, because a heap that can grow never refuses
        size = _MMAP_BYTES << max(0, (left // _MMAP_BYTES).bit_length() - 1)
        while size >= _MMAP_BYTES:
            if size <= left and self._try_fill_hole(size):
                left -= size
            else:
                size //= 2

    def _try_fill_hole(self, size: int) -> bool:
        """Occupy a free stretch of ``size`` bytes; return whether there was one."""
        filler = self._libc.malloc(size)
        if filler is None:
            return False
        if ctypes.c_size_t.from_address(filler - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MMAPPED:
            self._libc.free(filler)
            return False
        self._fillers.append(filler)
        return True

    def _free_fillers(self) -> None:
        for filler in self._fillers:
            self._libc.free(filler)
        self._fillers.clear()


def _load_libc() -> Any:
    """Return the C library, with the types of the functions used here if it is glibc."""
    libc: Any = None
    with suppress(OSError, TypeError):  # a static program, or Windows
        libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _MallInfo
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
    return libc


class _MallInfo(ctypes.Structure):
    """Glibc's ``struct mallinfo2``; ``fordblks`` is the number of free bytes in the heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


HEAP = GlibcHeap()

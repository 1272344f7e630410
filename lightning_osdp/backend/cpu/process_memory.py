"""Memory of this process and the limits on it.

psutil tells what it knows on each system. By hand, from ``/proc`` and ``/sys/fs/cgroup`` on Linux, is what it does not:
the peak and its restart, pages of files apart from shared memory, and the limits of control groups.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil

PROC = Path("/proc/self")

RESIDENT_BYTES_PER_PAGE_TABLE_BYTE = 512
"""Page tables take 8 bytes for a page of 4 KiB. They count in a control group's limit, but not in the resident size
[M-backend-9]."""


def resident_bytes() -> int:
    """Return the resident size of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the largest resident size since ``reset_peak``; elsewhere than on Linux since the process's start."""
    if (peak := _status_bytes("VmHWM")) is not None:
        return peak
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def page_faults() -> int:
    """Return how often this process has touched a page that the system had to provide first; 0 if unknown."""
    if sys.platform == "win32":
        return 0
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def reset_peak() -> None:
    """Restart the counter of the peak. Where the kernel can't reset it, the peak since the process's start remains."""
    clear_refs = PROC / "clear_refs"
    if clear_refs.exists():
        with suppress(OSError):  # read only, in some containers
            clear_refs.write_text("5")


def file_pages() -> int:
    """Return the resident bytes that are pages of files, mostly libraries: they are shared, and can be dropped."""
    return _status_bytes("RssFile") or 0


def control_group() -> str:
    """Return a text that is the same for processes that share a control group, and so its limit."""
    return _read("cgroup")


def total_bytes() -> int:
    """Return the bytes of memory that the machine has."""
    return int(psutil.virtual_memory().total)


def usable_bytes(local_ranks: int, group_ranks: int) -> int:
    """Return a rank's equal share of the machine's free memory, or of its control group's limit if that is less.

    Pages of files come on top of the control group's limit: the kernel drops them when the group runs short, so they
    never end a process, while the resident size that is planned with counts them.

    Args:
        local_ranks: ranks on this machine.
        group_ranks: ranks in this process's control group.
    """
    limits = [psutil.virtual_memory().available // local_ranks + resident_bytes()]
    for limit in _cgroup_limits():
        share = limit // group_ranks
        limits.append(share - share // RESIDENT_BYTES_PER_PAGE_TABLE_BYTE + file_pages())
    return int(min(limits))


def _read(name: str) -> str:
    file = PROC / name
    return file.read_text() if file.exists() else ""


def _status_bytes(field: str) -> int | None:
    """Return a field of this process's status; None where there is none, as in a sandbox (gVisor) or without /proc."""
    match = re.search(rf"^{field}:\s+(\d+) kB", _read("status"), re.MULTILINE)
    return int(match[1]) << 10 if match else None


def _cgroup_limits() -> list[int]:
    """Return the limits of the control groups (v1 and v2) that this process is in."""
    limits = []
    for line in control_group().splitlines():
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

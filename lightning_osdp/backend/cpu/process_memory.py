"""Memory of this process and the limits on it, as Linux reports them in ``/proc`` and ``/sys/fs/cgroup``."""

from __future__ import annotations

import re
from pathlib import Path

RESIDENT_BYTES_PER_PAGE_TABLE_BYTE = 512
"""Page tables take 8 bytes for a page of 4 KiB. They count in a control group's limit, but not in the resident size
[M-backend-9]."""


def resident_bytes() -> int:
    """Return the resident size of this process (VmRSS)."""
    return read_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident size since ``reset_peak`` (VmHWM)."""
    return read_bytes("VmHWM")


def reset_peak() -> None:
    """Restart the counter of the peak. Where the kernel can't reset it, the peak since the process's start remains."""
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        clear_refs.write_text("5")


def file_pages() -> int:
    """Return the resident bytes that are pages of files, mostly libraries: they are shared, and can be dropped."""
    return read_bytes("RssFile")


def control_group() -> str:
    """Return a text that is the same for processes that share a control group, and so its limit."""
    return Path("/proc/self/cgroup").read_text()


def usable_bytes(local_ranks: int, group_ranks: int) -> int:
    """Return a rank's equal share of the machine's free memory, or of its control group's limit if that is less.

    Pages of files come on top of the control group's limit: the kernel drops them when the group runs short, so they
    never end a process, while the resident size that is planned with counts them.

    Args:
        local_ranks: ranks on this machine.
        group_ranks: ranks in this process's control group.
    """
    limits = [read_bytes("MemAvailable", "/proc/meminfo") // local_ranks + resident_bytes()]
    for limit in _cgroup_limits():
        share = limit // group_ranks
        limits.append(share - share // RESIDENT_BYTES_PER_PAGE_TABLE_BYTE + file_pages())
    return min(limits)


def read_bytes(field: str, path: str = "/proc/self/status") -> int:
    """Return a size from a file of lines like ``VmRSS:  1234 kB``."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    assert match is not None, f"{path} has no {field}"
    return int(match[1]) << 10


def _cgroup_limits() -> list[int]:
    """Return the limits of the control groups (v1 and v2) that this process is in."""
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

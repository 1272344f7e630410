"""Whether another process still lives, as far as this machine can tell."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

_STATE_FIELD, _START_FIELD = 0, 19
"""Fields of ``/proc/PID/stat`` after the command's name: the state, and when the process started."""


def describe_process() -> str:
    """Return what ``is_dead`` needs to know of this process."""
    fields = _stat_fields(os.getpid())
    return json.dumps([_process_namespace(), os.getpid(), fields[_START_FIELD] if fields else ""])


def is_dead(description: str) -> bool:
    """Return whether the process of that ``describe_process`` has ended; False where this machine can't tell."""
    namespace, pid, start = json.loads(description)
    if namespace != _process_namespace():
        return False
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False
    fields = _stat_fields(pid)
    return fields is None or fields[_STATE_FIELD] in "ZX" or fields[_START_FIELD] != start


def _process_namespace() -> list[str]:
    """Return a text that differs where process numbers mean other processes: hosts, boots, containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [platform.node(), boot, os.readlink("/proc/self/ns/pid")]
    except OSError:
        return [platform.node()]


def _stat_fields(pid: int) -> list[str] | None:
    """Return what the kernel says of a process; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

"""Whether another process still lives, as far as this machine can tell."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import psutil

_STATE_FIELD, _START_FIELD = 0, 19
"""Fields of ``/proc/PID/stat`` after the command's name: the state, and when the process started."""


def describe_process() -> str:
    """Return this process as ``is_dead`` needs to know it on another rank."""
    fields = _stat_fields(os.getpid())
    return json.dumps([_process_namespace(), os.getpid(), fields[_START_FIELD] if fields else ""])


def is_dead(description: str) -> bool:
    """Return whether a process has ended, as far as this machine can tell: False for one on another machine.

    Args:
        description: what ``describe_process`` has returned in that process.
    """
    namespace, pid, start = json.loads(description)
    if namespace != _process_namespace():
        return False
    if not Path("/proc/self/stat").exists():
        return not has_process(pid)
    fields = _stat_fields(pid)
    return fields is None or fields[_STATE_FIELD] in "ZX" or fields[_START_FIELD] != start


def has_process(pid: int) -> bool:
    """Return whether a process has this number on this machine, be it this user's or not."""
    return bool(psutil.pid_exists(pid))


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

"""Whether processes that compute at the same time have to share cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""Identifies the running machine on Linux."""


class CoreSharing:
    """Whether this process shares its cores; whoever starts to measure sets the number of processes."""

    def __init__(self) -> None:
        self.is_shared = False

    @staticmethod
    def key() -> str:
        """Return a text that is the same for processes that may use the same cores, in whatever container they run."""
        machine = BOOT_ID_FILE.read_text().strip() if BOOT_ID_FILE.exists() else platform.node()
        return f"{machine}: {_available_cores()}"

    def set_process_count(self, processes: int) -> None:
        """Note how many processes compute on the cores at the same time, each with as many threads as this one."""
        self.is_shared = processes * torch.get_num_threads() > len(_available_cores())


def _available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


CORE_SHARING = CoreSharing()
"""The state of this process."""

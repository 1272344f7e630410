"""What is typical of several times of the same thing.

The median, which leaves out what other programs do now and then. But where the ranks of a machine have to share cores,
a short call is either interrupted for the others' turns or not at all, and a training step by its full share of them:
then the mean counts. [4 ranks on 2 cores, kernels' forward and backward: medians add up to 0.7 of what they take in a
step, means to 0.9 to 1.2]
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""On Linux, of the machine that is running."""


class CoreSharing:
    """Those that this process may use."""

    def __init__(self) -> None:
        self.is_shared = False

    @staticmethod
    def key() -> str:
        """The same for processes that may use the same ones, in whatever container they run."""
        machine = BOOT_ID_FILE.read_text().strip() if BOOT_ID_FILE.exists() else platform.node()
        return f"{machine}: {_available_cores()}"

    def set_process_count(self, processes: int) -> None:
        """So many processes compute on them at the same time, each with as many threads as this one."""
        self.is_shared = processes * torch.get_num_threads() > len(_available_cores())


def _available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


CORE_SHARING = CoreSharing()
"""Of this process. Whoever begins to measure says how many there are."""


def typical_time_s(seconds: Sequence[float]) -> float:
    """Of repeats of one call, the time that counts (see above)."""
    return statistics.fmean(seconds) if CORE_SHARING.is_shared else statistics.median(seconds)

"""What is typical of several times of the same thing.

The median, which leaves out what other programs do now and then. But where the ranks of a machine have to share cores,
a short call is either interrupted for the others' turns or not at all, and a training step by its full share of them:
then the mean counts. [4 ranks on 2 cores, kernels' forward and backward: medians add up to 0.73 of what they take in a
step, means to 0.98]
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

import torch


class Cores:
    """Of this machine, as far as this process may use them."""

    def __init__(self) -> None:
        self.shared = False

    def used_by(self, processes: int) -> None:
        """So many processes compute at the same time, each with as many threads as this one."""
        here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.shared = processes * torch.get_num_threads() > here


CORES = Cores()
"""Of this process. Whoever begins to measure says how many there are."""


def typical_s(seconds: Sequence[float]) -> float:
    """Of repeats of one call, the time that counts (see above)."""
    return statistics.fmean(seconds) if CORES.shared else statistics.median(seconds)

"""Write down each step of a rank as it ends.

Lines go to a file of each rank at once, so a rank that the kernel kills leaves its finished steps behind.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.comparison.batch_probe import SLOW_STEP_S, SLOW_WARM_UP, fewer, is_flat
from bench.comparison.jobs import Job

OUT_OF_MEMORY_STATUS, INFEASIBLE_STATUS = 99, 98
"""Exit statuses of a rank."""


class Recorder:
    """Stamps the end of each step; writes one line for each.

    Args:
        job: what is run.
        folder: where the lines go.
        device: whose memory counts.
    """

    def __init__(self, job: Job, folder: Path, device: torch.device) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.job, self.device = job, device
        self._file = (folder / f"rank{self.rank}.jsonl").open("w", buffering=1)
        self._left = [count for _, count in job.batches] or [job.warm_up + job.steps]
        self._started = self._setup_started = self._last = time.perf_counter()
        self._seconds: list[float] = []
        self._peak_bytes = 0
        self._rates: list[float] = []
        self._counted = job.steps

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, event: str, **values: Any) -> None:
        """One line."""
        self._file.write(json.dumps({"event": event, **values}) + "\n")

    def begin_setup(self) -> None:
        """The module and its data are there; the strategy's work begins."""
        self._setup_started = time.perf_counter()

    def ready(self) -> None:
        """Training begins."""
        self._last = time.perf_counter()
        self.write("ready", setup_s=self._last - self._setup_started, setup_peak_bytes=self._peak())
        self._reset_peak()

    def after_step(self, batch_size: int, loss: Tensor | None = None) -> bool:
        """A step of ``batch_size`` samples ended; returns whether training is to go on."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._last = now
        self._peak_bytes = max(self._peak_bytes, self._peak())
        if self.job.purpose == "verify" and loss is not None:
            self.write("loss", value=float(loss))
        self._left[0] -= 1
        if self.job.purpose == "final" and not self.job.sizes and len(self._seconds) == SLOW_WARM_UP:
            self._shorten()
        return True if self._left[0] else self._end_size(batch_size)

    def _shorten(self) -> None:
        """Where a system picks its own batch size, only its first steps show whether they are slow; then it warms up
        as the others do whose steps are, and has as few measured."""
        step_s = self._of_first_rank(self._seconds[-1])
        if step_s > SLOW_STEP_S:
            self._counted = self._left[0] = fewer(self.job.steps, step_s)

    def _end_size(self, batch_size: int) -> bool:
        counted = self._seconds[-self._counted :]
        median_s = statistics.median(counted)
        self.write("size", batch_size=batch_size, step_s=median_s, steps_s=counted, peak_bytes=self._peak_bytes)
        self._rates.append(batch_size / median_s)
        self._left.pop(0)
        self._seconds, self._peak_bytes = [], 0
        go_on = bool(self._left) and self._worth_going_on()
        self._reset_peak()
        return go_on

    def _worth_going_on(self) -> bool:
        """Decided by the first rank for all, since their clocks differ."""
        flat = self.job.until_flat and is_flat(self._rates)
        late = time.perf_counter() - self._started > self.job.budget_s
        ends = bool(self._of_first_rank(float(flat or late)))
        if ends:
            self.write("stop", why="flat" if flat else "late")
        return not ends

    def _of_first_rank(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        if dist.is_initialized():
            found = found.to(self.device) if dist.get_backend() == "nccl" else found
            dist.broadcast(found, 0)
        return float(found)

    def _peak(self) -> int:
        """CUDA: what the allocator took. CPU: the most that was resident, but for pages of files.

        The kernel charges those to whoever reads a file first: on a busy machine, to nobody here.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        text = Path("/proc/self/status").read_text()
        most, files = (int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.M)[0]) << 10 for name in ("VmHWM", "RssFile"))
        return most - files

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

"""Where a step's time goes in OSDP's plan, against the physical floor, and what a step does how often.

A thread in each rank looks at what the main thread is doing every few milliseconds (its Python stack), for some
steps. That needs no knowledge of the engine's inside beyond file names. Another step is counted by torch's profiler,
and one by ``sys.setprofile``: operations, copies, collectives and Python calls do not depend on how busy the machine
is. What went over the link is read from the interface's counters. The floor is what the compute takes alone (every
rank by itself, at the same time, at the same batch size; with the allocator as it is and as OSDP sets it) and what the
bytes take at the link's speed.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench.comparison.cells import Cell
from bench.comparison.jobs import Job
from bench.comparison.records import Runs
from bench.comparison.step_log import Recorder
from bench.comparison.systems import ALONE, OSDP, parse
from bench.comparison.worker import run_rank
from bench.multinode import emulated_cluster

INTERVAL_S = 0.004
TIMED_STEPS, COUNTED_STEPS = 8, 2
PROFILER_BYTES = 1 << 30
"""What a rank gets beside its limit once it has its plan: that takes all there is, and profilers need some as well."""
MOVES = ("copy_", "cat", "zeros", "zero_", "empty", "clone", "add_", "mul_", "div_", "_foreach_", "split", "narrow")
COUNTED = ("c10d::", "gloo:", "nccl:", *(f"aten::{name}" for name in MOVES))


def classify(frame: FrameType | None) -> str:
    """What a thread with this innermost frame is doing."""
    innermost, communication, in_backward = "", "", False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not innermost and "/torch/utils/_contextlib" not in file:
            innermost = file
        if file.endswith(("lightning_osdp/backend/collectives.py", "torch/distributed/distributed_c10d.py")):
            communication = name  # the outermost one names what is being done
        in_backward |= name == "_engine_run_backward"
        frame = frame.f_back
    if communication:
        return f"communication: {'all-reduce, waiting' if communication == 'wait' else communication}"
    return work(innermost, in_backward)


def work(file: str, in_backward: bool) -> str:
    """What code of ``cache_file`` does. Lightning runs forward and backward inside of the optimizer's step."""
    if file.endswith("torch/autograd/graph.py"):
        return "backward (with what the reducer waits for in DDP)"
    if any(part in file for part in ("/torch/nn/", "/transformers/", "comparison/models.py")):
        return "recomputed forward" if in_backward else "forward"
    if "/torch/optim/" in file or file.endswith("_foreach_utils.py"):
        return "optimizer"
    if "/lightning_osdp/" in file or "/fairscale/" in file:
        return f"engine: {Path(file).name}"
    if "/lightning/" in file:
        return "Python: Lightning"
    return "engine: torch.distributed" if "/torch/distributed/" in file else "other"


class Sampler(threading.Thread):
    """Counts what one thread is doing, until it is stopped."""

    def __init__(self, watched: int) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self._watched, self._stop_it = watched, threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(INTERVAL_S):
            self.counts[classify(sys._current_frames().get(self._watched))] += 1

    def stop(self) -> None:
        self._stop_it.set()
        self.join()


class Anatomist(Recorder):
    """A recorder that samples the steps after warm-up and counts in the last two."""

    def ready(self) -> None:
        super().ready()
        if self.device.type == "cpu" and self.job.memory_bytes is not None:
            emulated_cluster.raise_limit(PROFILER_BYTES)
        self._step, self._calls = 0, 0
        self._sampler = Sampler(threading.get_ident())
        self._counter: Any = None

    def after_step(self, batch_size: int, loss: Tensor | None = None) -> bool:
        go_on = super().after_step(batch_size, loss)
        self._step += 1
        if self._step == self.job.warm_up:
            self._sent_before, self._began = sent_bytes(), time.perf_counter()
            self._used_before = resource.getrusage(resource.RUSAGE_SELF)
            self._sampler.start()
        elif self._step == self.job.warm_up + TIMED_STEPS:
            self._end_sampling()
            self._counter = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._counter.start()
        elif self._step == self.job.warm_up + TIMED_STEPS + 1:
            self._counter.stop()
            self.write("operations", counts=operations(self._counter))
            sys.setprofile(self._count)
        elif self._step == self.job.warm_up + TIMED_STEPS + COUNTED_STEPS:
            sys.setprofile(None)
            self.write("python", calls=self._calls)
        return go_on

    def _end_sampling(self) -> None:
        seconds = (time.perf_counter() - self._began) / TIMED_STEPS
        self._sampler.stop()
        total = sum(self._sampler.counts.values())
        shares = {what: count / total for what, count in self._sampler.counts.most_common()}
        sent = (sent_bytes() - self._sent_before) / TIMED_STEPS
        if self.job.where.nodes == 1:  # all ranks of a node share its loopback
            sent /= self.ranks
        self.write("shares", step_s=seconds, shares=shares, sent_bytes=sent)
        used = resource.getrusage(resource.RUSAGE_SELF)
        names = {"page faults": "ru_minflt", "user CPU ms": "ru_utime", "system CPU ms": "ru_stime"}
        per_step = {
            what: (getattr(used, name) - getattr(self._used_before, name)) / TIMED_STEPS for what, name in names.items()
        }
        self.write("used", **{what: value * (1e3 if "ms" in what else 1) for what, value in per_step.items()})

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event == "call"


def sent_bytes() -> int:
    """By this network namespace so far, over its one interface that carries the ranks' traffic."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    numbers = {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}
    return numbers.get("eth0", numbers.get("lo", 0))


def operations(counted: Any) -> dict[str, int]:
    """How often collectives ran, and operations that move memory."""
    counts: Counter[str] = Counter()
    for event in counted.key_averages():
        name = event.key
        if name.startswith(COUNTED):
            counts[name] += event.count
        counts["all aten operations"] += event.count * name.startswith("aten::")
    return dict(sorted(counts.items()))


def profile_rank(job: Job, folder: Path, cache: Path) -> int:
    """What a rank does in a profiled run."""
    return run_rank(job, folder, cache, Anatomist if job.how.base != ALONE else Recorder)


def profile(runs: Runs, cell: Cell, systems: tuple[str, ...], device: str) -> list[Table]:
    """Profiles OSDP's plan, and other systems at its batch size."""
    osdp = runs.get(_job(cell, OSDP, (), device))
    if osdp["outcome"] != "ok":
        raise SystemExit(f"OSDP does not train in {cell.label}: {osdp['outcome']} {osdp['error']}")
    size = (osdp["plan"]["batch_size"],)
    bare = [ALONE, f"{ALONE}+alloc"]
    floors = {parse(name).label: runs.get(_job(cell, name, size, device)) for name in bare}
    results = {OSDP: osdp} | {name: runs.get(_job(cell, name, size, device)) for name in systems if name != OSDP}
    trained = {name: result for name, result in results.items() if "shares" in result}
    tables = [time_table(cell, name, result, floors, size[0]) for name, result in trained.items()]
    return [*tables, count_table(trained)]


def _job(cell: Cell, system: str, sizes: tuple[int, ...], device: str) -> Job:
    limit = cell.memory_bytes if system == OSDP else None
    steps = TIMED_STEPS + COUNTED_STEPS
    return Job("profile", cell.model, cell.setting, system, sizes, limit, steps=steps, timeout_s=400.0, device=device)


def time_table(
    cell: Cell, system: str, result: dict[str, Any], floors: dict[str, dict[str, Any]], batch_size: int
) -> Table:
    """Seconds of a step by what they were spent on, and the floors."""
    found = result["shares"]
    title = f"{parse(system).label}: {cell.label}, batch size {batch_size}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("rank 0 spends a step on", "ms", "share"):
        table.add_column(name, justify="left" if name not in ("ms", "share") else "right")
    for what, share in found["shares"].items():
        table.add_row(what, f"{share * found['step_s'] * 1e3:.1f}", f"{share:.1%}")
    table.add_section()
    table.add_row("all", f"{found['step_s'] * 1e3:.1f}", "")
    for what, alone in floors.items():
        if alone["outcome"] == "ok":
            table.add_row(f"floor: {what}", f"{alone['sizes'][-1]['step_s'] * 1e3:.1f}", "")
    mib = found["sent_bytes"] / (1 << 20)
    rate = cell.where.rate
    if rate:
        at_speed = f"{found['sent_bytes'] * 8 / (float(rate.removesuffix('gbit')) * 1e9) * 1e3:.1f}"
        table.add_row(f"floor: {mib:.1f} MiB sent by a rank at link speed", at_speed, "")
    else:
        table.add_row(f"{mib:.1f} MiB sent by a rank over loopback", "", "")
    return table


def count_table(results: dict[str, dict[str, Any]]) -> Table:
    """What one step does how often: the same on a busy machine and on a quiet one."""
    table = Table(title="In one step of rank 0", title_justify="left", title_style="bold")
    table.add_column("how often")
    for system in results:
        table.add_column(system, justify="right")
    names = dict.fromkeys(name for result in results.values() for name in result["operations"]["counts"])
    for name in sorted(names):
        table.add_row(name, *(str(result["operations"]["counts"].get(name, 0)) for result in results.values()))
    for what in next(iter(results.values()))["used"]:
        table.add_row(what, *(f"{result['used'][what]:.0f}" for result in results.values()))
    table.add_row("Python calls", *(str(result["python"]["calls"]) for result in results.values()))
    return table

"""Runs one job on forked ranks, each in its network namespace and under its hard limit, and says what came of it.

Note [forked ranks]: importing torch, Lightning and transformers takes 8 s, which a comparison of thousands of runs
can't pay each time. So this process imports them once and ranks are forked from it. A fork shares its parent's pages
until it writes to them, and the kernel charges them to the parent: its memory would look smaller than that of a
process which was started on its own. A rank therefore first copies every private page it was given (``madvise`` with
``MADV_POPULATE_WRITE``) and maps the same pages of library files; then its resident size and what its cgroup is
charged are those of a fresh process (``tests/unit/bench`` compares them). This process must run one thread, import no
part of lightning_osdp or fairscale and never touch CUDA.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.comparison.jobs import Job
from bench.comparison.step_log import INFEASIBLE_STATUS, OUT_OF_MEMORY_STATUS
from bench.comparison.worker import run_rank
from bench.multinode import emulated_cluster

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, MADV_POPULATE_READ, MADV_POPULATE_WRITE, PR_SET_PDEATHSIG = 0x40000000, 22, 23, 1
PROT_READ, PROT_WRITE = 1, 2
PAGE = os.sysconf("SC_PAGE_SIZE")
LOG_CHARACTERS = 6000


@dataclass
class Rank:
    """A forked process, with as much of ``subprocess.Popen`` as ``lab`` uses."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status if it ended; negative: the signal."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Waits for its end."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def run(job: Job, cache: Path, work: Callable[[Job, Path, Path], int] = run_rank) -> dict[str, Any]:
    """Runs ``job`` and leaves no process, namespace or cgroup behind.

    Args:
        job: what to run.
        cache: OSDP's folder of measurements.
        work: what each rank does; returns its exit status.

    Returns:
        ``result``, ``peak_bytes`` (of the rank that took most), ``time_s``, and what rank 0 wrote.
    """
    cluster, emulated = cluster_of(job), job.device == "cpu"
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        folder, start = Path(name), time.monotonic()
        if emulated:
            stack.enter_context(emulated_cluster.network(cluster))
            stack.enter_context(emulated_cluster.memory_cgroups(cluster))
        ranks: list[Any] = []
        try:
            for rank in range(cluster.ranks):
                ranks.append(fork(lambda: work(job, folder, cache), cluster, rank, folder, emulated))
            emulated_cluster.wait(ranks, job.timeout_s)
        finally:
            emulated_cluster.end(ranks)
        seconds = time.monotonic() - start
        statuses = [rank.returncode for rank in ranks]
        ends = (
            [emulated_cluster.outcome(cluster, rank, status) for rank, status in enumerate(statuses)]
            if emulated
            else []
        )
        killed = any(end.out_of_memory for end in ends) or OUT_OF_MEMORY_STATUS in statuses
        lines = [read_lines(folder / f"rank{rank}.jsonl") for rank in range(cluster.ranks)]
        return {
            "outcome": outcome(statuses, killed, seconds >= job.timeout_s),
            "peak_bytes": max(
                [end.peak_bytes for end in ends] or [line.get("peak_bytes", 0) for own in lines for line in own] or [0]
            ),
            "seconds": round(seconds, 2),
            **summary(lines),
            "error": error_text(folder, statuses) if any(statuses) else "",
        }


def cluster_of(job: Job) -> emulated_cluster.Cluster:
    """The nodes and ranks of a job. Ranks that share a GPU are nodes of one rank: each has local rank 0."""
    where = job.where
    nodes, per_node = where.nodes, where.per_node
    if job.device == "cuda" and torch.cuda.device_count() < where.ranks:  # asks NVML; CUDA stays untouched here
        nodes, per_node = where.ranks, 1
    return emulated_cluster.Cluster(f"bench{os.getpid()}", nodes, per_node, where.rate, job.memory_bytes)


def outcome(statuses: list[int], killed: bool, late: bool) -> str:
    """One of ``ok``, ``out of memory``, ``infeasible`` (OSDP finds no plan), ``too slow``, ``failed``."""
    if killed:
        return "out of memory"
    if INFEASIBLE_STATUS in statuses:
        return "infeasible"
    if not any(statuses):
        return "ok"
    return "too slow" if late else "failed"


def summary(lines: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What the ranks wrote: sizes that every rank finished, with rank 0's times and the largest peak."""
    events = {event: [[line for line in own if line["event"] == event] for own in lines] for event in ("size", "loss")}
    finished = min(len(own) for own in events["size"])
    sizes = [
        {**events["size"][0][index], "peak_bytes": max(own[index]["peak_bytes"] for own in events["size"])}
        for index in range(finished)
    ]
    found: dict[str, Any] = {"sizes": [{k: v for k, v in size.items() if k != "event"} for size in sizes]}
    for line in lines[0]:
        if line["event"] not in ("size", "loss", "done"):
            found[line["event"]] = {k: v for k, v in line.items() if k != "event"}
    if events["loss"][0]:
        found["losses"] = [[line["value"] for line in own] for own in events["loss"]]
    return found


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines; a killed rank may leave half of one."""
    return [json.loads(line) for line in file.read_text().splitlines(True) if line[-1] == "\n"] if file.exists() else []


def error_text(folder: Path, statuses: list[int]) -> str:
    """The end of what the first failed rank printed."""
    first = next(rank for rank, status in enumerate(statuses) if status)
    log = folder / f"rank{first}.log"
    return log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""


def fork(work: Callable[[], int], cluster: emulated_cluster.Cluster, rank: int, folder: Path, emulated: bool) -> Rank:
    """Starts a rank that does ``work`` in its node's network and its own cgroup, and exits with what it returns."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with suppress(ProcessLookupError):
            os.setpgid(pid, pid)  # here as well as there: ``lab.end`` may come before the child has got that far
        return Rank(pid)
    status = 1
    try:
        _enter(cluster, rank, folder, emulated, parent)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _enter(cluster: emulated_cluster.Cluster, rank: int, folder: Path, emulated: bool, parent: int) -> None:
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which ends its ranks
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(emulated_cluster.environment(cluster, rank))
    if not emulated:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = "lo"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        return
    cluster.cgroup(rank).joinpath("cgroup.procs").write_text(str(os.getpid()))
    with open(f"/var/run/netns/{cluster.host(rank // cluster.per_node)}") as namespace:
        _check(LIBC.setns(namespace.fileno(), CLONE_NEWNET))
    own_pages(parent)


def own_pages(parent: int) -> None:
    """Copies the private pages shared with ``parent`` and maps the file pages it has mapped."""
    with open(f"/proc/{parent}/pagemap", "rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, *_ = line.split()
            if permissions[0] != "r" or "[v" in line:  # vdso, vvar, vsyscall
                continue
            start, stop = (int(text, 16) for text in span.split("-"))
            writable = permissions[1] == "w" and permissions[3] == "p"
            pagemap.seek(start // PAGE * 8)
            entries = np.frombuffer(pagemap.read((stop - start) // PAGE * 8), dtype=np.uint64)
            present = entries >> np.uint64(63) == 1
            _advise(start, present, MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ)
            if permissions == "r--p":  # what the loader has relocated and then protected
                _protect(start, stop, PROT_READ | PROT_WRITE)
                _advise(start, present & (entries >> np.uint64(61) & np.uint64(1) == 0), MADV_POPULATE_WRITE)
                _protect(start, stop, PROT_READ)


def _advise(start: int, pages: np.ndarray[Any, Any], advice: int) -> None:
    """Tells the kernel something about those ``pages`` of the mapping at ``start`` that are true."""
    edges = np.flatnonzero(np.diff(pages.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    for first, last in edges.tolist():
        where, size = start + first * PAGE, (last - first) * PAGE
        _check(LIBC.madvise(ctypes.c_void_p(where), ctypes.c_size_t(size), advice))


def _protect(start: int, stop: int, protection: int) -> None:
    _check(LIBC.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), protection))


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

"""Runs a function on several ranks of a real gloo process group, each a process of its own.

They are forked from a server that has imported the libraries and done nothing else: importing takes seconds of each
process, and most tests need two to four.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import _utils

from lightning_osdp.autotune import measure, trial_step, trials
from lightning_osdp.profiling import compute, engine_overhead, network
from lightning_osdp.profiling.kernels import benchmark
from tests.support.ports import free_port

PRELOADED = [
    "lightning_osdp.engine.fairscale.engine",
    "tests.support.modules",
    "tests.support.zoo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
]

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
GRACE_S = 5.0
"""How long the other ranks may go on after one failed: their tracebacks often say more than the first."""


class RankError(AssertionError):
    """A rank raised, died or took too long; the message holds every traceback that came back."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 560.0,
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` on ``world_size`` processes joined by gloo and returns what they returned.

    Each process has one thread and the environment that torchrun would give it. ``fn`` must be a module-level function;
    its arguments and result travel by pickle, tensors by value. No process outlives the call.

    Args:
        fn: what to run.
        world_size: how many ranks, all on this machine.
        *args: handed to every rank.
        timeout_s: for all ranks together, starting up included. Less than the limit of a test (pyproject.toml).
        collective_timeout: of the process group.

    Returns:
        The results in the order of ranks.

    Raises:
        RankError: a rank raised, died without a result, or was not done after ``timeout_s``.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    deadline = time.monotonic() + timeout_s
    processes, receivers = [], []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                receivers.append(receiver)
                process = context.Process(
                    target=_run_rank,
                    args=(fn, rank, world_size, args, folder, dict(os.environ), collective_timeout, sender),
                )
                processes.append(process)
                process.start()
                sender.close()
            replies = _collect(receivers, deadline)
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()) if len(replies) == world_size else 0.0)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for receiver in receivers:
                receiver.close()
    _raise_failures(replies, [process.exitcode for process in processes], timeout_s)
    return [replies[rank][1] for rank in range(world_size)]


def start_scripts(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], logs: Sequence[Path]
) -> list[mp.Process]:
    """Starts ranks as torchrun does, each in a session of its own; unlike in ``run_ranks``, they may fail or be killed.

    Args:
        fn: a module-level function: what the script does.
        world_size: how many ranks, all on this machine.
        args: handed to every rank.
        logs: where each rank's output goes, standard error included.

    Returns:
        The processes, which the caller has to wait for and to end.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    world = {"MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(world_size):
        call = (fn, args, rank, world_size, dict(os.environ) | world, str(logs[rank]))
        processes.append(context.Process(target=_run_script, args=call))
        processes[-1].start()
    return processes


def _run_script(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, environment: dict[str, str], log: str
) -> None:
    os.setsid()
    gc.freeze()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.environ.update(environment)
    _set_environment(rank, world_size)
    os.environ["MASTER_PORT"] = environment["MASTER_PORT"]
    _set_up_torch()
    fn(*args)


def _collect(receivers: list[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    """(succeeded, result or traceback) by rank, of the ranks that answered in time."""
    replies: dict[int, tuple[bool, Any]] = {}
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = pending.pop(receiver)
            try:
                replies[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                replies[rank] = (False, "died without a result")
            if not replies[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return replies


def _raise_failures(replies: dict[int, tuple[bool, Any]], exit_codes: list[int | None], timeout_s: float) -> None:
    failed = {rank: text for rank, (succeeded, text) in sorted(replies.items()) if not succeeded}
    silent = [rank for rank in range(len(exit_codes)) if rank not in replies]
    if not failed and not silent:
        return
    parts = [f"rank {rank} (exit code {exit_codes[rank]}):\n{text}" for rank, text in failed.items()]
    if silent:
        when = f"{GRACE_S:g} s after the failure" if failed else f"after {timeout_s:g} s"
        parts.append(f"ranks {silent} were not done {when}")
    raise RankError("\n".join(parts))


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: str,
    environment: dict[str, str],
    collective_timeout: timedelta,
    sender: Connection,
) -> None:
    gc.freeze()  # the libraries' million objects: each of the many collections would take 0.4 s
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update(environment)  # the server's is that of the first call
    _set_environment(rank, world_size)
    _set_up_torch()
    _shorten_measurements()
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", rank=rank, world_size=world_size, timeout=collective_timeout
        )
        # Plain pickle copies tensors; torch's own pickler would share memory that ends with this process.
        reply = pickle.dumps((True, fn(rank, world_size, *args)))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        reply = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(reply)
    sender.close()


def _set_up_torch() -> None:
    """One thread; and workers of a DataLoader that do not end by themselves are waited for, or notice it, at once."""
    torch.set_num_threads(1)
    for module in (_utils, _utils.worker):
        module.MP_STATUS_CHECK_INTERVAL = 0.2  # seconds, 5 as a rule


def _shorten_measurements() -> None:
    """Tests look at what comes of measurements, not at how precise they are."""
    network.DEFAULT_SIZES_BYTES = (16 << 10, 128 << 10, 1 << 20)
    network.REPEATS_BUDGET_S, network.MIN_REPEATS = 0.02, 2
    network.COMPUTE_MATMULS, network.OVERLAP_DURATION_S = 2, 0.004
    engine_overhead.MIN_REPEATS, engine_overhead.MAX_REPEATS = 1, 1
    engine_overhead.NUM_OPERATORS, engine_overhead.FLOPS_PER_OPERATOR = 2, {"cpu": 1 << 22}
    engine_overhead.NUM_REPLICATED, engine_overhead.FEW_REPLICATED = 2, 1
    engine_overhead.TENSOR_ROWS = 32, 128
    # A busy machine's links are measured once.
    measure.PROBE_TOLERANCE, measure.MIN_STARTS, measure.MAX_RESIDUAL = 1e9, 1, 1e9
    benchmark.MAX_REPEATS, benchmark.MIN_OPTIMIZER_KERNEL_S, compute.KERNEL_TIMING_BUDGET_S = 3, 0.0, 0.0
    trials.MIN_STEPS, trials.MAX_TURNS_S, trial_step.MAX_STEPS = 1, 1.0, 1


def _set_environment(rank: int, world_size: int) -> None:
    """What torchrun sets, so that Lightning takes the ranks as given and starts none itself."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in values.items()})
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _exit_with_parent() -> None:
    """Where the test process is killed outright, nobody is left to end its ranks."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

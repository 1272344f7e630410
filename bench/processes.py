"""Runs functions in processes of their own, forked from one that has imported what they need; makes these ranks."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

LOADED_BYTES = 48 << 20
"""What a process loads and keeps between its beginning and its first step, about: beside the limit."""


@functools.cache
def _forkserver(preloaded: str) -> ForkServerContext:
    """Python 3.11 starts the server with a ``sys.path`` of its own, and says nothing where it finds nothing there."""
    root = Path(__file__).resolve().parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preloaded])
    return context


def run_processes(
    preloaded: str, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], timeout_s: float
) -> bool:
    """Runs each function with its arguments; says whether all ended well. No process outlives the call.

    Args:
        preloaded: the module that is imported before the processes are forked.
        calls: the functions, at the same time.
        timeout_s: for each.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: no rank is left behind
    processes = [_forkserver(preloaded).Process(target=function, args=arguments) for function, arguments in calls]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            process.kill()
    return all(process.exitcode == 0 for process in processes)


def write_log(file: str) -> None:
    """Send what this process prints to a file, without warnings."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")


def become_rank(rank: int, ranks: int, port: int, folder: str) -> None:
    """Make this process a rank as torchrun does, on one node; its log is ``rank<number>.log``."""
    write_log(f"{folder}/rank{rank}.log")
    names = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
    os.environ.update({name: str(value) for name, value in names.items()})

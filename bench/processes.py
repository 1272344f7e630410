"""Runs functions in processes of their own, forked from one that has imported what they need."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


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

"""Keep a DataLoader's workers through a SIGTERM that goes to all processes of a rank, as SLURM and torchrun send it.

The rank goes on to the end of its step and saves, for which it needs no more batches; but a worker that dies would end
it at once, with an error.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader


class WorkerInit:
    """A ``worker_init_fn`` that lets SIGTERM end the worker only if its own rank sends it.

    Args:
        inner: the user's function, which is called first.
    """

    def __init__(self, inner: Callable[[int], Any] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        """Set up the worker's process."""
        if self._inner is not None:
            self._inner(worker)
        if hasattr(signal, "sigwaitinfo"):  # not on macOS
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_if_parent_says, daemon=True, name="osdp-worker-signals").start()


def keep_workers(loader: object) -> None:
    """Have the workers of a loader outlive a SIGTERM to all processes. Idempotent."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


def _end_if_parent_says() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)

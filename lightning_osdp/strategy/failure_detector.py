"""Detect failed ranks, so that no rank waits for one that is gone.

A rank that fails writes its cause into the process group's store before it ends. A rank that finds its connections
closed reports that cause instead of its own error. A rank that waits for something that will never come is ended after
a grace period by its heartbeat thread.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_osdp.errors import ConfigurationError

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two heartbeats."""

HEARTBEAT_TIMEOUT_S = 4 * HEARTBEAT_INTERVAL_S
"""Seconds without a heartbeat after which a rank counts as killed."""

FAILURE_GRACE_S = 20.0
"""Seconds that a rank may go on after another one has failed: its pending collective usually fails by itself."""

_run_ids = itertools.count()
"""Numbers the runs in this process; every rank counts the same runs."""

LOST_CONNECTION_PATTERNS = ("peer", "onnection", "gloo", "NCCL", "Broken pipe", "imed out", "Socket")
"""Parts of messages of backends that only say that another rank is not there."""


_has_failed = threading.Event()
"""Set when a run of this process has failed."""

EXIT_DELAY_S = 0.1
"""Seconds for gloo's threads to free the tensors of the last collectives when a process ends."""


def _destroy_process_group_at_exit() -> None:
    """Destroy the process group before the interpreter ends, and give its threads the time to notice.

    A thread of gloo that frees a tensor takes the interpreter's lock; if the interpreter is ending just then, the
    process aborts (PyTorch issue 190489). Nothing is done after a failure, since a pending collective might never end.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo" and not _has_failed.is_set():
        dist.destroy_process_group()
        time.sleep(EXIT_DELAY_S)


class FailureDetector:
    """The view that one run on one rank has of the other ranks. All methods may be called by any thread.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        timeout: how long a rank waits for others at the end of its data.
    """

    def __init__(self, rank: int, ranks: int, timeout: timedelta) -> None:
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout.total_seconds()
        # A connection of its own: the main thread may block in the usual one.
        connection: Any = _get_default_store()
        self._store = PrefixStore(f"lightning_osdp/{next(_run_ids)}", connection.clone())
        self._batch_counts: dict[str, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, daemon=True, name="osdp-failure-detector")
        self._thread.start()
        atexit.unregister(_destroy_process_group_at_exit)
        atexit.register(_destroy_process_group_at_exit)

    def stop(self) -> None:
        """Stop the heartbeat: the run is over on this rank."""
        self._stopped.set()
        # A thread that still talks to the store while the interpreter ends may crash it.
        self._thread.join(HEARTBEAT_TIMEOUT_S)

    def report_failure(self, exception: BaseException) -> None:
        """Publish why this rank fails, or, if it only lost another rank, put that rank's cause into the message."""
        _has_failed.set()
        cause = self._find_remote_cause() if _is_lost_connection(exception) else None
        if cause is not None:
            exception.args = (f"{cause}\nThis rank saw only: {exception}", *exception.args[1:])
            return
        with suppress(RuntimeError):  # the store may be gone with the first rank
            self._store.set(f"cause/{self._rank}", f"{type(exception).__name__}: {_abbreviate(exception)}")

    def on_batch(self, pass_name: str, count: int) -> None:
        """Record that this rank has fetched ``count`` batches of ``pass_name``."""
        self._batch_counts[pass_name] = count

    def on_exhausted(self, pass_name: str, count: int) -> None:
        """Wait until the data of ``pass_name`` has ended on all ranks.

        Raises:
            ConfigurationError: another rank has another number of batches.
        """
        self._store.set(f"ended/{pass_name}/{self._rank}", str(count))
        deadline = time.monotonic() + self._timeout_s
        for other in range(self._ranks):
            while (theirs := self._batches_of_rank(pass_name, other, count)) is None:
                if time.monotonic() > deadline or self._failure_causes():
                    return  # the next collective fails, and reports the cause
                time.sleep(0.02)
            if theirs != count:
                raise ConfigurationError(
                    f"uneven data: rank {self._rank} ran out after {count} batches of {pass_name}, rank {other} has "
                    f"{theirs} or more. Give every rank the same number, or set limit_train_batches and the like"
                )

    def wait_for_all_ranks(self, barrier: str, timeout_s: float) -> bool:
        """Return whether every rank reaches ``barrier`` within ``timeout_s`` seconds."""
        self._store.add(barrier, 1)
        deadline = time.monotonic() + timeout_s
        while self._store.add(barrier, 0) % self._ranks:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _batches_of_rank(self, pass_name: str, other: int, count: int) -> int | None:
        """Return how many batches another rank has, once that is known or is more than ``count``; else None."""
        if self._store.check([f"ended/{pass_name}/{other}"]):
            return int(self._store.get(f"ended/{pass_name}/{other}"))
        if self._store.check([f"fetched/{pass_name}/{other}"]):
            so_far = int(self._store.get(f"fetched/{pass_name}/{other}"))
            return so_far if so_far > count else None
        return None

    def _failure_causes(self) -> dict[int, str]:
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        keys = {rank: f"cause/{rank}" for rank in others}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _find_remote_cause(self) -> str | None:
        """Return the cause that another rank published, or that a rank went silent; None if all ranks are alive."""
        try:
            before = self._heartbeats()
            deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
            while not (causes := self._failure_causes()) and time.monotonic() < deadline:
                time.sleep(HEARTBEAT_INTERVAL_S / 5)
            if causes:
                return _format_causes(causes)
            silent = [rank for rank, beat in self._heartbeats().items() if beat == before[rank] and rank != self._rank]
        except RuntimeError:  # the store is on the first rank
            return "rank 0 can't be reached any more: it was killed (out of memory?), or its host is down"
        if not silent:
            return None
        return f"rank {silent[0]} ended without an error: it was killed (out of memory?), or its host is down"

    def _heartbeats(self) -> dict[int, bytes]:
        keys = {rank: f"beat/{rank}" for rank in range(self._ranks)}
        return {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}

    def _run_heartbeat(self) -> None:
        """Send heartbeats until the run ends; end this process if another rank's failure does not."""
        failed_at: float | None = None
        try:
            for beat in itertools.count():
                self._store.set(f"beat/{self._rank}", str(beat))
                for pass_name, count in list(self._batch_counts.items()):
                    self._store.set(f"fetched/{pass_name}/{self._rank}", str(count))
                causes = self._failure_causes()
                if causes and failed_at is None:
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > FAILURE_GRACE_S:
                    print(f"rank {self._rank} is ended: {_format_causes(causes)}", file=sys.stderr, flush=True)
                    os._exit(1)
                if self._stopped.wait(HEARTBEAT_INTERVAL_S):
                    return
        except RuntimeError:
            return  # the store has ended with rank 0: the main thread finds its connections closed, too


class SynchronizedDataLoader:
    """A dataloader of unknown length that ends only when it ends on all ranks at the same batch.

    Args:
        loader: the dataloader, whose other attributes are passed through.
        detector: publishes the progress to the other ranks.
        name: the name of the loader, the same on all ranks.
    """

    def __init__(self, loader: Any, detector: FailureDetector, name: str) -> None:
        self._loader, self._detector, self._name = loader, detector, name
        self._passes = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        pass_name, count = f"{self._name} in pass {next(self._passes)}", 0
        for count, batch in enumerate(self._loader, 1):
            self._detector.on_batch(pass_name, count)
            yield batch
        self._detector.on_exhausted(pass_name, count)


def assert_equal_on_ranks(group: Any, name: str, value: Any) -> None:
    """Check that ``value`` is the same on all ranks. Collective.

    Args:
        group: the process group.
        name: a description of the value, for the error.
        value: the value of this rank.

    Raises:
        ConfigurationError: the values differ; raised on every rank.
    """
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ConfigurationError(f"{name} differs between ranks: {values[0]} on rank 0, {other} on rank {rank}")


def _abbreviate(exception: BaseException) -> str:
    """Return the first and the last line: an error with a worker's traceback ends with the worker's own error."""
    lines = (str(exception).strip() or "no message").splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _format_causes(causes: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} failed: {cause}" for rank, cause in sorted(causes.items()))


def _is_lost_connection(exception: BaseException) -> bool:
    if isinstance(exception, dist.DistError):
        return True
    return isinstance(exception, RuntimeError) and any(word in str(exception) for word in LOST_CONNECTION_PATTERNS)

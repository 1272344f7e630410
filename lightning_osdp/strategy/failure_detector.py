"""Detect failed ranks, so that no rank waits for one that is gone.

A rank that fails writes its cause into the process group's store before it ends. A rank that was killed is missed by
another one on its machine, which writes that down; a rank that gives no sign for long, by the rank before it. A rank
that finds its connections closed reports the cause that is written instead of its own error. A rank that waits for
something that will never come is ended after a grace period by its heartbeat thread.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.distributed_c10d import _get_default_store

from lightning_osdp.backend.agree import is_lost_connection, meet
from lightning_osdp.backend.blocked_thread import MutualWaits
from lightning_osdp.backend.liveness import describe_process, is_dead
from lightning_osdp.backend.rank_agreement import ADVICE, present_wait
from lightning_osdp.errors import ConfigurationError, OSDPError, message_of
from lightning_osdp.strategy.error_text import describe_error
from lightning_osdp.strategy.later_runs import check_reachable, store_of_run, wait_for_ranks

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two heartbeats."""

CAUSE_WAIT_S = 8 * HEARTBEAT_INTERVAL_S
"""Seconds that a rank waits for another's cause."""

HEARD_WAIT_S = 8.0
"""Seconds that the first rank, which has the store, waits for the others to hear its cause: they may be slow."""

SILENCE_TIMEOUT_S = 60.0
"""Seconds without a heartbeat after which a rank counts as gone. Native code that holds Python's lock is silent."""

FAILURE_GRACE_S, ENDING_GRACE_S = 5.0, 60.0
"""Seconds that a rank may go on after another one has failed, whose pending collective usually fails by itself; and
while it ends its own run, in which callbacks may finish what they do."""

EXIT_DELAY_S, EXIT_TIMEOUT_S = 0.1, 2.0
"""Seconds for gloo's threads to free the tensors of the last collectives when a process ends, and for all collectives
to end: after a failure some never do."""

TOLD_WAIT_S = 10.0
"""Seconds that a rank waits until the first one has told the user of a failure, after what callbacks do then."""

EXIT_STATUS = 1
"""Exit status of a process that is ended because another rank has failed; the command line has another one."""

_KILLED = "it was killed (out of memory?), it called os._exit, or its host is down"

_run_ids = itertools.count()
"""Numbers the runs in this process; every rank counts the same runs."""


_exiting, _destroyed = threading.Event(), threading.Event()


def _destroy_process_group_at_exit() -> None:
    """Destroy the process group before the interpreter ends, and give its threads the time to notice.

    A thread of gloo that frees a tensor takes the interpreter's lock; if the interpreter is ending just then, the
    process aborts (PyTorch issue 190489).
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    _exiting.set()
    _destroyed.wait(EXIT_TIMEOUT_S)
    time.sleep(EXIT_DELAY_S)


@functools.cache
def _prepare_exit() -> None:
    """Start the thread that destroys the process group at the exit: from Python 3.12 on, none can be started then.

    Destroying waits for pending collectives, so it is not for the main thread.
    """

    def destroy() -> None:
        _exiting.wait()
        dist.destroy_process_group()
        _destroyed.set()

    threading.Thread(target=destroy, daemon=True, name="osdp-exit").start()


class FailureDetector:
    """The view that one run on one rank has of the other ranks. All methods may be called by any thread.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        timeout: how long a rank waits for others at the end of its data.
        is_ending: returns whether this rank is ending a run that failed.

    Attributes:
        is_stop_requested: whether a rank was told to stop (SIGTERM); its signal handler sets it, the first rank hears.
    """

    def __init__(self, rank: int, ranks: int, timeout: timedelta, is_ending: Callable[[], bool] = bool) -> None:
        self.is_stop_requested = False
        self._is_ending = is_ending
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout.total_seconds()
        # A connection of its own: the main thread may block in the usual one.
        connection: Any = _get_default_store()
        check_reachable(connection)
        run, connection = next(_run_ids), connection.clone()
        self._store = store_of_run(connection, run)
        self._store.set(f"process/{rank}", describe_process())
        wait_for_ranks(connection, run, ranks, self._timeout_s)
        self._batch_counts: dict[str, int] = {}
        self._causes: dict[int, str] = {}
        """What is known of other ranks' failures, also when the store is gone."""
        self._processes: dict[int, str] = {}
        """What ``is_dead`` needs to know of other ranks' processes."""
        self._neighbour_beat = b"", time.monotonic()
        self._has_reported = self._has_parted = False
        self._report_at_exit: Finalize | None = None
        self._meetings = itertools.count()
        self._mutual_waits = MutualWaits(self._store, rank, ranks)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, daemon=True, name="osdp-failure-detector")
        self._thread.start()
        _prepare_exit()
        atexit.unregister(_destroy_process_group_at_exit)
        atexit.register(_destroy_process_group_at_exit)

    def stop(self) -> None:
        """Stop the heartbeat: the run is over on this rank."""
        with suppress(RuntimeError):  # the store may be gone with the first rank
            self._store.set(f"left/{self._rank}", "")
        if self._report_at_exit is not None:
            self._report_at_exit.cancel()
        self._stopped.set()
        # A thread that still talks to the store while the interpreter ends may crash it.
        self._thread.join(CAUSE_WAIT_S)

    def report_failure(self, exception: BaseException) -> None:
        """Publish why this rank fails, or, if it only lost another rank, put that rank's cause into the message."""
        if self._has_reported:
            return
        _set(exception, "osdp_failure_detector", self)  # for detector_that_reported
        cause = self._find_remote_cause() if is_lost_connection(exception) else None
        self._has_reported = True
        if cause is not None:
            _set(exception, "osdp_cause", cause)  # for the command line
            text = f"{cause}\nThis rank saw only: {message_of(exception)}"
            _set(exception, "args", (text, *exception.args[1:]))
        with suppress(RuntimeError):
            if isinstance(exception, SIGTERMException):
                self._publish(self._rank, "was told to stop (SIGTERM)")
            elif cause is None:
                self._publish(self._rank, f"failed: {describe_error(exception)}")
            if self._rank == 0:
                self._wait_until_heard()

    def note_failure(self, exception: BaseException) -> None:
        """Remember why this rank fails, and publish it at exit unless it was reported: callbacks may raise before."""
        if self._report_at_exit is None:
            # Unlike atexit, this also works in processes that multiprocessing has forked.
            self._report_at_exit = Finalize(None, self.report_failure, (exception,), exitpriority=0)

    def set_told(self) -> None:
        """Let the other ranks know that the user was told of the failure, so that they need not."""
        with suppress(RuntimeError):
            self._store.set("told", "")

    def is_told_by_rank_zero(self) -> bool:
        """Return whether the first rank tells the user of the failure; wait until it has.

        Where that one waits for this rank in a collective, its heartbeat thread tells it, and ends it.
        """
        with suppress(RuntimeError):  # it is gone, or has something else to do
            self._store.wait(["told"], timedelta(seconds=TOLD_WAIT_S))
            return True
        return False

    def on_batch(self, pass_name: str, count: int) -> None:
        """Record that this rank has fetched ``count`` batches of ``pass_name``."""
        self._batch_counts[pass_name] = count

    def on_exhausted(self, pass_name: str, count: int) -> None:
        """Wait until the data of ``pass_name`` has ended on all ranks.

        Raises:
            ConfigurationError: another rank has another number of batches.
            OSDPError: another rank has failed.
        """
        self._store.set(f"ended/{pass_name}/{self._rank}", str(count))
        deadline = time.monotonic() + self._timeout_s
        for other in range(self._ranks):
            while (theirs := self._batches_of_rank(pass_name, other, count)) is None:
                if self._causes:
                    raise OSDPError(_format_causes(self._causes))
                if time.monotonic() > deadline:
                    return  # the next collective fails
                time.sleep(0.02)
            if theirs != count:
                raise ConfigurationError(
                    f"uneven data: rank {self._rank} ran out after {count} batches of {pass_name}, rank {other} has "
                    f"{theirs} or more. Give every rank the same number, or set limit_train_batches and the like"
                )

    def can_meet_after_failure(self, exception: BaseException | None, timeout_s: float) -> bool:
        """Return whether all ranks come here within ``timeout_s`` seconds, each with an ``exception``.

        Once a rank has given up this is False on all ranks.
        """
        if exception is not None:
            self.report_failure(exception)
        name = f"after failure {next(self._meetings)}"
        with suppress(RuntimeError):
            self._has_parted = self._has_parted or not meet(self._store, name, self._ranks, timeout_s)
            return not self._has_parted
        return False

    def _batches_of_rank(self, pass_name: str, other: int, count: int) -> int | None:
        """Return how many batches another rank has, once that is known or is more than ``count``; else None."""
        if self._store.check([f"ended/{pass_name}/{other}"]):
            return int(self._store.get(f"ended/{pass_name}/{other}"))
        if self._store.check([f"fetched/{pass_name}/{other}"]):
            so_far = int(self._store.get(f"fetched/{pass_name}/{other}"))
            return so_far if so_far > count else None
        return None

    # -- causes --------------------------------------------------------------------------------------------------------

    def _publish(self, rank: int, cause: str) -> None:
        self._store.set(f"cause/{rank}", f"rank {rank} {cause}")
        self._store.set("any cause", "")

    def _hear_causes(self) -> None:
        """Read what is published of other ranks, and say that it was."""
        if not self._store.check(["any cause"]):
            return
        for rank in range(self._ranks):
            if rank != self._rank and self._store.check([f"cause/{rank}"]):
                self._causes[rank] = self._store.get(f"cause/{rank}").decode()
        self._store.set(f"heard/{self._rank}", "")

    def _wait_until_heard(self) -> None:
        """Wait until all ranks have heard the cause: the store may end with this process."""
        self._store.set(f"heard/{self._rank}", "")
        deadline = time.monotonic() + HEARD_WAIT_S
        for rank in range(self._ranks):
            while time.monotonic() < deadline and rank not in self._causes:
                if self._store.check([f"heard/{rank}"]) or self._store.check([f"left/{rank}"]):
                    break
                time.sleep(HEARTBEAT_INTERVAL_S / 10)

    def _find_remote_cause(self) -> str | None:
        """Return the cause that another rank published, or that a rank went silent; None if all ranks are alive."""
        deadline, silent = time.monotonic() + CAUSE_WAIT_S, None
        try:
            before = self._heartbeats()
            while not self._causes and time.monotonic() < deadline:
                time.sleep(HEARTBEAT_INTERVAL_S / 5)
                self._hear_causes()
            silent = [rank for rank, beat in self._heartbeats().items() if beat == before[rank] and rank != self._rank]
        except RuntimeError:
            pass  # the store is on the first rank
        if self._causes:
            return _format_causes(self._causes)
        if silent is None:
            return f"rank 0 can't be reached any more: {_KILLED}"
        return f"rank {silent[0]} ended without an error: {_KILLED}" if silent else None

    def _heartbeats(self) -> dict[int, bytes]:
        return {rank: self._heartbeat_of(rank) for rank in range(self._ranks)}

    def _heartbeat_of(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run_heartbeat(self) -> None:
        """Send heartbeats until the run ends; end this process if another rank's failure does not."""
        failed_at: float | None = None
        try:
            for beat in itertools.count():
                self._store.set(f"beat/{self._rank}", str(beat))
                for pass_name, count in list(self._batch_counts.items()):
                    self._store.set(f"fetched/{pass_name}/{self._rank}", str(count))
                self._share_stop_request()
                self._hear_causes()
                if self._causes and failed_at is None:
                    failed_at = time.monotonic()
                elif failed_at is None:
                    self._look_for_missing_ranks()
                    self._end_mutual_waits()
                elif not self._has_reported and time.monotonic() - failed_at > self._grace_s():
                    print(f"rank {self._rank} is ended: {_format_causes(self._causes)}", file=sys.stderr, flush=True)
                    if self._rank == 0:
                        self.set_told()
                        time.sleep(HEARTBEAT_INTERVAL_S)  # the store may end with this process
                    end_process(EXIT_STATUS)
                if self._stopped.wait(HEARTBEAT_INTERVAL_S):
                    return
        except RuntimeError:
            return  # the store has ended with rank 0: the main thread finds its connections closed, too

    def _grace_s(self) -> float:
        return ENDING_GRACE_S if self._is_ending() else FAILURE_GRACE_S

    def _share_stop_request(self) -> None:
        if self._rank == 0:
            self.is_stop_requested = self.is_stop_requested or self._store.check(["stop"])
        elif self.is_stop_requested:
            self._store.set("stop", "")

    def _look_for_missing_ranks(self) -> None:
        """Publish that a rank was killed, or gives no sign any more."""
        if self._has_reported:
            return
        for rank in set(range(self._ranks)) - {self._rank} - self._processes.keys():
            if self._store.check([f"process/{rank}"]):
                self._processes[rank] = self._store.get(f"process/{rank}").decode()
        for rank, process in self._processes.items():
            if is_dead(process):
                self._publish_missing(rank, f"ended without an error: {_KILLED}")
        neighbour = (self._rank + 1) % self._ranks
        beat, now = self._heartbeat_of(neighbour), time.monotonic()
        if beat != self._neighbour_beat[0]:
            self._neighbour_beat = beat, now
        elif now - self._neighbour_beat[1] > SILENCE_TIMEOUT_S:
            self._publish_missing(neighbour, f"has given no sign for {SILENCE_TIMEOUT_S:.0f} s: it hangs, or {_KILLED}")

    def _end_mutual_waits(self) -> None:
        """End this process if it is the last rank, and all ranks wait for each other: that ends the others' waits."""
        text = self._mutual_waits.look(*present_wait())
        if not text or self._has_reported or self._rank < self._ranks - 1:
            return
        cause = f"was ended, since ranks wait for each other: {text}. {ADVICE}"
        self._publish(self._rank, cause)
        self._wait_until_heard()
        print(f"rank {self._rank} {cause}", file=sys.stderr, flush=True)
        end_process(1)

    def _publish_missing(self, rank: int, cause: str) -> None:
        """Publish for a rank that can't do so itself, unless it has, or has left in order."""
        if not any(self._store.check([key]) for key in (f"left/{rank}", f"cause/{rank}", "any cause")):
            self._publish(rank, cause)


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


def end_process(status: int) -> NoReturn:
    """End this process from any thread, with its workers, which would notice seconds later that it is gone."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def detector_that_reported(exception: BaseException) -> FailureDetector | None:
    """Return the detector that an exception was reported to; None if no other rank has heard of it."""
    return getattr(exception, "osdp_failure_detector", None)


def _set(exception: BaseException, name: str, value: Any) -> None:
    """Set an attribute of an exception, whose class may be frozen."""
    with suppress(Exception):
        object.__setattr__(exception, name, value)


def _format_causes(causes: dict[int, str]) -> str:
    return "; ".join(text for _, text in sorted(causes.items()))

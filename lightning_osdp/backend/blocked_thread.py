"""Find out where the main thread waits for other ranks, and whether all ranks wait for each other.

A thread that waits for a slow rank and one that waits for good look alike. So a rank counts as blocked only while it
starts no other collective and its transport moves no data; and ranks wait for each other only if all are blocked.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import distributed_c10d

MUTUAL_WAIT_S = 15.0
"""Seconds for which all ranks have to be blocked until they count as waiting for each other."""

CONFIRMATION_S = 2.0
"""Seconds for which that has to stay so: what ranks have published may be a heartbeat old."""

TRANSFER_LOAD, TRANSFER_WINDOW_S = 0.01, 3.0
"""Share of a core that the transport's threads take, within so many seconds, while they move 40 MB/s; idle ones take a
third of it."""

TRANSPORT_THREAD = "gloo_tcp_loop"
"""Name of the threads that move gloo's data."""

_DISTRIBUTED_MODULES = {
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
}
_COLLECTIVE_MODULES = {f"lightning_osdp.backend.{name}" for name in ("collectives", "hierarchical", "cpu.ring", "work")}
"""Modules whose functions wait for other ranks."""

_SIGNAL = getattr(signal, "SIGURG", None)
"""What asks the main thread for its calls: hardly anything uses it, and without a handler it is ignored."""

ANSWER_S = 0.2
"""Seconds in which it answers."""

_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A call in what ``faulthandler`` writes."""

_ENGINE_CALL = "(lightning_osdp.engine."
"""What the description of a collective of the engine's contains."""


def find_blocking_operation() -> str:
    """Return the collective operation in which the main thread is now, with the line that called it; or nothing."""
    calls = _main_thread_calls()
    operation = "wait" if calls and ".wait(" in linecache.getline(calls[0].file, calls[0].line) else ""
    for call in calls:
        module = _module_of(call.file)
        if module in _DISTRIBUTED_MODULES or (module in _COLLECTIVE_MODULES and not operation):
            operation = call.function
        elif operation and not module.startswith(("torch.", "lightning_osdp.backend")):
            return f"{operation} ({module}, line {call.line})"
    return operation


class _Call(NamedTuple):
    file: str
    line: int
    function: str


def _main_thread_calls() -> list[_Call]:
    """Return the calls of the main thread, the innermost first; nothing where it can't be asked.

    A signal has ``faulthandler`` write them from that thread itself. To read frames or states of running threads from
    another one is not safe: in CPython 3.11 processes have crashed in ``f_back`` and in dumps of all threads.
    """
    main, file = threading.main_thread().ident, _file_of_calls(os.getpid())
    if _SIGNAL is None or main is None or file is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return []
    os.ftruncate(file.fileno(), 0)
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    faulthandler.unregister(_SIGNAL)
    faulthandler.register(_SIGNAL, file, all_threads=False)  # each time: Lightning resets handlers after a run
    signal.pthread_kill(main, _SIGNAL)
    text, before, end_s = b"", b"", time.perf_counter() + ANSWER_S
    while (not text or text != before) and time.perf_counter() < end_s:
        time.sleep(ANSWER_S / 100)
        before, text = text, os.pread(file.fileno(), 1 << 20, 0)
    calls = _CALL.findall(text.decode(errors="replace"))
    return [_Call(name, int(line), function) for name, line, function in calls]


@cache
def _file_of_calls(process: int) -> Any:
    """Return the file into which the main thread of a process writes its calls; it stays open, for a late answer."""
    with suppress(OSError):
        return tempfile.TemporaryFile()
    return None


@cache
def _module_of(file: str) -> str:
    """Return the name of the module that was read from a file; the file's if there is none."""
    modules = list(sys.modules.items())  # others may be imported meanwhile
    return next((name for name, module in modules if getattr(module, "__file__", None) == file), file)


@dataclass(frozen=True)
class Wait:
    """What the main thread waits for.

    Attributes:
        operation: the collective operation; empty if it waits for none.
        seconds: for how long nothing has moved.
    """

    operation: str = ""
    seconds: float = 0.0


class BlockedWatch:
    """Tells how long the main thread has been blocked. One thread looks every now and then."""

    def __init__(self) -> None:
        self._counts: tuple[int, int] | None = None
        self._progress: tuple[object, ...] = ()
        self._since_s = self._window_s = self._transport_s = 0.0

    def look(self, progress: int) -> Wait:
        """Return what the main thread waits for.

        Args:
            progress: counts what this rank has done; while it grows, nothing is blocked.
        """
        before, self._counts = self._counts, (progress, _num_collectives())
        # The main thread is not disturbed while it gets on.
        operation = find_blocking_operation() if self._counts == before else ""
        if not operation:
            self._progress = ()
            return Wait()
        current, now_s = (operation, *self._counts), time.monotonic()
        is_moving = current != self._progress
        if is_moving or now_s - self._window_s > TRANSFER_WINDOW_S:
            transport_s = _transport_seconds()
            is_moving |= transport_s - self._transport_s > TRANSFER_LOAD * (now_s - self._window_s)
            self._window_s, self._transport_s = now_s, transport_s
        if is_moving:
            self._progress, self._since_s = current, now_s
        return Wait(operation, now_s - self._since_s)


def _num_collectives() -> int:
    """Return how many collectives this rank has started, in any group."""
    count, groups = 0, list[Any](distributed_c10d._world.pg_map)
    for group in groups:
        with suppress(RuntimeError):  # its backend does not count
            count += group._get_sequence_number_for_group()
    return count


def _transport_seconds() -> float:
    """Return the CPU time of the threads that move data, where the system tells it; otherwise that of the process."""
    if not sys.platform.startswith("linux"):
        return time.process_time()
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            name, _, fields = (task / "stat").read_text().rpartition(")")
            if name.endswith(TRANSPORT_THREAD):
                ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


class MutualWaits:
    """Finds ranks that wait for each other, some in collectives of the engine and some in others.

    Ranks that are all in the engine's run them in one order. If they are all in others, only the user can tell.

    Args:
        store: is shared by the ranks.
        rank: this rank.
        ranks: the number of ranks.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self._key, self._keys = store, f"wait/{rank}", [f"wait/{other}" for other in range(ranks)]
        self._published, self._seen, self._seen_s = "", [b""], 0.0

    def look(self, wait: Wait, last_event: str) -> str:
        """Publish what this rank waits for, and say who waits for whom; empty if some rank may go on.

        Args:
            wait: what the main thread waits for.
            last_event: what the engine has done last, in words.
        """
        is_blocked = wait.seconds > MUTUAL_WAIT_S
        since = round(time.monotonic() - wait.seconds)  # tells one wait from a later one in the same place
        text = json.dumps({"where": wait.operation, "did": last_event, "since": since}) if is_blocked else ""
        if bool(text) != bool(self._published):
            self._store.set(self._key, text)
            self._published = text
        if not is_blocked or not self._store.check(self._keys):
            return ""
        now_s, texts = time.monotonic(), self._store.multi_get(self._keys)
        if texts != self._seen:
            self._seen, self._seen_s = texts, now_s
        waits = [json.loads(each) for each in texts if each]
        if len(waits) < len(texts) or now_s - self._seen_s < CONFIRMATION_S:
            return ""
        if len({_ENGINE_CALL in each["where"] for each in waits}) == 1:
            return ""
        return "; ".join(f"rank {rank} {_describe(**each)}" for rank, each in enumerate(waits))


def _describe(where: str, did: str, since: int) -> str:
    return f"waits where it {did}" if _ENGINE_CALL in where else f"waits in {where}, after it {did}"

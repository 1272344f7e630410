"""Find out where the main thread waits for other ranks, and whether all ranks wait for each other.

A thread that waits for a slow rank and one that waits for good look alike. So a rank counts as blocked only while it
starts no other collective and its transport moves no data; and ranks wait for each other only if all are blocked.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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

_ENGINE_CALL = "(lightning_osdp.engine."
"""What the description of a collective of the engine's contains."""


def find_blocking_operation() -> str:
    """Return the collective operation in which the main thread is now, with the line that called it; or nothing."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    operation = "wait" if frame is not None and _calls_wait(frame) else ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in _DISTRIBUTED_MODULES or (module in _COLLECTIVE_MODULES and not operation):
            operation = frame.f_code.co_name
        elif operation and not module.startswith(("torch.", "lightning_osdp.backend")):
            return f"{operation} ({module}, line {frame.f_lineno})"
        frame = frame.f_back
    return operation


def _calls_wait(frame: FrameType) -> bool:
    """Return whether a thread is in native code called ``wait``, as that of a collective's handle is."""
    if "wait" not in frame.f_code.co_names:
        return False
    return ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


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
        self._progress: tuple[object, ...] = ()
        self._since_s = self._window_s = self._transport_s = 0.0

    def look(self, progress: int) -> Wait:
        """Return what the main thread waits for.

        Args:
            progress: counts what this rank has done; while it grows, nothing is blocked.
        """
        operation, now_s = find_blocking_operation(), time.monotonic()
        if not operation:
            self._progress = ()
            return Wait()
        current = operation, progress, _num_collectives()
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

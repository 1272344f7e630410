"""Clocks that jump over what a process waits for on emulated links: benchmarks do not wait, and read the same times.

A process on a CPU that waits for a deadline does nothing else, so it makes no difference to what it computes whether
the time passes or its clocks are moved on. Where C++ waits for a future, as DDP's reducer does at the end of a backward
pass, a thread sees that the main one sleeps, and moves the clocks to the next deadline.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_osdp.emulation import link_clock

LOOK_S = 3e-3
"""Between two looks at a main thread that may be asleep."""


class JumpingClock:
    """The clocks of this process, ahead by what was not waited for.

    Attributes:
        ahead_s: by how much.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._perf_counter, self._monotonic, self._sleep = time.perf_counter, time.monotonic, time.sleep
        self._main = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")

    def install(self) -> None:
        """Have all that reads ``time.perf_counter`` or ``time.monotonic`` read these clocks, and works jump."""
        clock = self

        def wait(work: Any, timeout: Any = None) -> bool:
            clock.jump_to(work._end_s)
            return True

        patch.object(time, "perf_counter", self.now).start()
        patch.object(time, "monotonic", lambda: self._monotonic() + self.ahead_s).start()
        patch.object(link_clock._DeadlineWork, "wait", wait).start()
        patch.object(link_clock, "_alarm", _Jumper(self).get).start()

    def now(self) -> float:
        """What ``time.perf_counter`` says."""
        return self._perf_counter() + self.ahead_s

    def jump_to(self, when_s: float) -> None:
        """Move on to a point in time, unless it is over."""
        self.ahead_s += max(0.0, when_s - self.now())

    def main_sleeps(self) -> bool:
        """Whether the main thread waits for something, and did nothing for a while."""
        before = self._main_state()
        self._sleep(LOOK_S)
        return before[0] == "S" and self._main_state() == before

    def _main_state(self) -> tuple[str, ...]:
        """State of the main thread and the processor's time that it took."""
        fields = self._main.read_text().rpartition(")")[2].split()
        switches = self._main.with_name("status").read_text().splitlines()[-2:]
        return (fields[0], *switches)


class _Jumper:
    """Takes the place of the alarm: calls functions at deadlines, which come as soon as the main thread waits."""

    def __init__(self, clock: JumpingClock) -> None:
        self._clock, self._calls = clock, []  # type: tuple[JumpingClock, list[tuple[float, Any]]]
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def get(self) -> _Jumper:
        """This one, which runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="emulated-links")
            self._thread.start()
        return self

    def call_at(self, when_s: float, call: Any) -> None:
        """See ``link_clock._Alarm.call_at``."""
        with self._changed:
            self._calls.append((when_s, call))
            self._calls.sort(key=lambda pair: pair[0])
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                when_s = self._calls[0][0]
            if self._clock.now() < when_s and self._clock.main_sleeps():
                self._clock.jump_to(when_s)
            if self._clock.now() >= when_s:
                with self._changed:
                    _, call = self._calls.pop(0)
                call()

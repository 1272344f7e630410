"""When a rank counts as blocked, and ranks as waiting for each other."""

from __future__ import annotations

import linecache
import signal
import threading
import time
from typing import Any

import pytest

from lightning_osdp.backend import blocked_thread
from lightning_osdp.backend.blocked_thread import CONFIRMATION_S, MUTUAL_WAIT_S, BlockedWatch, MutualWaits, Wait
from tests.unit.backend.test_rank_agreement import Store

ENGINE = "all_gather_coalesced (lightning_osdp.engine.fairscale.unit_collectives, line 80)"
USER = "all_reduce (train, line 33)"


class Clock:
    """A clock that the test sets, and what the other facts of this rank are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.operation, self.num_collectives, self.transport_s = 100.0, USER, 3, 0.0
        monkeypatch.setattr(blocked_thread.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(blocked_thread, "find_blocking_operation", lambda: self.operation)
        monkeypatch.setattr(blocked_thread, "_num_collectives", lambda: self.num_collectives)
        monkeypatch.setattr(blocked_thread, "_transport_seconds", lambda: self.transport_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def blocked_seconds(clock: Clock, changes: dict[str, Any]) -> float:
    """For how long the rank counts as blocked after 20 s in which these facts grow once a second."""
    watch, progress = BlockedWatch(), 0
    for _ in range(21):
        wait = watch.look(progress)
        clock.now_s += 1.0
        progress += changes.get("progress", 0)
        clock.num_collectives += changes.get("num_collectives", 0)
        clock.transport_s += changes.get("transport_s", 0.0)
    return wait.seconds


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 20.0),
        ({"transport_s": 0.003}, 20.0),
        ({"transport_s": 0.02}, 0.0),
        ({"num_collectives": 1}, 0.0),
        ({"progress": 1}, 0.0),
    ],
    ids=str,
)
def test_rank_is_blocked_while_nothing_moves(clock: Clock, changes: dict[str, Any], seconds: float) -> None:
    assert blocked_seconds(clock, changes) == pytest.approx(seconds, abs=blocked_thread.TRANSFER_WINDOW_S)


def test_rank_in_no_collective_is_not_blocked(clock: Clock) -> None:
    clock.operation = ""
    assert blocked_seconds(clock, {}) == 0.0


def find_mutual_wait(clock: Clock, *waits: tuple[str, float]) -> str:
    store = Store()
    monitors = [MutualWaits(store, rank, len(waits)) for rank in range(len(waits))]
    for _ in range(8):
        clock.now_s += CONFIRMATION_S / 4
        texts = [each.look(Wait(*wait), "ran fc") for each, wait in zip(monitors, waits, strict=True)]
    return texts[-1]


LONG = MUTUAL_WAIT_S + 1


def test_ranks_in_engine_and_other_collectives_wait_for_each_other(clock: Clock) -> None:
    found = find_mutual_wait(clock, (ENGINE, LONG), (USER, LONG), (USER, LONG))
    assert found == (
        "rank 0 waits where it ran fc; rank 1 waits in all_reduce (train, line 33), after it ran fc; "
        "rank 2 waits in all_reduce (train, line 33), after it ran fc"
    )


@pytest.mark.parametrize(
    "waits",
    [
        ((ENGINE, LONG), (ENGINE, LONG)),
        ((USER, LONG), ("barrier (train, line 40)", LONG)),
        ((ENGINE, LONG), (USER, MUTUAL_WAIT_S - 1)),
        ((ENGINE, LONG), ("", 0.0)),
        ((ENGINE, LONG), (USER, LONG), ("", 0.0)),
    ],
    ids=["all in the engine", "all in others", "not long enough", "one is in Python", "a third may help"],
)
def test_ranks_of_which_some_may_go_on_are_left_alone(clock: Clock, waits: Any) -> None:
    assert find_mutual_wait(clock, *waits) == ""


@pytest.mark.parametrize("after_reset", [False, True])
def test_operation_of_the_main_thread_is_read_from_another_one(
    monkeypatch: pytest.MonkeyPatch, after_reset: bool
) -> None:
    """Also after a Trainer has reset all handlers of signals."""
    if after_reset:
        signal.signal(signal.SIGURG, signal.SIG_DFL)
    monkeypatch.setattr(blocked_thread, "_DISTRIBUTED_MODULES", {"threading"})
    barrier, found = threading.Barrier(2), list[str]()

    def look() -> None:
        while not barrier.n_waiting:
            time.sleep(0.001)
        found.append(blocked_thread.find_blocking_operation())
        barrier.wait()

    thread = threading.Thread(target=look)
    thread.start()
    barrier.wait()
    thread.join()
    (text,) = found
    line = int(text.removeprefix(f"wait ({__name__}, line ").removesuffix(")"))
    assert linecache.getline(__file__, line).strip() == "barrier.wait()"

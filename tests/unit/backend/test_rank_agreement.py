"""Ranks that agree over a store: at how many requests, and which answers mean that one is blocked for good."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_osdp.backend import rank_agreement
from lightning_osdp.backend.rank_agreement import BLOCKED_S, NO_ANSWER_S, Decision, RankAgreement, Request
from lightning_osdp.errors import ShardingError

TIMEOUT_S = 1800.0
WANTED = Request("forward 0", "in training step 1", "runs fc, in training step 1")


class Store(dict[str, Any]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self[key] for key in keys]


class Wait:
    """A rank 0 that waits for rank 1, on a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now_s = Store(), 100.0
        monkeypatch.setattr(rank_agreement.time, "monotonic", lambda: self.now_s)
        self.store |= {"status/0": "{}", "request/0": '{"position": 4}', "request/1": '{"position": -1}'}
        self.answer(2 * BLOCKED_S)  # to an inquiry of an earlier wait
        self._inquiry = rank_agreement._Inquiry(self.store, 0, 2)

    def answer(self, blocked_s: float, position: int = 4) -> None:
        """Have rank 1 answer the last inquiry."""
        status = {"position": position, "inquiries": self.store.add("inquiries", 0), "did": "ran fc"}
        blocked = {"blocked_in": "all_reduce (module, line 3)", "blocked_s": blocked_s}
        self.store.set("status/1", json.dumps(status | blocked))

    def look(self, after_s: float) -> None:
        self.now_s += after_s
        self._inquiry.look(4, WANTED, TIMEOUT_S)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    return Wait(monkeypatch)


def test_rank_that_goes_on_answering_that_it_is_blocked_is_an_error(wait: Wait) -> None:
    for seconds in range(6):
        wait.answer(20.0 + seconds)  # before the others came, it may have waited for them
        wait.look(0.9)
    wait.answer(26.0)
    with pytest.raises(ShardingError, match=r"rank 0 runs fc, in training step 1, while rank 1 waits in all_reduce"):
        wait.look(0.9)


def test_rank_that_was_blocked_and_has_not_answered_since_is_waited_for(wait: Wait) -> None:
    wait.look(0.1)
    wait.answer(2 * BLOCKED_S)
    for _ in range(20):
        wait.look(1.1)  # its interpreter may be busy


def test_rank_that_is_blocked_elsewhere_or_not_any_more_is_waited_for(wait: Wait) -> None:
    for seconds in range(20):
        wait.answer(seconds % 5)
        wait.look(1.0)
    for _ in range(20):
        wait.answer(0.0)
        wait.look(1.0)


def test_late_rank_that_answers_is_waited_for_until_the_time_out(wait: Wait) -> None:
    for _ in range(170):
        wait.answer(0.0)
        wait.look(TIMEOUT_S / 170)
    wait.answer(0.0)
    with pytest.raises(ShardingError) as raised:
        wait.look(1.0)
    assert str(raised.value) == (
        "timed out: rank 0 runs fc, in training step 1, and other ranks did not come within 1800 s. Where a rank needs "
        "longer by itself, set OSDPStrategy(timeout=...)"
    )


def test_rank_without_any_answer_counts_as_ended_after_a_minute(wait: Wait) -> None:
    wait.look(NO_ANSWER_S - 1.0)
    with pytest.raises(ShardingError, match="lost the connection to rank 1, which has ended or hangs, while rank 0"):
        wait.look(2.0)


class CountingStore:
    """Counts the requests to a store that threads share."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self._counts[name] += 1
            return getattr(self._store, name)(*args)

        return request


RANKS = 64


class Group:
    """A process group without processes."""

    group_name, _device_types = "all", ("cpu",)

    def __init__(self, rank: int) -> None:
        self.rank, self.size = lambda: rank, lambda: RANKS

    def _get_backend(self, device: str) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=60)))


def agreements_of_threads(monkeypatch: pytest.MonkeyPatch) -> tuple[list[RankAgreement], Counter[str]]:
    """Agreements of ranks that are threads here, and a count of the requests that these ranks make."""
    store, counts = HashStore(), Counter[str]()
    ranks = SimpleNamespace(clone=lambda: store)
    monkeypatch.setattr(rank_agreement, "_get_default_store", lambda: ranks)
    monkeypatch.setattr(
        rank_agreement, "PrefixStore", lambda _, user: CountingStore(store, counts if user is ranks else Counter())
    )
    monkeypatch.setattr(rank_agreement, "_responder", rank_agreement._Responder())
    agreements = [RankAgreement(Group(rank), lambda asked: Decision(asked[-1].event), str) for rank in range(RANKS)]
    counts.clear()
    return agreements, counts


def ask_all(agreements: list[RankAgreement], late_s: float = 0.0) -> list[Any]:
    """What each rank is told that asks for its own number; the last rank comes late."""
    decisions: list[Any] = [None] * len(agreements)

    def ask(rank: int) -> None:
        decisions[rank] = agreements[rank].ask(Request(str(rank), "", ""))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(agreements))]
    for thread in threads[:-1]:
        thread.start()
    threading.Event().wait(late_s)
    threads[-1].start()
    for thread in threads:
        thread.join()
    return decisions


def test_64_ranks_agree_with_few_requests_each_however_long_one_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    agreements, counts = agreements_of_threads(monkeypatch)
    assert {decision.event for decision in ask_all(agreements)} == {"63"}
    assert counts.total() - counts["check"] < 6 * RANKS
    counts.clear()
    began = time.monotonic()
    assert {decision.event for decision in ask_all(agreements, late_s=1.0)} == {"63"}
    seconds = time.monotonic() - began
    for agreement in agreements:
        agreement.close()
    assert counts["get"] <= RANKS  # of the decision: no rank reads what each of the others says
    assert counts["multi_get"] < (seconds / 0.14 + 1) * RANKS


def test_rank_that_has_given_up_goes_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    agreements, _ = agreements_of_threads(monkeypatch)
    agreements[0]._timeout_s = 0.1
    with pytest.raises(ShardingError, match="timed out: rank 0 reads a weight, and other ranks did not come"):
        agreements[0].ask(Request("access", "", "reads a weight"))  # and its user handles the error
    agreements[0]._timeout_s = 60.0
    assert {decision.event for decision in ask_all(agreements)} == {"63"}

"""Which answers of a rank mean that it is blocked for good."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_osdp.backend import rank_agreement
from lightning_osdp.backend.rank_agreement import BLOCKED_S, Request
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


class Wait:
    """A rank 0 that waits for rank 1, on a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now_s = Store(), 100.0
        monkeypatch.setattr(rank_agreement.time, "monotonic", lambda: self.now_s)
        self.answer()  # to an inquiry of an earlier wait
        self._inquiry = rank_agreement._Inquiry(self.store, 0, 2)

    def answer(self, blocked_in: str = "all_reduce (module, line 3)", position: int = 4) -> None:
        """Have rank 1 answer the last inquiry."""
        status = {"position": position, "inquiries": self.store.add("inquiries", 0)}
        self.store.set("status/1", json.dumps({**status, "did": "ran fc", "blocked_in": blocked_in}))

    def look(self, after_s: float) -> None:
        self.now_s += after_s
        self._inquiry.look(4, WANTED, TIMEOUT_S)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    return Wait(monkeypatch)


def test_rank_that_goes_on_answering_that_it_is_blocked_is_an_error(wait: Wait) -> None:
    wait.look(0.1)
    for _ in range(6):
        wait.answer()
        wait.look(0.9)
    wait.answer()
    with pytest.raises(ShardingError, match=r"rank 0 runs fc, in training step 1, while rank 1 waits in all_reduce"):
        wait.look(0.9)


def test_rank_that_was_blocked_and_has_not_answered_since_is_waited_for(wait: Wait) -> None:
    wait.look(0.1)
    wait.answer()
    wait.look(0.1)
    wait.look(2 * BLOCKED_S)  # its interpreter may be busy


def test_rank_that_is_blocked_elsewhere_or_not_any_more_is_waited_for(wait: Wait) -> None:
    for seconds in range(20):
        wait.answer(f"all_reduce (module, line {seconds // 5})")
        wait.look(1.0)
    for _ in range(20):
        wait.answer("")
        wait.look(1.0)

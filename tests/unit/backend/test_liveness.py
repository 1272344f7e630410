"""A process is told from one that has ended, and from a later one with its number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_osdp.backend import liveness
from tests.support.ranks import run_ranks


def describe(rank: int, ranks: int) -> str:
    return liveness.describe_process()


@pytest.fixture(scope="module")
def ended() -> str:
    """What a process that has ended has said of itself."""
    (said,) = run_ranks(describe, 1)
    return str(said)


def test_process_that_has_ended_is_dead_and_this_one_is_not(ended: str) -> None:
    assert liveness.is_dead(ended)
    assert not liveness.is_dead(liveness.describe_process())
    assert not liveness.has_process(json.loads(ended)[1])
    assert liveness.has_process(os.getpid())


def test_later_process_with_same_number_does_not_stand_for_the_earlier_one(ended: str) -> None:
    namespace, _, start = json.loads(ended)
    assert liveness.is_dead(json.dumps([namespace, os.getpid(), start]))


def test_process_of_another_machine_counts_as_living(ended: str) -> None:
    _, pid, start = json.loads(ended)
    assert not liveness.is_dead(json.dumps([["another host"], pid, start]))


def test_without_proc_number_decides(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert liveness.is_dead(ended)
    assert not liveness.is_dead(liveness.describe_process())


def test_process_of_another_user_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert liveness.has_process(1)

"""A fault on one rank, at each stage of a start, ends all ranks soon and with its cause."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.support.faults import Ending, start_with_fault

BOUND_S = 20.0
"""Seconds from a fault until both ranks have ended, 5 on a quiet machine. The process group waits 30 minutes."""

TOLD = {
    "raise": "ValueError: row 7 is bad",
    "memory": "can't allocate memory",
    "kill": "killed (out of memory?)",
    "stop": "has given no sign for 3 s",
}


class Case(NamedTuple):
    stage: str
    fault: str
    rank: int
    after: int = 0


CASES = [
    Case("setup hook", "raise", 1),
    Case("callback's setup", "kill", 0),
    Case("setup hook", "stop", 1),
    Case("first batch", "raise", 0),
    Case("trace", "raise", 1),
    Case("look-up", "raise", 0),
    Case("links: barrier of links", "raise", 1, 2),
    Case("links: barrier of links", "kill", 1, 2),
    Case("engine's overhead", "raise", 0, 2),
    Case("unsharded trial: real step", "memory", 0, 1),
    Case("search", "raise", 0),
    Case("cache the plan", "raise", 1),
    Case("check of the plan", "raise", 1),
    Case("configure_optimizers", "raise", 0),
    Case("apply: engine", "raise", 1),
    Case("validation step", "raise", 0),
]


@pytest.fixture(scope="module")
def endings() -> dict[Case, list[Ending]]:
    """How both ranks ended, two cases at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(lambda case: start_with_fault(*case), CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.fault} at {case.stage} on rank {case.rank}")
def test_fault_on_one_rank_ends_start_of_all_ranks_with_its_cause(
    endings: dict[Case, list[Ending]], case: Case
) -> None:
    failed, other = endings[case][case.rank], endings[case][1 - case.rank]
    assert other.status not in (0, 999), other.text
    assert TOLD[case.fault] in other.text
    assert other.seconds < BOUND_S, other.text
    if case.fault in ("raise", "memory"):
        assert failed.status == 1, failed.text
        assert TOLD[case.fault] in failed.text
        assert failed.seconds < BOUND_S

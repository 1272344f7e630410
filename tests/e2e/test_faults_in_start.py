"""A fault on one rank, at each stage of a start, ends all ranks soon and with its cause."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.support.faults import Ending, start_and_catch, start_with_fault

BOUND_S = 10.0
"""Seconds from a fault until both ranks have ended, 5 on a quiet machine. The process group waits 30 minutes."""

TOLD = {
    "raise": "ValueError: row 7 is bad",
    "memory": "can't allocate memory",
    "kill": "killed (out of memory?)",
    "stop": "has given no sign for 3 s",
    "sigterm": "was told to stop (SIGTERM)",
    "sigterm while blocked": "was told to stop (SIGTERM)",
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
    Case("setup hook", "sigterm", 0),
    Case("look-up", "raise", 0),
    Case("cache the plan", "raise", 1),
    Case("check of the plan", "raise", 1),
    Case("links: barrier of links", "raise", 1, 2),
    Case("links: barrier of links", "kill", 1, 2),
    Case("engine's overhead", "raise", 0, 2),
    Case("kernels", "raise", 1),
    Case("memory budget", "sigterm while blocked", 1),
    Case("apply: engine", "raise", 1),
    Case("validation step", "raise", 0),
]

TRIAL_CASES = [Case("unsharded trial: real step", "memory", 0, 1), Case("trial of the plan: real step", "raise", 1, 1)]
"""Faults of a trial, which all ranks leave out."""

CAUGHT_CASES = [
    *(Case(stage, "raise", rank) for stage in ("first batch", "trace", "configure_optimizers") for rank in range(2)),
    Case("search", "raise", 0),
]
"""Faults that all ranks raise, so that a script that catches them can go on."""


def name_case(case: Case) -> str:
    return f"{case.fault} at {case.stage} on rank {case.rank}"


@pytest.fixture(scope="module")
def endings() -> dict[Case, list[Ending]]:
    """How both ranks ended, two cases at a time."""
    every = CASES + TRIAL_CASES
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(every, pool.map(lambda case: start_with_fault(*case), every), strict=True))


@pytest.fixture(scope="module")
def caught() -> tuple[list[Ending], dict[Case, list[Ending]]]:
    """How both ranks ended after all these faults and a run without one, and what they have caught."""
    endings, runs = start_and_catch(CAUGHT_CASES)
    return endings, dict(zip(CAUGHT_CASES, runs, strict=True))


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_fault_on_one_rank_ends_start_of_all_ranks_with_its_cause(
    endings: dict[Case, list[Ending]], case: Case
) -> None:
    failed, other = endings[case][case.rank], endings[case][1 - case.rank]
    assert other.status not in (0, 999), other.text
    assert TOLD[case.fault] in other.text
    assert other.seconds < BOUND_S, other.text
    if case.fault in ("raise", "memory"):
        assert failed.status == 1, failed.text
    if case.fault.startswith("sigterm"):
        assert failed.status == 143, failed.text
    if case.fault not in ("kill", "stop"):
        assert TOLD[case.fault] in failed.text
        assert failed.seconds < BOUND_S


@pytest.mark.parametrize("case", TRIAL_CASES, ids=name_case)
def test_fault_on_one_rank_in_a_trial_leaves_the_trial_out_and_training_goes_on(
    endings: dict[Case, list[Ending]], case: Case
) -> None:
    assert [ending.status for ending in endings[case]] == [0, 0], [ending.text for ending in endings[case]]
    assert all(0 < ending.seconds < 60 for ending in endings[case])  # a fault there was


@pytest.mark.parametrize("case", CAUGHT_CASES, ids=name_case)
def test_fault_on_one_rank_is_raised_on_all_ranks(
    caught: tuple[list[Ending], dict[Case, list[Ending]]], case: Case
) -> None:
    for ending in caught[1][case]:
        assert TOLD[case.fault] in ending.text
        assert ending.seconds < BOUND_S


def test_run_after_caught_faults_works_and_processes_end_without_error(
    caught: tuple[list[Ending], dict[Case, list[Ending]]],
) -> None:
    assert [ending.status for ending in caught[0]] == [0, 0], [ending.text for ending in caught[0]]

"""What is done where the plan that was found can't be had as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_osdp import measurements, planner
from lightning_osdp import team as planning_team
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.measurements import Measurements
from lightning_osdp.planning.operators import NOTHING_BETWEEN, BetweenSteps
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import STEP_ERROR, Rehearsal, decided
from lightning_osdp.planning.schedule import BatchRule, Problem, least_bytes, make_plan
from lightning_osdp.planning.settled import Settled
from lightning_osdp.profiling import memory
from lightning_osdp.profiling.memory import EVALUATION_BYTES, FIRST_STEP_BYTES
from lightning_osdp.team import APPLYING_S, FIRST_SEARCH, START_S, UNSEEN_GAIN, Room, Team, plan_for
from tests.planning.small import MIB, blocks_of_one, cluster, compute

MODEL = blocks_of_one(3, 2)
RULE = BatchRule(batch_size=2)
ROOMY = Problem(MODEL, cluster(), compute(MODEL), 1024 * MIB, 8 * MIB)


def test_what_is_short_by_no_more_than_a_guess_is_tried() -> None:
    least = least_bytes(ROOMY, 2)
    short = replace(ROOMY, memory_limit_bytes=least - MIB)
    for guessed_bytes in (0, MIB - 1):
        with pytest.raises(InfeasibleError, match="needs at least"):
            plan_for(short, RULE, [], guessed_bytes)
    with pytest.warns(OSDPWarning, match=r"needs at least.*What would fit.*training is tried"):
        plan = plan_for(short, RULE, [], MIB)
    assert plan.predicted.peak_memory_bytes == least
    assert plan.memory_limit_bytes == short.memory_limit_bytes


def test_what_steps_leave_behind_is_as_an_earlier_start_has_seen_it() -> None:
    room, seen = Room(limit=100, used=60, guessed=12), Settled(asked="", plan=make_plan(ROOMY, RULE), used_bytes=50)
    assert room.as_shown(seen) == Room(100, 50, 0)
    for other in (0, 47, 61):  # nothing seen, or another process than now
        assert room.as_shown(seen.model_copy(update={"used_bytes": other})) == room
    assert room.as_shown(seen.model_copy(update={"guessed_bytes": 12})) == room


def test_what_fits_is_as_the_search_says() -> None:
    assert plan_for(ROOMY, RULE, [], MIB) == make_plan(ROOMY, RULE)


class Counted:
    """A limit that was found, 100 bytes of it pages of files."""

    def now(self) -> int:
        return 1000

    def file_pages(self) -> int:
        return 100

    def pages_to_come(self, stepped: bool) -> int:
        return 0 if stepped else 3


class Alone(Team):
    """One rank without a process group."""

    def least_and_most(self, least: Sequence[int], most: Sequence[int]) -> list[int]:
        return [*least, *most]


def test_nothing_is_run_to_see_how_much_memory_there_is_where_an_earlier_start_has_seen_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(ROOMY, RULE)
    monkeypatch.setattr(planning_team, "memory_in_use", lambda device: 50)
    monkeypatch.setattr(planning_team, "allowance", lambda device, stepped, evaluates: 7)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    limit: Any = Counted()
    team = Alone(nothing, ranks, None, limit, 20, nothing, NOTHING_BETWEEN, 0.0)
    # 30 bytes are not the model's, and 7 more are kept for first steps
    assert team.room_seen(Settled(asked="", plan=plan, used_bytes=37, file_bytes=140)) == Room(1040, 37, 0, 140)
    assert team.room_seen(Settled(asked="", plan=plan, used_bytes=36, file_bytes=140)) is None
    assert team.room_seen(Settled(asked="", plan=plan)) is None
    guess = Settled(asked="", plan=plan, used_bytes=37, guessed_bytes=7, file_bytes=140)
    assert team.room_seen(guess) == Room(1040, 37, 7, 140)


@pytest.mark.parametrize(("stepped", "room"), [(False, Room(1003, 57, 7, 103)), (True, Room(1000, 57, 7, 100))])
def test_pages_that_first_steps_will_read_come_on_top_of_a_limit_that_was_found(
    stepped: bool, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_team, "not_for_the_model", lambda *_: 57)
    monkeypatch.setattr(planning_team, "allowance", lambda device, stepped, evaluates: 7)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    limit: Any = Counted()
    assert Alone(nothing, ranks, None, limit, 20, nothing, NOTHING_BETWEEN, 0.0).room(stepped) == room


@pytest.mark.parametrize(("evaluation_batch_size", "more"), [(0, 0), (64, EVALUATION_BYTES["cpu"])])
def test_room_is_kept_for_what_kernels_of_evaluation_leave_behind(
    evaluation_batch_size: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after a validation took up to 2 MiB more than their limit."""
    monkeypatch.setattr(memory, "memory_in_use", lambda device: 50)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    limit: Any = Counted()
    between = BetweenSteps(evaluation_batch_size=evaluation_batch_size)
    room = Alone(nothing, ranks, None, limit, 20, nothing, between, 0.0).room(stepped=False)
    assert room.guessed == FIRST_STEP_BYTES["cpu"] + more
    assert room.used == 30 + room.guessed


class Timed(Team):
    """Each search finds the next of some plans, the last one for good; rehearsing one takes ten seconds."""

    def __init__(self, plans: Sequence[ExecutionPlan], left_s: float, search_s: float, fits: bool = False) -> None:
        super().__init__(*[None] * 8)  # type: ignore[arg-type]
        self.__dict__.update(plans=list(plans), gains=[], shares=[], seconds=left_s, search_s=search_s, fits=fits)

    def known(self, measured: Any, rule: Any, plan: ExecutionPlan, room: Any) -> ExecutionPlan | None:
        return plan if self.__dict__["fits"] else None

    def decide(
        self, measured: Any, rule: Any, room: Any, gain: float = 0.0, share: float | None = None
    ) -> ExecutionPlan:
        assert share is not None, "a start's search is to end in time"
        self.__dict__["gains"].append(gain)
        self.__dict__["shares"].append(share)
        self.__dict__["seconds"] -= self.__dict__["search_s"]
        plans: list[ExecutionPlan] = self.__dict__["plans"]
        return plans.pop(0) if len(plans) > 1 else plans[0]

    def rehearsed(self, stage: Any, measured: Measurements, plan: ExecutionPlan, search_s: float) -> Rehearsal | None:
        assert search_s == self.__dict__["search_s"]
        if stage == "no room":
            return None
        if any(one.decided == decided(plan) for one in measured.rehearsals):
            return None
        self.__dict__["seconds"] -= 10.0
        return Rehearsal(decided=decided(plan), foreseen_s=1.0, took_s=1.0, added_s={})

    def room(self, stepped: bool) -> Room:
        return Room(100, 50, 0)

    def left_s(self) -> float:
        return float(self.__dict__["seconds"])


@pytest.mark.parametrize(
    ("count", "left_s", "search_s", "gains"),
    [
        (1, 30.0, 0.0, [STEP_ERROR]),
        (2, 30.0, 0.0, [STEP_ERROR, UNSEEN_GAIN]),
        (3, 30.0, 0.0, [STEP_ERROR, UNSEEN_GAIN]),
        (2, 20.0 + APPLYING_S, 0.0, [UNSEEN_GAIN]),
        (2, 27.0 + APPLYING_S, 2.0, [STEP_ERROR, UNSEEN_GAIN]),
        (2, 26.0 + APPLYING_S, 2.0, [UNSEEN_GAIN]),
        (2, -5.0, 0.0, [UNSEEN_GAIN]),
    ],
)
def test_what_is_found_is_rehearsed_while_there_is_time_and_what_was_not_has_to_promise_the_more(
    count: int, left_s: float, search_s: float, gains: list[float]
) -> None:
    plans = [make_plan(ROOMY, BatchRule(batch_size=1 + at)) for at in range(count)]
    team, nothing = Timed(plans, left_s, search_s), Measurements(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan, measured, room = team.found(nothing, RULE, Room(100, 60, 12), stage=None)
    assert plan == plans[min(len(gains), count - 1)]
    assert [one.decided for one in measured.rehearsals] == [decided(each) for each in plans[: len(gains)]]
    assert team.__dict__["gains"][1:] == gains
    assert room.used == 50


@pytest.mark.parametrize(
    ("search_s", "shares"),
    [(7.9, [FIRST_SEARCH]), (8.0, [FIRST_SEARCH, 1.0]), (9.0, [FIRST_SEARCH, 1.0]), (10.0, [FIRST_SEARCH])],
)
def test_a_search_that_was_cut_short_for_a_rehearsal_goes_on_where_there_can_be_none_and_there_is_more_time(
    search_s: float, shares: list[float]
) -> None:
    plans = [make_plan(ROOMY, BatchRule(batch_size=1 + at)) for at in range(3)]
    team, stage = Timed(plans, 20.0 + APPLYING_S, search_s), cast(Any, "no room")
    nothing = Measurements(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan, measured, room = team.found(nothing, RULE, Room(100, 60, 12), stage)
    assert team.__dict__["shares"] == shares
    assert team.__dict__["gains"][1:] == [UNSEEN_GAIN] * (len(shares) - 1)
    assert plan.batch_size == len(shares)
    assert (measured, room.used) == (nothing, 60)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(("left_s", "late"), [(14.0 + APPLYING_S, False), (13.0 + APPLYING_S, True)])
def test_where_a_search_would_take_too_long_what_was_rehearsed_is_taken_if_it_still_fits(
    fits: bool, left_s: float, late: bool
) -> None:
    plans = [make_plan(ROOMY, BatchRule(batch_size=1 + at)) for at in range(2)]
    team = Timed(plans, left_s, 2.0, fits)
    nothing = Measurements(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan, measured, room = team.found(nothing, RULE, Room(100, 60, 12), stage=None)
    searched = not (late and fits)
    assert plan == plans[int(searched)]
    assert len(team.__dict__["gains"]) == 1 + int(searched)
    assert len(measured.rehearsals) == 1
    assert room.used == 50


def test_what_was_rehearsed_is_looked_up_as_it_is_predicted_now(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ROOMY, RULE)
    team, nothing = Timed([plan], 1.0, 1.0), Measurements(compute=compute(MODEL), link=ROOMY.cluster.link)
    for limit, expected in ((ROOMY.memory_limit_bytes, plan), (plan.predicted.peak_memory_bytes - 1, None)):
        problem = replace(ROOMY, memory_limit_bytes=limit)
        monkeypatch.setattr(Team, "_of_first_rank", lambda _, work, *__, problem=problem: work(problem))
        assert Team.known(team, nothing, RULE, plan, Room(limit, 0, 0)) == expected


@pytest.mark.parametrize("found_plan", [False, True])
def test_memory_counts_as_seen_only_where_a_plan_that_was_found_was_rehearsed(
    found_plan: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps with all operators replicated leave less behind than those of the plan: a run was killed for 9 of 6 MiB."""
    plan, file, asked_for = make_plan(ROOMY, RULE), tmp_path / "measured.json", []
    shown = Rehearsal(decided="", foreseen_s=1.0, took_s=1.0, added_s={}, plan=plan if found_plan else None)
    measured = Measurements(compute=compute(MODEL), link=ROOMY.cluster.link, rehearsals=(shown,))

    def room(self: Team, stepped: bool) -> Room:
        asked_for.append(stepped)
        return Room(100, 60, 12, 5)

    monkeypatch.setattr(measurements, "measured", lambda *_: (measured, False, file))
    monkeypatch.setattr(Team, "room", room)
    monkeypatch.setattr(Team, "found", lambda self, measured, rule, room, stage: (plan, measured, room))
    nothing: Any = None
    ranks: Any = SimpleNamespace(count=2, is_first=True)
    planner.measure_and_plan(nothing, ranks, RULE, nothing, 0, began_s=0.0)
    assert asked_for == [False]
    (one,) = Measurements.model_validate_json(file.read_text()).settled
    assert (one.used_bytes, one.guessed_bytes, one.file_bytes) == (60, 0 if found_plan else 12, 5)


@pytest.mark.parametrize(
    ("share", "late"), [(None, [False] * 3), (0.5, [False, False, True]), (0.1, [False, True, True])]
)
def test_a_search_ends_when_its_share_of_the_start_is_over(
    share: float | None, late: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 seconds before the start is to end, beside what applying a plan takes."""
    now_s, told = START_S - APPLYING_S - 10.0, []

    def searching(*arguments: Any) -> ExecutionPlan:
        nonlocal now_s
        for seconds in (0.5, 4.0, 1.0):  # it has searched for 0.5, 4.5, and 5.5 seconds
            now_s += seconds
            told.append(arguments[-1]())
        return make_plan(ROOMY, RULE)

    monkeypatch.setattr(planning_team, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(planning_team, "plan_for", searching)
    monkeypatch.setattr(Team, "_of_first_rank", lambda _, work, *__: work(ROOMY))
    nothing: Any = None
    ranks: Any = SimpleNamespace(device=torch.device("meta"))
    team = Team(nothing, ranks, None, nothing, 0, nothing, nothing, 0.0)
    team.decide(Measurements(compute=compute(MODEL), link=ROOMY.cluster.link), RULE, Room(1, 0, 0), share=share)
    assert told == late

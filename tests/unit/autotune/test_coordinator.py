"""What is done where the plan that was found can't be had as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_osdp.autotune import coordinator as planning_coordinator
from lightning_osdp.autotune import measure, pipeline
from lightning_osdp.autotune.coordinator import (
    APPLY_RESERVE_S,
    FIRST_SEARCH_FRACTION,
    STARTUP_BUDGET_S,
    UNTRIED_PLAN_MARGIN,
    MemoryBudget,
    PlanningCoordinator,
    plan_or_fallback,
)
from lightning_osdp.autotune.measure import Profile
from lightning_osdp.backend import memory
from lightning_osdp.backend.memory import EVALUATION_GROWTH_BYTES, FIRST_STEP_GROWTH_BYTES
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, plan_key
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan, min_memory_bytes
from lightning_osdp.planning.search.plan_selection import CachedPlan
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.small_models import MIB, blocks_of_one, cluster, compute

MODEL = blocks_of_one(3, 2)
RULE = BatchSizePolicy(batch_size=2)
ROOMY = Problem(MODEL, cluster(), compute(MODEL), 1024 * MIB, 8 * MIB)


def test_plan_or_fallback_tries_min_memory_plan_within_estimated_bytes() -> None:
    least = min_memory_bytes(ROOMY, 2)
    short = replace(ROOMY, memory_limit_bytes=least - MIB)
    for guessed_bytes in (0, MIB - 1):
        with pytest.raises(InfeasibleError, match="needs at least"):
            plan_or_fallback(short, RULE, [], guessed_bytes)
    with pytest.warns(OSDPWarning, match=r"needs at least.*What would fit.*training is tried"):
        plan = plan_or_fallback(short, RULE, [], MIB)
    assert plan.predicted.peak_memory_bytes == least
    assert plan.memory_limit_bytes == short.memory_limit_bytes


def test_with_observed_usage_takes_usage_seen_by_earlier_start() -> None:
    room, seen = (
        MemoryBudget(limit=100, non_model=60, estimated=12),
        CachedPlan(request_key="", plan=make_plan(ROOMY, RULE), non_model_bytes=50),
    )
    assert room.with_observed_usage(seen) == MemoryBudget(100, 50, 0)
    for other in (0, 47, 61):  # nothing seen, or another process than now
        assert room.with_observed_usage(seen.model_copy(update={"non_model_bytes": other})) == room
    assert room.with_observed_usage(seen.model_copy(update={"estimated_bytes": 12})) == room


def test_plan_or_fallback_returns_searched_plan_when_it_fits() -> None:
    assert plan_or_fallback(ROOMY, RULE, [], MIB) == make_plan(ROOMY, RULE)


class Counted:
    """A limit that was found, 100 bytes of it pages of files."""

    def current(self) -> int:
        return 1000

    def file_pages(self) -> int:
        return 100

    def expected_file_pages(self, after_trial: bool) -> int:
        return 0 if after_trial else 3


class Alone(PlanningCoordinator):
    """One rank without a process group."""

    def all_reduce_min_max(self, minima: Sequence[int], maxima: Sequence[int]) -> list[int]:
        return [*minima, *maxima]


def test_cached_memory_budget_is_used_unless_process_uses_more_than_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ROOMY, RULE)
    monkeypatch.setattr(planning_coordinator, "memory_in_use", lambda device: 50)
    monkeypatch.setattr(planning_coordinator, "growth_reserve", lambda device, after_trial, evaluates: 7)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    limit: Any = Counted()
    team = Alone(nothing, ranks, None, limit, 20, nothing, NO_NON_TRAINING_WORK, 0.0)
    # 30 bytes are not the model's, and 7 more are kept for first steps
    assert team.cached_memory_budget(
        CachedPlan(request_key="", plan=plan, non_model_bytes=37, file_page_bytes=140)
    ) == MemoryBudget(1040, 37, 0, 140)
    assert (
        team.cached_memory_budget(CachedPlan(request_key="", plan=plan, non_model_bytes=36, file_page_bytes=140))
        is None
    )
    assert team.cached_memory_budget(CachedPlan(request_key="", plan=plan)) is None
    guess = CachedPlan(request_key="", plan=plan, non_model_bytes=37, estimated_bytes=7, file_page_bytes=140)
    assert team.cached_memory_budget(guess) == MemoryBudget(1040, 37, 7, 140)


@pytest.mark.parametrize(
    ("stepped", "room"), [(False, MemoryBudget(1003, 57, 7, 103)), (True, MemoryBudget(1000, 57, 7, 100))]
)
def test_memory_budget_adds_file_pages_that_first_steps_will_read(
    stepped: bool, room: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning_coordinator, "non_model_bytes", lambda *_: 57)
    monkeypatch.setattr(planning_coordinator, "growth_reserve", lambda device, after_trial, evaluates: 7)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    limit: Any = Counted()
    assert Alone(nothing, ranks, None, limit, 20, nothing, NO_NON_TRAINING_WORK, 0.0).memory_budget(stepped) == room


@pytest.mark.parametrize(("evaluation_batch_size", "more"), [(0, 0), (64, EVALUATION_GROWTH_BYTES["cpu"])])
def test_memory_budget_with_evaluation_reserves_memory_for_its_kernels(
    evaluation_batch_size: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after a validation took up to 2 MiB more than their limit."""
    monkeypatch.setattr(memory, "memory_in_use", lambda device: 50)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    limit: Any = Counted()
    between = NonTrainingWork(evaluation_batch_size=evaluation_batch_size)
    room = Alone(nothing, ranks, None, limit, 20, nothing, between, 0.0).memory_budget(after_trial=False)
    assert room.estimated == FIRST_STEP_GROWTH_BYTES["cpu"] + more
    assert room.non_model == 30 + room.estimated


class Timed(PlanningCoordinator):
    """Each search finds the next of some plans, the last one for good; rehearsing one takes ten seconds."""

    def __init__(self, plans: Sequence[ExecutionPlan], left_s: float, search_s: float, fits: bool = False) -> None:
        super().__init__(*[None] * 8)  # type: ignore[arg-type]
        self.__dict__.update(plans=list(plans), gains=[], shares=[], seconds=left_s, search_s=search_s, fits=fits)

    def repredict(self, profile: Any, policy: Any, plan: ExecutionPlan, memory_budget: Any) -> ExecutionPlan | None:
        return plan if self.__dict__["fits"] else None

    def plan_on_rank_zero(
        self,
        profile: Any,
        policy: Any,
        memory_budget: Any,
        required_gain: float = 0.0,
        time_fraction: float | None = None,
    ) -> ExecutionPlan:
        assert time_fraction is not None, "a start's search is to end in time"
        self.__dict__["gains"].append(required_gain)
        self.__dict__["shares"].append(time_fraction)
        self.__dict__["seconds"] -= self.__dict__["search_s"]
        plans: list[ExecutionPlan] = self.__dict__["plans"]
        return plans.pop(0) if len(plans) > 1 else plans[0]

    def run_trial(self, trial_context: Any, profile: Profile, plan: ExecutionPlan, search_s: float) -> Trial | None:
        assert search_s == self.__dict__["search_s"]
        if trial_context == "no trial":
            return None
        if any(one.plan_key == plan_key(plan) for one in profile.trials):
            return None
        self.__dict__["seconds"] -= 10.0
        return Trial(plan_key=plan_key(plan), predicted_s=1.0, measured_s=1.0, overhead_by_kind_s={})

    def memory_budget(self, after_trial: bool) -> MemoryBudget:
        return MemoryBudget(100, 50, 0)

    def remaining_s(self) -> float:
        return float(self.__dict__["seconds"])


@pytest.mark.parametrize(
    ("count", "left_s", "search_s", "gains"),
    [
        (1, 30.0, 0.0, [TRIAL_RELATIVE_ERROR]),
        (2, 30.0, 0.0, [TRIAL_RELATIVE_ERROR, UNTRIED_PLAN_MARGIN]),
        (3, 30.0, 0.0, [TRIAL_RELATIVE_ERROR, UNTRIED_PLAN_MARGIN]),
        (2, 20.0 + APPLY_RESERVE_S, 0.0, [UNTRIED_PLAN_MARGIN]),
        (2, 27.0 + APPLY_RESERVE_S, 2.0, [TRIAL_RELATIVE_ERROR, UNTRIED_PLAN_MARGIN]),
        (2, 26.0 + APPLY_RESERVE_S, 2.0, [UNTRIED_PLAN_MARGIN]),
        (2, -5.0, 0.0, [UNTRIED_PLAN_MARGIN]),
    ],
)
def test_search_and_trial_tries_plans_while_time_remains_then_demands_margin(
    count: int, left_s: float, search_s: float, gains: list[float]
) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(count)]
    team, nothing = Timed(plans, left_s, search_s), Profile(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan, measured, room = team.search_and_trial(nothing, RULE, MemoryBudget(100, 60, 12), trial_context=None)
    assert plan == plans[min(len(gains), count - 1)]
    assert [one.plan_key for one in measured.trials] == [plan_key(each) for each in plans[: len(gains)]]
    assert team.__dict__["gains"][1:] == gains
    assert room.non_model == 50


@pytest.mark.parametrize(
    ("search_s", "shares"),
    [
        (7.9, [FIRST_SEARCH_FRACTION]),
        (8.0, [FIRST_SEARCH_FRACTION, 1.0]),
        (9.0, [FIRST_SEARCH_FRACTION, 1.0]),
        (10.0, [FIRST_SEARCH_FRACTION]),
    ],
)
def test_search_and_trial_continues_cut_search_when_no_trial_is_possible(search_s: float, shares: list[float]) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(3)]
    team, stage = Timed(plans, 20.0 + APPLY_RESERVE_S, search_s), cast(Any, "no trial")
    nothing = Profile(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan, measured, room = team.search_and_trial(nothing, RULE, MemoryBudget(100, 60, 12), stage)
    assert team.__dict__["shares"] == shares
    assert team.__dict__["gains"][1:] == [UNTRIED_PLAN_MARGIN] * (len(shares) - 1)
    assert plan.batch_size == len(shares)
    assert (measured, room.non_model) == (nothing, 60)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(("left_s", "late"), [(14.0 + APPLY_RESERVE_S, False), (13.0 + APPLY_RESERVE_S, True)])
def test_search_and_trial_without_time_takes_trialled_plan_if_it_still_fits(
    fits: bool, left_s: float, late: bool
) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(2)]
    team = Timed(plans, left_s, 2.0, fits)
    nothing = Profile(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan, measured, room = team.search_and_trial(nothing, RULE, MemoryBudget(100, 60, 12), trial_context=None)
    searched = not (late and fits)
    assert plan == plans[int(searched)]
    assert len(team.__dict__["gains"]) == 1 + int(searched)
    assert len(measured.trials) == 1
    assert room.non_model == 50


def test_repredict_returns_trialled_plan_only_within_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ROOMY, RULE)
    team, nothing = Timed([plan], 1.0, 1.0), Profile(compute=compute(MODEL), link=ROOMY.cluster.link)
    for limit, expected in ((ROOMY.memory_limit_bytes, plan), (plan.predicted.peak_memory_bytes - 1, None)):
        problem = replace(ROOMY, memory_limit_bytes=limit)
        monkeypatch.setattr(PlanningCoordinator, "_on_rank_zero", lambda _, work, *__, problem=problem: work(problem))
        assert PlanningCoordinator.repredict(team, nothing, RULE, plan, MemoryBudget(limit, 0, 0)) == expected


@pytest.mark.parametrize("found_plan", [False, True])
def test_autotune_marks_memory_as_observed_only_after_trial_of_searched_plan(
    found_plan: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps with all operators replicated leave less behind than those of the plan: a run was killed for 9 of 6 MiB."""
    plan, file, asked_for = make_plan(ROOMY, RULE), tmp_path / "measured.json", []
    shown = Trial(
        plan_key="", predicted_s=1.0, measured_s=1.0, overhead_by_kind_s={}, plan=plan if found_plan else None
    )
    measured = Profile(compute=compute(MODEL), link=ROOMY.cluster.link, trials=(shown,))

    def memory_budget(self: PlanningCoordinator, after_trial: bool) -> MemoryBudget:
        asked_for.append(after_trial)
        return MemoryBudget(100, 60, 12, 5)

    monkeypatch.setattr(measure, "load_or_measure", lambda *_: (measured, False, file))
    monkeypatch.setattr(PlanningCoordinator, "memory_budget", memory_budget)
    monkeypatch.setattr(
        PlanningCoordinator, "search_and_trial", lambda self, profile, policy, budget, context: (plan, profile, budget)
    )
    nothing: Any = None
    ranks: Any = SimpleNamespace(world_size=2, is_rank_zero=True)
    pipeline.autotune(nothing, ranks, RULE, nothing, 0, started_at_s=0.0)
    assert asked_for == [False]
    (one,) = Profile.model_validate_json(file.read_text()).cached_plans
    assert (one.non_model_bytes, one.estimated_bytes, one.file_page_bytes) == (60, 0 if found_plan else 12, 5)


@pytest.mark.parametrize(
    ("share", "late"), [(None, [False] * 3), (0.5, [False, False, True]), (0.1, [False, True, True])]
)
def test_plan_on_rank_zero_ends_search_after_its_share_of_startup_time(
    share: float | None, late: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 seconds before the start is to end, beside what applying a plan takes."""
    now_s, told = STARTUP_BUDGET_S - APPLY_RESERVE_S - 10.0, []

    def searching(*arguments: Any) -> ExecutionPlan:
        nonlocal now_s
        for seconds in (0.5, 4.0, 1.0):  # it has searched for 0.5, 4.5, and 5.5 seconds
            now_s += seconds
            told.append(arguments[-1]())
        return make_plan(ROOMY, RULE)

    monkeypatch.setattr(planning_coordinator, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(planning_coordinator, "plan_or_fallback", searching)
    monkeypatch.setattr(PlanningCoordinator, "_on_rank_zero", lambda _, work, *__: work(ROOMY))
    nothing: Any = None
    ranks: Any = SimpleNamespace(device=torch.device("meta"))
    team = PlanningCoordinator(nothing, ranks, None, nothing, 0, nothing, nothing, 0.0)
    team.plan_on_rank_zero(
        Profile(compute=compute(MODEL), link=ROOMY.cluster.link), RULE, MemoryBudget(1, 0, 0), time_fraction=share
    )
    assert told == late

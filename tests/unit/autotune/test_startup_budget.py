"""The time of a start, and when searches end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_osdp.autotune import coordinator, startup_budget
from lightning_osdp.autotune.coordinator import MemoryBudget, PlanningCoordinator, PlanRequest
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.progress import StageDisplay
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import (
    APPLY_RESERVE_S,
    EMULATED_STARTUP_BUDGET_S,
    STARTUP_BUDGET_S,
    StartupBudget,
)
from lightning_osdp.planning.search.batch_size_search import make_plan
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.small_models import compute
from tests.unit.autotune.test_coordinator import MODEL, ROOMY, RULE


def test_budget_allows_trial_that_leaves_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_budget, "time", SimpleNamespace(monotonic=lambda: 12.0))
    ranks = RankGroup.single(torch.device("cpu"))
    budget = StartupBudget(ranks, began_s=10.0)
    assert (budget.elapsed_s(), budget.remaining_s()) == (2.0, STARTUP_BUDGET_S - 2.0)
    assert budget.allows(8.0, STARTUP_BUDGET_S - 10.0)
    assert not budget.allows(8.1, STARTUP_BUDGET_S - 10.0)
    unlimited = StartupBudget.unlimited(ranks)
    assert unlimited.allows(1e9, 1e9)
    assert not unlimited.deadline(0.1)()


@pytest.mark.parametrize(
    ("share", "late"), [(None, [False] * 3), (0.5, [False, False, True]), (0.1, [False, True, True])]
)
def test_search_ends_search_after_its_share_of_startup_time(
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

    monkeypatch.setattr(startup_budget, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(coordinator, "plan_or_fallback", searching)
    monkeypatch.setattr(PlanningCoordinator, "_on_rank_zero", lambda _, work, *__: work(ROOMY))
    nothing: Any = None
    ranks = RankGroup.single(torch.device("meta"))
    team = PlanningCoordinator(PlanRequest(RULE, nothing, 0), ranks, StartupBudget(ranks, 0.0), MODEL)
    profile = Profile(compute=compute(MODEL), link=ROOMY.cluster.link)
    team.search(profile, MemoryBudget(1, 0, 0), time_fraction=share)
    assert told == late


@pytest.mark.parametrize(("is_emulated", "seconds"), [(False, STARTUP_BUDGET_S), (True, EMULATED_STARTUP_BUDGET_S)])
def test_budget_is_larger_where_one_process_stands_for_a_cluster(is_emulated: bool, seconds: float) -> None:
    ranks: Any = SimpleNamespace(is_emulated=is_emulated)
    assert StartupBudget.for_ranks(ranks, 10.0, StageDisplay()).total_s == seconds

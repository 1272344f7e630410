"""What ranks do together while they plan: their memory, and the search of the first one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_osdp.autotune import coordinator as coordinator_module
from lightning_osdp.autotune.coordinator import MemoryBudget, PlanningCoordinator, PlanRequest, plan_or_fallback
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.backend import memory
from lightning_osdp.backend.memory import (
    COMPILED_KERNEL_BYTES,
    EVALUATION_GROWTH_BYTES,
    GROWTH_BYTES,
    SAVING_GROWTH_BYTES,
)
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.planning.cost.trial_correction import Trial, plan_key
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan, min_memory_bytes
from lightning_osdp.planning.search.plan_selection import CachedPlan
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, NonTrainingWork, ParameterInfo
from tests.support.small_models import MIB, blocks_of_one, cluster, compute

MODEL = blocks_of_one(3, 2)
RULE = BatchSizePolicy(batch_size=2)
ROOMY = Problem(MODEL, cluster(), compute(MODEL), 1024 * MIB, 8 * MIB)


def make_coordinator(limit: Any, non_training: NonTrainingWork = NO_NON_TRAINING_WORK) -> PlanningCoordinator:
    """One rank without a process group."""
    ranks = RankGroup.single(torch.device("cpu"))
    request = PlanRequest(RULE, limit, model_bytes=20, non_training=non_training)
    return PlanningCoordinator(request, ranks, StartupBudget.unlimited(ranks), MODEL)


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
    guessed = seen.model_copy(update={"estimated_bytes": 2})
    assert room.with_observed_usage(guessed) == MemoryBudget(100, 50, 2)
    assert room.with_observed_usage(guessed.model_copy(update={"estimated_bytes": 3})) == room


def test_plan_or_fallback_returns_searched_plan_when_it_fits() -> None:
    assert plan_or_fallback(ROOMY, RULE, [], MIB) == make_plan(ROOMY, RULE)


class Counted:
    """A limit that was found, 100 bytes of it pages of files."""

    def current(self) -> int:
        return 1000

    def file_pages(self) -> int:
        return 100

    def expected_file_pages(self, progress: str) -> int:
        return 0 if progress == "tried" else 3


def test_cached_memory_budget_is_used_unless_process_uses_more_than_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ROOMY, RULE)
    monkeypatch.setattr(coordinator_module, "memory_in_use", lambda device: 50)
    monkeypatch.setattr(coordinator_module, "growth_reserve", lambda *_: 7)
    team = make_coordinator(Counted())
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
    ("progress", "room"),
    [
        ("measured", MemoryBudget(1003, 57, 7, 103)),
        ("searched", MemoryBudget(1003, 57, 7, 103)),
        ("tried", MemoryBudget(1000, 57, 7, 100)),
    ],
)
def test_memory_budget_adds_file_pages_that_first_steps_will_read(
    progress: Any, room: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "process_overhead", lambda *_: 57)
    monkeypatch.setattr(coordinator_module, "growth_reserve", lambda *_: 7)
    assert make_coordinator(Counted()).memory_budget(progress) == room


@pytest.mark.parametrize(("evaluation_batch_size", "more"), [(0, 0), (64, EVALUATION_GROWTH_BYTES["cpu"])])
def test_memory_budget_with_evaluation_reserves_memory_for_its_kernels(
    evaluation_batch_size: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after a validation took up to 2 MiB more than their limit."""
    monkeypatch.setattr(memory, "memory_in_use", lambda device: 50)
    between = NonTrainingWork(evaluation_batch_size=evaluation_batch_size)
    room = make_coordinator(Counted(), between).memory_budget("measured")
    assert room.estimated == GROWTH_BYTES["cpu"]["measured"] + more
    assert room.non_model == 30 + room.estimated


def test_memory_budget_reserves_memory_for_kernels_of_each_shape_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&S under bf16-mixed took 14 MiB more than its limit."""
    monkeypatch.setattr(memory, "memory_in_use", lambda device: 50)
    shapes = [((8, 8), 2, ""), ((8, 8), 2, ""), ((8, 16), 2, "beside products"), ((9, 8), 2, "alone"), ((8,), 2, "")]
    parameters = [
        ParameterInfo(name=str(index), shape=shape, cast_element_bytes=cast, looked_up=looked_up)  # type: ignore[arg-type]
        for index, (shape, cast, looked_up) in enumerate([*shapes, ((7, 7), 0, "")])
    ]
    operator = MODEL.operators[0].model_copy(update={"parameters": tuple(parameters)})
    own = replace(make_coordinator(Counted()), model=MODEL.model_copy(update={"operators": (operator,)}))
    reserved = GROWTH_BYTES["cpu"]["measured"] + 2 * COMPILED_KERNEL_BYTES["cpu"]
    assert own.memory_budget("measured").estimated == reserved
    assert own.memory_budget("tried").estimated == GROWTH_BYTES["cpu"]["tried"] + 2 * COMPILED_KERNEL_BYTES["cpu"]
    assert own.memory_budget("compiled").estimated == GROWTH_BYTES["cpu"]["compiled"]


@pytest.mark.parametrize(
    ("saved", "more"),
    [("nothing", 0), ("streamed", SAVING_GROWTH_BYTES["cpu"]), ("gathered", SAVING_GROWTH_BYTES["cpu"])],
)
def test_memory_budget_after_search_reserves_memory_for_saving_only_where_checkpoints_are_whole(
    saved: Any, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_in_use", lambda device: 50)
    own = make_coordinator(Counted(), NonTrainingWork(checkpoint_memory=saved))
    assert own.memory_budget("searched").estimated == GROWTH_BYTES["cpu"]["searched"] + more
    assert own.memory_budget("tried").estimated == GROWTH_BYTES["cpu"]["tried"]


def test_repredict_memory_changes_figures_of_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, nothing = make_plan(ROOMY, RULE), Profile(compute=compute(MODEL), link=ROOMY.cluster.link)
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"step_time_s": 1.0})})
    team = make_coordinator(Counted())
    less = replace(ROOMY, overhead_bytes=ROOMY.overhead_bytes - 5)
    for problem, saved in ((less, 5), (replace(less, memory_limit_bytes=1), 0)):
        monkeypatch.setattr(PlanningCoordinator, "build_problem", lambda *_, problem=problem: problem)
        again = team.repredict_memory(nothing, MemoryBudget(problem.memory_limit_bytes, 0, 0), plan)
        assert again.predicted.peak_memory_bytes == plan.predicted.peak_memory_bytes - saved
        assert again.predicted.overhead_bytes == plan.predicted.overhead_bytes - saved
        assert again.peak is not None
        assert plan.peak is not None
        assert again.peak.overhead == plan.peak.overhead - saved
        assert again.model_copy(update={"predicted": plan.predicted, "peak": plan.peak}) == plan


def test_choose_tried_plan_returns_tried_plan_only_within_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ROOMY, RULE)
    trial = Trial(
        plan_key=plan_key(plan), predicted_s=1.0, measured_s=1.0, overhead_by_kind_s={}, rounds_s=(1.0,) * 3, plan=plan
    )
    team = make_coordinator(Counted())
    nothing = Profile(compute=compute(MODEL), link=ROOMY.cluster.link, trials=(trial,))
    for limit, fits in ((ROOMY.memory_limit_bytes, True), (plan.predicted.peak_memory_bytes - 1, False)):
        problem = replace(ROOMY, memory_limit_bytes=limit)
        monkeypatch.setattr(PlanningCoordinator, "build_problem", lambda *_, problem=problem: problem)
        chosen = team.choose_tried_plan(nothing, MemoryBudget(limit, 0, 0), [plan])
        assert (chosen is not None and chosen.operators == plan.operators) == fits

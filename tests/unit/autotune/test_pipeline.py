"""A start: what ranks read of the step, and how plans are searched and tried in time."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.autotune import finalists, pipeline, profile_cache, startup_budget
from lightning_osdp.autotune.coordinator import UNTRIED_PLAN_MARGIN, MemoryBudget, PlanningCoordinator, PlanRequest
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.profile_cache import ProfileCache
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import APPLY_RESERVE_S, FIRST_SEARCH_FRACTION, StartupBudget
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.backend import memory
from lightning_osdp.errors import OSDPWarning, TraceError
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, plan_key, trials_of_plan
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, make_plan
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import TriedPlan
from lightning_osdp.profiling import compute as kernel_times
from tests.support.ranks import run_ranks
from tests.support.small_models import compute
from tests.support.traced_models import Regression
from tests.unit.autotune.test_coordinator import MODEL, ROOMY, RULE

CPU = torch.device("cpu")
BATCH = torch.ones(4, 8)
PROFILE = Profile(compute=compute(MODEL), link=ROOMY.cluster.link)


class Counted(Regression):
    """Counts how often its step is run, on fake tensors."""

    runs: ClassVar[queue.SimpleQueue[int]] = queue.SimpleQueue()  # planning takes back what it adds to a list

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Counted.runs.put(batch_idx)
        return super().training_step(batch, batch_idx)


def profile_once(folder: Path, width: int) -> tuple[int, str, ModelProfile]:
    """How often the step was run for that, the name that it was known by and what it is."""
    Counted.runs = queue.SimpleQueue()
    module = Counted(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)))
    context = TrialContext(module, BATCH, 4, CPU)
    traced = pipeline.profile_model_on_ranks(RankGroup(dist.group.WORLD, 1, CPU), context, NO_NON_TRAINING_WORK, folder)
    runs = Counted.runs.qsize()
    kernel_times.warm_up(traced, CPU)  # reads it now where that has not been necessary
    return runs, traced.key, traced.model_profile


def profile_three_times(rank: int, world_size: int, folder: str) -> list[tuple[int, str, ModelProfile]]:
    """A disk for each rank: on one, the slower rank of the first start may find what the other has just read."""
    return [profile_once(Path(folder, str(rank)), width) for width in (8, 8, 16)]


def profile_with_empty_second_cache(rank: int, world_size: int, folder: str) -> list[int]:
    """The second start finds the step on the first rank's disk alone."""
    own = Path(folder, str(rank))
    return [profile_once(own, 8)[0], profile_once(own if rank == 0 else Path(folder, "empty"), 8)[0]]


def test_profile_model_on_ranks_traces_cached_step_on_rank_zero_only(tmp_path: Path) -> None:
    first, other = run_ranks(profile_three_times, 2, str(tmp_path))
    assert [runs for runs, _, _ in first] == [2, 1, 2]
    assert [runs for runs, _, _ in other] == [2, 0, 2]
    assert [each[1:] for each in first] == [each[1:] for each in other]
    assert [bool(name) for _, name, _ in first] == [False, True, False]
    assert first[1][2] == first[0][2] != first[2][2]


def catch_lazy_module_error(rank: int, world_size: int, folder: str) -> str:
    module = Regression(nn.Sequential(nn.LazyLinear(8)))
    ranks, context = RankGroup(dist.group.WORLD, 1, CPU), TrialContext(module, BATCH, 4, CPU)
    with pytest.warns(OSDPWarning), pytest.raises(TraceError) as error:
        pipeline.profile_model_on_ranks(ranks, context, NO_NON_TRAINING_WORK, Path(folder))
    return str(error.value)


def test_profile_model_on_ranks_of_lazy_module_raises_trace_error(tmp_path: Path) -> None:
    for message in run_ranks(catch_lazy_module_error, 2, str(tmp_path)):
        assert "uninitialized parameter" in message


def test_profile_model_on_ranks_traces_on_ranks_without_cached_step(tmp_path: Path) -> None:
    assert run_ranks(profile_with_empty_second_cache, 2, str(tmp_path)) == [[2, 1], [2, 2]]


class Timed:
    """A coordinator whose searches find the next of some plans, the last one for good; trials take ten seconds.

    The simple plan is tried beside the first one. The last plan that is tried is the fastest.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        plans: Sequence[ExecutionPlan],
        left_s: float,
        search_s: float,
        fits: Callable[[ExecutionPlan], bool] = lambda plan: True,
        can_try: bool = True,
    ) -> None:
        self.plans, self.search_s, self.fits, self.can_try = list(plans), search_s, fits, can_try
        self.simple = make_plan(ROOMY, BatchSizePolicy(batch_size=9))
        self.gains: list[float] = []
        self.fractions: list[float] = []
        self.tried: list[list[int]] = []
        self.now_s = 0.0
        self.searched_bytes = 60
        self.ranks: Any = SimpleNamespace(is_offline=False)
        self.budget = StartupBudget(RankGroup.single(CPU), began_s=0.0, total_s=left_s)
        monkeypatch.setattr(startup_budget, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(finalists, "make_trial_setup", lambda *_: None)
        monkeypatch.setattr(finalists, "run_plan_trials", self.run_plan_trials)

    def search_and_trial(self) -> tuple[ExecutionPlan, Profile, MemoryBudget]:
        coordinator: Any = self
        context: Any = "a step"
        return finalists.search_and_trial(coordinator, PROFILE, MemoryBudget(100, 60, 12), context)

    def search(self, profile: Any, memory_budget: Any, required_gain: float, time_fraction: float) -> ExecutionPlan:
        self.gains.append(required_gain)
        self.fractions.append(time_fraction)
        self.now_s += self.search_s
        return self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]

    def find_finalists(self, profile: Any, memory_budget: Any, found: ExecutionPlan) -> list[ExecutionPlan]:
        return [found, self.simple]

    def choose_tried_plan(self, profile: Profile, _: Any, plans: Sequence[ExecutionPlan]) -> ExecutionPlan | None:
        assert all(trials_of_plan(plan, profile.trials) for plan in plans)
        assert len({plan_key(plan) for plan in plans}) == len(plans), "each plan is shown once"
        fitting = [plan for plan in plans if self.fits(plan)]
        figures: dict[str, Any] = {"step_time_s": 1.0, "samples_per_s": 1.0, "spread_s": 0.0, "num_rounds": 1}
        tried = tuple(TriedPlan(name="", batch_size=p.batch_size, is_chosen=False, **figures) for p in fitting)
        best = min(fitting, key=lambda plan: trials_of_plan(plan, profile.trials)[0].measured_s, default=None)
        return best and best.model_copy(update={"tried": tried})

    def memory_budget(self, progress: str) -> MemoryBudget:
        return MemoryBudget(100, 50, 0) if progress == "tried" else MemoryBudget(100, self.searched_bytes, 4)

    def run_plan_trials(
        self, setup: Any, compute_for: Any, plans: Sequence[ExecutionPlan], reserve_s: float
    ) -> list[Trial]:
        assert reserve_s == APPLY_RESERVE_S
        if not self.can_try:
            return []
        self.now_s += 10.0
        self.tried.append([plan.batch_size for plan in plans])
        size = len(self.tried)
        return [
            Trial(
                plan_key=plan_key(plan),
                predicted_s=1.0,
                measured_s=1.0 / (plan.batch_size if plan.batch_size < 9 else size),
                overhead_by_kind_s={},
                plan=plan,
            )
            for plan in plans
        ]


@pytest.mark.parametrize(
    ("count", "left_s", "search_s", "tried"),
    [
        (1, 30.0, 0.0, [[1, 9]]),
        (2, 30.0, 0.0, [[1, 9], [2, 1]]),
        (3, 40.0, 0.0, [[1, 9], [2, 1]]),
        (2, 20.0 + APPLY_RESERVE_S, 0.0, [[1, 9]]),
        (2, 27.0 + APPLY_RESERVE_S, 2.0, [[1, 9], [2, 1]]),
        (2, 24.0 + APPLY_RESERVE_S, 2.0, [[1, 9]]),
        (2, -5.0, 0.0, [[1, 9]]),
    ],
)
def test_search_and_trial_tries_plans_in_turns_while_time_remains_and_takes_tried_one(
    count: int, left_s: float, search_s: float, tried: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(count)]
    coordinator = Timed(monkeypatch, plans, left_s, search_s)
    plan, measured, memory_budget = coordinator.search_and_trial()
    assert coordinator.tried == tried
    assert plan.batch_size == tried[-1][0]
    assert trials_of_plan(plan, measured.trials)
    assert memory_budget.non_model == 50


@pytest.mark.parametrize(
    ("search_s", "fractions"),
    [
        (7.9, [FIRST_SEARCH_FRACTION]),
        (8.0, [FIRST_SEARCH_FRACTION, 1.0]),
        (9.0, [FIRST_SEARCH_FRACTION, 1.0]),
        (10.0, [FIRST_SEARCH_FRACTION]),
    ],
)
def test_search_and_trial_continues_cut_search_when_no_trial_is_possible(
    search_s: float, fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(3)]
    coordinator = Timed(monkeypatch, plans, 20.0 + APPLY_RESERVE_S, search_s, can_try=False)
    plan, measured, memory_budget = coordinator.search_and_trial()
    assert coordinator.fractions == fractions
    assert coordinator.gains[1:] == [UNTRIED_PLAN_MARGIN] * (len(fractions) - 1)
    assert plan.batch_size == len(fractions)
    assert (measured, memory_budget.non_model) == (PROFILE, 60)


@pytest.mark.parametrize(
    ("left_bytes", "search_s", "batch_size", "non_model"),
    [(59, 2.0, 2, 59), (60, 2.0, 1, 60), (61, 2.0, 1, 60), (59, 7.0, 1, 60), (59, 5.0, 2, 59)],
)
def test_search_and_trial_searches_again_where_search_leaves_less_than_was_reserved(
    left_bytes: int, search_s: float, batch_size: int, non_model: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(3)]
    coordinator = Timed(monkeypatch, plans, 12.0 + APPLY_RESERVE_S, search_s, can_try=False)
    coordinator.searched_bytes = left_bytes
    plan, _, memory_budget = coordinator.search_and_trial()
    assert (plan.batch_size, memory_budget.non_model) == (batch_size, non_model)


def sharded_and_simple(gain: float) -> tuple[ExecutionPlan, ExecutionPlan]:
    """A plan with sharded operators, and one with none, which the first promises to be faster than."""
    constraints = replace(ROOMY.constraints, modes="zdp")
    sharded = make_plan(replace(ROOMY, constraints=constraints), BatchSizePolicy(batch_size=1))
    simple = make_plan(replace(ROOMY, constraints=replace(constraints, modes="dp")), BatchSizePolicy(batch_size=1))
    predicted = simple.predicted.model_copy(update={"samples_per_s": sharded.predicted.samples_per_s / (1 + gain)})
    return sharded, simple.model_copy(update={"predicted": predicted})


@pytest.mark.parametrize("context", ["a step", None], ids=["no time", "trials not allowed"])
@pytest.mark.parametrize("gain", [0.1, 0.3])
def test_search_and_trial_without_trial_takes_simple_plan_unless_gain_is_large(
    gain: float, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded, simple = sharded_and_simple(gain)
    coordinator: Any = Timed(monkeypatch, [sharded], 10.0, 0.0, can_try=False)
    coordinator.simple = simple
    plan, _, _ = finalists.search_and_trial(coordinator, PROFILE, MemoryBudget(100, 60, 12), context)
    assert plan is (sharded if gain > 0.15 else simple)
    coordinator.ranks.is_offline = True
    plan, _, _ = finalists.search_and_trial(coordinator, PROFILE, MemoryBudget(100, 60, 12), context)
    assert plan is sharded


def test_search_and_trial_searches_again_when_no_tried_plan_fits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(2)]
    coordinator = Timed(monkeypatch, plans, 30.0, 2.0, fits=lambda plan: False)
    plan, measured, memory_budget = coordinator.search_and_trial()
    assert plan == plans[1]
    assert len(coordinator.gains) == 2
    assert len(measured.trials) == 2
    assert memory_budget.non_model == 50


@pytest.mark.parametrize("next_size", [2, 9], ids=["one that promises more", "nothing better"])
def test_search_and_trial_searches_again_when_found_plan_fits_no_more(
    next_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=size)) for size in (1, next_size)]
    coordinator = Timed(monkeypatch, plans, 15.0 + APPLY_RESERVE_S, 2.0, fits=lambda plan: plan.batch_size > 1)
    plan, _, memory_budget = coordinator.search_and_trial()
    assert coordinator.tried == [[1, 9]]
    assert coordinator.gains[1:] == [TRIAL_RELATIVE_ERROR]  # one like it was tried
    assert plan.batch_size == next_size
    assert [one.batch_size for one in plan.tried] == ([9] if next_size == 9 else [])
    assert memory_budget.non_model == 50


def test_search_and_trial_does_not_try_plans_again_that_it_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [make_plan(ROOMY, BatchSizePolicy(batch_size=1))]
    coordinator = Timed(monkeypatch, plans, 30.0, 0.0)
    _, measured, _ = coordinator.search_and_trial()
    monkeypatch.setattr("tests.unit.autotune.test_pipeline.PROFILE", measured)
    assert coordinator.search_and_trial()[1].trials == measured.trials
    assert coordinator.tried == [[1, 9]]


@pytest.mark.parametrize(("left_bytes", "is_searched"), [(12, False), (13, True)])
def test_plan_is_searched_again_beside_what_planning_left_if_that_exceeds_what_is_reserved(
    left_bytes: int, is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(2))
    limit = first.predicted.peak_memory_bytes
    coordinator: Any = Timed(monkeypatch, [second], 30.0, 2.0)
    coordinator.model = ROOMY.model
    coordinator.with_baselines = lambda profile, memory_budget, plan: plan.model_copy(update={"baselines": ("new",)})
    coordinator.memory_budget = lambda progress: MemoryBudget(limit, 60 + left_bytes, 12)
    budget = MemoryBudget(limit, 60, 12)
    found, now = pipeline._fit_beside_leftovers(coordinator, PROFILE, budget, first)
    assert found.batch_size == (2 if is_searched else 1)
    assert found.baselines == (("new",) if is_searched else ()), "they are of the plan that is taken"
    assert not found.tried
    assert now.non_model == 60 + left_bytes * is_searched
    roomy = replace(budget, limit=2 * limit)
    coordinator.memory_budget = lambda progress: replace(roomy, non_model=60 + left_bytes)
    assert pipeline._fit_beside_leftovers(coordinator, PROFILE, roomy, first) == (first, roomy)


@pytest.mark.parametrize("tried", [False, True])
def test_plan_is_predicted_anew_where_process_takes_less_than_when_it_was_searched(
    tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reserve for a search that is over was in the prediction: 64 emulated ranks, +11 % of 134 MiB."""
    first, second = (make_plan(ROOMY, BatchSizePolicy(batch_size=1 + at)) for at in range(2))
    tried_plan = TriedPlan(
        name="", batch_size=1, is_chosen=True, step_time_s=1.0, samples_per_s=1.0, spread_s=0.0, num_rounds=1
    )
    first = first.model_copy(update={"tried": (tried_plan,) if tried else ()})
    coordinator: Any = Timed(monkeypatch, [second], 30.0, 2.0)
    asked_for: list[str] = []

    def memory_budget(progress: str) -> MemoryBudget:
        asked_for.append(progress)
        return MemoryBudget(limit, 55, 12)

    limit = first.predicted.peak_memory_bytes
    coordinator.memory_budget = memory_budget
    coordinator.repredict_memory = lambda profile, memory_budget, plan: (plan, memory_budget.non_model)
    before = MemoryBudget(limit, 60, 12, progress="compiled")
    found, now = pipeline._fit_beside_leftovers(coordinator, PROFILE, before, first)
    assert (found, now.non_model) == ((first, 55), 55)
    assert asked_for == ["compiled" if tried else "searched"]


@pytest.mark.parametrize(("exposed_s", "progress"), [(0.1, "compiled"), (None, "tried")])
def test_search_and_trial_reserves_nothing_for_kernels_that_trial_of_same_batch_size_has_compiled(
    exposed_s: float | None, progress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator: Any = Timed(monkeypatch, [make_plan(ROOMY, BatchSizePolicy(batch_size=1))], 30.0, 0.0)
    usual = coordinator.run_plan_trials

    def run_plan_trials(*args: Any) -> list[Trial]:
        return [trial.model_copy(update={"exposed_comm_s": exposed_s}) for trial in usual(*args)]

    monkeypatch.setattr(finalists, "run_plan_trials", run_plan_trials)
    coordinator.memory_budget = lambda progress: MemoryBudget(100, 50, 0, progress=progress)
    coordinator.repredict_memory = lambda profile, memory_budget, plan: plan
    _, measured, memory_budget = coordinator.search_and_trial()
    assert memory_budget.progress == progress
    monkeypatch.setattr("tests.unit.autotune.test_pipeline.PROFILE", measured)
    assert coordinator.search_and_trial()[2].progress == "tried", "nothing ran in this start"


class TwoRanks(RankGroup):
    """The first of two ranks, which are always of one mind."""

    @property
    def world_size(self) -> int:
        return 2

    @property
    def rank(self) -> int:
        return 0

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def broadcast_object(self, value: Any) -> Any:
        return value

    def raise_on_all_ranks(self, work: Any) -> Any:
        return work()


@pytest.mark.parametrize("found_plan", [False, True])
def test_autotune_marks_memory_as_observed_only_after_trial_of_searched_plan(
    found_plan: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps with all operators replicated leave less behind than those of the plan: a run was killed for 9 of 6 MiB."""
    plan, file, asked_for = make_plan(ROOMY, RULE), tmp_path / "measured.json", []
    shown = Trial(plan_key="", predicted_s=1.0, measured_s=1.0, overhead_by_kind_s={}, plan=plan)
    measured = Profile(compute=compute(MODEL), link=ROOMY.cluster.link, trials=(shown,) if found_plan else ())

    def memory_budget(self: PlanningCoordinator, progress: str) -> MemoryBudget:
        asked_for.append(progress)
        return MemoryBudget(100, 60, 12, 5)

    monkeypatch.setattr(pipeline, "_prepare_ranks", lambda *_: None)
    monkeypatch.setattr(pipeline, "measure_profile", lambda *_: measured)
    monkeypatch.setattr(pipeline, "_calibrate", lambda coordinator, profile, *_: profile)
    monkeypatch.setattr(PlanningCoordinator, "memory_budget", memory_budget)
    monkeypatch.setattr(PlanningCoordinator, "with_baselines", lambda self, profile, budget, plan: plan)
    monkeypatch.setattr(pipeline, "search_and_trial", lambda coordinator, profile, budget, _: (plan, profile, budget))
    monkeypatch.setattr(pipeline, "_fit_beside_leftovers", lambda coordinator, profile, budget, plan: (plan, budget))
    nothing: Any = None
    ranks = TwoRanks("group", 1, CPU)
    monkeypatch.setattr(ProfileCache, "open", lambda *_: ProfileCache(ranks, (file,)))
    traced: Any = SimpleNamespace(model_profile=MODEL, batch_sizes=(2,), with_all_kernels=lambda: traced)
    request = PlanRequest(RULE, memory.MemoryLimit(CPU, 1), 0)
    short: Any = StartupBudget(ranks, startup_budget.time.monotonic(), 5.0)
    pipeline.autotune(traced, request, ranks, short, trial_context="a step")  # type: ignore[arg-type]
    stored = profile_cache.read(file, Profile)
    assert stored is not None
    assert not stored.cached_plans, "the next start has time to try one"
    asked_for.clear()
    file.unlink()
    pipeline.autotune(traced, request, ranks, StartupBudget.unlimited(ranks), trial_context=nothing)
    assert asked_for == ["measured"]
    stored = profile_cache.read(file, Profile)
    assert stored is not None
    (one,) = stored.cached_plans
    assert (one.non_model_bytes, one.estimated_bytes, one.file_page_bytes) == (60, 0 if found_plan else 12, 5)

"""Trials of a plan: at which batch size and how often, and that the module stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.autotune import trials
from lightning_osdp.autotune.trial_step import StepTiming, TrialContext, TrialError
from lightning_osdp.autotune.trials import run_plan_trials
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.trial_correction import PLAN_TRIAL_RELATIVE_ERROR, Trial, plan_key
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import compute
from tests.support.leaks import leaked_parameter_bytes
from tests.support.models import hand_made_plan, some_cluster
from tests.support.ranks import run_ranks
from tests.support.traced_models import trace
from tests.support.trials import BATCH, CPU, GivenBudget, Module, make_trial_setup, mixed_plan


def run_mixed_plan_trials(rank: int, ranks: int, room_bytes: int) -> tuple[str, list[tuple[int, Trial | None]], bool]:
    """The plan's name, trials of a mixed plan at two batch sizes, and whether the module is as it was and its
    copies are gone."""
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(
        traced, CPU, time_budget_s=0.0, constraints=SearchConstraints(slice_granularity={"net.3": 2})
    )
    times: list[Any] = [parts] * ranks
    dist.all_gather_object(times, parts)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    sizes: list[int] = []
    run = trials.time_step

    def noted(stage: TrialContext, which: Any, *args: Any, **named: Any) -> dict[int, StepTiming]:
        sizes.extend(which)
        return run(stage, which, *args, **named)

    trials.time_step = noted
    found: list[tuple[int, Trial | None]] = []
    for batch_size in (6, 1 << 30):  # the second would take too long
        plan = mixed_plan(ranks).model_copy(update={"batch_size": batch_size})
        setup = make_trial_setup(module, traced, free_bytes=lambda: room_bytes)
        one = run_plan_trials(setup, lambda _: times[0], [plan], 0.0)
        found.append((sizes[-1] if sizes else 0, one[0] if one else None))
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same = same and not leaked_parameter_bytes(module)
    return plan_key(mixed_plan(ranks).model_copy(update={"batch_size": 6})), found, same


def test_plan_trial_runs_at_plan_batch_size_or_smaller_one() -> None:
    (name, found, same), (_, others, _) = run_ranks(run_mixed_plan_trials, 2, 1 << 60)
    assert same
    (size, one), (smaller, other) = found
    assert [each for _, each in others] == [one, other]
    assert size == 6
    assert one is not None
    assert one.plan_key == name
    assert one.relative_error >= PLAN_TRIAL_RELATIVE_ERROR
    assert len(one.rounds_s) >= trials.MIN_ROUNDS
    assert one.exposed_comm_s is not None
    assert 0 < one.exposed_comm_s < one.measured_s
    assert set(one.overhead_by_kind_s) >= {"zdp", "zdp2", "split"}
    assert smaller < 1 << 30
    assert other is not None
    assert other.exposed_comm_s is None  # of another size: more samples hide more


def test_plan_trial_without_memory_is_skipped() -> None:
    for _, found, same in run_ranks(run_mixed_plan_trials, 2, 1 << 10):
        assert same
        assert found == [(0, None), (0, None)]


def count_kept_gradients(rank: int, ranks: int) -> dict[bool, tuple[bool, set[int]]]:
    """By whether the plan updates in the backward pass: whether it was tried, and how many sharded parameters still
    had a gradient at the end of each backward pass."""
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    times: list[Any] = [compute.measure_compute(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(times, times[0])
    names = [operator.name for operator in traced.model_profile.operators]
    modes = {name: Mode.ZDP if name in ("net.0", "net.3") else Mode.DP for name in names}
    finish, kept = FairScaleEngine.finish_backward, set()

    def counted(engine: FairScaleEngine) -> None:
        parameters = engine._sharded_parameters.parameters
        gradients = [(p.grad, getattr(p, "_saved_grad_shard", None)) for p in parameters]
        kept.add(sum(any(part is not None for part in parts) for parts in gradients))
        finish(engine)

    FairScaleEngine.finish_backward = counted  # type: ignore[method-assign]
    found = {}
    for at_once in (False, True):
        plan = hand_made_plan(modes, ranks).model_copy(update={"batch_size": 4, "update_in_backward": at_once})
        kept.clear()
        setup = make_trial_setup(module, traced, free_bytes=lambda: 1 << 60)
        one = run_plan_trials(setup, lambda _: times[0], [plan], 0.0)
        found[at_once] = (bool(one), set(kept))
    return found


def test_plan_trial_keeps_no_gradients_when_plan_updates_in_backward() -> None:
    for found in run_ranks(count_kept_gradients, 2):
        assert found == {False: (True, {2}), True: (True, {0})}


def trial_of_step(step_s: float, plan: ExecutionPlan) -> Trial:
    return Trial(plan_key="", predicted_s=step_s, measured_s=step_s, overhead_by_kind_s={}, plan=plan)


class Turns:
    """Trials whose steps take what they are said to, on a clock of their own."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        step_s: float,
        left_s: float,
        took_s: Callable[[int], float] | None = None,
        own_size_factor: float = 1.0,
    ) -> None:
        self.now_s, self.step_s, self.took_s = 0.0, step_s, took_s or (lambda turn: step_s)
        self.turns: list[tuple[int, int, bool]] = []

        def predict_trial(_model: Any, _times: Any, _cluster: Any, plan: ExecutionPlan, size: int) -> Trial:
            return trial_of_step(step_s * (own_size_factor if size == plan.batch_size else 1.0), plan)

        monkeypatch.setattr(trials, "predict_trial", predict_trial)
        monkeypatch.setattr(TrialContext, "available_bytes", lambda *_: 1 << 60)
        monkeypatch.setattr(trials, "time_step", self.time_step)
        module = Module()
        setup = make_trial_setup(module, trace(module, BATCH, 4, device=CPU), some_cluster(2))
        budget = GivenBudget(setup.ranks, 0.0, remaining=lambda: left_s - self.now_s)
        monkeypatch.setattr(GivenBudget, "elapsed_s", lambda _: self.now_s)
        self.setup = replace(setup, budget=budget)

    def time_step(self, _: Any, sizes: Any, ranks: Any, plan: Any, duration_s: float, heap: Any) -> Any:
        """Note the plan's accumulation, which tells plans apart, the batch size, and whether the step is timed once."""
        step_s = self.took_s(len(self.turns))
        self.turns.append((plan.accumulate_grad_batches, sizes[0], duration_s == 0.0))
        self.now_s += step_s * (2 if duration_s == 0.0 else 4)
        return {sizes[0]: StepTiming(step_s, step_s / 4)}

    def run(self, count: int) -> list[Trial]:
        parts: Any = None
        plans = [
            mixed_plan(2).model_copy(update={"batch_size": 6, "accumulate_grad_batches": 1 + at}) for at in range(count)
        ]
        return run_plan_trials(self.setup, lambda _: parts, plans, 0.0)


@pytest.mark.parametrize(
    ("step_s", "own_size_factor", "left_s", "turn"),
    [
        (1.0, 1.0, 30.0, (6, False)),
        (1.0, 1.0, 5.0, (6, True)),
        (1.0, 1.0, 2.0, None),
        (1.0, 2.0, 5.0, (2, False)),
        (1.0, 2.0, 3.5, (2, True)),
        (3.0, 1.0, 30.0, (6, True)),
        (3.0, 2.0, 9.0, (2, True)),
        (3.0, 1.0, 7.0, None),
        (6.0, 1.0, 30.0, None),
    ],
    ids=[
        "several steps",
        "one step of its own size",
        "none in no time",
        "several of fewer samples",
        "one of fewer samples",
        "one long step",
        "one long step of fewer samples",
        "no time",
        "too long",
    ],
)
def test_plan_trial_fits_batch_size_and_steps_to_remaining_time(
    step_s: float, own_size_factor: float, left_s: float, turn: tuple[int, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, step_s, left_s, own_size_factor=own_size_factor)
    found = turns.run(1)
    assert set(turns.turns) == (set() if turn is None else {(1, *turn)})
    assert bool(found) == (turn is not None)


def test_plan_trials_take_turns_for_several_rounds_and_keep_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = (0.1, 0.2, 0.3, 0.5, 0.2, 0.3, 0.12, 0.2, 0.3)
    turns = Turns(monkeypatch, 0.2, 30.0, lambda turn: took_s[turn % 9])
    monkeypatch.setattr(trials, "MAX_ROUNDS", 3)
    found = turns.run(3)
    assert [plan for plan, *_ in turns.turns] == [1, 2, 3] * 3
    assert [one.rounds_s for one in found] == [took_s[at::3] for at in range(3)]
    assert [one.measured_s for one in found] == [0.12, 0.2, 0.3]
    assert [one.exposed_comm_s for one in found] == pytest.approx([0.03, 0.05, 0.075])
    assert [one.relative_error for one in found] == pytest.approx([0.04 / 0.12, *[PLAN_TRIAL_RELATIVE_ERROR] * 2])


@pytest.mark.parametrize(
    ("left_s", "rounds", "plans"), [(30.0, 4, 3), (5.0, 2, 3), (2.4, 2, 3), (1.2, 1, 2), (0.5, 1, 1), (0.2, 0, 0)]
)
def test_plan_trials_leave_out_rounds_then_last_plans_without_time(
    left_s: float, rounds: int, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, 0.16, left_s)
    found = turns.run(3)
    assert len(found) == plans
    assert len(turns.turns) == rounds * plans
    assert {plan for plan, *_ in turns.turns} == set(range(1, plans + 1))


def test_plan_trials_go_on_without_plan_whose_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, 0.2, 30.0)
    plain = turns.time_step

    def time_step(*arguments: Any) -> Any:
        if arguments[3].accumulate_grad_batches == 2:
            raise TrialError("no memory")
        return plain(*arguments)

    monkeypatch.setattr(trials, "time_step", time_step)
    with pytest.warns(OSDPWarning, match="can't be tried on a copy"):
        found = turns.run(3)
    assert len(found) == 2
    assert {plan for plan, *_ in turns.turns} == {1, 3}


def test_plan_trial_batch_sizes_start_at_plan_size_unless_one_size_was_traced() -> None:
    assert trials.plan_trial_batch_sizes(21, (2, 8), is_cuda=False) == [21, 5, 2]
    assert trials.plan_trial_batch_sizes(21, (2, 64), is_cuda=True) == [21, 10, 5, 2]
    assert trials.plan_trial_batch_sizes(21, (4,), is_cuda=True) == (4,)

"""Trials of a plan: at which batch size and how often, and that the module stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.autotune import trials
from lightning_osdp.autotune.startup_budget import NO_RETRY_ABOVE_S
from lightning_osdp.autotune.trial_step import StepTiming, TrialContext
from lightning_osdp.autotune.trials import TrialSetup, TrialTiming, run_plan_trial, run_trial
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.cost.trial_correction import PLAN_TRIAL_RELATIVE_ERROR, Trial, plan_key
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import compute
from tests.support.leaks import leaked_parameter_bytes
from tests.support.models import hand_made_plan, some_cluster
from tests.support.ranks import run_ranks
from tests.support.traced_models import trace
from tests.support.trials import BATCH, CPU, Module, make_trial_setup, mixed_plan


def make_setup() -> TrialSetup:
    """Of this process alone."""
    module = Module()
    return make_trial_setup(module, trace(module, BATCH, 4, device=CPU), some_cluster(2))


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
        one = run_plan_trial(setup, times[0], plan, 0.0)
        found.append((sizes[-1] if sizes else 0, one))
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
    assert (one.plan_key, one.relative_error) == (name, PLAN_TRIAL_RELATIVE_ERROR)
    assert one.exposed_comm_s is not None
    assert 0 < one.exposed_comm_s < one.measured_s
    assert set(one.overhead_by_kind_s) >= {"zdp", "zdp2", "split"}
    assert smaller < 1 << 30
    assert other is not None


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
        kept.add(
            sum(p.grad is not None or hasattr(p, "_saved_grad_shard") for p in engine._sharded_parameters.parameters)
        )
        finish(engine)

    FairScaleEngine.finish_backward = counted  # type: ignore[method-assign]
    found = {}
    for at_once in (False, True):
        plan = hand_made_plan(modes, ranks).model_copy(update={"batch_size": 4, "update_in_backward": at_once})
        kept.clear()
        one = run_plan_trial(make_trial_setup(module, traced, free_bytes=lambda: 1 << 60), times[0], plan, 0.0)
        found[at_once] = (one is not None, set(kept))
    return found


def test_plan_trial_keeps_no_gradients_when_plan_updates_in_backward() -> None:
    for found in run_ranks(count_kept_gradients, 2):
        assert found == {False: (True, {2}), True: (True, {0})}


@pytest.mark.parametrize(
    ("step_s", "left_s", "size"),
    [
        (1.0, 30.0, (6, False)),
        (1.0, 5.0, (2, False)),
        (1.0, 3.5, (2, True)),
        (1.0, 2.0, None),
        (3.0, 30.0, (2, True)),
        (3.0, 9.0, (2, True)),
        (3.0, 7.0, None),
        (6.0, 30.0, None),
    ],
    ids=[
        "several steps",
        "all that is left",
        "one of little time",
        "none in no time",
        "one step",
        "one step in time",
        "no time",
        "too long",
    ],
)
def test_plan_trial_fits_batch_size_and_repeats_to_remaining_time(
    step_s: float, left_s: float, size: tuple[int, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``size``: at which batch size, and whether once."""
    expected = Trial(plan_key="", predicted_s=step_s, measured_s=step_s, overhead_by_kind_s={})
    monkeypatch.setattr(trials, "predict_trial", lambda *_: expected)
    monkeypatch.setattr(TrialContext, "available_bytes", lambda *_: 1 << 60)
    sizes: list[tuple[int, bool]] = []

    def noted(setup: TrialSetup, expected: Trial, plan: ExecutionPlan, size: int, timing: TrialTiming) -> Trial:
        sizes.append((size, timing.duration_s == 0.0))
        return expected

    monkeypatch.setattr(trials, "run_trial", noted)
    module, plan = Module(), mixed_plan(2).model_copy(update={"batch_size": 6})
    traced = trace(module, BATCH, 4, device=CPU)
    parts: Any = None
    shown = run_plan_trial(
        make_trial_setup(module, traced, some_cluster(2), remaining_s=lambda: left_s), parts, plan, 0.0
    )
    assert sizes == ([] if size is None else [size])
    assert (shown is None) == (size is None)


def test_plan_trial_batch_sizes_start_at_plan_size_unless_one_size_was_traced() -> None:
    assert trials.plan_trial_batch_sizes(21, (2, 8), is_cuda=False) == [21, 5, 2]
    assert trials.plan_trial_batch_sizes(21, (2, 64), is_cuda=True) == [21, 10, 5, 2]
    assert trials.plan_trial_batch_sizes(21, (4,), is_cuda=True) == (4,)


@pytest.mark.parametrize(
    ("tries", "late", "took_s", "left"),
    [
        ([0.55], False, 0.55, 0),
        ([0.7, 0.65], False, 0.675, 0),
        ([0.35, 0.36], False, 0.355, 0),
        ([0.95, 0.5], False, 0.5, 0),
        ([0.55, 5.0], False, 0.55, 1),
        ([0.95, 0.5], True, 0.95, 1),
    ],
    ids=["as predicted", "longer", "shorter", "disturbed", "no second one", "no time for it"],
)
def test_run_trial_retries_unexpected_time(
    tries: list[float], late: bool, took_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries that agree are both right: to take the less of them would foretell too little."""
    monkeypatch.setattr(trials, "time_step", lambda *_, **__: {4: StepTiming(tries.pop(0))})
    expected = Trial(plan_key="", predicted_s=0.5, measured_s=0.5, overhead_by_kind_s={})
    timing = TrialTiming(trials.TRIAL_S, 0.5, trials.RETRY_TOLERANCE, can_retry=lambda: not late)
    found = run_trial(make_setup(), expected, mixed_plan(2), 4, timing)
    assert found.measured_s == pytest.approx(took_s)
    assert len(tries) == left


def test_run_trial_does_not_retry_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, left in ((NO_RETRY_ABOVE_S / 2, 0), (5 * NO_RETRY_ABOVE_S, 1)):
        tries = [1.5 * seconds, 1.5 * seconds]
        monkeypatch.setattr(trials, "time_step", lambda *_, tries=tries, **__: {4: StepTiming(tries.pop())})
        expected = Trial(plan_key="", predicted_s=seconds, measured_s=seconds, overhead_by_kind_s={})
        timing = TrialTiming(trials.TRIAL_S, seconds, trials.PLAN_RETRY_TOLERANCE, can_retry=lambda: True)
        run_trial(make_setup(), expected, mixed_plan(2), 4, timing)
        assert len(tries) == left

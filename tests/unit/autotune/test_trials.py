"""The module's own step is rehearsed on a copy: the module stays as it was, and times are those of the whole step."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.autotune import trial_step, trials
from lightning_osdp.autotune.trial_step import StepTiming, TrialContext
from lightning_osdp.autotune.trials import run_calibration_trials, run_local_trial, run_plan_trial
from lightning_osdp.backend.cpu.malloc import HEAP, configure_cpu_allocator
from lightning_osdp.backend.memory import FIRST_STEP_GROWTH_BYTES
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.trial_correction import (
    PLAN_TRIAL_RELATIVE_ERROR,
    Trial,
    fit_calibration,
    plan_key,
    trial_peak_bytes,
)
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.tracing.stand_ins import lazy_clone, lazy_clone_bytes
from lightning_osdp.profiling.tracing.trace import trace
from tests.support.leaks import leaked_parameter_bytes
from tests.support.models import hand_made_plan, some_cluster, uniform_hierarchical_links
from tests.support.ranks import run_ranks
from tests.support.small_models import compute_s

CPU, ROOM = torch.device("cpu"), 1 << 40
BATCH = torch.arange(4 * 64, dtype=torch.float32).view(4, 64) / 256


class Module(pl.LightningModule):
    """Has everything that a step changes: gradients, running statistics, random numbers, attributes of its own."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.5), nn.Linear(128, 128), nn.Linear(128, 1)
        )
        self.fails, self.steps = fails, 0

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.steps += 1
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        if self.fails and type(batch) is Tensor:
            raise ValueError("not for real")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_trial_context(module: pl.LightningModule) -> TrialContext:
    return TrialContext(module, BATCH, 4, CPU, nullcontext)


def run_trials(
    rank: int,
    ranks: int,
    means: dict[int, float] | None,
    room_bytes: int,
    fails: bool,
    modes: int = 99,
    roomy: int = 99,
) -> tuple[bool, ComputeTimes, ComputeTimes, tuple[Trial, ...], list[str]]:
    """Whether the module is as it was, times before and after, rehearsals, and warnings; it is late after ``modes``,
    and there is no room when it is asked for more than ``roomy`` times."""
    torch.manual_seed(1)
    module = Module(fails)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    everyone: list[Any] = [parts] * ranks
    dist.all_gather_object(everyone, parts)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    steps, random = module.steps, torch.get_rng_state()
    if means is not None:
        run = trial_step._time_repeats

        def given(steps: Any, **named: Any) -> list[StepTiming]:
            run(steps, **named)
            return [StepTiming(means[len(steps)], 0.25, means[len(steps)] / 4)] * len(steps)

        trial_step._time_repeats = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OSDPWarning)
        hardware = some_cluster(ranks)
        group, rooms = dist.group.WORLD, iter([room_bytes] * roomy)
        free_bytes, left_s = partial(next, rooms, 0), partial(next, iter([math.inf] * modes), 0.0)
        times, _, shown = run_calibration_trials(
            make_trial_context(module), traced, group, hardware, everyone[0], free_bytes, left_s
        )
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same &= all(parameter.grad is None for parameter in module.parameters()) and module._trainer is None
    same &= module.steps == steps and torch.equal(random, torch.get_rng_state())
    messages = [str(one.message) for one in caught if issubclass(one.category, OSDPWarning)]
    return same, everyone[0], times, shown, messages


def test_calibration_trials_keep_module_unchanged_and_scale_compute_to_step() -> None:
    # One second for the plain step at both sizes, two with all operators in any mode.
    first, second = run_ranks(run_trials, 2, {2: 1.0, 1: 2.0}, ROOM, False)
    assert first[1:] == second[1:]
    for same, parts, times, shown, messages in (first, second):
        assert same
        assert not messages
        limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
        assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)
        assert [set(one.overhead_by_kind_s) - {"dp", "wrapped"} for one in shown] == [{"zdp"}, {"zdp2"}, set()]
        assert {(one.measured_s, one.exposed_comm_s) for one in shown} == {(2.0, 0.25)}
        excess = fit_calibration(some_cluster().engine, shown).calibration
        assert all(excess.for_kinds([mode.value]) > 0 for mode in Mode)


def test_calibration_trials_stop_trying_modes_at_deadline() -> None:
    in_the_order_and_one_mode = 2
    for same, _, times, shown, _ in run_ranks(run_trials, 2, {2: 1.0, 1: 2.0}, ROOM, False, in_the_order_and_one_mode):
        assert same
        assert compute_s(times, 2) > 0
        assert [set(one.overhead_by_kind_s) >= {"zdp"} for one in shown] == [True]


def run_short_trials(
    rank: int, ranks: int, left_s: float, hardware: Cluster | None = None
) -> tuple[list[set[str]], list[float]]:
    """Kinds of operators of each mode that is rehearsed, and for how long."""
    seconds: list[float] = []
    run = trial_step._time_repeats

    def noted(*arguments: Any, **named: Any) -> list[StepTiming]:
        seconds.append(named["seconds"])
        return run(*arguments, **named)

    trial_step._time_repeats = noted
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    parts: list[Any] = [compute.measure_compute(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(parts, parts[rank])
    group, hardware = dist.group.WORLD, hardware or some_cluster(ranks)
    _, _, shown = run_calibration_trials(
        make_trial_context(module), traced, group, hardware, parts[0], lambda: ROOM, lambda: left_s
    )
    return [set(one.overhead_by_kind_s) - {"dp", "wrapped"} for one in shown], seconds[-len(shown) :]


def test_calibration_trials_with_little_time_run_each_mode_once_cheapest_first() -> None:
    for kinds, seconds in run_ranks(run_short_trials, 2, trials.MODE_TRIALS_RESERVE_S - 1):
        assert kinds == [set(), {"zdp2"}, {"zdp"}]
        assert seconds == [0.0] * 3


def test_calibration_trials_on_two_nodes_include_node_sharding() -> None:
    nodes = some_cluster(2, nodes=2, levels=uniform_hierarchical_links(some_cluster().link))
    for kinds, _ in run_ranks(run_short_trials, 4, trials.MODE_TRIALS_RESERVE_S - 1, nodes):
        assert kinds == [{"zdp2", "node"}, set(), {"zdp2"}, {"zdp"}]
    in_turn = trials._uniform_plans(trace(Module(), BATCH, 4, device=CPU).model_profile, nodes)
    assert all(plan.cluster == nodes for plan in in_turn)
    assert len(trials._uniform_plans(trace(Module(), BATCH, 4, device=CPU).model_profile, some_cluster(4))) == len(Mode)


def test_calibration_trials_stop_trying_modes_when_memory_is_used_up() -> None:
    plain_and_one_mode = 2
    for _, _, times, shown, _ in run_ranks(run_trials, 2, {2: 1.0, 1: 2.0}, ROOM, False, 99, plain_and_one_mode):
        assert compute_s(times, 2) > 0
        assert [set(one.overhead_by_kind_s) >= {"zdp"} for one in shown] == [True]


def test_calibration_trials_skip_steps_that_take_too_long() -> None:
    for same, parts, times, shown, messages in run_ranks(run_trials, 2, {2: trials.MAX_TRIAL_S}, ROOM, False):
        assert same
        assert not messages
        assert (times, shown) == (parts, ())


def run_heap_trials(
    rank: int, ranks: int, room_bytes: int, left_s: float
) -> tuple[bool, ComputeTimes, ComputeTimes | None, int]:
    """Whether the module is as it was and freed tensors are handed back, times, what there is where they stay, and how
    many modes were rehearsed."""
    configure_cpu_allocator()
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    everyone: list[Any] = [compute.measure_compute(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(everyone, everyone[rank])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    group, hardware = dist.group.WORLD, some_cluster(ranks)
    copied = make_trial_context(module)
    times, kept, shown = run_calibration_trials(
        copied, traced, group, hardware, everyone[0], lambda: room_bytes, lambda: left_s
    )
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    return same and not HEAP.retains and not leaked_parameter_bytes(module), times, kept, len(shown)


@pytest.mark.parametrize("left_s", [math.inf, trials.MODE_TRIALS_RESERVE_S - 1])
def test_heap_trial_times_unsharded_step_with_retained_heap(left_s: float) -> None:
    for same, times, kept, shown in run_ranks(run_heap_trials, 2, ROOM, left_s):
        assert same
        assert shown == len(Mode)
        assert kept is not None
        assert 0 < compute_s(kept, 8) <= compute_s(times, 8)


@pytest.mark.parametrize(("known_s", "steps"), [(None, 8), (0.1, 8), (1.0, 1 + trial_step.MAX_STEPS)])
def test_time_release_and_retain_reuses_known_time_of_slow_step(
    known_s: float | None, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    step = trial_step._forward_backward
    monkeypatch.setattr(trial_step, "_forward_backward", lambda *arguments: made.append(1) or step(*arguments))
    known = None if known_s is None else StepTiming(known_s)
    usual, kept = trial_step.time_release_and_retain(make_trial_context(Module()), 2, None, 1 << 20, known)
    assert len(made) == steps
    assert (usual == known) == (known_s == 1.0)
    assert kept.step_s > 0
    if known is not None:
        assert trial_step.release_and_retain_duration_s(known) == pytest.approx(
            {0.1: 8 * 0.1, 1.0: 2 * 1.0}[known.step_s]
        )


def test_heap_trial_without_memory_for_heap_growth_gives_no_result() -> None:
    room = trial_memory_bytes(Mode.DP, 2)  # for the copy, not for training
    for left_s in (math.inf, trials.HEAP_TRIAL_RESERVE_S):
        for same, _, kept, _ in run_ranks(run_heap_trials, 2, room, left_s):
            assert same
            assert kept is None


def test_heap_trial_skipped_for_time_assumes_retain_speedup() -> None:
    for same, times, kept, _ in run_ranks(run_heap_trials, 2, ROOM, trials.HEAP_TRIAL_RESERVE_S):
        assert same
        assert kept is not None
        for size in (2, 8):
            assert compute_s(kept, size) == pytest.approx(trials.ASSUMED_RETAIN_TIME_RATIO * compute_s(times, size))


def test_calibration_trials_of_real_steps_measure_nonzero_times() -> None:
    for same, _, times, shown, messages in run_ranks(run_trials, 2, None, ROOM, False):
        assert same
        assert not messages
        assert compute_s(times, 8) > 0
        assert len({one.measured_s for one in shown} - {0.0}) == len(Mode)


def trial_memory_bytes(mode: Mode, size: int) -> int:
    """Of rehearsing all operators in one mode."""
    module = Module()
    model = trace(module, BATCH, 4, device=CPU).model_profile
    plan = trials._uniform_plans(model, some_cluster(2))[list(Mode).index(mode)]
    step = trials.MEMORY_MARGIN * trial_peak_bytes(model, some_cluster(2), plan, size)
    return math.ceil(step) + lazy_clone_bytes(module, CPU) + FIRST_STEP_GROWTH_BYTES["cpu"]


def test_calibration_trials_skip_modes_and_sizes_that_exceed_memory() -> None:
    room = trial_memory_bytes(Mode.DP, 2)  # the copy shares parameters that stay whole
    assert room < min(trial_memory_bytes(Mode.DP, 8), trial_memory_bytes(Mode.ZDP2, 2), trial_memory_bytes(Mode.ZDP, 2))
    for same, parts, times, shown, _ in run_ranks(run_trials, 2, {1: 1.0}, room, False):
        assert same
        assert compute_s(times, 2) == pytest.approx(min(1.0, 3 * compute_s(parts, 2)))
        assert [set(one.overhead_by_kind_s) for one in shown] == [{"dp"}]


def test_time_unsharded_step_takes_largest_size_within_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hardware, asked = Module(), some_cluster(2), []
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    replicated = trials._uniform_plans(traced.model_profile, hardware)[0]

    def noted(_: TrialContext, sizes: list[int], *__: object) -> dict[int, StepTiming]:
        asked.append(sizes)
        return {size: StepTiming(1.0) for size in sizes}

    monkeypatch.setattr(trials, "time_step", noted)
    for most in (2, 3, 4, 5, 8, 8):
        monkeypatch.setattr(trials, "MAX_LARGE_BATCH_S", compute_s(parts, 6) if len(asked) == 5 else math.inf)
        room = math.ceil(trials.MEMORY_MARGIN * trial_peak_bytes(traced.model_profile, hardware, replicated, most))
        assert (
            list(trials._time_unsharded_step(make_trial_context(module), traced, None, hardware, parts, room))
            == asked[-1]
        )
    assert asked == [[2], [2], [2, 4], [2, 5], [2, 8], [2, 6]]


@pytest.mark.parametrize(
    ("most", "longest", "sizes"),
    [(1, 99, []), (2, 99, [2]), (3, 99, [2]), (4, 99, [2, 4]), (40, 99, [16, 32]), (40, 9, [4, 8])],
)
def test_time_unsharded_step_on_cuda_takes_sizes_that_saturate_device(
    most: int, longest: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, hardware = Module(), some_cluster(1)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    monkeypatch.setattr(trials, "time_step", lambda _, found, *__: dict.fromkeys(found, StepTiming(1.0)))
    monkeypatch.setattr(trials, "SATURATED_STEP_S", compute_s(parts, longest))
    replicated = trials._uniform_plans(traced.model_profile, hardware)[0]
    room = math.ceil(trials.MEMORY_MARGIN * trial_peak_bytes(traced.model_profile, hardware, replicated, most))
    on_cuda = replace(make_trial_context(module), device=torch.device("cuda", 0))
    assert list(trials._time_unsharded_step(on_cuda, traced, None, hardware, parts, room)) == sizes


def test_trial_batch_sizes_start_at_plan_size_unless_one_size_was_traced() -> None:
    assert trials._trial_batch_sizes(21, (2, 8), CPU) == [21, 5, 2]
    assert trials._trial_batch_sizes(21, (2, 64), torch.device("cuda", 0)) == [21, 10, 5, 2]
    assert trials._trial_batch_sizes(21, (4,), torch.device("cuda", 0)) == (4,)


def test_lazy_clone_shares_parameters_until_either_is_written() -> None:
    module = Module()
    twin = lazy_clone(module)
    weights, theirs = (dict(one.named_parameters()) for one in (module, twin))
    before = {name: value.detach().clone() for name, value in weights.items()}
    twin.net(BATCH).sum().backward()
    assert all(map(torch._C._is_cow_tensor, theirs.values()))
    assert lazy_clone_bytes(module, CPU) == sum(buffer.nbytes for buffer in module.buffers())
    with torch.no_grad():
        theirs["net.0.weight"].data.zero_()
        weights["net.3.weight"].fill_(2.0)
    assert torch.equal(weights["net.0.weight"], before["net.0.weight"])
    assert torch.equal(theirs["net.3.weight"], before["net.3.weight"])


def test_lazy_clone_copies_tensors_that_cannot_be_shared() -> None:
    module = Module()
    module.net[0].weight = nn.Parameter(torch.from_numpy(np.ones((128, 64), dtype=np.float32)))  # numpy's memory
    module.body = nn.LSTM(64, 32)  # its backward asks for weights to write to
    own = [module.net[0].weight, *module.body.parameters(), *module.buffers()]
    assert lazy_clone_bytes(module, CPU) == sum(tensor.nbytes for tensor in own)
    twin = lazy_clone(module)
    assert torch.equal(twin.net[0].weight, module.net[0].weight)
    assert twin.net[0].weight.data_ptr() != module.net[0].weight.data_ptr()


@pytest.mark.parametrize("fails", [False, True])
def test_calibration_trials_without_memory_or_on_failure_keep_compute_times(fails: bool) -> None:
    for same, parts, times, shown, messages in run_ranks(run_trials, 2, None, ROOM if fails else 1 << 10, fails):
        assert same
        assert (times, shown) == (parts, ())
        assert [("can't be rehearsed" in message and "not for real" in message) for message in messages] == [
            True
        ] * fails


def test_local_trial_scales_compute_to_unsharded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, run = Module(), trial_step._time_repeats
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def a_second_each(steps: Any, **named: Any) -> list[StepTiming]:
        run(steps, **named)
        return [StepTiming(1.0, 0.0, 0.25)] * len(steps)

    monkeypatch.setattr(trial_step, "_time_repeats", a_second_each)
    times = run_local_trial(make_trial_context(module), traced, some_cluster(4), parts, ROOM)
    limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
    assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert run_local_trial(make_trial_context(module), traced, some_cluster(4), parts, 1 << 10) == parts


def test_local_trial_frees_copy_whose_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    twins: list[pl.LightningModule] = []

    def noted(module: pl.LightningModule) -> pl.LightningModule:
        twins.append(lazy_clone(module))
        return twins[-1]

    monkeypatch.setattr(trial_step, "lazy_clone", noted)
    module = Module(fails=True)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure_compute(traced, CPU, time_budget_s=0.0)
    with pytest.warns(OSDPWarning, match=r"can't be rehearsed.*not for real"):
        assert run_local_trial(make_trial_context(module), traced, some_cluster(4), parts, ROOM) == parts
    assert twins
    assert {parameter.numel() for twin in twins for parameter in twin.parameters()} == {0}


def run_mixed_plan_trials(rank: int, ranks: int, room_bytes: int) -> tuple[str, list[tuple[int, Trial | None]], bool]:
    """The plan's name, rehearsals of a mixed plan at two batch sizes, and whether the module is as it was and its
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
        hardware, group = some_cluster(ranks), dist.group.WORLD
        one = run_plan_trial(make_trial_context(module), traced, group, hardware, times[0], plan, room_bytes)
        found.append((sizes[-1] if sizes else 0, one))
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same = same and not leaked_parameter_bytes(module)
    return plan_key(mixed_plan(ranks).model_copy(update={"batch_size": 6})), found, same


def test_run_trial_does_not_retry_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "raise_on_all_ranks", lambda group, work: work())
    for seconds, left in ((trials.NO_RETRY_ABOVE_S / 2, 0), (5 * trials.NO_RETRY_ABOVE_S, 1)):
        tries = [1.5 * seconds, 1.5 * seconds]
        monkeypatch.setattr(trials, "time_step", lambda *_, tries=tries, **__: {4: StepTiming(tries.pop())})
        expected = Trial(plan_key="", predicted_s=seconds, measured_s=seconds, overhead_by_kind_s={})
        likely = (seconds, trials.PLAN_RETRY_TOLERANCE)
        trials._run_trial(
            make_trial_context(Module()),
            expected,
            mixed_plan(2),
            4,
            None,  # type: ignore[arg-type]
            lambda: False,
            expected_time=likely,
        )
        assert len(tries) == left


class _Clock:
    """Time that passes by what steps say they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.turns: dict[int, int] = {}
        monkeypatch.setattr(trial_step, "record_event", lambda _: self.now_s)

    def step(self, name: int, *takes_s: float) -> Any:
        """A step that takes these times, one after the other, and the last of them from then on; a quarter of each for
        the forward pass."""

        def run() -> float:
            turn, start_s = self.turns.get(name, 0), self.now_s
            self.turns[name] = turn + 1
            took_s = takes_s[min(turn, len(takes_s) - 1)]
            self.now_s += took_s
            return start_s + took_s / 4

        return run


def test_time_repeats_on_cpu_warms_up_only_first_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    steps = [clock.step(2, 1.0, 0.75), clock.step(8, 2.25)]
    took = trial_step._time_repeats(steps, None, torch.device("cpu"), seconds=1.5)
    assert [one.step_s for one in took] == [0.75, 2.25]
    assert [one.forward_s for one in took] == [0.75 / 4, 2.25 / 4]
    assert clock.turns == {2: 2, 8: 1}


def test_time_repeats_on_cuda_warms_up_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_step, "synchronize", lambda _: None)
    clock = _Clock(monkeypatch)
    steps = [clock.step(2, 1.0, 0.25), clock.step(8, 2.0, 0.5, 0.75, 0.5)]
    took = trial_step._time_repeats(steps, None, torch.device("cuda"), seconds=2.5)
    assert [one.step_s for one in took] == [0.25, 0.5]
    assert clock.turns == {2: 5, 8: 5}


def test_time_repeats_on_cpu_warms_up_single_slow_and_several_fast_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    (single,) = trial_step._time_repeats([clock.step(8, 3.0, 2.0)], None, torch.device("cpu"), seconds=1.5)
    assert (single.step_s, clock.turns) == (2.0, {8: 2})
    steps = [clock.step(2, 0.25, 0.125), clock.step(4, 0.5, 0.25)]
    assert [one.step_s for one in trial_step._time_repeats(steps, None, torch.device("cpu"), seconds=1.5)] == [
        0.125,
        0.25,
    ]


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

    def noted(
        stage: TrialContext,
        expected: Trial,
        plan: ExecutionPlan,
        size: int,
        group: Any,
        late: Any,
        seconds: float,
        *_: Any,
    ) -> Trial:
        sizes.append((size, seconds == 0.0))
        return expected

    monkeypatch.setattr(trials, "_run_trial", noted)
    module, plan = Module(), mixed_plan(2).model_copy(update={"batch_size": 6})
    traced = trace(module, BATCH, 4, device=CPU)
    group: Any = None
    parts: Any = None
    shown = run_plan_trial(make_trial_context(module), traced, group, some_cluster(2), parts, plan, 0, lambda: left_s)
    assert sizes == ([] if size is None else [size])
    assert (shown is None) == (size is None)


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
    ids=["as foreseen", "longer", "shorter", "disturbed", "no second one", "no time for it"],
)
def test_run_trial_retries_unexpected_time(
    tries: list[float], late: bool, took_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries that agree are both right: to take the less of them would foretell too little."""
    monkeypatch.setattr(trials, "raise_on_all_ranks", lambda group, work: work())
    monkeypatch.setattr(trials, "time_step", lambda *_, **__: {4: StepTiming(tries.pop(0))})
    expected = Trial(plan_key="", predicted_s=0.5, measured_s=0.5, overhead_by_kind_s={})
    found = trials._run_trial(make_trial_context(Module()), expected, mixed_plan(2), 4, None, lambda: late)  # type: ignore[arg-type]
    assert found.measured_s == pytest.approx(took_s)
    assert len(tries) == left


def mixed_plan(ranks: int) -> ExecutionPlan:
    """Every mode, and one operator in slices."""
    module = Module()
    names = [operator.name for operator in trace(module, BATCH, 4, device=CPU).model_profile.operators]
    modes = {name: Mode.ZDP if name == "net.0" else Mode.DP for name in names}
    plan = hand_made_plan(modes, ranks)
    cut = {"slices": (Mode.ZDP2, Mode.DP), "split_dim": 1}
    operators = tuple(op.model_copy(update=cut) if op.name == "net.3" else op for op in plan.operators)
    return plan.model_copy(update={"operators": operators})


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


def count_kept_gradients(rank: int, ranks: int) -> dict[bool, tuple[bool, set[int]]]:
    """By whether the plan updates in the backward pass: whether it was rehearsed, and how many sharded parameters still
    had a gradient at the end of each backward pass."""
    module, hardware = Module(), some_cluster(ranks)
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
        one = run_plan_trial(make_trial_context(module), traced, dist.group.WORLD, hardware, times[0], plan, 1 << 60)
        found[at_once] = (one is not None, set(kept))
    return found


def test_plan_trial_keeps_no_gradients_when_plan_updates_in_backward() -> None:
    for found in run_ranks(count_kept_gradients, 2):
        assert found == {False: (True, {2}), True: (True, {0})}


def test_plan_trial_without_memory_is_skipped() -> None:
    for _, found, same in run_ranks(run_mixed_plan_trials, 2, 1 << 10):
        assert same
        assert found == [(0, None), (0, None)]


def test_trial_context_of_manual_compiled_or_meta_module_is_not_repeatable() -> None:
    module = Module()
    assert make_trial_context(module).is_repeatable
    module.automatic_optimization = False
    assert not make_trial_context(module).is_repeatable
    module = Module()
    module.net = torch.compile(module.net, backend="eager")
    assert not make_trial_context(module).is_repeatable
    with torch.device("meta"):
        assert not make_trial_context(Module()).is_repeatable

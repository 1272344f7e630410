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

from lightning_osdp import copies, rehearsal
from lightning_osdp.copies import Stage, Took
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import CHOSEN_ERROR, Rehearsal, copy_bytes, decided, with_excess
from lightning_osdp.planning.wishes import Wishes
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.heap import HEAP, fix_cpu_allocator
from lightning_osdp.profiling.memory import FIRST_STEP_BYTES
from lightning_osdp.profiling.standins import copied_bytes, real_copy
from lightning_osdp.profiling.trace import trace
from lightning_osdp.rehearsal import rehearse, rehearse_alone, rehearse_chosen
from lightning_osdp.sharding.fairscale import FairScaleEngine
from tests.leaks import strange_bytes
from tests.models import hand_made_plan, same_levels, some_cluster
from tests.planning.small import compute_s
from tests.ranks import run_ranks

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


def stage(module: pl.LightningModule) -> Stage:
    return Stage(module, BATCH, 4, CPU, nullcontext)


def rehearsed(
    rank: int,
    ranks: int,
    means: dict[int, float] | None,
    room_bytes: int,
    fails: bool,
    modes: int = 99,
    roomy: int = 99,
) -> tuple[bool, ComputeTimes, ComputeTimes, tuple[Rehearsal, ...], list[str]]:
    """Whether the module is as it was, times before and after, rehearsals, and warnings; it is late after ``modes``,
    and there is no room when it is asked for more than ``roomy`` times."""
    torch.manual_seed(1)
    module = Module(fails)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0)
    everyone: list[Any] = [parts] * ranks
    dist.all_gather_object(everyone, parts)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    steps, random = module.steps, torch.get_rng_state()
    if means is not None:
        run = copies._means

        def given(steps: Any, **named: Any) -> list[Took]:
            run(steps, **named)
            return [Took(means[len(steps)], 0.25, means[len(steps)] / 4)] * len(steps)

        copies._means = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OSDPWarning)
        hardware = some_cluster(ranks)
        group, rooms = dist.group.WORLD, iter([room_bytes] * roomy)
        free_bytes, left_s = partial(next, rooms, 0), partial(next, iter([math.inf] * modes), 0.0)
        times, _, shown = rehearse(stage(module), traced, group, hardware, everyone[0], free_bytes, left_s)
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same &= all(parameter.grad is None for parameter in module.parameters()) and module._trainer is None
    same &= module.steps == steps and torch.equal(random, torch.get_rng_state())
    messages = [str(one.message) for one in caught if issubclass(one.category, OSDPWarning)]
    return same, everyone[0], times, shown, messages


def test_the_module_stays_as_it_was_and_its_times_are_those_of_the_step() -> None:
    # One second for the plain step at both sizes, two with all operators in any mode.
    first, second = run_ranks(rehearsed, 2, {2: 1.0, 1: 2.0}, ROOM, False)
    assert first[1:] == second[1:]
    for same, parts, times, shown, messages in (first, second):
        assert same
        assert not messages
        limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
        assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)
        assert [set(one.added_s) - {"dp", "joined"} for one in shown] == [{"zdp"}, {"zdp2"}, set()]
        assert {(one.took_s, one.waited_s) for one in shown} == {(2.0, 0.25)}
        excess = with_excess(some_cluster().engine, shown).excess
        assert all(excess.of([mode.value]) > 0 for mode in Mode)


def test_no_more_modes_are_rehearsed_when_it_is_late() -> None:
    in_the_order_and_one_mode = 2
    for same, _, times, shown, _ in run_ranks(rehearsed, 2, {2: 1.0, 1: 2.0}, ROOM, False, in_the_order_and_one_mode):
        assert same
        assert compute_s(times, 2) > 0
        assert [set(one.added_s) >= {"zdp"} for one in shown] == [True]


def in_a_hurry(
    rank: int, ranks: int, left_s: float, hardware: Cluster | None = None
) -> tuple[list[set[str]], list[float]]:
    """Kinds of operators of each mode that is rehearsed, and for how long."""
    seconds: list[float] = []
    run = copies._means

    def noted(*arguments: Any, **named: Any) -> list[Took]:
        seconds.append(named["seconds"])
        return run(*arguments, **named)

    copies._means = noted
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    parts: list[Any] = [compute.measure(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(parts, parts[rank])
    group, hardware = dist.group.WORLD, hardware or some_cluster(ranks)
    _, _, shown = rehearse(stage(module), traced, group, hardware, parts[0], lambda: ROOM, lambda: left_s)
    return [set(one.added_s) - {"dp", "joined"} for one in shown], seconds[-len(shown) :]


def test_in_a_hurry_a_step_of_each_mode_is_made_the_plainest_first() -> None:
    for kinds, seconds in run_ranks(in_a_hurry, 2, rehearsal.MODES_LEFT_S - 1):
        assert kinds == [set(), {"zdp2"}, {"zdp"}]
        assert seconds == [0.0] * 3


def test_of_two_levels_what_is_sharded_inside_nodes_is_rehearsed_as_well() -> None:
    nodes = some_cluster(2, nodes=2, levels=same_levels(some_cluster().link))
    for kinds, _ in run_ranks(in_a_hurry, 4, rehearsal.MODES_LEFT_S - 1, nodes):
        assert kinds == [{"zdp2", "node"}, set(), {"zdp2"}, {"zdp"}]
    in_turn = rehearsal._uniform(trace(Module(), BATCH, 4, device=CPU).description, nodes)
    assert all(plan.cluster == nodes for plan in in_turn)
    assert len(rehearsal._uniform(trace(Module(), BATCH, 4, device=CPU).description, some_cluster(4))) == len(Mode)


def test_a_mode_is_rehearsed_only_in_what_copies_have_left() -> None:
    plain_and_one_mode = 2
    for _, _, times, shown, _ in run_ranks(rehearsed, 2, {2: 1.0, 1: 2.0}, ROOM, False, 99, plain_and_one_mode):
        assert compute_s(times, 2) > 0
        assert [set(one.added_s) >= {"zdp"} for one in shown] == [True]


def test_steps_that_take_long_are_not_rehearsed() -> None:
    for same, parts, times, shown, messages in run_ranks(rehearsed, 2, {2: rehearsal.LONGEST_S}, ROOM, False):
        assert same
        assert not messages
        assert (times, shown) == (parts, ())


def heap_rehearsed(
    rank: int, ranks: int, room_bytes: int, left_s: float
) -> tuple[bool, ComputeTimes, ComputeTimes | None, int]:
    """Whether the module is as it was and freed tensors are handed back, times, what there is where they stay, and how
    many modes were rehearsed."""
    fix_cpu_allocator()
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    everyone: list[Any] = [compute.measure(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(everyone, everyone[rank])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    group, hardware = dist.group.WORLD, some_cluster(ranks)
    copied = stage(module)
    times, kept, shown = rehearse(copied, traced, group, hardware, everyone[0], lambda: room_bytes, lambda: left_s)
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    return same and not HEAP.keeps and not strange_bytes(module), times, kept, len(shown)


@pytest.mark.parametrize("left_s", [math.inf, rehearsal.MODES_LEFT_S - 1])
def test_the_plain_step_is_rehearsed_where_freed_tensors_stay_as_well(left_s: float) -> None:
    for same, times, kept, shown in run_ranks(heap_rehearsed, 2, ROOM, left_s):
        assert same
        assert shown == len(Mode)
        assert kept is not None
        assert 0 < compute_s(kept, 8) <= compute_s(times, 8)


@pytest.mark.parametrize(("known_s", "steps"), [(None, 8), (0.1, 8), (1.0, 1 + copies.MOST)])
def test_where_a_step_is_long_what_is_known_of_it_is_not_timed_again(
    known_s: float | None, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    step = copies._step
    monkeypatch.setattr(copies, "_step", lambda *arguments: made.append(1) or step(*arguments))
    known = None if known_s is None else Took(known_s)
    usual, kept = copies.handed_back_and_kept(stage(Module()), 2, None, 1 << 20, known)
    assert len(made) == steps
    assert (usual == known) == (known_s == 1.0)
    assert kept.step_s > 0
    if known is not None:
        assert copies.in_turns_s(known) == pytest.approx({0.1: 8 * 0.1, 1.0: 2 * 1.0}[known.step_s])


def test_where_the_heap_might_not_grow_nothing_is_known_of_it() -> None:
    room = needed_bytes(Mode.DP, 2)  # for the copy, not for training
    for left_s in (math.inf, rehearsal.KEPT_LEFT_S):
        for same, _, kept, _ in run_ranks(heap_rehearsed, 2, room, left_s):
            assert same
            assert kept is None


def test_where_it_is_late_a_little_is_expected_of_the_heap() -> None:
    for same, times, kept, _ in run_ranks(heap_rehearsed, 2, ROOM, rehearsal.KEPT_LEFT_S):
        assert same
        assert kept is not None
        for size in (2, 8):
            assert compute_s(kept, size) == pytest.approx(rehearsal.KEPT_SHARE * compute_s(times, size))


def test_real_steps_take_some_time() -> None:
    for same, _, times, shown, messages in run_ranks(rehearsed, 2, None, ROOM, False):
        assert same
        assert not messages
        assert compute_s(times, 8) > 0
        assert len({one.took_s for one in shown} - {0.0}) == len(Mode)


def needed_bytes(mode: Mode, size: int) -> int:
    """Of rehearsing all operators in one mode."""
    module = Module()
    model = trace(module, BATCH, 4, device=CPU).description
    plan = rehearsal._uniform(model, some_cluster(2))[list(Mode).index(mode)]
    step = rehearsal.MARGIN * copy_bytes(model, some_cluster(2), plan, size)
    return math.ceil(step) + copied_bytes(module, CPU) + FIRST_STEP_BYTES["cpu"]


def test_what_there_is_no_room_for_is_not_rehearsed() -> None:
    room = needed_bytes(Mode.DP, 2)  # the copy shares parameters that stay whole
    assert room < min(needed_bytes(Mode.DP, 8), needed_bytes(Mode.ZDP2, 2), needed_bytes(Mode.ZDP, 2))
    for same, parts, times, shown, _ in run_ranks(rehearsed, 2, {1: 1.0}, room, False):
        assert same
        assert compute_s(times, 2) == pytest.approx(min(1.0, 3 * compute_s(parts, 2)))
        assert [set(one.added_s) for one in shown] == [{"dp"}]


def test_of_sizes_between_the_traced_ones_the_largest_that_fits_in_room_and_time_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, hardware, asked = Module(), some_cluster(2), []
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0)
    replicated = rehearsal._uniform(traced.description, hardware)[0]

    def noted(_: Stage, sizes: list[int], *__: object) -> dict[int, Took]:
        asked.append(sizes)
        return {size: Took(1.0) for size in sizes}

    monkeypatch.setattr(rehearsal, "timed", noted)
    for most in (2, 3, 4, 5, 8, 8):
        monkeypatch.setattr(rehearsal, "PLAIN_S", compute_s(parts, 6) if len(asked) == 5 else math.inf)
        room = math.ceil(rehearsal.MARGIN * copy_bytes(traced.description, hardware, replicated, most))
        assert list(rehearsal._plain(stage(module), traced, None, hardware, parts, room)) == asked[-1]
    assert asked == [[2], [2], [2, 4], [2, 5], [2, 8], [2, 6]]


@pytest.mark.parametrize(
    ("most", "longest", "sizes"),
    [(1, 99, []), (2, 99, [2]), (3, 99, [2]), (4, 99, [2, 4]), (40, 99, [16, 32]), (40, 9, [4, 8])],
)
def test_on_cuda_the_plain_step_fills_the_device(
    most: int, longest: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, hardware = Module(), some_cluster(1)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0)
    monkeypatch.setattr(rehearsal, "timed", lambda _, found, *__: dict.fromkeys(found, Took(1.0)))
    monkeypatch.setattr(rehearsal, "FILLING_S", compute_s(parts, longest))
    replicated = rehearsal._uniform(traced.description, hardware)[0]
    room = math.ceil(rehearsal.MARGIN * copy_bytes(traced.description, hardware, replicated, most))
    on_cuda = replace(stage(module), device=torch.device("cuda", 0))
    assert list(rehearsal._plain(on_cuda, traced, None, hardware, parts, room)) == sizes


def test_a_plan_is_rehearsed_at_batch_sizes_that_say_most() -> None:
    assert rehearsal._wanted(21, (2, 8), CPU) == [21, 5, 2]
    assert rehearsal._wanted(21, (2, 64), torch.device("cuda", 0)) == [21, 10, 5, 2]
    assert rehearsal._wanted(21, (4,), torch.device("cuda", 0)) == (4,)


def test_a_copy_shares_parameters_until_either_is_written() -> None:
    module = Module()
    twin = real_copy(module)
    weights, theirs = (dict(one.named_parameters()) for one in (module, twin))
    before = {name: value.detach().clone() for name, value in weights.items()}
    twin.net(BATCH).sum().backward()
    assert all(map(torch._C._is_cow_tensor, theirs.values()))
    assert copied_bytes(module, CPU) == sum(buffer.nbytes for buffer in module.buffers())
    with torch.no_grad():
        theirs["net.0.weight"].data.zero_()
        weights["net.3.weight"].fill_(2.0)
    assert torch.equal(weights["net.0.weight"], before["net.0.weight"])
    assert torch.equal(theirs["net.3.weight"], before["net.3.weight"])


def test_what_can_not_be_shared_is_copied() -> None:
    module = Module()
    module.net[0].weight = nn.Parameter(torch.from_numpy(np.ones((128, 64), dtype=np.float32)))  # numpy's memory
    module.body = nn.LSTM(64, 32)  # its backward asks for weights to write to
    own = [module.net[0].weight, *module.body.parameters(), *module.buffers()]
    assert copied_bytes(module, CPU) == sum(tensor.nbytes for tensor in own)
    twin = real_copy(module)
    assert torch.equal(twin.net[0].weight, module.net[0].weight)
    assert twin.net[0].weight.data_ptr() != module.net[0].weight.data_ptr()


@pytest.mark.parametrize("fails", [False, True])
def test_without_room_or_where_it_fails_parts_are_all_that_is_known(fails: bool) -> None:
    for same, parts, times, shown, messages in run_ranks(rehearsed, 2, None, ROOM if fails else 1 << 10, fails):
        assert same
        assert (times, shown) == (parts, ())
        assert [("can't be rehearsed" in message and "not for real" in message) for message in messages] == [
            True
        ] * fails


def test_a_process_alone_rehearses_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, run = Module(), copies._means
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def a_second_each(steps: Any, **named: Any) -> list[Took]:
        run(steps, **named)
        return [Took(1.0, 0.0, 0.25)] * len(steps)

    monkeypatch.setattr(copies, "_means", a_second_each)
    times = rehearse_alone(stage(module), traced, some_cluster(4), parts, ROOM)
    limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
    assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert rehearse_alone(stage(module), traced, some_cluster(4), parts, 1 << 10) == parts


def test_a_copy_whose_step_fails_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    twins: list[pl.LightningModule] = []

    def noted(module: pl.LightningModule) -> pl.LightningModule:
        twins.append(real_copy(module))
        return twins[-1]

    monkeypatch.setattr(copies, "real_copy", noted)
    module = Module(fails=True)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0)
    with pytest.warns(OSDPWarning, match=r"can't be rehearsed.*not for real"):
        assert rehearse_alone(stage(module), traced, some_cluster(4), parts, ROOM) == parts
    assert twins
    assert {parameter.numel() for twin in twins for parameter in twin.parameters()} == {0}


def chosen(rank: int, ranks: int, room_bytes: int) -> tuple[str, list[tuple[int, Rehearsal | None]], bool]:
    """The plan's name, rehearsals of a mixed plan at two batch sizes, and whether the module is as it was and its
    copies are gone."""
    module = Module()
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0, wishes=Wishes(slice_granularity={"net.3": 2}))
    times: list[Any] = [parts] * ranks
    dist.all_gather_object(times, parts)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    sizes: list[int] = []
    run = rehearsal.timed

    def noted(stage: Stage, which: Any, *args: Any, **named: Any) -> dict[int, Took]:
        sizes.extend(which)
        return run(stage, which, *args, **named)

    rehearsal.timed = noted
    found: list[tuple[int, Rehearsal | None]] = []
    for batch_size in (6, 1 << 30):  # the second would take too long
        plan = mixed(ranks).model_copy(update={"batch_size": batch_size})
        hardware, group = some_cluster(ranks), dist.group.WORLD
        one = rehearse_chosen(stage(module), traced, group, hardware, times[0], plan, room_bytes)
        found.append((sizes[-1] if sizes else 0, one))
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same = same and not strange_bytes(module)
    return decided(mixed(ranks).model_copy(update={"batch_size": 6})), found, same


def test_a_long_step_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "on_all_ranks", lambda group, work: work())
    for seconds, left in ((rehearsal.SHORT_S / 2, 0), (5 * rehearsal.SHORT_S, 1)):
        tries = [1.5 * seconds, 1.5 * seconds]
        monkeypatch.setattr(rehearsal, "timed", lambda *_, tries=tries, **__: {4: Took(tries.pop())})
        expected = Rehearsal(decided="", foreseen_s=seconds, took_s=seconds, added_s={})
        likely = (seconds, rehearsal.CHOSEN_ODD)
        rehearsal._rehearsed(
            stage(Module()),
            expected,
            mixed(2),
            4,
            None,  # type: ignore[arg-type]
            lambda: False,
            likely=likely,
        )
        assert len(tries) == left


class _Clock:
    """Time that passes by what steps say they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.turns: dict[int, int] = {}
        monkeypatch.setattr(copies, "instant", lambda _: self.now_s)

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


def test_of_long_steps_the_first_warms_up_and_no_other_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    steps = [clock.step(2, 1.0, 0.75), clock.step(8, 2.25)]
    took = copies._means(steps, None, torch.device("cpu"), seconds=1.5)
    assert [one.step_s for one in took] == [0.75, 2.25]
    assert [one.forward_s for one in took] == [0.75 / 4, 2.25 / 4]
    assert clock.turns == {2: 2, 8: 1}


def test_on_cuda_long_steps_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "synchronize", lambda _: None)
    clock = _Clock(monkeypatch)
    steps = [clock.step(2, 1.0, 0.25), clock.step(8, 2.0, 0.5, 0.75, 0.5)]
    took = copies._means(steps, None, torch.device("cuda"), seconds=2.5)
    assert [one.step_s for one in took] == [0.25, 0.5]
    assert clock.turns == {2: 5, 8: 5}


def test_a_single_long_step_and_several_short_ones_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    (single,) = copies._means([clock.step(8, 3.0, 2.0)], None, torch.device("cpu"), seconds=1.5)
    assert (single.step_s, clock.turns) == (2.0, {8: 2})
    steps = [clock.step(2, 0.25, 0.125), clock.step(4, 0.5, 0.25)]
    assert [one.step_s for one in copies._means(steps, None, torch.device("cpu"), seconds=1.5)] == [0.125, 0.25]


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
def test_of_a_long_step_a_single_one_is_timed(
    step_s: float, left_s: float, size: tuple[int, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``size``: at which batch size, and whether once."""
    expected = Rehearsal(decided="", foreseen_s=step_s, took_s=step_s, added_s={})
    monkeypatch.setattr(rehearsal, "foreseen", lambda *_: expected)
    monkeypatch.setattr(Stage, "room", lambda *_: 1 << 60)
    sizes: list[tuple[int, bool]] = []

    def noted(
        stage: Stage,
        expected: Rehearsal,
        plan: ExecutionPlan,
        size: int,
        group: Any,
        late: Any,
        seconds: float,
        *_: Any,
    ) -> Rehearsal:
        sizes.append((size, seconds == 0.0))
        return expected

    monkeypatch.setattr(rehearsal, "_rehearsed", noted)
    module, plan = Module(), mixed(2).model_copy(update={"batch_size": 6})
    traced = trace(module, BATCH, 4, device=CPU)
    group: Any = None
    parts: Any = None
    shown = rehearse_chosen(stage(module), traced, group, some_cluster(2), parts, plan, 0, lambda: left_s)
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
def test_what_is_odd_is_tried_again(
    tries: list[float], late: bool, took_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tries that agree are both right: to take the less of them would foretell too little."""
    monkeypatch.setattr(rehearsal, "on_all_ranks", lambda group, work: work())
    monkeypatch.setattr(rehearsal, "timed", lambda *_, **__: {4: Took(tries.pop(0))})
    expected = Rehearsal(decided="", foreseen_s=0.5, took_s=0.5, added_s={})
    found = rehearsal._rehearsed(stage(Module()), expected, mixed(2), 4, None, lambda: late)  # type: ignore[arg-type]
    assert found.took_s == pytest.approx(took_s)
    assert len(tries) == left


def mixed(ranks: int) -> ExecutionPlan:
    """Every mode, and one operator in slices."""
    module = Module()
    names = [operator.name for operator in trace(module, BATCH, 4, device=CPU).description.operators]
    modes = {name: Mode.ZDP if name == "net.0" else Mode.DP for name in names}
    plan = hand_made_plan(modes, ranks)
    cut = {"slices": (Mode.ZDP2, Mode.DP), "split_dim": 1}
    operators = tuple(op.model_copy(update=cut) if op.name == "net.3" else op for op in plan.operators)
    return plan.model_copy(update={"operators": operators})


def test_the_chosen_plan_is_rehearsed_at_its_batch_size_or_one_that_takes_less() -> None:
    (name, found, same), (_, others, _) = run_ranks(chosen, 2, 1 << 60)
    assert same
    (size, one), (smaller, other) = found
    assert [each for _, each in others] == [one, other]
    assert size == 6
    assert one is not None
    assert (one.decided, one.error) == (name, CHOSEN_ERROR)
    assert one.waited_s is not None
    assert 0 < one.waited_s < one.took_s
    assert set(one.added_s) >= {"zdp", "zdp2", "split"}
    assert smaller < 1 << 30
    assert other is not None


def gradients_kept(rank: int, ranks: int) -> dict[bool, tuple[bool, set[int]]]:
    """By whether the plan updates in the backward pass: whether it was rehearsed, and how many sharded parameters still
    had a gradient at the end of each backward pass."""
    module, hardware = Module(), some_cluster(ranks)
    traced = trace(module, BATCH, 4, device=CPU)
    times: list[Any] = [compute.measure(traced, CPU, time_budget_s=0.0)] * ranks
    dist.all_gather_object(times, times[0])
    names = [operator.name for operator in traced.description.operators]
    modes = {name: Mode.ZDP if name in ("net.0", "net.3") else Mode.DP for name in names}
    finish, kept = FairScaleEngine.finish_backward, set()

    def counted(engine: FairScaleEngine) -> None:
        kept.add(sum(p.grad is not None or hasattr(p, "_saved_grad_shard") for p in engine._shards.parameters))
        finish(engine)

    FairScaleEngine.finish_backward = counted  # type: ignore[method-assign]
    found = {}
    for at_once in (False, True):
        plan = hand_made_plan(modes, ranks).model_copy(update={"batch_size": 4, "update_in_backward": at_once})
        kept.clear()
        one = rehearse_chosen(stage(module), traced, dist.group.WORLD, hardware, times[0], plan, 1 << 60)
        found[at_once] = (one is not None, set(kept))
    return found


def test_a_copy_keeps_no_gradients_where_the_plan_does_not() -> None:
    for found in run_ranks(gradients_kept, 2):
        assert found == {False: (True, {2}), True: (True, {0})}


def test_the_chosen_plan_is_not_rehearsed_without_room() -> None:
    for _, found, same in run_ranks(chosen, 2, 1 << 10):
        assert same
        assert found == [(0, None), (0, None)]


def test_what_can_not_be_repeated() -> None:
    module = Module()
    assert stage(module).repeatable
    module.automatic_optimization = False
    assert not stage(module).repeatable
    module = Module()
    module.net = torch.compile(module.net, backend="eager")
    assert not stage(module).repeatable
    with torch.device("meta"):
        assert not stage(Module()).repeatable

"""The module's own step is rehearsed on a copy: the module stays as it was, and times are those of the whole step."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp import rehearsal
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import ComputeTimes, EngineOverhead
from lightning_osdp.planning.rehearsed import compute_s
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.trace import trace
from lightning_osdp.rehearsal import Stage, needed_bytes, rehearse
from tests.models import some_cluster
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
    rank: int, ranks: int, medians: dict[int, float] | None, room_bytes: int, fails: bool
) -> tuple[bool, ComputeTimes, ComputeTimes, EngineOverhead, list[str]]:
    """Whether the module is as it was, times before and after, the engine's, and warnings."""
    torch.manual_seed(1)
    module = Module(fails)
    traced = trace(module, BATCH, 4, device=CPU)
    parts = compute.measure(traced, CPU, time_budget_s=0.0)
    everyone: list[Any] = [parts] * ranks
    dist.all_gather_object(everyone, parts)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    steps, random = module.steps, torch.get_rng_state()
    if medians is not None:
        run = rehearsal._medians

        def given(steps: Any, *args: Any) -> list[float]:
            run(steps, *args)
            return [medians[len(steps)]] * len(steps)

        rehearsal._medians = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OSDPWarning)
        times, engine = rehearse(stage(module), traced, dist.group.WORLD, some_cluster(ranks), everyone[0], room_bytes)
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    same &= all(parameter.grad is None for parameter in module.parameters()) and module._trainer is None
    same &= module.steps == steps and torch.equal(random, torch.get_rng_state())
    messages = [str(one.message) for one in caught if issubclass(one.category, OSDPWarning)]
    return same, everyone[0], times, engine, messages


def test_the_module_stays_as_it_was_and_its_times_are_those_of_the_step() -> None:
    # One second for the plain step at both sizes, two with all operators in any mode.
    first, second = run_ranks(rehearsed, 2, {2: 1.0, 1: 2.0}, ROOM, False)
    assert first[1:] == second[1:]
    for same, parts, times, engine, messages in (first, second):
        assert same
        assert not messages
        limits = [min(1.0, 3 * compute_s(parts, size)) for size in (2, 8)]
        assert [compute_s(times, size) for size in (2, 8)] == pytest.approx(limits, rel=0.3)
        assert all(engine.of(mode).factor > 1 for mode in Mode)


def test_steps_that_take_long_are_not_rehearsed() -> None:
    for same, parts, times, engine, messages in run_ranks(rehearsed, 2, {2: rehearsal.LONGEST_S}, ROOM, False):
        assert same
        assert not messages
        assert (times, engine) == (parts, some_cluster().engine)


def test_real_steps_give_factors_within_reason() -> None:
    for same, _, times, engine, messages in run_ranks(rehearsed, 2, None, ROOM, False):
        assert same
        assert not messages
        assert compute_s(times, 8) > 0
        assert {engine.of(mode).factor for mode in Mode} != {1.0}


@pytest.mark.parametrize("fails", [False, True])
def test_without_room_or_where_it_fails_parts_are_all_that_is_known(fails: bool) -> None:
    for same, parts, times, engine, messages in run_ranks(rehearsed, 2, None, ROOM if fails else 1 << 10, fails):
        assert same
        assert times == parts
        assert engine == some_cluster().engine
        assert [("can't be rehearsed" in message and "not for real" in message) for message in messages] == [
            True
        ] * fails


def test_why_there_is_no_rehearsal() -> None:
    module = Module()
    description = trace(module, BATCH, 4, device=CPU).description
    needed = needed_bytes(description, 8)
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert needed > 2 * weights
    assert stage(module).why_not(description, (2, 8), needed) == ""
    assert "does not fit" in stage(module).why_not(description, (2, 8), needed - 1)
    module.automatic_optimization = False
    assert "itself" in stage(module).why_not(description, (2, 8), ROOM)
    module = Module()
    module.net = torch.compile(module.net, backend="eager")
    assert "compiling" in stage(module).why_not(description, (2, 8), ROOM)
    with torch.device("meta"):
        assert "no values" in stage(Module()).why_not(description, (2, 8), ROOM)

"""The heap is given what the limit leaves, and never so much that a process could exceed it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_osdp import keeping
from lightning_osdp.keeping import FIRST_BATCHES, MARGIN, STEP_BYTES, Keeping
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.plan import ExecutionPlan
from tests.models import hand_made_plan

CPU, MIB = torch.device("cpu"), 1 << 20
LIMIT, RESTING = 1000 * MIB, 400 * MIB


@dataclass
class Machine:
    """A process that holds ``live`` bytes at its peak, and a share of a heap's room on top: what it wastes."""

    live: int
    waste: float = 0.3
    room: int = 0
    told: list[int | None] = field(default_factory=list)

    def keep(self, most_bytes: int | None = None) -> None:
        assert most_bytes is not None
        self.room = most_bytes
        self.told.append(most_bytes)

    def hand_back(self) -> None:
        self.room = 0
        self.told.append(None)

    @property
    def peak(self) -> int:
        in_heap = min(self.room, round((self.live - RESTING) * (1 + self.waste)))
        return self.live + round(in_heap * self.waste / (1 + self.waste))


def plan(keep_heap: bool = True, spare: int = 0) -> ExecutionPlan:
    made = hand_made_plan({"one": Mode.DP}, 2)
    predicted = made.predicted.model_copy(update={"heap_spare_bytes": spare})
    update = {"memory_limit_bytes": LIMIT, "keep_heap": keep_heap, "predicted": predicted}
    return made.model_copy(update=update)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "HEAP", machine)
    monkeypatch.setattr(keeping, "peak_memory", lambda device: machine.peak)
    monkeypatch.setattr(keeping, "memory_in_use", lambda device: RESTING)


def step(kept: Keeping, passes: int = 1, optimizers: int = 1) -> None:
    for _ in range(passes):
        kept.begin()
    for _ in range(optimizers):
        kept.end()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(live=st.integers(500, 979), waste=st.floats(0.0, 1.0), passes=st.integers(1, 3), optimizers=st.integers(1, 2))
def test_no_step_takes_more_than_the_limit(
    live: int, waste: float, passes: int, optimizers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(live * MIB, waste)
    on(machine, monkeypatch)
    kept = Keeping(plan(), CPU)
    for index in range(400):
        step(kept, passes, optimizers)
        assert machine.peak <= (1 - MARGIN) * LIMIT
        if index < FIRST_BATCHES:
            assert not machine.told
    wanted = (machine.live - RESTING) * (1 + waste)  # all that is freed, or all that there is
    assert machine.room >= wanted - 1 or machine.peak > (1 - MARGIN) * LIMIT - 2 * STEP_BYTES
    assert None not in machine.told
    changes = len(machine.told)
    step(kept)
    assert len(machine.told) == changes  # it comes to rest


def test_what_the_plan_leaves_free_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, spare = Machine(800 * MIB), 100 * MIB
    on(machine, monkeypatch)
    kept = Keeping(plan(spare=spare), CPU)
    for _ in range(50):
        step(kept)
    before = machine.room
    assert before > 0
    assert machine.peak <= (1 - MARGIN) * LIMIT - spare
    machine.live += 100 * MIB  # a large tensor that finds no room
    step(kept)
    assert machine.peak <= (1 - MARGIN) * LIMIT
    step(kept)
    assert machine.room == before


def test_a_step_that_takes_more_gives_the_heap_less(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(700 * MIB)
    on(machine, monkeypatch)
    kept = Keeping(plan(), CPU)
    for _ in range(10):
        step(kept)
    before, machine.live = machine.room, 960 * MIB
    step(kept)
    assert machine.told[-1] is None  # handed back at once
    for _ in range(10):
        step(kept)
    assert 0 < machine.room < before
    assert machine.peak <= (1 - MARGIN) * LIMIT


def test_beside_steps_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(700 * MIB)
    on(machine, monkeypatch)
    kept = Keeping(plan(), CPU)
    kept.pause()
    for _ in range(10):
        step(kept)
    room = machine.room
    kept.pause()
    assert machine.room == 0
    kept.pause()
    assert machine.told.count(None) == 1
    step(kept)
    assert machine.room == room


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_where_the_plan_says_so_and_on_a_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(700 * MIB)
    on(machine, monkeypatch)
    kept = Keeping(plan(keep_heap=device == "cuda"), torch.device(device))
    for _ in range(10):
        step(kept)
    kept.pause()
    assert not machine.told

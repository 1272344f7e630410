"""The heap is given what the limit leaves, and never so much that a process could exceed it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_osdp.backend.cpu import heap_controller
from lightning_osdp.backend.cpu.heap_controller import MIN_ADJUSTMENT_BYTES, WARMUP_STEPS, HeapController
from lightning_osdp.planning.cost.cpu_effects import HEAP_GROWTH, HEAP_LIMIT_MARGIN
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import hand_made_plan

CPU, MIB = torch.device("cpu"), 1 << 20
LIMIT, RESTING = 1000 * MIB, 400 * MIB


@dataclass
class Machine:
    """A process that holds ``live`` bytes at its peak, and a share of a heap's room on top: what it wastes."""

    live: int
    waste: float = 0.3
    room: int = 0
    told: list[int | None] = field(default_factory=list)

    def retain(self, max_bytes: int | None = None) -> None:
        assert max_bytes is not None
        self.room = max_bytes
        self.told.append(max_bytes)

    def release(self) -> None:
        self.room = 0
        self.told.append(None)

    @property
    def in_heap(self) -> int:
        return min(self.room, round((self.live - RESTING) * (1 + self.waste)))

    @property
    def peak(self) -> int:
        return self.live + round(self.in_heap * self.waste / (1 + self.waste))


def make_plan(retains: bool = True, spare: int = 0, peak: int = LIMIT) -> ExecutionPlan:
    made = hand_made_plan({"one": Mode.DP}, 2)
    predicted = made.predicted.model_copy(update={"heap_headroom_bytes": spare, "peak_memory_bytes": peak})
    update = {"memory_limit_bytes": LIMIT, "retain_freed_memory": retains, "predicted": predicted}
    return made.model_copy(update=update)


def patch_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_controller, "HEAP", machine)
    monkeypatch.setattr(heap_controller, "peak_resident_bytes", lambda: machine.peak)
    monkeypatch.setattr(heap_controller, "resident_bytes", lambda: RESTING + machine.in_heap)


def run_step(kept: HeapController, passes: int = 1, optimizers: int = 1) -> None:
    for _ in range(passes):
        kept.on_step_start()
    for _ in range(optimizers):
        kept.on_step_end()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(live=st.integers(500, 979), waste=st.floats(0.0, 1.0), passes=st.integers(1, 3), optimizers=st.integers(1, 2))
def test_heap_controller_keeps_every_step_within_limit(
    live: int, waste: float, passes: int, optimizers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(live * MIB, waste)
    patch_machine(machine, monkeypatch)
    kept = HeapController(make_plan(), CPU)
    for index in range(400):
        run_step(kept, passes, optimizers)
        assert machine.peak <= (1 - HEAP_LIMIT_MARGIN) * LIMIT
        if index < WARMUP_STEPS:
            assert not machine.told
    wanted = (machine.live - RESTING) * (1 + waste)  # all that is freed, or all that there is
    assert machine.room >= wanted - 1 or machine.peak > (1 - HEAP_LIMIT_MARGIN) * LIMIT - 2 * MIN_ADJUSTMENT_BYTES
    assert None not in machine.told
    changes = len(machine.told)
    run_step(kept)
    assert len(machine.told) == changes  # it comes to rest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    live=st.integers(500, 900), waste=st.floats(0.0, 1.0), spare=st.integers(0, 100), predicted=st.integers(450, 1000)
)
def test_heap_controller_keeps_predicted_peak_or_what_was_planned_beyond_the_step(
    live: int, waste: float, spare: int, predicted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(live * MIB, waste)
    patch_machine(machine, monkeypatch)
    kept = HeapController(make_plan(spare=spare * MIB, peak=predicted * MIB), CPU)
    planned = machine.live + HEAP_GROWTH * (machine.live - RESTING) + spare * MIB
    for _ in range(50):
        run_step(kept)
        assert machine.peak <= max(predicted * MIB, planned)


@pytest.mark.parametrize("each_step", [1, 3, 10])
def test_heap_controller_counts_what_steps_have_not_touched_yet_of_the_heap(
    each_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the heap stays; the rest of a step gets mappings of its own."""
    machine, bound, spare, touched = Machine(600 * MIB), 700 * MIB, 40 * MIB, 0
    patch_machine(machine, monkeypatch)
    monkeypatch.setattr(heap_controller, "resident_bytes", lambda: RESTING + touched)
    monkeypatch.setattr(heap_controller, "peak_resident_bytes", lambda: RESTING + max(touched + spare, 200 * MIB))
    controller = HeapController(make_plan(spare=spare, peak=bound), CPU)
    for _ in range(300):
        controller.on_step_start()
        touched = min(machine.room, touched + each_step * MIB)
        controller.on_step_end()
        assert RESTING + max(touched + spare, 200 * MIB) <= bound
    assert touched >= 200 * MIB


def test_heap_that_is_shrunk_to_nothing_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(600 * MIB)
    patch_machine(machine, monkeypatch)
    controller = HeapController(make_plan(peak=700 * MIB), CPU)
    for _ in range(10):
        run_step(controller)
    assert machine.room
    machine.live = 900 * MIB  # within the limit, but not within what was planned
    for _ in range(30):
        run_step(controller)
    assert not machine.room
    assert machine.told[-1] is None


def test_heap_controller_leaves_planned_spare_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, spare = Machine(800 * MIB), 100 * MIB
    patch_machine(machine, monkeypatch)
    kept = HeapController(make_plan(spare=spare), CPU)
    for _ in range(50):
        run_step(kept)
    before = machine.room
    assert before > 0
    assert machine.peak <= (1 - HEAP_LIMIT_MARGIN) * LIMIT - spare
    machine.live += 100 * MIB  # a large tensor that finds no room
    run_step(kept)
    assert machine.peak <= (1 - HEAP_LIMIT_MARGIN) * LIMIT
    run_step(kept)
    assert machine.room == before


def test_heap_controller_shrinks_heap_when_step_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(700 * MIB)
    patch_machine(machine, monkeypatch)
    kept = HeapController(make_plan(), CPU)
    for _ in range(10):
        run_step(kept)
    before, machine.live = machine.room, 960 * MIB
    run_step(kept)
    assert machine.told[-1] is None  # handed back at once
    for _ in range(10):
        run_step(kept)
    assert 0 < machine.room < before
    assert machine.peak <= (1 - HEAP_LIMIT_MARGIN) * LIMIT


def test_heap_controller_release_frees_heap_until_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(700 * MIB)
    patch_machine(machine, monkeypatch)
    kept = HeapController(make_plan(), CPU)
    kept.release()
    for _ in range(10):
        run_step(kept)
    room = machine.room
    kept.release()
    assert machine.room == 0
    kept.release()
    assert machine.told.count(None) == 1
    run_step(kept)
    assert machine.room == room


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heap_controller_is_inactive_on_cuda_or_without_retention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(700 * MIB)
    patch_machine(machine, monkeypatch)
    kept = HeapController(make_plan(retains=device == "cuda"), torch.device(device))
    for _ in range(10):
        run_step(kept)
    kept.release()
    assert not machine.told

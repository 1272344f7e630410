"""Bytes in flight on CUDA: what the timeline counts beside what the engine's own bounds let through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.backend.streams import GatherMemory, ReductionMemory
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    Moment,
    NonTrainingWork,
    Operator,
    ParameterInfo,
)
from tests.support.models import some_cluster

MIB, RANKS = 1 << 20, 2
CUDA = some_cluster(RANKS, device="cuda: some", backend="nccl", reduce_scatter_copy_factor=0.0)


def chain(sizes: Sequence[int], slices: int = 1) -> ModelProfile:
    """Operators of so many MiB, one after the other, and a loss that belongs to none."""
    operators = tuple(
        Operator(
            name=f"op{at}",
            kind="Linear",
            parameters=(ParameterInfo(name=f"op{at}.weight", shape=(size * slices, MIB // 4 // slices)),),
        )
        for at, size in enumerate(sizes)
    )
    nothing = LinearInBatch()
    forward = tuple(Moment(phase="forward", operator=at, live=nothing) for at in range(len(sizes)))
    backward = tuple(Moment(phase="backward", operator=at, live=nothing) for at in reversed(range(len(sizes))))
    loss = Moment(phase="forward", operator=UNATTRIBUTED, live=nothing)
    return ModelProfile(fingerprint="", operators=operators, moments=(*forward, loss, *backward), batch_size=1)


def curves(sizes: Sequence[int], mode: Mode, slices: int = 1) -> dict[str, list[float]]:
    choice = ShardingChoice((mode,) * slices, 0 if slices > 1 else None)
    found = Timeline(chain(sizes, slices), CUDA, 0).curves([choice] * len(sizes), 1)
    return {name: (curve / MIB).tolist() for name, curve in found.items()}


def test_timeline_on_cuda_counts_used_parameters_until_others_take_their_place() -> None:
    """The bound is 4 MiB: a larger unit, and all before it, is freed when it has been used."""
    assert curves([4, 8], Mode.ZDP)["gathered"] == [4, 4 + 8, 0, 8, 4, 0]
    assert curves([4, 4, 4], Mode.ZDP)["gathered"] == [4, 8, 8, 4, 4, 8, 8, 0]
    assert curves([4], Mode.ZDP)["gathered"] == [4, 0, 4, 0]
    assert curves([4, 8], Mode.ZDP2)["gathered"] == [4, 12, 12, 12, 4, 0]


def test_timeline_on_cuda_counts_gradients_that_are_being_reduced() -> None:
    """Beside each gradient and its part, the one before it, or as many as the second largest unit has."""
    for mode in (Mode.ZDP, Mode.ZDP2):
        assert curves([4, 8], mode)["transient"] == [0, 0, 0, 8 + 4, 8 + 4 + 2, 0]
        assert curves([4, 4, 4], mode)["transient"] == [0, 0, 0, 0, 4 + 2, 4 + 4 + 2, 4 + 4 + 2, 0]
        assert curves([2, 2, 2, 6, 4], mode)["transient"][-6:] == [6, 4 + 9, 6 + 3, 2 + 3, 4 + 3, 0]


def test_timeline_on_cuda_counts_slices_in_flight_of_one_operator() -> None:
    """A slice of 2 MiB beside the one before it, and at last those of the other operator."""
    found = curves([8, 8], Mode.ZDP, slices=4)
    assert found["gathered"] == [2 + 2, 2 + 2, 2, 2 + 2, 2 + 2, 0]
    assert found["transient"][3:5] == [
        2 + 4 + 2,
        2 + 4 + 2 + 4,
    ]  # with the parts of all slices, and at last the weight they go to


def test_evaluation_on_cuda_counts_the_units_in_flight() -> None:
    model = chain([4, 8])
    between = NonTrainingWork(evaluation_batch_size=1)
    model = model.model_copy(update={"evaluation": tuple(m for m in model.moments if m.phase == "forward")})
    peak = Timeline(model, CUDA, 0, between).peak([ShardingChoice((Mode.ZDP,))] * 2, 1)
    assert peak.evaluation_bytes == (12 / RANKS + 8 + 4) * MIB


class Stream:
    """A stream far behind the host: it only says what it waits for."""

    def wait_event(self, event: Any) -> None:
        pass


class Event:
    def record(self, stream: Any) -> None:
        pass


def simulate(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Gathered bytes, and those of gradients, as the engine's bounds let them be at each moment of a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", Stream)
        gathers, reductions = GatherMemory(Stream()), ReductionMemory(Stream())
        units = [torch.UntypedStorage(0) for _ in sizes]
        for size in sizes:
            gathers.add_unit(size)
            reductions.add_unit(size)
        gathered, gradients = [], []

        def run(at: int) -> None:
            gathers.take_back(units[at])
            units[at].resize_(sizes[at])
            gathered.append(sum(unit.nbytes() for unit in units))
            gathers.free(units[at])

        for at in range(len(sizes)):
            run(at)
        gathered.append(sum(unit.nbytes() for unit in units))
        for at in reversed(range(len(sizes))):
            run(at)
            gradients.append(reductions._num_bytes + sizes[at])
            reductions.before_reduction(sizes[at])
            reductions.retain([torch.empty(sizes[at], dtype=torch.uint8)])
    return gathered, gradients


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_timeline_on_cuda_is_never_below_what_is_in_flight_and_above_by_one_bound_at_most(sizes: list[int]) -> None:
    gathered, gradients = simulate(sizes)
    found = curves(sizes, Mode.ZDP)
    bound = sorted([0, *sizes])[-2]
    predicted = np.array(found["gathered"][:-1])
    assert (predicted >= gathered).all(), (predicted, gathered)
    assert predicted.max() <= max(gathered) + bound
    own_parts = np.array(sizes[::-1]) / RANKS
    predicted = np.array(found["transient"][len(sizes) + 1 : -1]) - own_parts
    assert (predicted >= np.array(gradients) - 1e-9).all(), (predicted, gradients)
    assert predicted.max() <= max(gradients) + bound
    assert found["gathered"][-1] == found["transient"][-1] == 0  # the optimizer's step


@given(size=st.integers(1, 12), count=st.integers(1, 9))
def test_timeline_on_cuda_is_exact_where_all_units_are_alike(size: int, count: int) -> None:
    gathered, gradients = simulate([size] * count)
    found = curves([size] * count, Mode.ZDP)
    assert found["gathered"][:-1] == gathered
    assert found["transient"][count + 1 : -1] == [each + size / RANKS for each in gradients]

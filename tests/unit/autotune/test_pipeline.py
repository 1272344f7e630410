"""What ranks read of the step: the first one alone where the step is known, each where it is not."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.autotune import pipeline
from lightning_osdp.autotune.measure import RankGroup
from lightning_osdp.errors import OSDPWarning, TraceError
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, ModelProfile
from lightning_osdp.profiling import compute
from tests.support.ranks import run_ranks
from tests.support.traced_models import Regression

CPU = torch.device("cpu")
BATCH = torch.ones(4, 8)


class Counted(Regression):
    """Counts how often its step is run, on fake tensors."""

    runs = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        type(self).runs += 1
        return super().training_step(batch, batch_idx)


def profile_once(folder: Path, width: int) -> tuple[int, str, ModelProfile]:
    """How often the step was run for that, the name that it was known by and what it is."""
    Counted.runs = 0
    module = Counted(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)))
    read = partial(pipeline.profile_model, module, BATCH, 4, CPU, nullcontext, NO_NON_TRAINING_WORK, folder)
    traced = pipeline.profile_model_on_ranks(RankGroup(dist.group.WORLD, 1, CPU), module, folder, read)
    runs = Counted.runs
    compute.warm_up(traced, CPU)  # reads it now where that has not been necessary
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
    read = partial(pipeline.profile_model, module, BATCH, 4, CPU, nullcontext, NO_NON_TRAINING_WORK, Path(folder))
    with pytest.warns(OSDPWarning), pytest.raises(TraceError) as error:
        pipeline.profile_model_on_ranks(RankGroup(dist.group.WORLD, 1, CPU), module, Path(folder), read)
    return str(error.value)


def test_profile_model_on_ranks_of_lazy_module_raises_trace_error(tmp_path: Path) -> None:
    for message in run_ranks(catch_lazy_module_error, 2, str(tmp_path)):
        assert "uninitialized parameter" in message


def test_profile_model_on_ranks_traces_on_ranks_without_cached_step(tmp_path: Path) -> None:
    assert run_ranks(profile_with_empty_second_cache, 2, str(tmp_path)) == [[2, 1], [2, 2]]

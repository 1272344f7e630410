"""What ranks read of the step: the first one alone where the step is known, each where it is not."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp import planner
from lightning_osdp.errors import OSDPWarning, TraceError
from lightning_osdp.measurements import Ranks
from lightning_osdp.planning.operators import NOTHING_BETWEEN, ModelDescription
from lightning_osdp.profiling import compute
from tests.profiling.models import Regression
from tests.ranks import run_ranks

CPU = torch.device("cpu")
BATCH = torch.ones(4, 8)


class Counted(Regression):
    """Counts how often its step is run, on fake tensors."""

    runs = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        type(self).runs += 1
        return super().training_step(batch, batch_idx)


def start(folder: Path, width: int) -> tuple[int, str, ModelDescription]:
    """How often the step was run for that, the name that it was known by and what it is."""
    Counted.runs = 0
    module = Counted(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)))
    read = partial(planner.describe, module, BATCH, 4, CPU, nullcontext, NOTHING_BETWEEN, folder)
    traced = planner.describe_together(Ranks(dist.group.WORLD, 1, CPU), module, folder, read)
    runs = Counted.runs
    compute.warm_up(traced, CPU)  # reads it now where that has not been necessary
    return runs, traced.name, traced.description


def three_starts(rank: int, world_size: int, folder: str) -> list[tuple[int, str, ModelDescription]]:
    """A disk for each rank: on one, the slower rank of the first start may find what the other has just read."""
    return [start(Path(folder, str(rank)), width) for width in (8, 8, 16)]


def with_an_empty_disk(rank: int, world_size: int, folder: str) -> list[int]:
    """The second start finds the step on the first rank's disk alone."""
    own = Path(folder, str(rank))
    return [start(own, 8)[0], start(own if rank == 0 else Path(folder, "empty"), 8)[0]]


def test_the_first_rank_alone_reads_a_step_that_is_known(tmp_path: Path) -> None:
    first, other = run_ranks(three_starts, 2, str(tmp_path))
    assert [runs for runs, _, _ in first] == [2, 1, 2]
    assert [runs for runs, _, _ in other] == [2, 0, 2]
    assert [each[1:] for each in first] == [each[1:] for each in other]
    assert [bool(name) for _, name, _ in first] == [False, True, False]
    assert first[1][2] == first[0][2] != first[2][2]


def of_a_lazy_module(rank: int, world_size: int, folder: str) -> str:
    module = Regression(nn.Sequential(nn.LazyLinear(8)))
    read = partial(planner.describe, module, BATCH, 4, CPU, nullcontext, NOTHING_BETWEEN, Path(folder))
    with pytest.warns(OSDPWarning), pytest.raises(TraceError) as error:
        planner.describe_together(Ranks(dist.group.WORLD, 1, CPU), module, Path(folder), read)
    return str(error.value)


def test_a_lazy_module_is_refused_clearly(tmp_path: Path) -> None:
    for message in run_ranks(of_a_lazy_module, 2, str(tmp_path)):
        assert "uninitialized parameter" in message


def test_ranks_read_what_their_own_disk_does_not_know(tmp_path: Path) -> None:
    assert run_ranks(with_an_empty_disk, 2, str(tmp_path)) == [[2, 1], [2, 2]]

"""The test harness itself: what it returns, what it raises, and that nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from tests.support.ranks import RankError, run_ranks


def all_reduce_total(rank: int, world_size: int, factor: float) -> torch.Tensor:
    tensor = torch.full((3,), factor * (rank + 1))
    dist.all_reduce(tensor)
    return tensor


def one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def one_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def one_hangs(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def detect_torchrun(rank: int, world_size: int) -> tuple[bool, int, int]:
    environment = TorchElasticEnvironment()
    return TorchElasticEnvironment.detect(), environment.global_rank(), environment.world_size()


def test_run_ranks_returns_results_in_rank_order():
    results = run_ranks(all_reduce_total, 2, 2.0)
    assert [result.tolist() for result in results] == [[6.0] * 3] * 2


def test_run_ranks_sets_torchrun_environment():
    assert run_ranks(detect_torchrun, 2) == [(True, 0, 2), (True, 1, 2)]


@pytest.mark.parametrize(
    ("fn", "timeout_s", "message"),
    [
        (one_raises, 60.0, "(?s)rank 1 .*ValueError: rank one is unwell"),
        (one_dies, 60.0, r"rank 1 \(exit code 3\):\ndied without a result"),
        (one_hangs, 12.0, r"ranks \[0.*\] were not done after 12 s"),
    ],
)
def test_run_ranks_failure_names_rank_and_leaves_no_process(fn, timeout_s, message):
    with pytest.raises(RankError, match=message):
        run_ranks(fn, 2, timeout_s=timeout_s)
    assert multiprocessing.active_children() == []

"""A single process is a group of one rank, whose collectives give back what they are given."""

from __future__ import annotations

import pytest
import torch

from lightning_osdp.autotune.ranks import NO_LINK, RankGroup, current_cluster, ranks_sharing_memory_limit

ALONE = RankGroup.single(torch.device("cpu"))


def test_single_rank_group_communicates_with_itself() -> None:
    assert (ALONE.world_size, ALONE.rank, ALONE.is_rank_zero, ALONE.is_hierarchical) == (1, 0, True, False)
    assert ALONE.all_reduce_max([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.all_reduce_min(-3) == -3
    assert ALONE.broadcast_object("plan") == "plan"
    assert ALONE.all_gather_object("plan") == ["plan"]
    assert ranks_sharing_memory_limit(ALONE) == 1
    ALONE.barrier()


def test_single_rank_group_raises_own_error() -> None:
    assert ALONE.raise_on_all_ranks(lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        ALONE.raise_on_all_ranks(lambda: 1 // 0)


def test_current_cluster_of_single_rank_has_one_device() -> None:
    cluster = current_cluster(ALONE)
    assert (cluster.ranks, cluster.device, cluster.backend, cluster.link) == (1, "cpu", "gloo", NO_LINK)

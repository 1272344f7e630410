"""Two-stage collectives against one-stage ones, on real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.backend.hierarchical import (
    FlatCommunicator,
    HierarchicalCommunicator,
    NodeGroups,
    NodeLayout,
    cached_group_copy,
    cached_node_groups,
    detect_node_layout,
)
from tests.support.ranks import run_ranks
from tests.unit.backend.test_collectives import inputs

PART_SIZES = (1, 1000, 200_003)
"""Elements of one part: by gloo itself, by direct exchange, and by rings."""


def hierarchical_sum(wholes: list[torch.Tensor], nodes: int, rank: int) -> torch.Tensor:
    """The sum of everybody's part number ``rank`` in the documented order."""
    ranks = len(wholes)
    per_node = ranks // nodes
    addends = [whole.chunk(ranks)[rank] for whole in wholes]
    node, place = divmod(rank, per_node)
    total = None
    for hop in range(1, nodes + 1):
        first = (node + hop) % nodes * per_node
        order = [first + (place + 1 + step) % per_node for step in range(per_node)]
        of_node = addends[order[0]].clone()
        for one in order[1:]:
            of_node += addends[one]
        total = of_node if total is None else total + of_node
    assert total is not None
    return total


def check_hierarchical_collectives(rank: int, world_size: int, nodes: int, sizes: tuple[int, ...]) -> list[str]:
    """Names of the checks that failed on this rank."""
    levels = NodeGroups.create(dist.group.WORLD, nodes)
    one, two, failed = FlatCommunicator(levels.world), HierarchicalCommunicator(levels), []

    def check(name: str, succeeded: bool) -> None:
        if not succeeded:
            failed.append(f"{name} on rank {rank}")

    check("places", (two.rank(), two.size()) == (rank, world_size))
    check("node", levels.intra_node.rank() == rank % levels.ranks_per_node and levels.nodes == nodes)
    check("across", levels.inter_node.rank() == rank // levels.ranks_per_node)
    for dtype in (torch.float32, torch.bfloat16):
        for size in sizes:
            case = f"{size} {dtype}"
            wholes = inputs(world_size, size * world_size, dtype)
            mine = wholes[rank].clone()

            def scattered(by: FlatCommunicator | HierarchicalCommunicator, whole: torch.Tensor) -> torch.Tensor:
                part = torch.full((whole.numel() // world_size,), torch.nan, dtype=whole.dtype)
                by.reduce_scatter(part, whole)
                return part

            part = scattered(two, mine)
            check(f"documented order {case}", torch.equal(part, hierarchical_sum(wholes, nodes, rank)))
            check(f"input unchanged {case}", torch.equal(mine, wholes[rank]))
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            near = torch.allclose(part, scattered(one, mine), rtol=0, atol=tolerance * float(part.abs().max()))
            check(f"one stage, rounding apart {case}", near)
            exact = (torch.arange(mine.numel()) % 7 + rank).to(dtype)  # small integers: sums are exact
            check(f"one stage, to the bit {case}", torch.equal(scattered(two, exact), scattered(one, exact)))

            for in_place in (False, True):
                gathered = [torch.full((size * world_size,), torch.nan, dtype=dtype) for _ in range(2)]
                for by, output in zip((one, two), gathered, strict=True):
                    shard = output.chunk(world_size)[rank].copy_(part) if in_place else part
                    by.all_gather(output, shard)
                check(f"gather, in place {in_place}, {case}", torch.equal(*gathered))
    return failed


LAYOUTS = {"even": [0, 0, 0, 1, 1, 1], "uneven": [0, 0, 1, 1, 1, 1], "cyclic": [0, 1, 0, 1, 0, 1]}
"""Which node each of six ranks is on."""


def run_all(rank: int, world_size: int) -> tuple[dict[int, list[str]], dict[str, NodeLayout]]:
    """Failed checks by number of nodes: one rank each, several of several ranks, all ranks on one. Sizes of nodes."""
    failed = {nodes: check_hierarchical_collectives(rank, world_size, nodes, PART_SIZES) for nodes in (2, 3)}
    failed |= {nodes: check_hierarchical_collectives(rank, world_size, nodes, PART_SIZES[:2]) for nodes in (1, 6)}
    return failed, {name: detect_node_layout(dist.group.WORLD, nodes[rank]) for name, nodes in LAYOUTS.items()}


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[int, list[str]], dict[str, NodeLayout]]]:
    return run_ranks(run_all, 6)


def test_hierarchical_communicator_matches_flat_communicator(results):
    assert [failed for failed, _ in results] == [{2: [], 3: [], 1: [], 6: []}] * 6


def test_detect_node_layout_counts_nodes_in_rank_order(results):
    expected = {"even": ((3, 3), True), "uneven": ((2, 4), False), "cyclic": ((1, 1, 1, 1, 1, 1), False)}
    assert [layouts for _, layouts in results] == [expected] * 6


def create_groups_twice(rank: int, world_size: int) -> tuple[bool, bool, bool, bool]:
    world = dist.group.WORLD
    one, again, other = (cached_group_copy(world, purpose) for purpose in ("replicas", "replicas", "reductions"))
    levels = cached_node_groups(world, 2, "gathers")
    known = cached_node_groups(world, 2, "gathers") is levels
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    anew = cached_group_copy(dist.group.WORLD, "replicas")
    return one is again, one is not other and one is not world, known, anew is not one and anew.size() == 1


def test_cached_groups_are_reused_per_purpose_and_recreated_after_destroy() -> None:
    assert run_ranks(create_groups_twice, 2) == [(True, True, True, True)] * 2

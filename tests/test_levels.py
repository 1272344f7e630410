"""Two-stage collectives against one-stage ones, on real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.levels import (
    Levels,
    NodeLayout,
    OneStage,
    TwoStage,
    duplicate,
    lasting_levels,
    node_layout,
)
from tests.ranks import run_ranks
from tests.test_collectives import inputs

PART_SIZES = (1, 1000, 200_003)
"""Elements of one part: by gloo itself, by direct exchange, and by rings."""


def two_level_sum(wholes: list[torch.Tensor], nodes: int, rank: int) -> torch.Tensor:
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


def exercise(rank: int, world_size: int, nodes: int, sizes: tuple[int, ...]) -> list[str]:
    """Names of the checks that failed on this rank."""
    levels = Levels.of(dist.group.WORLD, nodes)
    one, two, failed = OneStage(levels.world), TwoStage(levels), []

    def check(name: str, succeeded: bool) -> None:
        if not succeeded:
            failed.append(f"{name} on rank {rank}")

    check("places", (two.rank(), two.size()) == (rank, world_size))
    check("node", levels.node.rank() == rank % levels.per_node and levels.nodes == nodes)
    check("across", levels.across.rank() == rank // levels.per_node)
    for dtype in (torch.float32, torch.bfloat16):
        for size in sizes:
            case = f"{size} {dtype}"
            wholes = inputs(world_size, size * world_size, dtype)
            mine = wholes[rank].clone()

            def scattered(by: OneStage | TwoStage, whole: torch.Tensor) -> torch.Tensor:
                part = torch.full((whole.numel() // world_size,), torch.nan, dtype=whole.dtype)
                by.reduce_scatter(part, whole)
                return part

            part = scattered(two, mine)
            check(f"documented order {case}", torch.equal(part, two_level_sum(wholes, nodes, rank)))
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


def everything(rank: int, world_size: int) -> tuple[dict[int, list[str]], dict[str, NodeLayout]]:
    """Failed checks by number of nodes: one rank each, several of several ranks, all ranks on one. Sizes of nodes."""
    failed = {nodes: exercise(rank, world_size, nodes, PART_SIZES) for nodes in (2, 3)}
    failed |= {nodes: exercise(rank, world_size, nodes, PART_SIZES[:2]) for nodes in (1, 6)}
    return failed, {name: node_layout(dist.group.WORLD, nodes[rank]) for name, nodes in LAYOUTS.items()}


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[int, list[str]], dict[str, NodeLayout]]]:
    return run_ranks(everything, 6)


def test_two_stages_give_what_one_stage_gives(results):
    assert [failed for failed, _ in results] == [{2: [], 3: [], 1: [], 6: []}] * 6


def test_nodes_are_counted_in_the_order_of_ranks(results):
    expected = {"even": ((3, 3), True), "uneven": ((2, 4), False), "cyclic": ((1, 1, 1, 1, 1, 1), False)}
    assert [layouts for _, layouts in results] == [expected] * 6


def groups_made(rank: int, world_size: int) -> tuple[bool, bool, bool, bool]:
    world = dist.group.WORLD
    one, again, other = (duplicate(world, purpose) for purpose in ("replicas", "replicas", "reductions"))
    levels = lasting_levels(world, 2, "gathers")
    known = lasting_levels(world, 2, "gathers") is levels
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    anew = duplicate(dist.group.WORLD, "replicas")
    return one is again, one is not other and one is not world, known, anew is not one and anew.size() == 1


def test_a_group_is_made_once_for_each_purpose_and_anew_after_the_process_group_has_ended() -> None:
    assert run_ranks(groups_made, 2) == [(True, True, True, True)] * 2

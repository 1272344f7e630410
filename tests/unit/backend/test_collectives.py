"""Collectives against plain sums and concatenations, on real process groups."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.backend import agree, collectives
from tests.support.ranks import run_ranks

PART_SIZES = (1, 1000, 70_001, 1_600_000)
"""Elements of one part: one message, several pieces, and several rounds of pieces; in rounds of 2 x 2 MiB."""


def inputs(world_size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank holds: values of very different size, so that the order of a sum shows in its last bits."""
    generator = torch.Generator().manual_seed(numel)
    return [(torch.randn(numel, generator=generator) * 10.0 ** (rank - 1)).to(dtype) for rank in range(world_size)]


def ring_sum(wholes: list[torch.Tensor], part: int) -> torch.Tensor:
    """The sum of everybody's part number ``part`` in the documented order: part + 1, part + 2, ..., part."""
    ranks = len(wholes)
    addends = [wholes[(part + 1 + step) % ranks].chunk(ranks)[part] for step in range(ranks)]
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


def check_collectives(rank: int, world_size: int) -> list[str]:
    """Names of the checks that failed on this rank."""
    group, failed = dist.group.WORLD, []

    def check(name: str, succeeded: bool) -> None:
        if not succeeded:
            failed.append(f"{name} on rank {rank}")

    for sizes in ((3, 1, 1000), (70_001, 5, 600_000), (1, 1)):
        exact = [ring_sum(inputs(world_size, size * world_size, torch.float32), rank) for size in sizes]
        outputs = [torch.full((size * world_size,), torch.nan) for size in sizes]
        collectives.all_gather_coalesced(outputs, exact, group)
        for size, output in zip(sizes, outputs, strict=True):
            wholes = inputs(world_size, size * world_size, torch.float32)
            expected = torch.cat([ring_sum(wholes, p) for p in range(world_size)])
            check(f"all_gather together {sizes}", torch.equal(output, expected))

    nothing = torch.empty(0)  # as rows of no elements are
    collectives.reduce_scatter(nothing, torch.empty(0), group)
    collectives.all_gather(torch.empty(0), nothing, group)

    for dtype in (torch.float32, torch.bfloat16):
        for size in PART_SIZES:
            case = f"{size} {dtype}"
            wholes = inputs(world_size, size * world_size, dtype)
            mine = wholes[rank].clone()
            part = torch.full((size,), torch.nan, dtype=dtype)
            collectives.reduce_scatter(part, mine, group)
            check(f"reduce_scatter {case}", torch.equal(part, ring_sum(wholes, rank)))
            check(f"reduce_scatter leaves its input {case}", torch.equal(mine, wholes[rank]))

            gathered = torch.full((size * world_size,), torch.nan, dtype=dtype)
            collectives.all_gather(gathered, part, group)
            expected = torch.cat([ring_sum(wholes, p) for p in range(world_size)])
            check(f"all_gather {case}", torch.equal(gathered, expected))

            in_place = torch.full((size * world_size,), torch.nan, dtype=dtype)
            own = in_place.chunk(world_size)[rank]
            own.copy_(part)
            collectives.all_gather(in_place, own, group)
            check(f"all_gather in place {case}", torch.equal(in_place, expected))

            mean = wholes[rank].clone()
            collectives.all_reduce_mean(mean, group)
            exact = torch.stack([w.double() for w in wholes]).sum(0) / world_size
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype] * exact.abs().max().item()
            check(f"all_reduce_mean {case}", torch.allclose(mean.double(), exact, rtol=0, atol=tolerance))
    return failed


def check_async_collectives(rank: int, world_size: int) -> list[str]:
    """Names of the checks that failed on this rank: gathers and reduce-scatters under way at the same time."""
    group, failed = dist.group.WORLD, []
    for dtype in (torch.float32, torch.bfloat16):
        wholes = [inputs(world_size, size * world_size, dtype) for size in PART_SIZES]
        parts = [torch.full((size,), torch.nan, dtype=dtype) for size in PART_SIZES]
        reducing = [
            collectives.reduce_scatter_async([part], [whole[rank]], group)
            for part, whole in zip(parts, wholes, strict=True)
        ]
        shards = [whole[rank].chunk(world_size)[rank].clone() for whole in wholes]
        outputs = [torch.full((size * world_size,), torch.nan, dtype=dtype) for size in PART_SIZES]
        gathering = collectives.all_gather_async(outputs, shards, group)
        in_between = torch.empty(1000 * world_size)
        collectives.all_gather(in_between, torch.full((1000,), float(rank)), group)
        gathering.wait()
        for size, output, whole, part, work in zip(PART_SIZES, outputs, wholes, parts, reducing, strict=True):
            work.wait()
            if not torch.equal(part, ring_sum(whole, rank)):
                failed.append(f"reduce_scatter {size} {dtype} on rank {rank}")
            if not torch.equal(output, torch.cat([each.chunk(world_size)[r] for r, each in enumerate(whole)])):
                failed.append(f"all_gather {size} {dtype} on rank {rank}")
        together = [torch.full((size,), torch.nan, dtype=dtype) for size in PART_SIZES]
        collectives.reduce_scatter_coalesced(together, [whole[rank] for whole in wholes], group)
        if not all(torch.equal(*pair) for pair in zip(together, parts, strict=True)):
            failed.append(f"reduce_scatter_together {dtype} on rank {rank}")
        if in_between.view(world_size, -1).mean(1).tolist() != list(map(float, range(world_size))):
            failed.append(f"what came in between on rank {rank}")
    return failed


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_async_collectives_give_bitwise_equal_results(world_size: int) -> None:
    assert run_ranks(check_async_collectives, world_size) == [[]] * world_size


def overlap_all_reduces_with_ring(rank: int, world_size: int) -> tuple[float, float, float]:
    """Two all-reduces under way while a ring runs on another group, waited for in reverse."""
    group, other = dist.group.WORLD, dist.new_group(list(range(world_size)))
    first, second = torch.full((1000, 3), float(rank)), torch.full((7,), 2.0 * rank)
    works = [collectives.all_reduce_async(first, other), collectives.all_reduce_async(second, other)]
    part = torch.empty(2_000_000)
    collectives.reduce_scatter(part, torch.full((2_000_000 * world_size,), float(rank)), group)
    for work in reversed(works):
        work.wait()
    return first.mean().item(), second.mean().item(), part.mean().item()


def reduce_and_gather_in_subgroup(rank: int, world_size: int) -> list[float]:
    """Ranks within a group are not those of the world: groups {0, 2} and {1, 3}, the latter listed backwards."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    part = torch.empty(1)
    collectives.reduce_scatter(part, torch.tensor([1.0, 10.0]) * (rank + 1), group)
    whole = torch.empty(2)
    collectives.all_gather(whole, part, group)
    return whole.tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_equal_plain_sums_and_concatenations(world_size):
    assert run_ranks(check_collectives, world_size) == [[]] * world_size


def test_collectives_on_one_rank_return_its_input():
    assert run_ranks(check_collectives, 1) == [[]]


def test_all_reduce_async_overlaps_ring_on_other_group():
    assert run_ranks(overlap_all_reduces_with_ring, 2) == [(0.5, 1.0, 1.0)] * 2


def test_collectives_in_subgroup_use_group_ranks():
    assert run_ranks(reduce_and_gather_in_subgroup, 4) == [[4.0, 40.0], [6.0, 60.0], [4.0, 40.0], [6.0, 60.0]]


def gather_mismatched_sizes(rank: int, world_size: int) -> None:
    collectives.all_gather(torch.empty(5), torch.empty(2), dist.group.WORLD)


def test_all_gather_with_mismatched_sizes_raises():
    with pytest.raises(AssertionError, match=r"AssertionError: \(torch.Size\(\[5\]\), torch.Size\(\[2\]\), 2\)"):
        run_ranks(gather_mismatched_sizes, 2)


def test_reduce_scatter_copy_factor_and_buffer_bytes_depend_on_backend():
    assert collectives.reduce_scatter_copy_factor("gloo", 4) == 0.0
    assert collectives.reduce_scatter_copy_factor("gloo", 4, "cuda") == 1.0
    assert (
        collectives.reduce_buffer_bytes("gloo", 4, "cuda")
        == collectives.all_reduce_buffer_bytes("gloo", 4, "cuda")
        == 0
    )
    assert collectives.reduce_scatter_copy_factor("ucc", 1) == 0.0
    assert collectives.reduce_scatter_copy_factor("ucc", 4) == 1.0
    assert collectives.reduce_buffer_bytes("gloo", 2) == 0
    assert collectives.reduce_buffer_bytes("gloo", 3) == 4 << 20
    assert collectives.reduce_buffer_bytes("gloo", 4) == 8 << 20
    assert collectives.all_reduce_buffer_bytes("gloo", 2) == 4 << 20
    assert collectives.all_reduce_buffer_bytes("gloo", 1) == collectives.all_reduce_buffer_bytes("nccl", 4) == 0


def max_times_of_ranks(rank: int, world_size: int) -> list[float]:
    """One time is longest on rank 0, the other on rank 1."""
    return agree.all_reduce_max([3.0 - rank, 1.0 + rank], dist.group.WORLD, torch.device("cpu"))


def test_all_reduce_max_takes_largest_of_each_value():
    assert run_ranks(max_times_of_ranks, 2) == [[3.0, 2.0]] * 2


def min_budgets_of_ranks(rank: int, world_size: int) -> list[float]:
    """The second rank has less; only the first has a bound; neither has."""
    rooms = ((3 - rank, 3 - rank), (5, None), (None, None))
    return [agree.all_reduce_min(each[rank], dist.group.WORLD, torch.device("cpu")) for each in rooms]


def test_all_reduce_min_takes_smallest_bound_of_ranks():
    assert run_ranks(min_budgets_of_ranks, 2) == [[2.0, 5.0, math.inf]] * 2

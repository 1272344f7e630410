from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_osdp.state.flat_layout import FlatPaddedLayout, Slice
from lightning_osdp.state.state_dict import ShardedParameters


def _layouts_by_rank(
    shape: tuple[int, ...], cuts: list[int], sharded: list[bool], dim: int, ranks: int
) -> list[FlatPaddedLayout]:
    """One layout for each rank; the group is any object, since nothing is communicated."""
    edges = [0, *cuts, shape[dim]]
    pairs = list(pairwise(edges))
    return [
        FlatPaddedLayout(
            torch.Size(shape),
            tuple(
                Slice(a, b, ranks, rank, "group") if is_sharded else Slice(a, b)
                for (a, b), is_sharded in zip(pairs, sharded, strict=True)
            ),
            dim,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shard_holds_sharded_slices_once_and_replicated_slices_everywhere(dim: int, ranks: int) -> None:
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) + 1
    layouts = _layouts_by_rank((7, 5), [2, 3], [True, False, True], dim, ranks)
    parts = [layout.shard(whole) for layout in layouts]
    for layout, part in zip(layouts, parts, strict=True):
        assert part.shape == (layout.local_shard_numel,)
    for index, (piece, first, last) in enumerate(layouts[0].slice_ranges()):
        here = whole.narrow(dim, piece.start, piece.stop - piece.start).reshape(-1)
        if index == 1:
            assert all(torch.equal(part[first:last], here) for part in parts)
            continue
        joined = torch.cat([part[first:last] for part in parts])
        assert torch.equal(joined[: here.numel()], here)
        assert not joined[here.numel() :].any()


def test_shard_returns_a_copy() -> None:
    whole = torch.zeros(4, 4)
    layout = FlatPaddedLayout(whole.shape, (Slice(0, 4),))
    layout.shard(whole).add_(1)
    assert not whole.any()


def test_missing_bytes_count_what_others_hold_and_the_largest_tensor_while_it_is_put_together() -> None:
    shapes = [(8, 6), (4, 2)]
    layouts = {
        nn.Parameter(torch.zeros(shape[0] * shape[1] // 2)): _layouts_by_rank(shape, [], [True], 0, 2)[0]
        for shape in shapes
    }
    optimizer = torch.optim.Adam(layouts)
    for parameter in layouts:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    sharded = ShardedParameters(layouts, None)
    assert sharded.missing_bytes([]) == 4 * (24 + 4) + 4 * 48
    assert sharded.missing_bytes([optimizer]) == 3 * 4 * (24 + 4) + 4 * 48

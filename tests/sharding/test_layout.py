from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lightning_osdp.sharding.layout import Layout, Slice


def _parts(shape: tuple[int, ...], cuts: list[int], sharded: list[bool], dim: int, ranks: int) -> list[Layout]:
    """One layout for each rank; the group is any object, since nothing is communicated."""
    edges = [0, *cuts, shape[dim]]
    pairs = list(pairwise(edges))
    return [
        Layout(
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
def test_parts_hold_every_element_once_where_sharded_and_everywhere_where_not(dim: int, ranks: int) -> None:
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) + 1
    layouts = _parts((7, 5), [2, 3], [True, False, True], dim, ranks)
    parts = [layout.part_of(whole) for layout in layouts]
    for layout, part in zip(layouts, parts, strict=True):
        assert part.shape == (layout.part_numel,)
    for index, (piece, first, last) in enumerate(layouts[0].ranges()):
        here = whole.narrow(dim, piece.start, piece.stop - piece.start).reshape(-1)
        if index == 1:
            assert all(torch.equal(part[first:last], here) for part in parts)
            continue
        joined = torch.cat([part[first:last] for part in parts])
        assert torch.equal(joined[: here.numel()], here)
        assert not joined[here.numel() :].any()


def test_a_part_is_a_copy() -> None:
    whole = torch.zeros(4, 4)
    layout = Layout(whole.shape, (Slice(0, 4),))
    layout.part_of(whole).add_(1)
    assert not whole.any()

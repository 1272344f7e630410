from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.state.flat_layout import FlatPaddedLayout, Slice, chunks_of_flat_range
from lightning_osdp.state.shard_layout import ReplicatedLayout

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shape=SHAPES, ends=st.tuples(st.integers(0, 700), st.integers(0, 700)))
def test_chunks_of_flat_range_hold_its_elements_in_order(shape: tuple[int, ...], ends: tuple[int, int]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    first, last = sorted(min(end, whole.numel()) for end in ends)
    boxes = list(chunks_of_flat_range(shape, first, last))
    found = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in boxes]
    joined = torch.cat([torch.empty(0, dtype=torch.int64), *found])
    assert torch.equal(joined, torch.arange(first, last))
    assert len(boxes) <= 2 * len(shape) - 1


@given(shape=SHAPES.filter(lambda shape: max(shape) > 1), ranks=st.integers(1, 4), data=st.data())
def test_local_chunks_of_all_ranks_cover_tensor_once_per_copy(
    shape: tuple[int, ...], ranks: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    edges = sorted({0, cut, shape[dim]})
    sharded = [data.draw(st.booleans()) for _ in edges[1:]]
    whole = torch.rand(shape)
    seen = torch.zeros(shape)
    for rank in range(ranks):
        slices = tuple(
            Slice(a, b, ranks, rank, "group") if is_sharded else Slice(a, b)
            for a, b, is_sharded in zip(edges, edges[1:], sharded, strict=False)
        )
        layout = FlatPaddedLayout(torch.Size(shape), slices, dim)
        part = layout.shard(whole)
        for box in layout.local_chunks():
            where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(box.view(part), whole[where])
            seen[where] += 1
    for a, b, is_sharded in zip(edges, edges[1:], sharded, strict=False):
        assert (seen.narrow(dim, a, b - a) == (1 if is_sharded else ranks)).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_local_chunks_of_replicated_tensor_is_one_chunk(shape: tuple[int, ...]) -> None:
    (box,) = ReplicatedLayout(torch.Size(shape)).local_chunks()
    assert box.sizes == shape
    assert box.view(torch.ones(shape)).shape == torch.Size(shape)

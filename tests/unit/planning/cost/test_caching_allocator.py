"""The arithmetic of PyTorch's caching allocator, against cases worked out from its rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.cost.caching_allocator import (
    block_bytes,
    fragmentation_bytes,
    persistent_tensor_sizes,
    reserved_bytes,
    segment_bytes,
)
from tests.unit.planning.cost.test_memory_timeline import model

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_block_bytes_rounds_up_to_512_bytes(size: int, block: int) -> None:
    assert block_bytes(size) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (23 * MIB, 24 * MIB),
    ],
)
def test_segment_bytes_follows_allocator_size_classes(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment


def test_reserved_bytes_packs_small_tensors_into_2_mib_segments() -> None:
    assert reserved_bytes([512] * 4096) == 2 * MIB
    assert reserved_bytes([512] * 4097) == 4 * MIB


def test_reserved_bytes_fits_three_6_mib_tensors_and_one_of_2_mib_in_20_mib() -> None:
    assert reserved_bytes([6 * MIB] * 3) == 20 * MIB
    assert reserved_bytes([6 * MIB] * 4) == 40 * MIB
    assert reserved_bytes([6 * MIB] * 3 + [2 * MIB]) == 20 * MIB


def test_reserved_bytes_leaves_1_mib_segment_remainder_unsplit() -> None:
    assert reserved_bytes([11 * MIB, MIB + 512]) == 12 * MIB + 20 * MIB


def test_reserved_bytes_places_tensor_in_best_fitting_free_block() -> None:
    """Rests of 8 and 2 MiB: the tensor of 2 MiB takes the small one, so that 8 MiB still find room."""
    assert reserved_bytes([12 * MIB, 9 * MIB, 9 * MIB, 9 * MIB, 2 * MIB, 9 * MIB]) == 12 * MIB + 2 * 20 * MIB


@given(st.lists(st.integers(0, 64 * MIB), max_size=60))
def test_reserved_bytes_lies_between_sum_of_blocks_and_sum_of_segments(sizes: list[int]) -> None:
    reserved, blocks = reserved_bytes(sizes), sum(map(block_bytes, sizes))
    assert blocks <= reserved <= sum(map(segment_bytes, sizes))
    assert fragmentation_bytes(sizes) >= 66 * MIB


def test_persistent_tensor_sizes_lists_parameters_and_optimizer_states() -> None:
    mebibytes = [size / MIB for size in persistent_tensor_sizes(model())]
    assert mebibytes == [4, 8, 4, 4, 8, 8]  # two states each, as Adam keeps

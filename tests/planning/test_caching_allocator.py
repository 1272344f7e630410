"""The arithmetic of PyTorch's caching allocator, against cases worked out from its rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.caching_allocator import (
    block_bytes,
    margin_bytes,
    reserved_bytes,
    segment_bytes,
    staying_tensors,
)
from tests.planning.test_timeline import model

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_blocks_are_multiples_of_512_bytes(size: int, block: int) -> None:
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
def test_segments_have_three_classes(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment


def test_small_tensors_share_segments() -> None:
    assert reserved_bytes([512] * 4096) == 2 * MIB
    assert reserved_bytes([512] * 4097) == 4 * MIB


def test_three_of_six_mebibytes_share_a_segment_and_the_rest_of_it_serves_smaller_ones() -> None:
    assert reserved_bytes([6 * MIB] * 3) == 20 * MIB
    assert reserved_bytes([6 * MIB] * 4) == 40 * MIB
    assert reserved_bytes([6 * MIB] * 3 + [2 * MIB]) == 20 * MIB


def test_a_rest_of_a_mebibyte_is_not_cut_off() -> None:
    assert reserved_bytes([11 * MIB, MIB + 512]) == 12 * MIB + 20 * MIB


def test_the_best_fit_is_taken() -> None:
    """Rests of 8 and 2 MiB: the tensor of 2 MiB takes the small one, so that 8 MiB still find room."""
    assert reserved_bytes([12 * MIB, 9 * MIB, 9 * MIB, 9 * MIB, 2 * MIB, 9 * MIB]) == 12 * MIB + 2 * 20 * MIB


@given(st.lists(st.integers(0, 64 * MIB), max_size=60))
def test_reserved_holds_all_blocks_and_wastes_at_most_what_its_classes_can(sizes: list[int]) -> None:
    reserved, blocks = reserved_bytes(sizes), sum(map(block_bytes, sizes))
    assert blocks <= reserved <= sum(map(segment_bytes, sizes))
    assert margin_bytes(sizes) >= 66 * MIB


def test_what_stays_is_each_parameter_and_its_states() -> None:
    mebibytes = [size / MIB for size in staying_tensors(model())]
    assert mebibytes == [4, 8, 4, 4, 8, 8]  # two states each, as Adam keeps

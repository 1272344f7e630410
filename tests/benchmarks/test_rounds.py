"""The statistics of ``make accuracy``."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rounds import MOST_ROUNDS, middle, off, unsteady

SECONDS = st.floats(0.1, 10.0)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5)


def test_a_slow_minute_that_both_sides_share_does_not_count() -> None:
    assert middle([(0.68, 0.56), (0.57, 0.54), (0.73, 0.73)]) == (0.57, 0.54)


def test_of_two_rounds_the_mean_is_shown() -> None:
    assert middle([(1.0, 2.0), (3.0, 3.0)]) == pytest.approx((2.0, 2.5))


@given(ROUNDS)
def test_the_middle_is_off_by_the_median(rounds: list[tuple[float, float]]) -> None:
    ordered = sorted(map(off, rounds))
    assert ordered[(len(ordered) - 1) // 2] - 1e-9 <= off(middle(rounds)) <= ordered[len(ordered) // 2] + 1e-9
    if len(rounds) % 2:
        assert off(middle(rounds)) == pytest.approx(median(ordered))


def test_rounds_that_are_off_alike_need_no_other_however_far_they_are_off() -> None:
    assert not unsteady([(2.0, 1.0), (4.1, 2.0)])
    assert not unsteady([(1.09, 1.0), (1.0, 1.0)])


def test_rounds_that_are_off_differently_need_another_up_to_a_number() -> None:
    apart = [(1.11, 1.0), (1.0, 1.0)]
    assert unsteady(apart)
    assert not unsteady(apart[:1])
    wild = [(1.0 + 0.5 * (at % 2), 1.0) for at in range(MOST_ROUNDS)]
    assert unsteady(wild[:-1])
    assert not unsteady(wild)

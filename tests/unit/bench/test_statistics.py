"""The statistics of ``make accuracy``."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.accuracy.statistics import MOST_ROUNDS, middle, off, unsteady

SECONDS = st.floats(0.1, 10.0)
ROUNDS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5)


def test_middle_ignores_slow_round_shared_by_both_sides() -> None:
    assert middle([(0.68, 0.56), (0.57, 0.54), (0.73, 0.73)]) == (0.57, 0.54)


def test_middle_of_two_rounds_is_their_mean() -> None:
    assert middle([(1.0, 2.0), (3.0, 3.0)]) == pytest.approx((2.0, 2.5))


@given(ROUNDS)
def test_middle_deviates_by_median_of_rounds(rounds: list[tuple[float, float]]) -> None:
    ordered = sorted(map(off, rounds))
    assert ordered[(len(ordered) - 1) // 2] - 1e-9 <= off(middle(rounds)) <= ordered[len(ordered) // 2] + 1e-9
    if len(rounds) % 2:
        assert off(middle(rounds)) == pytest.approx(median(ordered))


def test_unsteady_is_false_where_rounds_deviate_equally() -> None:
    assert not unsteady([(2.0, 1.0), (4.1, 2.0)])
    assert not unsteady([(1.09, 1.0), (1.0, 1.0)])


def test_unsteady_is_true_for_differing_rounds_up_to_max_rounds() -> None:
    apart = [(1.11, 1.0), (1.0, 1.0)]
    assert unsteady(apart)
    assert not unsteady(apart[:1])
    wild = [(1.0 + 0.5 * (at % 2), 1.0) for at in range(MOST_ROUNDS)]
    assert unsteady(wild[:-1])
    assert not unsteady(wild)

"""The fit of a collective's constants: exact on exact data, best and non-negative on any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from lightning_osdp.planning.cluster import CollectiveFit
from lightning_osdp.planning.fitting import fit

SIZES = [2.0**exponent for exponent in range(14, 27, 2)]


@given(latency_s=st.floats(1e-6, 1e-2), s_per_byte=st.floats(1e-12, 1e-7), ranks=st.integers(min_value=2, max_value=64))
def test_known_constants_come_back(latency_s, s_per_byte, ranks):
    truth = CollectiveFit(latency_s=latency_s, s_per_byte=s_per_byte)
    found = fit(SIZES, [truth.time_s(size, ranks) for size in SIZES], ranks)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert found.s_per_byte == pytest.approx(s_per_byte, rel=1e-6)
    assert found.residual < 1e-9


@given(times=st.lists(st.floats(1e-6, 1e3), min_size=len(SIZES), max_size=len(SIZES)), ranks=st.integers(2, 9))
def test_any_times_give_the_best_non_negative_fit(times, ranks):
    found = fit(SIZES, times, ranks)
    assert found.latency_s >= 0
    assert found.s_per_byte >= 0
    matrix = np.array([[ranks - 1, (ranks - 1) * size / ranks] for size in SIZES]) / np.array(times)[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    best = nnls(matrix / scale, np.ones(len(SIZES)))[1] / np.sqrt(len(SIZES))
    assert found.residual == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_the_residual_is_the_relative_noise():
    truth = CollectiveFit(latency_s=1e-4, s_per_byte=1e-9)
    sizes = [2.0 ** (14 + index / 100) for index in range(1200)]
    noise = np.random.default_rng(0).normal(0, 0.05, len(sizes))
    found = fit(sizes, [truth.time_s(size, 4) * (1 + e) for size, e in zip(sizes, noise, strict=True)], 4)
    assert found.residual == pytest.approx(0.05, rel=0.1)
    assert found.latency_s == pytest.approx(truth.latency_s, rel=0.05)
    assert found.s_per_byte == pytest.approx(truth.s_per_byte, rel=0.05)


def test_falling_times_have_no_bandwidth_term_and_a_line_through_zero_no_latency():
    assert fit([1e4, 1e6, 1e8], [3.0, 2.0, 1.0], 2).s_per_byte == 0.0
    assert fit([1e4, 1e6, 1e8], [1e-7, 1e-4, 1e-1], 2).latency_s == 0.0


def test_a_single_rank_sends_nothing():
    assert fit([1e4, 1e6], [1.0, 2.0], 1) == CollectiveFit(latency_s=0.0, s_per_byte=0.0)


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([1e4], [1.0], "two different sizes"),
        ([1e4, 1e4], [1.0, 1.0], "two different sizes"),
        ([1e4, 1e5], [1.0], "two different sizes"),
        ([1e4, 1e5], [1.0, 0.0], "positive"),
        ([1e4, 1e5], [1.0, float("nan")], "positive"),
    ],
)
def test_what_cannot_be_fitted_is_refused(sizes, times, message):
    with pytest.raises(ValueError, match=message):
        fit(sizes, times, 2)

"""The fit of a collective's constants: exact on exact data, best and non-negative on any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from lightning_osdp.planning.cost.link_fit import fit_collective
from lightning_osdp.planning.spec.cluster import CollectiveFit

SIZES = [2.0**exponent for exponent in range(14, 27, 2)]


@given(latency_s=st.floats(1e-6, 1e-2), s_per_byte=st.floats(1e-12, 1e-7), ranks=st.integers(min_value=2, max_value=64))
def test_fit_recovers_known_latency_and_bandwidth(latency_s, s_per_byte, ranks):
    truth = CollectiveFit(latency_s=latency_s, s_per_byte=s_per_byte)
    found = fit_collective(SIZES, [truth.time_s(size, ranks) for size in SIZES], ranks)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert found.s_per_byte == pytest.approx(s_per_byte, rel=1e-6)
    assert found.residual < 1e-9


@given(times=st.lists(st.floats(1e-6, 1e3), min_size=len(SIZES), max_size=len(SIZES)), ranks=st.integers(2, 9))
def test_fit_of_arbitrary_times_equals_nonnegative_least_squares(times, ranks):
    found = fit_collective(SIZES, times, ranks)
    assert found.latency_s >= 0
    assert found.s_per_byte >= 0
    matrix = np.array([[ranks - 1, (ranks - 1) * size / ranks] for size in SIZES]) / np.array(times)[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    best = nnls(matrix / scale, np.ones(len(SIZES)))[1] / np.sqrt(len(SIZES))
    assert found.residual == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_fit_residual_equals_relative_noise():
    truth = CollectiveFit(latency_s=1e-4, s_per_byte=1e-9)
    sizes = [2.0 ** (14 + index / 100) for index in range(1200)]
    noise = np.random.default_rng(0).normal(0, 0.05, len(sizes))
    found = fit_collective(sizes, [truth.time_s(size, 4) * (1 + e) for size, e in zip(sizes, noise, strict=True)], 4)
    assert found.residual == pytest.approx(0.05, rel=0.1)
    assert found.latency_s == pytest.approx(truth.latency_s, rel=0.05)
    assert found.s_per_byte == pytest.approx(truth.s_per_byte, rel=0.05)


def test_fit_has_no_negative_bandwidth_term_or_latency():
    assert fit_collective([1e4, 1e6, 1e8], [3.0, 2.0, 1.0], 2).s_per_byte == 0.0
    assert fit_collective([1e4, 1e6, 1e8], [1e-7, 1e-4, 1e-1], 2).latency_s == 0.0


def test_fit_for_single_rank_is_zero():
    assert fit_collective([1e4, 1e6], [1.0, 2.0], 1) == CollectiveFit(latency_s=0.0, s_per_byte=0.0)


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
def test_fit_rejects_too_few_sizes_and_nonpositive_times(sizes, times, message):
    with pytest.raises(ValueError, match=message):
        fit_collective(sizes, times, 2)

"""Communication and the engine beside compute on CUDA: by hand, and what holds whatever the numbers are."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.cost.step_time import communication_time, engine_time, host_time, time_cost
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice
from lightning_osdp.planning.spec.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    EngineOverhead,
    Link,
    ModeOverhead,
    OperatorTime,
)
from lightning_osdp.planning.spec.model import LinearInBatch
from lightning_osdp.planning.spec.problem import Problem
from tests.support.option_times import assert_option_times_match_time_cost
from tests.support.small_models import MIB, RANKS, blocks_of_two, compute, linear


class Numbers(NamedTuple):
    """Seconds of an operator of 4 MiB."""

    gather_s: float = 0.0
    reduce_s: float = 0.0
    share: float = 1.0
    """Of collectives that goes on beside compute."""
    fixed_s: float = 0.0
    """Of a forward without samples; a backward takes twice as long."""
    sample_s: float = 0.0
    """Of a forward for each sample."""
    host_s: float = 0.0
    batch_size: int = 1
    accumulation: int = 1


def cluster_of(numbers: Numbers) -> Cluster:
    def fit(seconds: float) -> CollectiveFit:
        per_byte = seconds * RANKS / (4 * MIB * (RANKS - 1))
        return CollectiveFit(latency_s=0.0, s_per_byte=per_byte, overlap_fraction=numbers.share)

    link = Link(
        all_reduce=fit(2 * numbers.reduce_s), all_gather=fit(numbers.gather_s), reduce_scatter=fit(numbers.reduce_s)
    )
    own = ModeOverhead(fixed_s=numbers.host_s)
    engine = EngineOverhead(dp=own, zdp2=own, zdp=own)
    return Cluster(devices_per_node=RANKS, device="cuda: some", backend="nccl", link=link, engine=engine)


def step_s(numbers: Numbers, mode: Mode, recomputed: bool = False) -> float:
    forward = LinearInBatch(fixed=numbers.fixed_s, per_sample=numbers.sample_s)
    times = OperatorTime(forward=forward, backward=forward.scale(2.0))
    every = ComputeTimes(operators=(times,), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    own = (linear("one"), ShardingChoice((mode,)), cluster_of(numbers), every, times)
    cost = time_cost(*own, numbers.batch_size, numbers.accumulation, recomputed=recomputed)
    assert min(cost) >= 0
    return sum(cost)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Mode.ZDP, 3.0 + (1.5 - 1.0) + (1.5 + 2.0 - 2.0)),  # in the backward, gather and reduction share the link
        (Mode.ZDP2, 3.0 + (1.5 - 1.0)),
        (Mode.DP, 3.0 + (4.0 - 2.0)),  # an all-reduce beside the backward alone
    ],
)
def test_communication_is_exposed_as_far_as_its_pass_does_not_hide_it(mode: Mode, expected: float) -> None:
    """A forward of a second and a backward of two; gathers of 1.5, a reduction of 2."""
    assert step_s(Numbers(gather_s=1.5, reduce_s=2.0, sample_s=1.0), mode) == pytest.approx(expected)


def test_communication_that_does_not_go_on_beside_compute_is_exposed() -> None:
    half = Numbers(gather_s=1.0, reduce_s=1.0, share=0.5, sample_s=100.0)
    assert step_s(half, Mode.ZDP) == pytest.approx(300 + 1.5)
    assert step_s(half._replace(share=0.0), Mode.ZDP) == pytest.approx(300 + 3.0)


@pytest.mark.parametrize(
    ("host_s", "expected"),
    [(5.0, 9.0), (6.0, 9.0), (8.0, 11.0)],  # with 3 s of launches, the host takes 8, 9 and 11
)
def test_step_takes_the_larger_of_host_and_device(host_s: float, expected: float) -> None:
    numbers = Numbers(fixed_s=1.0, sample_s=1.0, batch_size=2, host_s=host_s)
    assert step_s(numbers, Mode.ZDP) == pytest.approx(expected)


def test_copies_of_the_engine_are_no_time_of_the_host() -> None:
    copies = EngineOverhead(zdp=ModeOverhead(fixed_s=1.0, s_per_byte=0.5 / (4 * MIB)))
    cluster = cluster_of(Numbers()).model_copy(update={"engine": copies})
    own = (linear("one"), ShardingChoice((Mode.ZDP,)), cluster)
    assert engine_time(*own) == pytest.approx((0.0, 1.5))
    assert host_time(*own) == pytest.approx((0.0, 1.0))
    assert host_time(*own[:2], cluster.model_copy(update={"device": "cpu"})) == (0.0, 0.0)


SECONDS, FACTORS = st.floats(0, 10), st.floats(1, 3)
NUMBERS = st.builds(
    Numbers, SECONDS, SECONDS, st.floats(0, 1), SECONDS, SECONDS, SECONDS, st.integers(1, 8), st.integers(1, 3)
)
MODES, FLAGS = st.sampled_from(WEIGHT_MODES), st.booleans()
GROWING = ("gather_s", "reduce_s", "fixed_s", "sample_s", "host_s")


@given(numbers=NUMBERS, mode=MODES, recomputed=FLAGS)
def test_step_is_never_below_compute_communication_or_host(numbers: Numbers, mode: Mode, recomputed: bool) -> None:
    found = step_s(numbers, mode, recomputed)
    own = (linear("one"), ShardingChoice((mode,)), cluster_of(numbers))
    forward_s = numbers.fixed_s + numbers.sample_s * numbers.batch_size
    passes_s = numbers.accumulation * forward_s * (4 if recomputed else 3)
    parts = [
        time(*own, recomputed=recomputed).total_s(numbers.accumulation) for time in (communication_time, host_time)
    ]
    assert found >= max(passes_s, *parts) * (1 - 1e-9)
    assert found <= (passes_s + sum(parts)) * (1 + 1e-9)


@given(numbers=NUMBERS, mode=MODES, recomputed=FLAGS, factor=FACTORS, name=st.sampled_from(GROWING))
def test_step_is_never_shorter_where_any_part_is_longer(
    numbers: Numbers, mode: Mode, recomputed: bool, factor: float, name: str
) -> None:
    longer = numbers._replace(**{name: factor * getattr(numbers, name)})
    assert step_s(longer, mode, recomputed) >= step_s(numbers, mode, recomputed) * (1 - 1e-9)


@given(numbers=NUMBERS, mode=MODES, recomputed=FLAGS)
def test_step_is_never_shorter_for_more_samples_less_overlap_or_recomputation(
    numbers: Numbers, mode: Mode, recomputed: bool
) -> None:
    found = step_s(numbers, mode, recomputed) * (1 - 1e-9)
    assert step_s(numbers._replace(batch_size=numbers.batch_size + 1), mode, recomputed) >= found
    assert step_s(numbers._replace(accumulation=numbers.accumulation + 1), mode, recomputed) >= found
    assert step_s(numbers._replace(share=numbers.share / 2), mode, recomputed) >= found
    assert step_s(numbers, mode, True) >= found


@given(numbers=NUMBERS)
def test_option_times_on_cuda_match_time_cost(numbers: Numbers) -> None:
    model = blocks_of_two(2)
    problem = Problem(model, cluster_of(numbers), compute(model), 1 << 30)
    assert_option_times_match_time_cost(problem, numbers.batch_size, numbers.accumulation)

"""What the engine itself takes is measured on the real ranks, and counts in what a mode costs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.backend.cpu.core_sharing import CORE_SHARING
from lightning_osdp.planning.cost.step_time import engine_time
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, EngineOverhead, Link, ModeOverhead
from lightning_osdp.planning.spec.model import Operator, ParameterInfo
from lightning_osdp.profiling import engine_overhead
from tests.support.models import some_cluster
from tests.support.ranks import run_ranks

NOTHING = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
OWN = EngineOverhead(
    dp=ModeOverhead(fixed_s=1e-3, s_per_byte=1e-9),
    zdp2=ModeOverhead(fixed_s=2e-3, s_per_byte=2e-9),
    zdp=ModeOverhead(fixed_s=3e-3, s_per_byte=3e-9),
)


def engine_time_s(operator: Operator, mode: Mode, cluster: Cluster, accumulation: int = 1) -> float:
    """Seconds of the engine in one optimizer step."""
    once, each = engine_time(operator, ShardingChoice((mode,)), cluster)
    return once + accumulation * each


def measure(rank: int, ranks: int, shared: bool = False) -> tuple[EngineOverhead, EngineOverhead]:
    """Measure with collectives that are said to take nothing, and with some that are said to take an hour.

    ``shared`` says that ranks share cores."""
    CORE_SHARING.is_shared = shared
    dear = CollectiveFit(latency_s=3600.0, s_per_byte=0.0)
    clusters = (
        some_cluster(ranks, link=Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)) for fit in (NOTHING, dear)
    )
    free, dearly = (
        engine_overhead.measure_engine_overhead(dist.group.WORLD, torch.device("cpu"), cluster) for cluster in clusters
    )
    return free, dearly


def test_measure_gives_equal_engine_overhead_without_collectives_on_all_ranks() -> None:
    first, second = run_ranks(measure, 2)
    assert first == second
    free, dearly = first
    # Collectives and a unit's hooks take some time, whatever the machine.
    assert all(part.time_s(1 << 20) > 0 for part in (free.zdp2, free.zdp, free.tp))
    assert {part.time_s(1 << 20) for part in (dearly.dp, dearly.zdp2, dearly.zdp, dearly.tp)} == {0.0}, (
        "never less than nothing"
    )


def test_measure_gives_engine_overhead_on_numbers_of_ranks_that_divide_no_usual_width() -> None:
    for free, _ in run_ranks(measure, 3):
        assert free.tp.time_s(1 << 20) > 0


@pytest.mark.parametrize("shares_cores", [False, True])
def test_measure_assumes_calibration_which_is_larger_where_ranks_share_cores(shares_cores: bool) -> None:
    free, dearly = run_ranks(measure, 2, shares_cores)[0]
    assert free.calibration == dearly.calibration
    by_device, shared = engine_overhead.ASSUMED_CALIBRATION, engine_overhead.SHARED_CORES_CALIBRATION
    assert [free.calibration.for_kinds([mode.value]) for mode in Mode] == pytest.approx(
        [shared if shares_cores else by_device["cpu"]] * len(Mode)
    )
    assert shared > by_device["cpu"]


def measured_widths(rank: int, ranks: int, rooms: list[int | None]) -> list[tuple[str, int, int]]:
    """Widths and numbers of the weights that are measured if rank 0 has each of ``rooms`` bytes, others any number."""
    seen: list[tuple[str, int, int]] = []
    # Which tests change in their ranks.
    engine_overhead.NUM_OPERATORS, engine_overhead.NUM_REPLICATED, engine_overhead.FEW_REPLICATED = 6, 24, 6
    engine_overhead._measure_per_operator_s = lambda mode, width, counts, *_: (
        seen.append((mode.value, width, sum(counts))) or 1.0
    )
    for room in rooms:
        own = None if rank else room
        engine_overhead.measure_engine_overhead(dist.group.WORLD, torch.device("cpu"), some_cluster(ranks), own)
    return [one for one in seen if one[0] != Mode.TP.value]


def test_measure_limits_widths_to_memory_of_rank_with_least() -> None:
    mib = 1 << 20
    first, second = run_ranks(measured_widths, 2, [None, 28 * mib, mib])
    assert first == second
    usual, tight, least = first[:6], first[6:12], first[12:]
    assert [width for _, width, _ in usual] == [width for widths in engine_overhead.WIDTHS.values() for width in widths]
    assert [count for _, _, count in usual] == [30, 30, 6, 6, 6, 6]
    assert 128 < tight[5][1] < 768
    assert all(engine_overhead.MAX_LIVE_COPIES * count * 4 * width**2 <= 28 * mib for _, width, count in tight)
    assert [(width, count) for _, width, count in least] == [(128, 9), (192, 9), *[(128, 6), (192, 6)] * 2]


@pytest.mark.parametrize(
    ("mode", "expected_s"), [("dp", 1e-3 + 64e-6), ("zdp2", 2e-3 + 128e-6), ("zdp", 3e-3 + 192e-6)]
)
def test_engine_time_adds_fixed_and_per_byte_overhead_of_mode(mode: str, expected_s: float) -> None:
    weight = ParameterInfo(name="op.weight", shape=(125, 128))
    operator = Operator(name="op", kind="Linear", parameters=(weight,))
    assert engine_time_s(operator, Mode(mode), some_cluster(engine=OWN)) == pytest.approx(expected_s)
    assert engine_time_s(operator, Mode(mode), some_cluster()) == 0
    micro_batches = 3 if mode != "dp" else 1
    assert engine_time_s(operator, Mode(mode), some_cluster(engine=OWN), 3) == pytest.approx(micro_batches * expected_s)


def test_engine_time_is_zero_on_one_rank_and_fixed_for_unbucketed_dp() -> None:
    large = Operator(name="op", kind="Linear", parameters=(ParameterInfo(name="op.weight", shape=(1024, 1024)),))
    assert engine_time_s(large, Mode.ZDP, some_cluster(1, engine=OWN)) == 0
    assert engine_time_s(large, Mode.DP, some_cluster(engine=OWN)) == pytest.approx(1e-3)

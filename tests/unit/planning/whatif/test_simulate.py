"""Plans for hardware that is not there: what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.search.baselines import UniformPlan, best_uniform_plan
from lightning_osdp.planning.search.batch_size_search import THROUGHPUT_TOLERANCE, BatchSizePolicy, Candidate, Problem
from lightning_osdp.planning.search.plan_search import PlanSearch
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.whatif.hardware import USABLE_MEMORY_FRACTION, load
from lightning_osdp.planning.whatif.simulate import BASELINE_CONSTRAINTS, problem_for_hardware, sweep_memory_limits
from tests.support.simulated import simulate
from tests.unit.planning.search.test_batch_size_search import MIB, RANKS, cluster, compute, model

DP, ZDP = Mode.DP, Mode.ZDP
FIXED = BatchSizePolicy(batch_size=1)
SMALL = BatchSizePolicy(max_batch_size=8)


def modes_of(candidate: Candidate) -> tuple[Mode, ...]:
    return tuple(choice.slices[0] for choice in candidate.choices)


def problem(limit_mib: int = 64, description: ModelProfile | None = None) -> Problem:
    """Four operators of 4 MiB with Adam on four ranks, a collective of one of them 1 ms."""
    return Problem(description or model(), cluster(), compute(), limit_mib * MIB)


def best_uniform(given: Problem, policy: BatchSizePolicy, mode: Mode) -> UniformPlan:
    search = PlanSearch(replace(given, constraints=BASELINE_CONSTRAINTS))
    return best_uniform_plan(search, mode, np.zeros(len(given.model.blocks), dtype=bool), policy)


def test_simulate_sharded_states_shrink_with_device_count() -> None:
    points = simulate(model(), load("h100-80gb-nvlink"), [1, 2, 4, 8], policy=FIXED)
    assert [point.devices for point in points] == [1, 2, 4, 8]
    sharded = [point.zdp.peak_memory_bytes for point in points if point.zdp is not None]
    assert len(sharded) == 4
    assert sharded == sorted(sharded, reverse=True)
    assert sharded[-1] < sharded[0]
    # Replicated states are the same everywhere; from two devices on, 16 MiB of gradients are copied into buckets.
    whole = [point.dp.peak_memory_bytes for point in points if point.dp is not None]
    assert whole == [64 * MIB, 80 * MIB, 80 * MIB, 80 * MIB]


def test_simulate_osdp_is_feasible_where_replication_is_not() -> None:
    (point,) = simulate(model(), load("titan-rtx-pcie3"), [8], memory_limit_bytes=40 * MIB, policy=SMALL)
    assert point.dp is None
    assert point.osdp is not None
    assert point.plan is not None
    assert point.osdp.peak_memory_bytes <= 40 * MIB
    assert 0 < point.osdp.sharded_share <= 1


def test_simulate_infeasible_point_is_marked_not_raised() -> None:
    one, four = simulate(model(), load("titan-rtx-pcie3"), [1, 4], memory_limit_bytes=33 * MIB, policy=SMALL)
    assert (one.plan, one.osdp, one.dp, one.zdp) == (None, None, None, None)
    assert one.needed_bytes > 33 * MIB
    assert four.osdp is not None
    assert four.needed_bytes == 0


@pytest.mark.parametrize("limit_mib", [26, 34, 48, 100])
@pytest.mark.parametrize("devices", [2, 8, 16])
def test_simulate_plan_is_never_slower_than_dp_or_zdp_baseline(limit_mib: int, devices: int) -> None:
    description = model(activations_per_sample=MIB // 2)
    hardware = load("2xa100-80gb-nvlink+10gbit")
    (point,) = simulate(description, hardware, [devices], memory_limit_bytes=limit_mib * MIB, policy=SMALL)
    for baseline in (point.dp, point.zdp):
        if baseline is not None:
            assert point.osdp is not None
            assert point.osdp.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * baseline.samples_per_s


def test_simulate_slower_network_lowers_throughput() -> None:
    rates = []
    for name in ("2xh100-80gb-nvlink+10gbit", "2xh100-80gb-nvlink+200gbit"):
        (point,) = simulate(model(), load(name), [16], policy=FIXED)
        assert point.osdp is not None
        assert point.nodes == 2
        rates.append(point.osdp.samples_per_s)
    assert rates[0] < rates[1]


def test_problem_for_hardware_limit_is_usable_device_memory() -> None:
    hardware = load("titan-rtx-pcie3")
    assert problem_for_hardware(model(), hardware, 2).memory_limit_bytes == int((24 << 30) * USABLE_MEMORY_FRACTION)
    assert problem_for_hardware(model(), hardware).cluster.ranks == 8


def test_best_uniform_plan_gives_all_operators_the_same_mode() -> None:
    # dp: 4 all-reduces of 1 ms and 1 ms of compute; zdp: 12 collectives. Peaks as in the planner's own tests.
    replicated = best_uniform(problem(), FIXED, DP).candidate
    assert modes_of(replicated) == (DP,) * 4
    assert replicated.step_time_s == pytest.approx(5e-3)
    assert replicated.peak.total_bytes == 64 * MIB
    sharded = best_uniform(problem(), FIXED, ZDP).candidate
    assert modes_of(sharded) == (ZDP,) * 4
    assert sharded.step_time_s == pytest.approx(13e-3)


def test_best_uniform_plan_takes_largest_batch_size_that_fits() -> None:
    # 8 MiB of activations a sample where forward turns into backward, where the states are 48 MiB replicated: 6 fit
    # into 96 MiB, and throughput rises with the batch size all the way.
    found = best_uniform(problem(96, model(activations_per_sample=8 * MIB)), BatchSizePolicy(), DP).candidate
    assert found.batch_size == 6
    assert found.peak.total_bytes == 96 * MIB
    assert found.samples_per_s == pytest.approx(6 * RANKS / 5e-3)


def test_best_uniform_plan_that_does_not_fit_tells_needed_bytes() -> None:
    found = best_uniform(problem(63), FIXED, DP)
    assert not found.fits
    assert found.candidate.peak.total_bytes == 64 * MIB


def test_best_uniform_plan_falls_back_to_closest_legal_mode() -> None:
    operators = list(model().operators)
    operators[1] = operators[1].model_copy(update={"replicated_reason": "used by the whole model"})
    operators[2] = operators[2].model_copy(update={"calls": 2})
    description = model().model_copy(update={"operators": tuple(operators)})
    found = best_uniform(problem(description=description), FIXED, ZDP).candidate
    assert modes_of(found) == (ZDP, DP, Mode.ZDP2, ZDP)


def test_tradeoff_runs_from_min_memory_plan_to_fastest_plan() -> None:
    found = sweep_memory_limits(problem(30), batch_size=1)
    times = [candidate.step_time_s for candidate in found]
    peaks = [candidate.peak.total_bytes for candidate in found]
    assert times == sorted(set(times), reverse=True)
    assert peaks == sorted(peaks)
    assert modes_of(found[0]) == (ZDP, ZDP, ZDP, Mode.ZDP2)
    assert modes_of(found[-1]) == (DP,) * 4


def test_simulate_rejects_contradictory_requests() -> None:
    with pytest.raises(ConfigurationError, match="not a multiple"):
        simulate(model(), load("titan-rtx-pcie3"), [8], policy=BatchSizePolicy(global_batch_size=12))
    with pytest.raises(ConfigurationError, match="has 1 to 8 devices"):
        simulate(model(), load("titan-rtx-pcie3"), [16])

"""What a run teaches the next prediction."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.cost.run_correction import (
    Correction,
    MeasuredStep,
    contradicts_measurements,
    correct_cluster,
    correct_compute,
    exceeds_prediction,
    is_step_time_off,
    update_correction,
)
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, ComputeTimes, Link, OperatorTime
from lightning_osdp.planning.spec.model import LinearInBatch
from tests.support.models import uniform_hierarchical_links
from tests.unit.report.test_tables import make_plan

MIB = 1 << 20
PLAN = make_plan()  # 0.95 s compute, 0.3 s communication, 1536 MiB


def test_update_correction_step_as_predicted_changes_nothing() -> None:
    correction = update_correction(Correction(), PLAN, MeasuredStep(1.25, 0.3, 1536 * MIB))
    assert correction.compute == pytest.approx(1)
    assert correction.communication == pytest.approx(1)
    assert correction.memory_bytes == 0


def test_update_correction_moves_compute_and_communication_halfway_separately() -> None:
    correction = update_correction(Correction(), PLAN, MeasuredStep(0.95 * 1.44 + 0.3 / 1.21, 0.3 / 1.21, 1536 * MIB))
    assert correction.compute == pytest.approx(1.2)
    assert correction.communication == pytest.approx(1 / 1.1)


def test_update_correction_step_within_tolerance_scales_both_times_equally() -> None:
    correction = update_correction(Correction(), PLAN, MeasuredStep(1.25 * 1.05, 0.1, 1536 * MIB))
    assert correction.compute == correction.communication == pytest.approx(1.05**0.5)


def test_update_correction_over_repeated_runs_converges_to_measurement() -> None:
    """Each plan is predicted with the correction before it."""
    correction = Correction()
    for _ in range(12):
        predicted = PLAN.predicted.model_copy(
            update={
                "compute_time_s": 0.95 * correction.compute,
                "communication_time_s": 0.3 * correction.communication,
                "peak_memory_bytes": 1536 * MIB + correction.memory_bytes,
            }
        )
        plan = PLAN.model_copy(update={"predicted": predicted})
        correction = update_correction(correction, plan, MeasuredStep(0.95 * 1.3 + 0.3 * 0.8, 0.3 * 0.8, 1500 * MIB))
    assert 0.95 * correction.compute + 0.3 * correction.communication == pytest.approx(1.475, rel=1e-3)
    assert correction.communication < 1 < correction.compute
    assert correction.memory_bytes == pytest.approx(-36 * MIB, abs=MIB)


def test_update_correction_outlier_step_is_limited_to_max_change() -> None:
    correction = update_correction(Correction(), PLAN, MeasuredStep(20.0, 10.0, 1536 * MIB))
    assert correction.compute == pytest.approx(2**0.5)
    assert correction.communication == pytest.approx(2**0.5)


def test_update_correction_without_comm_wait_scales_both_times_equally() -> None:
    correction = update_correction(Correction(), PLAN, MeasuredStep(1.25 * 1.21, None, 1536 * MIB))
    assert correction.compute == correction.communication == pytest.approx(1.1)


def test_update_correction_with_prefetch_scales_both_times_equally() -> None:
    ahead = PLAN.model_copy(update={"cluster": PLAN.cluster.model_copy(update={"prefetch_max_bytes": MIB})})
    correction = update_correction(Correction(), ahead, MeasuredStep(1.25 * 1.21, 0.1, 1536 * MIB))
    assert correction.compute == correction.communication == pytest.approx(1.1)


def test_update_correction_memory_underestimate_counts_fully_overestimate_half() -> None:
    assert update_correction(Correction(), PLAN, MeasuredStep(1.25, 0.3, 1600 * MIB)).memory_bytes == 64 * MIB
    assert (
        update_correction(Correction(memory_bytes=10), PLAN, MeasuredStep(1.25, 0.3, 1436 * MIB)).memory_bytes
        == 10 - 50 * MIB
    )


def test_exceeds_prediction_beyond_margin_or_memory_limit() -> None:
    assert not exceeds_prediction(PLAN, 1600 * MIB, margin=0.05)
    assert exceeds_prediction(PLAN, 1620 * MIB, margin=0.05)
    assert exceeds_prediction(PLAN.model_copy(update={"memory_limit_bytes": 1550 * MIB}), 1560 * MIB, margin=0.05)


def test_correction_scales_all_compute_and_collective_times() -> None:
    line = OperatorTime(forward=LinearInBatch(fixed=1, per_sample=2), backward=LinearInBatch(fixed=3, per_sample=4))
    compute = ComputeTimes(operators=(line, line), unattributed=line, optimizer_s_per_byte=5)
    fit = CollectiveFit(latency_s=1, s_per_byte=2, residual=0.5)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    correction = Correction(compute=2, communication=3)
    scaled = correct_compute(compute, correction)
    assert scaled.operators[1].seconds_at(10) == 2 * line.seconds_at(10)
    assert scaled.unattributed.seconds_at(7) == 2 * line.seconds_at(7)
    assert scaled.optimizer_s_per_byte == 10
    before = Cluster(
        nodes=2,
        devices_per_node=2,
        device="cpu",
        backend="gloo",
        link=link,
        hierarchical_links=uniform_hierarchical_links(link),
    )
    after = correct_cluster(before, correction)
    assert after.hierarchical_links is not None
    links = (after.link, after.hierarchical_links.intra_node, after.hierarchical_links.hierarchical)
    for one in (
        *(getattr(link, name) for link in links for name in type(link).model_fields),
        after.hierarchical_links.inter_node,
    ):
        assert one.time_s(100, 2) == 3 * fit.time_s(100, 2)
        assert one.residual == 0.5
    assert (after.nodes, after.devices_per_node, after.backend) == (2, 2, "gloo")


@pytest.mark.parametrize(("factor", "is_off"), [(1.0, False), (1.14, False), (1.2, True), (0.9, False), (0.8, True)])
def test_is_step_time_off_beyond_fifteen_percent(factor: float, is_off: bool) -> None:
    assert is_step_time_off(PLAN, MeasuredStep(1.25 / factor, None, 0)) == is_off


@pytest.mark.parametrize(("step_s", "is_wrong"), [(1.25, False), (125.0, False), (0.16, False), (0.15, True)])
def test_measurements_are_wrong_where_a_step_is_an_eighth_of_its_prediction(step_s: float, is_wrong: bool) -> None:
    assert contradicts_measurements(PLAN, MeasuredStep(step_s, None, 0)) == is_wrong

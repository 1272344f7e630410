"""What a run teaches the next prediction."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.calibration import (
    Correction,
    MeasuredStep,
    corrected_cluster,
    corrected_compute,
    drifted,
    learn,
)
from lightning_osdp.planning.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    Link,
    OperatorTime,
)
from lightning_osdp.planning.operators import Line
from tests.models import same_levels
from tests.test_report import make_plan

MIB = 1 << 20
PLAN = make_plan()  # 0.95 s compute, 0.3 s communication, 1536 MiB


def test_a_run_as_predicted_teaches_nothing() -> None:
    correction = learn(Correction(), PLAN, MeasuredStep(1.25, 0.3, 1536 * MIB))
    assert correction.compute == pytest.approx(1)
    assert correction.communication == pytest.approx(1)
    assert correction.memory_bytes == 0


def test_times_move_half_way_and_apart() -> None:
    correction = learn(Correction(), PLAN, MeasuredStep(0.95 * 1.44 + 0.3 / 1.21, 0.3 / 1.21, 1536 * MIB))
    assert correction.compute == pytest.approx(1.2)
    assert correction.communication == pytest.approx(1 / 1.1)


def test_a_step_that_took_what_was_predicted_says_nothing_of_its_parts() -> None:
    correction = learn(Correction(), PLAN, MeasuredStep(1.25 * 1.05, 0.1, 1536 * MIB))
    assert correction.compute == correction.communication == pytest.approx(1.05**0.5)


def test_repeated_runs_converge_to_what_is_measured() -> None:
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
        correction = learn(correction, plan, MeasuredStep(0.95 * 1.3 + 0.3 * 0.8, 0.3 * 0.8, 1500 * MIB))
    assert 0.95 * correction.compute + 0.3 * correction.communication == pytest.approx(1.475, rel=1e-3)
    assert correction.communication < 1 < correction.compute
    assert correction.memory_bytes == pytest.approx(-36 * MIB, abs=MIB)


def test_a_busy_machine_teaches_little() -> None:
    correction = learn(Correction(), PLAN, MeasuredStep(20.0, 10.0, 1536 * MIB))
    assert correction.compute == pytest.approx(2**0.5)
    assert correction.communication == pytest.approx(2**0.5)


def test_without_the_waiting_time_both_move_together() -> None:
    correction = learn(Correction(), PLAN, MeasuredStep(1.25 * 1.21, None, 1536 * MIB))
    assert correction.compute == correction.communication == pytest.approx(1.1)


def test_where_units_run_ahead_both_move_together() -> None:
    ahead = PLAN.model_copy(update={"cluster": PLAN.cluster.model_copy(update={"ahead_bytes": MIB})})
    correction = learn(Correction(), ahead, MeasuredStep(1.25 * 1.21, 0.1, 1536 * MIB))
    assert correction.compute == correction.communication == pytest.approx(1.1)


def test_too_little_memory_predicted_counts_in_full_too_much_by_half() -> None:
    assert learn(Correction(), PLAN, MeasuredStep(1.25, 0.3, 1600 * MIB)).memory_bytes == 64 * MIB
    assert learn(Correction(memory_bytes=10), PLAN, MeasuredStep(1.25, 0.3, 1436 * MIB)).memory_bytes == 10 - 50 * MIB


def test_drift_is_beyond_the_margin_or_the_limit() -> None:
    assert not drifted(PLAN, 1600 * MIB, margin=0.05)
    assert drifted(PLAN, 1620 * MIB, margin=0.05)
    assert drifted(PLAN.model_copy(update={"memory_limit_bytes": 1550 * MIB}), 1560 * MIB, margin=0.05)


def test_corrections_scale_every_time() -> None:
    line = OperatorTime(forward=Line(fixed=1, per_sample=2), backward=Line(fixed=3, per_sample=4))
    compute = ComputeTimes(operators=(line, line), outside=line, optimizer_s_per_byte=5)
    fit = CollectiveFit(latency_s=1, s_per_byte=2, residual=0.5)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    correction = Correction(compute=2, communication=3)
    scaled = corrected_compute(compute, correction)
    assert scaled.operators[1].at(10) == 2 * line.at(10)
    assert scaled.outside.at(7) == 2 * line.at(7)
    assert scaled.optimizer_s_per_byte == 10
    before = Cluster(nodes=2, devices_per_node=2, device="cpu", backend="gloo", link=link, levels=same_levels(link))
    after = corrected_cluster(before, correction)
    assert after.levels is not None
    links = (after.link, after.levels.inside, after.levels.two_stage)
    for one in (*(getattr(link, name) for link in links for name in type(link).model_fields), after.levels.between):
        assert one.time_s(100, 2) == 3 * fit.time_s(100, 2)
        assert one.residual == 0.5
    assert (after.nodes, after.devices_per_node, after.backend) == (2, 2, "gloo")

"""Whatever was measured, no predicted time is negative: neither sharding frozen weights nor recomputing saves any."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lightning_osdp.planning.cost.link_fit import fit_collective
from lightning_osdp.planning.cost.run_correction import (
    Correction,
    MeasuredStep,
    correct_cluster,
    correct_compute,
    update_correction,
)
from lightning_osdp.planning.cost.step_time import time_cost
from lightning_osdp.planning.cost.trial_correction import (
    PassTimes,
    Trial,
    apply_trial,
    fit_calibration,
    fit_nonnegative_line,
    plan_key,
    predict_trial,
    scale_to_trial,
)
from lightning_osdp.planning.search.batch_size_search import Problem
from lightning_osdp.planning.search.plan_search import PlanSearch
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice, enumerate_choices
from lightning_osdp.planning.spec.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    EngineOverhead,
    Link,
    ModeOverhead,
    OperatorTime,
    SplitTime,
)
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import hand_made_plan
from tests.support.small_models import RANKS, blocks_of_one, blocks_of_two, cluster

ABSURD = st.sampled_from([-1e9, -8.5e-3, -1e-12, 0.0, 1e-300, 1e3, 1e300, math.inf, -math.inf, math.nan])
SECONDS = st.one_of(st.floats(1e-6, 10.0), st.floats(1e-6, 10.0), ABSURD)
"""What clocks and their differences may give."""
POSITIVE = st.one_of(st.floats(1e-6, 10.0), st.sampled_from([1e-300, 1e-12, 1e3, 1e300]))
FACTORS = st.floats(0.0, 1.0)
NEARLY = 1 - 1e-9
SIZES = (1 << 14, 1 << 20, 1 << 25)


@st.composite
def fits(draw: st.DrawFn) -> CollectiveFit:
    """Fits of times at three sizes, of which one may be an outlier."""
    fit = fit_collective(SIZES, [draw(POSITIVE) for _ in SIZES], RANKS)
    return fit.model_copy(update={"overlap_fraction": draw(FACTORS)})


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Clusters whose engine's overhead was fitted to absurd times."""
    link = Link(all_reduce=draw(fits()), all_gather=draw(fits()), reduce_scatter=draw(fits()))
    own = {}
    for mode in WEIGHT_MODES:
        line = fit_nonnegative_line([(1 << 16, draw(SECONDS)), (1 << 21, draw(SECONDS))])
        own[mode.value] = ModeOverhead(fixed_s=line.fixed, s_per_byte=line.per_sample)
    prefetch = draw(st.sampled_from([0, 1 << 30]))
    changes = {
        "link": link,
        "engine": EngineOverhead(**own),
        "prefetch_max_bytes": prefetch,
        "overlap": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "device": draw(st.sampled_from(["cpu", "cuda: some"])),
    }
    return cluster().model_copy(update=changes)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """Some of whose operators are frozen."""
    model = draw(st.sampled_from([blocks_of_one(3, 2), blocks_of_two(2)]))
    operators = []
    for operator in model.operators:
        frozen = draw(st.booleans())
        parameters = (
            p.model_copy(update={"trainable": not frozen, "optimizer_bytes": 0 if frozen else p.optimizer_bytes})
            for p in operator.parameters
        )
        operators.append(operator.model_copy(update={"parameters": tuple(parameters)}))
    return model.model_copy(update={"operators": tuple(operators)})


@st.composite
def compute_times(draw: st.DrawFn, model: ModelProfile) -> ComputeTimes:
    """Scaled to an absurd trial."""

    def line() -> LinearInBatch:
        return fit_nonnegative_line([(2, draw(SECONDS)), (8, draw(SECONDS))])

    def splits(operator: object) -> tuple[SplitTime, ...]:
        return tuple(SplitTime(dim=1, slices=k, forward=line(), backward=line()) for k in (2, 4))

    times = ComputeTimes(
        operators=tuple(OperatorTime(forward=line(), backward=line(), splits=splits(op)) for op in model.operators),
        unattributed=OperatorTime(forward=line(), backward=line()),
        optimizer_s_per_byte=draw(st.floats(0, 1e-6)),
        blocks=tuple(line() for _ in model.blocks),
    )
    return scale_to_trial(times, {size: PassTimes(draw(SECONDS), draw(SECONDS)) for size in (2, 8)})


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Calibrated by absurd trials, and corrected by absurd runs."""
    model, hardware = draw(models()), draw(clusters())
    times = draw(compute_times(model))
    trials = []
    for mode in draw(st.lists(st.sampled_from(list(WEIGHT_MODES)), max_size=3)):
        plan = hand_made_plan({operator.name: mode for operator in model.operators}, RANKS)
        trial = predict_trial(model, times, hardware, plan, 2)
        trials.append(trial.model_copy(update={"measured_s": draw(SECONDS)}))
    hardware = hardware.model_copy(update={"engine": fit_calibration(hardware.engine, trials)})
    correction = Correction()
    plan = hand_made_plan({operator.name: Mode.DP for operator in model.operators}, RANKS)
    predicted = plan.predicted.model_copy(
        update={"step_time_s": draw(POSITIVE), "compute_time_s": draw(POSITIVE), "communication_time_s": draw(POSITIVE)}
    )
    for _ in range(draw(st.integers(0, 2))):
        step = MeasuredStep(draw(SECONDS), draw(st.one_of(st.none(), SECONDS)), 0)
        correction = update_correction(correction, plan.model_copy(update={"predicted": predicted}), step)
    return Problem(model, correct_cluster(hardware, correction), correct_compute(times, correction), 1 << 40)


def is_time(seconds: float) -> bool:
    return 0 <= seconds < math.inf


@settings(deadline=None)
@given(problems(), st.sampled_from([1, 2, 7]), st.sampled_from([1, 3]))
def test_predicted_times_of_absurd_measurements_are_nonnegative_and_monotonic(
    problem: Problem, batch_size: int, accumulation: int
) -> None:
    for operator, times in zip(problem.model.operators, problem.compute.operators, strict=True):
        arguments = (problem.cluster, problem.compute, times, batch_size, accumulation)
        choices = enumerate_choices(operator, measured_slices=(2, 4) if times.splits else ())
        stored, recomputed = (
            {each: time_cost(operator, each, *arguments, recomputed=flag) for each in choices} for flag in (False, True)
        )
        for costs in (stored, recomputed):
            assert all(is_time(seconds) for cost in costs.values() for seconds in cost)
            if not any(p.trainable for p in operator.parameters):
                assert all(sum(cost) >= sum(costs[ShardingChoice()]) * NEARLY for cost in costs.values())
        assert all(sum(recomputed[each]) >= sum(stored[each]) * NEARLY for each in choices)


@settings(deadline=None, max_examples=30)
@given(problems(), st.sampled_from(list(WEIGHT_MODES)))
def test_search_of_absurd_measurements_predicts_no_gain_from_frozen_shards_or_recomputing(
    problem: Problem, mode: Mode
) -> None:
    search = PlanSearch(problem)
    choices = tuple(ShardingChoice((mode,)) for _ in problem.model.operators)
    frozen_whole = tuple(
        choice if any(p.trainable for p in operator.parameters) else ShardingChoice()
        for operator, choice in zip(problem.model.operators, choices, strict=True)
    )
    blocks = tuple(block.name for block in problem.model.blocks)
    plain, recomputed, whole = (
        search.evaluate_choices(each, 2, 1, names)
        for each, names in ((choices, ()), (choices, blocks), (frozen_whole, ()))
    )
    for candidate in (plain, recomputed, whole):
        assert is_time(candidate.compute_s)
        assert is_time(candidate.communication_s)
    assert recomputed.step_time_s >= plain.step_time_s * (1 - 1e-9)
    assert whole.step_time_s <= plain.step_time_s * (1 + 1e-9)


@settings(deadline=None)
@given(SECONDS, st.floats(1e-3, 1.0), st.floats(0, 1.0), st.sampled_from([1, RANKS]))
def test_apply_trial_of_absurd_time_keeps_step_nonnegative(
    measured_s: float, compute_s: float, communication_s: float, ranks: int
) -> None:
    plan = hand_made_plan({"one": Mode.DP}, ranks)
    predicted = {"step_time_s": compute_s + communication_s, "compute_time_s": compute_s, "samples_per_s": 1.0}
    predicted |= {"communication_time_s": communication_s}
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=predicted)})
    trial = trial_of(plan, measured_s)
    found = apply_trial(plan, [trial]).predicted
    assert all(map(is_time, (found.step_time_s, found.compute_time_s, found.communication_time_s, found.samples_per_s)))


def trial_of(plan: ExecutionPlan, measured_s: float) -> Trial:
    trial = Trial(plan_key=plan_key(plan), predicted_s=1.0, measured_s=1.0, overhead_by_kind_s={}, plan=plan)
    return trial.model_copy(update={"measured_s": measured_s})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ModeOverhead, {"fixed_s": -8.5e-3}),
        (ModeOverhead, {"s_per_byte": math.nan}),
        (CollectiveFit, {"latency_s": -1.0, "s_per_byte": 0.0}),
        (CollectiveFit, {"latency_s": 0.0, "s_per_byte": math.inf}),
        (CollectiveFit, {"latency_s": 0.0, "s_per_byte": 0.0, "overlap_fraction": 1.5}),
        (OperatorTime, {"forward": LinearInBatch(fixed=-1.0)}),
        (Trial, {"plan_key": "", "predicted_s": -19.8e-3, "measured_s": 1.0, "overhead_by_kind_s": {}}),
        (Correction, {"compute": 0.0}),
        (Correction, {"compute": 1e300}),
        (Correction, {"communication": 1e-300}),
    ],
)
def test_measured_values_that_can_not_be_are_refused(kind: type, values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        kind(**values)


def test_plan_file_of_earlier_release_with_negative_engine_times_is_still_read() -> None:
    plan = hand_made_plan({"one": Mode.ZDP}, 2)
    text = plan.to_json().replace('"fixed_s": 0.0', '"fixed_s": -0.0085').replace('"zdp": 0.0', '"zdp": -1.13')
    assert "-0.0085" in text
    engine = ExecutionPlan.from_json(text).cluster.engine
    assert {engine.dp, engine.zdp2, engine.zdp} == {ModeOverhead()}
    assert engine.calibration.for_kinds(["zdp"]) == 0
    assert Cluster.from_json(json.dumps(json.loads(text)["cluster"])).engine == engine

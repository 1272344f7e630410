"""Times measured in parts, scaled to what a trial of the whole step took."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.step_time import (
    calibration_kinds,
    calibration_time,
    communication_time,
    engine_time,
    time_cost,
)
from lightning_osdp.planning.cost.trial_correction import (
    PassTimes,
    Trial,
    apply_trial,
    fit_calibration,
    fit_nonnegative_line,
    pass_times,
    passes_peak_bytes,
    plan_key,
    predict_trial,
    scale_to_trial,
    trial_peak_bytes,
)
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice, ShardingScope, legal_modes
from lightning_osdp.planning.spec.cluster import (
    MAX_CORRECTION,
    CalibrationFactors,
    Cluster,
    ComputeTimes,
    EngineOverhead,
    ModeOverhead,
    OperatorTime,
)
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Operator
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import BatchSizePoint
from tests.support.models import hand_made_plan, uniform_hierarchical_links, wrap_blocks
from tests.support.small_models import MIB, RANKS, blocks_of_one, blocks_of_two, cluster, compute, compute_s, linear

OPERATORS = (
    linear("free.0"),
    linear("free.1", 8),
    linear("pinned").model_copy(update={"replicated_reason": "made so"}),
    linear("twice").model_copy(update={"calls": 2}),
)
MODEL = ModelProfile(fingerprint="", operators=OPERATORS, moments=(), batch_size=1)
PARTS = cluster().model_copy(
    update={
        "engine": EngineOverhead(
            dp=ModeOverhead(fixed_s=1e-4), zdp2=ModeOverhead(fixed_s=1e-3), zdp=ModeOverhead(fixed_s=2e-3)
        )
    }
)
TIMES = compute(MODEL)


def uniform_choice(operator: Operator, mode: Mode) -> ShardingChoice:
    """That mode, or the nearest one that is legal."""
    legal = legal_modes(operator)
    return ShardingChoice((mode if mode in legal else legal[-1],))


PLAIN: ComputeTimes = compute(blocks_of_one(3, 2))


def overhead_s(choices: list[ShardingChoice], hardware: Cluster, operators: tuple[Operator, ...] = OPERATORS) -> float:
    """Seconds of collectives and of the engine."""
    pairs = list(zip(operators, choices, strict=True))
    return sum(
        sum(part(*pair, hardware)) for pair in pairs for part in (communication_time, engine_time, calibration_time)
    )


@given(low=st.floats(1.6, 2.2), growth=st.floats(1.0, 4.0), backward=st.floats(0.9, 1.1))
def test_scale_to_trial_keeps_operator_shares_and_matches_measured_passes(
    low: float, growth: float, backward: float
) -> None:
    """Four times the samples take as long, up to four times as long."""
    parts = pass_times(PLAIN, 2)
    whole = {
        size: PassTimes(factor * parts.forward_s, backward * factor * parts.backward_s)
        for size, factor in ((2, low), (8, low * growth))
    }
    found = scale_to_trial(PLAIN, whole)
    assert {size: pass_times(found, size) for size in whole} == {
        size: pytest.approx(passes) for size, passes in whole.items()
    }
    before, after = PLAIN.operators[0], found.operators[0]
    for size in (2, 5, 8):
        forward, backward_ = (
            now / then for now, then in zip(pass_times(found, size), pass_times(PLAIN, size), strict=True)
        )
        assert after.forward.value_at(size) / before.forward.value_at(size) == pytest.approx(forward)
        assert after.backward.value_at(size) / before.backward.value_at(size) == pytest.approx(backward_)
        assert after.splits[0].forward.value_at(size) / before.splits[0].forward.value_at(size) == pytest.approx(
            forward
        )
        assert after.splits[0].backward.value_at(size) / before.splits[0].backward.value_at(size) == pytest.approx(
            backward_
        )
        assert found.blocks[0].value_at(size) / PLAIN.blocks[0].value_at(size) == pytest.approx(forward)
    assert found.optimizer_s_per_byte == PLAIN.optimizer_s_per_byte


@pytest.mark.parametrize("larger_first", [False, True])
def test_scale_to_trial_does_not_let_constant_work_grow_with_the_batch_by_noise(larger_first: bool) -> None:
    """A table's gradient of 60 ms whatever the batch, and 3 us a sample beside it; the larger trial was 20 % slower."""
    table, layer = (LinearInBatch(fixed=60e-3), LinearInBatch(per_sample=3e-6))
    times = ComputeTimes(
        operators=(OperatorTime(backward=table), OperatorTime(backward=layer)),
        unattributed=OperatorTime(),
        optimizer_s_per_byte=0.0,
    )
    noise = (1.2, 1.0) if larger_first else (1.0, 1.2)
    trials = {
        size: PassTimes(0.0, each * pass_times(times, size).backward_s)
        for size, each in zip((2, 8), noise, strict=True)
    }
    scaled, own = (time.backward for time in scale_to_trial(times, trials).operators)
    assert scaled.value_at(512) == pytest.approx(60e-3 * 1.2**0.5)
    assert 0.9 <= own.value_at(512) / layer.value_at(512) <= 1.3


def test_scale_to_trial_accepts_one_batch_size_and_limits_factor() -> None:
    def times(factor: float) -> PassTimes:
        return PassTimes(*(factor * seconds for seconds in pass_times(PLAIN, 4)))

    twice = scale_to_trial(PLAIN, {4: times(2)})
    assert compute_s(twice, 4) == pytest.approx(2 * compute_s(PLAIN, 4))
    assert compute_s(twice, 8) == pytest.approx(2 * compute_s(PLAIN, 8))
    absurd = scale_to_trial(PLAIN, {4: times(100)})
    assert compute_s(absurd, 4) == pytest.approx(MAX_CORRECTION * compute_s(PLAIN, 4))


def test_fit_nonnegative_line_has_no_negative_slope_or_intercept() -> None:
    assert fit_nonnegative_line([(2, 3.0)]) == LinearInBatch(fixed=3.0)
    assert fit_nonnegative_line([(2, 3.0), (8, 6.0)]) == LinearInBatch(fixed=2.0, per_sample=0.5)
    assert fit_nonnegative_line([(2, 3.0), (8, 1.0)]) == LinearInBatch(fixed=2.0)
    through_nothing = fit_nonnegative_line([(1, 1.0), (3, 5.0)])
    assert through_nothing.fixed == 0
    assert through_nothing.per_sample == pytest.approx(1.6)


def make_plan_or_reject(model: ModelProfile, limit_mib: int, hardware: Cluster) -> ExecutionPlan:
    try:
        return make_plan(Problem(model, hardware, compute(model), limit_mib * MIB), BatchSizePolicy(batch_size=2))
    except InfeasibleError:
        reject()


@pytest.mark.slow
@given(
    count=st.integers(1, 4),
    several=st.booleans(),
    limit_mib=st.integers(16, 120),
    latency_ms=st.sampled_from([0.0, 5.0]),
    overlap=st.sampled_from([0.0, 0.5]),
)
def test_predict_trial_equals_planner_prediction(
    count: int, several: bool, limit_mib: int, latency_ms: float, overlap: float
) -> None:
    """The plan has what the search takes: slices, units that operators share, blocks that are recomputed."""
    model = blocks_of_two(count) if several else blocks_of_one(count, 2)
    hardware = cluster(latency_ms=latency_ms).model_copy(update={"engine": PARTS.engine, "overlap": overlap})
    plan = make_plan_or_reject(model, limit_mib, hardware)
    found = predict_trial(model, compute(model), hardware, plan, 2)
    assert found.measured_s == found.predicted_s == pytest.approx(plan.predicted.step_time_s)
    biased = hardware.model_copy(
        update={"engine": EngineOverhead(**dict(PARTS.engine) | {"calibration": CalibrationFactors(dp=1.0)})}
    )
    assert predict_trial(model, compute(model), biased, plan, 2) == found, "what is known already does not count"


@pytest.mark.slow
@given(count=st.integers(1, 4), several=st.booleans(), limit_mib=st.integers(16, 120))
def test_trial_peak_bytes_is_at_most_plan_peak_minus_replicated_parameters(
    count: int, several: bool, limit_mib: int
) -> None:
    model = blocks_of_two(count) if several else blocks_of_one(count, 2)
    plan = make_plan_or_reject(model, limit_mib, cluster())
    whole = sum(
        p.parameter_bytes
        for operator, made in zip(model.operators, plan.operators, strict=True)
        for p in operator.parameters
        if made.slices == (Mode.DP,)
    )
    gradients = sum(p.gradient_bytes for operator in model.operators for p in operator.parameters)
    needed = trial_peak_bytes(model, plan.cluster, plan, 2)
    assert gradients / RANKS <= needed <= plan.predicted.peak_memory_bytes - whole


def test_trial_peak_bytes_excludes_gradients_freed_by_optimizer_in_backward() -> None:
    model = blocks_of_one(8, 2)
    plan = hand_made_plan({operator.name: Mode.ZDP for operator in model.operators}, RANKS)
    at_once = plan.model_copy(update={"update_in_backward": True})
    gradients = [p.gradient_bytes / RANKS for operator in model.operators for p in operator.parameters]
    usual, less = (trial_peak_bytes(model, plan.cluster, each, 0) for each in (plan, at_once))  # activations aside
    assert usual - less == sum(gradients) - max(gradients)


def test_passes_peak_bytes_counts_one_gradient_at_a_time() -> None:
    model = blocks_of_one(8, 2)
    replicated = hand_made_plan({operator.name: Mode.DP for operator in model.operators}, RANKS)
    gradients = [p.gradient_bytes for operator in model.operators for p in operator.parameters]
    usual = trial_peak_bytes(model, cluster().model_copy(update={"bucket_bytes": 1}), replicated, 0)
    assert passes_peak_bytes(model, cluster(), 0) == max(gradients) < sum(gradients) <= usual
    assert passes_peak_bytes(model, cluster(), 3) > passes_peak_bytes(model, cluster(), 1)


def trial_with_overheads(plan: ExecutionPlan, shares: Mapping[str, float], error: float) -> Trial:
    """Kinds of operators took more than their parts by ``shares``."""
    expected = predict_trial(MODEL, TIMES, PARTS, plan, 1)
    more_s = sum(seconds * shares.get(kind, 0.0) for kind, seconds in expected.overhead_by_kind_s.items())
    return expected.model_copy(update={"measured_s": expected.predicted_s + more_s, "relative_error": error})


def uniform_plan(mode: Mode) -> ExecutionPlan:
    return hand_made_plan({operator.name: uniform_choice(operator, mode).slices[0] for operator in OPERATORS}, RANKS)


def slice_first_operator(plan: ExecutionPlan) -> ExecutionPlan:
    """The first operator in two slices."""
    first, *others = plan.operators
    cut = first.model_copy(update={"slices": first.slices * 2, "split_dim": 1})
    return plan.model_copy(update={"operators": (cut, *others)})


def calibrated_cluster(*trials: Trial) -> Cluster:
    return PARTS.model_copy(update={"engine": fit_calibration(PARTS.engine, trials)})


def test_fit_calibration_precise_trials_determine_overhead_of_each_mode() -> None:
    shares = {"dp": 0.3, "zdp2": 0.1, "zdp": 0.2}
    hardware = calibrated_cluster(*(trial_with_overheads(uniform_plan(mode), shares, 1e-5) for mode in WEIGHT_MODES))
    for mode in WEIGHT_MODES:
        choices = [uniform_choice(operator, mode) for operator in OPERATORS]
        pairs = zip(OPERATORS, choices, strict=True)
        wanted = sum(overhead_s([one], PARTS, (operator,)) * (1 + shares[one.slices[0]]) for operator, one in pairs)
        assert overhead_s(choices, hardware) == pytest.approx(wanted, rel=1e-3)
        assert communication_time(OPERATORS[0], ShardingChoice((mode,)), hardware) == communication_time(
            OPERATORS[0], ShardingChoice((mode,)), PARTS
        )


def test_fit_calibration_keeps_assumed_factor_of_a_mode_that_no_trial_has() -> None:
    engine = PARTS.engine.model_copy(update={"calibration": CalibrationFactors(zdp=0.2, tp=0.25)})
    trial = trial_with_overheads(uniform_plan(Mode.ZDP), {"zdp": 0.05}, 1e-5)
    found = fit_calibration(engine, [trial]).calibration
    assert found.tp == pytest.approx(0.25, abs=0.1), "all modes have a part in common, which was less than assumed"
    assert found.zdp == pytest.approx(0.05, abs=0.02)
    assert fit_calibration(engine, []) == engine


def test_fit_calibration_separates_slicing_and_wrapping_from_mode() -> None:
    uniform_ones = [trial_with_overheads(uniform_plan(mode), {}, 1e-3) for mode in WEIGHT_MODES]
    cut = trial_with_overheads(slice_first_operator(uniform_plan(Mode.ZDP)), {"split": 0.5}, 1e-3)
    found = calibrated_cluster(*uniform_ones, cut).engine.calibration
    assert found.split > 0.3
    assert max(abs(found.dp), abs(found.zdp2), abs(found.zdp)) < 0.1
    together = wrap_blocks(uniform_plan(Mode.ZDP2), ["free"])
    found = calibrated_cluster(*uniform_ones, trial_with_overheads(together, {"wrapped": 0.4}, 1e-3)).engine.calibration
    assert found.wrapped > 0.25
    assert found.split == pytest.approx(0.0, abs=1e-6)


def test_fit_calibration_separates_node_scope_from_world_scope() -> None:
    two_levels = {
        "nodes": 2,
        "devices_per_node": RANKS // 2,
        "hierarchical_links": uniform_hierarchical_links(PARTS.link),
    }
    nodes = PARTS.model_copy(update=two_levels)
    everywhere = uniform_plan(Mode.ZDP)
    inside = [op.model_copy(update={"sharding_group": ShardingScope.NODE}) for op in everywhere.operators]
    expected = [
        predict_trial(MODEL, TIMES, nodes, plan, 1)
        for plan in (everywhere, everywhere.model_copy(update={"operators": tuple(inside)}))
    ]
    assert [set(one.overhead_by_kind_s) - {"dp", "zdp2"} for one in expected] == [{"zdp"}, {"zdp", "node"}]
    longer = expected[1].predicted_s + expected[1].overhead_by_kind_s["node"] / 2
    shown = [expected[0], expected[1].model_copy(update={"measured_s": longer})]
    found = fit_calibration(
        PARTS.engine, [one.model_copy(update={"relative_error": 1e-3}) for one in shown]
    ).calibration
    assert found.node + found.zdp == pytest.approx(0.5, abs=0.05)
    assert abs(found.zdp) < 0.1


@given(factor=st.floats(0.5, 2.0))
def test_fit_calibration_noisy_trial_changes_little_and_repeated_ones_more(factor: float) -> None:
    one = predict_trial(MODEL, TIMES, PARTS, uniform_plan(Mode.ZDP), 1)
    noisy = one.model_copy(update={"measured_s": one.measured_s * factor, "relative_error": 100.0})
    assert calibrated_cluster(noisy).engine.calibration.zdp == pytest.approx(0.0, abs=1e-2)
    usual = noisy.model_copy(update={"relative_error": 0.3})
    once, thrice = (calibrated_cluster(*[usual] * times).engine.calibration.zdp for times in (1, 3))
    assert abs(once) <= abs(thrice) + 1e-9
    assert once >= 0
    assert factor > 1 or once == 0, "no excess is negative"


def test_apply_trial_predicts_measured_time_of_trialled_plan() -> None:
    """However many others say something else."""
    plan = slice_first_operator(uniform_plan(Mode.ZDP)).model_copy(
        update={"cluster": PARTS, "accumulate_grad_batches": 2}
    )
    expected = predict_trial(MODEL, TIMES, PARTS, plan, 1)
    others = [trial_with_overheads(uniform_plan(mode), {}, 1e-3) for mode in WEIGHT_MODES]
    slower = expected.model_copy(update={"measured_s": 1.5 * expected.predicted_s, "relative_error": 0.5})
    known_plan = plan.model_copy(update={"cluster": calibrated_cluster(*others, slower)})
    assert apply_trial(known_plan, others) == known_plan
    found, before = apply_trial(known_plan, [*others, slower]).predicted, plan.predicted
    rest_s = 2 * 0.5 * expected.predicted_s
    assert found.step_time_s - before.step_time_s == pytest.approx(rest_s, rel=0.1)
    assert found.compute_time_s == pytest.approx(before.compute_time_s)
    assert found.step_time_s == pytest.approx(found.compute_time_s + found.communication_time_s)
    assert found.samples_per_s * found.step_time_s == pytest.approx(before.samples_per_s * before.step_time_s)
    once_more = known_plan.model_copy(update={"accumulate_grad_batches": 1})
    waited = slower.model_copy(update={"exposed_comm_s": 0.125 * slower.measured_s})
    told = apply_trial(once_more, [waited, waited]).predicted
    assert told.step_time_s == apply_trial(once_more, [slower]).predicted.step_time_s
    assert told.communication_time_s == pytest.approx(0.125 * slower.measured_s)
    assert told.compute_time_s == pytest.approx(told.step_time_s - told.communication_time_s)
    faster = slower.model_copy(update={"measured_s": 0.0})
    assert apply_trial(known_plan, [faster]).predicted.communication_time_s == 0.0


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_apply_trial_records_no_other_batch_size_as_better_than_tried_plan(factor: float) -> None:
    points = tuple(BatchSizePoint(batch_size=2**k, samples_per_s=10.0 * 2**k, peak_memory_bytes=k) for k in range(4))
    plan = uniform_plan(Mode.ZDP)
    plan = plan.model_copy(update={"cluster": PARTS, "frontier": points, "batch_size": 4})
    expected = predict_trial(MODEL, TIMES, PARTS, plan, 1)
    trial = expected.model_copy(update={"measured_s": factor * expected.predicted_s})
    found = apply_trial(plan, [trial])
    rates = {point.batch_size: point.samples_per_s for point in found.frontier}
    assert max(rates.values()) == rates[4] == found.predicted.samples_per_s
    assert rates[1] == pytest.approx(rates[4] / 4)
    assert [point.peak_memory_bytes for point in found.frontier] == [0, 1, 2, 3]
    assert apply_trial(found.model_copy(update={"predicted": plan.predicted}), [trial]).frontier == found.frontier
    assert apply_trial(plan, []).frontier == points


@given(share=st.floats(0, 0.6), batch_size=st.integers(1, 8), recomputed=st.booleans())
def test_time_cost_counts_calibration_time_as_communication(share: float, batch_size: int, recomputed: bool) -> None:
    """Or a run would teach that compute is slower than it is, and collectives faster."""
    biased = calibrated_cluster(trial_with_overheads(uniform_plan(Mode.ZDP), {"zdp": share}, 1e-4))
    for operator, time in zip(OPERATORS, TIMES.operators, strict=True):
        given_ = operator, uniform_choice(operator, Mode.ZDP)
        before, after = (
            time_cost(*given_, hardware, TIMES, time, batch_size, recomputed=recomputed) for hardware in (PARTS, biased)
        )
        assert after.compute_s == before.compute_s
        if given_[1].slices == (Mode.ZDP,):
            assert (after.communication_s - before.communication_s) * share >= 0


def test_fit_calibration_without_trials_or_deviations_changes_nothing() -> None:
    assert calibrated_cluster() == PARTS
    right = predict_trial(MODEL, TIMES, PARTS, uniform_plan(Mode.DP), 1)
    assert set(dict(calibrated_cluster(right).engine.calibration).values()) == {0.0}


def test_calibration_factors_for_kinds_are_limited() -> None:
    assert CalibrationFactors(dp=100.0).for_kinds(["dp"]) == MAX_CORRECTION - 1
    assert CalibrationFactors(zdp=0.5, split=1.0).for_kinds(["zdp", "split"]) == 1.5
    with pytest.raises(ValidationError, match="greater than -1"):
        CalibrationFactors(zdp=-1.13)


def test_calibration_kinds_name_mode_slicing_wrapping_and_scope() -> None:
    shared = linear("block").model_copy(update={"num_wrapped": 2})
    assert calibration_kinds(shared, ShardingChoice((Mode.DP,))) == ["dp"]
    assert calibration_kinds(shared, ShardingChoice((Mode.ZDP2,))) == ["zdp2", "wrapped"]
    assert calibration_kinds(OPERATORS[0], ShardingChoice((Mode.DP, Mode.ZDP2), 1)) == ["zdp2", "split"]
    assert calibration_kinds(shared, ShardingChoice((Mode.ZDP2,), scope=ShardingScope.NODE)) == [
        "zdp2",
        "wrapped",
        "node",
    ]
    assert calibration_kinds(OPERATORS[0], ShardingChoice((Mode.ZDP,), hierarchical=True)) == ["zdp", "hierarchical"]
    assert calibration_kinds(OPERATORS[0], ShardingChoice((Mode.DP,), scope=ShardingScope.NODE)) == ["dp"]


def test_plan_key_is_equal_only_for_plans_with_same_decisions() -> None:
    plan = uniform_plan(Mode.ZDP2)
    same = plan.model_copy(update={"memory_limit_bytes": 5, "predicted": uniform_plan(Mode.DP).predicted})
    assert plan_key(same) == plan_key(plan)
    others = [plan.model_copy(update=change) for change in ({"batch_size": 2}, {"recomputed": ("free",)})]
    others += [slice_first_operator(plan), wrap_blocks(plan, ["free"]), uniform_plan(Mode.DP)]
    assert len({plan_key(one) for one in (plan, *others)}) == len(others) + 1

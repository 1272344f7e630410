"""What DDP, ZeRO-2 and FSDP would do under the same limit: the same costs as plans of these choices have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_osdp.planning.cost.trial_correction import Trial, apply_trial, predict_trial
from lightning_osdp.planning.search.baselines import find_baselines
from lightning_osdp.planning.search.batch_size_search import (
    THROUGHPUT_TOLERANCE,
    BatchSizePolicy,
    Candidate,
    Problem,
    make_plan,
    pick_batch_size,
)
from lightning_osdp.planning.search.plan_search import PlanSearch
from lightning_osdp.planning.search.plan_selection import select_plan
from lightning_osdp.planning.spec.capabilities import EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, legal_modes
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.search_record import Baseline
from lightning_osdp.planning.spec.wrapping import wrap_assignments
from tests.support.small_models import MIB, blocks_of_two, cluster, compute

MODEL = blocks_of_two(3)
ROOMY = Problem(MODEL, cluster(latency_ms=0.5), compute(MODEL), 1024 * MIB)
WITHOUT_BLOCKS = MODEL.model_copy(update={"blocks": ()})
FLAT = replace(ROOMY, model=WITHOUT_BLOCKS, compute=compute(WITHOUT_BLOCKS))
UP_TO_EIGHT = BatchSizePolicy(max_batch_size=8)
NAMES = ["DDP", "ZeRO-2", "FSDP per operator", "FSDP per block"]
BOTH = [f"{name}{end}" for name in NAMES for end in ("", ", recomputed")]
MODES = dict(zip(NAMES, (Mode.DP, Mode.ZDP2, Mode.ZDP, Mode.ZDP), strict=True))


def under(limit_mib: int, **constraints: object) -> Problem:
    return replace(ROOMY, memory_limit_bytes=limit_mib * MIB, constraints=SearchConstraints(**constraints))


def found(problem: Problem, policy: BatchSizePolicy = UP_TO_EIGHT) -> dict[str, Baseline]:
    plan = select_plan(problem, policy, ())
    return {baseline.name: baseline for baseline in find_baselines(plan, problem, policy)}


def by_hand(problem: Problem, policy: BatchSizePolicy, name: str) -> list[Candidate]:
    """The candidates of one baseline at all batch sizes, by the search's own costs of these very choices."""
    kind, _, recomputed = name.partition(", ")
    problem = replace(problem, constraints=SearchConstraints(slice_granularity=1))
    units = wrap_assignments(problem.model, problem.constraints)[-1] if kind == "FSDP per block" else None
    choices = tuple(
        ShardingChoice((MODES[kind] if MODES[kind] in legal_modes(operator) else legal_modes(operator)[-1],))
        for operator in problem.model.operators
    )
    blocks = tuple(block.name for block in problem.model.blocks) if recomputed else ()
    search = PlanSearch(problem, units)
    return [search.evaluate_choices(choices, *size, blocks) for size in policy.candidates(problem.cluster.ranks)]


@pytest.mark.parametrize("limit_mib", [90, 130, 190, 260, 1024])
@pytest.mark.parametrize("policy", [UP_TO_EIGHT, BatchSizePolicy(batch_size=2), BatchSizePolicy(global_batch_size=32)])
def test_baselines_are_the_best_of_their_kinds_that_fit_or_say_what_is_missing(
    limit_mib: int, policy: BatchSizePolicy
) -> None:
    problem = under(limit_mib)
    for name, baseline in found(problem, policy).items():
        if name.startswith("ZeRO"):  # which has the better of two kinds of units
            continue
        candidates = by_hand(problem, policy, name)
        fitting = [one for one in candidates if one.peak.max_bytes <= problem.memory_limit_bytes]
        assert baseline.fits == bool(fitting)
        best = pick_batch_size(fitting) if fitting else candidates[0]
        assert baseline.samples_per_s == pytest.approx(best.samples_per_s if fitting else 0.0)
        if not baseline.is_plan:  # the search may need more samples to be as fast
            assert (baseline.batch_size, baseline.peak_memory_bytes) == (best.batch_size, best.peak.max_bytes)
        assert baseline.missing_bytes == (0 if fitting else best.peak.max_bytes - limit_mib * MIB)


def test_zero_2_has_the_faster_of_its_two_kinds_of_units() -> None:
    one = BatchSizePolicy(batch_size=1)
    alone = by_hand(ROOMY, one, "ZeRO-2")[0].samples_per_s
    assert found(ROOMY, one)["ZeRO-2"].samples_per_s > alone  # each gather has a latency
    assert found(FLAT, one)["ZeRO-2"].samples_per_s == pytest.approx(by_hand(FLAT, one, "ZeRO-2")[0].samples_per_s)


@pytest.mark.parametrize("limit_mib", [90, 110, 130, 160, 190, 260, 400])
def test_free_plan_is_never_slower_than_a_baseline(limit_mib: int) -> None:
    problem = under(limit_mib)
    plan = select_plan(problem, UP_TO_EIGHT, ())
    for baseline in find_baselines(plan, problem, UP_TO_EIGHT):
        assert plan.predicted.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * baseline.samples_per_s
        assert baseline.peak_memory_bytes <= problem.memory_limit_bytes + baseline.missing_bytes
        assert not baseline.is_tried
        assert not baseline.is_uncertain


def test_baselines_are_named_in_order_and_the_same_each_time() -> None:
    assert list(found(ROOMY)) == BOTH
    assert found(ROOMY) == found(ROOMY)


def test_baseline_that_is_the_plan_itself_is_marked() -> None:
    baselines = found(under(1024, modes="dp", activation_checkpointing=False))
    assert [name for name, one in baselines.items() if one.is_plan] == ["DDP"]


@pytest.mark.parametrize(
    ("constraints", "names"),
    [
        ({"activation_checkpointing": False}, NAMES),
        ({"activation_checkpointing": True}, [f"{name}, recomputed" for name in NAMES]),
        ({"activation_checkpointing": ("blocks.0",)}, [f"{name}, recomputed" for name in NAMES]),
        ({"modes": "zdp", "slice_granularity": 4}, BOTH),
        ({"capabilities": EngineCapabilities(modes=(Mode.DP, Mode.ZDP2))}, BOTH[:4]),
        ({"capabilities": EngineCapabilities(per_block_wrap=False)}, BOTH[:6]),
    ],
)
def test_baselines_follow_constraints_that_are_not_about_modes(
    constraints: dict[str, object], names: list[str]
) -> None:
    assert list(found(under(1024, **constraints))) == names


def test_baselines_without_blocks_or_other_ranks_are_fewer() -> None:
    assert list(found(FLAT)) == NAMES[:3]
    single = replace(ROOMY, cluster=ROOMY.cluster.model_copy(update={"devices_per_node": 1}))
    assert list(found(single)) == ["DDP", "DDP, recomputed"]


def test_operator_that_cannot_be_sharded_that_far_takes_the_nearest_mode() -> None:
    operators = list(MODEL.operators)
    operators[1] = operators[1].model_copy(update={"replicated_reason": "used everywhere"})
    operators[2] = operators[2].model_copy(update={"calls": 2})
    problem = replace(ROOMY, model=MODEL.model_copy(update={"operators": tuple(operators)}))
    one = BatchSizePolicy(batch_size=1)
    expected = by_hand(problem, one, "FSDP per operator")[0]
    assert found(problem, one)["FSDP per operator"].samples_per_s == pytest.approx(expected.samples_per_s)


def trial_of(plan: ExecutionPlan, factor: float) -> Trial:
    expected = predict_trial(MODEL, ROOMY.compute, ROOMY.cluster, plan, plan.batch_size)
    measured = factor * expected.predicted_s
    return expected.model_copy(update={"measured_s": measured, "rounds_s": (measured,) * 3, "plan": plan})


def uniform_plan(mode: str, policy: BatchSizePolicy) -> ExecutionPlan:
    return make_plan(under(1024, modes=mode, activation_checkpointing=False, slice_granularity=1), policy)


def test_baseline_that_was_tried_counts_as_measured() -> None:
    policy = BatchSizePolicy(batch_size=2)
    plan, replicated = uniform_plan("zdp", policy), uniform_plan("dp", policy)
    trials = [trial_of(plan, 1.0), trial_of(replicated, 1.5)]
    by_name = {one.name: one for one in find_baselines(apply_trial(plan, trials), ROOMY, policy, trials)}
    measured = apply_trial(replicated, trials).predicted
    assert by_name["DDP"].is_tried
    assert by_name["DDP"].samples_per_s == pytest.approx(measured.samples_per_s)
    assert measured.samples_per_s < replicated.predicted.samples_per_s
    assert [name for name, one in by_name.items() if one.is_tried] == ["DDP", "FSDP per block"]
    assert by_name["FSDP per block"].is_plan


@pytest.mark.parametrize("factor", [1.0, 1.05, 3.0])
def test_untried_baseline_is_never_shown_as_better_than_the_tried_plan(factor: float) -> None:
    policy = BatchSizePolicy(batch_size=2)
    plan = uniform_plan("zdp", policy)
    trials = [trial_of(plan, factor)]
    known = apply_trial(plan, trials)
    baselines = find_baselines(known, ROOMY, policy, trials)
    assert all(one.samples_per_s <= known.predicted.samples_per_s for one in baselines)
    by_name = {one.name: one for one in baselines}
    assert by_name["DDP"].is_uncertain  # predicted to be faster than all that is sharded
    assert not by_name["DDP"].is_tried
    assert not any(one.is_uncertain for one in find_baselines(plan, ROOMY, policy))  # nothing was tried


def test_trial_that_was_faster_than_predicted_makes_no_gain_over_what_was_not_tried() -> None:
    """Measurements in parts may come from a busier machine than the trial: all are shown at the trial's pace."""
    policy = BatchSizePolicy(batch_size=2)
    plan = uniform_plan("dp", policy)
    trials = [trial_of(plan, 0.5)]
    known = apply_trial(plan, trials)
    before, after = (
        {one.name: known_plan.predicted.samples_per_s / one.samples_per_s for one in baselines}
        for known_plan, baselines in (
            (plan, find_baselines(plan, ROOMY, policy)),
            (known, find_baselines(known, ROOMY, policy, trials)),
        )
    )
    assert known.predicted.samples_per_s > 1.2 * plan.predicted.samples_per_s
    assert after == pytest.approx(before)


def test_plan_file_holds_baselines_and_reads_without_them() -> None:
    plan = make_plan(ROOMY, UP_TO_EIGHT)
    plan = plan.model_copy(update={"baselines": find_baselines(plan, under(100), UP_TO_EIGHT)})
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    text = plan.model_dump_json(exclude={"baselines"})
    assert ExecutionPlan.from_json(text) == plan.model_copy(update={"baselines": ()})

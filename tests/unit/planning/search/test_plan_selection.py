"""A plan that was tried is kept unless another promises clearly more, and only while it may still be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, plan_key, predict_trial
from lightning_osdp.planning.search import batch_size_search
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, WrapPolicySearch, make_plan
from lightning_osdp.planning.search.plan_search import PlanSearch
from lightning_osdp.planning.search.plan_selection import (
    BUDGET_TOLERANCE,
    MAX_CACHED_PLANS,
    MAX_TRIALS,
    MIN_GAIN_IN_BACKWARD,
    CachedPlan,
    add_trials,
    append_cached_plan,
    find_cached_plan,
    repredict,
    request_key,
    select_plan,
)
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import LinearInBatch, NonTrainingWork, OptimizerStep
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import MIN_OVERLAP
from lightning_osdp.planning.spec.wrapping import WrapAssignment, wrap_assignments
from tests.support.small_models import MIB, blocks_of_one, blocks_of_two, cluster, compute

MODEL = blocks_of_one(3, 2)
ROOMY, TIGHT, TIGHTER, TIGHTEST = 1 << 10, 55, 40, 28
RULE = BatchSizePolicy(batch_size=2)


def problem(limit_mib: int = ROOMY, wishes: SearchConstraints | None = None) -> Problem:
    return Problem(MODEL, cluster(latency_ms=5.0), compute(MODEL), limit_mib * MIB, 0, wishes or SearchConstraints())


def plan_under_limit(limit_mib: int = TIGHT) -> ExecutionPlan:
    """What there is under a limit: it shards and recomputes, under the tightest in slices."""
    plan = make_plan(problem(limit_mib), RULE)
    assert plan.predicted.samples_per_s < make_plan(problem(), RULE).predicted.samples_per_s
    return plan


def trial_with_throughput(plan: ExecutionPlan, samples_per_s: float) -> Trial:
    """It has taken as long as makes such a throughput."""
    expected = predict_trial(MODEL, compute(MODEL), plan.cluster, plan, plan.batch_size)
    more_s = plan.global_batch_size / samples_per_s - plan.predicted.step_time_s
    return expected.model_copy(update={"measured_s": expected.predicted_s + more_s})


@pytest.mark.slow
@given(count=st.integers(1, 3), several=st.booleans(), limit_mib=st.integers(16, 120))
def test_repredict_found_plan_gives_same_prediction(count: int, several: bool, limit_mib: int) -> None:
    model = blocks_of_two(count) if several else blocks_of_one(count, 2)
    whole = Problem(model, cluster(), compute(model), limit_mib * MIB)
    try:
        plan = make_plan(whole, BatchSizePolicy(max_batch_size=4))
    except InfeasibleError:
        reject()
    assert (
        repredict(WrapPolicySearch(whole), BatchSizePolicy(max_batch_size=4), plan.without_alternatives(), plan) == plan
    )


def test_select_plan_without_plan_trials_equals_search_result() -> None:
    found = make_plan(problem(), RULE)
    assert select_plan(problem(), RULE, []) == found


@pytest.mark.parametrize(("more", "kept"), [(TRIAL_RELATIVE_ERROR / 2, True), (2 * TRIAL_RELATIVE_ERROR, False)])
def test_select_plan_replaces_trialled_plan_only_beyond_timing_error(more: float, kept: bool) -> None:
    found = make_plan(problem(), RULE)
    shown = found.predicted.samples_per_s / (1 + more)
    plan = select_plan(problem(), RULE, [trial_with_throughput(plan_under_limit(), shown)])
    assert (plan.operators != found.operators) == kept
    assert plan.predicted.samples_per_s == pytest.approx(shown if kept else found.predicted.samples_per_s)
    if kept:  # no batch size that was not tried is shown as better than a plan that was
        assert max(point.samples_per_s for point in plan.frontier) == plan.predicted.samples_per_s
    else:
        assert plan.frontier == found.frontier
    assert (
        select_plan(
            problem(), RULE, [trial_with_throughput(plan_under_limit(), shown)], min_gain=3 * TRIAL_RELATIVE_ERROR
        ).operators
        != found.operators
    )


def test_select_plan_keeps_fastest_of_several_trialled_plans() -> None:
    found, plans = make_plan(problem(), RULE), [plan_under_limit(TIGHT), plan_under_limit(TIGHTER)]
    assert len({plan.operators for plan in plans}) == len(plans)
    most = found.predicted.samples_per_s
    for shares in ((0.5, 0.9), (0.9, 0.5)):
        shown = [trial_with_throughput(plan, share * most) for plan, share in zip(plans, shares, strict=True)]
        plan = select_plan(problem(), RULE, shown, min_gain=0.25)
        assert plan.predicted.samples_per_s == pytest.approx(0.9 * most)
        assert [op.slices for op in plan.operators] == [op.slices for op in plans[shares.index(0.9)].operators]


def test_select_plan_ignores_trials_under_tighter_limits_that_are_much_slower() -> None:
    found = make_plan(problem(), RULE)
    shown = [
        trial_with_throughput(plan, 0.5 * found.predicted.samples_per_s)
        for plan in (plan_under_limit(TIGHT), plan_under_limit(TIGHTER))
    ]
    assert select_plan(problem(), RULE, shown, min_gain=0.25) == found


def test_select_plan_drops_trialled_plan_excluded_by_policy_or_constraints() -> None:
    earlier = plan_under_limit(TIGHTEST)
    shown = [trial_with_throughput(earlier, 1e9)]
    assert max(len(op.slices) for op in earlier.operators) > 1
    kept = select_plan(problem(), RULE, shown)
    assert [op.choice for op in kept.operators] == [op.choice for op in earlier.operators]
    for whole, rule in (
        (problem(TIGHT), BatchSizePolicy(batch_size=1)),
        (problem(), BatchSizePolicy(batch_size=2, accumulation=2)),
        (problem(wishes=SearchConstraints(activation_checkpointing=False)), RULE),
        (problem(wishes=SearchConstraints(slice_granularity=1)), RULE),
        (problem(wishes=SearchConstraints(modes="dp")), RULE),
    ):
        found = make_plan(whole, rule)
        assert select_plan(whole, rule, shown) == found


def test_select_plan_drops_trialled_plan_that_no_longer_fits() -> None:
    whole = problem(TIGHTER)
    found = make_plan(whole, RULE)
    assert select_plan(whole, RULE, [trial_with_throughput(plan_under_limit(TIGHT), 1e9)]) == found


NOTHING = (SearchConstraints(), NonTrainingWork(), Correction())


def cached_plan_of(plan: ExecutionPlan, rule: BatchSizePolicy = RULE) -> CachedPlan:
    return CachedPlan(request_key=request_key(rule, *NOTHING), plan=plan.without_alternatives())


def find_cached_plan_under_limit(
    limit_mib: float, earlier: Sequence[CachedPlan], rule: BatchSizePolicy = RULE
) -> ExecutionPlan | None:
    """What an earlier start has come to, for a limit."""
    whole = replace(problem(), memory_limit_bytes=round(limit_mib * MIB))
    return find_cached_plan(whole, rule, request_key(rule, *NOTHING), earlier, [])


def test_find_cached_plan_returns_plan_of_same_problem() -> None:
    plan = plan_under_limit(TIGHT)
    assert find_cached_plan_under_limit(TIGHT, [cached_plan_of(plan)]) == plan
    assert find_cached_plan_under_limit(TIGHT, []) is None
    assert find_cached_plan_under_limit(TIGHT, [cached_plan_of(plan)], BatchSizePolicy(batch_size=1)) is None
    took = trial_with_throughput(plan, plan.predicted.samples_per_s / 2)
    again = find_cached_plan(problem(TIGHT), RULE, request_key(RULE, *NOTHING), [cached_plan_of(plan)], [took])
    assert again is not None
    assert again.predicted.samples_per_s == pytest.approx(plan.predicted.samples_per_s / 2)


def test_find_cached_plan_prepares_only_wrap_assignment_of_cached_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks_of_two(3)
    whole = Problem(model, cluster(), compute(model), ROOMY * MIB)
    assert len(wrap_assignments(model, whole.constraints)) == 2
    plan = make_plan(whole, RULE)
    assert not any(op.unit for op in plan.operators)
    prepared: list[WrapAssignment | None] = []

    def desk(problem: Problem, units: WrapAssignment | None = None) -> PlanSearch:
        prepared.append(units)
        return PlanSearch(problem, units)

    monkeypatch.setattr(batch_size_search, "PlanSearch", desk)
    assert find_cached_plan(whole, RULE, request_key(RULE, *NOTHING), [cached_plan_of(plan)], []) == plan
    assert prepared == [("",) * len(plan.operators)]


@pytest.mark.parametrize(
    ("share", "known"), [(1 + BUDGET_TOLERANCE / 2, True), (1 + 3 * BUDGET_TOLERANCE, False), (0.5, False)]
)
def test_find_cached_plan_accepts_similar_budget_while_plan_fits(share: float, known: bool) -> None:
    plan = find_cached_plan_under_limit(share * TIGHT, [cached_plan_of(plan_under_limit(TIGHT))])
    assert (plan is not None) == known
    if plan is not None:
        assert plan.predicted == plan_under_limit(TIGHT).predicted
        assert plan.memory_limit_bytes == round(share * TIGHT * MIB)


def test_find_cached_plan_rejects_plan_that_no_longer_fits() -> None:
    plan = plan_under_limit(TIGHT)
    fits = plan.predicted.peak_memory_bytes / MIB
    assert find_cached_plan_under_limit(fits, [cached_plan_of(plan)]) is not None
    assert find_cached_plan_under_limit(fits - 1, [cached_plan_of(plan)]) is None


def test_request_key_covers_everything_a_plan_depends_on() -> None:
    same = request_key(RULE, *NOTHING)
    assert same == request_key(
        BatchSizePolicy(batch_size=2), SearchConstraints(), NonTrainingWork(), Correction(compute=1.05, memory_bytes=9)
    )
    others = [
        request_key(BatchSizePolicy(max_batch_size=2), *NOTHING),
        request_key(RULE, SearchConstraints(activation_checkpointing=False), NonTrainingWork(), Correction()),
        request_key(RULE, SearchConstraints(modes="zdp"), NonTrainingWork(), Correction()),
        request_key(RULE, SearchConstraints(modes={"*": "zdp"}), NonTrainingWork(), Correction()),
        request_key(RULE, SearchConstraints(), NonTrainingWork(checkpoint_memory="gathered"), Correction()),
        request_key(
            RULE, SearchConstraints(), NonTrainingWork(), Correction(communication=1.5)
        ),  # other plans may be better
    ]
    assert len({same, *others}) == 1 + len(others)


def test_append_cached_plan_keeps_latest_plans() -> None:
    plan = plan_under_limit(TIGHT)
    answers: tuple[CachedPlan, ...] = ()
    for size in range(2 * MAX_CACHED_PLANS):
        answers = append_cached_plan(answers, cached_plan_of(plan, BatchSizePolicy(batch_size=1 + size)))
    assert [one.request_key for one in answers] == [
        request_key(BatchSizePolicy(batch_size=1 + size), *NOTHING)
        for size in range(MAX_CACHED_PLANS, 2 * MAX_CACHED_PLANS)
    ]
    assert append_cached_plan(answers, answers[0]) == (*answers[1:], answers[0])
    elsewhere = answers[0].model_copy(update={"plan": plan.model_copy(update={"memory_limit_bytes": 1 << 40})})
    assert append_cached_plan(answers[:2], elsewhere) == (*answers[:2], elsewhere)


@pytest.mark.slow
def test_add_trials_replaces_those_of_same_plans_and_keeps_latest() -> None:
    plan = plan_under_limit(TIGHT)
    plans = [plan.model_copy(update={"batch_size": 1 + at}) for at in range(MAX_TRIALS + 2)]
    trials = [trial_with_throughput(each, 1.0) for each in plans]
    again = trial_with_throughput(plans[1], 2.0)
    assert add_trials(trials[:3], [again]) == (trials[0], trials[2], again)
    assert add_trials(trials[:-1], trials[-1:]) == tuple(trials[2:])


FLAT = blocks_of_one(6, 0).model_copy(
    update={
        "blocks": (),
        "moments": tuple(each.model_copy(update={"live": LinearInBatch()}) for each in blocks_of_one(6, 0).moments),
    }
)
"""Without activations: its peak is at the end of the backward pass, when all gradients are there."""

ONE = BatchSizePolicy(batch_size=1)


def separable_problem(limit_mib: int, allowed: bool = True) -> Problem:
    """A problem of a model whose parameters may be updated one by one."""
    model = FLAT.model_copy(update={"optimizer_step": OptimizerStep(per_parameter=True)})
    wishes = SearchConstraints(update_in_backward=allowed)
    return Problem(model, cluster(latency_ms=5.0), compute(model), limit_mib * MIB, 0, wishes)


def min_memory_mib(one: Problem) -> float:
    with pytest.raises(InfeasibleError) as failure:
        make_plan(replace(one, memory_limit_bytes=1), ONE)
    return failure.value.needed_bytes / MIB


def test_select_plan_uses_optimizer_in_backward_where_nothing_else_fits() -> None:
    usual, at_once = (
        min_memory_mib(one) for one in (separable_problem(1), separable_problem(1).with_optimizer_in_backward())
    )
    assert at_once < usual - 1
    between = int(usual + at_once) // 2
    plan = select_plan(separable_problem(between), ONE, [])
    assert plan.update_in_backward
    assert plan.predicted.peak_memory_bytes <= between * MIB
    for refused in (separable_problem(between, allowed=False), replace(separable_problem(between), model=FLAT)):
        with pytest.raises(InfeasibleError):
            select_plan(refused, ONE, [])
    with pytest.raises(InfeasibleError):  # gradients of several passes are summed
        select_plan(separable_problem(between), replace(ONE, accumulation=2), [])


def test_select_plan_with_ample_memory_avoids_optimizer_in_backward() -> None:
    assert not select_plan(separable_problem(ROOMY), ONE, []).update_in_backward


@pytest.mark.parametrize("limit_mib", [27, 30, 40])
def test_select_plan_decides_optimizer_in_backward_by_throughput(limit_mib: int) -> None:
    rule = BatchSizePolicy(max_batch_size=8)
    usual = make_plan(separable_problem(limit_mib), rule)
    at_once = make_plan(separable_problem(limit_mib).with_optimizer_in_backward(), rule)
    plan = select_plan(separable_problem(limit_mib), rule, [])
    pays = at_once.predicted.samples_per_s > usual.predicted.samples_per_s * (1 + MIN_GAIN_IN_BACKWARD)
    assert plan == (at_once if pays else usual)


def test_find_cached_plan_repredicts_with_optimizer_in_backward() -> None:
    limit_mib = int(min_memory_mib(separable_problem(1)))
    wanted = separable_problem(limit_mib)
    question = request_key(ONE, wanted.constraints, NonTrainingWork(), Correction())
    plan = select_plan(wanted, ONE, [])
    assert plan.update_in_backward
    before = [CachedPlan(request_key=question, plan=plan.without_alternatives())]
    again = find_cached_plan(wanted, ONE, question, before, [])
    assert again is not None
    assert again.update_in_backward
    assert again.predicted == plan.predicted
    assert repredict(WrapPolicySearch(wanted), ONE, plan, plan) is None  # gradients would be kept


@pytest.mark.parametrize("gain", [TRIAL_RELATIVE_ERROR, 1.0])
def test_select_plan_leaves_trialled_plan_for_in_backward_only_above_gain(gain: float) -> None:
    tight, rule = separable_problem(30), BatchSizePolicy(max_batch_size=8)
    usual = make_plan(tight, rule)
    expected = predict_trial(tight.model, tight.compute, usual.cluster, usual, usual.batch_size)
    shown = expected.model_copy(update={"plan": usual.without_alternatives()})
    promised = make_plan(tight.with_optimizer_in_backward(), rule).predicted.samples_per_s
    more = (
        promised / select_plan(replace(tight, constraints=SearchConstraints()), rule, [shown]).predicted.samples_per_s
        - 1
    )
    assert MIN_GAIN_IN_BACKWARD < more < 1.0
    assert select_plan(tight, rule, [shown], gain).update_in_backward == (gain < 1.0)


def test_select_plan_keeps_fast_trialled_plan_with_optimizer_in_backward() -> None:
    tight, rule = separable_problem(40), BatchSizePolicy(max_batch_size=8)
    assert not select_plan(tight, rule, []).update_in_backward
    at_once = make_plan(tight.with_optimizer_in_backward(), rule)
    expected = predict_trial(tight.model, tight.compute, at_once.cluster, at_once, at_once.batch_size)
    shown = expected.model_copy(update={"plan": at_once.without_alternatives()})
    assert select_plan(tight, rule, [shown]).update_in_backward
    slow = shown.model_copy(update={"measured_s": 2 * shown.measured_s})
    assert not select_plan(tight, rule, [slow]).update_in_backward


def overlappable_problem(limit_mib: int, hidden: float, gather_ms: float = 8.0) -> Problem:
    """A problem of a model that has to be sharded, over a link of which compute may hide a share."""
    slow = cluster(all_reduce_ms=2 * gather_ms, gather_ms=gather_ms, scatter_ms=gather_ms)
    fits = {
        name: getattr(slow.link, name).model_copy(update={"overlap_fraction": hidden})
        for name in type(slow.link).model_fields
    }
    link = slow.link.model_copy(update=fits)
    return replace(separable_problem(limit_mib), cluster=slow.model_copy(update={"link": link}))


def test_select_plan_prefetches_where_compute_hides_enough_communication() -> None:
    rule = BatchSizePolicy(max_batch_size=8)
    for hidden in (0.0, MIN_OVERLAP / 2):
        plan = select_plan(overlappable_problem(60, hidden), rule, [])
        assert plan.cluster.prefetch_max_bytes == 0
    usual, ahead = (
        select_plan(overlappable_problem(60, 0.0), rule, []),
        select_plan(overlappable_problem(60, 0.8), rule, []),
    )
    assert ahead.cluster.prefetch_max_bytes == 2 * MIB  # the power of two below a twenty-fourth of the limit
    assert ahead.predicted.samples_per_s > usual.predicted.samples_per_s
    assert ahead.predicted.peak_memory_bytes <= 60 * MIB


def test_select_plan_skips_prefetch_where_larger_batch_size_gains_more() -> None:
    """Slices take memory for each sample, so the limit decides the batch size."""
    wanted = replace(overlappable_problem(48, 0.3, 1.0), constraints=SearchConstraints(slice_granularity=2))
    rule = BatchSizePolicy(max_batch_size=64)
    apart, ahead = make_plan(wanted, rule), make_plan(wanted.with_prefetch(), rule)
    assert ahead.cluster.prefetch_max_bytes
    assert 4 < ahead.batch_size < apart.batch_size
    assert ahead.predicted.samples_per_s < apart.predicted.samples_per_s
    plan = select_plan(wanted, rule, [])
    assert (plan.operators, plan.batch_size, plan.cluster.prefetch_max_bytes) == (apart.operators, apart.batch_size, 0)


def test_search_goes_on_to_batch_sizes_at_which_plans_with_slices_do_not_fit() -> None:
    """It ended at 12, since slices take least memory of one sample; whole operators take none for a sample."""
    given = replace(overlappable_problem(38, 0.8, 1.0), constraints=SearchConstraints())
    plan = make_plan(given, BatchSizePolicy(max_batch_size=64))
    assert [point.batch_size for point in plan.frontier][-1] == 64
    assert all(len(operator.slices) == 1 for operator in plan.operators)


def test_with_prefetch_has_no_effect_where_ranks_share_a_node_link() -> None:
    problem = overlappable_problem(60, 0.8)
    assert problem.with_prefetch().has_prefetch
    nodes = problem.cluster.model_copy(update={"nodes": 2, "devices_per_node": 2})
    assert not replace(problem, cluster=nodes).with_prefetch().has_prefetch


def test_select_plan_limits_prefetch_where_it_would_not_fit() -> None:
    sharded = overlappable_problem(1, 0.8)
    least = min_memory_mib(replace(sharded, constraints=SearchConstraints()))
    tight = replace(overlappable_problem(int(least) + 1, 0.8), constraints=SearchConstraints())
    with pytest.raises(InfeasibleError):
        make_plan(replace(tight, cluster=tight.cluster.model_copy(update={"prefetch_max_bytes": 4 * MIB})), ONE)
    assert select_plan(tight, ONE, []).cluster.prefetch_max_bytes <= MIB


def test_find_cached_plan_repredicts_with_prefetch() -> None:
    wanted = overlappable_problem(60, 0.8)
    question = request_key(ONE, wanted.constraints, NonTrainingWork(), Correction())
    plan = select_plan(wanted, ONE, [])
    assert plan.cluster.prefetch_max_bytes
    before = [CachedPlan(request_key=question, plan=plan.without_alternatives())]
    again = find_cached_plan(wanted, ONE, question, before, [])
    assert again is not None
    assert (again.predicted, again.cluster) == (plan.predicted, plan.cluster)
    unhidden = find_cached_plan(overlappable_problem(60, 0.0), ONE, question, before, [])
    assert unhidden is None  # the link is another one


def test_plan_key_and_predict_trial_distinguish_prefetch() -> None:
    ahead = select_plan(overlappable_problem(60, 0.8), ONE, [])
    apart = ahead.model_copy(update={"cluster": ahead.cluster.model_copy(update={"prefetch_max_bytes": 0})})
    assert plan_key(ahead) != plan_key(apart)
    model = overlappable_problem(60, 0.8).model
    waits = [predict_trial(model, compute(model), ahead.cluster, plan, 1).predicted_s for plan in (ahead, apart)]
    assert waits[0] < waits[1]


def test_select_plan_past_deadline_takes_first_feasible_variant() -> None:
    wanted = overlappable_problem(60, 0.8)
    plan = select_plan(wanted, ONE, [], deadline_reached=lambda: True)
    assert plan.predicted.peak_memory_bytes <= wanted.memory_limit_bytes
    assert (plan.update_in_backward, plan.cluster.prefetch_max_bytes > 0) == (False, True)
    nothing = replace(wanted, memory_limit_bytes=MIB)
    with pytest.raises(InfeasibleError):
        select_plan(nothing, ONE, [], deadline_reached=lambda: True)

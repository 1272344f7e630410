"""A plan that was rehearsed is kept unless another promises clearly more, and only while it may still be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning import schedule
from lightning_osdp.planning.calibration import Correction
from lightning_osdp.planning.candidates import Desk
from lightning_osdp.planning.joining import Units, ways
from lightning_osdp.planning.operators import BetweenSteps, Line, OptimizerStep
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import STEP_ERROR, Rehearsal, decided, foreseen
from lightning_osdp.planning.schedule import BatchRule, Desks, Problem, make_plan
from lightning_osdp.planning.settled import (
    MOST_FOUND,
    MOST_SETTLED,
    SAME_ROOM,
    WORTH_UPDATING,
    Settled,
    asked,
    kept,
    latest,
    predicted_now,
    settled,
    settled_before,
)
from lightning_osdp.planning.space import WORTH_HIDING
from lightning_osdp.planning.wishes import Wishes
from tests.planning.small import MIB, blocks_of_one, blocks_of_two, cluster, compute

MODEL = blocks_of_one(3, 2)
ROOMY, TIGHT, TIGHTER, TIGHTEST = 1 << 10, 55, 40, 28
RULE = BatchRule(batch_size=2)


def problem(limit_mib: int = ROOMY, wishes: Wishes | None = None) -> Problem:
    return Problem(MODEL, cluster(latency_ms=5.0), compute(MODEL), limit_mib * MIB, 0, wishes or Wishes())


def slow(limit_mib: int = TIGHT) -> ExecutionPlan:
    """What there is under a limit: it shards and recomputes, under the tightest in slices."""
    plan = make_plan(problem(limit_mib), RULE)
    assert plan.predicted.samples_per_s < make_plan(problem(), RULE).predicted.samples_per_s
    return plan


def rehearsed(plan: ExecutionPlan, samples_per_s: float) -> Rehearsal:
    """It has taken as long as makes such a throughput."""
    expected = foreseen(MODEL, compute(MODEL), plan.cluster, plan, plan.batch_size)
    more_s = plan.global_batch_size / samples_per_s - plan.predicted.step_time_s
    return expected.model_copy(update={"took_s": expected.foreseen_s + more_s, "plan": plan.without_reasons()})


@given(count=st.integers(1, 3), several=st.booleans(), limit_mib=st.integers(16, 120))
def test_what_was_found_is_predicted_as_it_was(count: int, several: bool, limit_mib: int) -> None:
    model = blocks_of_two(count) if several else blocks_of_one(count, 2)
    whole = Problem(model, cluster(), compute(model), limit_mib * MIB)
    try:
        plan = make_plan(whole, BatchRule(max_batch_size=4))
    except InfeasibleError:
        reject()
    assert predicted_now(Desks(whole), BatchRule(max_batch_size=4), plan.without_reasons(), plan) == plan


def test_without_rehearsals_the_search_decides() -> None:
    found = make_plan(problem(), RULE)
    assert settled(problem(), RULE, []) == found
    uniform = rehearsed(slow(), 1e9).model_copy(update={"plan": None})  # it says how to predict, not what to take
    assert settled(problem(), RULE, [uniform]) == found


@pytest.mark.parametrize(("more", "kept"), [(STEP_ERROR / 2, True), (2 * STEP_ERROR, False)])
def test_another_plan_has_to_promise_more_than_the_clocks_error(more: float, kept: bool) -> None:
    found = make_plan(problem(), RULE)
    shown = found.predicted.samples_per_s / (1 + more)
    plan = settled(problem(), RULE, [rehearsed(slow(), shown)])
    assert (plan.operators != found.operators) == kept
    assert plan.predicted.samples_per_s == pytest.approx(shown if kept else found.predicted.samples_per_s)
    assert plan.frontier == found.frontier
    assert settled(problem(), RULE, [rehearsed(slow(), shown)], gain=3 * STEP_ERROR).operators != found.operators


def test_of_several_rehearsals_the_best_counts() -> None:
    found, plans = make_plan(problem(), RULE), [slow(TIGHT), slow(TIGHTER)]
    assert len({plan.operators for plan in plans}) == len(plans)
    most = found.predicted.samples_per_s
    for shares in ((0.5, 0.9), (0.9, 0.5)):
        shown = [rehearsed(plan, share * most) for plan, share in zip(plans, shares, strict=True)]
        plan = settled(problem(), RULE, shown, gain=0.25)
        assert plan.predicted.samples_per_s == pytest.approx(0.9 * most)
        assert [op.slices for op in plan.operators] == [op.slices for op in plans[shares.index(0.9)].operators]


def test_plans_that_were_rehearsed_for_less_memory_do_not_keep_more_from_being_used() -> None:
    found = make_plan(problem(), RULE)
    shown = [rehearsed(plan, 0.5 * found.predicted.samples_per_s) for plan in (slow(TIGHT), slow(TIGHTER))]
    assert settled(problem(), RULE, shown, gain=0.25) == found


def test_what_may_no_longer_be_had_is_not_taken() -> None:
    earlier = slow(TIGHTEST)
    shown = [rehearsed(earlier, 1e9)]
    assert max(len(op.slices) for op in earlier.operators) > 1
    kept = settled(problem(), RULE, shown)
    assert [op.choice for op in kept.operators] == [op.choice for op in earlier.operators]
    for whole, rule in (
        (problem(TIGHT), BatchRule(batch_size=1)),
        (problem(), BatchRule(batch_size=2, accumulation=2)),
        (problem(wishes=Wishes(activation_checkpointing=False)), RULE),
        (problem(wishes=Wishes(slice_granularity=1)), RULE),
    ):
        found = make_plan(whole, rule)
        assert settled(whole, rule, shown) == found


def test_what_no_longer_fits_is_not_taken() -> None:
    whole = problem(TIGHTER)
    found = make_plan(whole, RULE)
    assert settled(whole, RULE, [rehearsed(slow(TIGHT), 1e9)]) == found


NOTHING = (Wishes(), BetweenSteps(), Correction())


def answered(plan: ExecutionPlan, rule: BatchRule = RULE) -> Settled:
    return Settled(asked=asked(rule, *NOTHING), plan=plan.without_reasons())


def before(limit_mib: float, earlier: Sequence[Settled], rule: BatchRule = RULE) -> ExecutionPlan | None:
    """What an earlier start has come to, for a limit."""
    whole = replace(problem(), memory_limit_bytes=round(limit_mib * MIB))
    return settled_before(whole, rule, asked(rule, *NOTHING), earlier, [])


def test_the_same_problem_is_not_searched_again() -> None:
    plan = slow(TIGHT)
    assert before(TIGHT, [answered(plan)]) == plan
    assert before(TIGHT, []) is None
    assert before(TIGHT, [answered(plan)], BatchRule(batch_size=1)) is None
    took = rehearsed(plan, plan.predicted.samples_per_s / 2)
    again = settled_before(problem(TIGHT), RULE, asked(RULE, *NOTHING), [answered(plan)], [took])
    assert again is not None
    assert again.predicted.samples_per_s == pytest.approx(plan.predicted.samples_per_s / 2)


def test_to_look_a_plan_up_not_all_ways_to_share_units_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks_of_two(3)
    whole = Problem(model, cluster(), compute(model), ROOMY * MIB)
    assert len(ways(model, whole.wishes)) == 2
    plan = make_plan(whole, RULE)
    assert not any(op.unit for op in plan.operators)
    prepared: list[Units | None] = []

    def desk(problem: Problem, units: Units | None = None) -> Desk:
        prepared.append(units)
        return Desk(problem, units)

    monkeypatch.setattr(schedule, "Desk", desk)
    assert settled_before(whole, RULE, asked(RULE, *NOTHING), [answered(plan)], []) == plan
    assert prepared == [("",) * len(plan.operators)]


@pytest.mark.parametrize(("share", "known"), [(1 + SAME_ROOM / 2, True), (1 + 3 * SAME_ROOM, False), (0.5, False)])
def test_nearly_as_much_memory_is_the_same_problem_while_the_plan_fits(share: float, known: bool) -> None:
    plan = before(share * TIGHT, [answered(slow(TIGHT))])
    assert (plan is not None) == known
    if plan is not None:
        assert plan.predicted == slow(TIGHT).predicted
        assert plan.memory_limit_bytes == round(share * TIGHT * MIB)


def test_a_plan_that_no_longer_fits_is_searched_again() -> None:
    plan = slow(TIGHT)
    fits = plan.predicted.peak_memory_bytes / MIB
    assert before(fits, [answered(plan)]) is not None
    assert before(fits - 1, [answered(plan)]) is None


def test_what_is_asked_for_names_all_that_a_plan_depends_on() -> None:
    same = asked(RULE, *NOTHING)
    assert same == asked(BatchRule(batch_size=2), Wishes(), BetweenSteps(), Correction(compute=1.05, memory_bytes=9))
    others = [
        asked(BatchRule(max_batch_size=2), *NOTHING),
        asked(RULE, Wishes(activation_checkpointing=False), BetweenSteps(), Correction()),
        asked(RULE, Wishes(), BetweenSteps(saving="gathered"), Correction()),
        asked(RULE, Wishes(), BetweenSteps(), Correction(communication=1.5)),  # other plans may be better
    ]
    assert len({same, *others}) == 1 + len(others)


def test_the_latest_answers_are_kept() -> None:
    plan = slow(TIGHT)
    answers: tuple[Settled, ...] = ()
    for size in range(2 * MOST_SETTLED):
        answers = kept(answers, answered(plan, BatchRule(batch_size=1 + size)))
    assert [one.asked for one in answers] == [
        asked(BatchRule(batch_size=1 + size), *NOTHING) for size in range(MOST_SETTLED, 2 * MOST_SETTLED)
    ]
    assert kept(answers, answers[0]) == (*answers[1:], answers[0])
    elsewhere = answers[0].model_copy(update={"plan": plan.model_copy(update={"memory_limit_bytes": 1 << 40})})
    assert kept(answers[:2], elsewhere) == (*answers[:2], elsewhere)


def test_the_latest_rehearsals_of_what_was_found_are_kept_and_all_others() -> None:
    found = [rehearsed(slow(TIGHT), 1.0 + at) for at in range(MOST_FOUND + 2)]
    uniform = [one.model_copy(update={"plan": None}) for one in found[:3]]
    assert latest([*uniform[:2], *found, uniform[2]]) == (*uniform[:2], *found[2:], uniform[2])
    assert latest(found[:3]) == tuple(found[:3])


FLAT = blocks_of_one(6, 0).model_copy(
    update={
        "blocks": (),
        "moments": tuple(each.model_copy(update={"live": Line()}) for each in blocks_of_one(6, 0).moments),
    }
)
"""Without activations: its peak is at the end of the backward pass, when all gradients are there."""

ONE = BatchRule(batch_size=1)


def separable(limit_mib: int, allowed: bool = True) -> Problem:
    """Of a model whose parameters may be updated one by one."""
    model = FLAT.model_copy(update={"optimizer_step": OptimizerStep(separable=True)})
    wishes = Wishes(update_in_backward=allowed)
    return Problem(model, cluster(latency_ms=5.0), compute(model), limit_mib * MIB, 0, wishes)


def least_mib(one: Problem) -> float:
    with pytest.raises(InfeasibleError) as failure:
        make_plan(replace(one, memory_limit_bytes=1), ONE)
    return failure.value.needed_bytes / MIB


def test_gradients_are_not_kept_where_nothing_fits_otherwise() -> None:
    usual, at_once = (least_mib(one) for one in (separable(1), separable(1).updating_in_backward()))
    assert at_once < usual - 1
    between = int(usual + at_once) // 2
    plan = settled(separable(between), ONE, [])
    assert plan.update_in_backward
    assert plan.predicted.peak_memory_bytes <= between * MIB
    for refused in (separable(between, allowed=False), replace(separable(between), model=FLAT)):
        with pytest.raises(InfeasibleError):
            settled(refused, ONE, [])
    with pytest.raises(InfeasibleError):  # gradients of several passes are summed
        settled(separable(between), replace(ONE, accumulation=2), [])


def test_gradients_are_kept_where_that_costs_nothing() -> None:
    assert not settled(separable(ROOMY), ONE, []).update_in_backward


@pytest.mark.parametrize("limit_mib", [27, 30, 40])
def test_whether_gradients_are_kept_is_decided_by_throughput(limit_mib: int) -> None:
    rule = BatchRule(max_batch_size=8)
    usual = make_plan(separable(limit_mib), rule)
    at_once = make_plan(separable(limit_mib).updating_in_backward(), rule)
    plan = settled(separable(limit_mib), rule, [])
    pays = at_once.predicted.samples_per_s > usual.predicted.samples_per_s * (1 + WORTH_UPDATING)
    assert plan == (at_once if pays else usual)


def test_an_earlier_plan_is_predicted_with_its_own_way_to_update() -> None:
    limit_mib = int(least_mib(separable(1)))
    wanted = separable(limit_mib)
    question = asked(ONE, wanted.wishes, BetweenSteps(), Correction())
    plan = settled(wanted, ONE, [])
    assert plan.update_in_backward
    before = [Settled(asked=question, plan=plan.without_reasons())]
    again = settled_before(wanted, ONE, question, before, [])
    assert again is not None
    assert again.update_in_backward
    assert again.predicted == plan.predicted
    assert predicted_now(Desks(wanted), ONE, plan, plan) is None  # gradients would be kept


@pytest.mark.parametrize("gain", [STEP_ERROR, 1.0])
def test_a_rehearsed_plan_that_keeps_gradients_is_left_for_the_gain_alone(gain: float) -> None:
    tight, rule = separable(30), BatchRule(max_batch_size=8)
    usual = make_plan(tight, rule)
    expected = foreseen(tight.model, tight.compute, usual.cluster, usual, usual.batch_size)
    shown = expected.model_copy(update={"plan": usual.without_reasons()})
    promised = make_plan(tight.updating_in_backward(), rule).predicted.samples_per_s
    more = promised / settled(replace(tight, wishes=Wishes()), rule, [shown]).predicted.samples_per_s - 1
    assert WORTH_UPDATING < more < 1.0
    assert settled(tight, rule, [shown], gain).update_in_backward == (gain < 1.0)


def test_a_rehearsed_plan_that_updates_in_the_backward_pass_is_kept() -> None:
    tight, rule = separable(40), BatchRule(max_batch_size=8)
    assert not settled(tight, rule, []).update_in_backward
    at_once = make_plan(tight.updating_in_backward(), rule)
    expected = foreseen(tight.model, tight.compute, at_once.cluster, at_once, at_once.batch_size)
    shown = expected.model_copy(update={"plan": at_once.without_reasons()})
    assert settled(tight, rule, [shown]).update_in_backward
    slow = shown.model_copy(update={"took_s": 2 * shown.took_s})
    assert not settled(tight, rule, [slow]).update_in_backward


def hideable(limit_mib: int, hidden: float, gather_ms: float = 8.0) -> Problem:
    """Of a model that has to be sharded, over a link of which compute may hide a share."""
    slow = cluster(all_reduce_ms=2 * gather_ms, gather_ms=gather_ms, scatter_ms=gather_ms)
    fits = {
        name: getattr(slow.link, name).model_copy(update={"hidden": hidden}) for name in type(slow.link).model_fields
    }
    link = slow.link.model_copy(update=fits)
    return replace(separable(limit_mib), cluster=slow.model_copy(update={"link": link}))


def test_units_run_ahead_where_compute_hides_enough_of_the_link() -> None:
    rule = BatchRule(max_batch_size=8)
    for hidden in (0.0, WORTH_HIDING / 2):
        plan = settled(hideable(60, hidden), rule, [])
        assert plan.cluster.ahead_bytes == 0
    usual, ahead = settled(hideable(60, 0.0), rule, []), settled(hideable(60, 0.8), rule, [])
    assert ahead.cluster.ahead_bytes == 2 * MIB  # the power of two below a twenty-fourth of the limit
    assert ahead.predicted.samples_per_s > usual.predicted.samples_per_s
    assert ahead.predicted.peak_memory_bytes <= 60 * MIB


@pytest.mark.parametrize("limit_mib", [34, 38, 46])
def test_units_do_not_run_ahead_where_the_memory_for_that_is_worth_more_as_samples(limit_mib: int) -> None:
    wanted, rule = replace(hideable(limit_mib, 0.8, 1.0), wishes=Wishes()), BatchRule(max_batch_size=64)
    apart, ahead = make_plan(wanted, rule), make_plan(wanted.running_ahead(), rule)
    assert ahead.cluster.ahead_bytes
    assert 4 < ahead.batch_size < apart.batch_size
    assert ahead.predicted.samples_per_s < apart.predicted.samples_per_s
    plan = settled(wanted, rule, [])
    assert (plan.operators, plan.batch_size, plan.cluster.ahead_bytes) == (apart.operators, apart.batch_size, 0)


def test_units_do_not_run_ahead_where_ranks_of_a_node_share_its_link() -> None:
    problem = hideable(60, 0.8)
    assert problem.running_ahead().runs_ahead
    nodes = problem.cluster.model_copy(update={"nodes": 2, "devices_per_node": 2})
    assert not replace(problem, cluster=nodes).running_ahead().runs_ahead


def test_units_do_not_run_ahead_where_nothing_fits_then() -> None:
    sharded = hideable(1, 0.8)
    least = least_mib(replace(sharded, wishes=Wishes()))
    tight = replace(hideable(int(least) + 1, 0.8), wishes=Wishes())
    with pytest.raises(InfeasibleError):
        make_plan(replace(tight, cluster=tight.cluster.model_copy(update={"ahead_bytes": 4 * MIB})), ONE)
    assert settled(tight, ONE, []).cluster.ahead_bytes <= MIB


def test_an_earlier_plan_that_ran_ahead_is_predicted_so() -> None:
    wanted = hideable(60, 0.8)
    question = asked(ONE, wanted.wishes, BetweenSteps(), Correction())
    plan = settled(wanted, ONE, [])
    assert plan.cluster.ahead_bytes
    before = [Settled(asked=question, plan=plan.without_reasons())]
    again = settled_before(wanted, ONE, question, before, [])
    assert again is not None
    assert (again.predicted, again.cluster) == (plan.predicted, plan.cluster)
    unhidden = settled_before(hideable(60, 0.0), ONE, question, before, [])
    assert unhidden is None  # the link is another one


def test_a_rehearsal_is_of_plans_that_run_ahead_or_of_others() -> None:
    ahead = settled(hideable(60, 0.8), ONE, [])
    apart = ahead.model_copy(update={"cluster": ahead.cluster.model_copy(update={"ahead_bytes": 0})})
    assert decided(ahead) != decided(apart)
    model = hideable(60, 0.8).model
    waits = [foreseen(model, compute(model), ahead.cluster, plan, 1).foreseen_s for plan in (ahead, apart)]
    assert waits[0] < waits[1]


def test_when_it_is_late_the_first_way_in_which_something_fits_has_to_do() -> None:
    wanted = hideable(60, 0.8)
    plan = settled(wanted, ONE, [], late=lambda: True)
    assert plan.predicted.peak_memory_bytes <= wanted.memory_limit_bytes
    assert (plan.update_in_backward, plan.cluster.ahead_bytes > 0) == (False, True)
    nothing = replace(wanted, memory_limit_bytes=MIB)
    with pytest.raises(InfeasibleError):
        settled(nothing, ONE, [], late=lambda: True)

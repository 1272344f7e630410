"""Which plans are tried, and which of them is taken, with made-up measurements."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_osdp.planning.cost.trial_correction import Trial, plan_key, predict_trial
from lightning_osdp.planning.search import finalists
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan
from lightning_osdp.planning.search.finalists import (
    Finalist,
    choose_tried_plan,
    complexity,
    find_finalists,
    is_sharded,
    pick_finalist,
    pick_untried,
    spread_s,
)
from lightning_osdp.planning.search.plan_selection import select_plan
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import hand_made_plan
from tests.support.small_models import MIB, blocks_of_two, cluster, compute

MODEL = blocks_of_two(3)
ROOMY = Problem(MODEL, cluster(), compute(MODEL), 1024 * MIB)
UP_TO_FOUR = BatchSizePolicy(max_batch_size=4)
DP, ZDP = (hand_made_plan({"one": mode}, 2) for mode in (Mode.DP, Mode.ZDP))
RECOMPUTED = ZDP.model_copy(update={"recomputed": ("block",)})
DP_OF_TWO = DP.model_copy(update={"batch_size": 2, "global_batch_size": 4})
ROUNDS = st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=5).map(tuple)
ABSURD = st.lists(st.sampled_from([-1.0, 0.0, math.nan, math.inf, -math.inf, 0.1, 1e300]), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        ({"dp": (0.258, 0.260, 0.262), "zdp": (0.241, 0.241, 0.242)}, "zdp"),
        ({"dp": (0.258, 0.260, 0.262), "zdp": (0.255, 0.257, 0.259)}, "dp"),
        ({"dp": (0.060, 0.061, 0.063), "zdp": (0.149, 0.158, 0.150)}, "dp"),
        ({"dp": (0.258, 0.259, 0.9), "zdp": (0.2, 0.201, 0.202)}, "zdp"),
        ({"dp": (0.260,), "zdp": (0.250,)}, "dp"),
        ({"dp": (0.260,), "zdp": (0.240,)}, "zdp"),
        ({"dp": (), "zdp": (0.250,)}, "zdp"),
        ({"zdp": (0.2, 0.2, 0.2), "recomputed": (0.198, 0.2, 0.2)}, "zdp"),
        ({"zdp": (0.2, 0.2, 0.2), "recomputed": (0.1, 0.1, 0.1)}, "recomputed"),
        ({"dp": (0.2, 0.2, 0.2), "dp of two": (0.3, 0.3, 0.3)}, "dp of two"),
    ],
    ids=[
        "clearly faster",
        "within the rounds",
        "slower",
        "one outlier",
        "one round within the error",
        "one round beyond it",
        "not tried",
        "recomputed within",
        "recomputed beyond",
        "throughput decides",
    ],
)
def test_pick_finalist_takes_fastest_unless_simpler_is_within_spread(
    rounds: dict[str, tuple[float, ...]], chosen: str
) -> None:
    plans = {"dp": DP, "zdp": ZDP, "recomputed": RECOMPUTED, "dp of two": DP_OF_TWO}
    for names in (list(rounds), list(reversed(rounds))):
        assert pick_finalist([Finalist(plans[name], rounds[name]) for name in names]).plan is plans[chosen]


def sample_s(finalist: Finalist) -> float:
    return statistics.median(finalist.rounds_s) / finalist.plan.global_batch_size


@given(st.lists(st.tuples(st.sampled_from([DP, ZDP, RECOMPUTED, DP_OF_TWO]), ROUNDS), min_size=1, max_size=4))
@example([(DP, (3.0, 3.0)), (ZDP, (1.0, 2.0, 3.0)), (RECOMPUTED, (2.5, 2.5))])
def test_pick_finalist_is_never_slower_than_simpler_one_and_fastest_but_for_spread(
    drawn: list[tuple[ExecutionPlan, tuple[float, ...]]],
) -> None:
    finalists = [Finalist(*one) for one in drawn]
    chosen = pick_finalist(finalists)
    for other in finalists:
        if complexity(other.plan) <= complexity(chosen.plan):
            assert sample_s(chosen) <= sample_s(other)
        elif sample_s(other) < sample_s(chosen):
            spreads = [spread_s(one.rounds_s) / one.plan.global_batch_size for one in finalists]
            assert sample_s(chosen) - sample_s(other) <= sum(spreads) + 1e-12


@given(st.lists(st.tuples(st.sampled_from([DP, ZDP, RECOMPUTED]), ABSURD), min_size=1, max_size=4))
def test_pick_finalist_ignores_absurd_times(drawn: list[tuple[ExecutionPlan, tuple[float, ...]]]) -> None:
    finalists = [Finalist(*one) for one in drawn]
    chosen = pick_finalist(finalists)
    measured = [one for one in finalists if any(0 < s < math.inf for s in one.rounds_s)]
    assert chosen in (measured or finalists)


def sharded_plan(problem: Problem = ROOMY) -> ExecutionPlan:
    """A sharded plan, as a wrong measurement might have let the search find it."""
    forced = replace(problem.constraints, modes="zdp2", activation_checkpointing=True)
    return make_plan(replace(problem, constraints=forced), UP_TO_FOUR)


def test_find_finalists_adds_all_replicated_and_shared_units_where_they_fit() -> None:
    found = sharded_plan()
    plans = find_finalists(ROOMY, UP_TO_FOUR, found)
    assert plans[0] is found
    replicated = plans[1]
    assert not is_sharded(replicated)
    assert not replicated.recomputed
    assert (
        replicated.batch_size
        == select_plan(replace(ROOMY, constraints=SearchConstraints(modes="dp")), UP_TO_FOUR, ()).batch_size
    )
    assert len({plan_key(plan) for plan in plans}) == len(plans)
    assert find_finalists(ROOMY, UP_TO_FOUR, replicated)[0] == replicated


def test_find_finalists_puts_found_plan_first_even_if_it_is_also_the_best_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was the last one then, and a start without time for trials took a replicated plan of half the throughput."""
    found = sharded_plan()
    monkeypatch.setattr(finalists, "_find_with_shared_units", lambda *_: [found.model_copy()])
    first, *others = find_finalists(ROOMY, UP_TO_FOUR, found)
    assert first is found
    assert others
    assert not any(map(is_sharded, others))


def test_find_finalists_adds_plan_with_retained_heap_where_found_plan_returns_memory() -> None:
    slower = ROOMY.compute.map_lines(lambda line: line.scale(1.5))  # so that it is not found by prediction
    problem = replace(ROOMY, compute_with_retained_heap=slower, max_retained_batch_size=64)
    found = make_plan(problem, UP_TO_FOUR)
    assert not found.retain_freed_memory
    retained = [plan for plan in find_finalists(problem, UP_TO_FOUR, found) if plan.retain_freed_memory]
    choices = [op.choice for op in found.operators]
    assert [([op.choice for op in plan.operators], plan.batch_size) for plan in retained] == [
        (choices, found.batch_size)
    ]
    too_large = replace(problem, max_retained_batch_size=found.batch_size - 1)
    assert not any(plan.retain_freed_memory for plan in find_finalists(too_large, UP_TO_FOUR, found))


def test_find_finalists_under_tight_limit_leaves_out_replicated_and_tries_shared_units() -> None:
    tight = replace(ROOMY, memory_limit_bytes=110 * MIB)
    one = BatchSizePolicy(batch_size=1)
    plans = find_finalists(tight, one, make_plan(tight, one))
    assert all(is_sharded(plan) for plan in plans)
    assert any(op.unit for plan in plans for op in plan.operators)
    assert all(plan.predicted.max_memory_bytes <= tight.memory_limit_bytes for plan in plans)


@pytest.mark.parametrize(
    ("modes", "replicated"), [("zdp", False), ({"blocks.0.up": "zdp2"}, False), ({"blocks.0.up": "dp"}, True)]
)
def test_find_finalists_respects_forced_modes(modes: str | dict[str, str], replicated: bool) -> None:
    forced = replace(ROOMY, constraints=SearchConstraints(modes=modes))
    plans = find_finalists(forced, UP_TO_FOUR, make_plan(forced, UP_TO_FOUR))
    assert any(not is_sharded(plan) for plan in plans) == replicated


@pytest.mark.parametrize("policy", [BatchSizePolicy(batch_size=3), BatchSizePolicy(global_batch_size=16)])
def test_find_finalists_respects_fixed_batch_sizes(policy: BatchSizePolicy) -> None:
    allowed = set(policy.candidates(ROOMY.cluster.ranks))
    for plan in find_finalists(ROOMY, policy, make_plan(ROOMY, policy)):
        assert (plan.batch_size, plan.accumulate_grad_batches) in allowed


def trial_of(plan: ExecutionPlan, factor: float, differ: float = 0.0) -> Trial:
    expected = predict_trial(MODEL, ROOMY.compute, ROOMY.cluster, plan, plan.batch_size)
    rounds_s = tuple(expected.predicted_s * (factor + each * differ) for each in (-1, 0, 1))
    return expected.model_copy(update={"measured_s": rounds_s[1], "rounds_s": rounds_s, "plan": plan})


def test_choose_tried_plan_takes_faster_replicated_plan_and_says_what_each_took() -> None:
    plans = find_finalists(ROOMY, UP_TO_FOUR, sharded_plan())[:2]
    trials = [trial_of(plans[0], 3.0), trial_of(plans[1], 1.0)]
    chosen = choose_tried_plan(ROOMY, UP_TO_FOUR, plans, trials)
    assert chosen is not None
    assert not is_sharded(chosen)
    assert [(one.name, one.is_chosen, one.num_rounds) for one in chosen.tried] == [
        ("sharded per operator", False, 3),
        ("all replicated", True, 3),
    ]
    assert chosen.tried[1].step_time_s == chosen.predicted.step_time_s
    assert chosen.tried[0].samples_per_s < chosen.tried[1].samples_per_s
    assert ExecutionPlan.from_json(chosen.to_json()) == chosen


def test_choose_tried_plan_never_shows_untried_batch_size_as_better() -> None:
    plans = find_finalists(ROOMY, UP_TO_FOUR, make_plan(ROOMY, UP_TO_FOUR))[:1]
    for factor in (0.5, 1.0, 3.0):
        chosen = choose_tried_plan(ROOMY, UP_TO_FOUR, plans, [trial_of(plans[0], factor)])
        assert chosen is not None
        assert len(chosen.frontier) == 4
        assert all(point.samples_per_s <= chosen.predicted.samples_per_s for point in chosen.frontier)


def test_choose_tried_plan_without_trials_or_memory_returns_none() -> None:
    plan = make_plan(ROOMY, UP_TO_FOUR)
    assert choose_tried_plan(ROOMY, UP_TO_FOUR, [plan], []) is None
    full = replace(ROOMY, memory_limit_bytes=plan.predicted.max_memory_bytes - 1)
    assert choose_tried_plan(full, UP_TO_FOUR, [plan], [trial_of(plan, 1.0)]) is None


def promising(plan: ExecutionPlan, samples_per_s: float) -> ExecutionPlan:
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"samples_per_s": samples_per_s})})


@pytest.mark.parametrize(
    ("samples_per_s", "chosen"),
    [
        ({"zdp": 114.0, "dp": 100.0}, "dp"),
        ({"zdp": 116.0, "dp": 100.0}, "zdp"),
        ({"zdp": 90.0}, "zdp"),
        ({"recomputed": 110.0, "dp": 90.0, "zdp": 100.0}, "zdp"),
        ({"recomputed": 116.0, "dp": 90.0, "zdp": 100.0}, "recomputed"),
        ({"dp": 100.0, "recomputed": 500.0}, "dp"),
    ],
    ids=["within the error", "beyond it", "nothing else fits", "best simpler one", "beyond all", "simplest found"],
)
def test_pick_untried_takes_simpler_plan_unless_gain_exceeds_error_of_predictions(
    samples_per_s: dict[str, float], chosen: str
) -> None:
    plans = {"dp": DP, "zdp": ZDP, "recomputed": RECOMPUTED}
    found = {name: promising(plans[name], rate) for name, rate in samples_per_s.items()}
    assert pick_untried(list(found.values())) is found[chosen]


def test_pick_untried_takes_same_plan_with_retained_heap_where_it_promises_any_gain() -> None:
    released, *retained = (
        promising(DP.model_copy(update={"retain_freed_memory": rate != 100.0}), rate) for rate in (100.0, 101.0, 99.0)
    )
    assert pick_untried([released, retained[0]]) is retained[0]
    assert pick_untried([released, retained[1]]) is released

"""The best plan at one batch size, against all plans there are."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, make_plan
from lightning_osdp.planning.search.label_setting import LabelProblem, enumerate_plans
from lightning_osdp.planning.search.lower_bounds import LagrangianBounds
from lightning_osdp.planning.search.plan_search import MIN_IMPROVEMENT, BudgetBisection, Candidate, PlanSearch
from lightning_osdp.planning.spec.capabilities import EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints, mode_blocker
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.report.explain import explain
from tests.support.small_models import MIB, blocks_of_one, blocks_of_two, cluster, compute


def problem(
    limit_mib: float = 60,
    blocks: int = 3,
    saved_mib: int = 5,
    wishes: SearchConstraints = UNCONSTRAINED,
    **times: float,
) -> Problem:
    model = blocks_of_one(blocks, saved_mib)
    return Problem(model, cluster(), compute(model, slices=(2,), **times), int(limit_mib * MIB), constraints=wishes)


def every_plan(desk: PlanSearch, batch_size: int) -> list[Candidate]:
    menus = [desk.space.option_groups[menu].choices for menu in desk.space.group_of]
    names = [block.name for block in desk.problem.model.blocks]
    return [
        desk.evaluate_choices(choices, batch_size, recomputed=tuple(itertools.compress(names, flags)))
        for choices in itertools.product(*menus)
        for flags in itertools.product((False, True), repeat=len(names))
    ]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    saved_mib=st.integers(1, 12),
    batch_size=st.sampled_from([1, 2, 3, 8, 24]),
    forward_ms=st.sampled_from([0.1, 0.5, 3.0]),
    per_slice_ms=st.sampled_from([0.0, 0.05, 0.5]),
    shares=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
)
def test_best_plan_of_two_blocks_matches_brute_force(
    saved_mib: int, batch_size: int, forward_ms: float, per_slice_ms: float, shares: list[float]
) -> None:
    """Against every choice of slices and the earliest blocks recomputed, by the true peak, under several limits.

    The bound holds for any set of recomputed blocks.
    """
    given_ = problem(blocks=2, saved_mib=saved_mib, forward_ms=forward_ms, per_slice_ms=per_slice_ms)
    plans = every_plan(PlanSearch(given_), batch_size)
    earliest = [plan for plan in plans if plan.recomputed != ("blocks.1",)]
    peaks = [plan.peak.total_bytes for plan in plans]
    assert PlanSearch(given_).min_memory_plan(batch_size).peak.total_bytes == min(peaks)
    for share in shares:
        limit = int(min(peaks) + share * (max(peaks) - min(peaks)))
        desk = PlanSearch(replace(given_, memory_limit_bytes=limit))
        best = min(plan.step_time_s for plan in plans if plan.peak.total_bytes <= limit)
        best_of_these = min((p.step_time_s for p in earliest if p.peak.total_bytes <= limit), default=best)
        found = desk.best_plan_below(math.inf, batch_size)
        assert found.peak.total_bytes <= limit
        assert found.lower_bound_s <= best * (1 + 1e-9)
        assert found.step_time_s <= best_of_these * (1 + 2 * MIN_IMPROVEMENT)


@pytest.mark.parametrize(("limit_mib", "blocks", "saved_mib", "forward_ms"), [(75, 8, 1, 0.1), (81, 6, 3, 0.5)])
def test_small_models_are_searched_exactly_in_each_way_to_recompute_blocks(
    limit_mib: float, blocks: int, saved_mib: int, forward_ms: float
) -> None:
    """Blocks of two kinds, 16 or 25 ways: with exact searches of the best four alone, plans are up to 1.8 % slower."""
    given_ = problem(limit_mib, blocks, saved_mib, forward_ms=forward_ms, per_slice_ms=0.05)
    kinds = (block.model_copy(update={"kind": f"kind {i % 2}"}) for i, block in enumerate(given_.model.blocks))
    desk = PlanSearch(replace(given_, model=given_.model.model_copy(update={"blocks": tuple(kinds)})))
    search, found_s = desk.for_batch_size(1), desk.best_plan_below(math.inf, 1).step_time_s
    for index in range(len(desk.space.recompute_counts)):
        assert search.exact_small_search(desk.space.recompute_mask(index), found_s * (1 - MIN_IMPROVEMENT)) is None


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6])
def test_enumerate_plans_yields_only_plans_below_bound_fastest_first(share: float) -> None:
    model = blocks_of_two(3)
    whole = Problem(model, cluster(latency_ms=1.0), compute(model), 1 << 40)
    least = PlanSearch(whole).min_memory_plan(1).peak.total_bytes
    most = PlanSearch(whole).best_plan_below(math.inf, 1).peak.total_bytes
    desk = PlanSearch(replace(whole, memory_limit_bytes=int(least + share * (most - least))))
    search, mask = desk.for_batch_size(1), desk.space.recompute_mask(0)
    flags = desk.space.recompute_flags(mask)

    def times(bound_s: float) -> list[float]:
        labels = LabelProblem.create(search, mask)
        assert labels is not None
        return [float(search.times.total[flags, options].sum()) for options in enumerate_plans(labels, bound_s)]

    bound_s = float(search.times.total[flags, desk.min_memory_options[0]].sum())
    for _ in range(5):
        found = times(bound_s)
        assert all(seconds < bound_s * (1 + 1e-12) for seconds in found)
        assert found == pytest.approx(sorted(found))
        if not found:
            break
        bound_s = found[len(found) // 2]


@given(
    limit=st.integers(1_000, 10**9),
    share=st.floats(0.7, 1.5),
    curvature=st.floats(0.8, 1.2),
    offset=st.floats(0.0, 0.3),
)
def test_budget_bisection_approaches_largest_budget_that_fits(
    limit: int, share: float, curvature: float, offset: float
) -> None:
    """The true peak rises with the budget, but not as the budget says."""
    tolerance, tried = max(1, limit // 2000), []

    def peak(budget: int) -> int:
        return int(limit * (offset + share * (budget / limit) ** curvature))

    bisection = BudgetBisection(limit, tolerance)
    for _ in range(200):
        tried.append(bisection.budget)
        if not bisection.advance(limit - peak(bisection.budget)):
            break
    else:
        pytest.fail("the bisection does not end")
    assert peak(bisection.budget) <= limit
    assert bisection.budget == max(budget for budget in tried if peak(budget) <= limit)


def test_budget_bisection_after_infeasible_knapsack_moves_up() -> None:
    bisection = BudgetBisection(1000, 1)
    assert bisection.advance(-600)
    assert bisection.budget == 400
    assert bisection.update_infeasible()
    assert bisection.budget == 700
    bisection.budget = 999
    assert not bisection.update_infeasible()


@settings(max_examples=10, deadline=None)
@given(batch_size=st.integers(1, 4), limit_mib=st.integers(40, 120))
def test_lower_bounds_hold_for_each_number_of_recomputed_blocks(batch_size: int, limit_mib: int) -> None:
    desk = PlanSearch(problem(limit_mib, blocks=2))
    bounds = LagrangianBounds(desk.space).lower_bounds_s(desk.space.option_times(batch_size, 1), batch_size, 1)
    for plan in every_plan(desk, batch_size):
        if plan.peak.total_bytes <= limit_mib * MIB and plan.recomputed in (
            (),
            ("blocks.0",),
            ("blocks.0", "blocks.1"),
        ):
            assert bounds[len(plan.recomputed)] <= plan.step_time_s * (1 + 1e-9)


def test_best_plan_recomputes_blocks_where_cheaper_than_sharding() -> None:
    # Communication takes longer than computing a block again; activations are what fills the memory.
    fast = PlanSearch(problem(66, saved_mib=12, forward_ms=0.1)).best_plan_below(math.inf, 1)
    assert fast.recomputed
    assert set(fast.choices) == {ShardingChoice()}
    slow = PlanSearch(problem(66, saved_mib=12, forward_ms=50.0)).best_plan_below(math.inf, 1)
    assert not slow.recomputed
    assert set(slow.choices) != {ShardingChoice()}


def test_best_plan_recomputes_earliest_blocks() -> None:
    for limit in range(48, 96, 4):
        search = PlanSearch(problem(limit, blocks=4, saved_mib=12, forward_ms=0.1))
        found = search.best_plan_below(math.inf, 1).recomputed
        assert found == tuple(f"blocks.{index}" for index in range(len(found)))


def test_best_plan_slices_operators_whose_gathers_do_not_fit() -> None:
    whole = problem(wishes=SearchConstraints(1, False))
    needed = PlanSearch(whole).min_memory_plan(1).peak.total_bytes
    split = replace(whole, constraints=SearchConstraints("auto", False))
    assert PlanSearch(split).min_memory_plan(1).peak.total_bytes < needed
    found = PlanSearch(replace(split, memory_limit_bytes=needed - 1)).best_plan_below(math.inf, 1)
    assert any(len(choice.slices) > 1 for choice in found.choices)
    assert found.peak.total_bytes < needed


def test_best_plan_obeys_checkpointing_and_slice_constraints() -> None:
    everything = PlanSearch(problem(200, wishes=SearchConstraints("auto", True))).best_plan_below(math.inf, 1)
    assert everything.recomputed == ("blocks.0", "blocks.1", "blocks.2")
    one = PlanSearch(problem(200, wishes=SearchConstraints("auto", ("blocks.1",)))).best_plan_below(math.inf, 1)
    assert one.recomputed == ("blocks.1",)
    for limit in (40, 60, 80):
        halves = PlanSearch(problem(limit, wishes=SearchConstraints(2))).best_plan_below(math.inf, 1)
        assert all(len(choice.slices) == 2 or choice == ShardingChoice() for choice in halves.choices)
        mixed_wishes = SearchConstraints({"blocks.0": 1, "*": 2})
        mixed = PlanSearch(problem(limit, wishes=mixed_wishes)).best_plan_below(math.inf, 1)
        assert len(mixed.choices[0].slices) == 1


def test_search_space_with_many_block_kinds_coarsens_recompute_counts() -> None:
    model = blocks_of_one(60, 3)
    kinds = tuple(block.model_copy(update={"kind": f"kind {index % 3}"}) for index, block in enumerate(model.blocks))
    model = model.model_copy(update={"blocks": kinds})
    desk = PlanSearch(Problem(model, cluster(), compute(model), 500 * MIB))
    vectors = desk.space.recompute_counts
    assert vectors.shape[1] == 3
    assert 200 < len(vectors) <= 700
    assert vectors.max(axis=0).tolist() == [20, 20, 20]
    found = desk.best_plan_below(math.inf, 2)
    assert found.peak.total_bytes <= 500 * MIB


def test_make_plan_keeps_blocks_with_recompute_blocker_and_explains_why() -> None:
    given_ = problem(64, saved_mib=12, forward_ms=0.1)
    pinned = tuple(
        block.model_copy(update={"recompute_blocker": "it holds BatchNorm"}) for block in given_.model.blocks
    )
    given_ = replace(given_, model=given_.model.model_copy(update={"blocks": pinned}))
    plan = make_plan(given_, BatchSizePolicy(batch_size=1))
    assert plan.recomputed == ()
    assert "Block in blocks: none of 3 recomputed: it holds BatchNorm." in explain(plan)


def test_plan_reports_savings_and_costs_of_recomputing_and_slicing() -> None:
    plan = make_plan(problem(50, saved_mib=12, forward_ms=0.1), BatchSizePolicy(batch_size=1))
    assert plan.recomputed
    first = plan.blocks[0]
    assert first.recomputed
    assert first.recompute_saves_bytes == 12 * MIB
    assert first.time_s >= 0.15e-3  # its own forward and half of that outside of its operator
    inside = {operator.name for operator in plan.operators if operator.is_recomputed}
    assert inside == {f"{name}.up" for name in plan.recomputed}
    text = explain(plan)
    assert f"{len(plan.recomputed)} of 3 recomputed" in text
    assert "frees 12.0 MiB" in text or "between forward and backward" in text
    tight = make_plan(problem(28, saved_mib=1), BatchSizePolicy(batch_size=1))
    assert any(len(operator.slices) > 1 for operator in tight.operators)
    assert "Whole, as" in explain(tight) or "Next best" in explain(tight)


def test_infeasible_error_suggests_slicing_and_recompute_forbidden_by_constraints() -> None:
    free = PlanSearch(problem()).min_memory_plan(1).peak.total_bytes
    strict = problem(free / MIB + 1, wishes=SearchConstraints(1, False))
    with pytest.raises(InfeasibleError) as caught:
        make_plan(strict, BatchSizePolicy(batch_size=1))
    assert "slice_granularity='auto'" in str(caught.value)
    assert "activation_checkpointing='auto'" in str(caught.value)
    both = str(caught.value).split("What would fit: ")[1].split(". Not enough")[0]
    assert "both of these" in both
    assert make_plan(replace(strict, constraints=UNCONSTRAINED), BatchSizePolicy(batch_size=1)).batch_size == 1


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            SearchConstraints({"block.0": 2}),
            r"slice_granularity: 'block\.0' matches no operator \(near names: blocks\.0\.up",
        ),
        (
            SearchConstraints("auto", ("blocks.7",)),
            r"activation_checkpointing: 'blocks\.7' matches no block that repeats",
        ),
        (
            SearchConstraints(modes={"blocks": "zdp", "blocks.0.up": "dp"}),
            r"modes: 'blocks\.0\.up' decides nothing, since 'blocks' comes first and matches the same",
        ),
        (
            SearchConstraints({"*": 2, "blocks.0": 4}),
            r"slice_granularity: 'blocks\.0' decides nothing, since '\*' comes first",
        ),
        (
            SearchConstraints(modes={"blocks.0": "zdp", "blocks.[12].*": "zdp2", "*.up": "dp"}),
            r"modes: '\*\.up' decides nothing, since 'blocks\.0' and 'blocks\.\[12\]\.\*' come first",
        ),
    ],
)
def test_plan_search_rejects_constraint_patterns_that_decide_nothing(wishes: SearchConstraints, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PlanSearch(problem(wishes=wishes))


@pytest.mark.parametrize("value", ["many", 0, True, {"blocks": 0}, 2.5, {0: 2}, {None: 2}])
def test_search_constraints_reject_invalid_slice_granularity(value: object) -> None:
    with pytest.raises(ConfigurationError, match="slice_granularity has to be"):
        SearchConstraints(value, "auto")


@pytest.mark.parametrize("value", ["blocks.0", 3, [1]])
def test_search_constraints_reject_invalid_activation_checkpointing(value: object) -> None:
    with pytest.raises(ConfigurationError, match="activation_checkpointing has to be"):
        SearchConstraints("auto", value)


@pytest.mark.parametrize(
    "value",
    [
        "zdp3", "ZDP", " zdp", "", 1, None, True, ["zdp"], {"blocks": "auto"}, {"blocks": None}, {"blocks": ["zdp"]},
        {0: "zdp"}, {None: "zdp"}, {("blocks",): "zdp"},
    ],
)  # fmt: skip
def test_search_constraints_reject_invalid_modes(value: object) -> None:
    with pytest.raises(ConfigurationError, match="modes has to be 'auto', one of 'dp', 'zdp2', 'zdp', 'tp', or"):
        SearchConstraints(modes=value)


def test_infeasible_error_says_that_modes_leave_nothing() -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(problem(30, wishes=SearchConstraints(modes="dp")), BatchSizePolicy(batch_size=1))
    assert str(caught.value).startswith("nothing fits with modes='dp': batch size 1 needs at least")
    assert "modes that the search chooses (modes='auto')" in str(caught.value).split("Not enough")[0]


@pytest.mark.parametrize(
    ("mode", "limit_mib"), [("dp", 1000), ("zdp2", 60), ("zdp", 60), ("zdp2", 1000), ("zdp", 1000)]
)
def test_best_plan_with_one_mode_for_all_uses_no_other(mode: str, limit_mib: int) -> None:
    """At any limit at which it fits, whole or in slices."""
    plan = make_plan(problem(limit_mib, wishes=SearchConstraints(modes=mode)), BatchSizePolicy(batch_size=1))
    assert {one for operator in plan.operators for one in operator.slices} == {mode}


def test_best_plan_with_modes_of_some_operators_is_the_best_of_those_that_have_them() -> None:
    wishes = SearchConstraints(modes={"blocks.0": "zdp", "blocks.?.up": "zdp2", "blocks.0.up": "dp"})
    search = PlanSearch(problem(1000, wishes=replace(wishes, modes={"blocks.0": "zdp", "blocks.1": "dp"})))
    free = every_plan(PlanSearch(problem(1000)), 1)
    allowed = [p for p in free if set(p.choices[0].slices) == {Mode.ZDP} and p.choices[1] == ShardingChoice()]
    best = min(allowed, key=lambda plan: plan.step_time_s)
    assert search.best_plan_below(math.inf, 1).step_time_s == pytest.approx(best.step_time_s)
    assert [wishes.requested_mode(f"blocks.{i}.up") for i in range(2)] == [Mode.ZDP, Mode.ZDP2]


def test_forced_mode_of_operator_that_cannot_have_it_is_the_next_weaker_one() -> None:
    wishes, operator = SearchConstraints(modes="zdp"), problem().model.operators[0]
    for changes, mode in (({}, Mode.ZDP), ({"calls": 2}, Mode.ZDP2), ({"replicated_reason": "odd"}, Mode.DP)):
        changed = operator.model_copy(update=changes)
        assert wishes.forced_mode(changed) == mode
        assert bool(mode_blocker(changed)) == (mode != Mode.ZDP)
    no_zdp2 = replace(wishes, capabilities=EngineCapabilities(modes=(Mode.DP, Mode.ZDP)))
    assert no_zdp2.forced_mode(operator.model_copy(update={"calls": 2})) == Mode.DP
    twice = tuple(one.model_copy(update={"calls": 2}) for one in problem().model.operators)
    model = problem().model.model_copy(update={"operators": twice})
    with pytest.raises(ConfigurationError, match=r"blocks\.0\.up can't be zdp: it runs 2 times in a step"):
        SearchConstraints(modes={"blocks.0": "zdp"}).check(model, cluster())
    with pytest.raises(ConfigurationError, match="the engine fairscale can't carry out zdp2"):
        replace(no_zdp2, modes={"blocks.0": "zdp2"}).check(problem().model, cluster())


def test_search_space_first_option_of_each_group_is_replicated() -> None:
    space = PlanSearch(problem()).space
    assert all(menu.choices[0] == ShardingChoice() for menu in space.option_groups)
    rows = space.options_of((ShardingChoice(),) * 3)
    assert np.array_equal(rows, space.first_option[space.group_of])
    assert space.choices_of(rows) == (ShardingChoice(),) * 3

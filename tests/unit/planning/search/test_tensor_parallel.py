"""Tensor parallel operators in the search: against all plans there are, and what users ask for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.cost.trial_correction import plan_key, predict_trial
from lightning_osdp.planning.search.baselines import find_baselines
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, make_plan
from lightning_osdp.planning.search.finalists import choose_tried_plan, complexity, find_finalists, is_sharded
from lightning_osdp.planning.search.menus import Menus, OptionRows
from lightning_osdp.planning.search.plan_search import MIN_IMPROVEMENT, Candidate, PlanSearch
from lightning_osdp.planning.search.plan_selection import select_plan
from lightning_osdp.planning.search.subproblem import KnapsackSubproblem
from lightning_osdp.planning.solver import solve
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope, TensorSplit
from lightning_osdp.report.operator_runs import describe_tried
from tests.support.small_models import MIB, blocks_of_two, cluster
from tests.support.tensor_problems import FREE, mlp, model_of, problem_of


def every_plan(search: PlanSearch, batch_size: int) -> list[Candidate]:
    menus = [search.space.option_groups[menu].choices for menu in search.space.group_of]
    names = [block.name for block in search.problem.model.blocks]
    plans = []
    for choices in itertools.product(*menus):
        degrees = [choice.tensor_degree for choice in choices]
        if degrees[::2] != degrees[1::2]:
            continue  # half of a pair
        for flags in itertools.product((False, True), repeat=len(names)):
            recomputed = tuple(itertools.compress(names, flags))
            if recomputed != names[1:]:  # the earliest blocks are recomputed first
                plans.append(search.evaluate_choices(choices, batch_size, recomputed=recomputed))
    return plans


@settings(max_examples=30, deadline=None)
@given(
    batch_size=st.sampled_from([1, 2, 3, 8, 24]),
    forward_ms=st.sampled_from([0.1, 3.0]),
    input_mib=st.sampled_from([0.0625, 0.5, 2.0]),
    latency_ms=st.sampled_from([0.0, 0.3]),
    shares=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
)
@example(batch_size=3, forward_ms=0.1, input_mib=0.5, latency_ms=0.0, shares=[0.125])
def test_best_plan_with_pairs_matches_brute_force(
    batch_size: int, forward_ms: float, input_mib: float, latency_ms: float, shares: list[float]
) -> None:
    """Under several limits. In the example only one pair is cut: no plan of least memory fits without recomputing."""
    model = model_of(input_mib=input_mib)
    constraints = replace(FREE, activation_checkpointing="auto", sharding_group="world")
    given_ = problem_of(model, constraints=constraints, forward_ms=forward_ms, latency_ms=latency_ms)
    plans = every_plan(PlanSearch(given_), batch_size)
    assert {choice.tensor_degree for plan in plans for choice in plan.choices} == {1, 2, 4}
    peaks = [plan.peak.max_bytes for plan in plans]
    assert PlanSearch(given_).min_memory_plan(batch_size).peak.max_bytes == min(peaks)
    for share in shares:
        limit = int(min(peaks) + share * (max(peaks) - min(peaks)))
        fitting = [plan for plan in plans if plan.peak.max_bytes <= limit]
        best = min(plan.step_time_s for plan in fitting)
        search = PlanSearch(replace(given_, memory_limit_bytes=limit))
        found = search.best_plan_below(math.inf, batch_size)
        degrees = [choice.tensor_degree for choice in found.choices]
        assert degrees[::2] == degrees[1::2]
        assert found.peak.max_bytes <= limit
        assert found.lower_bound_s <= best * (1 + 1e-9)
        earliest = [plan.step_time_s for plan in fitting if plan.recomputed != ("blocks.1",)]
        assert found.step_time_s <= min(earliest, default=best) * (1 + 2 * MIN_IMPROVEMENT)
        assert search.best_plan_below(math.inf, batch_size, heuristic_only=True).peak.max_bytes <= limit


def milp_seconds(rows: list[OptionRows], scopes: list[list[int]], degrees: np.ndarray, budget: int) -> float:
    """The least seconds by HiGHS, which takes each operator by itself and is told that degrees of a scope agree."""
    sizes = [len(own.time_s) for own in rows]
    starts = np.cumsum([0, *sizes])
    count = int(starts[-1]) + 1  # the last variable is the largest transient
    constraints: list[LinearConstraint] = []

    def row(entries: dict[int, float], low: float, high: float) -> None:
        values = np.zeros(count)
        for index, value in entries.items():
            values[index] = value
        constraints.append(LinearConstraint(values, low, high))

    total: dict[int, float] = {count - 1: 1.0}
    for own, start in zip(rows, starts, strict=False):
        row({int(start) + i: 1.0 for i in range(len(own.time_s))}, 1, 1)
        row({count - 1: 1.0} | {int(start) + i: -float(t) for i, t in enumerate(own.transient)}, 0, np.inf)
        total |= {int(start) + i: float(r) for i, r in enumerate(own.resident)}
    row(total, -np.inf, float(budget))
    for first, second in scopes:
        for degree in (2, 4):
            entries: dict[int, float] = {}
            for operator, sign in ((first, 1.0), (second, -1.0)):
                cut = np.flatnonzero(degrees[rows[operator].options[:, 0]] == degree)
                entries |= {int(starts[operator] + at): sign for at in cut.tolist()}
            row(entries, 0, 0)
    times = np.append(np.concatenate([own.time_s for own in rows]), 0.0)
    integrality = np.append(np.ones(count - 1), 0)
    result = milp(
        times, constraints=constraints, integrality=integrality, bounds=Bounds(0, np.append(np.ones(count - 1), np.inf))
    )
    return float(result.fun) if result.success else np.inf


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), share=st.floats(0.0, 1.0))
def test_knapsack_with_pairs_matches_highs(seed: int, share: float) -> None:
    space = PlanSearch(problem_of(model_of(3))).space
    random = np.random.default_rng(seed)
    rows = []
    for group in space.group_of:
        at = space.option_groups[group].options
        options, size = np.arange(at.start, at.stop), at.stop - at.start
        whole = [random.integers(1, 1000, size), random.integers(0, 400, size)]
        rows.append(OptionRows.of_operator(options, random.integers(1, 100, size).astype(float), *whole))
    menus = Menus(space, np.arange(len(rows)), lambda operator: rows[operator])
    most = solve(menus.menus, 1 << 40, counts=menus.counts).peak_bytes
    with pytest.raises(InfeasibleError) as error:
        solve(menus.menus, 0, counts=menus.counts)
    needed = error.value.needed_bytes
    budget = int(needed + share * (most - needed))
    scopes = [scope.tolist() for scope in space.scopes]
    assert milp_seconds(rows, scopes, space.option_degrees, needed - 1) == np.inf
    best_s = milp_seconds(rows, scopes, space.option_degrees, budget)
    found = solve(menus.menus, budget, counts=menus.counts)
    options = menus.selected_options(found.choices)
    degrees = space.option_degrees[options].tolist()
    assert degrees[::2] == degrees[1::2]
    assert found.time_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize(("input_mib", "num_together"), [(100.0, 1), (0.01, 2)])
def test_scope_that_no_plan_would_cut_is_no_menu_of_combinations(input_mib: float, num_together: int) -> None:
    """A pair has one menu, or if it would cost too much to cut it, one for each of its operators."""
    search = PlanSearch(problem_of(model_of(input_mib=input_mib)))
    costs = search.for_batch_size(1)
    menus = KnapsackSubproblem(costs, search.recompute_mask(()), search.min_memory_plan(1).peak)._menus
    assert {rows.options.shape[1] for rows in menus._rows} == {num_together}
    assert sum(menus.counts) == 4 // num_together
    degrees = search.space.option_degrees[np.concatenate([rows.options.ravel() for rows in menus._rows])]
    assert (degrees.max() > 1) == (num_together == 2)


def test_search_takes_pairs_where_activations_are_smaller_and_not_where_they_are_larger() -> None:
    def modes(input_mib: float) -> set[tuple[Mode, ...]]:
        plan = make_plan(problem_of(model_of(input_mib=input_mib), latency_ms=0.0), BatchSizePolicy(batch_size=1))
        return {operator.slices for operator in plan.operators}

    assert modes(0.01) == {(Mode.TP,)}
    assert modes(100.0).isdisjoint({(Mode.TP,)})


def test_plan_says_split_scope_and_refusal_of_each_operator() -> None:
    given_ = problem_of(model_of(input_mib=0.01), latency_ms=0.0)
    plan = make_plan(given_, BatchSizePolicy(batch_size=1))
    up, down = plan.operators[:2]
    degree = up.choice.tensor_degree
    assert up.tensor == TensorSplit(degree=degree, role=TensorRole.COLUMN, scope="blocks.0")
    assert down.tensor == TensorSplit(degree=degree, role=TensorRole.ROW, scope="blocks.0")
    assert plan.tensor_scopes["blocks.1"] == TensorScope(attributes=("blocks.1.width",))
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    refused = blocks_of_two(2).with_tensor_candidates([], {"blocks.0.up": "its forward is hooked"})
    plan = make_plan(problem_of(refused), BatchSizePolicy(batch_size=1))
    assert plan.operators[0].tensor_refusal == "its forward is hooked"


def test_tried_plan_says_what_is_tensor_parallel_in_it() -> None:
    given_, policy = problem_of(model_of(input_mib=0.01), latency_ms=0.0), BatchSizePolicy(batch_size=1)
    found = make_plan(given_, policy)
    expected = predict_trial(given_.model, given_.compute, given_.cluster, found, 1)
    trial = expected.model_copy(update={"measured_s": expected.predicted_s, "plan": found})
    chosen = choose_tried_plan(given_, policy, [found], [trial])
    assert chosen is not None
    assert [one.name for one in chosen.tried] == ["2 MLPs tensor parallel, the rest replicated"]
    assert describe_tried(chosen).startswith("this plan (2 MLPs tensor parallel, the rest replicated) ")
    assert not is_sharded(found)


@pytest.mark.parametrize(
    "constraints",
    [
        replace(FREE, tensor_parallel=False),
        replace(FREE, tensor_parallel={"*": 1}),
        replace(FREE, capabilities=EngineCapabilities()),
        replace(FREE, modes={"blocks.0.up": "dp", "blocks.1.down": "dp"}),
    ],
    ids=["off", "one rank", "engine that can't", "other modes for half of each pair"],
)
def test_search_offers_no_tensor_parallelism_where_it_may_not(constraints: SearchConstraints) -> None:
    plan = make_plan(problem_of(model_of(input_mib=0.01), constraints=constraints), BatchSizePolicy(batch_size=1))
    assert all(operator.tensor is None for operator in plan.operators)
    assert plan.tensor_scopes == {}


@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({"tensor_parallel": {"blocks.0": 4}}, {"blocks.0": 4, "blocks.1": 1}),
        ({"tensor_parallel": {"blocks.0.down": 2, "*": 1}}, {"blocks.0": 2, "blocks.1": 1}),
        ({"tensor_parallel": {"*": 2}}, {"blocks.0": 2, "blocks.1": 2}),
        ({"modes": {"*.up": "tp"}, "tensor_parallel": {"blocks.1": 4}}, {"blocks.0": 2, "blocks.1": 4}),
    ],
)
def test_search_obeys_degrees_that_the_user_gives(changes: dict[str, Any], degrees: dict[str, int]) -> None:
    constraints = replace(FREE, **changes)
    plan = make_plan(problem_of(model_of(input_mib=100.0), constraints=constraints), BatchSizePolicy(batch_size=1))
    found = {op.name: op.choice.tensor_degree for op in plan.operators}
    assert {name: found[f"{name}.up"] for name in degrees} == degrees
    assert {name: found[f"{name}.down"] for name in degrees} == degrees


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": True}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": 2}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": "all"}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {"*": 0}}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {"*": True}}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {"*": 2.0}}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {"*": -2}}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {"*": None}}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {1: 2}}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": 0}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": ["blocks"]}, "tensor_parallel has to be 'auto', False, or whole numbers of ranks"),
        ({"tensor_parallel": {"*": 8}}, "blocks.0.down can't be cut over 8 ranks: .* the 4 devices .*2 or 4"),
        (
            {"tensor_parallel": {"blocks.1.up": 2, "blocks.1": 4, "*": 1}},
            "run together and need one number of ranks, not 2 and 4",
        ),
        (
            {"tensor_parallel": {"blocks.1": 2, "blocks.1.up": 4}},
            "'blocks.1.up' decides nothing, since 'blocks.1' comes first",
        ),
        (
            {"tensor_parallel": {"blocks.1": 2}, "slice_granularity": {"blocks.1.up": 4}},
            "slice_granularity: blocks.1.up is to be tensor parallel, and is not split then",
        ),
        ({"tensor_parallel": {"blokcs.0": 2}}, "tensor_parallel: 'blokcs.0' matches no operator .*blocks.0"),
        ({"tensor_parallel": {"*": 3}}, "blocks.0.down can't be cut over 3 ranks: .* the 4 devices .*2 or 4"),
        (
            {"tensor_parallel": {"blocks.1.up": 2, "blocks.1.down": 4}},
            "run together and need one number .* not 2 and 4",
        ),
        ({"tensor_parallel": {"blocks.1": 2}, "modes": {"blocks.1.up": "zdp"}}, "can't be both tp and zdp"),
        ({"modes": {"blocks.1.up": "tp", "blocks.1.down": "dp"}}, "can't be both tp and dp"),
        (
            {"tensor_parallel": {"*": 2}, "capabilities": EngineCapabilities(engine="mine")},
            "tensor_parallel: the engine mine can't cut operators over ranks",
        ),
        ({"modes": "tp", "capabilities": EngineCapabilities(engine="mine")}, "the engine mine can't carry out tp"),
    ],
)
def test_wishes_that_can_not_be_had_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plan(problem_of(constraints=replace(FREE, **changes)), BatchSizePolicy(batch_size=1))


def test_degree_on_nodes_of_one_device_is_refused() -> None:
    model = blocks_of_two(1)  # nothing is looked for there
    one = replace(problem_of(model), cluster=cluster().model_copy(update={"devices_per_node": 1, "nodes": 4}))
    wished = replace(one, constraints=replace(FREE, tensor_parallel={"blocks.0": 2}))
    with pytest.raises(ConfigurationError, match=r"'blocks.0' can't be cut over 2 ranks: a node has one"):
        make_plan(wished, BatchSizePolicy(batch_size=1))
    off = replace(one, constraints=replace(FREE, tensor_parallel={"blocks.0": 1}))
    assert make_plan(off, BatchSizePolicy(batch_size=1)).tensor_scopes == {}


def test_degree_for_operators_that_can_not_be_cut_names_the_reason() -> None:
    model = blocks_of_two(1).with_tensor_candidates([], {"blocks.0.down": "its forward is hooked"})
    for constraints in (replace(FREE, tensor_parallel={"*": 2}), replace(FREE, modes={"blocks.0": "tp"})):
        with pytest.raises(ConfigurationError, match=r"blocks.0.down can't be tensor parallel: its forward is hooked"):
            make_plan(problem_of(model, constraints=constraints), BatchSizePolicy(batch_size=1))
    narrow = blocks_of_two(1).with_tensor_candidates([mlp("blocks.0", degrees=(2,))])
    constraints = replace(FREE, tensor_parallel={"blocks.0.up": 4})
    with pytest.raises(ConfigurationError, match=r"can't be cut over 4 ranks: its size or its heads divide by 2 alone"):
        make_plan(problem_of(narrow, constraints=constraints), BatchSizePolicy(batch_size=1))


def test_search_with_tight_memory_counts_what_is_gathered_for_a_large_batch() -> None:
    """At batch size 64 the inputs of other ranks outweigh the weights; the plan of least memory exchanges nothing."""
    search = PlanSearch(problem_of(model_of(input_mib=4.0)))
    least = search.min_memory_plan(64)
    assert all(choice.tensor_degree == 1 for choice in least.choices)
    limit = least.peak.max_bytes + MIB
    found = PlanSearch(problem_of(model_of(input_mib=4.0), limit_mib=limit / MIB)).best_plan_below(math.inf, 64)
    assert found.peak.max_bytes <= limit


def test_baselines_and_replicated_plans_never_are_tensor_parallel() -> None:
    given_ = problem_of(model_of(input_mib=0.01), latency_ms=0.0)
    policy = BatchSizePolicy(batch_size=1)
    plan = select_plan(given_, policy, ())
    assert {operator.slices for operator in plan.operators} == {(Mode.TP,)}
    found = {baseline.name: baseline for baseline in find_baselines(plan, given_, policy)}
    without = replace(given_, model=blocks_of_two(2))
    search = PlanSearch(without)
    for name, mode in (("DDP", Mode.DP), ("FSDP per operator", Mode.ZDP)):
        uniform = search.evaluate_choices((ShardingChoice((mode,)),) * 4, 1)
        assert found[name].samples_per_s == pytest.approx(uniform.samples_per_s)
        assert found[name].samples_per_s < plan.predicted.samples_per_s
    assert all(set(op.slices) <= {*WEIGHT_MODES, Mode.TP} for op in plan.operators)
    assert ALL_CAPABILITIES.modes == tuple(Mode)


def test_finalists_of_a_tensor_parallel_plan_are_the_best_without_and_simpler_ones() -> None:
    given_, policy = problem_of(model_of(input_mib=0.01), latency_ms=0.0), BatchSizePolicy(batch_size=1)
    found = select_plan(given_, policy, ())
    plans = find_finalists(given_, policy, found)
    assert plans[0] == found
    cut = [any(operator.tensor is not None for operator in plan.operators) for plan in plans]
    assert cut == [True, *[False] * (len(plans) - 1)]
    without = select_plan(replace(given_, constraints=replace(FREE, tensor_parallel=False)), policy, ())
    assert plan_key(without) in {plan_key(plan) for plan in plans}
    assert complexity(found) == 1
    wished = replace(given_, constraints=replace(FREE, tensor_parallel={"*": 2}))
    forced = find_finalists(wished, policy, select_plan(wished, policy, ()))
    assert all(operator.choice.tensor_degree == 2 for plan in forced for operator in plan.operators)


def test_infeasible_error_names_tensor_parallelism_that_the_user_has_switched_off() -> None:
    """A table of which not even one whole copy fits, sharded or not."""
    model = model_of(1, input_mib=0.0)
    free = PlanSearch(problem_of(model)).min_memory_plan(1).peak.max_bytes
    off = problem_of(model, limit_mib=free / MIB + 0.5, constraints=replace(FREE, tensor_parallel=False))
    with pytest.raises(InfeasibleError, match=r"cut over ranks as the search sees fit \(tensor_parallel='auto'\)"):
        make_plan(off, BatchSizePolicy(batch_size=1))

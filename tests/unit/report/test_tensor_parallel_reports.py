"""Tensor parallel operators in all that shows a plan: words, tables, pictures, differences, simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, make_plan
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.planning.whatif.simulate import simulate_one
from lightning_osdp.report import figures
from lightning_osdp.report.choice_deltas import choice_deltas
from lightning_osdp.report.diff import build_difference
from lightning_osdp.report.explain import explain
from lightning_osdp.report.operator_runs import group_runs
from lightning_osdp.report.tables import plan_table, to_text
from tests.support.small_models import blocks_of_two
from tests.support.tensor_problems import FREE, mlp, model_of, problem_of

ONE = BatchSizePolicy(batch_size=1)


def test_explanation_says_what_is_exchanged_instead_of_what_and_why_not() -> None:
    model = model_of(input_mib=0.01)
    text = explain(make_plan(problem_of(model, latency_ms=0.0), ONE))
    assert "blocks.0-1.up: tp over" in text
    # two operators of their own 3 x 0.01 MiB, gathered in forward, and scattered in backward
    assert "Exchanges activations (122.9 KiB a micro-batch) instead of weights (8.0 MiB)" in text
    assert "instead of weights (16.0 MiB)" in text
    large = explain(make_plan(problem_of(model_of(input_mib=4.0)), ONE))
    assert "As tp over 2 ranks (cut, activations exchanged instead of weights), it would free 32.0 MiB" in large
    refused = blocks_of_two(2).with_tensor_candidates([], {"blocks.0.up": "its forward is hooked"})
    assert "Not tensor parallel: its forward is hooked." in explain(make_plan(problem_of(refused), ONE))
    reason = "together with down: native_layer_norm in between computes with several features of a row"
    refused = blocks_of_two(2).with_tensor_candidates([], {}, {f"blocks.{i}.up": reason for i in range(2)})
    text = explain(make_plan(problem_of(refused), ONE))
    assert text.count(f" Not tensor parallel {reason}.") == 1
    wished = replace(FREE, tensor_parallel={"blocks.0": 2, "blocks.1": 1})
    text = explain(make_plan(problem_of(model, constraints=wished), ONE))
    assert "blocks.0.up: tp over 2 ranks. As you wished: OSDPCallback asks for it. Exchanges activations (" in text
    half = replace(FREE, tensor_parallel={"blocks": 2})
    partly = blocks_of_two(2).with_tensor_candidates([mlp("blocks.0")], {"blocks.1.up": "its forward is hooked"})
    text = explain(make_plan(problem_of(partly, constraints=half), ONE))
    assert "OSDPCallback asks for tp, which is not possible: its forward is hooked." in text


def test_explanation_compares_whole_scopes_and_not_their_halves() -> None:
    """What one operator would gain is not to be had: the other one of its scope would change with it."""
    plan = make_plan(problem_of(model_of(1, input_mib=0.01), latency_ms=0.0), ONE)
    runs = group_runs(plan.operators)
    for run in runs:
        others = {delta.choice: delta for delta in choice_deltas(plan, run)}
        whole = others[ShardingChoice((Mode.ZDP,))]
        partner = next(op for op in plan.operators if op.name != run.operators[0].name)
        costs = {cost.choice: cost.time_s for cost in run.operators[0].alternatives}
        partner_costs = [cost.time_s for cost in partner.alternatives if cost.tensor_degree == 1]
        own = costs[run.operators[0].choice] + find_time(partner)
        assert whole.time_s == pytest.approx(costs[whole.choice] + min(partner_costs) - own)


def test_operator_whose_unit_is_shared_is_compared_without_those_that_could_be_cut_with_it() -> None:
    plan = make_plan(problem_of(model_of(1, input_mib=0.01), latency_ms=0.0), ONE)
    first, *others = plan.operators
    first = first.model_copy(update={"slices": (Mode.ZDP,), "tensor": None, "unit": "block"})
    assert first.tensor_group
    others = [other.model_copy(update={"alternatives": ()}) for other in others]
    plan = plan.model_copy(update={"operators": (first, *others)})
    choices = {delta.choice for delta in choice_deltas(plan, group_runs(plan.operators)[0])}
    assert ShardingChoice() in choices
    assert all(choice.tensor_degree == 1 for choice in choices)


def find_time(operator: OperatorPlan) -> float:
    return next(cost.time_s for cost in operator.alternatives if cost.choice == operator.choice)


def test_reports_show_tensor_parallel_operators() -> None:
    given_ = problem_of(model_of(input_mib=0.01), latency_ms=0.0)
    plan = make_plan(given_, ONE)
    table = to_text(plan_table(plan))
    assert "tp over" in table
    assert "cut, activations exchanged instead of weights" in table
    without = make_plan(replace(given_, constraints=replace(FREE, tensor_parallel=False)), ONE)
    degree = plan.operators[0].choice.tensor_degree
    changes = {(change.before, change.after) for change in build_difference(without, plan).decision}
    assert any(after == f"tp over {degree} ranks" for _, after in changes)
    point = simulate_one(given_, ONE)
    assert point.plan is not None
    assert {operator.slices for operator in point.plan.operators} == {(Mode.TP,)}
    assert point.osdp is not None
    assert point.osdp.sharded_share == pytest.approx(1.0)
    assert point.dp is not None
    assert point.dp.step_time_s > point.osdp.step_time_s
    svg = figures.to_svg(figures.decisions_figure(plan))
    assert figures.MODE_LABELS[Mode.TP] in svg
    assert figures.MODE_COLOURS[Mode.TP].lower() in svg.lower()
    assert "tp over" in plan.to_html()

"""Plans put into words: the reasons agree with the numbers, and plans without reasons are still readable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import CollectiveFit
from lightning_osdp.planning.spec.model import LinearInBatch, ParameterInfo
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report.diff import build_difference, diff
from lightning_osdp.report.explain import build_explanation, explain
from tests.support.models import hand_made_plan
from tests.unit.planning.search.test_batch_size_search import MIB, RANKS, cluster, compute, model, modes, plan_for


def line(text: str, start: str) -> str:
    """The one line that starts so."""
    (found,) = [one for one in text.splitlines() if one.startswith(start)]
    return found


def test_plan_holds_memory_shadow_price_and_cost_of_each_mode() -> None:
    # At the peak, in the first backward, a dp operator holds 12 MiB (no gradient yet) and a zdp2 one 3 + 4: from the
    # one to the other 1 ms is lost for 5 MiB.
    plan = plan_for(40)
    assert plan.peak is not None
    assert plan.peak.where == "backward of op3"
    first = {cost.choice.slices[0]: cost for cost in plan.operators[0].alternatives}
    assert {mode: cost.time_s for mode, cost in first.items()} == pytest.approx(
        {Mode.DP: 1e-3, Mode.ZDP2: 2e-3, Mode.ZDP: 3e-3}
    )
    assert {mode: cost.resident_bytes / MIB for mode, cost in first.items()} == {
        Mode.DP: 12.0,
        Mode.ZDP2: 7.0,
        Mode.ZDP: 3.0,
    }
    assert plan.memory_shadow_price == pytest.approx(1e-3 / (5 * MIB))
    assert plan_for(64).memory_shadow_price == 0
    parts = plan.peak.model_dump(exclude={"where"})
    assert sum(parts.values()) == plan.predicted.peak_memory_bytes


def test_explain_with_ample_memory_names_fastest_choice_and_no_memory_price() -> None:
    text = explain(plan_for(200))
    assert "price of memory: nothing" in text
    reason = line(text, "op0, op1, op2, op3: dp.")
    assert "Its fastest choice" in reason
    assert "cost 1.0 ms a step" in reason


def test_price_of_memory_says_whether_all_is_fastest_where_one_more_byte_saves_nothing() -> None:
    fastest = "price of memory: nothing. Every operator that may choose has its fastest mode."
    assert line(explain(plan_for(200)), "price of memory") == fastest
    short = plan_for(40).model_copy(update={"memory_shadow_price": 0.0})
    assert line(explain(short), "price of memory") == (
        "price of memory: nothing for one more MiB. What would save time needs more, or was slower in trials."
    )


def test_explain_replicated_operator_names_cost_and_savings_of_sharding() -> None:
    text = explain(plan_for(40))
    assert line(text, "op0: dp.").endswith(
        "it would free 5.0 MiB but cost 1.0 ms a step; "
        "at the price of memory under this limit (0.200 ms per MiB) that does not pay."
    )
    assert "price of memory: one more MiB would save about 0.200 ms a step." in text
    assert "reached in the backward of op3" in line(text, "memory: 38.0 MiB of 40.0 MiB")


def test_explain_sharded_operator_names_memory_of_next_faster_choice() -> None:
    # The last operator runs backward as soon as it has run forward: keeping its parameters for that costs no memory.
    plan = plan_for(24)
    assert modes(plan) == [Mode.ZDP, Mode.ZDP, Mode.ZDP, Mode.ZDP2]
    text = explain(plan)
    assert "Its smallest choice" in line(text, "op3: zdp2.")
    assert "it would save 1.0 ms a step but take 4.0 MiB more, and 0 B are left" in line(text, "op0, op1, op2: zdp.")


def test_plan_choices_are_near_optimal_at_memory_shadow_price() -> None:
    """At the price of memory no other mode may be better by more than the one operator that sets the price."""
    for limit in range(24, 66, 2):
        plan = plan_for(limit)
        price = plan.memory_shadow_price
        assert price is not None
        gains = [
            max(
                own.time_s + price * own.resident_bytes - (c.time_s + price * c.resident_bytes) for c in op.alternatives
            )
            for op in plan.operators
            for own in op.alternatives
            if own.choice == op.choice
        ]
        assert sum(gains) <= price * (16 * MIB), limit


def test_explain_says_why_unshardable_and_small_operators_stay_replicated() -> None:
    operators = list(model().operators)
    operators[1] = operators[1].model_copy(update={"replicated_reason": "used by the whole model"})
    bias = ParameterInfo(name="op2.bias", shape=(64,))
    operators[2] = operators[2].model_copy(update={"parameters": (bias,)})
    text = explain(plan_for(40, model=model().model_copy(update={"operators": tuple(operators)})))
    assert line(text, "op1:") == "op1: dp. Stays replicated: used by the whole model."
    assert line(text, "op2:").startswith("op2: dp. Stays replicated: its parameters are too small")


def test_explain_says_which_modes_were_asked_for_and_why_others_are_taken() -> None:
    plan = plan_for(40)
    requests = {
        "op0": {"requested_mode": Mode.ZDP, "slices": (Mode.ZDP,)},
        "op1": {"requested_mode": Mode.ZDP2, "slices": (Mode.DP,), "replicated_reason": "used by the whole model"},
        "op2": {"requested_mode": Mode.ZDP, "slices": (Mode.DP,)},
        "op3": {"requested_mode": Mode.ZDP, "slices": (Mode.ZDP2,)},
    }
    operators = tuple(op.model_copy(update={"split_dim": None, **requests.get(op.name, {})}) for op in plan.operators)
    text = explain(plan.model_copy(update={"operators": operators}))
    asked, impossible = "OSDPCallback(modes=...) asks for", "which is not possible"
    assert line(text, "op0:") == f"op0: zdp. As you wished: {asked} it."
    assert line(text, "op1:") == f"op1: dp. {asked} zdp2, {impossible}: used by the whole model."
    assert line(text, "op2:").startswith(f"op2: dp. {asked} zdp, {impossible}: its parameters are too small")
    assert line(text, "op3:").startswith(f"op3: zdp2. {asked} zdp, {impossible}: it is used several times in a step")


def test_explanation_groups_repeated_operators_with_summed_costs() -> None:
    blocks = tuple(op.model_copy(update={"name": f"blocks.{index}.up"}) for index, op in enumerate(model().operators))
    found = build_explanation(plan_for(24, model=model().model_copy(update={"operators": blocks})))
    reason, _ = found.operators
    assert reason.operators == ("blocks.0-2.up",)
    assert reason.count == 3
    assert "Next best, for all 3 together, is zdp2" in reason.text
    assert "save 3.0 ms a step but take 8.0 MiB more" in reason.text


def test_explanation_keeps_runs_of_different_operators_separate() -> None:
    names = ("up.0", "up.1", "down.0", "down.1")
    renamed = tuple(op.model_copy(update={"name": name}) for op, name in zip(model().operators, names, strict=True))
    found = build_explanation(plan_for(64, model=model().model_copy(update={"operators": renamed})))
    assert [reason.operators for reason in found.operators] == [("up.0-1",), ("down.0-1",)]
    assert all("for both together" in reason.text for reason in found.operators)


@pytest.mark.parametrize(
    ("rule", "activations", "words"),
    [
        (BatchSizePolicy(batch_size=2), 0, ["batch size 2: fixed, not searched."]),
        (BatchSizePolicy(max_batch_size=4), 0, ["batch size 4. Batch size 3 would be", "The largest allowed is 4."]),
        (BatchSizePolicy(), 8 * MIB, ["Batch size 3 does not fit: its smallest plan needs 36.0 MiB of 30.0 MiB."]),
        (BatchSizePolicy(global_batch_size=RANKS * 6), 0, ["can't make the global batch size of 24."]),
    ],
)
def test_explanation_of_batch_size_says_why_search_stopped(
    rule: BatchSizePolicy, activations: int, words: list[str]
) -> None:
    found = build_explanation(plan_for(30, rule, model=model(activations_per_sample=activations))).batch_size
    assert all(word in found for word in words), found


def test_explain_names_gain_of_larger_batch_size_within_tolerance() -> None:
    free = cluster(0.0, 0.0, 0.0)
    plan = plan_for(
        64,
        BatchSizePolicy(max_batch_size=8),
        cluster=free,
        compute=compute(outside=LinearInBatch(fixed=1e-5, per_sample=1e-3)),
    )
    assert plan.batch_size == 1
    assert "Batch size 8 would be 0.9% faster, within the tolerance of 1%" in explain(plan)


def test_plan_file_without_rationale_still_loads_and_explains() -> None:
    old = hand_made_plan({"up": Mode.ZDP, "down": Mode.DP}, 2)
    data = json.loads(old.to_json())
    for field in ("memory_shadow_price", "peak", "search_stop"):
        del data[field]
    for operator in data["operators"]:
        del operator["alternatives"], operator["replicated_reason"]
    read = ExecutionPlan.from_json(json.dumps(data))
    assert read == old
    assert "up, down" not in explain(read)
    assert line(explain(read), "up: zdp.") == "up: zdp. The plan does not say why."
    assert "does not say what else was tried" in explain(read)


def test_diff_of_equal_plans_is_empty() -> None:
    assert diff(plan_for(40), plan_for(40)) == "no difference"
    assert build_difference(plan_for(40), plan_for(40)).changes == ()


def test_diff_lists_changed_limit_modes_by_run_and_predictions() -> None:
    blocks = tuple(op.model_copy(update={"name": f"blocks.{i}.up"}) for i, op in enumerate(model().operators))
    renamed = model().model_copy(update={"operators": blocks})
    text = diff(plan_for(24, model=renamed), plan_for(64, model=renamed))
    assert line(text, "memory limit") == "memory limit: 24.0 MiB -> 64.0 MiB (+166.7%)"
    assert line(text, "blocks.0-2") == "blocks.0-2.up: zdp -> dp"
    assert line(text, "step time") == "step time: 12.0 ms -> 5.0 ms (-58.3%)"
    assert "batch size" not in text
    assert "latency" not in text


def test_diff_lists_changed_hardware_and_models() -> None:
    one = hand_made_plan({"up": Mode.DP, "old": Mode.DP}, 2, batch_size=4, fingerprint="abc")
    two = hand_made_plan({"up": Mode.DP, "new": Mode.ZDP}, 4, batch_size=6, fingerprint="xyz")
    slow = CollectiveFit(latency_s=2e-3, s_per_byte=1e-9)
    link = two.cluster.link.model_copy(update={"all_reduce": slow})
    two = two.model_copy(update={"cluster": two.cluster.model_copy(update={"link": link})})
    text = diff(one, two)
    assert line(text, "model") == "model: abc -> xyz"
    assert line(text, "devices per node") == "devices per node: 2 -> 4 (+100.0%)"
    assert line(text, "all-reduce latency") == "all-reduce latency: 1.0 ms -> 2.0 ms (+100.0%)"
    assert line(text, "batch size") == "batch size: 4 -> 6 (+50.0%)"
    assert line(text, "old") == "old: dp -> not there"
    assert line(text, "new") == "new: not there -> zdp"


# -- what would fit, where nothing does --------------------------------------------------------------------------------


def infeasible_message(limit_mib: int, rule: BatchSizePolicy | None = None, **changes: object) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan_for(limit_mib, rule, **changes)
    return str(caught.value)


def test_infeasible_error_suggestions_fit_and_smaller_ones_do_not() -> None:
    activations = model(activations_per_sample=2 * MIB)
    text = infeasible_message(20, BatchSizePolicy(batch_size=8), model=activations)
    assert "a memory_limit of 28 MiB, or 16 ranks (needs 19 MiB on each). Not enough: batch size 1" in text
    fixed = BatchSizePolicy(batch_size=8)
    assert plan_for(28, fixed, model=activations).batch_size == 8
    eight, sixteen = (cluster().model_copy(update={"devices_per_node": ranks}) for ranks in (8, 16))
    assert plan_for(20, fixed, model=activations, cluster=sixteen).batch_size == 8
    for too_little in ({"limit_mib": 27}, {"limit_mib": 20, "cluster": eight}):
        with pytest.raises(InfeasibleError):
            plan_for(rule=fixed, model=activations, **too_little)


def test_report_of_another_object_than_a_plan_names_it() -> None:
    path: Any = "plan.json"
    with pytest.raises(ConfigurationError, match=r"^explain\(\) takes an ExecutionPlan, not str: 'plan.json'$"):
        explain(path)
    with pytest.raises(ConfigurationError, match=r"^diff\(\) takes two ExecutionPlans, not str: 'plan.json'$"):
        diff(plan_for(40), path)


def test_infeasible_error_names_largest_batch_size_that_fits() -> None:
    activations = model(activations_per_sample=8 * MIB)
    assert "batch size 2 (needs 28 MiB)" in infeasible_message(30, BatchSizePolicy(batch_size=8), model=activations)
    assert plan_for(30, BatchSizePolicy(batch_size=2), model=activations).batch_size == 2
    with pytest.raises(InfeasibleError):
        plan_for(30, BatchSizePolicy(batch_size=3), model=activations)


def test_infeasible_error_says_when_more_ranks_are_not_enough() -> None:
    text = infeasible_message(5)
    assert "What would fit: a memory_limit of 24 MiB. Not enough: 32 ranks (needs 10 MiB on each)" in text


def test_infeasible_error_omits_rank_counts_unfit_for_global_batch_size() -> None:
    text = infeasible_message(20, BatchSizePolicy(global_batch_size=RANKS))
    assert "ranks (needs" not in text
    with pytest.raises(ConfigurationError):
        plan_for(
            20,
            BatchSizePolicy(global_batch_size=RANKS),
            cluster=cluster().model_copy(update={"devices_per_node": 2 * RANKS}),
        )

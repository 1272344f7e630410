"""Tensor parallelism in plans and profiles: what is read, what is refused, and with which field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, tensor_degrees
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link
from lightning_osdp.planning.spec.model import ModelProfile, Operator, ParameterInfo
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorRole, TensorScope, TensorSplit

FIXTURES = Path(__file__).parents[3] / "fixtures"
COLUMN, ROW = TensorRole.COLUMN, TensorRole.ROW


def cluster_of(devices: int, nodes: int = 1, by_node: tuple[int, ...] = ()) -> Cluster:
    fit = CollectiveFit(latency_s=1e-5, s_per_byte=1e-9)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    return Cluster(
        nodes=nodes, devices_per_node=devices, devices_by_node=by_node, device="cpu", backend="gloo", link=link
    )


def tensor_plan(ranks: int = 4, degree: int = 2, table_degree: int = 4) -> ExecutionPlan:
    splits = {
        "table": TensorSplit(degree=table_degree, role=TensorRole.EMBEDDING),
        "mlp.up": TensorSplit(degree=degree, role=COLUMN, scope="mlp"),
        "mlp.down": TensorSplit(degree=degree, role=ROW, scope="mlp"),
    }
    operators = [
        OperatorPlan(name=name, slices=(Mode.TP,), num_parameters=64, tensor=split) for name, split in splits.items()
    ]
    operators.append(OperatorPlan(name="head", slices=(Mode.ZDP,), num_parameters=8))
    return ExecutionPlan.minimal(operators, cluster_of(ranks), {"mlp": TensorScope(attributes=("mlp.width",))})


def test_plan_with_tensor_parallel_operators_survives_its_json() -> None:
    plan = tensor_plan()
    again = ExecutionPlan.from_json(plan.to_json())
    assert again == plan
    assert again.operators[1].choice == ShardingChoice((Mode.TP,), tensor_degree=2)
    assert again.operators[0].choice.tensor_degree == 4
    assert again.operators[3].choice.tensor_degree == 1
    assert again.tensor_scopes["mlp"].attributes == ("mlp.width",)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("operators", 0, "tensor", "degree"), 3, r"table: tensor.degree 3 does not divide the 4 devices of a node"),
        (("operators", 0, "tensor", "degree"), 1, r"field operators.0.tensor.degree: .*greater than or equal to 2"),
        (("operators", 0, "tensor", "degree"), "x", r"field operators.0.tensor.degree: "),
        (("operators", 0, "tensor", "role"), "rows", r"field operators.0.tensor.role: "),
        (("operators", 0, "tensor", "parts"), 0, r"field operators.0.tensor.parts: "),
        (("operators", 0, "tensor", "scope"), "mlp", r"field operators.0.tensor: .*role embedding has no scope"),
        (("operators", 1, "tensor", "scope"), None, r"operators.1.tensor: .*scope: the role column needs a scope"),
        (("operators", 1, "tensor", "scope"), "mpl", r"mlp.up: tensor.scope 'mpl' is not in tensor_scopes"),
        (("operators", 1, "tensor", "degree"), 4, r"operators of 'mlp' differ in tensor.degree: 2 and 4"),
        (("operators", 1, "tensor", "role"), "row", r"tensor_scopes: 'mlp' has no column operator \(tensor.role\)"),
        (("operators", 1, "tensor"), None, r"mlp.up: an operator has a tensor split if its mode is tp; .* has none"),
        (("operators", 1, "slices"), ["zdp"], r"mlp.up: an operator has a tensor split .* this one has one"),
        (("operators", 1, "sharding_group"), "node", r"mlp.up: with mode tp, .* sharding_group say nothing"),
        (("operators", 1, "unit"), "mlp", r"mlp.up: .*can.t share the unit of mlp|only what is sharded whole"),
        (("tensor_scopes", "mpl"), {}, r"tensor_scopes: 'mpl' has no column and no row operator"),
        (("tensor_scopes", "mlp", "atributes"), [], r"field tensor_scopes.mlp.atributes: "),
        (("tensor_scopes", "mlp", "needs_agreement"), 7, r"field tensor_scopes.mlp.needs_agreement: "),
    ],
)
def test_plan_with_wrong_tensor_field_is_refused_by_its_name(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    data: dict[str, Any] = json.loads(tensor_plan().to_json())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigurationError, match=message):
        ExecutionPlan.from_json(json.dumps(data))


@pytest.mark.parametrize(("ranks", "degree", "table_degree", "refused"), [(4, 4, 4, 4), (6, 2, 3, 2)])
def test_check_of_a_run_with_fewer_ranks_in_a_node_refuses_the_degree(
    ranks: int, degree: int, table_degree: int, refused: int
) -> None:
    plan, operators = tensor_plan(ranks, degree, table_degree), []
    for operator in plan.operators:
        parameter = ParameterInfo(name=f"{operator.name}.weight", shape=(operator.num_parameters,))
        operators.append(Operator(name=operator.name, kind="Linear", parameters=(parameter,)))
    model = ModelProfile(fingerprint="", operators=tuple(operators), moments=(), batch_size=1)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"num_parameters": model.num_parameters})})
    plan.check(model, ranks, 1)
    message = f"cuts operators over {refused} ranks, this run has {ranks // 2} in a node"
    with pytest.raises(PlanMismatchError, match=message):
        plan.check(model, ranks, 2)


@pytest.mark.parametrize("name", ["multi_node_scopes.json", "recomputed_blocks.json", "user_wishes.json"])
def test_plan_v2_reads_like_the_version_1_that_it_was_made_from(name: str) -> None:
    text = (FIXTURES / "plans_v2" / name).read_text()
    assert json.loads(text)["version"] == 2
    plan = ExecutionPlan.from_json(text)
    assert plan.version == 3
    assert plan == ExecutionPlan.from_json((FIXTURES / "plans_v1" / name).read_text())


@pytest.mark.parametrize(
    ("cluster", "degrees"),
    [
        (cluster_of(1), ()),
        (cluster_of(6), (2, 3, 6)),
        (cluster_of(4, nodes=2), (2, 4)),
        (cluster_of(1, nodes=4), ()),
        (cluster_of(6, by_node=(4, 2)), (2,)),
    ],
)
def test_tensor_degrees_are_divisors_of_the_devices_of_a_node(cluster: Cluster, degrees: tuple[int, ...]) -> None:
    assert tensor_degrees(cluster) == degrees


def mlp_candidate(**changes: Any) -> TensorCandidate:
    fields: dict[str, Any] = {
        "operators": ("gate", "up", "down"),
        "roles": (COLUMN, COLUMN, ROW),
        "scope": "mlp",
        "degrees": (2, 4),
        "input_bytes": 80.0,
        "output_bytes": 60.0,
    }
    return TensorCandidate(**(fields | changes))


def test_candidates_give_operators_equal_shares_that_add_up() -> None:
    operators = [Operator(name=name, kind="Linear", parameters=()) for name in ("gate", "up", "down", "head")]
    model = ModelProfile(fingerprint="", operators=tuple(operators), moments=(), batch_size=1)
    model = model.with_tensor_candidates([mlp_candidate()], {"head": "its forward is hooked"})
    uses = [operator.tensor for operator in model.operators]
    assert [(use.input_bytes, use.output_bytes) for use in uses if use] == [(40.0, 0.0), (40.0, 0.0), (0.0, 60.0)]
    assert uses[3] is None
    assert ModelProfile.model_validate_json(model.model_dump_json()) == model
    assert mlp_candidate(parts=(1, 2, 1)).split(1, 4) == TensorSplit(degree=4, role=COLUMN, scope="mlp", parts=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": (COLUMN, ROW)}, "3 operators need as many roles and parts"),
        ({"parts": (1,)}, "3 operators need as many roles and parts"),
        ({"scope": None}, "contradict the scope None"),
        ({"roles": (COLUMN, COLUMN, COLUMN)}, "needs operators of both roles"),
        ({"degrees": ()}, "degrees"),
    ],
)
def test_candidate_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        mlp_candidate(**changes)


def test_model_refuses_candidates_of_unknown_or_shared_operators() -> None:
    model = ModelProfile(fingerprint="", operators=(), moments=(), batch_size=1)
    with pytest.raises(ValueError, match="tensor_candidates: gate is no operator"):
        model.with_tensor_candidates([mlp_candidate()])
    with pytest.raises(ValueError, match="tensor_candidates: gate is in two of them"):
        model.with_tensor_candidates([mlp_candidate(), mlp_candidate(scope="other")])

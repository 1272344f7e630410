"""What a plan file may be, and what is refused."""

from __future__ import annotations

import json

import pytest

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.spec.choices import Mode, legal_modes
from lightning_osdp.planning.spec.model import ModelProfile, Operator, ParameterInfo
from lightning_osdp.planning.spec.plan import ExecutionPlan, ModelIdentity, OperatorPlan
from tests.support.models import hand_made_plan


def description(shape: tuple[int, ...] = (8, 8), name: str = "up", fingerprint: str = "abc") -> ModelProfile:
    operator = Operator(name=name, kind="Linear", parameters=(ParameterInfo(name=f"{name}.weight", shape=shape),))
    return ModelProfile(fingerprint=fingerprint, operators=(operator,), moments=(), batch_size=1)


def plan(**changes: object) -> ExecutionPlan:
    operators = (OperatorPlan(name="up", slices=(Mode.ZDP,), num_parameters=64),)
    model = ModelIdentity(fingerprint="abc", num_parameters=64)
    return hand_made_plan({}, 2).model_copy(update={"operators": operators, "model": model} | changes)


def test_plan_check_accepts_its_own_model_and_survives_json() -> None:
    plan().check(description(), ranks=2)
    again = ExecutionPlan.from_json(plan().to_json())
    assert again == plan()
    assert again.to_json() == plan().to_json(), "zeros of one sign stay so"


def two_operators(names: str, sizes: tuple[int, int] = (8, 4), fingerprint: str = "abc") -> ModelProfile:
    one, other = (description((size, 8), name).operators for name, size in zip(names, sizes, strict=True))
    return description(fingerprint=fingerprint).model_copy(update={"operators": (*one, *other)})


def test_plan_check_accepts_operators_in_an_order_of_the_data_but_not_of_other_sizes() -> None:
    decisions = [
        OperatorPlan(name=op.name, slices=(mode,), num_parameters=op.num_parameters)
        for op, mode in zip(two_operators("ab").operators, (Mode.ZDP, Mode.ZDP2), strict=True)
    ]
    both = plan(operators=tuple(decisions), model=ModelIdentity(fingerprint="abc", num_parameters=96))
    other_order = two_operators("ba", (4, 8), "of that order")
    both.check(other_order, ranks=2)
    assert [(op.name, op.slices) for op in both.operators_of(other_order)] == [("b", (Mode.ZDP2,)), ("a", (Mode.ZDP,))]
    with pytest.raises(PlanMismatchError, match="names and counts agree, but the sizes of a, b differ"):
        both.check(two_operators("ba", fingerprint="of other sizes"), ranks=2)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        (description(), 4, "for 2 ranks, this run has 4"),
        (description((8, 9)), 2, "64 parameters, this one has 72"),
        (description(name="down"), 2, "only one of them has: down, up"),
        (description(name=""), 2, "only one of them has: the module itself, up"),
        (description((4, 16), fingerprint="xyz"), 2, "shapes, dtypes or trainability differ"),
    ],
)
def test_plan_check_rejects_other_model_or_rank_count(model: ModelProfile, ranks: int, message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        plan().check(model, ranks)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("not json {", ConfigurationError, "osdp_plan.json is not JSON"),
        ("[1, 2]", ConfigurationError, "is not an execution plan"),
        ('{"format": "something else"}', ConfigurationError, "is not an execution plan"),
        ('{"format": "lightning_osdp.plan", "version": 99}', PlanMismatchError, "has version 99"),
        ('{"format": "lightning_osdp.plan", "version": 1}', ConfigurationError, "is damaged: field"),
    ],
)
def test_plan_from_json_rejects_unreadable_files(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExecutionPlan.from_json(text, source="osdp_plan.json")


def test_plan_from_json_unknown_mode_names_field_and_known_modes() -> None:
    data = json.loads(plan().to_json())
    data["operators"][0]["slices"] = ["zero3"]
    known = "Input should be 'dp', 'zdp2', 'zdp' or 'tp'"
    with pytest.raises(ConfigurationError, match=rf"operators\.0\.slices\.0: {known}"):
        ExecutionPlan.from_json(json.dumps(data))


def test_legal_modes_depend_on_size_calls_ties_and_replicated_reason() -> None:
    matrix = ParameterInfo(name="w", shape=(128, 128))
    norm = ParameterInfo(name="b", shape=(128,))
    operator = Operator(name="up", kind="Linear", parameters=(matrix, norm))
    assert legal_modes(operator) == (Mode.DP, Mode.ZDP2, Mode.ZDP)
    assert operator.shardable_parameters == (matrix,)
    assert legal_modes(operator.model_copy(update={"calls": 2})) == (Mode.DP, Mode.ZDP2)
    assert legal_modes(operator.model_copy(update={"tied": True})) == (Mode.DP, Mode.ZDP2)
    assert legal_modes(operator.model_copy(update={"replicated_reason": "tied"})) == (Mode.DP,)
    assert legal_modes(Operator(name="norm", kind="LayerNorm", parameters=(norm,))) == (Mode.DP,)

"""Plans that are given beside wishes of OSDPCallback: those made with the same wishes are taken, others refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, make_plan
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.spec.tensor import TensorScope
from lightning_osdp.strategy.planning_options import check_given_plan
from tests.support.models import hand_made_plan
from tests.support.small_models import MIB, blocks_of_one, cluster, compute
from tests.support.tensor_problems import model_of

MODEL = blocks_of_one(3, 5)


def plan_with(**wishes: Any) -> ExecutionPlan:
    times = compute(MODEL, slices=(2,))
    problem = Problem(MODEL, cluster(), times, 1000 * MIB, constraints=SearchConstraints(**wishes))
    return make_plan(problem, BatchSizePolicy(batch_size=1))


def check(plan: ExecutionPlan, model: ModelProfile = MODEL, **wishes: Any) -> None:
    ranks: Any = SimpleNamespace(world_size=cluster().ranks, nodes=1)
    traced: Any = SimpleNamespace(model_profile=model)
    check_given_plan(plan, traced, ranks, "not allowed", SearchConstraints(**wishes))


@pytest.mark.parametrize(
    "wishes",
    [
        {"modes": "zdp"},
        {"modes": {"blocks.0": "zdp2", "blocks.1": "dp"}},
        {"modes": "zdp", "slice_granularity": 2},
        {"modes": "zdp", "slice_granularity": {"blocks.0": 2, "blocks.1": 1}},
        {"modes": "dp", "slice_granularity": 2},
        {"activation_checkpointing": True},
        {"activation_checkpointing": ("blocks.0",)},
        {"tensor_parallel": False},
    ],
)
def test_plan_made_with_the_same_wishes_is_accepted(wishes: dict[str, Any]) -> None:
    check(plan_with(**wishes), **wishes)


@pytest.mark.parametrize(
    ("made_with", "wishes", "message"),
    [
        ({"modes": "dp"}, {"modes": {"blocks.1": "zdp"}}, r"modes=.*blocks\.1\.up is dp in the plan, zdp by modes"),
        (
            {"modes": "zdp", "slice_granularity": 1},
            {"slice_granularity": 2},
            r"slice_granularity=.*up is zdp in the plan, and so in 1 slice\.",
        ),
        (
            {"modes": "zdp", "slice_granularity": 2},
            {"slice_granularity": {"blocks.2": 1}},
            r"slice_granularity=.*blocks\.2\.up is zdp \+ zdp in the plan, and so in 2 slices",
        ),
        (
            {"activation_checkpointing": False},
            {"activation_checkpointing": ("blocks.1",)},
            r"activation_checkpointing=.*blocks\.1 is not recomputed in the plan",
        ),
        (
            {"activation_checkpointing": True},
            {"activation_checkpointing": False},
            r"activation_checkpointing=.*blocks\.0 is recomputed in the plan",
        ),
        ({"modes": "zdp"}, {"modes": {"blocks.0": "tp"}}, r"modes=.*nothing that 'blocks\.0' matches is tp"),
        ({"modes": "zdp"}, {"tensor_parallel": {"blocks.0": 2}}, r"tensor_parallel=.*'blocks\.0' matches is tp"),
    ],
)
def test_plan_that_contradicts_a_wish_is_refused_with_both(
    made_with: dict[str, Any], wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"plan and OSDPCallback\({message}.*Leave one of them out"):
        check(plan_with(**made_with), **wishes)


def changed_model(operator: dict[str, Any] | None = None, block: dict[str, Any] | None = None) -> ModelProfile:
    first = MODEL.operators[0].model_copy(update=operator or {})
    first_block = MODEL.blocks[0].model_copy(update=block or {})
    changes = {"operators": (first, *MODEL.operators[1:]), "blocks": (first_block, *MODEL.blocks[1:])}
    return MODEL.model_copy(update=changes)


def test_plan_that_would_give_wrong_results_for_this_step_is_refused_with_the_reason() -> None:
    """As where another optimizer, a hook or a layer that is updated in its forward has come since it was made."""
    sharded, split = plan_with(modes="zdp2"), plan_with(modes="zdp", slice_granularity=2)
    replicated = changed_model({"replicated_reason": "LBFGS mixes elements"})
    assert set(plan_with(modes="dp").operators[0].slices) == {Mode.DP}
    check(plan_with(modes="dp", activation_checkpointing=False), replicated)
    for reason in ("not used in the traced step", "blocks has looked at it, so that it may not run on every rank"):
        check(sharded, changed_model({"replicated_reason": reason}))
    with pytest.raises(PlanMismatchError, match=r"has blocks\.0\.up as zdp2, but it stays replicated: LBFGS mixes"):
        check(sharded, replicated)
    hooked = changed_model({"unsplittable_reason": "there are hooks on it", "split_dims": ()})
    check(sharded, hooked)
    with pytest.raises(PlanMismatchError, match=r"splits blocks\.0\.up, which can't be: there are hooks on it"):
        check(split, hooked)
    recomputed = plan_with(activation_checkpointing=True)
    with pytest.raises(PlanMismatchError, match=r"recomputes blocks\.0, which can't be: it counts its calls"):
        check(recomputed, changed_model(block={"recompute_blocker": "it counts its calls"}))


def test_plan_that_says_not_what_is_between_operators_takes_what_was_found() -> None:
    model = model_of(1)
    (found,) = model.tensor_candidates
    found = found.model_copy(update={"functions": ("gelu",), "inner_modules": ("blocks.0.act",)})
    splits = found.splits(2)
    operators = tuple(OperatorPlan(name=n, slices=(Mode.TP,), num_parameters=0, tensor=t) for n, t in splits.items())
    changes = {"operators": operators, "tensor_scopes": {found.scope: TensorScope()}}
    plan = hand_made_plan({}, 2).model_copy(update=changes)
    proven = plan.with_proven_scopes(model.with_tensor_candidates((found,)))
    assert proven.tensor_scopes == {found.scope: found.tensor_scope}
    assert proven.with_proven_scopes(model.with_tensor_candidates(())) == proven  # what it says is kept
    reasons = {found.operators[1]: "together with up: norm in between"}
    for candidates in ((), (found.model_copy(update={"parts": (3, 1)}),)):
        with pytest.raises(
            PlanMismatchError, match=r"blocks\.0\.down tensor parallel together: together with up: norm"
        ):
            plan.with_proven_scopes(model.with_tensor_candidates(candidates, {}, reasons))

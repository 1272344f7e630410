"""Plans whose tensor parallel operators a module does not allow are refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_osdp.engine.tensor_parallel.check import check_tensor_parallelism, tensor_refusal
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope
from tests.support.tensor_models import ATTENTION_SPLITS, Attending, Wide, tensor_plan


def hook(*_: object) -> None:
    pass


def replaced_forward() -> nn.Module:
    module = nn.Linear(4, 4)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_hook(hook)
    return module


def hooked_weight() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight.register_hook(hook)
    return module


def adapted_attention() -> nn.Module:
    module = nn.MultiheadAttention(4, 2)
    module.out_proj = parametrizations.weight_norm(module.out_proj)
    return module


def hooked_attention_weight() -> nn.Module:
    module = nn.MultiheadAttention(4, 2)
    module.out_proj.weight.register_hook(hook)
    return module


class Adapted(nn.Linear):
    """A Linear with a module of its own, as adapters have."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.adapter = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("make", "role", "reason"),
    [
        (lambda: nn.Conv1d(4, 4, 1), TensorRole.LINEAR, "Conv1d is neither a Linear, an Embedding, an"),
        (lambda: nn.Linear(4, 4), TensorRole.EMBEDDING, "Linear is neither a Linear, an Embedding"),
        (lambda: nn.Embedding(4, 4), TensorRole.COLUMN, "Embedding is neither"),
        (replaced_forward, TensorRole.LINEAR, "its forward is replaced"),
        (hooked, TensorRole.COLUMN, "its forward is hooked"),
        (hooked, TensorRole.LINEAR, ""),
        (hooked_weight, TensorRole.LINEAR, "there are hooks on its weight"),
        (Adapted, TensorRole.LINEAR, "Adapted has parameters besides weight and bias"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), TensorRole.LINEAR, "its weight is computed from"),
        (lambda: nn.LazyLinear(4), TensorRole.LINEAR, "its forward is replaced|not initialized yet|hooks"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), TensorRole.EMBEDDING, "max_norm changes whole rows of the weight"),
        (lambda: nn.Embedding(4, 4, sparse=True), TensorRole.EMBEDDING, "its gradients are sparse"),
        (lambda: nn.EmbeddingBag(4, 4, scale_grad_by_freq=True), TensorRole.EMBEDDING, "scale_grad_by_freq counts the"),
        (lambda: nn.Embedding(4, 4, padding_idx=1), TensorRole.EMBEDDING, ""),
        (lambda: nn.EmbeddingBag(4, 4, mode="max"), TensorRole.EMBEDDING, ""),
        (lambda: nn.Linear(4, 4, bias=False, dtype=torch.bfloat16), TensorRole.ROW, ""),
        (lambda: nn.MultiheadAttention(4, 2), TensorRole.ATTENTION, ""),
        (lambda: nn.MultiheadAttention(4, 2), TensorRole.LINEAR, "MultiheadAttention is neither a Linear"),
        (lambda: nn.Linear(4, 4), TensorRole.ATTENTION, "Linear is no MultiheadAttention"),
        (adapted_attention, TensorRole.ATTENTION, "MultiheadAttention has parameters or modules besides its"),
        (hooked_attention_weight, TensorRole.ATTENTION, "there are hooks on its weight"),
    ],
)
def test_refusal_says_why_a_module_can_not_be_cut(make: Callable[[], nn.Module], role: TensorRole, reason: str) -> None:
    found = tensor_refusal(make(), role)
    assert bool(found) == bool(reason)
    assert any(part in found for part in reason.split("|"))


def plan_of(**changes: Any) -> ExecutionPlan:
    return tensor_plan({"embed": 2, "mlp": 2, "head": 2}, 4, **changes)


def tied(model: Any) -> None:
    model.head.weight = model.embed.weight


def narrow(model: Any) -> None:
    model.head = nn.Linear(16, 61)


def without_head(model: Any) -> None:
    del model.head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tied, r"^embed can't be tensor parallel: its weight is also head.weight$"),
        (narrow, r"^head can't be tensor parallel: 2 ranks can't share its 61 output features equally$"),
        (without_head, r"^the plan makes 'head' tensor parallel, which is not a submodule of this module$"),
        (lambda model: model.mlp.up.register_forward_hook(hook), r"^mlp.up can't be .*: its forward is hooked$"),
    ],
)
def test_plan_that_a_module_does_not_allow_is_refused(change: Callable[[Any], object], message: str) -> None:
    model = Wide()
    check_tensor_parallelism(model, plan_of(), 4)
    change(model)
    with pytest.raises(ShardingError, match=message):
        check_tensor_parallelism(model, plan_of(), 4)


def test_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"^embed can't be tensor parallel: its degree 2 does not divide 3 ranks$"):
        check_tensor_parallelism(Wide(), plan_of(), 3)


def test_scopes_are_checked_for_their_module_and_attributes() -> None:
    model, plan = Attending(), tensor_plan({"attention": 4}, 4, splits=ATTENTION_SPLITS)
    check_tensor_parallelism(model, plan, 4)
    with pytest.raises(ShardingError, match=r"which is not a submodule of this module$"):
        check_tensor_parallelism(model, plan.model_copy(update={"tensor_scopes": {"attn": TensorScope()}}), 4)
    between = {"attention": TensorScope(inner_modules=("norm",))}
    check_tensor_parallelism(model, plan.model_copy(update={"tensor_scopes": between}), 4)
    model.norm.register_forward_hook(hook)
    with pytest.raises(
        ShardingError, match=r"^attention can't be .*: norm runs in it and has hooks, which would see a"
    ):
        check_tensor_parallelism(model, plan.model_copy(update={"tensor_scopes": between}), 4)
    model.attention.heads = 6
    message = r"^attention can't be tensor parallel: attention.heads is 6, not divisible by 4$"
    with pytest.raises(ShardingError, match=message):
        check_tensor_parallelism(model, plan, 4)

"""Which modules can be tensor parallel, and which plans of it can be applied.

Tracing asks when it looks for candidates, and the engine again before it cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_osdp.engine.replaced_method import ReplacedMethod
from lightning_osdp.engine.splittable import (
    MEMORY_ADVICE,
    SHARED_MEMORY,
    has_parameter_hooks,
    is_in_shared_memory,
    matrix_or_table_class,
)
from lightning_osdp.engine.tensor_parallel.operator import cut_dim, cut_weights
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope


def tensor_operators(plan: ExecutionPlan) -> list[OperatorPlan]:
    """Return the operators that are tensor parallel."""
    return [operator for operator in plan.operators if operator.tensor is not None]


def tensor_units(plan: ExecutionPlan) -> dict[str, list[OperatorPlan]]:
    """Group tensor parallel operators by what runs together: the module of a scope, or an operator by itself."""
    units: dict[str, list[OperatorPlan]] = {}
    for operator in tensor_operators(plan):
        assert operator.tensor is not None
        units.setdefault(operator.tensor.scope or operator.name, []).append(operator)
    return units


def tensor_refusal(module: nn.Module, role: TensorRole) -> str:
    """Return why a module can't be tensor parallel in a role, in words for the user; empty if it can.

    Whether its weight is also used elsewhere, and whether its dimensions can be divided, is not considered.
    """
    kind, is_table = type(module).__name__, isinstance(module, nn.Embedding | nn.EmbeddingBag)
    base = nn.MultiheadAttention if role == TensorRole.ATTENTION else matrix_or_table_class(module)
    if base is None or is_table != role.is_table:
        return f"{kind} is neither a Linear, an Embedding, an EmbeddingBag nor a Conv1D of transformers"
    if role == TensorRole.TABLE_ROWS and base is not nn.Embedding:
        return f"{kind} is no Embedding, whose rows alone can be cut"
    if not isinstance(module, base):
        return f"{kind} is no MultiheadAttention"
    if type(module).forward is not base.forward or "forward" in vars(module):
        return "its forward is replaced"
    if isinstance(module, nn.MultiheadAttention):
        if reason := _attention_refusal(module):
            return reason
        return _weight_refusal([cut.parameter for cut in cut_weights(module, role)], list(module.parameters()))
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return "its weight is computed from others (parametrized, weight-normed or pruned) or not initialized yet"
    if set(module._parameters) - {"weight", "bias"} or module._modules:
        return f"{kind} has parameters besides weight and bias"
    if reason := _weight_refusal([weight], [module._parameters.get("bias")]):
        return reason
    if role.has_scope and has_hooks(module):
        return "its forward is hooked"
    return table_refusal(module) if isinstance(module, nn.Embedding | nn.EmbeddingBag) else ""


def table_refusal(table: Any) -> str:
    """Return which option of a table keeps its columns from being looked up by themselves; empty if there is none."""
    reasons = {
        "max_norm changes whole rows of the weight": table.max_norm is not None,
        "its gradients are sparse": table.sparse,
        "scale_grad_by_freq counts the indices of one rank": table.scale_grad_by_freq,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _weight_refusal(weights: Sequence[nn.Parameter], others: Sequence[nn.Parameter | None]) -> str:
    """Return why parameters can't be cut, whatever module has them.

    Args:
        weights: what is cut.
        others: what else the module has.
    """
    for weight in weights:
        if not weight.is_floating_point():
            return f"its weight is {weight.dtype}"
        if has_parameter_hooks(weight):
            return "there are hooks on its weight"
    if any(map(has_parameter_hooks, others)):
        return "there are hooks on its bias"
    return "" if len(set(weights)) == len(weights) else "its projections share a weight"


def _attention_refusal(attention: nn.MultiheadAttention) -> str:
    """Return why an attention is not what its class makes, or does more than it is known to do with slices."""
    out, own = attention._modules.get("out_proj"), attention._parameters
    projections = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    is_plain = isinstance(out, nn.Linear) and set(out._parameters) == {"weight", "bias"} and not out._modules
    if not is_plain or set(attention._modules) != {"out_proj"} or set(own) - projections - {"bias_k", "bias_v"}:
        return f"{type(attention).__name__} has parameters or modules besides its projections"
    reasons = {
        "its keys and values have a bias of their own (add_bias_kv)": attention.bias_k is not None,
        "its keys and values get zeros (add_zero_attn)": attention.add_zero_attn,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks see what goes into a module and comes out of it."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in names)


def shows_slices(module: nn.Module) -> bool:
    """Return whether hooks of a module, or a forward that its user has replaced, see what goes through it."""
    forward = vars(module).get("forward")
    return has_hooks(module) or not (forward is None or isinstance(forward, ReplacedMethod))


def indivisible_reason(module: nn.Module, role: TensorRole, degree: int, parts: int = 1) -> str:
    """Return why a module's weight can't be cut into so many equal slices; empty if it can."""
    if isinstance(module, nn.MultiheadAttention):
        heads = module.num_heads
        return "" if heads % degree == 0 else f"{degree} ranks can't share its {heads} heads equally"
    weight = module._parameters["weight"]
    assert weight is not None
    dim = cut_dim(module, role)
    size = weight.shape[dim]
    if size % (degree * parts) == 0:
        return ""
    is_input = role == TensorRole.ROW
    what = "rows" if dim == 0 else "columns"
    if not role.is_table:
        what = f"{'input' if is_input else 'output'} features"
    each = f" in each of its {parts} parts" if parts > 1 else ""
    return f"{degree} ranks can't share its {size} {what} equally{each}"


def check_tensor_parallelism(module: nn.Module, plan: ExecutionPlan, ranks: int) -> None:
    """Refuse tensor parallel operators that the module does not allow.

    Raises:
        ShardingError: names the operator, and what is wrong.
    """
    modules = dict(module.named_modules())
    uses: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(name)
    for operator in tensor_operators(plan):
        assert operator.tensor is not None
        name, split = operator.name, operator.tensor
        if name not in modules or not name:
            raise ShardingError(f"the plan makes {name!r} tensor parallel, which is not a submodule of this module")
        reason = tensor_refusal(modules[name], split.role)
        reason = reason or indivisible_reason(modules[name], split.role, split.degree, split.parts)
        if not reason and ranks % split.degree:
            reason = f"its degree {split.degree} does not divide {ranks} ranks"
        if not reason:
            cut = cut_weights(modules[name], split.role)
            others = [other for each in cut for other in uses[each.parameter] if not other.startswith(f"{name}.")]
            reason = f"its weight is also {others[0]}" if others else ""
            if any(is_in_shared_memory(each.parameter) for each in cut):
                reason = f"its weight {SHARED_MEMORY}: {MEMORY_ADVICE}"
        if reason:
            raise ShardingError(f"{name} can't be tensor parallel: {reason}")
    units = tensor_units(plan)
    for scope, needs in plan.tensor_scopes.items():
        degrees = {operator.tensor.degree for operator in units.get(scope, ()) if operator.tensor is not None}
        _check_scope(scope, needs, modules, max(degrees, default=1))


def _check_scope(scope: str, needs: TensorScope, modules: dict[str, nn.Module], degree: int) -> None:
    if scope not in modules:
        raise ShardingError(f"the plan runs operators in {scope!r} together, which is not a submodule of this module")
    for name in needs.inner_modules:
        if name not in modules or has_hooks(modules[name]):
            what = "has hooks, which would see a slice" if name in modules else "is not a submodule of this module"
            raise ShardingError(f"{scope} can't be tensor parallel: {name} runs in it and {what}")
    for attribute in needs.attributes:
        owner, _, name = attribute.rpartition(".")
        value = getattr(modules.get(owner), name, None)
        if type(value) is not int or value % degree:
            raise ShardingError(
                f"{scope} can't be tensor parallel: {attribute} is {value!r}, not divisible by {degree}"
            )

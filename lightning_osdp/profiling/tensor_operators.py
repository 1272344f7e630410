"""Which operators may be tensor parallel at all, and what the module itself says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.planning.spec.model import Operator


def refusal(operator: Operator, module: nn.Module, degrees: Sequence[int]) -> str:
    """Say to the user why the operator can't be tensor parallel at all; empty if it can."""
    if operator.replicated_reason:
        return operator.replicated_reason
    if isinstance(module, nn.MultiheadAttention):
        return "MultiheadAttention computes its projections by itself, all in one function"
    if isinstance(module, nn.EmbeddingBag):
        reason = _bag_refusal(module)
    else:
        reason = "" if operator.split_dims else operator.unsplittable_reason or "it is not a matrix"
    if reason:
        return reason
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return "scale_grad_by_freq counts indices, of which each rank has its own"
    size = cut_size(module)
    if not any(size % degree == 0 for degree in degrees):
        return f"its {size} output features can't be divided by {' or '.join(map(str, degrees))}"
    return ""


def _bag_refusal(module: nn.EmbeddingBag) -> str:
    if type(module).forward is not nn.EmbeddingBag.forward or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    if set(module._parameters) - {"weight"} or module._modules or module._parameters.get("weight") is None:
        return "its weight is computed from others (parametrized, weight-normed or pruned)"
    if module.weight._backward_hooks or getattr(module.weight, "_post_accumulate_grad_hooks", None):
        return "there are hooks on its weight"
    if module._forward_pre_hooks or module._forward_hooks:
        return "there are hooks on it, which may read its weight"
    if module.max_norm is not None:
        return "max_norm changes whole rows of the weight"
    return "its gradients are sparse" if module.sparse else ""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear or a Conv1D of transformers."""
    return matrix_input_dim(module) is not None


def cut_size(module: nn.Module) -> int:
    """Return the size of the dimension that is cut if the module is tensor parallel by itself."""
    assert isinstance(module.weight, Tensor)
    input_dim = matrix_input_dim(module)
    return int(module.weight.shape[1 if input_dim is None else 1 - input_dim])


def planned_columns(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the modules that transformers' own plans (``_tp_plan``) cut by columns: a hint, which proves nothing."""
    planned = set()
    for prefix, module in modules.items():
        plan = getattr(module, "_tp_plan", None)
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            if "colwise" in str(style):
                wanted = f"{prefix}.{pattern}".strip(".").split(".")
                planned |= {name for name in modules if _matches(name.split("."), wanted)}
    return planned


def _matches(path: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(path) == len(wanted) and all(b in ("*", a) for a, b in zip(path, wanted, strict=True))

"""Which operators may be tensor parallel at all, and what the module itself says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.engine.tensor_parallel.check import has_hooks, tensor_refusal
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.tensor import TensorRole


def refusal(operator: Operator, module: nn.Module) -> str:
    """Say to the user why the operator can't be tensor parallel, whatever its size; empty if it can."""
    if operator.replicated_reason:
        return operator.replicated_reason
    if isinstance(module, nn.MultiheadAttention):
        return "MultiheadAttention computes its projections by itself, all in one function"
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if reason := tensor_refusal(module, TensorRole.EMBEDDING if is_table else TensorRole.LINEAR):
        return reason
    if has_hooks(module):
        return "there are hooks on it, which may read its weight"
    if isinstance(module, nn.EmbeddingBag) or operator.split_dims:
        return ""
    return operator.unsplittable_reason or "it is not a matrix"


def size_refusal(module: nn.Module, degrees: Sequence[int]) -> str:
    """Say to the user why the operator can't be cut by itself over any number of ranks; empty if it can."""
    size, numbers = cut_size(module), " or ".join(map(str, degrees))
    is_divisible = any(size % degree == 0 for degree in degrees)
    what = "output features" if is_linear(module) else "columns"
    return "" if is_divisible else f"its {size} {what} can't be divided by {numbers}"


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

"""Which modules can be split into slices, and along which dimensions of their weight.

The planner asks when it reads a model, and the engine again before it splits.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

WIDE_RATIO = 4
"""A matrix whose outputs exceed its inputs by more than this factor (a language model's head) is cut along its outputs:
every slice of a cut along the input would write the full output."""


UNIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types that the parameters of a unit may have."""

CASTING_FUNCTIONS = frozenset(
    ["linear", "matmul", "__matmul__", "__rmatmul__", "linalg_matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm"]
    + [f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)]
    + ["multi_head_attention_forward", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"]
)
"""Names of functions of torch that are given gathered casts of weights, which autocast would cast for them."""

SHARED_MEMORY = "lies in memory that is shared with other processes, from which sharding would part it"
MEMORY_ADVICE = "give it memory of its own (parameter.data = parameter.data.clone()), or keep it replicated (modes=...)"


def is_in_shared_memory(parameter: Tensor) -> bool:
    """Return whether other processes may use the memory of a parameter on the CPU."""
    return parameter.device.type == "cpu" and bool(parameter.is_shared())  # type: ignore[no-untyped-call]


def has_parameter_hooks(parameter: nn.Parameter | None) -> bool:
    """Return whether hooks of a parameter see its gradient."""
    return parameter is not None and bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def split_dims(module: nn.Module) -> tuple[tuple[int, ...], str]:
    """Return the dimensions of ``module.weight``, as it is stored, along which it can be cut, the best first.

    Whether the weight is also used outside of the module (tied, read by others) is not considered.

    Returns:
        The dimensions and an empty text; or no dimensions and the reason.
    """
    reason = _unsplittable_reason(module)
    if reason:
        return (), reason
    if isinstance(module, nn.Embedding):
        return (1,), ""
    input_dim = matrix_input_dim(module)
    weight = module.weight
    assert input_dim is not None
    assert isinstance(weight, nn.Parameter)
    is_wide = weight.shape[1 - input_dim] > WIDE_RATIO * weight.shape[input_dim]
    return ((1 - input_dim, input_dim) if is_wide else (input_dim, 1 - input_dim)), ""


def matrix_input_dim(module: nn.Module) -> int | None:
    """Return the weight's input dimension: 1 for Linear, 0 for transformers' Conv1D, None for all others."""
    if isinstance(module, nn.Linear):
        return 1
    transformers = sys.modules.get("transformers.pytorch_utils")  # without it, nothing can be a Conv1D
    return 0 if transformers is not None and isinstance(module, transformers.Conv1D) else None


def _unsplittable_reason(module: nn.Module) -> str:
    """Return why the module can't be split at all; empty if it can."""
    kind = type(module).__name__
    base = matrix_or_table_class(module)
    if base is None or base is nn.EmbeddingBag:
        return f"{kind} is neither a Linear, an Embedding nor a Conv1D of transformers"
    if type(module).forward is not base.forward or "forward" in vars(module):
        return f"{kind} has a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedParameter):
        return "its weight is computed from others (parametrized, weight-normed or pruned) or not initialized yet"
    if set(module._parameters) - {"weight", "bias"} or module._modules:
        return f"{kind} has parameters besides weight and bias"
    if has_parameter_hooks(weight):
        return "there are hooks on its weight"
    if module._forward_pre_hooks or module._forward_hooks:
        return "there are hooks on it, which may read its weight"
    return table_unsplittable_reason(module) if isinstance(module, nn.Embedding) else ""


def matrix_or_table_class(module: nn.Module) -> type[nn.Module] | None:
    """Return which class of a weight and a bias a module is of, if of any."""
    for base in (nn.Embedding, nn.EmbeddingBag, nn.Linear):
        if isinstance(module, base):
            return base
    return sys.modules["transformers.pytorch_utils"].Conv1D if matrix_input_dim(module) is not None else None


def table_unsplittable_reason(embedding: nn.Embedding) -> str:
    """Return which option of an embedding keeps its weight from being split; empty if there is none."""
    if embedding.max_norm is not None:
        return "max_norm changes whole rows of the weight"
    return "its gradients are sparse" if embedding.sparse else ""

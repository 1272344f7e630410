"""Products with a slice of a weight. Their backward holds the slice or its gradient, never both.

PyTorch's own gives the gradients of all inputs at once, and the weight can be freed only afterwards. These take the
input's first, for which alone the weight is needed, and say so (``over``) before they make the weight's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

OnWeightUnused = Callable[[], None]


class _SlicedMatmul(torch.autograd.Function):
    """See ``multiply``."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, y: Tensor | None, transposed: bool, on_weight_unused: OnWeightUnused
    ) -> Tensor:
        weight_trained, x_differentiated = ctx.needs_input_grad[:2]
        # A tensor of its own on the weight's memory: the parameter's shape is a shard's when it is not whole.
        ctx.save_for_backward(weight.detach() if x_differentiated else None, x if weight_trained else None)
        ctx.transposed, ctx.on_weight_unused, ctx.dtype = transposed, on_weight_unused, weight.dtype
        cast = torch.is_autocast_enabled(x.device.type)  # addmm_ is not on autocast's list
        matrix = _as_matrix(weight, transposed, x.dtype if cast else weight.dtype)
        if y is None:
            return torch.mm(x, matrix)
        ctx.mark_dirty(y)
        return y.addmm_(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        of_x = of_weight = None
        if weight is not None:
            of_x = gradient.mm(_as_matrix(weight, ctx.transposed, gradient.dtype).t())
        ctx.on_weight_unused()
        if x is not None:
            of_weight = (gradient.t().mm(x) if ctx.transposed else x.t().mm(gradient)).to(ctx.dtype)
        return of_weight, of_x, gradient if ctx.needs_input_grad[2] else None, None, None


class _EmbeddingSlice(torch.autograd.Function):
    """See ``embedding_slice``."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
        on_weight_unused: OnWeightUnused,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.on_weight_unused, ctx.options = (
            on_weight_unused,
            (weight.shape[0], -1 if padding_idx is None else padding_idx, scale_grad_by_freq),
        )
        return functional.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.on_weight_unused()
        return torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.options), None, None, None, None


def multiply(
    weight: Tensor, x: Tensor, y: Tensor | None, *, transposed: bool, on_weight_unused: OnWeightUnused
) -> Tensor:
    """x (n, in) times weight, added to y (n, out) in place if there is one.

    Args:
        weight: (in, out), or (out, in) if ``transposed``; under autocast it is cast to the type of ``x``.
        x: (n, in).
        y: (n, out), or None.
        transposed: as ``nn.Linear`` has its weight.
        on_weight_unused: called in the backward pass when the weight is no longer needed.
    """
    product: Tensor = _SlicedMatmul.apply(weight, x, y, transposed, on_weight_unused)  # type: ignore[no-untyped-call]
    return product


def embedding_slice(
    weight: Tensor, ids: Tensor, *, padding_idx: int | None, scale_grad_by_freq: bool, on_weight_unused: OnWeightUnused
) -> Tensor:
    """Rows of weight (rows, embedding) as ``torch.nn.functional.embedding`` gives them: (..., embedding)."""
    rows: Tensor = _EmbeddingSlice.apply(weight, ids, padding_idx, scale_grad_by_freq, on_weight_unused)  # type: ignore[no-untyped-call]
    return rows


def _as_matrix(weight: Tensor, transposed: bool, dtype: torch.dtype) -> Tensor:
    """(in, out)"""
    matrix = weight.to(dtype)
    return matrix.t() if transposed else matrix

"""Products with a slice of a weight. Their backward holds the slice or its gradient, never both.

PyTorch's own products return the gradients of all inputs at once, and the weight can be freed only afterwards. These
compute the input's gradient first, for which alone the weight is needed, and call ``on_weight_unused`` before they
compute the weight's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

OnWeightUnused = Callable[[], None]


class _SlicedMatmul(torch.autograd.Function):
    """The autograd function of ``multiply``."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, y: Tensor | None, transposed: bool, on_weight_unused: OnWeightUnused
    ) -> Tensor:
        needs_weight_grad, needs_x_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(weight if needs_x_grad else None, x if needs_weight_grad else None)
        ctx.transposed, ctx.on_weight_unused, ctx.dtype = transposed, on_weight_unused, weight.dtype
        is_autocast = torch.is_autocast_enabled(x.device.type)  # which does not cover addmm_
        matrix = _as_matrix(weight, transposed, x.dtype if is_autocast else weight.dtype)
        if y is None:
            return torch.mm(x, matrix)
        ctx.mark_dirty(y)
        return y.addmm_(x, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        x_gradient = weight_gradient = None
        if weight is not None:
            x_gradient = gradient.mm(_as_matrix(weight, ctx.transposed, gradient.dtype).t())
        del weight  # whose memory is freed now
        ctx.on_weight_unused()
        if x is not None:
            weight_gradient = (gradient.t().mm(x) if ctx.transposed else x.t().mm(gradient)).to(ctx.dtype)
        return weight_gradient, x_gradient, gradient if ctx.needs_input_grad[2] else None, None, None


class _Rows(torch.autograd.Function):
    """The autograd function of ``read_rows``."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        values: Tensor | None,
        ids: Tensor,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
        on_weight_unused: OnWeightUnused,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        num_rows, table = weight.shape[0], weight if values is None else values
        padded = -1 if padding_idx is None else padding_idx % num_rows
        ctx.on_weight_unused, ctx.options = on_weight_unused, (num_rows, padded, scale_grad_by_freq)
        return functional.embedding(ids, table, padding_idx).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.on_weight_unused()
        return torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.options), None, None, None, None, None


def multiply(
    weight: Tensor, x: Tensor, y: Tensor | None, *, transposed: bool, on_weight_unused: OnWeightUnused
) -> Tensor:
    """Multiply x (n, in) by a weight and add the product (n, out) to y in place if there is one.

    Args:
        weight: (in, out), or (out, in) if ``transposed``; under autocast it is cast to the type of ``x``.
        x: (n, in).
        y: (n, out), or None.
        transposed: whether the weight is stored as in ``nn.Linear``.
        on_weight_unused: called in the backward pass when the weight is no longer needed.
    """
    product: Tensor = _SlicedMatmul.apply(weight, x, y, transposed, on_weight_unused)  # type: ignore[no-untyped-call]
    return product


def read_rows(
    weight: Tensor,
    ids: Tensor,
    *,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    on_weight_unused: OnWeightUnused,
    values: Tensor | None = None,
) -> Tensor:
    """Look up ids (...) in a weight (rows, embedding) as ``torch.nn.functional.embedding`` does.

    Args:
        weight: gets the gradient, in its own type, which the rows have, too.
        ids: numbers of rows.
        padding_idx: a row that gets no gradient.
        scale_grad_by_freq: whether a row's gradient is divided by how often it is looked up.
        on_weight_unused: called in the backward pass before there is a gradient.
        values: where the rows are read, in another type; None to read the weight.
    """
    rows: Tensor = _Rows.apply(weight, values, ids, padding_idx, scale_grad_by_freq, on_weight_unused)  # type: ignore[no-untyped-call]
    return rows


def _as_matrix(weight: Tensor, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Return the weight as (in, out)."""
    matrix = weight.to(dtype)
    return matrix.t() if transposed else matrix

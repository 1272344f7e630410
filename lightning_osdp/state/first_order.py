"""Functions of autograd whose gradients can not be differentiated again: an error of ours says where it is tried."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.errors import ShardingError


def first_order(describe: Callable[[Any], ShardingError]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a ``backward`` that runs without gradients, and whose results refuse to be differentiated.

    Args:
        describe: returns the error to raise where they are, given the context of the function.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            needs = any(isinstance(each, Tensor) and each.requires_grad for each in gradients)
            if not (needs and torch.is_grad_enabled()):
                return results
            anchor, error = torch.zeros((), requires_grad=True), describe(ctx)
            several = results if isinstance(results, tuple) else (results,)
            refused = tuple(
                _Refused.apply(anchor, each, error, *gradients) if isinstance(each, Tensor) else each  # type: ignore[no-untyped-call]
                for each in several
            )
            return refused if isinstance(results, tuple) else refused[0]

        return run

    return decorate


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, result: Tensor, error: ShardingError, *gradients: Any) -> Tensor:
        """Return the result, through which autograd reaches whatever ``gradients`` depend on."""
        ctx.error = error
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.error

"""The forms in which the collectives of a ``dist.ProcessGroup`` may be called besides lists of tensors with options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor


def also_single(num_operands: int, *names: str) -> Callable[[Callable[..., dist.Work]], Callable[..., dist.Work]]:
    """Let a collective take a single tensor, as ``allreduce(tensor, op)`` and ``broadcast(tensor, root)`` do.

    Args:
        num_operands: number of its arguments that hold tensors, before the options.
        names: of what may be given instead of the options.
    """

    def decorate(collective: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        @functools.wraps(collective)
        def call(group: Any, *args: Any, **named: Any) -> dist.Work:
            operands, rest = args[:num_operands], args[num_operands:]
            opts = named.pop("opts", None)
            if rest and hasattr(rest[0], "timeout"):  # which all options have
                opts, rest = rest[0], rest[1:]
            named.update(zip(names, rest, strict=False))  # a time-out may follow
            if opts is None:
                opts = SimpleNamespace(reduceOp=named.get("op", dist.ReduceOp.SUM), rootRank=named.get("root", 0))
            if any(isinstance(operand, Tensor) for operand in operands):
                operands = tuple([operand] for operand in operands)
            return collective(group, *operands, opts)

        return call

    return decorate

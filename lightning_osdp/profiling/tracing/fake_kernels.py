"""Fake kernels for ops whose fake kernels in torch refuse arguments that the real ones accept, or are slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply groups of rows: where both sides have two dimensions, each group gives a matrix of its own."""
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=dtype)
    if b.dim() == 2:
        return a.new_empty((a.shape[1], b.shape[1]), dtype=dtype)
    return a.new_empty((*a.shape[:-1], b.shape[2]), dtype=dtype)


FAKE_KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    torch.ops.prim.device.default: attrgetter("fake_device"),
}
"""In torch 2.13 the fake kernel of a mixture of experts' product accepts bfloat16 alone. Autograd asks for the
device of each tensor two or three times, more often than for anything else."""


def dispatch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``, by a kernel of ``FAKE_KERNELS`` where there is one and the first argument is fake."""
    if func in FAKE_KERNELS and isinstance(args[0], FakeTensor):
        return FAKE_KERNELS[func](*args, **kwargs)
    return func(*args, **kwargs)

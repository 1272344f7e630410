"""Tensors of a sharded checkpoint while it is loaded: hooks that ask for their values (EMA's) get them.

Such a tensor is a meta tensor that stands for one in the folder. Its values are read when a function of torch needs
them, and then it is an ordinary tensor. Those that no hook touches are read in parts, by each rank its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties that are tensors of the same values."""

SHAPE_FUNCTIONS = frozenset(
    {"size", "dim", "numel", "nelement", "ndimension", "stride", "is_contiguous", "storage_offset", "dim_order"}
    | {"is_non_overlapping_and_dense", "__len__"}
)
"""Functions that ask for the shape alone."""

_VALUELESS_FUNCTIONS = SHAPE_FUNCTIONS.union(
    ("element_size", "is_floating_point", "is_complex", "is_signed", "get_device", "__hash__")
)


class StoredTensor(Tensor):
    """A tensor that is still in its file."""

    _read: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, with the values of the arguments if it needs them."""
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        is_valueless_get = name == "__get__" and attribute != "data" and attribute not in VALUE_PROPERTIES
        if is_valueless_get or name in _VALUELESS_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        read_values(args, kwargs)
        return func(*args, **(kwargs or {}))


def defer_reading(placeholder: Tensor, read: Callable[[Tensor], Tensor]) -> None:
    """Make a meta tensor stand for the values that ``read`` returns for it."""
    placeholder.__class__ = StoredTensor
    placeholder._read = read  # type: ignore[attr-defined]


def read_values(*containers: Any) -> None:
    """Make the stored tensors in containers ordinary ones, in place: whatever holds them sees the values."""
    tree_map_only(StoredTensor, _read_value, containers)


def _read_value(stored: StoredTensor) -> Tensor:
    torch.utils.swap_tensors(stored, stored._read(stored))  # type: ignore[no-untyped-call]
    return stored

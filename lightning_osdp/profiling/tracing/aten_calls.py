"""One aten call: which storages it reads and changes, and its floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

CPU_ATTENTION_FLOPS: dict[Any, tuple[Callable[..., int], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4),
}
"""Formulas that torch's registry lacks, and the number of leading arguments whose shapes they take."""


def count_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the floating-point operations of a call that has returned ``out``; 0 if no formula is known."""
    packet = func.overloadpacket
    if packet in CPU_ATTENTION_FLOPS:
        count, num_shapes = CPU_ATTENTION_FLOPS[packet]
        return float(count(*(tensor.shape for tensor in args[:num_shapes])))
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def storage_key(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others."""
    while is_functorch_wrapped_tensor(tensor):  # as torch.func gives it to modules
        tensor = get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def storage_keys(value: object) -> list[int]:
    """Return the keys of all storages in a nested value; sparse tensors have none."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    return [storage_key(leaf) for leaf in leaves]


def written_keys(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the keys of the storages that a call changes."""
    return storage_keys(written_values(func, args, kwargs))


def written_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call changes."""
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    return [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]

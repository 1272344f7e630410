"""Makes arguments for kernels that are run by themselves: right in shape, and in range where they are indices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.profiling.kernels.kernel import Kernel, Spec, TensorSpec, tensor_specs

aten = torch.ops.aten

RANDOM_VALUES = 1 << 16
"""Random floats of one tensor, which longer tensors repeat: drawing them takes longer than most kernels."""


def make_arguments(kernel: Kernel, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that ``kernel`` accepts: positive floats, and integers that are valid indices of its tensors.

    Absolute values of normal floats, because the square root of a negative number takes seven times as long.
    """
    bound = _index_bound(kernel)
    names = [argument.name for argument in kernel.func._schema.arguments]
    named = dict(zip(names, kernel.args, strict=False)) | dict(kernel.kwargs)

    def build(spec: Spec, name: str = "") -> Any:
        if isinstance(spec, TensorSpec) and (lengths := _lengths(name, spec, named)) is not None:
            return lengths.to(spec.dtype).to(device)
        if isinstance(spec, TensorSpec):
            return _make_tensor(spec, bound, device)
        if isinstance(spec, tuple):
            return [build(item) for item in spec]
        return device if isinstance(spec, torch.device) and spec.type != "cpu" else spec

    args = tuple(build(spec, name) for spec, name in zip(kernel.args, names, strict=False))
    return args, {name: build(spec, name) for name, spec in kernel.kwargs}


def _lengths(name: str, spec: TensorSpec, named: Mapping[str, Spec]) -> Tensor | None:
    """Return an argument that says how long parts of another one are, or where they begin; None if it says neither.

    Kernels read beyond the end if such a number is too large (``ctc_loss``), and end the process.
    """
    if not name.endswith(("lengths", "offsets")) or len(spec.shape) != 1 or spec.dtype.is_floating_point:
        return None
    whole = named.get({"input_lengths": "log_probs", "target_lengths": "targets", "offsets": "indices"}.get(name, ""))
    count = spec.shape[0]
    if not isinstance(whole, TensorSpec) or not count:
        return torch.zeros(count, dtype=torch.int64)
    if name == "input_lengths":
        return torch.full((count,), whole.shape[0])
    each = whole.shape[1] if len(whole.shape) == 2 else whole.shape[0] // count
    return torch.arange(count) * each if name == "offsets" else torch.full((count,), each)


def _index_bound(kernel: Kernel) -> int:
    """Return the bound of safe indices: a known table's rows, or else the smallest size of any float tensor."""
    packet = kernel.func.overloadpacket
    if packet is aten.embedding:
        (table,) = tensor_specs(kernel.args[0])
        return table.shape[0]
    if packet is aten.embedding_dense_backward and isinstance(kernel.args[2], int):
        return kernel.args[2]
    specs = tensor_specs((kernel.args, kernel.kwargs))
    floats = [spec for spec in specs if spec.dtype.is_floating_point]
    return min((size for spec in floats or specs for size in spec.shape if size > 0), default=1)


def clone_with_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, even where these overlap."""
    extent = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _make_tensor(spec: TensorSpec, bound: int, device: torch.device) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    extent = 0 if math.prod(spec.shape) == 0 else extent
    if spec.dtype.is_complex:
        flat = torch.randn(extent, dtype=spec.dtype, device=device)
    elif spec.dtype.is_floating_point:
        draw_dtype = torch.float32 if spec.dtype.itemsize < 4 else spec.dtype
        drawn = torch.randn(min(extent, RANDOM_VALUES), dtype=draw_dtype, device=device).abs_().to(spec.dtype)
        flat = drawn if extent <= RANDOM_VALUES else drawn.repeat(math.ceil(extent / RANDOM_VALUES))
    elif spec.dtype == torch.bool:
        flat = torch.ones(extent, dtype=torch.bool, device=device)
    else:
        limit = max(1, min(bound, torch.iinfo(spec.dtype).max))
        flat = torch.randint(0, limit, (extent,), device=device).to(spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)

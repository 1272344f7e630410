"""Kernels: aten calls as values, so that equal ones are found, counted and timed once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

import torch

from lightning_osdp.planning.spec.model import UNATTRIBUTED

KernelPhase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data and its device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that the kernel reads or writes: those of the elements, repeated ones (stride 0) once."""
        count = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride != 0 or size == 0 else 1
        return count


Spec = object
"""TensorSpec, a scalar, a dtype, a device..., None, or a tuple of these: always hashable."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One aten call of a training step, and how often it occurs there."""

    func: torch._ops.OpOverload
    args: tuple[Spec, ...]
    kwargs: tuple[tuple[str, Spec], ...] = ()
    operator: int = UNATTRIBUTED
    """Index into ``ModelProfile.operators``, or ``UNATTRIBUTED``."""
    phase: KernelPhase = "forward"
    count: int = 1
    num_autograd_nodes: int = 0
    """How many autograd nodes these calls belong to, ``world_size`` at most: each costs the framework some time."""
    block: int = UNATTRIBUTED
    """Of work in a block's forward that belongs to no operator: index of the block as found; else ``UNATTRIBUTED``."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for calls that take equally long."""
        return (self.func, self.args, self.kwargs)

    @property
    def name(self) -> str:
        """Equal for equal keys, in other processes, too."""
        return hashlib.sha256(repr(self.key).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensor arguments."""
        return sum(spec.num_bytes for spec in tensor_specs((self.args, self.kwargs)))


def spec_of(value: object, interned: dict[TensorSpec, TensorSpec] | None = None) -> Spec:
    """Describes one argument of an aten call; a tensor without strides (sparse) counts as contiguous.

    Args:
        value: the argument.
        interned: tensors that were described before: of equal ones the same object is given.
    """
    if isinstance(value, torch.Tensor):
        stride = tuple(value.stride()) if value.layout == torch.strided else _contiguous_stride(value.shape)
        spec = TensorSpec(tuple(value.shape), stride, value.dtype)
        return spec if interned is None else interned.setdefault(spec, spec)
    if isinstance(value, list | tuple):
        return tuple(spec_of(item, interned) for item in value)
    if isinstance(value, torch.Generator):
        return None
    return value


def tensor_specs(spec: Spec) -> list[TensorSpec]:
    """All tensors in a spec, in order."""
    if isinstance(spec, TensorSpec):
        return [spec]
    if isinstance(spec, tuple):
        return [found for item in spec for found in tensor_specs(item)]
    return []


def is_foreach_or_fused(func: torch._ops.OpOverload) -> bool:
    """Whether it is an optimizer's foreach or fused kernel, which does the same with each element of each tensor."""
    return str(func.overloadpacket.__name__).startswith(("_foreach_", "_fused_"))


def list_length(func: torch._ops.OpOverload, args: tuple[Spec, ...]) -> int:
    """How many tensors an optimizer's foreach or fused kernel takes at once; 1 for all other kernels, whose lists (of
    indices, of what is joined) mean something as a whole."""
    if not is_foreach_or_fused(func):
        return 1
    return max((len(arg) for arg in args if isinstance(arg, tuple) and tensor_specs(arg)), default=1)


def sample_rows(spec: Spec, divisor: int) -> Spec:
    """An argument of such a kernel with one of so many rows of each tensor."""
    if isinstance(spec, tuple):
        return tuple(sample_rows(each, divisor) for each in spec)
    if not isinstance(spec, TensorSpec) or not spec.shape:
        return spec
    rows, *rest = spec.shape
    return replace(spec, shape=(math.ceil(rows / divisor), *rest))


def select_from_lists(args: tuple[Spec, ...], indices: Sequence[int]) -> tuple[Spec, ...]:
    """The arguments of such a kernel for some of its tensors."""
    return tuple(tuple(arg[i] for i in indices if i < len(arg)) if isinstance(arg, tuple) else arg for arg in args)


def argsort_by_size(args: tuple[Spec, ...]) -> list[int]:
    """Places in the lists of such a kernel, those of least bytes first."""
    lists = [arg for arg in args if isinstance(arg, tuple) and tensor_specs(arg)]
    num_bytes = [sum(spec.num_bytes for spec in tensor_specs(each)) for each in zip_longest(*lists)]
    return sorted(range(len(num_bytes)), key=num_bytes.__getitem__)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))

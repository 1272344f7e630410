"""Aten calls as values, so that equal ones are found, counted and timed once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch._prims_common import make_contiguous_strides_for

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
        """Bytes that a kernel reads or writes; elements that are repeated by stride 0 count once."""
        count = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride != 0 or size == 0 else 1
        return count

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        """Return the spec of a contiguous tensor."""
        return cls(shape, tuple(make_contiguous_strides_for(shape)), dtype)


Spec = object
"""TensorSpec, scalar, dtype, device, None, or a tuple of these: always hashable."""


@dataclass(frozen=True)
class Kernel:
    """An aten call of a training step, and how often it occurs there."""

    func: torch._ops.OpOverload
    args: tuple[Spec, ...]
    kwargs: tuple[tuple[str, Spec], ...] = ()
    operator: int = UNATTRIBUTED
    """Index into ``ModelProfile.operators``, or ``UNATTRIBUTED``."""
    phase: KernelPhase = "forward"
    count: int = 1
    num_autograd_nodes: int = 0
    """Number of autograd nodes that these calls belong to, each of which costs the framework some time."""
    block: int = UNATTRIBUTED
    """Index of the repeated block whose forward the kernel runs in, if it belongs to no operator."""

    def __getstate__(self) -> dict[str, object]:
        """Return what travels to another rank: an operator of torch can't be pickled, its name can."""
        packet, overload = self.func.overloadpacket, self.func._overloadname
        return {**vars(self), "func": (*packet._qualified_op_name.split("::"), overload)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        namespace, name, overload = state["func"]
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        vars(self).update(state | {"func": func})

    @property
    def key(self) -> tuple[object, ...]:
        """A value that is equal for calls that take equally long."""
        return (self.func, self.args, self.kwargs)

    @cached_property
    def name(self) -> str:
        """A short text that is equal for equal keys, also in other processes."""
        return hashlib.sha256(repr(self.key).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor arguments."""
        return sum(spec.num_bytes for spec in tensor_specs((self.args, self.kwargs)))


def spec_of(value: object, interned: dict[TensorSpec, TensorSpec] | None = None) -> Spec:
    """Describe an argument of an aten call; a tensor without strides (sparse) counts as contiguous.

    Args:
        value: The argument.
        interned: Specs so far, to return the same object for equal tensors.
    """
    if isinstance(value, torch.Tensor):
        is_strided = value.layout == torch.strided
        stride = tuple(value.stride() if is_strided else make_contiguous_strides_for(value.shape))
        spec = TensorSpec(tuple(value.shape), stride, value.dtype)
        return spec if interned is None else interned.setdefault(spec, spec)
    if isinstance(value, list | tuple):
        return tuple(spec_of(item, interned) for item in value)
    return None if isinstance(value, torch.Generator) else value


def tensor_specs(spec: Spec) -> list[TensorSpec]:
    """Return all tensors in a spec, in order."""
    if isinstance(spec, tuple):
        return [inner for item in spec for inner in tensor_specs(item)]
    return [spec] if isinstance(spec, TensorSpec) else []


# -- lists of tensors --------------------------------------------------------------------------------------------------


def is_foreach_or_fused(func: torch._ops.OpOverload) -> bool:
    """Return whether it is an optimizer's foreach or fused kernel, which treats all elements of tensors alike."""
    return str(func.overloadpacket.__name__).startswith(("_foreach_", "_fused_"))


def list_length(func: torch._ops.OpOverload, args: tuple[Spec, ...]) -> int:
    """Return the number of tensors that an optimizer's foreach or fused kernel takes at once.

    It is 1 for all other kernels: their lists (of indices, of tensors to concatenate) mean something as a whole.
    """
    return max(map(len, _tensor_lists(args)), default=1) if is_foreach_or_fused(func) else 1


def sample_rows(spec: Spec, divisor: int) -> Spec:
    """Return an argument of such a kernel with one of ``divisor`` rows of each tensor."""
    if isinstance(spec, tuple):
        return tuple(sample_rows(item, divisor) for item in spec)
    if not isinstance(spec, TensorSpec) or not spec.shape:
        return spec
    rows, *rest = spec.shape
    return replace(spec, shape=(math.ceil(rows / divisor), *rest))


def select_from_lists(args: tuple[Spec, ...], indices: Sequence[int]) -> tuple[Spec, ...]:
    """Return the arguments of such a kernel for some of its tensors."""
    return tuple(tuple(arg[i] for i in indices if i < len(arg)) if isinstance(arg, tuple) else arg for arg in args)


def argsort_by_size(args: tuple[Spec, ...]) -> list[int]:
    """Return the indices into the lists of such a kernel, those of least bytes first."""
    num_bytes = [sum(spec.num_bytes for spec in tensor_specs(item)) for item in zip_longest(*_tensor_lists(args))]
    return sorted(range(len(num_bytes)), key=num_bytes.__getitem__)


def _tensor_lists(args: tuple[Spec, ...]) -> list[tuple[Spec, ...]]:
    return [arg for arg in args if isinstance(arg, tuple) and tensor_specs(arg)]

"""Derives the kernels that a split or tensor parallel operator would run instead of its one product.

An operator's kernels tell the sizes: (rows x inputs) times (inputs x outputs), or rows looked up in a table. Each slice
multiplies by a part of the inputs and adds to one output, or by a part of the outputs, which are concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lightning_osdp.profiling.kernels.kernel import Kernel, TensorSpec, tensor_specs

aten = torch.ops.aten

MATMUL_FUNCTIONS = (aten.mm.default, aten.addmm.default)
EMBEDDING_FUNCTIONS = (aten.embedding.default, aten.embedding_dense_backward.default)
BAG_FUNCTIONS = (aten._embedding_bag.default, aten._embedding_bag_backward.default)


@dataclass(frozen=True)
class MatmulKernels:
    """The one product of an operator, as traced at one batch size."""

    forward: Kernel
    backward: tuple[Kernel, ...]
    """Kernels of its gradients."""

    @cached_property
    def _operands(self) -> tuple[TensorSpec, TensorSpec]:
        left, right = tensor_specs(self.forward.args)[-2:]
        return left, right

    @property
    def is_embedding(self) -> bool:
        """Return whether rows of a table are looked up rather than multiplied."""
        return self.forward.func in EMBEDDING_FUNCTIONS

    @property
    def input_bytes(self) -> int:
        """Bytes of the input if it gets a gradient; else 0, as for a lookup."""
        return self._operands[0].num_bytes if self.has_input_gradient else 0

    @property
    def output_bytes(self) -> int:
        """Bytes of the result."""
        left, right = self._operands
        if self.is_embedding:
            return math.prod(right.shape) * left.shape[1] * left.dtype.itemsize
        return left.shape[0] * right.shape[1] * left.dtype.itemsize

    @property
    def has_input_gradient(self) -> bool:
        """Return whether its backward has a product for the input besides the one for the weight."""
        return not self.is_embedding and sum(kernel.count for kernel in self.backward) > 1

    def split(self, k: int, *, slice_outputs: bool) -> tuple[list[Kernel], list[Kernel]]:
        """Return the kernels of forward and backward in ``k`` slices of the outputs or of the inputs."""
        if self.is_embedding:
            return self._split_embedding(k)
        left, right = self._operands
        (m, c), n, dtype = left.shape, right.shape[1], left.dtype
        transposed = right.stride[0] == 1
        x, g, y = _matrix(m, c, dtype), _matrix(m, n, dtype), _matrix(m, n, dtype)
        bias = (
            [_kernel(aten.add_.Tensor, y, TensorSpec.contiguous((n,), dtype))]
            if self.forward.func is aten.addmm.default
            else []
        )
        if slice_outputs:
            s = -(-n // k)
            part, g_s = _matrix(m, s, dtype), TensorSpec((m, s), (n, 1), dtype)
            weight = _right_operand(c, s, dtype, transposed)
            forward = [_kernel(aten.mm.default, x, weight, count=k), _kernel(aten.cat.default, (part,) * k, 1), *bias]
            backward = [_kernel(aten.mm.default, *_weight_gradient_operands(x, g_s, transposed), count=k)]
            if self.has_input_gradient:
                backward.append(_kernel(aten.mm.default, g_s, _transposed(weight), count=k))
                backward.append(_kernel(aten.add_.Tensor, x, x, count=k - 1))
            return forward, backward
        s = -(-c // k)
        x_s, weight = TensorSpec((m, s), (c, 1), dtype), _right_operand(s, n, dtype, transposed)
        forward = [_kernel(aten.addmm_.default, y, x_s, weight, count=k), *bias]
        backward = [_kernel(aten.mm.default, *_weight_gradient_operands(x_s, g, transposed), count=k)]
        if self.has_input_gradient:
            backward.append(_kernel(aten.mm.default, g, _transposed(weight), count=k))
            backward.append(_kernel(aten.cat.default, (_matrix(m, s, dtype),) * k, 1))
        return forward, backward

    def _split_embedding(self, k: int) -> tuple[list[Kernel], list[Kernel]]:
        table, ids = self._operands
        rows, width = table.shape
        s = -(-width // k)
        part = TensorSpec.contiguous((*ids.shape, s), table.dtype)
        slice_ = _matrix(rows, s, table.dtype)
        forward = [
            replace(self.forward, args=(slice_, *self.forward.args[1:]), count=k),
            _kernel(aten.cat.default, (part,) * k, -1),
        ]
        strides = TensorSpec.contiguous((*ids.shape, width), table.dtype).stride
        gradient = TensorSpec(part.shape, strides, table.dtype)
        backward = [replace(each, args=(gradient, *each.args[1:]), count=k * each.count) for each in self.backward]
        return forward, backward

    def cut(self, degree: int, *, cuts_outputs: bool) -> tuple[list[Kernel], list[Kernel]]:
        """Return the kernels of forward and backward of one of ``degree`` slices, for the rows of as many ranks."""
        if self.is_embedding:
            return self._cut_embedding(degree, cuts_rows=not cuts_outputs)
        left, right = self._operands
        (m, c), n, dtype = left.shape, right.shape[1], left.dtype
        m, c, n = (degree * m, c, n // degree) if cuts_outputs else (degree * m, c // degree, n)
        transposed = right.stride[0] == 1
        x, g, weight = _matrix(m, c, dtype), _matrix(m, n, dtype), _right_operand(c, n, dtype, transposed)
        forward = _kernel(aten.mm.default, x, weight)
        if cuts_outputs and self.forward.func is aten.addmm.default:
            forward = _kernel(aten.addmm.default, TensorSpec.contiguous((n,), dtype), x, weight)
        backward = [_kernel(aten.mm.default, *_weight_gradient_operands(x, g, transposed))]
        if self.has_input_gradient:
            backward.append(_kernel(aten.mm.default, g, _transposed(weight)))
        return [forward], backward

    def _cut_embedding(self, degree: int, *, cuts_rows: bool) -> tuple[list[Kernel], list[Kernel]]:
        table, ids = self._operands
        rows, width = table.shape
        gathered = TensorSpec.contiguous((degree * math.prod(ids.shape),), ids.dtype)
        rows, width = (rows // degree, width) if cuts_rows else (rows, width // degree)
        gradient = _matrix(gathered.shape[0], width, table.dtype)
        forward = replace(self.forward, args=(_matrix(rows, width, table.dtype), gathered, *self.forward.args[2:]))
        return [forward], [replace(each, args=(gradient, gathered, rows, *each.args[3:])) for each in self.backward]


@dataclass(frozen=True)
class BagKernels:
    """The one lookup of bags of an operator, as traced at one batch size."""

    forward: Kernel
    backward: tuple[Kernel, ...]

    def cut(self, degree: int, *, cuts_outputs: bool = True) -> tuple[list[Kernel], list[Kernel]]:
        """See ``MatmulKernels.cut``."""

        def cut_args(kernel: Kernel, rows_factor: int) -> Kernel:
            (values, *rest) = kernel.args
            assert isinstance(values, TensorSpec)
            cut = _matrix(rows_factor * values.shape[0], values.shape[1] // degree, values.dtype)
            return replace(kernel, args=(cut, *(_repeat_rows(each, degree) for each in rest)))

        return [cut_args(self.forward, 1)], [cut_args(each, degree) for each in self.backward]


def _repeat_rows(spec: object, times: int) -> object:
    if not isinstance(spec, TensorSpec) or not spec.shape:
        return spec
    return TensorSpec.contiguous((times * spec.shape[0], *spec.shape[1:]), spec.dtype)


def find_bag(kernels: Sequence[Kernel]) -> BagKernels | None:
    """Return the lookup of bags among an operator's kernels at one batch size; None if it has not exactly one."""
    found = [kernel for kernel in kernels if kernel.func in BAG_FUNCTIONS]
    forward = [kernel for kernel in found if kernel.phase == "forward"]
    if len(forward) != 1 or forward[0].count != 1:
        return None
    return BagKernels(forward[0], tuple(kernel for kernel in found if kernel.phase == "backward"))


def find_matmul(kernels: Sequence[Kernel], calls: int = 1) -> MatmulKernels | None:
    """Return the product among an operator's kernels at one batch size; None if it has not exactly one.

    Args:
        kernels: those of the operator.
        calls: how often it runs; the first one's product is returned if it has one in each of them.
    """
    for funcs in (MATMUL_FUNCTIONS, EMBEDDING_FUNCTIONS):
        forward = [kernel for kernel in kernels if kernel.func in funcs and kernel.phase == "forward"]
        backward = [kernel for kernel in kernels if kernel.func in funcs and kernel.phase == "backward"]
        if forward and sum(kernel.count for kernel in forward) == calls:
            return MatmulKernels(forward[0], tuple(backward))
    return None


def _kernel(func: torch._ops.OpOverload, *args: object, count: int = 1) -> Kernel:
    return Kernel(func, args, count=count)


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec.contiguous((rows, columns), dtype)


def _right_operand(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> TensorSpec:
    """Return the right side of a product: a weight as it is stored, or transposed."""
    return _transposed(_matrix(columns, rows, dtype)) if transposed else _matrix(rows, columns, dtype)


def _transposed(matrix: TensorSpec) -> TensorSpec:
    return TensorSpec(matrix.shape[::-1], matrix.stride[::-1], matrix.dtype)


def _weight_gradient_operands(x: TensorSpec, g: TensorSpec, transposed: bool) -> tuple[TensorSpec, TensorSpec]:
    """Return the two sides of the product for the weight's gradient, in the layout of the weight."""
    return (_transposed(g), x) if transposed else (_transposed(x), g)

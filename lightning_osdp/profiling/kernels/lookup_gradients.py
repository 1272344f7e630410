"""Limits how much longer the gradient of a table takes with more rows looked up.

It fills the whole table with zeros and adds a few rows: most of its time does not depend on the batch. The difference
between two small batches is lost in the noise of that, and would be multiplied where it is extrapolated to a batch that
is a hundred times as large.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_osdp.profiling.kernels.benchmark import KernelTimes
from lightning_osdp.profiling.kernels.kernel import Kernel, tensor_specs

aten = torch.ops.aten

NUM_ROWS_ARGUMENT = {aten.embedding_dense_backward.default: 2, aten._embedding_bag_backward.default: 6}
"""Functions, and the position of the argument that is the number of rows of the table."""

MAX_COST_OF_ADDED_BYTE = 4.0
"""How much longer a byte takes that is added to the table than one that is filled: it is read, added and written, in
no order."""


def limit_growth(kernels: Iterable[Kernel], times: KernelTimes) -> KernelTimes:
    """Return the times, in which gradients of tables grow with their rows no more than these can take."""
    tables: dict[tuple[object, int, torch.dtype], dict[str, int]] = {}
    for kernel in kernels:
        position = NUM_ROWS_ARGUMENT.get(kernel.func)
        specs = tensor_specs(kernel.args)
        if position is None or len(kernel.args) <= position or not specs or not specs[0].shape:
            continue
        rows, gradient = kernel.args[position], specs[0]
        if isinstance(rows, int) and kernel.name in times:
            table_bytes = rows * gradient.shape[-1] * gradient.dtype.itemsize
            tables.setdefault((kernel.func, table_bytes, gradient.dtype), {})[kernel.name] = gradient.num_bytes
    limited = dict(times)
    for (_, table_bytes, _), added_bytes in tables.items():
        smallest = min(added_bytes, key=lambda name: added_bytes[name])
        for name, size in added_bytes.items():
            growth = MAX_COST_OF_ADDED_BYTE * (size - added_bytes[smallest]) / max(1, table_bytes)
            most_s = times[smallest].seconds * (1 + growth)
            limited[name] = times[name]._replace(seconds=min(times[name].seconds, most_s))
    return limited

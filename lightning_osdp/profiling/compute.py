"""Measures compute (the paper's gamma): seconds of a traced step's operators, of its blocks, and of what is outside.

Each is the sum of its kernels' times and of autograd's own, which it takes for each node. Equal kernels of equal
operators are measured once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_osdp.planning.cost.trial_correction import fit_nonnegative_line
from lightning_osdp.planning.spec.choices import slice_counts
from lightning_osdp.planning.spec.cluster import ComputeTimes, KernelWorkspace, OperatorTime, SplitTime
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, Phase
from lightning_osdp.profiling.kernels.benchmark import (
    UNLIMITED_BYTES,
    AutogradOverhead,
    Clock,
    KernelTimes,
    Progress,
    measure_autograd_overhead,
    order_for_timing,
    run_all,
    time_all,
    time_within_budget,
)
from lightning_osdp.profiling.kernels.kernel import Kernel
from lightning_osdp.profiling.kernels.sliced_kernels import find_matmul
from lightning_osdp.profiling.tracing.stand_ins import fork_rng
from lightning_osdp.profiling.tracing.trace import TracedStep

KERNEL_TIMING_BUDGET_S = 4.0
"""Seconds that timing kernels is to take, of all ranks that share it together. All run twice at least."""


def measure_partition(
    trace: TracedStep,
    device: torch.device,
    partition_index: int,
    num_partitions: int,
    *,
    progress: Progress | None = None,
    time_budget_s: float = KERNEL_TIMING_BUDGET_S,
    constraints: SearchConstraints = UNCONSTRAINED,
    available_bytes: int = UNLIMITED_BYTES,
) -> KernelTimes:
    """Times one of ``num_partitions`` equal parts of what ``measure`` needs; kernels are named (``Kernel.key``).

    An optimizer's kernels belong to no part: they take as long as the memory that ranks share, and are for all ranks
    to time together. Other arguments as in ``measure``.
    """
    unique: dict[object, Kernel] = {kernel.key: kernel for kernel in _all_kernels(trace, _splits(trace, constraints))}
    parts = order_for_timing(kernel for kernel in unique.values() if kernel.phase != "optimizer")
    timed = KernelTimes()
    with fork_rng(device), torch.no_grad():
        time_within_budget(
            parts[partition_index::num_partitions], Clock(device, available_bytes), progress, time_budget_s, timed
        )
    return KernelTimes(
        {unique[key].name: value for key, value in timed.seconds.items()},
        {unique[key].name: value for key, value in timed.workspace_bytes.items()},
    )


def measure_compute(
    trace: TracedStep,
    device: torch.device,
    *,
    progress: Progress | None = None,
    time_budget_s: float = KERNEL_TIMING_BUDGET_S,
    constraints: SearchConstraints = UNCONSTRAINED,
    available_bytes: int = UNLIMITED_BYTES,
    partitions: Sequence[KernelTimes] = (),
) -> ComputeTimes:
    """Times every different kernel of ``trace`` on ``device``, and those that operators would run if they were split.

    Args:
        trace: of one training step, at one or two batch sizes.
        device: the device to measure; its random state is left as it was.
        progress: called with (kernels done, kernels in all).
        time_budget_s: about how long to take; kernels are repeated less often to keep to it, but all run once.
        constraints: in how many slices operators may be split: no others are measured.
        available_bytes: of memory that is free; half of it may be taken by more than one kernel's arguments.
        partitions: what ``measure_partition`` has found: those kernels are not timed again.

    Returns:
        Forward and backward seconds of each operator, and of what belongs to none, as lines over the batch size, and
        the optimizer's seconds per byte of trainable parameter.
    """
    splits = _splits(trace, constraints)
    select = _KernelIndex(trace.kernels)
    kernels = _all_kernels(trace, splits)
    timed = _from_partitions(kernels, partitions)
    with fork_rng(device), torch.no_grad():
        time_all(kernels, Clock(device, available_bytes), progress, time_budget_s, timed)
    seconds, scratch = timed.seconds, timed.workspace_bytes
    with fork_rng(device):
        overhead = measure_autograd_overhead(Clock(device))
    operators = [
        _operator_time(select, index, seconds, overhead, [split for split in splits if split.operator == index])
        for index in range(len(trace.model_profile.operators))
    ]
    trainable = sum(p.gradient_bytes for operator in trace.model_profile.operators for p in operator.parameters)
    update = sum(seconds[kernel.key] * kernel.count for kernel in trace.optimizer_kernels)
    return ComputeTimes(
        operators=tuple(operators),
        unattributed=_operator_time(select, UNATTRIBUTED, seconds, overhead),
        optimizer_s_per_byte=update / trainable if trainable else 0.0,
        blocks=tuple(
            _time_line(select.for_block(index), seconds, overhead.forward_s)
            for index in range(len(trace.model_profile.blocks))
        ),
        workspace=tuple(
            KernelWorkspace(
                forward=_workspace_line(select.for_operator(index, "forward"), scratch),
                backward=_workspace_line(select.for_operator(index, "backward"), scratch),
            )
            for index in range(len(operators))
        ),
    )


def _all_kernels(trace: TracedStep, splits: Sequence[_Split]) -> list[Kernel]:
    """Of the step, of the optimizer, and of operators that are split."""
    kernels = [*(kernel for size in trace.kernels.values() for kernel in size), *trace.optimizer_kernels]
    kernels += [kernel for split in splits for phases in split.kernels.values() for phase in phases for kernel in phase]
    return kernels


def _from_partitions(kernels: Iterable[Kernel], partitions: Sequence[KernelTimes]) -> KernelTimes:
    """Shares, by the kernels' keys."""
    timed = KernelTimes()
    for key, name in {kernel.key: kernel.name for kernel in kernels}.items() if partitions else ():
        for share in partitions:
            if name in share.seconds:
                timed.seconds[key] = share.seconds[name]
            if name in share.workspace_bytes:
                timed.workspace_bytes[key] = share.workspace_bytes[name]
    return timed


def warm_up(trace: TracedStep, device: torch.device) -> None:
    """Runs every different kernel of the larger batch size, as far as it can be run by itself.

    Libraries load their code and take their scratch memory at the first call. Where measurements come from a cache,
    this has not happened yet, and the process's overhead would be read too low. [measured, MKL, products with matrices
    of 1152 x 4608: 1.4 MiB stay after 128 rows, 19 after 512, and no more after 4096]
    """
    with fork_rng(device), torch.no_grad():
        kernels = trace.with_all_kernels().kernels
        run_all(kernels[max(kernels)], device)


KernelsByBatchSize = Mapping[int, Sequence[Kernel]]
"""Some of a step's kernels, by batch size."""


class _KernelIndex:
    """Finds the kernels of a step by what they belong to."""

    def __init__(self, kernels: Mapping[int, Sequence[Kernel]]) -> None:
        self.batch_sizes = tuple(kernels)
        self._kernels: dict[tuple[int, str, int], dict[int, list[Kernel]]] = {}
        for size, each in kernels.items():
            for kernel in each:
                self._add((kernel.operator, kernel.phase, UNATTRIBUTED), size, kernel)
                if kernel.block != UNATTRIBUTED:
                    self._add((UNATTRIBUTED, "forward", kernel.block), size, kernel)

    def for_operator(self, operator: int, phase: Phase) -> KernelsByBatchSize:
        """Those of an operator, or of what belongs to none."""
        return self._lookup((operator, phase, UNATTRIBUTED))

    def for_block(self, block: int) -> KernelsByBatchSize:
        """Those of a block's forward that belong to no operator."""
        return self._lookup((UNATTRIBUTED, "forward", block))

    def _add(self, key: tuple[int, str, int], size: int, kernel: Kernel) -> None:
        self._kernels.setdefault(key, {}).setdefault(size, []).append(kernel)

    def _lookup(self, key: tuple[int, str, int]) -> KernelsByBatchSize:
        found = self._kernels.get(key, {})
        return {size: found.get(size, []) for size in self.batch_sizes}


@dataclass(frozen=True)
class _Split:
    """One way to split one operator.

    Attributes:
        operator: its index.
        dim, slices: how its weight is cut.
        kernels: what forward and backward run instead of the product, by batch size.
        replaced_kernels: what they run instead of, by batch size.
    """

    operator: int
    dim: int
    slices: int
    kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]
    replaced_kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]


def _splits(trace: TracedStep, constraints: SearchConstraints) -> list[_Split]:
    """All ways to split that may be offered to the search."""
    own: dict[int, dict[int, list[Kernel]]] = {}
    for size, kernels in trace.kernels.items():
        for kernel in kernels:
            own.setdefault(kernel.operator, {}).setdefault(size, []).append(kernel)
    found = []
    for index, operator in enumerate(trace.model_profile.operators):
        products = {size: find_matmul(kernels) for size, kernels in own.get(index, {}).items()}
        for k in slice_counts(operator, constraints.allowed_slices(operator.name)):
            known = {size: product for size, product in products.items() if product is not None}
            if len(known) < len(trace.kernels):
                continue
            outputs = operator.split_dims[0] in operator.output_dims
            found.append(
                _Split(
                    index,
                    operator.split_dims[0],
                    k,
                    {size: product.split(k, slice_outputs=outputs) for size, product in known.items()},
                    {size: ([product.forward], list(product.backward)) for size, product in known.items()},
                )
            )
    return found


def _operator_time(
    kernel_index: _KernelIndex,
    operator: int,
    seconds: Mapping[object, float],
    autograd_overhead: AutogradOverhead,
    splits: Sequence[_Split] = (),
) -> OperatorTime:
    forward = _time_line(kernel_index.for_operator(operator, "forward"), seconds, autograd_overhead.forward_s)
    backward = _time_line(kernel_index.for_operator(operator, "backward"), seconds, autograd_overhead.backward_s)
    times = []
    for split in splits:
        first, second = (
            fit_nonnegative_line(
                [
                    (size, _splitting_overhead_s(split, size, phase, seconds, autograd_overhead))
                    for size in sorted(kernel_index.batch_sizes)
                ]
            )
            for phase in range(2)
        )
        times.append(SplitTime(dim=split.dim, slices=split.slices, forward=first, backward=second))
    return OperatorTime(forward=forward, backward=backward, splits=tuple(times))


def _splitting_overhead_s(
    split: _Split, size: int, phase: int, seconds: Mapping[object, float], autograd_overhead: AutogradOverhead
) -> float:
    """What splitting adds to an operator's forward (0) or backward (1) at one batch size: kernels and autograd.

    Never less than nothing: it is the same work in more calls. The clock's errors are larger than what it adds, and the
    best of many ways to split would be one that they flatter. [measured, W&S of 22 M parameters, 2 ranks: splits that
    promised 4 % more samples a second than the best plan without made 12 % fewer]
    """
    instead = sum(seconds[kernel.key] * kernel.count for kernel in split.kernels[size][phase])
    before = sum(seconds[kernel.key] * kernel.count for kernel in split.replaced_kernels[size][phase])
    node = autograd_overhead.forward_s if phase == 0 else autograd_overhead.backward_s
    return max(0.0, instead - before) + (split.slices - 1) * node


def _time_line(kernels: KernelsByBatchSize, seconds: Mapping[object, float], per_node_s: float) -> LinearInBatch:
    """Seconds of some kernels over the batch size."""
    return fit_nonnegative_line(
        [
            (size, sum(seconds[kernel.key] * kernel.count + per_node_s * kernel.num_autograd_nodes for kernel in found))
            for size, found in sorted(kernels.items())
        ]
    )


def _workspace_line(kernels: KernelsByBatchSize, workspace_bytes: Mapping[object, int]) -> LinearInBatch:
    """Scratch bytes of the kernel that takes most, over the batch size."""
    return fit_nonnegative_line(
        [
            (size, max((workspace_bytes.get(one.key, 0) for one in found), default=0))
            for size, found in sorted(kernels.items())
        ]
    )

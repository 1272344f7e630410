"""Measures compute (the paper's gamma): the seconds of a traced step's operators, of its blocks, and of the rest.

Each is the sum of its kernels' times and of autograd's own time per node. Equal kernels are timed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_osdp.planning.cost.trial_correction import fit_nonnegative_line
from lightning_osdp.planning.spec.choices import slice_counts
from lightning_osdp.planning.spec.cluster import ComputeTimes, KernelWorkspace, OperatorTime, SplitTime, TensorTime
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, Operator, Phase
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.profiling.kernels.benchmark import (
    UNLIMITED_BYTES,
    AutogradOverhead,
    Clock,
    KernelTimes,
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
"""Seconds for timing kernels, of all ranks that share the work together."""


def measure_partition(
    trace: TracedStep,
    device: torch.device,
    partition_index: int,
    num_partitions: int,
    *,
    time_budget_s: float = KERNEL_TIMING_BUDGET_S,
    constraints: SearchConstraints = UNCONSTRAINED,
    available_bytes: int = UNLIMITED_BYTES,
) -> KernelTimes:
    """Time one of ``num_partitions`` equal parts of the kernels that ``measure_compute`` needs.

    An optimizer's kernels belong to no part: they are bound by the memory that ranks share, and all ranks time them
    together. The other arguments are those of ``measure_compute``.
    """
    kernels = _all_kernels(trace, _find_splits(trace, constraints))
    ordered = order_for_timing(kernel for kernel in kernels if kernel.phase != "optimizer")
    clock = Clock(device, available_bytes)
    with fork_rng(device), torch.no_grad():
        return time_within_budget(ordered[partition_index::num_partitions], clock, time_budget_s)[0]


def measure_compute(
    trace: TracedStep,
    device: torch.device,
    *,
    time_budget_s: float = KERNEL_TIMING_BUDGET_S,
    constraints: SearchConstraints = UNCONSTRAINED,
    available_bytes: int = UNLIMITED_BYTES,
    partitions: Sequence[KernelTimes] = (),
) -> ComputeTimes:
    """Time every distinct kernel of ``trace``, and those that operators would run if they were split.

    Args:
        trace: One training step at one or two batch sizes.
        device: The device to measure; its random state is left as it was.
        time_budget_s: About how long to take. Kernels are repeated less often to keep to it, but all run once.
        constraints: The numbers of slices that operators may be split into; no others are measured.
        available_bytes: Free memory, half of which copies of a kernel's arguments may take.
        partitions: Results of ``measure_partition``, whose kernels are not timed again.

    Returns:
        Forward and backward seconds of each operator, of each block and of the rest as lines over the batch size, and
        the optimizer's seconds per byte of trainable parameter.
    """
    splits = _find_splits(trace, constraints)
    known = {name: time for partition in partitions for name, time in partition.items()}
    with fork_rng(device):
        with torch.no_grad():
            kernels = _all_kernels(trace, splits)
            times = time_all(kernels, Clock(device, available_bytes), time_budget_s, known)
        overhead = measure_autograd_overhead(Clock(device))
    return _sum_by_operator(trace, splits, _StepSummary(trace, times, overhead))


def _sum_by_operator(trace: TracedStep, splits: Sequence[_Split], summary: _StepSummary) -> ComputeTimes:
    operators, blocks = range(len(trace.model_profile.operators)), range(len(trace.model_profile.blocks))
    trainable_bytes = sum(p.gradient_bytes for operator in trace.model_profile.operators for p in operator.parameters)
    optimizer_s = summary.sum_s(trace.optimizer_kernels)
    optimizer_s_per_byte = optimizer_s / trainable_bytes if trainable_bytes else 0.0
    return ComputeTimes(
        operators=tuple(
            _with_tensor_times(
                summary.operator_time(index, [split for split in splits if split.operator == index]),
                trace.model_profile.operators[index],
                optimizer_s_per_byte,
            )
            for index in operators
        ),
        unattributed=summary.operator_time(UNATTRIBUTED),
        optimizer_s_per_byte=optimizer_s_per_byte,
        blocks=tuple(summary.time(UNATTRIBUTED, "forward", index) for index in blocks),
        workspace=tuple(
            KernelWorkspace(forward=summary.workspace(index, "forward"), backward=summary.workspace(index, "backward"))
            for index in operators
        ),
    )


def _with_tensor_times(time: OperatorTime, operator: Operator, s_per_byte: float) -> OperatorTime:
    """Return the operator's time with those of its slices if it may be tensor parallel.

    One of t slices makes 1 / t of the products for the samples of t ranks: what depends on the batch size stays. It
    reads less of the weight, and writes less of its gradient. That saves no more of the time that does not depend on
    the batch size than passing over these bytes takes the optimizer.
    """
    if operator.tensor is None:
        return time
    weight_bytes = sum(parameter.parameter_bytes for parameter in operator.parameters if len(parameter.shape) > 1)
    reads_all = operator.tensor.role != TensorRole.EMBEDDING

    def line_of_slice(line: LinearInBatch, passes: int, degree: int) -> LinearInBatch:
        saved_s = (1 - 1 / degree) * min(max(0.0, line.fixed), passes * weight_bytes * s_per_byte)
        return line.model_copy(update={"fixed": line.fixed - saved_s})

    tensor = tuple(
        TensorTime(
            degree=degree,
            forward=line_of_slice(time.forward, int(reads_all), degree),
            backward=line_of_slice(time.backward, 2, degree),
        )
        for degree in operator.tensor.degrees
    )
    return time.model_copy(update={"tensor": tensor})


def warm_up(trace: TracedStep, device: torch.device) -> None:
    """Run every distinct kernel of the larger batch size, as far as it can be run by itself.

    Libraries load their code and take their workspaces at the first call. Where measurements come from a cache, this
    has not happened yet, and the process's overhead would be read too low. [M-kernels-3]
    """
    with fork_rng(device), torch.no_grad():
        kernels = trace.with_all_kernels().kernels
        run_all(kernels[max(kernels)], device)


@dataclass(frozen=True)
class _Split:
    """One way to split one operator, with the kernels of forward (0) and backward (1) by batch size."""

    operator: int
    dim: int
    slices: int
    kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]
    """Kernels that the split operator runs."""
    replaced_kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]
    """Kernels that it runs unsplit instead."""


def _find_splits(trace: TracedStep, constraints: SearchConstraints) -> list[_Split]:
    """Return all ways to split operators that the search may be offered."""
    kernels_of: dict[tuple[int, int], list[Kernel]] = {}
    for size, kernels in trace.kernels.items():
        for kernel in kernels:
            kernels_of.setdefault((kernel.operator, size), []).append(kernel)
    splits = []
    for index, operator in enumerate(trace.model_profile.operators):
        by_size = {size: find_matmul(kernels_of.get((index, size), [])) for size in trace.kernels}
        matmuls = {size: matmul for size, matmul in by_size.items() if matmul is not None}
        if len(matmuls) < len(by_size):
            continue
        for k in slice_counts(operator, constraints.allowed_slices(operator.name)):
            dim = operator.split_dims[0]
            is_output = dim in operator.output_dims
            sliced = {size: matmul.split(k, slice_outputs=is_output) for size, matmul in matmuls.items()}
            replaced = {size: ([matmul.forward], list(matmul.backward)) for size, matmul in matmuls.items()}
            splits.append(_Split(index, dim, k, sliced, replaced))
    return splits


def _all_kernels(trace: TracedStep, splits: Sequence[_Split]) -> list[Kernel]:
    """Return the kernels of the step, of the optimizer, and of operators that are split."""
    kernels = [*(kernel for size in trace.kernels.values() for kernel in size), *trace.optimizer_kernels]
    kernels += [kernel for split in splits for phases in split.kernels.values() for phase in phases for kernel in phase]
    return kernels


class _StepSummary:
    """Sums the times of a step's kernels by what they belong to, as lines over the batch size."""

    def __init__(self, trace: TracedStep, times: KernelTimes, overhead: AutogradOverhead) -> None:
        self._times = times
        self._overhead_s = {"forward": overhead.forward_s, "backward": overhead.backward_s}
        self._batch_sizes = sorted(trace.kernels)
        self._kernels: dict[tuple[int, str, int], dict[int, list[Kernel]]] = {}
        for size, kernels in trace.kernels.items():
            for kernel in kernels:
                keys = {(kernel.operator, kernel.phase, UNATTRIBUTED), (kernel.operator, kernel.phase, kernel.block)}
                for key in keys:
                    self._kernels.setdefault(key, {}).setdefault(size, []).append(kernel)

    def operator_time(self, operator: int, splits: Sequence[_Split] = ()) -> OperatorTime:
        """Return the time of an operator, or of all that belongs to none."""
        return OperatorTime(
            forward=self.time(operator, "forward"),
            backward=self.time(operator, "backward"),
            splits=tuple(
                SplitTime(
                    dim=split.dim,
                    slices=split.slices,
                    forward=self._splitting_overhead(split, "forward"),
                    backward=self._splitting_overhead(split, "backward"),
                )
                for split in splits
            ),
        )

    def time(self, operator: int, phase: Phase, block: int = UNATTRIBUTED) -> LinearInBatch:
        """Return the seconds of an operator's phase; with ``block``, those of a block that belong to no operator."""
        per_node_s = self._overhead_s[phase]
        return fit_nonnegative_line(
            [
                (size, self.sum_s(kernels) + per_node_s * sum(kernel.num_autograd_nodes for kernel in kernels))
                for size, kernels in self._select(operator, phase, block)
            ]
        )

    def workspace(self, operator: int, phase: Phase) -> LinearInBatch:
        """Return the workspace bytes of the operator's kernel that takes most."""
        return fit_nonnegative_line(
            [
                (size, max((self._times[kernel.name].workspace_bytes for kernel in kernels), default=0))
                for size, kernels in self._select(operator, phase)
            ]
        )

    def _splitting_overhead(self, split: _Split, phase: Phase) -> LinearInBatch:
        """Return the seconds that splitting adds to an operator's phase by kernels and autograd, never below zero.

        It is the same work in more calls, and the best of many ways to split would be the one that the clock's errors
        flatter most. [M-kernels-4]
        """
        index, nodes_s = ("forward", "backward").index(phase), (split.slices - 1) * self._overhead_s[phase]
        return fit_nonnegative_line(
            [
                (
                    size,
                    max(0.0, self.sum_s(split.kernels[size][index]) - self.sum_s(split.replaced_kernels[size][index]))
                    + nodes_s,
                )
                for size in self._batch_sizes
            ]
        )

    def _select(self, operator: int, phase: Phase, block: int = UNATTRIBUTED) -> list[tuple[int, list[Kernel]]]:
        kernels = self._kernels.get((operator, phase, block), {})
        return [(size, kernels.get(size, [])) for size in self._batch_sizes]

    def sum_s(self, kernels: Sequence[Kernel]) -> float:
        """Return the seconds of all calls of some kernels."""
        return sum(self._times[kernel.name].seconds * kernel.count for kernel in kernels)

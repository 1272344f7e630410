"""Measures compute (the paper's gamma): the seconds of a traced step's operators, of its blocks, and of the rest.

Each is the sum of its kernels' times and of autograd's own time per node. Equal kernels are timed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
from lightning_osdp.profiling.kernels.lookup_gradients import limit_growth
from lightning_osdp.profiling.kernels.sliced_kernels import find_bag, find_matmul
from lightning_osdp.profiling.tracing.stand_ins import fork_rng
from lightning_osdp.profiling.tracing.trace import TracedStep

T = TypeVar("T")

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
    kernels = _all_kernels(trace, _find_variants(trace, constraints))
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
    variants = _find_variants(trace, constraints)
    known = {name: time for partition in partitions for name, time in partition.items()}
    with fork_rng(device):
        with torch.no_grad():
            kernels = _all_kernels(trace, variants)
            times = limit_growth(kernels, time_all(kernels, Clock(device, available_bytes), time_budget_s, known))
        overhead = measure_autograd_overhead(Clock(device))
    return _sum_by_operator(trace, variants, _StepSummary(trace, times, overhead))


def _sum_by_operator(trace: TracedStep, variants: Sequence[_Variant], summary: _StepSummary) -> ComputeTimes:
    by_operator: dict[int, list[_Variant]] = {}
    for variant in variants:
        by_operator.setdefault(variant.operator, []).append(variant)
    operators, blocks = range(len(trace.model_profile.operators)), range(len(trace.model_profile.blocks))
    trainable_bytes = sum(p.gradient_bytes for operator in trace.model_profile.operators for p in operator.parameters)
    optimizer_s = summary.sum_s(trace.optimizer_kernels)
    optimizer_s_per_byte = optimizer_s / trainable_bytes if trainable_bytes else 0.0
    return ComputeTimes(
        operators=tuple(
            _with_tensor_times(time, trace.model_profile.operators[index], optimizer_s_per_byte, measured)
            for index in operators
            for time, measured in (summary.variant_times(index, by_operator.get(index, ())),)
        ),
        unattributed=summary.operator_time(UNATTRIBUTED),
        optimizer_s_per_byte=optimizer_s_per_byte,
        blocks=tuple(summary.time(UNATTRIBUTED, "forward", index) for index in blocks),
        workspace=tuple(
            KernelWorkspace(forward=summary.workspace(index, "forward"), backward=summary.workspace(index, "backward"))
            for index in operators
        ),
    )


def _with_tensor_times(
    time: OperatorTime, operator: Operator, s_per_byte: float, measured: Mapping[int, _MeasuredSlice]
) -> OperatorTime:
    """Return the operator's time with those of its slices if it may be tensor parallel.

    One of t slices makes 1 / t of the products for the samples of t ranks. Where that was not measured, what depends on
    the batch size stays. It reads less of the weight, and writes less of its gradient: that saves no more of the time
    that does not depend on the batch size than passing over these bytes takes the optimizer.

    Args:
        time: that of the operator undivided.
        operator: the operator.
        s_per_byte: the optimizer's seconds per byte.
        measured: seconds by batch size of slices that were measured, by degree.
    """
    if operator.tensor is None:
        return time
    weight_bytes = sum(parameter.parameter_bytes for parameter in operator.parameters if len(parameter.shape) > 1)
    reads_all = not operator.tensor.role.is_table

    def line_of_slice(phase: Phase, passes: int, degree: int) -> LinearInBatch:
        line: LinearInBatch = getattr(time, phase)
        saved_s = (1 - 1 / degree) * min(max(0.0, line.fixed), passes * weight_bytes * s_per_byte)
        if degree not in measured:
            return line.model_copy(update={"fixed": line.fixed - saved_s})
        seconds = measured[degree][phase]  # a slice has its part of the work at least
        return fit_nonnegative_line([(size, max(s, line.value_at(size) / degree)) for size, s in seconds.items()])

    tensor = tuple(
        TensorTime(
            degree=degree,
            forward=line_of_slice("forward", int(reads_all), degree),
            backward=line_of_slice("backward", 2, degree),
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


_MeasuredSlice = Mapping[Phase, Mapping[int, float]]
"""Seconds of one slice of a tensor parallel operator by phase and batch size."""


@dataclass(frozen=True)
class _Variant:
    """Another way to run one operator, with the kernels of forward (0) and backward (1) by batch size."""

    operator: int
    slices: int
    """Slices that it runs one after the other; if tensor parallel, ranks that run one each."""
    dim: int | None
    """Dimension of the weight that is split; None if it is tensor parallel."""
    kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]
    """Kernels that the operator runs then."""
    replaced_kernels: Mapping[int, tuple[list[Kernel], list[Kernel]]]
    """Kernels that it runs unsplit instead."""


def _find_variants(trace: TracedStep, constraints: SearchConstraints) -> list[_Variant]:
    """Return all ways to split operators, and to cut them over ranks, that the search may be offered."""
    kernels_of: dict[tuple[int, int], list[Kernel]] = {}
    for size, kernels in trace.kernels.items():
        for kernel in kernels:
            kernels_of.setdefault((kernel.operator, size), []).append(kernel)
    variants = []
    for index, operator in enumerate(trace.model_profile.operators):
        degrees = operator.tensor.degrees if operator.tensor is not None else ()
        own = {size: kernels_of.get((index, size), []) for size in trace.kernels}
        matmuls, bags = _find_all(find_matmul, own), _find_all(find_bag, own)
        for degree in degrees if bags else ():
            cut = {size: bag.cut(degree) for size, bag in bags.items()}
            looked_up = {size: ([bag.forward], list(bag.backward)) for size, bag in bags.items()}
            variants.append(_Variant(index, degree, None, cut, looked_up))
        if not matmuls:
            continue
        replaced = {size: ([matmul.forward], list(matmul.backward)) for size, matmul in matmuls.items()}
        for k in slice_counts(operator, constraints.allowed_slices(operator.name)):
            dim = operator.split_dims[0]
            is_output = dim in operator.output_dims
            sliced = {size: matmul.split(k, slice_outputs=is_output) for size, matmul in matmuls.items()}
            variants.append(_Variant(index, k, dim, sliced, replaced))
        for degree in degrees:
            cuts_inputs = operator.tensor is not None and operator.tensor.role in (
                TensorRole.ROW,
                TensorRole.TABLE_ROWS,
            )
            cut = {size: matmul.cut(degree, cuts_outputs=not cuts_inputs) for size, matmul in matmuls.items()}
            variants.append(_Variant(index, degree, None, cut, replaced))
    return variants


def _find_all(find: Callable[[Sequence[Kernel]], T | None], kernels: Mapping[int, Sequence[Kernel]]) -> dict[int, T]:
    """Return what is found at each batch size, or nothing if there is one at which it is not."""
    found = {size: product for size, own in kernels.items() if (product := find(own)) is not None}
    return found if len(found) == len(kernels) else {}


def _all_kernels(trace: TracedStep, variants: Sequence[_Variant]) -> list[Kernel]:
    """Return the kernels of the step, of the optimizer, and of operators that are split or cut."""
    kernels = [*(kernel for size in trace.kernels.values() for kernel in size), *trace.optimizer_kernels]
    kernels += [kernel for each in variants for phases in each.kernels.values() for phase in phases for kernel in phase]
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

    def variant_times(
        self, operator: int, variants: Sequence[_Variant]
    ) -> tuple[OperatorTime, dict[int, _MeasuredSlice]]:
        """Return the time of an operator, and that of one of its slices over ranks by their number."""
        splits = [variant for variant in variants if variant.dim is not None]
        slices = {variant.slices: self._slice_s(variant) for variant in variants if variant.dim is None}
        return self.operator_time(operator, splits), slices

    def _slice_s(self, variant: _Variant) -> _MeasuredSlice:
        """Return the seconds of one slice, with those of what the operator runs besides its product."""

        def seconds(phase: Phase, index: int) -> dict[int, float]:
            whole_s = dict(self._seconds(variant.operator, phase))
            return {
                size: whole_s[size] + self.sum_s(kernels[index]) - self.sum_s(variant.replaced_kernels[size][index])
                for size, kernels in variant.kernels.items()
            }

        return {"forward": seconds("forward", 0), "backward": seconds("backward", 1)}

    def operator_time(self, operator: int, splits: Sequence[_Variant] = ()) -> OperatorTime:
        """Return the time of an operator, or of all that belongs to none."""
        return OperatorTime(
            forward=self.time(operator, "forward"),
            backward=self.time(operator, "backward"),
            splits=tuple(
                SplitTime(
                    dim=split.dim or 0,
                    slices=split.slices,
                    forward=self._splitting_overhead(split, "forward"),
                    backward=self._splitting_overhead(split, "backward"),
                )
                for split in splits
            ),
        )

    def time(self, operator: int, phase: Phase, block: int = UNATTRIBUTED) -> LinearInBatch:
        """Return the seconds of an operator's phase; with ``block``, those of a block that belong to no operator."""
        return fit_nonnegative_line(self._seconds(operator, phase, block))

    def _seconds(self, operator: int, phase: Phase, block: int = UNATTRIBUTED) -> list[tuple[int, float]]:
        """Return the seconds at each batch size."""
        per_node_s = self._overhead_s[phase]
        return [
            (size, self.sum_s(kernels) + per_node_s * sum(kernel.num_autograd_nodes for kernel in kernels))
            for size, kernels in self._select(operator, phase, block)
        ]

    def workspace(self, operator: int, phase: Phase) -> LinearInBatch:
        """Return the workspace bytes of the operator's kernel that takes most."""
        return fit_nonnegative_line(
            [
                (size, max((self._times[kernel.name].workspace_bytes for kernel in kernels), default=0))
                for size, kernels in self._select(operator, phase)
            ]
        )

    def _splitting_overhead(self, split: _Variant, phase: Phase) -> LinearInBatch:
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

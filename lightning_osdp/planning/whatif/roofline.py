"""Compute times of hardware that is not at hand, from FLOPs and bytes: the roofline model.

Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009: work that needs F FLOPs and moves Q bytes takes at least
``max(F / peak, Q / bandwidth)``. Each peak is multiplied by the fraction that programs reach (``Efficiency``). The
result stands in for measurements (the paper's gamma): it ranks plans and hardware, but is no promise of a step time.

    forward of an operator     F / 3        reads its parameters once, and moves its activations
    backward of an operator    2 F / 3      the same, and writes its gradients once
    outside of operators       F / 3 and 2 F / 3 likewise, and moves their activations
    split in k slices          each product reads and writes again what it shares with the others; kernels of their own
                               join or add up the results of slices

A backward has two matrix products, one for the inputs' gradients and one for the weights', per product of the forward
(Narayanan et al., arXiv 2104.04473, appendix). An operator without FLOPs (an embedding) looks rows up; it does not
read its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_osdp.planning.cost.trial_correction import fit_nonnegative_line
from lightning_osdp.planning.spec.choices import slice_counts
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime, SplitTime
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, ModelProfile, Operator, Phase, RepeatedBlock
from lightning_osdp.planning.whatif.hardware import Hardware

FORWARD_SHARE = 1 / 3
"""Fraction of an operator's FLOPs of forward and backward that belongs to the forward."""

TRAFFIC_PER_LIVE_BYTE = 2.0
"""Bytes moved per byte by which live tensors grow or shrink: one kernel writes it, another reads it. A lower bound, as
only the largest of the temporaries within a moment counts."""

SECANT_BATCH_SIZES = (1, 64)
"""Batch sizes between which the roofline, a convex broken line over the batch size, is replaced by its secant. It is
exact where the same bound holds at both."""


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the peaks that programs reach [M-search-3].

    Attributes:
        flops: fraction of the peak FLOP/s.
        bandwidth: fraction of the memory bandwidth.
    """

    flops: float = 0.5
    bandwidth: float = 0.85


def compute_times(
    model: ModelProfile, hardware: Hardware, dtype: str = "fp32", efficiency: Efficiency | None = None
) -> ComputeTimes:
    """Return forward and backward of each operator and of the work outside operators, and the optimizer's update.

    Args:
        model: its FLOPs and live bytes count as traced: trace it in the dtype that it trains in.
        hardware: gives peak FLOP/s and memory bandwidth.
        dtype: type of the matrix products: ``fp32``, ``tf32``, ``fp16``, ``bf16``.
        efficiency: fractions of the peaks that are reached.

    Raises:
        ConfigurationError: the device has no peak for ``dtype``.
    """
    share = efficiency or Efficiency()
    flops_per_s, bytes_per_s = (
        hardware.get_peak_flops(dtype) * share.flops,
        hardware.memory_bytes_per_s * share.bandwidth,
    )
    roofline = _Roofline(flops_per_s, bytes_per_s, _activation_traffic(model))
    return ComputeTimes(
        operators=tuple(roofline.operator_time(operator, index) for index, operator in enumerate(model.operators)),
        unattributed=roofline.pass_times(UNATTRIBUTED, model.unattributed_flops_per_sample),
        optimizer_s_per_byte=optimizer_traffic(model.operators) / bytes_per_s,
        blocks=tuple(roofline.block_time(model, block) for block in model.blocks),
    )


def optimizer_traffic(operators: Sequence[Operator]) -> float:
    """Return the bytes that the update moves per byte of trainable parameter.

    It reads parameter, gradient and states and writes parameter and states, all in one pass: 7 for Adam and AdamW (two
    states as large as the parameter), 5 for SGD with momentum, 3 for plain SGD. A lower bound: implementations that
    work in several passes move some of it again.
    """
    trainable = [p for operator in operators for p in operator.parameters if p.trainable]
    parameter_bytes = sum(p.parameter_bytes for p in trainable)
    states = sum(p.optimizer_bytes for p in trainable) / parameter_bytes if parameter_bytes else 0.0
    return 3 + 2 * states


Traffic = dict[tuple[int, Phase], LinearInBatch]
"""Bytes that activations move, by operator (or ``UNATTRIBUTED``) and phase."""


@dataclass(frozen=True)
class _Roofline:
    """The rates that the device reaches, and the model's activation traffic."""

    flops_per_s: float
    bytes_per_s: float
    activations: Traffic

    def secant_time(self, flops_per_sample: float, traffic: LinearInBatch) -> LinearInBatch:
        """Return seconds over the batch size: the secant of the roofline through ``SECANT_BATCH_SIZES``."""
        low, high = (
            max(flops_per_sample * size / self.flops_per_s, traffic.value_at(size) / self.bytes_per_s)
            for size in SECANT_BATCH_SIZES
        )
        slope = (high - low) / (SECANT_BATCH_SIZES[1] - SECANT_BATCH_SIZES[0])
        return LinearInBatch(fixed=max(0.0, low - slope * SECANT_BATCH_SIZES[0]), per_sample=slope)

    def pass_times(
        self,
        index: int,
        flops_per_sample: float,
        read: float = 0.0,
        written: float = 0.0,
        extra_per_sample: float = 0.0,
    ) -> OperatorTime:
        """Return forward and backward of an operator that reads bytes in both and writes bytes in the backward."""

        def phase_time(phase: Phase, flops: float, fixed: float) -> LinearInBatch:
            activations = self.activations.get((index, phase), LinearInBatch())
            return self.secant_time(flops, activations.plus(LinearInBatch(fixed=fixed, per_sample=extra_per_sample)))

        forward_flops = FORWARD_SHARE * flops_per_sample
        return OperatorTime(
            forward=phase_time("forward", forward_flops, read),
            backward=phase_time("backward", flops_per_sample - forward_flops, read + written),
        )

    def operator_time(self, operator: Operator, index: int) -> OperatorTime:
        """Return forward and backward of an operator, and what slicing adds."""
        read = float(sum(p.parameter_bytes for p in operator.parameters)) if operator.flops_per_sample else 0.0
        work = (operator.flops_per_sample, read, float(sum(p.gradient_bytes for p in operator.parameters)))
        unsplit = self.pass_times(index, *work)
        return unsplit.model_copy(update={"splits": tuple(self._split_times(operator, index, work, unsplit))})

    def _split_times(
        self, operator: Operator, index: int, work: tuple[float, float, float], unsplit: OperatorTime
    ) -> Iterator[SplitTime]:
        """Yield the seconds that each number of slices adds."""
        x, y = operator.input_per_sample, operator.output_per_sample
        for k in slice_counts(operator):
            dim = operator.split_dims[0]
            if dim in operator.output_dims:  # x is read by each product; outputs are joined, gradients of x added up
                shared, copied = (k - 1) * x, (2 * y, 3 * (k - 1) * x)
            else:  # y is read and written by each product, and read for both gradients; gradients of x are joined
                shared, copied = 2 * (k - 1) * y, (0.0, 2 * x)
            split = self.pass_times(index, *work, extra_per_sample=shared)
            yield SplitTime(
                dim=dim,
                slices=k,
                forward=self._added_time(split.forward, unsplit.forward, copied[0]),
                backward=self._added_time(split.backward, unsplit.backward, copied[1]),
            )

    def _added_time(self, split: LinearInBatch, unsplit: LinearInBatch, copied_per_sample: float) -> LinearInBatch:
        points = [
            (size, split.value_at(size) - unsplit.value_at(size) + size * copied_per_sample / self.bytes_per_s)
            for size in SECANT_BATCH_SIZES
        ]
        return fit_nonnegative_line(points)

    def block_time(self, model: ModelProfile, block: RepeatedBlock) -> LinearInBatch:
        """Return the forward of a block's work outside operators."""
        first, last = block.forward
        live = [block.live_before_forward, *(moment.live for moment in model.moments[first : last + 1])]
        moved = LinearInBatch()
        for index, moment in enumerate(model.moments[first : last + 1]):
            if moment.operator == UNATTRIBUTED:
                moved = moved.plus(_moved_bytes(live[index], live[index + 1]))
        return self.secant_time(block.unattributed_flops_per_sample, moved)


def _activation_traffic(model: ModelProfile) -> Traffic:
    """Return the bytes that activations move: those of a moment follow from the change of live bytes before it."""
    traffic: Traffic = {}
    before = LinearInBatch()
    for moment in model.moments:
        key = (moment.operator, moment.phase)
        traffic[key] = traffic.get(key, LinearInBatch()).plus(_moved_bytes(before, moment.live))
        before = moment.live
    return traffic


def _moved_bytes(before: LinearInBatch, after: LinearInBatch) -> LinearInBatch:
    return LinearInBatch(
        fixed=TRAFFIC_PER_LIVE_BYTE * abs(after.fixed - before.fixed),
        per_sample=TRAFFIC_PER_LIVE_BYTE * abs(after.per_sample - before.per_sample),
    )

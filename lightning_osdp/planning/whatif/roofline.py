"""Compute times of hardware that is not at hand, from FLOPs and bytes: the roofline model.

Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009: work that needs F FLOPs and moves Q bytes takes at
least ``max(F / peak, Q / bandwidth)``. Here each is divided by the share of its peak that programs really reach
(``Efficiency``). The result stands in for measurements (the paper's gamma) and is as rough as that: it ranks plans and
hardware; it is no promise of a step time.

    forward of an operator     F / 3        reads its parameters once, and what its activations move
    backward of an operator    2 F / 3      the same, and writes its gradients once
    outside of operators       F / 3 and 2 F / 3 likewise, and what its activations move
    split in k slices          each product reads and writes what it shares with the others anew, and results of slices
                               are joined or added up by kernels of their own

A backward has two matrix products, one for the inputs' gradients and one for the weights', for each one of the forward
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
"""Of an operator's FLOPs in forward and backward together."""

TRAFFIC_PER_LIVE_BYTE = 2.0
"""Bytes moved per byte that appears in or vanishes from the live tensors: one kernel writes it, another reads it. Of
temporaries that come and go within a moment only the largest counts, so this is a lower bound."""

SECANT_BATCH_SIZES = (1, 64)
"""Batch sizes between which the roofline, a convex broken line over the batch size, is replaced by its secant. It is
exact where the same bound holds at both."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that programs reach.

    Attributes:
        flops: 0.5: Narayanan et al. (arXiv 2104.04473, table 1) report 43 to 52 % of an A100's peak for whole training
            steps of GPTs of 1.7 to 1008 billion parameters.
        bandwidth: 0.85: copies within an H100's memory reach 87 % of its data sheet's bandwidth
            (github.com/aigatech/vpbenchmarking); calculon's A100 (github.com/calculon-ai/calculon) has 90 % for 100 MB
            and 75 % for 10 MB.
    """

    flops: float = 0.5
    bandwidth: float = 0.85


@dataclass(frozen=True)
class _Rates:
    """What the device really reaches, per second."""

    flops_per_s: float
    bytes_per_s: float

    def secant_time(self, flops_per_sample: float, traffic: LinearInBatch) -> LinearInBatch:
        """Seconds over the batch size: the secant of the roofline through ``SECANT_BATCH_SIZES``."""
        low, high = (
            max(flops_per_sample * size / self.flops_per_s, traffic.value_at(size) / self.bytes_per_s)
            for size in SECANT_BATCH_SIZES
        )
        slope = (high - low) / (SECANT_BATCH_SIZES[1] - SECANT_BATCH_SIZES[0])
        return LinearInBatch(fixed=max(0.0, low - slope * SECANT_BATCH_SIZES[0]), per_sample=slope)


def compute_times(
    model: ModelProfile, hardware: Hardware, dtype: str = "fp32", efficiency: Efficiency | None = None
) -> ComputeTimes:
    """Forward and backward of each operator and of what belongs to none, and the optimizer's update.

    Args:
        model: its FLOPs and live bytes count as traced: trace it in the dtype that it is to train in.
        hardware: gives peak FLOP/s and memory bandwidth.
        dtype: of the matrix products: ``fp32``, ``tf32``, ``fp16``, ``bf16``.
        efficiency: shares of the peaks that are reached.

    Raises:
        ConfigurationError: the device has no peak for ``dtype``.
    """
    share = efficiency or Efficiency()
    rates = _Rates(hardware.get_peak_flops(dtype) * share.flops, hardware.memory_bytes_per_s * share.bandwidth)
    moved = _activation_traffic(model)
    return ComputeTimes(
        operators=tuple(
            _operator_time(operator, index, moved, rates) for index, operator in enumerate(model.operators)
        ),
        unattributed=_forward_backward_time(model.unattributed_flops_per_sample, 0.0, 0.0, UNATTRIBUTED, moved, rates),
        optimizer_s_per_byte=optimizer_traffic(model.operators) / rates.bytes_per_s,
        blocks=tuple(_block_time(model, block, rates) for block in model.blocks),
    )


def optimizer_traffic(operators: Sequence[Operator]) -> float:
    """Bytes that the update moves per byte of trainable parameter: it reads parameter, gradient and states, and
    writes parameter and states, all in one pass.

    7 for Adam and AdamW (two states as large as the parameter), 5 for SGD with momentum, 3 for plain SGD. A lower
    bound: implementations that work in several passes read and write some of it again.
    """
    trainable = [p for operator in operators for p in operator.parameters if p.trainable]
    whole = sum(p.parameter_bytes for p in trainable)
    states = sum(p.optimizer_bytes for p in trainable) / whole if whole else 0.0
    return 3 + 2 * states


Traffic = dict[tuple[int, Phase], LinearInBatch]


def _operator_time(operator: Operator, index: int, activation_traffic: Traffic, rates: _Rates) -> OperatorTime:
    read = sum(p.parameter_bytes for p in operator.parameters) if operator.flops_per_sample else 0
    written = sum(p.gradient_bytes for p in operator.parameters)
    whole = (operator.flops_per_sample, float(read), float(read + written))
    time = _forward_backward_time(*whole, index, activation_traffic, rates)
    splits = tuple(_split_times(operator, whole, time, index, activation_traffic, rates))
    return time.model_copy(update={"splits": splits})


def _split_times(
    operator: Operator,
    unsplit_work: tuple[float, float, float],
    unsplit_time: OperatorTime,
    index: int,
    activation_traffic: Traffic,
    rates: _Rates,
) -> Iterator[SplitTime]:
    """Of each number of slices that is offered; ``unsplit_work`` and ``unsplit_time`` are of the operator when it is not split."""
    x, y = operator.input_per_sample, operator.output_per_sample
    for k in slice_counts(operator):
        dim = operator.split_dims[0]
        if dim in operator.output_dims:  # x is read by each product; outputs are joined, gradients of x added up
            shared, copied = ((k - 1) * x, (k - 1) * x), (2 * y, 3 * (k - 1) * x)
        else:  # y is read and written by each product, and read for both gradients; gradients of x are joined
            shared, copied = (2 * (k - 1) * y, 2 * (k - 1) * y), (0.0, 2 * x)
        split = _forward_backward_time(*unsplit_work, index, activation_traffic, rates, shared)
        forward, backward = (
            fit_nonnegative_line(
                [
                    (size, own.value_at(size) - plain.value_at(size) + size * moving / rates.bytes_per_s)
                    for size in SECANT_BATCH_SIZES
                ]
            )
            for own, plain, moving in zip(
                (split.forward, split.backward), (unsplit_time.forward, unsplit_time.backward), copied, strict=True
            )
        )
        yield SplitTime(dim=dim, slices=k, forward=forward, backward=backward)


def _block_time(model: ModelProfile, block: RepeatedBlock, rates: _Rates) -> LinearInBatch:
    """The forward of a block's work that belongs to no operator."""
    first, last = block.forward
    before = block.live_before_forward
    moved = LinearInBatch()
    for moment in model.moments[first : last + 1]:
        if moment.operator == UNATTRIBUTED:
            moved = _add_traffic(moved, before, moment.live)
        before = moment.live
    return rates.secant_time(block.unattributed_flops_per_sample, moved)


def _forward_backward_time(
    flops_per_sample: float,
    forward_bytes: float,
    backward_bytes: float,
    index: int,
    activation_traffic: Traffic,
    rates: _Rates,
    extra_bytes_per_sample: tuple[float, float] = (0.0, 0.0),
) -> OperatorTime:
    def phase_time(phase: Phase, flops: float, fixed: float) -> LinearInBatch:
        activations, more = (
            activation_traffic.get((index, phase), LinearInBatch()),
            extra_bytes_per_sample[phase == "backward"],
        )
        return rates.secant_time(flops, activations.plus(LinearInBatch(fixed=fixed, per_sample=more)))

    forward_flops = FORWARD_SHARE * flops_per_sample
    return OperatorTime(
        forward=phase_time("forward", forward_flops, forward_bytes),
        backward=phase_time("backward", flops_per_sample - forward_flops, backward_bytes),
    )


def _activation_traffic(model: ModelProfile) -> Traffic:
    """Bytes that activations move, by operator (or ``UNATTRIBUTED``) and phase, over the batch size.

    A moment moves ``TRAFFIC_PER_LIVE_BYTE`` times the change of the live bytes since the moment before it.
    """
    moved: Traffic = {}
    before = LinearInBatch()
    for moment in model.moments:
        key = (moment.operator, moment.phase)
        moved[key] = _add_traffic(moved.get(key, LinearInBatch()), before, moment.live)
        before = moment.live
    return moved


def _add_traffic(total: LinearInBatch, previous_live: LinearInBatch, live: LinearInBatch) -> LinearInBatch:
    """What was moved, and what the change from one moment to the next moves."""
    return LinearInBatch(
        fixed=total.fixed + TRAFFIC_PER_LIVE_BYTE * abs(live.fixed - previous_live.fixed),
        per_sample=total.per_sample + TRAFFIC_PER_LIVE_BYTE * abs(live.per_sample - previous_live.per_sample),
    )

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

from lightning_osdp.planning.choices import granularities
from lightning_osdp.planning.cluster import ComputeTimes, OperatorTime, SplitTime
from lightning_osdp.planning.hardware import Hardware
from lightning_osdp.planning.operators import OUTSIDE, Block, Line, ModelDescription, Operator, Phase
from lightning_osdp.planning.rehearsed import rising

FORWARD_SHARE = 1 / 3
"""Of an operator's FLOPs in forward and backward together."""

TRAFFIC_PER_LIVE_BYTE = 2.0
"""Bytes moved per byte that appears in or vanishes from the live tensors: one kernel writes it, another reads it. Of
temporaries that come and go within a moment only the largest counts, so this is a lower bound."""

SIZES = (1, 64)
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

    flops: float
    bytes: float

    def line(self, flops_per_sample: float, traffic: Line) -> Line:
        """Seconds over the batch size: the secant of the roofline through ``SIZES``."""
        low, high = (max(flops_per_sample * size / self.flops, traffic.at(size) / self.bytes) for size in SIZES)
        slope = (high - low) / (SIZES[1] - SIZES[0])
        return Line(fixed=max(0.0, low - slope * SIZES[0]), per_sample=slope)


def compute_times(
    model: ModelDescription, hardware: Hardware, dtype: str = "fp32", efficiency: Efficiency | None = None
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
    rates = _Rates(hardware.peak(dtype) * share.flops, hardware.memory_bytes_per_s * share.bandwidth)
    moved = _activation_traffic(model)
    return ComputeTimes(
        operators=tuple(
            _operator_time(operator, index, moved, rates) for index, operator in enumerate(model.operators)
        ),
        outside=_time(model.outside_flops_per_sample, 0.0, 0.0, OUTSIDE, moved, rates),
        optimizer_s_per_byte=optimizer_traffic(model.operators) / rates.bytes,
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


Traffic = dict[tuple[int, Phase], Line]


def _operator_time(operator: Operator, index: int, moved: Traffic, rates: _Rates) -> OperatorTime:
    read = sum(p.parameter_bytes for p in operator.parameters) if operator.flops_per_sample else 0
    written = sum(p.gradient_bytes for p in operator.parameters)
    whole = (operator.flops_per_sample, float(read), float(read + written))
    time = _time(*whole, index, moved, rates)
    splits = tuple(_split_times(operator, whole, time, index, moved, rates))
    return time.model_copy(update={"splits": splits})


def _split_times(
    operator: Operator,
    whole: tuple[float, float, float],
    time: OperatorTime,
    index: int,
    moved: Traffic,
    rates: _Rates,
) -> Iterator[SplitTime]:
    """Of each number of slices that is offered; ``whole`` and ``time`` are of the operator when it is not split."""
    x, y = operator.input_per_sample, operator.output_per_sample
    for k in granularities(operator):
        dim = operator.split_dims[0]
        if dim in operator.output_dims:  # x is read by each product; outputs are joined, gradients of x added up
            shared, copied = ((k - 1) * x, (k - 1) * x), (2 * y, 3 * (k - 1) * x)
        else:  # y is read and written by each product, and read for both gradients; gradients of x are joined
            shared, copied = (2 * (k - 1) * y, 2 * (k - 1) * y), (0.0, 2 * x)
        split = _time(*whole, index, moved, rates, shared)
        forward, backward = (
            rising([(size, own.at(size) - plain.at(size) + size * moving / rates.bytes) for size in SIZES])
            for own, plain, moving in zip(
                (split.forward, split.backward), (time.forward, time.backward), copied, strict=True
            )
        )
        yield SplitTime(dim=dim, slices=k, forward=forward, backward=backward)


def _block_time(model: ModelDescription, block: Block, rates: _Rates) -> Line:
    """The forward of a block's work that belongs to no operator."""
    first, last = block.forward
    before = block.before_forward
    moved = Line()
    for moment in model.moments[first : last + 1]:
        if moment.operator == OUTSIDE:
            moved = _moved(moved, before, moment.live)
        before = moment.live
    return rates.line(block.outside_flops_per_sample, moved)


def _time(
    flops_per_sample: float,
    forward_bytes: float,
    backward_bytes: float,
    index: int,
    moved: Traffic,
    rates: _Rates,
    more_per_sample: tuple[float, float] = (0.0, 0.0),
) -> OperatorTime:
    def along(phase: Phase, flops: float, fixed: float) -> Line:
        activations, more = moved.get((index, phase), Line()), more_per_sample[phase == "backward"]
        return rates.line(flops, activations.plus(Line(fixed=fixed, per_sample=more)))

    forward_flops = FORWARD_SHARE * flops_per_sample
    return OperatorTime(
        forward=along("forward", forward_flops, forward_bytes),
        backward=along("backward", flops_per_sample - forward_flops, backward_bytes),
    )


def _activation_traffic(model: ModelDescription) -> Traffic:
    """Bytes that activations move, by operator (or ``OUTSIDE``) and phase, over the batch size.

    A moment moves ``TRAFFIC_PER_LIVE_BYTE`` times the change of the live bytes since the moment before it.
    """
    moved: Traffic = {}
    before = Line()
    for moment in model.moments:
        key = (moment.operator, moment.phase)
        moved[key] = _moved(moved.get(key, Line()), before, moment.live)
        before = moment.live
    return moved


def _moved(so_far: Line, before: Line, after: Line) -> Line:
    """What was moved, and what the change from one moment to the next moves."""
    return Line(
        fixed=so_far.fixed + TRAFFIC_PER_LIVE_BYTE * abs(after.fixed - before.fixed),
        per_sample=so_far.per_sample + TRAFFIC_PER_LIVE_BYTE * abs(after.per_sample - before.per_sample),
    )

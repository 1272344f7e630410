"""What a choice costs: (operator, choice, cluster, batch size) -> seconds and bytes.

Paper, equation 2: ``t = k (N - 1)(alpha + beta P / N) + b gamma`` with k = 2 for DP and 3 for ZDP. Here each
collective has its own fitted alpha and beta (``CollectiveFit``), so k is spelled out, for each slice:

    dp     1 all-reduce of the gradients, once per optimizer step
    zdp2   1 all-gather and 1 reduce-scatter in every micro-batch
    zdp    2 all-gathers and 1 reduce-scatter in every micro-batch; 3 all-gathers in a block that is recomputed

These are world-wide, in one stage or two, or inside a node; then an all-reduce between nodes, once per optimizer step,
is added (``topology``).

A slice has its own latencies. Small parameters (``ParameterInfo.small``) ride in the buckets of replicated gradients
in every mode, and so does all but the weight of an operator that is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_osdp.planning.choices import Choice, Mode, slice_sizes
from lightning_osdp.planning.cluster import Cluster, ComputeTimes, OperatorTime
from lightning_osdp.planning.operators import Line, Operator, ParameterInfo
from lightning_osdp.planning.topology import exchange, gather_copy, sharding_ranks

BUCKET_BYTES = 25 << 20
"""Replicated gradients are copied into buckets of up to this size (PyTorch DDP's default)."""

ALONE_BYTES = {"cpu": 1 << 20, "cuda": BUCKET_BYTES}
"""A replicated gradient of at least this size is reduced where it is. On a CPU a copy costs more than a collective's
latency from about 1 MiB on; on CUDA copies are nearly free and large messages are faster."""


class Part(NamedTuple):
    """A parameter, or a slice of one, with its mode and its bytes when whole."""

    mode: Mode
    parameter_bytes: int
    gradient_bytes: int
    """0 if it is frozen."""
    optimizer_bytes: int
    unit: int
    """Parts of the same number are gathered together: all of an operator that is whole, each slice of one that is
    split."""

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only a piece of it."""
        return self.mode != Mode.DP


class TimeCost(NamedTuple):
    """Seconds in one optimizer step."""

    compute_s: float
    """Forward, backward and the optimizer's update."""
    communication_s: float
    """What the step waits for: communication that compute does not hide."""

    @property
    def total_s(self) -> float:
        """Their sum."""
        return self.compute_s + self.communication_s


class CommunicationCost(NamedTuple):
    """Seconds of collectives, hidden or not."""

    once_s: float
    """In each optimizer step."""
    each_s: float
    """In each micro-batch."""


class Footprint(NamedTuple):
    """Bytes on one rank, by when they are there (``timeline`` adds them up)."""

    states: float
    """Parameters and optimizer states: always."""
    gradients: float
    """What is kept of gradients: replicated ones from the operator's backward on, parts from its end on."""
    replicated_gradients: float
    """The first of these; they stand beside accumulated ones while the operator runs backward."""
    kept: float
    """Whole parameters that stay from its forward to its backward (zdp2)."""
    forward: float
    """Whole parameters that are there while it runs forward, and again while it is recomputed (zdp)."""
    backward: float
    """Whole parameters that are there while it runs backward."""
    transient: float
    """Whole gradients and the copies that their reduction makes, while it runs backward."""
    bucketed: float
    """Gradients that are copied into buckets."""
    updated: float
    """Of trainable parameters: what a rank's optimizer works on."""
    largest_update: float
    """The largest of these by itself."""


class MemoryCost(NamedTuple):
    """Bytes on one rank as one sum and one maximum: for people, and as a first guess."""

    resident_bytes: int
    transient_bytes: int


def parts_of(operator: Operator, choice: Choice) -> list[Part]:
    """The operator's parameters and slices under ``choice``."""
    if choice.split_dim is None:
        sharded = operator.sharded_parameters if choice.slices[0] != Mode.DP else ()
        return [_whole(p, choice.slices[0] if p in sharded else Mode.DP) for p in operator.parameters]
    weight = operator.weight
    assert weight is not None, "only operators with a weight are split"
    others = [_whole(p, Mode.DP) for p in operator.parameters if p is not weight]
    return [*others, *_slices(weight, choice)]


def _whole(parameter: ParameterInfo, mode: Mode) -> Part:
    return Part(mode, parameter.parameter_bytes, parameter.gradient_bytes, parameter.optimizer_bytes, 0)


def _slices(weight: ParameterInfo, choice: Choice) -> Iterator[Part]:
    assert choice.split_dim is not None
    length = weight.shape[choice.split_dim]
    for unit, (mode, size) in enumerate(zip(choice.slices, slice_sizes(length, len(choice.slices)), strict=True)):
        parameter, gradient, optimizer = (
            whole * size // length for whole in (weight.parameter_bytes, weight.gradient_bytes, weight.optimizer_bytes)
        )
        yield Part(mode, parameter, gradient, optimizer, unit)


def sharded_elements(operator: Operator, choice: Choice) -> float:
    """Parameters whose states are sharded."""
    whole = sum(p.parameter_bytes for p in operator.parameters)
    sharded = sum(part.parameter_bytes for part in parts_of(operator, choice) if part.sharded)
    return operator.num_parameters * sharded / whole if whole else 0.0


def communication(
    operator: Operator, choice: Choice, cluster: Cluster, *, recomputed: bool = False
) -> CommunicationCost:
    """Seconds of all collectives that ``operator`` causes."""
    among = exchange(cluster, choice.group, choice.two_stage)
    once = each = 0.0
    for part in parts_of(operator, choice):
        if not part.sharded:
            once += _reduction_s(part.gradient_bytes, cluster)
            continue
        gathers = (3 if recomputed else 2) if part.mode == Mode.ZDP else 1
        each += gathers * among.all_gather_s(part.parameter_bytes)
        if part.gradient_bytes:
            each += among.reduce_scatter_s(part.gradient_bytes)
            once += among.between_s(part.gradient_bytes)
    return CommunicationCost(once, each)


def _reduction_s(gradient_bytes: int, cluster: Cluster) -> float:
    """Of a replicated gradient: a small one shares the latency of its bucket."""
    fit, ranks = cluster.link.all_reduce, cluster.ranks
    whole = fit.time_s(gradient_bytes, ranks)
    if gradient_bytes >= _alone_bytes(cluster):
        return whole
    return max(0.0, whole - fit.time_s(0, ranks) * (1 - gradient_bytes / BUCKET_BYTES))


def _alone_bytes(cluster: Cluster) -> int:
    return ALONE_BYTES.get(cluster.device.split(":")[0], BUCKET_BYTES)


def footprint(operator: Operator, choice: Choice, cluster: Cluster) -> Footprint:
    """Bytes that ``operator`` takes on one rank, by when they are there."""
    parts, ranks = parts_of(operator, choice), sharding_ranks(cluster, choice.group)
    replicated = [part for part in parts if not part.sharded]
    sharded = [part for part in parts if part.sharded]
    units = [[part for part in sharded if part.unit == unit] for unit in sorted({part.unit for part in sharded})]
    gathered = [
        sum(part.parameter_bytes for part in unit) * (1 + gather_copy(cluster, choice.group, choice.two_stage))
        if unit[0].mode == Mode.ZDP
        else 0
        for unit in units
    ]
    updates = [part.gradient_bytes for part in replicated] + [part.gradient_bytes / ranks for part in sharded]
    return Footprint(
        states=sum(part.parameter_bytes + part.optimizer_bytes for part in replicated)
        + sum(-(-(part.parameter_bytes + part.optimizer_bytes) // ranks) for part in sharded),
        gradients=sum(updates),
        replicated_gradients=sum(part.gradient_bytes for part in replicated),
        kept=sum(part.parameter_bytes for part in sharded if part.mode == Mode.ZDP2),
        forward=max(gathered, default=0),
        backward=max(gathered, default=0),
        transient=max((_reduced(unit, sharded, cluster, ranks) for unit in units), default=0.0),
        bucketed=sum(
            p.gradient_bytes for p in replicated if p.gradient_bytes < _alone_bytes(cluster) and cluster.ranks > 1
        ),
        updated=sum(updates),
        largest_update=max(updates, default=0.0),
    )


def _reduced(unit: list[Part], sharded: list[Part], cluster: Cluster, ranks: int) -> float:
    """While a unit's gradient is reduced: it, and beyond the freed whole parameter its part and the reduction's copy.

    Of an operator that is split, the parts of its other slices' gradients are there as well.
    """
    gradient, everything = (sum(part.gradient_bytes for part in parts) for parts in (unit, sharded))
    reduction = gradient / ranks + gradient * cluster.reduce_copy
    whole = sum(part.parameter_bytes for part in unit)
    return gradient + max(0.0, reduction - whole) + (everything - gradient) / ranks


def memory_cost(footprint: Footprint) -> MemoryCost:
    """What is there all the time or from forward to backward, and what comes on top while the operator itself runs."""
    resident = footprint.states + footprint.gradients + footprint.kept
    transient = max(footprint.forward, footprint.backward + footprint.transient)
    return MemoryCost(round(resident), round(transient))


def compute_lines(operator_time: OperatorTime, choice: Choice) -> tuple[Line, Line]:
    """Forward and backward seconds over the batch size.

    Raises:
        KeyError: that way of splitting was not measured.
    """
    if choice.split_dim is None:
        return operator_time.forward, operator_time.backward
    for split in operator_time.splits:
        if (split.dim, split.slices) == (choice.split_dim, len(choice.slices)):
            return split.forward, split.backward
    raise KeyError(f"{len(choice.slices)} slices along dimension {choice.split_dim} were not measured")


def engine_cost(operator: Operator, choice: Choice, cluster: Cluster, *, recomputed: bool = False) -> CommunicationCost:
    """Seconds that the engine itself takes for an operator (``Cluster.engine``): its hooks and copies.

    Replicated gradients are packed once in an optimizer step, and only those that are not reduced where they are. A
    unit that is recomputed runs forward twice, which is half as much again.
    """
    if cluster.ranks == 1:
        return CommunicationCost(0.0, 0.0)
    parts = parts_of(operator, choice)
    once = each = 0.0
    for part in parts:
        if not part.sharded and part.gradient_bytes:
            packed = part.gradient_bytes if part.gradient_bytes < _alone_bytes(cluster) else 0
            once += cluster.engine.dp.time_s(packed)
    for number in {part.unit for part in parts if part.sharded}:
        unit = [part for part in parts if part.sharded and part.unit == number]
        own = cluster.engine.zdp if unit[0].mode == Mode.ZDP else cluster.engine.zdp2
        each += own.time_s(sum(part.parameter_bytes for part in unit)) * (1.5 if recomputed else 1)
    return CommunicationCost(once, each)


def time_cost(
    operator: Operator,
    choice: Choice,
    cluster: Cluster,
    compute: ComputeTimes,
    operator_time: OperatorTime,
    batch_size: int,
    accumulation: int = 1,
    *,
    recomputed: bool = False,
) -> TimeCost:
    """Seconds that ``operator`` adds to one optimizer step of ``accumulation`` micro-batches."""
    forward, backward = (line.at(batch_size) for line in compute_lines(operator_time, choice))
    passes = accumulation * (forward * (2 if recomputed else 1) + backward)
    once, each = communication(operator, choice, cluster, recomputed=recomputed)
    exposed = max(0.0, once + accumulation * each - cluster.overlap * passes)
    update = compute.optimizer_s_per_byte * footprint(operator, choice, cluster).updated
    own = engine_cost(operator, choice, cluster, recomputed=recomputed)
    return TimeCost(passes + update + own.once_s + accumulation * own.each_s, exposed)

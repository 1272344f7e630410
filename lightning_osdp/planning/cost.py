"""What a choice costs: (operator, mode, cluster, batch size) -> seconds and bytes.

Paper, equation 2: ``t = k (N - 1)(alpha + beta P / N) + b gamma`` with k = 2 for DP and 3 for ZDP. Here each
collective has its own fitted alpha and beta (``CollectiveFit``), so k is spelled out:

    dp     1 all-reduce of the gradients, once per optimizer step
    zdp2   1 all-gather and 1 reduce-scatter in every micro-batch
    zdp    2 all-gathers and 1 reduce-scatter in every micro-batch

Small parameters (``ParameterInfo.small``) ride in the buckets of replicated gradients in every mode.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import Cluster, ComputeTimes, OperatorTime
from lightning_osdp.planning.operators import Operator, ParameterInfo

BUCKET_BYTES = 25 << 20
"""Replicated gradients are copied into buckets of up to this size (PyTorch DDP's default)."""

ALONE_BYTES = {"cpu": 1 << 20, "cuda": BUCKET_BYTES}
"""A replicated gradient of at least this size is reduced where it is. On a CPU a copy costs more than a collective's
latency from about 1 MiB on; on CUDA copies are nearly free and large messages are faster."""


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


class MemoryCost(NamedTuple):
    """Bytes on one rank, as the search sees them: a sum and a maximum (``timeline`` says when each really occurs)."""

    resident_bytes: int
    transient_bytes: int


def split_states(operator: Operator, mode: Mode) -> tuple[tuple[ParameterInfo, ...], tuple[ParameterInfo, ...]]:
    """The operator's parameters as (sharded, replicated) under ``mode``."""
    if mode == Mode.DP:
        return (), operator.parameters
    sharded = operator.sharded_parameters
    return sharded, tuple(p for p in operator.parameters if p not in sharded)


def communication_s(operator: Operator, mode: Mode, cluster: Cluster, accumulation: int = 1) -> float:
    """Seconds of all collectives that ``operator`` causes in one optimizer step, hidden or not."""
    sharded, replicated = split_states(operator, mode)
    link, ranks = cluster.link, cluster.ranks
    alone_bytes = ALONE_BYTES.get(cluster.device.split(":")[0], BUCKET_BYTES)
    seconds = 0.0
    for parameter in replicated:
        size = parameter.gradient_bytes
        whole = link.all_reduce.time_s(size, ranks)
        shared = whole - link.all_reduce.time_s(0, ranks) * (1 - size / BUCKET_BYTES)
        seconds += whole if size >= alone_bytes else max(0.0, shared)
    gathers = 2 if mode == Mode.ZDP else 1
    for parameter in sharded:
        once = gathers * link.all_gather.time_s(parameter.parameter_bytes, ranks)
        if parameter.trainable:
            once += link.reduce_scatter.time_s(parameter.gradient_bytes, ranks)
        seconds += once * accumulation
    return seconds


def engine_s(operator: Operator, mode: Mode, cluster: Cluster, accumulation: int = 1) -> float:
    """Seconds that the engine itself takes for ``operator`` in one optimizer step (``Cluster.engine``).

    Replicated gradients are packed once, and only those that are not reduced where they are.
    """
    if cluster.ranks == 1:
        return 0.0
    sharded, replicated = split_states(operator, mode)
    alone_bytes = ALONE_BYTES.get(cluster.device.split(":")[0], BUCKET_BYTES)
    sizes = [p.gradient_bytes for p in replicated if p.trainable]
    seconds = sum(cluster.engine.dp.time_s(size if size < alone_bytes else 0) for size in sizes)
    if sharded:
        own = cluster.engine.zdp if mode == Mode.ZDP else cluster.engine.zdp2
        seconds += own.time_s(sum(p.parameter_bytes for p in sharded)) * accumulation
    return seconds


def updated_bytes(operator: Operator, mode: Mode, cluster: Cluster) -> float:
    """Bytes of trainable parameters that one rank's optimizer updates."""
    sharded, replicated = split_states(operator, mode)
    return sum(p.gradient_bytes for p in replicated) + sum(p.gradient_bytes for p in sharded) / cluster.ranks


def time_cost(
    operator: Operator,
    mode: Mode,
    cluster: Cluster,
    compute: ComputeTimes,
    operator_time: OperatorTime,
    batch_size: int,
    accumulation: int = 1,
) -> TimeCost:
    """Seconds that ``operator`` adds to one optimizer step of ``accumulation`` micro-batches."""
    passes = accumulation * operator_time.at(batch_size)
    exposed = max(0.0, communication_s(operator, mode, cluster, accumulation) - cluster.overlap * passes)
    update = compute.optimizer_s_per_byte * updated_bytes(operator, mode, cluster)
    own = engine_s(operator, mode, cluster, accumulation)
    return TimeCost(passes + update + own, exposed)


def memory_cost(operator: Operator, mode: Mode, cluster: Cluster) -> MemoryCost:
    """Bytes that ``operator`` takes: its states all the time, and what it needs only while it runs.

    zdp2 keeps its parameters whole from forward to backward, so they count as resident. While a sharded operator's
    gradient is reduced, the whole gradient and the reduction's copy are there, or before that the whole parameter.
    """
    sharded, replicated = split_states(operator, mode)
    resident = sum(p.state_bytes for p in replicated)
    resident += sum(-(-p.state_bytes // cluster.ranks) for p in sharded)
    whole = sum(p.parameter_bytes for p in sharded)
    gradient = sum(p.gradient_bytes for p in sharded)
    transient = gradient + max(0 if mode == Mode.ZDP2 else whole, int(gradient * cluster.reduce_copy))
    if mode == Mode.ZDP2:
        resident += whole
    return MemoryCost(resident, max(transient, whole if mode == Mode.ZDP else 0))

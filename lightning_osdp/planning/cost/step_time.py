"""What a choice costs: (operator, choice, cluster, batch size) -> seconds and bytes.

Paper, equation 2: ``t = k (N - 1)(alpha + beta P / N) + b gamma`` with k = 2 for DP and 3 for ZDP. Here each
collective has its own fitted alpha and beta (``CollectiveFit``), so k is spelled out, for each slice:

    dp     1 all-reduce of the gradients, once per optimizer step
    zdp2   1 all-gather and 1 reduce-scatter in every micro-batch
    zdp    2 all-gathers and 1 reduce-scatter in every micro-batch; 3 all-gathers in a block that is recomputed, but
           2 if the whole block is one unit: what is gathered for its second forward stays for its backward

These are world-wide, in one stage or two, or inside a node; then an all-reduce between nodes, once per optimizer step,
is added (``topology``).

What is in one unit is gathered together; gradients are reduced one by one, as they come, or together if they are few
bytes (``COALESCE_BYTES``). A slice has its own latencies. Small parameters (``ParameterInfo.is_small``) ride in the
buckets of replicated gradients in every mode. What the engine itself takes for each unit and each replicated parameter
is measured, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from lightning_osdp.planning.cost.sharding_scopes import (
    COALESCE_BYTES,
    ScopeLinks,
    all_gather_copy_factor,
    scope_links,
    sharding_ranks,
)
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope, slice_sizes
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.model import LinearInBatch, Operator, ParameterInfo

BUCKET_BYTES = 25 << 20
"""Replicated gradients are copied into buckets of up to this size (PyTorch DDP's default)."""

UNBUCKETED_BYTES = {"cpu": 1 << 20, "cuda": BUCKET_BYTES}
"""A replicated gradient of at least this size is reduced where it is. On a CPU a copy costs more than a collective's
latency from about 1 MiB on; on CUDA copies are nearly free and large messages are faster."""

EXTRA_PARAM_OVERHEAD = 0.5
"""What each further parameter of a unit adds to what the engine takes for the unit, as a share of that: its gradient's
hooks and reduction, but no gather."""

RECOMPUTE_OVERHEAD = 1.5
"""By how much more often the engine is at work for a unit in a block that is recomputed: a forward more than a forward
and a backward."""


class ParamShard(NamedTuple):
    """A parameter, or equal slices of one, with their mode and the bytes of one when whole."""

    mode: Mode
    parameter_bytes: int
    gradient_bytes: int
    """0 if it is frozen."""
    optimizer_bytes: int
    num_slices: int = 1
    """How many slices; each is a unit of its own."""
    gradient_order: int = 0
    """``ParameterInfo.gradient_order``."""
    is_slice: bool = False
    """Whether it is a slice; else a whole parameter, a unit of its own where it lies beside slices."""

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only a piece of it."""
        return self.mode != Mode.DP


class TimeCost(NamedTuple):
    """Seconds in one optimizer step."""

    compute_s: float
    """Forward, backward and the optimizer's update."""
    communication_s: float
    """What the step waits for: communication that compute does not hide."""


def is_prefetched(unit_bytes: int, cluster: Cluster) -> bool:
    """Whether a unit of that size is gathered while the one before computes, and its gradients are reduced while the
    next one does."""
    return cluster.supports_prefetch and unit_bytes <= cluster.prefetch_max_bytes


class PerStepTime(NamedTuple):
    """Seconds by how often they are spent."""

    per_step_s: float
    """In each optimizer step."""
    per_microbatch_s: float
    """In each micro-batch."""


class Footprint(NamedTuple):
    """Bytes on one rank, by when they are there (``timeline`` adds them up)."""

    states: float
    """Parameters and optimizer states: always."""
    replicated_gradients: float
    """From the operator's backward on."""
    sharded_gradients: float
    """A rank's parts: once they are reduced, so after its backward. Not of what is updated in the backward pass."""
    unsharded_between_passes: float
    """Whole parameters that stay from its forward to its backward (zdp2)."""
    unsharded_while_running: float
    """Whole parameters that are there only while it runs, forward or backward (zdp)."""
    transient: float
    """Whole gradients and what their reduction takes, while it runs backward."""
    forward_per_sample: float
    """What splitting needs more than the traced operator while it runs forward, for each sample."""
    backward_per_sample: float
    """The same while it runs backward."""
    bucketed: float
    """Gradients that are copied into buckets."""
    prefetched_parameters: float
    """Of its first unit: whole parameters that are gathered already while the unit before runs."""
    inflight_gradient: float
    """Of its last unit: whole gradients that are still being reduced while the next unit runs backward."""
    slice_gradient_copy: float
    """Of a split operator: what is there twice while the gradients of its slices are copied into the weight's."""
    local_trainable: float
    """Of trainable parameters: what a rank's optimizer works on."""
    largest_local_trainable: float
    """The largest of these by itself."""
    eval_unsharded: float
    """Whole parameters while its forward runs without autograd, in every mode."""
    checkpoint_tensor: float
    """While the largest of its sharded tensors is made whole to be saved, the slice under way beside it."""
    unsharded_state: float
    """All of its sharded parameters and optimizer states when whole."""

    @property
    def gradients(self) -> float:
        """Those that are there after its backward."""
        return self.replicated_gradients + self.sharded_gradients

    def with_heap_growth(self, growth: float) -> Footprint:
        """With what is freed within a step larger by a share: what that takes in a heap where it stays."""
        stays = ("states", "local_trainable", "eval_unsharded", "checkpoint_tensor", "unsharded_state")
        grown = {name: (1 + growth) * size for name, size in self._asdict().items() if name not in stays}
        return self._replace(**grown) if growth else self


def shards_of(operator: Operator, choice: ShardingChoice) -> list[ParamShard]:
    """The operator's parameters and slices under ``choice``."""
    if choice.split_dim is None:
        sharded = operator.shardable_parameters if choice.slices[0] != Mode.DP else ()
        return [_unsliced_shard(p, choice.slices[0] if p in sharded else Mode.DP) for p in operator.parameters]
    weight = operator.weight
    assert weight is not None, "only operators with a weight are split"
    first = next((mode for mode in choice.slices if mode != Mode.DP), Mode.DP)
    # A large bias is sharded like the first slice that is.
    others = [_unsliced_shard(p, Mode.DP if p.is_small else first) for p in operator.parameters if p is not weight]
    return [*others, *_slice_shards(weight, choice)]


def _unsliced_shard(parameter: ParameterInfo, mode: Mode) -> ParamShard:
    sizes = (parameter.parameter_bytes, parameter.gradient_bytes, parameter.optimizer_bytes)
    return ParamShard(mode, *sizes, gradient_order=parameter.gradient_order)


def _slice_shards(weight: ParameterInfo, choice: ShardingChoice) -> Iterator[ParamShard]:
    assert choice.split_dim is not None
    length = weight.shape[choice.split_dim]
    whole = weight.parameter_bytes
    counts = Counter(zip(choice.slices, slice_sizes(length, len(choice.slices)), strict=True))
    for (mode, size), count in counts.items():
        own = whole * size // length
        gradient_bytes, optimizer_bytes = own if weight.trainable else 0, weight.optimizer_bytes * size // length
        yield ParamShard(mode, own, gradient_bytes, optimizer_bytes, count, is_slice=True)


def num_sharded_elements(operator: Operator, choice: ShardingChoice) -> float:
    """Parameters whose states are sharded."""
    whole = sum(p.parameter_bytes for p in operator.parameters)
    sharded = sum(part.parameter_bytes * part.num_slices for part in shards_of(operator, choice) if part.is_sharded)
    return operator.num_parameters * sharded / whole if whole else 0.0


def communication_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> PerStepTime:
    """Seconds of all collectives that ``operator`` causes."""
    among = scope_links(cluster, choice.scope, choice.hierarchical)
    parts, each = shards_of(operator, choice), 0.0
    once = sum(part.num_slices * _all_reduce_s(part.gradient_bytes, cluster) for part in parts if not part.is_sharded)
    for unit in _gather_units(parts, choice):
        each += unit[0].num_slices * _unit_comm_s(
            unit, among, cluster, recomputed=recomputed and operator.num_wrapped == 1
        )
        once += _inter_node_s(unit, among)
    return PerStepTime(once, each)


def overlapped_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> PerStepTime:
    """Seconds of ``communication_time`` that go on beside compute, if there is so much of that: replicated gradients are
    reduced, and sharded ones averaged between nodes, while the last backward pass goes on (once), and units may run
    ahead in all passes (``runs_ahead``). What collectives take less in the engine than their fits say (``engine_time``) is
    no part of it."""
    among, each = scope_links(cluster, choice.scope, choice.hierarchical).overlapped_part(), 0.0
    parts, share = shards_of(operator, choice), cluster.link.all_reduce.overlap_fraction
    once = share * sum(
        part.num_slices * _all_reduce_s(part.gradient_bytes, cluster) for part in parts if not part.is_sharded
    )
    for unit in _gather_units(parts, choice):
        once += _inter_node_s(unit, among)
        if is_prefetched(_unit_bytes(unit), cluster):
            fitted_s = _unit_comm_s(unit, among, cluster, recomputed=recomputed and operator.num_wrapped == 1)
            each += unit[0].num_slices * max(
                0.0, fitted_s + min(0.0, _unit_engine_s(unit, cluster, recomputed=recomputed))
            )
    return PerStepTime(once, each)


def _unit_comm_s(unit: list[ParamShard], links: ScopeLinks, cluster: Cluster, *, recomputed: bool) -> float:
    """Of the gathers and reduce-scatters of a unit in one micro-batch; ``recomputed``: it is gathered for a second forward,
    too."""
    gathers = (3 if recomputed else 2) if unit[0].mode == Mode.ZDP else 1
    gradients = _gradient_sizes(unit)
    if _coalesces_gradients(unit, cluster):
        reductions_s = links.reduce_scatter_s(sum(gradients), len(gradients))
    else:
        reductions_s = sum(map(links.reduce_scatter_s, gradients))
    return gathers * links.all_gather_s(_unit_bytes(unit), len(unit)) + reductions_s


def _inter_node_s(unit: list[ParamShard], links: ScopeLinks) -> float:
    """To average a unit's gradients between nodes."""
    return unit[0].num_slices * sum(map(links.inter_node_s, _gradient_sizes(unit)))


def _gradient_sizes(unit: list[ParamShard]) -> list[int]:
    """Bytes of each of its gradients."""
    return [part.gradient_bytes for part in unit if part.gradient_bytes]


def _coalesces_gradients(unit: list[ParamShard], cluster: Cluster) -> bool:
    """Whether a unit's gradients are reduced as one, when all have come, and not one by one."""
    gradients = _gradient_sizes(unit)
    return (
        len(gradients) > 1
        and sum(gradients) <= COALESCE_BYTES
        and cluster.device.split(":")[0] == "cpu"
        and cluster.supports_prefetch
        and not is_prefetched(_unit_bytes(unit), cluster)
    )


def _unit_bytes(unit: list[ParamShard]) -> int:
    """Of one unit's whole parameters."""
    return sum(part.parameter_bytes for part in unit)


def _all_reduce_s(gradient_bytes: int, cluster: Cluster) -> float:
    """Of a replicated gradient: a small one shares the latency of its bucket."""
    fit, ranks = cluster.link.all_reduce, cluster.ranks
    whole = fit.time_s(gradient_bytes, ranks)
    if gradient_bytes >= _unbucketed_bytes(cluster):
        return whole
    return max(0.0, whole - fit.time_s(0, ranks) * (1 - gradient_bytes / BUCKET_BYTES))


def _unbucketed_bytes(cluster: Cluster) -> int:
    return UNBUCKETED_BYTES.get(cluster.device.split(":")[0], BUCKET_BYTES)


def engine_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> PerStepTime:
    """Seconds that the engine itself takes for ``operator`` (``Cluster.engine_time``), by unit and replicated parameter.

    Replicated gradients are packed once, and only those that are not reduced where they are.
    """
    if cluster.ranks == 1:
        return PerStepTime(0.0, 0.0)
    parts, alone_bytes = shards_of(operator, choice), _unbucketed_bytes(cluster)
    packed = [part for part in parts if not part.is_sharded and part.gradient_bytes]
    once = sum(
        part.num_slices * cluster.engine.dp.time_s(part.gradient_bytes if part.gradient_bytes < alone_bytes else 0)
        for part in packed
    )
    units = _gather_units(parts, choice)
    return PerStepTime(
        once, sum(unit[0].num_slices * _unit_engine_s(unit, cluster, recomputed=recomputed) for unit in units)
    )


def _unit_engine_s(unit: list[ParamShard], cluster: Cluster, *, recomputed: bool) -> float:
    """Of a unit in one micro-batch."""
    own = cluster.engine.zdp if unit[0].mode == Mode.ZDP else cluster.engine.zdp2
    seconds = own.time_s(_unit_bytes(unit)) + EXTRA_PARAM_OVERHEAD * (len(unit) - 1) * own.fixed_s
    return seconds * (RECOMPUTE_OVERHEAD if recomputed else 1.0)


def calibration_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> PerStepTime:
    """Seconds beyond those parts, collectives and engine together, as rehearsals have shown (``CalibrationFactors``); below 0 where
    they take less. It counts as communication: ranks wait for each other, or don't have to."""
    more = cluster.engine.calibration.for_kinds(calibration_kinds(operator, choice)) if cluster.ranks > 1 else 0.0
    if not more:
        return PerStepTime(0.0, 0.0)
    pair = communication_time, engine_time
    once, each = zip(*(part(operator, choice, cluster, recomputed=recomputed) for part in pair), strict=True)
    return PerStepTime(more * sum(once), more * sum(each))


def calibration_kinds(operator: Operator, choice: ShardingChoice) -> list[str]:
    """What counts of ``CalibrationFactors``: the choice's last mode, and how it comes to be gathered."""
    mode = max(choice.slices, key=list(Mode).index)
    sharded = mode != Mode.DP
    also = {
        "wrapped": sharded and operator.num_wrapped > 1,
        "split": choice.split_dim is not None,
        "node": sharded and choice.scope == ShardingScope.NODE,
        "hierarchical": sharded and choice.hierarchical,
    }
    return [mode.value, *(kind for kind, counts in also.items() if counts)]


def _gather_units(shards: list[ParamShard], choice: ShardingChoice) -> list[list[ParamShard]]:
    """The sharded parts that are gathered together: all of an operator that is whole, each slice of one that is not."""
    sharded = [part for part in shards if part.is_sharded]
    if choice.split_dim is not None:
        return [[part] for part in sharded]
    return [sharded] if sharded else []


def footprint(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, updated_in_backward: bool = False
) -> Footprint:
    """Bytes that ``operator`` takes on one rank, by when they are there.

    Args:
        operator: of the model.
        choice: for it.
        cluster: the ranks.
        updated_in_backward: whether what can be is updated as soon as its gradient is there (``updates_at_step``).
    """
    parts, ranks = shards_of(operator, choice), sharding_ranks(cluster, choice.scope)
    replicated, units = [part for part in parts if not part.is_sharded], _gather_units(parts, choice)
    sharded = [part for unit in units for part in unit]
    copies = 1 + all_gather_copy_factor(cluster, choice.scope, choice.hierarchical)
    gathered = [copies * _unit_bytes(unit) for unit in units]
    ahead, pending, next_one, last_one = _prefetch_bytes(units, gathered, choice, cluster, ranks)
    whole = sum(part.gradient_bytes * part.num_slices for part in replicated)
    pieces = sum(part.gradient_bytes * part.num_slices for part in sharded) / ranks
    at_once = updated_in_backward and not updates_at_step(choice)
    packed = [part for part in replicated if part.gradient_bytes < _unbucketed_bytes(cluster) and cluster.ranks > 1]
    updates = _local_trainable_sizes(parts, ranks)
    forward, backward = _slicing_bytes_per_sample(operator, choice)
    saved = operator.shardable_parameters if units else ()
    slice_ = max((part.parameter_bytes for part in sharded if part.is_slice), default=0)
    transient = max((_transient_bytes(unit, pieces, cluster, ranks) for unit in units), default=0.0) + last_one
    collected = _slice_copy_bytes(parts, updates, cluster, ranks)
    return Footprint(
        states=sum((part.parameter_bytes + part.optimizer_bytes) * part.num_slices for part in replicated)
        + sum(-(-(part.parameter_bytes + part.optimizer_bytes) // ranks) * part.num_slices for part in sharded),
        replicated_gradients=whole,
        sharded_gradients=0.0 if at_once else pieces,
        unsharded_between_passes=sum(
            part.parameter_bytes * part.num_slices for part in sharded if part.mode == Mode.ZDP2
        ),
        unsharded_while_running=next_one
        + max((size for unit, size in zip(units, gathered, strict=True) if unit[0].mode == Mode.ZDP), default=0),
        transient=max(transient, pieces + collected) if at_once and collected else transient,
        forward_per_sample=forward,
        backward_per_sample=backward,
        bucketed=sum(part.gradient_bytes * part.num_slices for part in packed),
        prefetched_parameters=ahead,
        inflight_gradient=pending,
        slice_gradient_copy=0.0 if at_once else collected,
        local_trainable=sum(updates),
        largest_local_trainable=max(updates, default=0.0),
        eval_unsharded=max(gathered, default=0),
        checkpoint_tensor=max((p.parameter_bytes + (slice_ if p is operator.weight else 0) for p in saved), default=0),
        unsharded_state=sum(p.parameter_bytes + p.optimizer_bytes for p in saved),
    )


def updates_at_step(choice: ShardingChoice) -> bool:
    """Whether gradients wait for the optimizer's step even where sharded parameters are updated in the backward pass:
    those of weights with replicated slices, and those that are averaged between nodes, at the pass's end."""
    return Mode.DP in choice.slices or choice.scope == ShardingScope.NODE


def _local_trainable_sizes(shards: list[ParamShard], ranks: int) -> list[float]:
    """Bytes of gradients as the optimizer sees them: a weight's slices together, other parameters by themselves."""
    local = [part.gradient_bytes * part.num_slices / (ranks if part.is_sharded else 1) for part in shards]
    whole = [size for size, part in zip(local, shards, strict=True) if not part.is_slice]
    slices = [size for size, part in zip(local, shards, strict=True) if part.is_slice]
    return [*whole, sum(slices)] if slices else whole


def _slice_copy_bytes(
    shards: list[ParamShard], local_trainable_sizes: list[float], cluster: Cluster, ranks: int
) -> float:
    """While the gradients of slices are copied into the weight's, each freed at once.

    On a CPU memory is taken as it is written to, so that a slice's is there twice; an allocator like CUDA's takes all
    of it at once.
    """
    slices = [part for part in shards if part.is_slice]
    if not slices:
        return 0.0
    if cluster.device.split(":")[0] != "cpu":
        return max(local_trainable_sizes)
    return max(part.gradient_bytes / ranks if part.is_sharded else float(part.gradient_bytes) for part in slices)


def _transient_bytes(unit: list[ParamShard], gradient_shard_bytes: float, cluster: Cluster, ranks: int) -> float:
    """The most that reducing a unit's gradients takes on top of its gathered parameters.

    Gradients come in turns, and each parameter is freed then; a slice is freed before its gradient is made.
    """
    if unit[0].is_slice:
        return _reduction_bytes(unit, gradient_shard_bytes, cluster, ranks, freed_before_gradient=True)
    turns = [
        [part for part in unit if part.gradient_order == turn]
        for turn in sorted({part.gradient_order for part in unit})
    ]
    if _coalesces_gradients(unit, cluster):
        return _coalesced_reduction_bytes(turns, ranks)
    if len(turns) == 1:
        return _reduction_bytes(unit, gradient_shard_bytes, cluster, ranks)
    most = freed = 0.0
    for together in turns:
        own = sum(part.gradient_bytes for part in together) / ranks
        most = max(most, _reduction_bytes(together, own, cluster, ranks) - freed)
        freed += sum(part.parameter_bytes for part in together) - own
    return most


def _coalesced_reduction_bytes(shards_by_order: list[list[ParamShard]], ranks: int) -> float:
    """The same where gradients are held until all have come: then with their sums, which are the pieces, and what other
    ranks send beside what is received right there."""
    most = held = 0.0
    for together in shards_by_order:
        gradients = sum(part.gradient_bytes for part in together)
        most = max(most, held + gradients)
        held += gradients - sum(part.parameter_bytes for part in together)
    every = sum(part.gradient_bytes for together in shards_by_order for part in together)
    return max(most, held + every * (1 + max(0, ranks - 2)) / ranks)


def _reduction_bytes(
    unit: list[ParamShard],
    gradient_shard_bytes: float,
    cluster: Cluster,
    ranks: int,
    *,
    freed_before_gradient: bool = False,
) -> float:
    """While a unit's gradient is reduced to a piece: it, what that takes, and the pieces of the operator's other units.

    The whole parameter is freed before, if not before the gradient was made (``freed_before_gradient``): the larger of the two counts.
    """
    gradient = sum(part.gradient_bytes for part in unit)
    own = gradient / ranks
    buffers = gradient * cluster.reduce_scatter_copy_factor + min(
        cluster.reduce_scatter_buffer_bytes, max(0, min(2, ranks - 2)) * own
    )
    reduction = own + buffers - sum(part.parameter_bytes for part in unit)
    return (
        (max(0.0, gradient + reduction) if freed_before_gradient else gradient + max(0.0, reduction))
        + gradient_shard_bytes
        - own
    )


class PrefetchBytes(NamedTuple):
    """Bytes that running ahead takes."""

    prefetched_parameters: float = 0.0
    """``Footprint.prefetched_parameters``."""
    inflight_gradient: float = 0.0
    """``Footprint.pending``."""
    next_slice: float = 0.0
    """While the operator itself runs: its next slice."""
    previous_gradient: float = 0.0
    """While it runs backward: the gradient of its last slice, or of the parameter before."""


def _prefetch_bytes(
    units: list[list[ParamShard]], unsharded_bytes: list[float], choice: ShardingChoice, cluster: Cluster, ranks: int
) -> PrefetchBytes:
    """Of an operator's units, each ``unsharded_bytes`` so large."""
    running = [at for at, unit in enumerate(units) if is_prefetched(_unit_bytes(unit), cluster)]
    if not running:
        return PrefetchBytes()
    ahead = max(unsharded_bytes[at] for at in running)
    # with what the other ranks but one have sent
    pending = max(part.gradient_bytes for at in running for part in units[at]) * (1 + max(0, ranks - 2) / ranks)
    slices = sum(unit[0].num_slices for unit in units) > 1
    freed = any(units[at][0].mode == Mode.ZDP for at in running)  # those that are kept count from the first one on
    return PrefetchBytes(
        ahead, pending, ahead if slices and freed else 0.0, pending if slices or len(units[0]) > 1 else 0.0
    )


def _slicing_bytes_per_sample(operator: Operator, choice: ShardingChoice) -> tuple[float, float]:
    """Bytes per sample that splitting needs in forward and in backward, on top of what was traced.

    Slices of the input: their gradients before they are joined. Slices of the output: they themselves before they are
    joined, and one more gradient of the input, which is a sum.
    """
    if choice.split_dim is None:
        return 0.0, 0.0
    if choice.split_dim in operator.output_dims:
        return operator.output_per_sample, operator.input_per_sample
    return 0.0, operator.input_per_sample


def forward_backward_time(operator_time: OperatorTime, choice: ShardingChoice) -> tuple[LinearInBatch, LinearInBatch]:
    """Forward and backward seconds over the batch size.

    Raises:
        KeyError: that way of splitting was not measured.
    """
    if choice.split_dim is None:
        return operator_time.forward, operator_time.backward
    for split in operator_time.splits:
        if (split.dim, split.slices) == (choice.split_dim, len(choice.slices)):
            return operator_time.forward.plus(split.forward), operator_time.backward.plus(split.backward)
    raise KeyError(f"{len(choice.slices)} slices along dimension {choice.split_dim} were not measured")


def time_cost(
    operator: Operator,
    choice: ShardingChoice,
    cluster: Cluster,
    compute: ComputeTimes,
    operator_time: OperatorTime,
    batch_size: int,
    accumulation: int = 1,
    *,
    recomputed: bool = False,
) -> TimeCost:
    """Seconds that ``operator`` adds to one optimizer step of ``is_accumulation`` micro-batches."""
    forward, backward = (line.value_at(batch_size) for line in forward_backward_time(operator_time, choice))
    backward_pass = (forward if recomputed else 0.0) + backward
    passes = accumulation * (forward + backward_pass)
    once, each = communication_time(operator, choice, cluster, recomputed=recomputed)
    hidden_once, hidden_each = overlapped_time(operator, choice, cluster, recomputed=recomputed)
    beside = min(max(0.0, passes), min(hidden_once, max(0.0, backward_pass)) + accumulation * hidden_each)
    exposed = max(0.0, once + accumulation * each - beside - cluster.overlap * passes)
    update = compute.optimizer_s_per_byte * footprint(operator, choice, cluster).local_trainable
    own, more = (part(operator, choice, cluster, recomputed=recomputed) for part in (engine_time, calibration_time))
    waited = max(0.0, exposed + more.per_step_s + accumulation * more.per_microbatch_s)
    return TimeCost(passes + update + own.per_step_s + accumulation * own.per_microbatch_s, waited)

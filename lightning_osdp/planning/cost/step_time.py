"""The time of an operator under a choice, in seconds of an optimizer step.

Paper, equation 2: ``t = k (N - 1)(alpha + beta P / N) + b gamma`` with k = 2 for DP and 3 for ZDP. Here each
collective has its own fitted alpha and beta (``CollectiveFit``), so k is spelled out, for each slice:

    dp     1 all-reduce of the gradients, once per optimizer step
    zdp2   1 all-gather and 1 reduce-scatter in every micro-batch
    zdp    2 all-gathers and 1 reduce-scatter in every micro-batch; 3 all-gathers in a block that is recomputed, but
           2 if the whole block is one unit: parameters gathered for its second forward stay for its backward. One less
           where the backward reads no parameter, as an embedding's
    tp     exchanges of activations in every micro-batch (``activation_exchange``), and once per optimizer step 1
           all-reduce of the slices' gradients over the ranks that hold the same slice

Gathers have the type of autocast's casts where these are all that is read; gradients are reduced in their own type, or
in the one that the user gives (``ParameterInfo``). The collectives of sharded weights are among all ranks, in one stage
or two, or inside a node; sharding inside nodes adds an all-reduce between nodes, once per optimizer step
(``sharding_scopes``).

A unit's parameters are gathered together; its gradients are reduced one by one as they appear, or together if they are
small (``COALESCE_BYTES``). Small parameters (``ParameterInfo.is_small``) ride in the buckets of replicated gradients in
every mode. The engine's own time for each unit and each replicated parameter is measured, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_osdp.planning.cost.activation_exchange import ExchangeTime, exchange_s
from lightning_osdp.planning.cost.footprint import footprint
from lightning_osdp.planning.cost.neighbours import Neighbours, neighbours_of_slices
from lightning_osdp.planning.cost.sharding_scopes import ScopeLinks, scope_links
from lightning_osdp.planning.cost.shards import OperatorShards, ShardUnit, shards_of
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.model import LinearInBatch, Operator

EXTRA_PARAM_OVERHEAD = 0.5
"""Engine overhead of each additional parameter in a unit (hooks and reduction of its gradient), as a fraction of the
unit's fixed overhead."""

RECOMPUTE_OVERHEAD = 1.5
"""Factor on engine overhead in recomputed blocks: three passes instead of two."""


class TimeCost(NamedTuple):
    """Seconds in one optimizer step."""

    compute_s: float
    """Forward, backward and the optimizer's update."""
    communication_s: float
    """Communication that compute does not hide."""


class PerStepTime(NamedTuple):
    """Seconds by how often they are spent."""

    per_step_s: float
    """Once in each optimizer step."""
    per_microbatch_s: float

    def total_s(self, accumulation: int) -> float:
        """Return the seconds of an optimizer step with ``accumulation`` micro-batches."""
        return self.per_step_s + accumulation * self.per_microbatch_s


class OverlappedTime(NamedTuple):
    """Seconds of communication that compute can hide, by what it goes on beside (see ``neighbours``)."""

    per_step_s: float
    """Once in each optimizer step, beside the last backward of the operators before it."""
    forward_s: float
    """In each micro-batch, beside the forward of the operators before it."""
    backward_gathers_s: float
    """Beside the backward of the operators after it, a recomputed forward included."""
    early_reductions_s: float
    """Beside its own backward."""
    last_reduction_s: float
    """Beside the backward of the operators before it."""
    between_nodes_s: float
    """Once in each optimizer step over the link between nodes, beside the last backward and its communication."""
    whole_backward_s: float
    """What a micro-batch's backward communicates inside nodes, whether compute can hide it or not."""

    @property
    def per_microbatch_s(self) -> float:
        """Seconds in each micro-batch."""
        return sum(self[1:5])


class Passes(NamedTuple):
    """Seconds of a micro-batch's passes, numbers or arrays."""

    forward_s: Any
    backward_s: Any
    """Without a recomputed forward."""
    again_s: Any
    """The recomputed forward."""


class Beside(NamedTuple):
    """Seconds of the neighbours' passes (``Neighbours`` at a batch size), numbers or arrays."""

    forward_s: Any
    backward_before_s: Any
    backward_after_s: Any


def communication_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> PerStepTime:
    """Return the time of all collectives that ``operator`` causes, overlapped or not."""
    links, shards = scope_links(cluster, choice.scope, choice.hierarchical), shards_of(operator, choice)
    gathers_again = recomputed and operator.num_wrapped == 1
    return PerStepTime(
        all_reduces_s(shards, cluster) + tensor_all_reduces_s(shards, cluster) + inter_node_s(shards, links),
        sum(
            unit.num_slices * sum(unit_communication(unit, links, cluster, recomputed=gathers_again))
            for unit in shards.units
        ),
    )


def overlapped_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> OverlappedTime:
    """Return the part of ``communication_time`` that compute can hide, given enough of it.

    Replicated gradients are reduced, and sharded ones averaged between nodes, during the last backward pass;
    collectives of units overlap all passes, on CUDA those of all units, elsewhere those of prefetched ones.
    """
    whole = scope_links(cluster, choice.scope, choice.hierarchical)
    links = whole.overlapped_part()
    shards, whole_backward_s, hideable = shards_of(operator, choice), 0.0, UnitCommunication(0.0, 0.0, 0.0, 0.0)
    gathers_again = recomputed and operator.num_wrapped == 1
    for unit in shards.units:
        if cluster.has_streams or unit.is_prefetched(cluster):
            own = unit_communication(unit, links, cluster, recomputed=gathers_again)
            hideable = UnitCommunication(
                *(so_far + unit.num_slices * one for so_far, one in zip(hideable, own, strict=True))
            )
        if whole.inter_node is not None:
            by_pass = unit_communication(unit, whole, cluster, recomputed=gathers_again)
            whole_backward_s += unit.num_slices * by_pass.backward_s
    replicated_s = cluster.link.all_reduce.overlap_fraction * all_reduces_s(shards, cluster)
    return OverlappedTime(replicated_s, *hideable, inter_node_s(shards, links), whole_backward_s)


def hidden_s(overlapped: Any, passes: Passes, beside: Beside, accumulation: int, cluster: Cluster) -> Any:
    """Return the seconds of an operator's communication that compute hides in an optimizer step.

    What goes on in a pass shares the link, so together it is hidden by no more than the pass takes. Averages between
    nodes share their link with the reductions of replicated gradients, and go on beside what the operators before wait
    for inside nodes, too.

    Args:
        overlapped: the fields of ``OverlappedTime``; numbers, or arrays of them.
        passes: of the operator.
        beside: of its neighbours.
        accumulation: micro-batches.
        cluster: the ranks.
    """
    per_step, in_forward, gathers, early, late, between_nodes, whole_backward = overlapped
    in_forward = np.minimum(in_forward, beside.forward_s)
    most = np.maximum(np.maximum(beside.backward_before_s, beside.backward_after_s), passes.backward_s)
    reductions = np.minimum(early, passes.backward_s) + np.minimum(late, beside.backward_before_s)
    waits = np.maximum(0.0, gathers - beside.backward_after_s)
    gathers = np.minimum(gathers, beside.backward_after_s)
    waits_last = waits + np.maximum(0.0, per_step - beside.backward_before_s)
    all_reduces = np.minimum(per_step, beside.backward_before_s)
    # A forward that is run again hides no more than it takes, so that recomputing never saves time.
    others, last = (
        np.minimum(seconds, most) + np.minimum(passes.again_s, left + np.maximum(0.0, seconds - most))
        for seconds, left in ((gathers + reductions, waits), (gathers + reductions + all_reduces, waits_last))
    )
    hidden = accumulation * in_forward + (accumulation - 1) * others + last
    hidden = hidden + cluster.overlap * accumulation * (passes.forward_s + passes.backward_s)
    whole = accumulation * (np.maximum(passes.forward_s, beside.forward_s) + most + passes.again_s)
    left = np.maximum(0.0, beside.backward_before_s - per_step)
    # Neighbours wait as long as the operator does, if there are any.
    waited = np.where(np.asarray(beside.backward_before_s) > 0, np.maximum(0.0, whole_backward - others), 0.0)
    return np.minimum(hidden, whole) + np.minimum(between_nodes, left + waited)


def host_time(operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False) -> PerStepTime:
    """Return the part of ``engine_time`` that the host spends while the device computes: on CUDA all but copies."""
    if not cluster.has_streams:
        return PerStepTime(0.0, 0.0)
    return engine_time(operator, choice, cluster, recomputed=recomputed, host_only=True)


def engine_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False, host_only: bool = False
) -> PerStepTime:
    """Return the engine's own time (``Cluster.engine``): packing of replicated gradients, and work for each unit.

    Args:
        operator: an operator of the model.
        choice: the choice for it.
        cluster: the ranks.
        recomputed: whether its block is recomputed.
        host_only: without the time that grows with bytes.
    """
    if cluster.ranks == 1:
        return PerStepTime(0.0, 0.0)
    shards, overhead = shards_of(operator, choice), cluster.engine.dp
    replicated = [shard for shard in shards.replicated if shard.gradient_bytes and shard.tensor_degree == 1]
    limit = 0 if host_only else cluster.unbucketed_bytes
    packed = [s.gradient_bytes if s.gradient_bytes < limit else 0 for s in replicated]
    return PerStepTime(
        sum(shard.num_slices * overhead.time_s(size) for shard, size in zip(replicated, packed, strict=True)),
        sum(unit.num_slices * _unit_engine_s(unit, cluster, recomputed, host_only) for unit in shards.units)
        + _tensor_engine_s(operator, choice, cluster, recomputed=recomputed),
    )


def exchange_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> ExchangeTime:
    """Return the time of exchanging activations, which nothing hides; 0 unless ``operator`` is tensor parallel."""
    if choice.tensor_degree == 1:
        return ExchangeTime(0.0, 0.0)
    time = exchange_s(operator, choice.tensor_degree, cluster, recomputed=recomputed)
    factor = 1 + cluster.engine.calibration.for_kinds(calibration_kinds(operator, choice))
    return ExchangeTime(factor * time.fixed_s, factor * time.per_sample_s)


def calibration_time(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool = False
) -> PerStepTime:
    """Return what whole steps take more than collectives and engine in parts (``CalibrationFactors``).

    It counts as communication, because most of it is ranks waiting for each other.
    """
    factor = cluster.engine.calibration.for_kinds(calibration_kinds(operator, choice)) if cluster.ranks > 1 else 0.0
    if not factor:
        return PerStepTime(0.0, 0.0)
    collectives = communication_time(operator, choice, cluster, recomputed=recomputed)
    engine = engine_time(operator, choice, cluster, recomputed=recomputed)
    return PerStepTime(
        factor * (collectives.per_step_s + engine.per_step_s),
        factor * (collectives.per_microbatch_s + engine.per_microbatch_s),
    )


def calibration_kinds(operator: Operator, choice: ShardingChoice) -> list[str]:
    """Return the ``CalibrationFactors`` that apply: the choice's last mode, and how its parameters are gathered."""
    mode = max(choice.slices, key=list(Mode).index)
    is_sharded = mode not in (Mode.DP, Mode.TP)
    applies = {
        "wrapped": is_sharded and operator.num_wrapped > 1,
        "split": choice.split_dim is not None,
        "node": is_sharded and choice.scope == ShardingScope.NODE,
        "hierarchical": is_sharded and choice.hierarchical,
    }
    return [mode.value, *(kind for kind, does_apply in applies.items() if does_apply)]


class UnitCommunication(NamedTuple):
    """Seconds of a unit's collectives in one micro-batch."""

    forward_s: float
    backward_gathers_s: float
    early_reductions_s: float
    """Of gradients that come before the unit's last one."""
    last_reduction_s: float

    @property
    def backward_s(self) -> float:
        """All of its backward."""
        return self.backward_gathers_s + self.early_reductions_s + self.last_reduction_s


def unit_communication(unit: ShardUnit, links: ScopeLinks, cluster: Cluster, *, recomputed: bool) -> UnitCommunication:
    """Return the times of a unit's gathers and reduce-scatters."""
    forward_s = links.all_gather_s(unit.gathered_bytes, len(unit.shards))
    gathers_s = forward_s if recomputed and unit.mode == Mode.ZDP else 0.0
    num_read = sum(shard.read_in_backward for shard in unit.shards)
    if unit.mode == Mode.ZDP and num_read:
        gathers_s += links.all_gather_s(unit.backward_bytes, num_read)
    sizes = unit.reduced_sizes
    if unit.coalesces_gradients(cluster):
        return UnitCommunication(forward_s, gathers_s, 0.0, links.reduce_scatter_s(sum(sizes), len(sizes)))
    *early_s, last_s = map(links.reduce_scatter_s, sizes or [0])
    return UnitCommunication(forward_s, gathers_s, sum(early_s), last_s)


def inter_node_s(shards: OperatorShards, links: ScopeLinks) -> float:
    """Return the time to average sharded gradients between nodes."""
    return sum(unit.num_slices * sum(map(links.inter_node_s, unit.gradient_sizes)) for unit in shards.units)


def all_reduces_s(shards: OperatorShards, cluster: Cluster) -> float:
    """Return the time to all-reduce replicated gradients; small ones share the latency of their bucket."""
    fit, ranks = cluster.link.all_reduce, cluster.ranks
    total_s = 0.0
    for shard in shards.replicated:
        if shard.tensor_degree > 1:
            continue
        own_s = fit.time_s(shard.reduced_bytes, ranks)
        if shard.gradient_bytes < cluster.unbucketed_bytes:
            own_s = max(0.0, own_s - fit.time_s(0, ranks) * (1 - shard.gradient_bytes / cluster.bucket_bytes))
        total_s += shard.num_slices * own_s
    return total_s


def tensor_all_reduces_s(shards: OperatorShards, cluster: Cluster) -> float:
    """Return the time to average gradients over the ranks that hold the same slice, after the backward pass."""
    links, total_s = cluster.hierarchical_links, 0.0
    for shard in shards.replicated:
        degree = shard.tensor_degree
        if degree == 1:
            continue
        if cluster.is_hierarchical and links is not None and degree == cluster.devices_per_node:
            total_s += links.inter_node.time_s(shard.gradient_bytes, cluster.nodes)
        else:  # the groups of all slices share the adapter of a node
            num_bytes = shard.gradient_bytes * (degree if cluster.is_hierarchical else 1)
            total_s += cluster.link.all_reduce.time_s(num_bytes, cluster.ranks // degree)
    return total_s


def _unit_engine_s(unit: ShardUnit, cluster: Cluster, recomputed: bool, host_only: bool) -> float:
    """Return the engine's time for a unit in one micro-batch."""
    overhead = cluster.engine.zdp if unit.mode == Mode.ZDP else cluster.engine.zdp2
    seconds = overhead.time_s(0 if host_only else unit.parameter_bytes)
    seconds += EXTRA_PARAM_OVERHEAD * (len(unit.shards) - 1) * overhead.fixed_s
    return seconds * (RECOMPUTE_OVERHEAD if recomputed else 1.0)


def _tensor_engine_s(operator: Operator, choice: ShardingChoice, cluster: Cluster, *, recomputed: bool) -> float:
    """Return its part of the engine's time for the operators that are tensor parallel together."""
    if choice.tensor_degree == 1:
        return 0.0
    num_operators = operator.tensor.num_operators if operator.tensor is not None else 1
    return operator.calls * cluster.engine.tp.fixed_s / num_operators * (RECOMPUTE_OVERHEAD if recomputed else 1.0)


def forward_backward_time(operator_time: OperatorTime, choice: ShardingChoice) -> tuple[LinearInBatch, LinearInBatch]:
    """Return the forward and backward seconds over the batch size.

    Raises:
        KeyError: This way of splitting was not measured.
    """
    if choice.tensor_degree > 1:
        return _slice_time(operator_time, choice.tensor_degree)
    if choice.split_dim is None:
        return operator_time.forward, operator_time.backward
    for split in operator_time.splits:
        if (split.dim, split.slices) == (choice.split_dim, len(choice.slices)):
            return operator_time.forward.plus(split.forward), operator_time.backward.plus(split.backward)
    raise KeyError(f"{len(choice.slices)} slices along dimension {choice.split_dim} were not measured")


def _slice_time(operator_time: OperatorTime, degree: int) -> tuple[LinearInBatch, LinearInBatch]:
    """Return the seconds of one of ``degree`` slices for the samples of its group: as many products as undivided.

    If that was not measured, what does not depend on the batch size counts as reading the weight and writing its
    gradient, of which a slice has its part.
    """
    measured = next((time for time in operator_time.tensor if time.degree == degree), None)
    if measured is not None:
        return measured.forward, measured.backward
    forward, backward = operator_time.forward, operator_time.backward
    return (
        forward.model_copy(update={"fixed": forward.fixed / degree}),
        backward.model_copy(update={"fixed": backward.fixed / degree}),
    )


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
    neighbours: Sequence[Neighbours] = (),
) -> TimeCost:
    """Return the seconds that ``operator`` adds to an optimizer step of ``accumulation`` micro-batches.

    Without ``neighbours``, these take as long as the operator itself.
    """
    forward_s, backward_s = (line.value_at(batch_size) for line in forward_backward_time(operator_time, choice))
    again_s = forward_s if recomputed else 0.0
    passes_s = accumulation * (forward_s + again_s + backward_s)
    communication, host, engine, calibration = (
        time(operator, choice, cluster, recomputed=recomputed)
        for time in (communication_time, host_time, engine_time, calibration_time)
    )
    overlapped = overlapped_time(operator, choice, cluster, recomputed=recomputed)
    exchange = exchange_time(operator, choice, cluster, recomputed=recomputed)
    passes, beside_s = Passes(forward_s, backward_s, again_s), 0.0
    own_lines = forward_backward_time(operator_time, choice)
    for share, *lines in neighbours_of_slices(neighbours, own_lines, len(choice.slices)):
        beside = Beside(*(line.value_at(batch_size) for line in lines))
        beside_s += share * float(hidden_s(overlapped, passes, beside, accumulation, cluster))
    exposed_s = max(0.0, communication.total_s(accumulation) - beside_s)
    update_s = compute.optimizer_s_per_byte * footprint(operator, choice, cluster).local_trainable
    # The larger of host and device: what does not grow with the batch may be as long as kernels take to launch.
    fixed = [line.value_at(0) for line in forward_backward_time(operator_time, choice)]
    launched_s = accumulation * ((1 + recomputed) * fixed[0] + fixed[1])
    engine_s = engine.total_s(accumulation) - min(
        host.total_s(accumulation), max(0.0, passes_s + exposed_s - launched_s)
    )
    exposed_s += calibration.total_s(accumulation) + accumulation * exchange.value_at(batch_size)
    return TimeCost(passes_s + update_s + engine_s, exposed_s)

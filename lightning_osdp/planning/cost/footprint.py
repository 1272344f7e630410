"""The memory of an operator under a choice: bytes on one rank, by the time at which they are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import NamedTuple

from lightning_osdp.planning.cost.activation_exchange import activation_bytes
from lightning_osdp.planning.cost.cpu_effects import (
    PrefetchBytes,
    coalesced_reduction_bytes,
    freed_bytes,
    kept_bytes,
    kept_tensor_bytes,
    prefetch_bytes,
)
from lightning_osdp.planning.cost.sharding_scopes import all_gather_copy_factor, sharding_ranks
from lightning_osdp.planning.cost.shards import OperatorShards, ParamShard, ShardUnit, shards_of
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import Operator

T = TypeVar("T")


TENSOR_PARALLEL_UNITS = 4
"""Units that a tensor parallel operator counts as, in what they take besides tensors: 977 of them took 67 KiB each on a
CPU, for their exchanges among others."""


class Footprint(NamedTuple, Generic[T]):
    """Bytes on one rank, by the time at which they are held; ``memory_timeline`` adds them up."""

    states: T
    """Parameters and optimizer states, and what units take besides tensors: always."""
    replicated_gradients: T
    """Gradients of replicated parameters, from the operator's backward on."""
    sharded_gradients: T
    """A rank's parts, after the operator's backward; none if they are used up in the backward pass."""
    unsharded_between_passes: T
    """Unsharded parameters from its forward to its backward (zdp2), and autocast's casts of replicated ones."""
    unsharded_while_running: T
    """Unsharded parameters while it runs forward (zdp)."""
    unsharded_in_backward: T
    """Unsharded parameters that it gathers again to run backward (zdp)."""
    transient: T
    """Unsharded gradients and buffers of their reduction, while it runs backward."""
    transient_in_first_quarter: T
    """The same until a quarter of the operators that share its unit have gradients; of other operators all of it."""
    transient_in_second: T
    transient_in_third: T
    forward_per_sample: T
    """Bytes per sample that splitting, or tensor parallelism, adds to the traced operator's forward."""
    backward_per_sample: T
    """Bytes per sample that splitting, or tensor parallelism, adds to its backward."""
    has_partial_gradients: T
    """1 if products of slices, or of a rank's part, have its gradients one after the other; else 0. These are no bytes.
    """
    gathered_per_sample: T
    """Bytes per sample of inputs gathered from other ranks, from its forward to its backward (tp)."""
    bucketed: T
    """Gradients that are copied into buckets."""
    reduction_growth: T
    """Bytes by which replicated gradients are larger in the type in which they are reduced, until the backward ends."""
    reduced_copy: T
    """The largest replicated gradient that is reduced in another type, in that type: it is held beside its copy."""
    prefetched_parameters: T
    """Unsharded parameters of its first unit, which are gathered while the units before run."""
    prefetched_slice: T
    """Unsharded parameters of its second unit, which are then gathered too; 0 if it is a single one."""
    next_slices: T
    """Unsharded parameters of its further slices that are gathered while one runs, a part of those while it runs."""
    inflight_gradient: T
    """Unsharded gradients of its last unit, which are still being reduced while the next unit runs backward."""
    gathered_in_total: T
    """All that its units gather for a forward, one after the other."""
    reduced_in_total: T
    """All of its unsharded gradients that are reduced, one unit's after the other."""
    slice_gradient_copy: T
    """Second copy of slices' gradients while they are copied into their weight's gradient."""
    local_trainable: T
    """Trainable parameters that a rank's optimizer updates."""
    largest_local_trainable: T
    """The largest single one of these."""
    replicated_casts: T
    """Autocast's casts of replicated parameters, which are a part of ``unsharded_between_passes``."""
    casts_before_gradients: T
    """What of these a backward frees before it makes the gradient: it never holds both."""
    eval_unsharded: T
    """Unsharded parameters while its forward runs without autograd, in every mode."""
    checkpoint_tensor: T
    """Its largest sharded tensor when gathered to be saved, with the slice being gathered."""
    unsharded_parameters: T
    """All its sharded parameters when gathered at once."""
    unsharded_state: T
    """All its sharded parameters and optimizer states when gathered."""


COLUMN = {name: index for index, name in enumerate(Footprint._fields)}
"""Index of each field if footprints are rows of an array."""


def as_rows(footprints: Sequence[Footprint[float]]) -> NDArray[np.float64]:
    """Return an array of footprints, (footprints, fields)."""
    return np.array(footprints, dtype=np.float64).reshape(len(footprints), len(COLUMN))


class _Layout(NamedTuple):
    """One operator's shards, and where they lie."""

    operator: Operator
    choice: ShardingChoice
    cluster: Cluster
    shards: OperatorShards
    gathered: list[float]
    """Bytes that gathering each unit takes."""
    ranks: int
    """Ranks that its states are spread over."""
    in_backward: bool
    """Whether its sharded parameters are updated in the backward pass."""
    update_sizes: list[float]
    """Bytes of each gradient that the optimizer sees; the slices of a weight are one."""


def footprint(
    operator: Operator, choice: ShardingChoice, cluster: Cluster, *, updated_in_backward: bool = False
) -> Footprint[float]:
    """Return the bytes that ``operator`` takes on one rank.

    Args:
        operator: An operator of the model.
        choice: The choice for it.
        cluster: The ranks.
        updated_in_backward: Whether the optimizer updates sharded parameters in the backward pass, where it can.
    """
    # Replicated slices, and gradients averaged between nodes at the end of the pass, wait for the optimizer's step.
    waits = Mode.DP in choice.slices or choice.scope == ShardingScope.NODE
    ranks, shards = sharding_ranks(cluster, choice.scope), shards_of(operator, choice)
    copies = 1 + all_gather_copy_factor(cluster, choice.scope, choice.hierarchical)
    gathered = [copies * unit.gathered_bytes for unit in shards.units]
    in_backward, update_sizes = updated_in_backward and not waits, _update_sizes(shards, ranks)
    layout = _Layout(operator, choice, cluster, shards, gathered, ranks, in_backward, update_sizes)
    prefetch = prefetch_bytes(shards.units, gathered, cluster, ranks)
    return Footprint(
        **_parameter_bytes(layout, prefetch),
        **_gradient_bytes(layout, prefetch),
        **_optimizer_bytes(layout),
        **_checkpoint_bytes(layout),
        **_per_sample_bytes(layout),
    )


def _update_sizes(shards: OperatorShards, ranks: int) -> list[float]:
    sizes = [(shard, float(shard.all_gradient_bytes)) for shard in shards.replicated]
    sizes += [(shard, shard.all_gradient_bytes / ranks) for shard in shards.sharded]
    slices = [size for shard, size in sizes if shard.is_slice]
    return [*(size for shard, size in sizes if not shard.is_slice), *([sum(slices)] if slices else [])]


def _parameter_bytes(layout: _Layout, prefetch: PrefetchBytes) -> dict[str, float]:
    shards, gathered = layout.shards, layout.gathered
    zdp = [(unit, size) for unit, size in zip(shards.units, gathered, strict=True) if unit.mode == Mode.ZDP]
    in_backward = [size * unit.backward_bytes / unit.gathered_bytes for unit, size in zdp]
    cast = [shard for shard in shards.replicated if shard.has_casts and shard.looked_up != "alone"]
    casts = sum(shard.gathered_bytes * shard.num_slices for shard in cast)
    states = sum(_state_bytes(shard, 1, layout.cluster) for shard in shards.replicated)
    states += sum(_state_bytes(shard, layout.ranks, layout.cluster) for shard in shards.sharded)
    num_units = sum(unit.num_slices for unit in shards.units)
    if layout.choice.tensor_degree > 1:
        num_units += TENSOR_PARALLEL_UNITS
    return {
        "states": states + num_units * layout.cluster.unit_bytes,
        "unsharded_between_passes": casts
        + sum(u.gathered_bytes * u.num_slices for u in shards.units if u.mode == Mode.ZDP2),
        "unsharded_while_running": max((size for _, size in zdp), default=0) + prefetch.next_slices,
        "unsharded_in_backward": max(in_backward, default=0) + prefetch.next_slices,
        "replicated_casts": casts,
        "casts_before_gradients": sum(min(s.gathered_bytes, s.gradient_bytes) * s.num_slices for s in cast),
        "prefetched_parameters": prefetch.next_unit,
        "prefetched_slice": prefetch.second_unit,
        "next_slices": prefetch.next_slices,
        "eval_unsharded": max(gathered, default=0),
        "gathered_in_total": sum(size * unit.num_slices for unit, size in zip(shards.units, gathered, strict=True)),
    }


def _state_bytes(shard: ParamShard, ranks: int, cluster: Cluster) -> float:
    """Return what a rank keeps of a parameter and its optimizer states."""
    own = -(-(shard.parameter_bytes + shard.optimizer_bytes) // ranks)
    num_states = round(shard.optimizer_bytes / max(1, shard.parameter_bytes))  # as if they had the parameter's type
    own_states = num_states * kept_tensor_bytes(shard.parameter_bytes / ranks, cluster)
    return (own + own_states) * shard.num_slices


def _gradient_bytes(layout: _Layout, prefetch: PrefetchBytes) -> dict[str, float]:
    cluster, shards = layout.cluster, layout.shards
    own_parts = sum(shard.all_gradient_bytes for shard in shards.sharded) / layout.ranks
    small = [s for s in shards.replicated if s.gradient_bytes < cluster.unbucketed_bytes and s.tensor_degree == 1]
    bucketed = [shard.all_gradient_bytes for shard in small]
    recast = [s for s in shards.replicated if s.reduced_bytes != s.gradient_bytes and s.tensor_degree == 1]
    recast = recast if cluster.ranks > 1 else []
    *early, transient = _transients(layout, own_parts, prefetch.previous_gradient)
    copied = _slice_copy_bytes(layout)
    replicated = sum(s.all_gradient_bytes for s in shards.replicated) + _kept_beside(shards.replicated, 1, cluster)
    sharded = own_parts + _kept_beside(shards.sharded, layout.ranks, cluster)
    if layout.in_backward and copied:
        transient = max(transient, own_parts + copied)
        early = [transient] * len(early)
    return {
        **dict(zip(("transient_in_first_quarter", "transient_in_second", "transient_in_third"), early, strict=True)),
        "replicated_gradients": replicated,
        "sharded_gradients": 0.0 if layout.in_backward else sharded,
        "transient": transient,
        "bucketed": sum(bucketed) if cluster.ranks > 1 else 0,
        "reduction_growth": sum(max(0, s.reduced_bytes - s.gradient_bytes) * s.num_slices for s in recast),
        "reduced_copy": max((s.reduced_bytes for s in recast if s not in small), default=0),
        "inflight_gradient": prefetch.inflight_gradient,
        "reduced_in_total": sum(kept_bytes(shard) * shard.num_slices for shard in shards.sharded),
        "slice_gradient_copy": 0.0 if layout.in_backward else copied,
    }


def _kept_beside(shards: Sequence[ParamShard], ranks: int, cluster: Cluster) -> float:
    """Return what gradients that are kept until the update take besides their elements."""
    return sum(kept_tensor_bytes(shard.gradient_bytes / ranks, cluster) * shard.num_slices for shard in shards)


def _slice_copy_bytes(layout: _Layout) -> float:
    """Return the bytes held twice while slices' gradients are copied into the weight's, each freed after its copy."""
    slices = [shard for shard in (*layout.shards.replicated, *layout.shards.sharded) if shard.is_slice]
    if not slices:
        return 0.0
    if not layout.cluster.allocates_on_write:
        return max(layout.update_sizes)
    return max(shard.gradient_bytes / (1 if shard.mode == Mode.DP else layout.ranks) for shard in slices)


def _transients(layout: _Layout, own_parts: float, previous_gradient: float) -> list[float]:
    """Return the largest memory of reducing gradients until each quarter of the unit's operators have theirs."""
    args = (own_parts, layout.cluster, layout.ranks)
    sizes = [pair for unit in layout.shards.units for pair in _reduction_sizes(unit, *args)]
    most = [max((size for later, size in sizes if later >= quarter), default=0.0) for quarter in (3, 2, 1, 0)]
    if not any(later for later, _ in sizes):  # it shares its unit with none
        return [most[-1] + previous_gradient] * len(most)
    is_first_alone = sum(later == 3 for later, _ in sizes) == 1
    return [size + previous_gradient * (number > 0 or not is_first_alone) for number, size in enumerate(most)]


def _reduction_sizes(unit: ShardUnit, own_parts: float, cluster: Cluster, ranks: int) -> list[tuple[int, float]]:
    """Return the memory of reducing a unit's gradients as they come, on top of its gathered parameters.

    Gradients appear one after the other, and each parameter is freed then; a slice is freed before its gradient exists.
    """
    if unit.shards[0].is_slice:
        return [(0, _reduction_bytes(unit.shards, own_parts, cluster, ranks, freed_before_gradient=True))]
    orders = sorted({shard.gradient_order for shard in unit.shards})
    groups = [[shard for shard in unit.shards if shard.gradient_order == order] for order in orders]
    later = [min(shard.later_quarters for shard in group) for group in groups]
    if unit.coalesces_gradients(cluster):
        return list(zip(later, coalesced_reduction_bytes(groups, cluster, ranks), strict=True))
    if len(groups) == 1:
        return [(later[0], _reduction_bytes(unit.shards, own_parts, cluster, ranks))]
    sizes, freed = [], 0.0
    for group in groups:
        reduced = sum(shard.gradient_bytes for shard in group) / ranks
        sizes.append(_reduction_bytes(group, reduced, cluster, ranks) - freed)
        in_flight = sum(map(kept_bytes, group)) if cluster.has_streams else 0
        freed += freed_bytes(group, cluster) - in_flight - reduced
    return list(zip(later, sizes, strict=True))


def _reduction_bytes(
    shards: Sequence[ParamShard], own_parts: float, cluster: Cluster, ranks: int, *, freed_before_gradient: bool = False
) -> float:
    """Return the bytes held while gradients are reduced: they, buffers, and the operator's reduced parts.

    The parameters are freed before the reduction, or already before the gradient exists; the larger moment counts.
    """
    gradient = sum(shard.gradient_bytes for shard in shards)
    cast = sum(shard.reduced_bytes for shard in shards if shard.reduced_bytes != shard.gradient_bytes)
    reduced, sent = gradient / ranks, cast or gradient
    received = min(cluster.reduce_scatter_buffer_bytes, max(0, min(2, ranks - 2)) * sent / ranks)
    work = max(reduced, sent / ranks) + sent * (1 + cluster.reduce_scatter_copy_factor) + received
    # A gradient is freed once it is cast to the type of its reduction, where no stream still has to do so.
    work = work + (gradient if cast else 0) if cluster.has_streams else max(work, gradient + cast)
    freed = freed_bytes(shards, cluster)
    if all(shard.has_casts for shard in shards):
        # A cast is freed before its gradient is cast to the parameter's type. What is cast counts among the activations
        # and is freed before the reduction.
        from_product = 0 if cluster.has_streams else sum(s.gathered_bytes for s in shards if s.looked_up != "alone")
        return max(0.0, gradient - freed, work + own_parts - reduced - from_product - freed)
    peak = max(0.0, work - freed) if freed_before_gradient else gradient + max(0.0, work - gradient - freed)
    return peak + own_parts - reduced


def _optimizer_bytes(layout: _Layout) -> dict[str, float]:
    return {
        "local_trainable": sum(layout.update_sizes),
        "largest_local_trainable": max(layout.update_sizes, default=0.0),
    }


def _checkpoint_bytes(layout: _Layout) -> dict[str, float]:
    operator = layout.operator
    is_local = layout.shards.units or layout.choice.tensor_degree > 1
    saved = operator.shardable_parameters if is_local else ()
    largest_slice = max((shard.parameter_bytes for shard in layout.shards.sharded if shard.is_slice), default=0)
    tensors = [p.parameter_bytes + (largest_slice if p is operator.weight else 0) for p in saved]
    return {
        "checkpoint_tensor": max(tensors, default=0),
        "unsharded_parameters": sum(p.parameter_bytes for p in saved),
        "unsharded_state": sum(p.parameter_bytes + p.optimizer_bytes for p in saved),
    }


def _per_sample_bytes(layout: _Layout) -> dict[str, float]:
    """Return what splitting and tensor parallelism need per sample beyond the traced operator.

    Slices of the input: their input gradients before they are concatenated, unless the input is freed before that, as
    the gradients together are as large as it. Slices of the output: the slices before they are concatenated, and one
    more input gradient, because it is a sum.
    """
    operator, dim = layout.operator, layout.choice.split_dim
    is_output = dim is not None and dim in operator.output_dims
    exchanged = activation_bytes(operator, layout.choice.tensor_degree)
    input_gradient = operator.input_per_sample if dim is not None else 0.0
    is_replaced = operator.frees_input and not is_output
    return {
        "forward_per_sample": exchanged.forward + (operator.output_per_sample if is_output else 0.0),
        "backward_per_sample": exchanged.backward + (0.0 if is_replaced else input_gradient),
        "has_partial_gradients": float(exchanged.backward + input_gradient > 0),
        "gathered_per_sample": exchanged.between_passes,
    }

"""The choices for an operator: the paper's modes, the ways to split it, and the ranks to shard it over.

The paper's appendix C lets any number of k slices be sharded. Slices are equal, so only the number in each mode
matters; choices with all slices replicated are left out, because splitting brings them nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import NamedTuple

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.frozen import TextEnum
from lightning_osdp.planning.spec.model import Operator


class Mode(TextEnum):
    """How the states of one slice are stored (the paper has DP and ZDP; zdp2 is what its figure 1 draws as DP)."""

    DP = "dp"
    """Replicated, with one all-reduce of the gradient (FSDP's NO_SHARD)."""
    ZDP2 = "zdp2"
    """States sharded, parameters unsharded from forward to backward (ZeRO-2, FSDP's SHARD_GRAD_OP)."""
    ZDP = "zdp"
    """States sharded, parameters gathered for the forward and again for the backward (ZeRO-3, FSDP's FULL_SHARD)."""
    TP = "tp"
    """Tensor parallel: each rank of a group keeps its slice of the weights, and activations are exchanged."""


WEIGHT_MODES = (Mode.DP, Mode.ZDP2, Mode.ZDP)
"""Modes that move weights and gradients instead of activations, from the most memory to the least."""


class ShardingScope(TextEnum):
    """The ranks that an operator is sharded over."""

    WORLD = "world"
    NODE = "node"
    """The ranks of one node; gradients are then averaged between nodes (FSDP's HYBRID_SHARD, MiCS)."""


class ShardingChoice(NamedTuple):
    """Everything that a plan decides for an operator."""

    slices: tuple[Mode, ...] = (Mode.DP,)
    """The mode of each slice, in order; a single one if the operator is not split."""
    split_dim: int | None = None
    """Dimension of the weight that the slices divide; None if the operator is not split."""
    scope: ShardingScope = ShardingScope.WORLD
    """The ranks that sharded slices are spread over."""
    hierarchical: bool = False
    """Whether collectives of all ranks run in two stages, inside nodes and between them."""
    tensor_degree: int = 1
    """Ranks that hold one slice each if the mode is ``tp``, else 1."""


DEFAULT_SLICE_COUNTS = (2, 4, 8, 16)
"""Numbers of slices that are considered unless the user gives some."""

MIN_SLICE_ELEMENTS = 1 << 16
"""Smaller slices are not considered, because latency dominates their collectives. [M-cost-4]"""

SHARDED_FRACTION_STEPS = 4
"""Of more than this many slices, only these fractions of sharded ones are considered; others cost nearly the same."""


def available_scopes(cluster: Cluster) -> tuple[tuple[ShardingScope, bool], ...]:
    """Return the pairs (scope, hierarchical) that operators may be sharded with, plain world sharding first."""
    if not cluster.is_hierarchical or cluster.hierarchical_links is None:
        return ((ShardingScope.WORLD, False),)
    return ((ShardingScope.WORLD, False), (ShardingScope.WORLD, True), (ShardingScope.NODE, False))


def tensor_degrees(cluster: Cluster) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism that are possible: the divisors of the devices of a node, above 1."""
    devices = devices_of_each_node(cluster)
    return tuple(degree for degree in range(2, devices + 1) if devices % degree == 0)


def devices_of_each_node(cluster: Cluster) -> int:
    """Return the number of devices of a node; the greatest common divisor if nodes differ."""
    return gcd(*cluster.devices_by_node) or cluster.devices_per_node


def legal_modes(operator: Operator) -> tuple[Mode, ...]:
    """Return the modes that ``operator`` may take, ``dp`` first.

    ``zdp`` frees parameters after each use, so it is not for operators that run several times in a step, nor for tied
    weights, which are used from one end of the model to the other.
    """
    if not operator.is_shardable:
        return (Mode.DP,)
    if operator.calls != 1 or operator.tied:
        return (Mode.DP, Mode.ZDP2)
    return (Mode.DP, Mode.ZDP2, Mode.ZDP)


def slice_sizes(size: int, num_slices: int) -> tuple[int, ...]:
    """Return the sizes of nearly equal slices of a dimension, larger ones first, by ``torch.tensor_split``'s rule.

    Raises:
        ConfigurationError: ``num_slices`` is not between 1 and ``size``.
    """
    if not 1 <= num_slices <= size:
        raise ConfigurationError(f"a dimension of size {size} can't be cut into {num_slices} slices")
    least, larger = divmod(size, num_slices)
    return (least + 1,) * larger + (least,) * (num_slices - larger)


def slice_counts(operator: Operator, allowed_slices: Iterable[int] | None = None) -> tuple[int, ...]:
    """Return the numbers of slices above 1 that ``operator`` may be cut into.

    Args:
        operator: Any operator; the result is empty if it can't be split or runs several times in a step.
        allowed_slices: Numbers to choose from, however small the slices are; None for ``DEFAULT_SLICE_COUNTS``.
    """
    weight = operator.weight
    if weight is None or not operator.split_dims or operator.calls != 1:
        return ()
    size = weight.shape[operator.split_dims[0]]
    if allowed_slices is not None:
        return tuple(k for k in allowed_slices if 1 < k <= size)
    return tuple(k for k in DEFAULT_SLICE_COUNTS if k <= size and weight.num_elements >= k * MIN_SLICE_ELEMENTS)


def enumerate_choices(
    operator: Operator,
    allowed_slices: Iterable[int] | None = None,
    measured_slices: Iterable[int] = DEFAULT_SLICE_COUNTS,
    scopes: Iterable[tuple[ShardingScope, bool]] = ((ShardingScope.WORLD, False),),
    engine_modes: Iterable[Mode] = tuple(Mode),
    mixed_slices: bool = True,
    forced_mode: Mode | None = None,
    tensor_degrees: Iterable[int] = (),
) -> list[ShardingChoice]:
    """Return all choices for ``operator``, the replicated one first if it is among them.

    Args:
        operator: The operator.
        allowed_slices: Numbers of slices that it may have where it is sharded, 1 for unsplit; None for any number.
        measured_slices: Numbers of slices with a known compute time; no others are returned.
        scopes: Pairs (scope, hierarchical) that it may be sharded with.
        engine_modes: Modes that the engine can carry out.
        mixed_slices: Whether slices of one operator may have different modes.
        forced_mode: The only mode that the operator and its slices may have; it must be possible. None for any.
        tensor_degrees: Numbers of ranks that it may be cut over.
    """
    cut = [ShardingChoice((Mode.TP,), tensor_degree=degree) for degree in tensor_degrees]
    if forced_mode in (Mode.DP, Mode.TP):
        return cut if forced_mode == Mode.TP else [ShardingChoice()]
    modes = [mode for mode in legal_modes(operator) if mode in set(engine_modes)]
    allowed = None if allowed_slices is None else tuple(allowed_slices)
    counts = [k for k in slice_counts(operator, allowed) if k in set(measured_slices)]
    choices = []
    if allowed is None or 1 in allowed or not counts:
        choices += [ShardingChoice((mode,)) for mode in modes if mode != Mode.DP]
    if Mode.ZDP in modes:
        splits = (slices for k in counts for slices in _mixed_modes(k) if mixed_slices or len(set(slices)) == 1)
        choices += [ShardingChoice(slices, operator.split_dims[0]) for slices in splits if set(slices) <= set(modes)]
    if forced_mode is not None:
        choices = [choice for choice in choices if set(choice.slices) == {forced_mode}]
        choices = choices or [ShardingChoice((forced_mode,))]
    return [
        *([ShardingChoice()] if forced_mode is None else ()),
        *(choice._replace(scope=scope, hierarchical=staged) for scope, staged in scopes for choice in choices),
        *(cut if forced_mode is None else ()),
    ]


def _mixed_modes(num_slices: int) -> Iterator[tuple[Mode, ...]]:
    """Yield the modes of k slices: some in a sharded mode, the others in a second sharded mode or replicated."""
    steps = range(1, SHARDED_FRACTION_STEPS + 1)
    counts = sorted({max(1, num_slices * step // SHARDED_FRACTION_STEPS) for step in steps})
    for first, second in ((Mode.ZDP2, Mode.DP), (Mode.ZDP, Mode.DP), (Mode.ZDP, Mode.ZDP2)):
        for count in counts:
            if count < num_slices or second == Mode.DP:
                yield (first,) * count + (second,) * (num_slices - count)

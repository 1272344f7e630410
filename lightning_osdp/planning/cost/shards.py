"""The parameters and slices of an operator under a choice, and the units in which they are gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from lightning_osdp.planning.cost.sharding_scopes import coalesce_max_bytes
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope, slice_sizes
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import LookedUp, Operator, ParameterInfo


class ParamShard(NamedTuple):
    """A parameter, or ``num_slices`` equal slices of one, with the unsharded bytes of a single one."""

    mode: Mode
    parameter_bytes: int
    gathered_bytes: int
    """Its bytes in the type in which it is gathered, that of autocast where it is read so."""
    gradient_bytes: int
    """0 if it is frozen."""
    reduced_bytes: int
    """Bytes of its gradient in the type in which it is reduced; 0 if it is frozen."""
    optimizer_bytes: int
    num_slices: int = 1
    gradient_order: int = 0
    """``ParameterInfo.gradient_order``."""
    is_slice: bool = False
    has_casts: bool = False
    """Whether casts of it are gathered, in autocast's type."""
    looked_up: LookedUp = ""
    """``ParameterInfo.looked_up``."""
    read_in_backward: bool = True
    """``ParameterInfo.read_in_backward``."""
    later_quarters: int = 0
    """``ParameterInfo.later_quarters``."""
    tensor_degree: int = 1
    """Ranks over which the parameter is cut, of which each holds one such shard (mode ``tp``)."""

    @property
    def backward_bytes(self) -> int:
        """Unsharded bytes that its backward gathers, in the type in which they are gathered."""
        return self.gathered_bytes if self.read_in_backward else 0

    @property
    def bytes_before_gradient(self) -> int:
        """Unsharded bytes that are there when its gradient comes."""
        return self.gathered_bytes if self.mode == Mode.ZDP2 else self.backward_bytes

    @property
    def all_gradient_bytes(self) -> int:
        """Unsharded gradient bytes of all slices."""
        return self.gradient_bytes * self.num_slices


class ShardUnit(NamedTuple):
    """Sharded parameters that are gathered by one collective: those of an unsplit operator, or a single slice."""

    shards: tuple[ParamShard, ...]
    scope: ShardingScope = ShardingScope.WORLD

    @property
    def mode(self) -> Mode:
        """Mode of all its shards."""
        return self.shards[0].mode

    @property
    def num_slices(self) -> int:
        """Number of equal units that this one stands for."""
        return self.shards[0].num_slices

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its unsharded parameters."""
        return sum(shard.parameter_bytes for shard in self.shards)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that gathering its parameters for a forward takes."""
        return sum(shard.gathered_bytes for shard in self.shards)

    @property
    def backward_bytes(self) -> int:
        """Bytes that gathering its parameters for a backward takes."""
        return sum(shard.backward_bytes for shard in self.shards)

    @property
    def gradient_sizes(self) -> list[int]:
        """Bytes of each of its unsharded gradients."""
        return [shard.gradient_bytes for shard in self.shards if shard.gradient_bytes]

    @property
    def reduced_sizes(self) -> list[int]:
        """Bytes in which each of its gradients is reduced, in the order in which these come."""
        shards = sorted(self.shards, key=lambda shard: shard.gradient_order)
        return [shard.reduced_bytes for shard in shards if shard.gradient_bytes]

    def is_prefetched(self, cluster: Cluster) -> bool:
        """Return whether its collectives run while its neighbours compute."""
        in_nodes = self.scope == ShardingScope.NODE and cluster.is_hierarchical
        is_possible = cluster.supports_prefetch_in_nodes if in_nodes else cluster.supports_prefetch
        return is_possible and self.parameter_bytes <= cluster.prefetch_max_bytes

    def coalesces_gradients(self, cluster: Cluster) -> bool:
        """Return whether its gradients are reduced by one collective once all exist, and not one by one."""
        sizes = self.gradient_sizes
        max_bytes = coalesce_max_bytes(cluster, is_prefetched=self.is_prefetched(cluster))
        return len(sizes) > 1 and sum(sizes) <= max_bytes


class OperatorShards(NamedTuple):
    """The shards of one operator by how they are stored."""

    replicated: list[ParamShard]
    """Shards that a rank holds for good: whole parameters, or its slices of tensor parallel ones."""
    sharded: list[ParamShard]
    units: list[ShardUnit]
    """The sharded ones, by the unit that they are in."""


def shards_of(operator: Operator, choice: ShardingChoice) -> OperatorShards:
    """Return the parameters and slices of ``operator`` under ``choice``."""
    if choice.tensor_degree > 1:
        return OperatorShards([_tensor_shard(p, choice.tensor_degree) for p in operator.parameters], [], [])
    # A large bias beside slices is sharded like the first sharded slice.
    mode = next((mode for mode in choice.slices if mode != Mode.DP), Mode.DP)
    split = operator.weight if choice.split_dim is not None else None
    shards = [
        _make_shard(p, Mode.DP if p.is_small else mode, lambda size: size, gradient_order=p.gradient_order)
        for p in operator.parameters
        if p is not split
    ]
    if split is not None:
        shards += _slice_shards(split, choice)
    sharded = [shard for shard in shards if shard.mode != Mode.DP]
    units = (
        [ShardUnit((shard,), choice.scope) for shard in sharded]
        if split is not None
        else [ShardUnit(tuple(sharded), choice.scope)]
        if sharded
        else []
    )
    return OperatorShards([shard for shard in shards if shard.mode == Mode.DP], sharded, units)


def _tensor_shard(parameter: ParameterInfo, degree: int) -> ParamShard:
    """Return what one rank holds of a parameter: a slice of the weight, the whole bias."""
    cut = degree if len(parameter.shape) > 1 else 1
    return _make_shard(parameter, Mode.DP, lambda size: -(-size // cut), tensor_degree=cut)


def _slice_shards(weight: ParameterInfo, choice: ShardingChoice) -> Iterator[ParamShard]:
    assert choice.split_dim is not None
    length = weight.shape[choice.split_dim]
    counts = Counter(zip(choice.slices, slice_sizes(length, len(choice.slices)), strict=True))
    for (mode, size), count in counts.items():
        part_of = partial(_scale, numerator=size, denominator=length)
        yield _make_shard(weight, mode, part_of, num_slices=count, is_slice=True)


def _scale(num_bytes: int, numerator: int, denominator: int) -> int:
    return num_bytes * numerator // denominator


def _make_shard(parameter: ParameterInfo, mode: Mode, part_of: Callable[[int], int], **fields: Any) -> ParamShard:
    """Return a shard with a part of all bytes of a parameter."""
    return ParamShard(
        mode,
        part_of(parameter.parameter_bytes),
        part_of(parameter.gathered_bytes),
        part_of(parameter.gradient_bytes),
        part_of(parameter.reduced_bytes),
        part_of(parameter.optimizer_bytes),
        has_casts=bool(parameter.cast_element_bytes),
        looked_up=parameter.looked_up,
        read_in_backward=parameter.read_in_backward,
        later_quarters=parameter.later_quarters,
        **fields,
    )


def num_sharded_elements(operator: Operator, choice: ShardingChoice) -> float:
    """Return the number of elements whose states are sharded."""
    total = sum(p.parameter_bytes for p in operator.parameters)
    shards = shards_of(operator, choice)
    sharded = sum(shard.parameter_bytes * shard.num_slices for shard in shards.sharded)
    sharded += sum(s.parameter_bytes * s.tensor_degree for s in shards.replicated if s.tensor_degree > 1)
    return operator.num_parameters * sharded / total if total else 0.0

"""How units are joined with their like on other ranks: over the world or a node, in one stage or two.

Group sharding: a unit that is spread over its node ends its backward pass with the mean of the node's gradients, for a
part that one rank of every other node holds as well. The mean of those is the mean over the world.

Note [averaging again does no harm]: once averaged, a shard is the same on all nodes, and so is its mean. So a shard
may be averaged, added to and averaged again, as accumulation without ``no_sync`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_reduce_async
from lightning_osdp.backend.hierarchical import (
    Communicator,
    FlatCommunicator,
    HierarchicalCommunicator,
    cached_group_copy,
    cached_node_groups,
)
from lightning_osdp.backend.work import Work, is_driven_by_host
from lightning_osdp.engine.fairscale.unit_collectives import CoalescedReduceScatter
from lightning_osdp.planning.cost.sharding_scopes import COALESCE_BYTES
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan


def sharded_operators(plan: ExecutionPlan) -> list[OperatorPlan]:
    """Operators that become units. One that is spread over a node of one rank is replicated."""
    alone = plan.cluster.nodes > 1 and plan.cluster.devices_per_node == 1
    return [
        op
        for op in plan.operators
        if any(mode != Mode.DP for mode in op.slices) and not (alone and op.sharding_group == ShardingScope.NODE)
    ]


def sharded_units(plan: ExecutionPlan) -> dict[str, list[OperatorPlan]]:
    """The same by the module that a unit lies around: an operator's own, or the block whose operators share one."""
    units: dict[str, list[OperatorPlan]] = {}
    for operator in sharded_operators(plan):
        units.setdefault(operator.unit or operator.name, []).append(operator)
    return units


@dataclass(frozen=True)
class UnitCommunicators:
    """How one unit is joined with its like.

    Attributes:
        group: the ranks that its parts are spread over.
        gather: for its all-gathers.
        reduce: for its reduce-scatters.
        inter_node_all_reduce: what averages its gradient's parts between nodes; None if ``scope`` is all ranks.
        prefetch_max_bytes: units of up to this size are gathered and reduced beside compute.
        coalesce_max_bytes: a unit's gradients of up to this size in all are reduced as one.
    """

    group: Any
    gather: Communicator
    reduce: Communicator
    inter_node_all_reduce: InterNodeAllReduce | None = None
    prefetch_max_bytes: int = 0
    coalesce_max_bytes: int = 0

    def is_prefetched(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether collectives of a unit with these parameters go on beside compute (``prefetched_parameters``)."""
        return sum(parameter.nbytes for parameter in parameters) <= self.prefetch_max_bytes and self.group.size() > 1

    def select_reduce_communicator(self, parameters: Sequence[nn.Parameter]) -> Communicator | CoalescedReduceScatter:
        """For the reduce-scatters of a unit with these parameters, as ``planning.cost`` takes it for."""
        if self.is_prefetched(parameters):
            return FlatCommunicator(self.group, is_async=True)
        trained = [parameter.nbytes for parameter in parameters if parameter.requires_grad]
        if len(trained) > 1 and sum(trained) <= self.coalesce_max_bytes:
            assert isinstance(self.reduce, FlatCommunicator)
            return CoalescedReduceScatter(self.reduce, parameters)
        return self.reduce


class CommunicatorFactory:
    """The lines of all units, with as few process groups as they need.

    Args:
        world: all ranks.
        device: of this rank.
        choices: for the sharded operators.
        cluster: how many nodes there are.
    """

    def __init__(self, world: Any, device: torch.device, choices: Iterable[ShardingChoice], cluster: Cluster) -> None:
        # On CUDA, reductions run beside the gathers, on a stream and so on groups of their own.
        reduce_world = cached_group_copy(world, "reductions") if device.type == "cuda" else world
        on_its_own = is_driven_by_host(device) and cluster.supports_prefetch  # streams do that on CUDA
        ahead_bytes, together_bytes = (cluster.prefetch_max_bytes, COALESCE_BYTES) if on_its_own else (0, 0)
        self._default = UnitCommunicators(
            world,
            FlatCommunicator(world),
            FlatCommunicator(reduce_world),
            prefetch_max_bytes=ahead_bytes,
            coalesce_max_bytes=together_bytes,
        )
        self._by_kind: dict[tuple[ShardingScope, bool], UnitCommunicators] = {}
        self.inter_node_all_reduce = InterNodeAllReduce(None)
        """Averages what is sharded inside nodes."""
        if cluster.is_hierarchical and any(
            choice.scope == ShardingScope.NODE or choice.hierarchical for choice in choices
        ):
            gather, reduce = (
                cached_node_groups(group, cluster.nodes, purpose)
                for group, purpose in ((world, "gathers"), (reduce_world, "reductions"))
            )
            self.inter_node_all_reduce = InterNodeAllReduce(reduce.inter_node)
            self._by_kind = {
                (ShardingScope.NODE, False): UnitCommunicators(
                    gather.intra_node,
                    FlatCommunicator(gather.intra_node),
                    FlatCommunicator(reduce.intra_node),
                    self.inter_node_all_reduce,
                ),
                (ShardingScope.WORLD, True): UnitCommunicators(
                    world, HierarchicalCommunicator(gather), HierarchicalCommunicator(reduce)
                ),
            }

    def for_choice(self, choice: ShardingChoice) -> UnitCommunicators:
        """How a unit with this choice is joined. Where there is one level only, all are joined alike."""
        return self._by_kind.get(
            (choice.scope, choice.hierarchical and choice.scope == ShardingScope.WORLD), self._default
        )


class InterNodeAllReduce:
    """Averages gradient shards over the ranks that hold the same part in each node.

    Args:
        group: those ranks; None if no operator is sharded inside nodes.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sync = True
        self._unsynced: dict[nn.Parameter, None] = {}  # in the order of the backward pass, the same on all nodes
        self._works: dict[nn.Parameter, Work] = {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Shards pile up in each node within it, and cross the slow link once, with the next backward pass."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def wait_before_accumulation(self, parameter: nn.Parameter) -> None:
        """To be called before a shard is added to: it may still be under way."""
        work = self._works.pop(parameter, None)
        if work is not None:
            work.wait()

    def on_shard_reduced(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Starts to average ``shard``, the node's mean that piled up for ``parameter``, unless within ``no_sync``."""
        if self._sync:
            self._unsynced.pop(parameter, None)
            self._works[parameter] = all_reduce_async(shard, self._group)
        else:
            self._unsynced[parameter] = None

    def finish(self) -> None:
        """Averages what the last backward pass did not reach and waits for all of it. Nothing within ``no_sync``."""
        if not self._sync:
            return
        for parameter in self._unsynced:
            if parameter.grad is not None:
                self._works[parameter] = all_reduce_async(parameter.grad, self._group)
        self._unsynced.clear()
        for work in self._works.values():
            work.wait()
        self._works.clear()

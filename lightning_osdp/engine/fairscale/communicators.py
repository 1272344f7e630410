"""Communicators of a unit: over all ranks or one node, flat or hierarchical.

Sharding inside nodes: FairScale ends the backward pass of such a unit with the mean of the node's gradients, for a
shard that one rank of every other node holds as well. ``InterNodeAllReduce`` makes it the mean over all ranks.

Note [averaging again does no harm]: once averaged, a shard is the same on all nodes, and so is its mean. So a shard
may be averaged, added to and averaged again, as accumulation without ``no_sync`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.backend.collectives import all_reduce_async, coalesces
from lightning_osdp.backend.hierarchical import (
    Communicator,
    FlatCommunicator,
    HierarchicalCommunicator,
    cached_group_copy,
    cached_node_groups,
)
from lightning_osdp.backend.work import Work
from lightning_osdp.engine.fairscale.unit_collectives import CoalescedReduceScatter
from lightning_osdp.engine.gradient_buckets import GradientSync
from lightning_osdp.planning.cost.sharding_scopes import COALESCE_BYTES
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan


def sharded_operators(plan: ExecutionPlan) -> list[OperatorPlan]:
    """Return the operators that become units; one that is sharded over a node of one rank is replicated."""
    single_rank_nodes = plan.cluster.nodes > 1 and plan.cluster.devices_per_node == 1
    return [
        op
        for op in plan.operators
        if op.tensor is None
        and any(mode != Mode.DP for mode in op.slices)
        and not (single_rank_nodes and op.sharding_group == ShardingScope.NODE)
    ]


def sharded_units(plan: ExecutionPlan) -> dict[str, list[OperatorPlan]]:
    """Group sharded operators by the module around which their unit lies: their own, or the block that they share."""
    units: dict[str, list[OperatorPlan]] = {}
    for operator in sharded_operators(plan):
        units.setdefault(operator.unit or operator.name, []).append(operator)
    return units


@dataclass(frozen=True)
class UnitCommunicators:
    """The communicators of one unit.

    Attributes:
        group: the ranks over which the unit is sharded.
        gather: runs all-gathers.
        reduce: runs reduce-scatters.
        inter_node_all_reduce: averages gradient shards between nodes; None if ``group`` is all ranks.
        prefetch_max_bytes: units up to this size are gathered and reduced while others compute.
        coalesce_max_bytes: gradients of a unit are reduced together if they are no larger in all, or if the backend
            takes several tensors in a call.
    """

    group: Any
    gather: Communicator
    reduce: Communicator
    inter_node_all_reduce: InterNodeAllReduce | None = None
    prefetch_max_bytes: int = 0
    coalesce_max_bytes: int = 0

    def is_prefetched(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether a unit with these parameters is gathered and reduced while others compute."""
        return sum(parameter.nbytes for parameter in parameters) <= self.prefetch_max_bytes and self.group.size() > 1

    def select_reduce_communicator(self, parameters: Sequence[nn.Parameter]) -> Communicator | CoalescedReduceScatter:
        """Return what runs the reduce-scatters of a unit with these parameters, as ``planning.cost`` assumes it."""
        is_prefetched = self.is_prefetched(parameters)
        reduce = FlatCommunicator(self.group, is_async=True) if is_prefetched else self.reduce
        trainable_bytes = [parameter.nbytes for parameter in parameters if parameter.requires_grad]
        if not isinstance(reduce, FlatCommunicator) or len(trainable_bytes) < 2 or self.group.size() == 1:
            return reduce
        is_small = not is_prefetched and sum(trainable_bytes) <= self.coalesce_max_bytes
        if is_small or coalesces(reduce.group, parameters[0].device):
            return CoalescedReduceScatter(reduce, parameters)
        return reduce


class CommunicatorFactory:
    """The communicators of all units, with as few process groups as they need.

    Args:
        world: all ranks.
        device: of this rank.
        choices: what was decided for the sharded operators.
        cluster: how many nodes there are, and which units are prefetched.
        sync: while it is paused, nodes accumulate their own gradients.
    """

    def __init__(
        self, world: Any, device: torch.device, choices: Iterable[ShardingChoice], cluster: Cluster, sync: GradientSync
    ) -> None:
        # On CUDA, reductions run at the same time as gathers, on a stream and so on groups of their own. A CPU has no
        # streams: small units are prefetched by asynchronous collectives, and small gradients reduced together.
        on_cuda = device.type == "cuda"
        reduce_world = cached_group_copy(world, "reductions") if on_cuda else world
        is_async = not on_cuda and cluster.supports_prefetch
        self._default = UnitCommunicators(
            world,
            FlatCommunicator(world),
            FlatCommunicator(reduce_world),
            prefetch_max_bytes=cluster.prefetch_max_bytes if is_async else 0,
            coalesce_max_bytes=COALESCE_BYTES if is_async else 0,
        )
        self._by_scope: dict[tuple[ShardingScope, bool], UnitCommunicators] = {}
        self.inter_node_all_reduce = InterNodeAllReduce(None, sync)
        """Averages the gradients of what is sharded inside nodes."""
        uses_nodes = any(choice.scope == ShardingScope.NODE or choice.hierarchical for choice in choices)
        if not cluster.is_hierarchical or not uses_nodes:
            return
        gather = cached_node_groups(world, cluster.nodes, "gathers")
        reduce = cached_node_groups(reduce_world, cluster.nodes, "reductions")
        self.inter_node_all_reduce = InterNodeAllReduce(reduce.inter_node, sync)
        self._by_scope = {
            (ShardingScope.NODE, False): UnitCommunicators(
                gather.intra_node,
                FlatCommunicator(gather.intra_node),
                FlatCommunicator(reduce.intra_node),
                self.inter_node_all_reduce,
                prefetch_max_bytes=0 if on_cuda else cluster.prefetch_max_bytes,
            ),
            (ShardingScope.WORLD, True): UnitCommunicators(
                world, HierarchicalCommunicator(gather), HierarchicalCommunicator(reduce)
            ),
        }

    def for_choice(self, choice: ShardingChoice) -> UnitCommunicators:
        """Return the communicators of a unit with this choice; without several nodes they are the same for all."""
        is_hierarchical = choice.hierarchical and choice.scope == ShardingScope.WORLD
        return self._by_scope.get((choice.scope, is_hierarchical), self._default)


class InterNodeAllReduce:
    """Averages gradient shards over the ranks that hold the same shard in each node.

    Args:
        group: those ranks; None if no operator is sharded inside nodes.
        sync: while it is paused, each node accumulates its own; the next backward pass sends them over the slow link.
    """

    def __init__(self, group: Any, sync: GradientSync) -> None:
        self._group, self._sync = group, sync
        self._unsynced: dict[nn.Parameter, None] = {}  # in the order of the backward pass, the same on all nodes
        self._works: dict[nn.Parameter, Work] = {}

    def wait_before_accumulation(self, parameter: nn.Parameter) -> None:
        """Wait until a parameter's shard is averaged, so that it can be added to."""
        work = self._works.pop(parameter, None)
        if work is not None:
            work.wait()

    def on_shard_reduced(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Start to average the accumulated ``shard`` of ``parameter``, unless ``sync`` is paused."""
        if self._sync.is_on:
            self._unsynced.pop(parameter, None)
            self._works[parameter] = all_reduce_async(shard, self._group)
        else:
            self._unsynced[parameter] = None

    def finish(self) -> None:
        """Average shards that the last backward pass did not reach, and wait for all, unless ``sync`` is paused."""
        if not self._sync.is_on:
            return
        for parameter in self._unsynced:
            if parameter.grad is not None:
                self._works[parameter] = all_reduce_async(parameter.grad, self._group)
        self._unsynced.clear()
        self.wait()

    def wait(self) -> None:
        """Wait for the shards that are being averaged."""
        for work in self._works.values():
            work.wait()
        self._works.clear()

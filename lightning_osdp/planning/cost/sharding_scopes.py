"""What a choice of sharding group and stages costs: seconds from measured fits, and bytes over the slow link.

With n nodes of d ranks, N = n d, and a tensor of P bytes when whole, a node sends over its link to the others

    one stage     (N - 1) / N P   gather or reduce-scatter, a ring over all ranks
    two stages    (n - 1) / n P   each node's part once for each other node
    all-reduce    twice that of its ranks: of all of them, or of one of each node

A group-sharded operator gathers and reduces inside nodes, where the slow link is not used, and all-reduces parts of
P / d between them: d such parts leave a node, which makes 2 (n - 1) / n P in all, once per optimizer step.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit

DIRECT_REDUCE_SCATTER_BYTES = 1 << 20
"""On gloo, tensors up to this size are reduced by sending each rank its part in one round, instead of N - 1 of a ring,
when N > 2. [empirical, 4 ranks on 2 cores: 256 KiB 4.5 -> 1.4 ms, 4 MiB no difference]"""

COALESCE_BYTES = 4 << 20
"""On a CPU, gradients of one unit up to this size in all are reduced together, when all have come: as many messages as
of one. [measured, four gradients of a block, 3 MiB in all, loopback: 2 ranks 4.5 -> 3.0 ms, 4 ranks on 2 cores
10.9 -> 7.6; the same at 1 Gbit/s]"""


class ScopeLinks(NamedTuple):
    """How the ranks of a sharding group exchange a tensor."""

    ranks: int
    """Over which states are spread."""
    all_gather: CollectiveFit
    reduce_scatter: CollectiveFit
    inter_node: CollectiveFit | None = None
    """All-reduce of a gradient's part between nodes; None if the group is all ranks."""
    nodes: int = 1
    """That ``between`` joins."""

    def overlapped_part(self) -> ScopeLinks:
        """The part that goes on beside compute."""
        between = None if self.inter_node is None else self.inter_node.overlapped_part()
        return self._replace(
            all_gather=self.all_gather.overlapped_part(),
            reduce_scatter=self.reduce_scatter.overlapped_part(),
            inter_node=between,
        )

    def all_gather_s(self, unsharded_bytes: float, tensors: int = 1) -> float:
        """Seconds of one all-gather of so many tensors together, ``unsharded_bytes`` in all."""
        return self.all_gather.time_s(unsharded_bytes, self.ranks, tensors)

    def reduce_scatter_s(self, unsharded_bytes: float, tensors: int = 1) -> float:
        """Seconds of one reduce-scatter of so many tensors together inside the group, ``unsharded_bytes`` in all."""
        return self.reduce_scatter.time_s(unsharded_bytes, self.ranks, tensors)

    def inter_node_s(self, unsharded_bytes: float) -> float:
        """Seconds to average the parts of a gradient between nodes; 0 if the group is all ranks."""
        return self.inter_node.time_s(unsharded_bytes / self.ranks, self.nodes) if self.inter_node is not None else 0.0


def available_scopes(
    cluster: Cluster, capabilities: EngineCapabilities = ALL_CAPABILITIES
) -> tuple[tuple[ShardingScope, bool], ...]:
    """What there is to choose from: (group, whether in two stages). The plain one is first."""
    if not cluster.is_hierarchical or cluster.hierarchical_links is None:
        return ((ShardingScope.WORLD, False),)
    scopes = [(ShardingScope.WORLD, False)]
    scopes += [(ShardingScope.WORLD, True)] if capabilities.hierarchical else []
    scopes += [(ShardingScope.NODE, False)] if capabilities.node_scope else []
    return tuple(scopes)


def sharding_ranks(cluster: Cluster, scope: ShardingScope) -> int:
    """Over how many ranks states are spread."""
    return cluster.devices_per_node if scope == ShardingScope.NODE and cluster.is_hierarchical else cluster.ranks


def all_gather_copy_factor(cluster: Cluster, scope: ShardingScope, hierarchical: bool) -> float:
    """What a gather takes beside its result, as a share of it: in two stages, what came from the other nodes first.

    On a CPU that is received where it belongs.
    """
    staged = (
        hierarchical and scope == ShardingScope.WORLD and cluster.is_hierarchical and not cluster.uses_ring_collectives
    )
    return 1 / cluster.devices_per_node if staged else 0.0


def scope_links(cluster: Cluster, scope: ShardingScope, hierarchical: bool = False) -> ScopeLinks:
    """How a unit with this group exchanges its parameters and gradients.

    Raises:
        ConfigurationError: the links that it needs were not measured.
    """
    plain = ScopeLinks(
        sharding_ranks(cluster, ShardingScope.WORLD), cluster.link.all_gather, cluster.link.reduce_scatter
    )
    if not cluster.is_hierarchical or (scope == ShardingScope.WORLD and not hierarchical):
        return plain
    if cluster.hierarchical_links is None:
        raise ConfigurationError("the cluster does not say what its nodes cost by themselves (levels): measure it anew")
    levels = cluster.hierarchical_links
    if scope == ShardingScope.WORLD:
        return ScopeLinks(cluster.ranks, levels.hierarchical.all_gather, levels.hierarchical.reduce_scatter)
    inside = levels.intra_node
    return ScopeLinks(
        cluster.devices_per_node, inside.all_gather, inside.reduce_scatter, levels.inter_node, nodes=cluster.nodes
    )


def gather_link_bytes(cluster: Cluster, scope: ShardingScope, hierarchical: bool, unsharded_bytes: float) -> float:
    """Bytes that each node sends to others for one all-gather."""
    if cluster.nodes == 1 or scope == ShardingScope.NODE:
        return 0.0
    if hierarchical and cluster.is_hierarchical:
        return unsharded_bytes * (cluster.nodes - 1) / cluster.nodes
    return unsharded_bytes * (cluster.ranks - 1) / cluster.ranks


def reduce_link_bytes(cluster: Cluster, scope: ShardingScope, hierarchical: bool, unsharded_bytes: float) -> float:
    """Bytes that each node sends to others for one reduce-scatter, the all-reduce between nodes not included."""
    direct = cluster.uses_ring_collectives and cluster.ranks > 2 and unsharded_bytes <= DIRECT_REDUCE_SCATTER_BYTES
    if scope == ShardingScope.WORLD and direct and not (hierarchical and cluster.is_hierarchical):
        outside = cluster.ranks - cluster.devices_per_node
        return cluster.devices_per_node * outside * unsharded_bytes / cluster.ranks
    return gather_link_bytes(cluster, scope, hierarchical, unsharded_bytes)


def all_reduce_link_bytes(ranks: int, nodes: int, unsharded_bytes: float) -> float:
    """Bytes that each node sends to others for one ring all-reduce of ``ranks`` ranks on ``nodes`` nodes."""
    return 2 * unsharded_bytes * (ranks - 1) / ranks if nodes > 1 else 0.0


def step_link_bytes(
    cluster: Cluster,
    mode: Mode,
    scope: ShardingScope,
    hierarchical: bool,
    unsharded_bytes: float,
    accumulation: int = 1,
) -> float:
    """Bytes that each node sends to others in one optimizer step for a trainable parameter kept in ``mode``.

    Args:
        cluster: nodes, devices and backend; links are not looked at.
        mode: of the parameter.
        scope: the ranks that it is sharded over.
        hierarchical: whether world-wide collectives run in two stages.
        unsharded_bytes: of the whole parameter, and of its gradient.
        accumulation: micro-batches of the step.
    """
    alone = cluster.devices_per_node == 1 and cluster.nodes > 1 and scope == ShardingScope.NODE
    if mode == Mode.DP or alone:
        return all_reduce_link_bytes(cluster.ranks, cluster.nodes, unsharded_bytes)
    gathers = 2 if mode == Mode.ZDP else 1
    once = gathers * gather_link_bytes(cluster, scope, hierarchical, unsharded_bytes)
    once += reduce_link_bytes(cluster, scope, hierarchical, unsharded_bytes)
    if scope == ShardingScope.NODE and cluster.is_hierarchical:
        return all_reduce_link_bytes(cluster.nodes, cluster.nodes, unsharded_bytes)
    return once * accumulation

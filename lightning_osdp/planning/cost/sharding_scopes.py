"""How a sharding scope exchanges parameters and gradients, and the times of that from measured fits.

With n nodes of d ranks, N = n d, and an unsharded tensor of P bytes, a node sends to the others over its link

    flat          (N - 1) / N P   gather or reduce-scatter, a ring over all ranks
    hierarchical  (n - 1) / n P   each node's part once to each other node
    all-reduce    twice that of its ranks: of all ranks, or of one rank per node

An operator sharded inside nodes gathers and reduces there, and all-reduces parts of P / d between nodes: d such parts
leave a node, 2 (n - 1) / n P in total, once per optimizer step.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.choices import ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit

DIRECT_REDUCE_SCATTER_BYTES = 1 << 20
"""On gloo with more than two ranks, tensors up to this size are reduced in one round, each rank sending every other its
part, instead of N - 1 rounds of a ring. [M-cost-9]"""

COALESCE_BYTES = 4 << 20
"""On CPUs, gradients of one unit up to this total are reduced by one collective once all exist. [M-cost-10]"""

PREFETCHED_UNITS = 2
"""On CPUs, units that are gathered ahead of the one that runs. [M-engine-33]"""

ANY_SIZE = 1 << 62
"""``coalesce_max_bytes`` where a backend reduces several tensors of any size in one call (NCCL)."""


class ScopeLinks(NamedTuple):
    """The collectives of a sharding scope."""

    ranks: int
    """Ranks that states are spread over."""
    all_gather: CollectiveFit
    reduce_scatter: CollectiveFit
    inter_node: CollectiveFit | None = None
    """All-reduce of a gradient's part between nodes; None if the scope is all ranks."""
    nodes: int = 1
    """Nodes that ``inter_node`` connects."""

    def overlapped_part(self) -> ScopeLinks:
        """Return the same with the part of each collective that compute can hide."""
        return self._replace(
            all_gather=self.all_gather.overlapped_part(),
            reduce_scatter=self.reduce_scatter.overlapped_part(),
            inter_node=self.inter_node and self.inter_node.overlapped_part(),
        )

    def all_gather_s(self, unsharded_bytes: float, tensors: int = 1) -> float:
        """Return the seconds of one all-gather of ``tensors`` tensors, ``unsharded_bytes`` in total."""
        return self.all_gather.time_s(unsharded_bytes, self.ranks, tensors)

    def reduce_scatter_s(self, unsharded_bytes: float, tensors: int = 1) -> float:
        """Return the seconds of one reduce-scatter of ``tensors`` tensors, ``unsharded_bytes`` in total."""
        return self.reduce_scatter.time_s(unsharded_bytes, self.ranks, tensors)

    def inter_node_s(self, unsharded_bytes: float) -> float:
        """Return the seconds to average a gradient's parts between nodes; 0 if the scope is all ranks."""
        return self.inter_node.time_s(unsharded_bytes / self.ranks, self.nodes) if self.inter_node is not None else 0.0


def coalesce_max_bytes(cluster: Cluster, *, is_prefetched: bool) -> int:
    """Return up to which total a unit's gradients are reduced by one collective.

    Args:
        cluster: The ranks.
        is_prefetched: Whether the unit's collectives run beside compute: rings do so gradient by gradient.
    """
    if cluster.backend in ("nccl", "emulated"):
        return ANY_SIZE
    return COALESCE_BYTES if cluster.coalesces_gradients and not is_prefetched else 0


def sharding_ranks(cluster: Cluster, scope: ShardingScope) -> int:
    """Return the number of ranks that states are spread over."""
    return cluster.devices_per_node if scope == ShardingScope.NODE and cluster.is_hierarchical else cluster.ranks


def all_gather_copy_factor(cluster: Cluster, scope: ShardingScope, hierarchical: bool) -> float:
    """Return the extra bytes of a gather as a fraction of its result: a buffer for what other nodes have sent.

    Only two-stage gathers need it; the engine's own rings receive into the result.
    """
    is_staged = hierarchical and scope == ShardingScope.WORLD and cluster.is_hierarchical
    return 1 / cluster.devices_per_node if is_staged and not cluster.uses_ring_collectives else 0.0


def scope_links(cluster: Cluster, scope: ShardingScope, hierarchical: bool = False) -> ScopeLinks:
    """Return the collectives of a unit with this scope.

    Raises:
        ConfigurationError: The links inside and between nodes are needed but were not measured.
    """
    if not cluster.is_hierarchical or (scope == ShardingScope.WORLD and not hierarchical):
        return ScopeLinks(cluster.ranks, cluster.link.all_gather, cluster.link.reduce_scatter)
    links = cluster.hierarchical_links
    if links is None:
        raise ConfigurationError("the cluster does not say what its nodes cost by themselves (levels): measure it anew")
    if scope == ShardingScope.WORLD:
        return ScopeLinks(cluster.ranks, links.hierarchical.all_gather, links.hierarchical.reduce_scatter)
    inside = links.intra_node
    return ScopeLinks(
        cluster.devices_per_node, inside.all_gather, inside.reduce_scatter, links.inter_node, nodes=cluster.nodes
    )

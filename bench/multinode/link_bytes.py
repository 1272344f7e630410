"""Bytes that a node sends to the others over its link, by the formulas of ``planning.cost.sharding_scopes``."""

from __future__ import annotations

from lightning_osdp.planning.cost.sharding_scopes import DIRECT_REDUCE_SCATTER_BYTES
from lightning_osdp.planning.spec.choices import Mode, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster


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

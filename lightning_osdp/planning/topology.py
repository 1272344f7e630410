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
from lightning_osdp.planning.choices import Group, Mode
from lightning_osdp.planning.cluster import Cluster, CollectiveFit

DIRECT_BYTES = 1 << 20
"""On gloo, tensors up to this size are reduced by sending each rank its part in one round, instead of N - 1 of a ring,
when N > 2. [empirical, 4 ranks on 2 cores: 256 KiB 4.5 -> 1.4 ms, 4 MiB no difference]"""

TOGETHER_BYTES = 4 << 20
"""On a CPU, gradients of one unit up to this size in all are reduced together, when all have come: as many messages as
of one. [measured, four gradients of a block, 3 MiB in all, loopback: 2 ranks 4.5 -> 3.0 ms, 4 ranks on 2 cores
10.9 -> 7.6; the same at 1 Gbit/s]"""


class Exchange(NamedTuple):
    """How the ranks of a sharding group exchange a tensor."""

    ranks: int
    """Over which states are spread."""
    gather: CollectiveFit
    reduce: CollectiveFit
    between: CollectiveFit | None = None
    """All-reduce of a gradient's part between nodes; None if the group is all ranks."""
    nodes: int = 1
    """That ``between`` joins."""

    def only_hidden(self) -> Exchange:
        """The part that goes on beside compute."""
        between = None if self.between is None else self.between.only_hidden()
        return self._replace(gather=self.gather.only_hidden(), reduce=self.reduce.only_hidden(), between=between)

    def all_gather_s(self, whole_bytes: float, tensors: int = 1) -> float:
        """Seconds of one all-gather of so many tensors together, ``whole_bytes`` in all."""
        return self.gather.time_s(whole_bytes, self.ranks, tensors)

    def reduce_scatter_s(self, whole_bytes: float, tensors: int = 1) -> float:
        """Seconds of one reduce-scatter of so many tensors together inside the group, ``whole_bytes`` in all."""
        return self.reduce.time_s(whole_bytes, self.ranks, tensors)

    def between_s(self, whole_bytes: float) -> float:
        """Seconds to average the parts of a gradient between nodes; 0 if the group is all ranks."""
        return self.between.time_s(whole_bytes / self.ranks, self.nodes) if self.between is not None else 0.0


def sharding_groups(cluster: Cluster) -> tuple[tuple[Group, bool], ...]:
    """What there is to choose from: (group, whether in two stages). The plain one is first."""
    if not cluster.two_levels or cluster.levels is None:
        return ((Group.WORLD, False),)
    return ((Group.WORLD, False), (Group.WORLD, True), (Group.NODE, False))


def sharding_ranks(cluster: Cluster, group: Group) -> int:
    """Over how many ranks states are spread."""
    return cluster.devices_per_node if group == Group.NODE and cluster.two_levels else cluster.ranks


def gather_copy(cluster: Cluster, group: Group, two_stage: bool) -> float:
    """What a gather takes beside its result, as a share of it: in two stages, what came from the other nodes first.

    On a CPU that is received where it belongs.
    """
    staged = two_stage and group == Group.WORLD and cluster.two_levels and not cluster.own_rings
    return 1 / cluster.devices_per_node if staged else 0.0


def exchange(cluster: Cluster, group: Group, two_stage: bool = False) -> Exchange:
    """How a unit with this group exchanges its parameters and gradients.

    Raises:
        ConfigurationError: the links that it needs were not measured.
    """
    plain = Exchange(sharding_ranks(cluster, Group.WORLD), cluster.link.all_gather, cluster.link.reduce_scatter)
    if not cluster.two_levels or (group == Group.WORLD and not two_stage):
        return plain
    if cluster.levels is None:
        raise ConfigurationError("the cluster does not say what its nodes cost by themselves (levels): measure it anew")
    levels = cluster.levels
    if group == Group.WORLD:
        return Exchange(cluster.ranks, levels.two_stage.all_gather, levels.two_stage.reduce_scatter)
    inside = levels.inside
    return Exchange(
        cluster.devices_per_node, inside.all_gather, inside.reduce_scatter, levels.between, nodes=cluster.nodes
    )


def gather_link_bytes(cluster: Cluster, group: Group, two_stage: bool, whole_bytes: float) -> float:
    """Bytes that each node sends to others for one all-gather."""
    if cluster.nodes == 1 or group == Group.NODE:
        return 0.0
    if two_stage and cluster.two_levels:
        return whole_bytes * (cluster.nodes - 1) / cluster.nodes
    return whole_bytes * (cluster.ranks - 1) / cluster.ranks


def reduce_link_bytes(cluster: Cluster, group: Group, two_stage: bool, whole_bytes: float) -> float:
    """Bytes that each node sends to others for one reduce-scatter, the all-reduce between nodes not included."""
    direct = cluster.own_rings and cluster.ranks > 2 and whole_bytes <= DIRECT_BYTES
    if group == Group.WORLD and direct and not (two_stage and cluster.two_levels):
        outside = cluster.ranks - cluster.devices_per_node
        return cluster.devices_per_node * outside * whole_bytes / cluster.ranks
    return gather_link_bytes(cluster, group, two_stage, whole_bytes)


def all_reduce_link_bytes(ranks: int, nodes: int, whole_bytes: float) -> float:
    """Bytes that each node sends to others for one ring all-reduce of ``ranks`` ranks on ``nodes`` nodes."""
    return 2 * whole_bytes * (ranks - 1) / ranks if nodes > 1 else 0.0


def step_link_bytes(
    cluster: Cluster, mode: Mode, group: Group, two_stage: bool, whole_bytes: float, accumulation: int = 1
) -> float:
    """Bytes that each node sends to others in one optimizer step for a trainable parameter kept in ``mode``.

    Args:
        cluster: nodes, devices and backend; links are not looked at.
        mode: of the parameter.
        group: the ranks that it is sharded over.
        two_stage: whether world-wide collectives run in two stages.
        whole_bytes: of the whole parameter, and of its gradient.
        accumulation: micro-batches of the step.
    """
    alone = cluster.devices_per_node == 1 and cluster.nodes > 1 and group == Group.NODE
    if mode == Mode.DP or alone:
        return all_reduce_link_bytes(cluster.ranks, cluster.nodes, whole_bytes)
    gathers = 2 if mode == Mode.ZDP else 1
    once = gathers * gather_link_bytes(cluster, group, two_stage, whole_bytes)
    once += reduce_link_bytes(cluster, group, two_stage, whole_bytes)
    if group == Group.NODE and cluster.two_levels:
        return all_reduce_link_bytes(cluster.nodes, cluster.nodes, whole_bytes)
    return once * accumulation

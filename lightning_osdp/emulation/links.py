"""The seconds that collectives take on the links of a described cluster, and which links they occupy."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

NODE, NETWORK = "node", "network"
"""Names of the two links: that of the devices of one node, and that of the nodes."""


@dataclass(frozen=True)
class EmulatedLinks:
    """The links of a cluster whose ranks are numbered node by node.

    Attributes:
        cluster: number of nodes and devices, and what their collectives cost.
    """

    cluster: Cluster

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Number of ranks on each node."""
        return self.cluster.devices_by_node or (self.cluster.devices_per_node,) * self.cluster.nodes

    def seconds(self, collective: Collective, num_bytes: int, ranks: Sequence[int], tensors: int = 1) -> float:
        """Return the seconds of one collective.

        Args:
            collective: the kind; others cost as much as the one that sends as many bytes.
            num_bytes: bytes of the unsharded tensors.
            ranks: global numbers of those that take part.
            tensors: number of tensors that one call sends.
        """
        if len(ranks) == 1:
            return 0.0
        per_node = _ranks_per_node(self.node_sizes, tuple(ranks))
        links = self.cluster.hierarchical_links
        if links is None or len(ranks) == self.cluster.ranks:
            fit: CollectiveFit = getattr(self.cluster.link, collective)
        elif len(per_node) == 1:
            return _inside_node_s(links.intra_node, collective, num_bytes, len(ranks), tensors)
        elif max(per_node) == 1:
            rings = 1.0 if collective == "all_reduce" else 0.5
            return rings * links.inter_node.time_s(num_bytes, len(ranks), tensors)
        else:  # as many such groups as fit into a node share its adapter
            fit = getattr(self.cluster.link, collective)
            groups = self.cluster.devices_per_node / max(per_node)
            fit = fit.model_copy(update={"s_per_byte": fit.s_per_byte * groups})
        return fit.time_s(num_bytes, len(ranks), tensors)

    def message_s(self, num_bytes: int, pair: tuple[int, int]) -> float:
        """Return the seconds of a message between two ranks, whose global numbers are ``pair``."""
        return self.seconds("all_gather", 2 * num_bytes, pair)  # on two ranks half of its bytes are sent

    def occupied(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the links that a collective of these ranks occupies: two collectives on a link wait for each other."""
        per_node = _ranks_per_node(self.node_sizes, tuple(ranks))
        return ((NODE,) if max(per_node) > 1 else ()) + ((NETWORK,) if len(per_node) > 1 else ())


@lru_cache(maxsize=256)
def _ranks_per_node(node_sizes: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of the ranks are on each node that has any."""
    ends = list(accumulate(node_sizes))
    counts = Counter(bisect_right(ends, rank) for rank in ranks)
    return tuple(counts[node] for node in sorted(counts))


def _inside_node_s(link: object, collective: Collective, num_bytes: int, ranks: int, tensors: int) -> float:
    """Return the seconds inside a node; an all-reduce is a reduce-scatter and a gather."""
    parts = ("reduce_scatter", "all_gather") if collective == "all_reduce" else (collective,)
    return sum(float(getattr(link, part).time_s(num_bytes, ranks, tensors)) for part in parts)

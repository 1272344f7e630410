"""The processes that train together, and the cluster that they are."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_osdp.autotune.profile import ClusterProfile
from lightning_osdp.backend import agree, collectives
from lightning_osdp.backend.emulated import described_cluster, is_emulated
from lightning_osdp.backend.hierarchical import detect_node_layout
from lightning_osdp.backend.memory import KEPT_BYTES, control_group
from lightning_osdp.backend.work import is_driven_by_host
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.cluster import (
    NO_ENGINE_OVERHEAD,
    Cluster,
    CollectiveFit,
    EngineOverhead,
    HierarchicalLinks,
    Link,
    ShardingLink,
)

Result = TypeVar("Result")

NO_LINK = Link(**{name: CollectiveFit(latency_s=0.0, s_per_byte=0.0) for name in Link.model_fields})
"""The link of a single rank, and of ranks whose links are not measured yet."""

SINGLE_PROCESS_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend that a process without a process group would train with, by type of device."""


@dataclass(frozen=True)
class RankGroup:
    """The processes that train together, or a single process without a process group.

    Every method that communicates is collective: every rank must call it. Without a process group they return their
    arguments.

    Attributes:
        group: the process group; None for a single process without one.
        nodes: number of machines with equally many ranks; 1 if the machines differ.
        device: the device of this rank.
        devices_by_node: number of ranks of each machine, if the machines differ.
    """

    group: Any
    nodes: int
    device: torch.device
    devices_by_node: tuple[int, ...] = ()

    @classmethod
    def single(cls, device: torch.device) -> RankGroup:
        """Return the group of a process without others."""
        return cls(None, 1, device)

    @classmethod
    def from_node_rank(cls, group: Any, node_rank: int, device: torch.device) -> RankGroup:
        """Ask all ranks which machine they are on. Collective: every rank must call it."""
        sizes, even = detect_node_layout(group, node_rank)
        if even:
            return cls(group, len(sizes), device)
        if group.rank() == 0:
            warnings.warn(
                f"ranks are spread over nodes as {', '.join(map(str, sizes))} (in the order of ranks): operators are "
                "sharded over all ranks only. Sharding inside nodes needs equally many on each, numbered node by node",
                OSDPWarning,
                stacklevel=2,
            )
        return cls(group, 1, device, devices_by_node=sizes)

    @property
    def is_hierarchical(self) -> bool:
        """Return whether there are several machines with several ranks each."""
        return 1 < self.nodes < self.world_size

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else int(self.group.size())

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return 0 if self.group is None else int(self.group.rank())

    @property
    def is_offline(self) -> bool:
        """Return whether one process plans by itself, without a process group and for ranks that are not here."""
        return self.group is None

    @property
    def is_emulated(self) -> bool:
        """Return whether the other ranks are not there, but copies of this one."""
        return is_emulated(self.group)

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this rank plans, prints and writes files."""
        return self.rank == 0

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest value of each number over the ranks."""
        if self.group is None:
            return list(numbers)
        return agree.all_reduce_max(numbers, self.group, self.device)

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest value over the ranks."""
        return -int(self.all_reduce_max([-value])[0])

    def broadcast_object(self, value: Result, source: int = 0) -> Result:
        """Return on every rank the value of rank ``source``, the first one unless told otherwise."""
        return value if self.group is None else agree.broadcast_object(self.group, value, source)

    def all_gather_object(self, value: Result) -> list[Result]:
        """Return the values of all ranks, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(self.group)

    def raise_on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank, and raise on every rank if it fails on one."""
        return work() if self.group is None else agree.raise_on_all_ranks(self.group, work)

    def count_equal(self, value: object) -> int:
        """Return the number of ranks with the same ``value`` as this one; 1 if the others are not there."""
        if self.is_emulated:
            return 1
        return self.all_gather_object(value).count(value)


def ranks_sharing_memory_limit(ranks: RankGroup) -> int:
    """Return the number of ranks in this one's control group, which share its limit. Collective."""
    return ranks.count_equal((platform.node(), control_group(ranks.device)))


def current_cluster(
    ranks: RankGroup,
    link: Link = NO_LINK,
    hierarchical_links: HierarchicalLinks | None = None,
    engine: EngineOverhead = NO_ENGINE_OVERHEAD,
) -> Cluster:
    """Return the hardware that this run is on, with the given measurements."""
    kind = ranks.device.type
    if ranks.group is None:
        backend = SINGLE_PROCESS_BACKENDS[kind]
    else:
        backend = collectives.backend_of(ranks.group, ranks.device)
    return Cluster(
        nodes=ranks.nodes,
        devices_per_node=ranks.world_size // ranks.nodes,
        devices_by_node=ranks.devices_by_node,
        device=device_name(ranks.device),
        backend=backend,
        link=link,
        hierarchical_links=hierarchical_links,
        reduce_scatter_copy_factor=collectives.reduce_scatter_copy_factor(backend, ranks.world_size, kind),
        reduce_scatter_buffer_bytes=collectives.reduce_buffer_bytes(backend, ranks.world_size, kind),
        all_reduce_buffer_bytes=collectives.all_reduce_buffer_bytes(backend, ranks.world_size, kind),
        **KEPT_BYTES.get(kind, {}),
        engine=engine,
    )


def described_links(ranks: RankGroup) -> ClusterProfile:
    """Return the links of an emulated cluster, which are described: nothing has to be measured.

    What a CPU starts and waits for later goes on beside its compute in full.
    """
    cluster = described_cluster(ranks.group)
    overlap = {"overlap_fraction": 1.0 if is_driven_by_host(ranks.device) else 0.0}
    flat = {name: fit.model_copy(update=overlap) for name, fit in cluster.link}
    flat["all_to_all"] = cluster.link.all_to_all
    link, levels = Link(**flat), cluster.hierarchical_links
    if not ranks.is_hierarchical:
        return ClusterProfile(link=link)
    if levels is None:  # one link for all
        alike = ShardingLink(**{name: flat[name] for name in ShardingLink.model_fields})
        levels = HierarchicalLinks(intra_node=alike, inter_node=link.all_reduce, hierarchical=alike)
    inter_node = levels.inter_node.model_copy(update=overlap)
    return ClusterProfile(link=link, hierarchical_links=levels.model_copy(update={"inter_node": inter_node}))


def resolve_cluster(ranks: RankGroup, given_cluster: Cluster | None, cluster_profile: ClusterProfile) -> Cluster:
    """Return the cluster that was given, else this run's, with the measured overhead of the engine."""
    cluster = given_cluster or current_cluster(ranks, cluster_profile.link, cluster_profile.hierarchical_links)
    return cluster.model_copy(update={"engine": cluster_profile.engine})


def device_name(device: torch.device) -> str:
    """Return the name of a device in a cluster, such as ``cpu`` or ``cuda: NVIDIA H200``."""
    return "cpu" if device.type == "cpu" else f"cuda: {torch.cuda.get_device_name(device)}"

"""The process groups of tensor parallelism: t consecutive ranks hold all slices, every t-th rank the same one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.backend.hierarchical import cached_node_groups


@dataclass(frozen=True)
class TensorGroups:
    """The process groups of one degree.

    Attributes:
        degree: number of slices, t.
        slices: t consecutive ranks, each of which holds another slice.
        replicas: the ranks that hold the same slice as this one.
        host: the ranks of ``slices``, for numbers on the host.
        replica_hosts: those of ``replicas``. Averages that not all of them have started yet don't delay their numbers.
    """

    degree: int
    slices: Any
    replicas: Any
    host: Any
    replica_hosts: Any

    @classmethod
    def create(cls, world: Any, degree: int, device: torch.device) -> TensorGroups:
        """Return the groups among all ranks. Collective."""
        groups = cached_node_groups(world, world.size() // degree, "tensor parallelism")
        # Ranks that are not there send numbers by any group; so do those on CPUs that have no averages in flight.
        is_shared = is_emulated(world) or (device.type == "cpu" and degree == world.size())
        hosts = groups if is_shared else cached_node_groups(world, world.size() // degree, "hosts", "gloo")
        return cls(degree, groups.intra_node, groups.inter_node, hosts.intra_node, hosts.inter_node)

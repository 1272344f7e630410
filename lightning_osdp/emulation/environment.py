"""The plugin that lets a Trainer run as rank 0 of a cluster that is not there."""

from __future__ import annotations

import json
from pathlib import Path

from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_osdp.emulation.checkpoints import forbid_checkpoints
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.emulation.refused_strategies import refuse_other_strategies
from lightning_osdp.emulation.samplers import divide_samples_over_all_ranks
from lightning_osdp.errors import ConfigurationError, check_kind
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.whatif import hardware as hardware_files
from lightning_osdp.strategy import arguments

MAX_RANKS = 1 << 16
"""Process groups list their ranks."""


class EmulatedCluster(ClusterEnvironment):
    """Makes this process rank 0 of a described cluster: ``Trainer(devices=1, plugins=[EmulatedCluster(...)])``.

    The process joins the emulated process group at once, since strategies join a group that they find.

    Args:
        hardware: the name of a described hardware, the path of its file or of one that ``osdp profile`` wrote, or a
            measured ``Cluster``.
        devices: number of devices; None for all of the hardware.
        nodes: number of nodes that they are spread over; None for as few as possible.

    Raises:
        ConfigurationError: there is no such hardware, it has fewer devices, or the process is in a process group.
    """

    def __init__(self, hardware: str | Path | Cluster, devices: int | None = None, nodes: int | None = None) -> None:
        super().__init__()
        self.cluster = resolve_cluster(hardware, devices, nodes)
        join(EmulatedLinks(self.cluster))
        forbid_checkpoints()
        divide_samples_over_all_ranks()
        refuse_other_strategies()
        rank_zero_info(describe_cluster(self.cluster))

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self.cluster.ranks

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the cluster says how many ranks there are."""

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the process is rank 0."""

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a Trainer that would start processes.

        Raises:
            ConfigurationError: it has several devices.
        """
        if num_devices * num_nodes != 1:
            raise ConfigurationError(
                f"an emulated cluster runs in one process: give the Trainer devices=1 and num_nodes=1, and "
                f"EmulatedCluster(devices={num_devices * num_nodes})"
            )


def describe_cluster(cluster: Cluster) -> str:
    """Return what a user has to know before anything else."""
    nodes = "one node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    return (
        f"Emulating {cluster.ranks} ranks ({nodes}) in one process: time and memory are those of rank 0, losses and "
        "metrics mean nothing, and no checkpoints are saved."
    )


def resolve_cluster(hardware: str | Path | Cluster, devices: int | None, nodes: int | None = None) -> Cluster:
    """Return the cluster of a hardware's name, of a hardware file or a cluster file, or a given one.

    Args:
        hardware: as for ``EmulatedCluster``.
        devices: number of devices; None for all.
        nodes: number of nodes that they are spread over; None for as few as possible.

    Raises:
        ConfigurationError: the hardware does not have so many, they can't be spread evenly, or are too many.
    """
    cluster = _find_cluster(hardware, devices, nodes)
    if cluster.ranks > MAX_RANKS:
        raise ConfigurationError(f"{cluster.ranks:,} ranks can't be emulated: {MAX_RANKS:,} at most")
    return cluster


def _find_cluster(hardware: str | Path | Cluster, devices: int | None, nodes: int | None) -> Cluster:
    for name, value in (("devices", devices), ("nodes", nodes)):
        arguments.validate_positive(name, value)
    wanted = "the name of a hardware, the path of its file or of a cluster's, or a Cluster"
    check_kind("hardware", hardware, (str, Path, Cluster), wanted)
    if not isinstance(hardware, Cluster) and _is_cluster_file(Path(hardware)):
        hardware = arguments.read_cluster(hardware) or hardware
    if isinstance(hardware, Cluster):
        if nodes not in (None, hardware.nodes):
            raise ConfigurationError(f"the cluster has {hardware.nodes} nodes, not {nodes}")
        if devices not in (None, hardware.ranks):
            raise ConfigurationError(f"the cluster has {hardware.ranks} devices, not {devices}")
        return hardware
    described = hardware_files.load(hardware)
    if nodes is not None:
        devices = devices or described.devices
        if devices % nodes or nodes > described.nodes or devices // nodes > described.devices_per_node:
            raise ConfigurationError(
                f"{devices} devices can't be spread evenly over {nodes} nodes of {described.name}, which has "
                f"{described.nodes} of {described.devices_per_node}"
            )
        described = described.model_copy(update={"nodes": nodes, "devices_per_node": devices // nodes})
    # Emulated collectives go on beside compute for all of their time.
    return hardware_files.build_cluster(described, devices).with_overlap(1.0)


def _is_cluster_file(path: Path) -> bool:
    """Return whether a file is meant as a measured cluster, which has fields that no hardware has."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
    except (OSError, ValueError, RecursionError):  # reading it as hardware says what is wrong
        return False
    return isinstance(data, dict) and not {"link", "hierarchical_links", "engine"}.isdisjoint(data)

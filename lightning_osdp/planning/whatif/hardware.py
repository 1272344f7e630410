"""Hardware that is not at hand, from data sheets: a description file becomes a ``Cluster``.

A description is one node of equal devices (``hardware_files/nodes``) and, for several nodes, the network between them
(``hardware_files/networks``). The files name the source of each number. Names are composed:

    h100-80gb-nvlink                one node
    2xh100-80gb-nvlink+200gbit      two of them over a network of 200 Gbit/s

A collective is modelled as a ring over all devices, neighbours within a node first, as NCCL builds it. Every link of
the ring carries the same bytes, so the slowest one decides the bandwidth: the network as soon as there are two nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from lightning_osdp.errors import ConfigurationError, check_kind
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, HierarchicalLinks, Link, ShardingLink
from lightning_osdp.planning.spec.files import MAX_NUMBER, describe_error
from lightning_osdp.planning.spec.frozen import Count, FrozenModel, Seconds

NODE_COUNTS = (2, 8)
"""Numbers of nodes that ``list_names`` lists; ``load`` takes any number."""

USABLE_MEMORY_FRACTION = 0.92
"""Fraction of a device's memory that is planned with if no limit is given [M-search-2]."""

Rate = Annotated[float, Field(ge=1, le=MAX_NUMBER)]
"""Bytes or operations per second."""

MIN_BYTES_PER_S, MAX_LATENCY_S = 1e6, 1.0
"""No link in a file is slower: with numbers in GB/s or microseconds, an emulated step would take hours."""

_NAME = re.compile(r"(?:(\d+)x)?([^+]+?)(?:\+([^+]+))?")
_FILES = resources.files(__package__) / "hardware_files"


class LinkSpec(FrozenModel):
    """One hop of a ring: the latency of a step, and the bus bandwidth that each collective reaches over it.

    Bus bandwidth as in ``nccl-tests`` (its doc/PERFORMANCE.md): bytes per second over each link of a ring, 2 (N - 1) /
    N of the tensor's bytes for an all-reduce, (N - 1) / N for its two halves.
    """

    latency_s: Seconds
    all_reduce_bytes_per_s: Rate
    all_gather_bytes_per_s: Rate
    reduce_scatter_bytes_per_s: Rate


class Hardware(FrozenModel):
    """Nodes of equal devices, as a data sheet describes them."""

    name: str
    device: str
    """Name of the device, as its vendor writes it."""
    nodes: Count = 1
    devices_per_node: Count
    memory_bytes: Count
    """Memory of one device."""
    peak_flops: dict[str, Rate]
    """FLOP/s of dense matrix products by dtype: ``fp32``, ``tf32``, ``fp16``, ``bf16``."""
    memory_bytes_per_s: Rate
    """Bandwidth between a device and its own memory."""
    start_latency_s: Seconds = 0.0
    """Latency of any collective before its first step."""
    within_node: LinkSpec
    between_nodes: LinkSpec | None = None
    """The adapter of a node, shared by its devices; None if there is one node only."""
    backend: str = "nccl"
    overlap: float = Field(ge=0, le=1, default=0.0)
    """See ``Cluster.overlap``. 0 adds communication to compute, as the paper's equation 2 does."""
    sources: dict[str, str]
    """Source of each number, by the name of its field (``within_node.latency_s``)."""

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return self.nodes * self.devices_per_node

    def usable_bytes(self, share: float = 1.0) -> int:
        """Return the bytes of a device that are planned with if no limit is given, or a share of them."""
        return int(share * USABLE_MEMORY_FRACTION * self.memory_bytes)

    def get_peak_flops(self, dtype: str) -> float:
        """Return the FLOP/s of dense matrix products in ``dtype``.

        Raises:
            ConfigurationError: the device has none; lists those it has.
        """
        if dtype not in self.peak_flops:
            raise ConfigurationError(
                f"{self.device} has no peak FLOP/s for {dtype!r}: give {_join_with_or(self.peak_flops)}"
            )
        return self.peak_flops[dtype]


def list_names() -> tuple[str, ...]:
    """Return the names of the hardware in this package, in one node and in several."""
    nodes, networks = _list_stems("nodes"), _list_stems("networks")
    several = [f"{count}x{node}+{network}" for node in nodes for count in NODE_COUNTS for network in networks]
    return (*nodes, *several)


def load(name_or_path: str | Path) -> Hardware:
    """Return the hardware of a name or of a JSON file.

    Args:
        name_or_path: ``NODE``, ``<count>xNODE+NETWORK``, or the path of a file with the fields of ``Hardware``.

    Raises:
        ConfigurationError: there is no such name or file, or a field is missing or wrong.
    """
    check_kind("hardware", name_or_path, (str, Path), "the name of a hardware or the path of its file")
    path = Path(name_or_path)
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigurationError(f"there is no hardware file {path}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the hardware file {path} can't be read: {error}") from error
        return _parse(text, str(path))
    return _combine(str(name_or_path))


def build_cluster(hardware: Hardware, devices: int | None = None) -> Cluster:
    """Return the cluster of ``devices`` that train together (None for all), as ``resolve_cluster`` measures a real one.

    Each collective's time is ``(N - 1) (latency + s_per_byte * P / N)`` (the paper's equation 2). A ring of N devices
    on n nodes makes N - 1 steps, n - 1 of them between nodes (NCCL's own model, src/graph/tuning.cc), and an
    all-reduce is two rings. With k = 2 for it and 1 for the others, and bus bandwidth B of the slowest link:

        latency = (start + k ((N - n) within + (n - 1) between)) / (N - 1),    s_per_byte = k / B

    Raises:
        ConfigurationError: there are fewer devices, or they can't be spread evenly over nodes.
    """
    ranks = hardware.devices if devices is None else devices
    nodes = _min_nodes(hardware, ranks)
    links = [hardware.within_node] if ranks > nodes else []
    steps_s = (ranks - nodes) * hardware.within_node.latency_s
    if nodes > 1:
        assert hardware.between_nodes is not None, "_parse checks this"
        links.append(hardware.between_nodes)
        steps_s += (nodes - 1) * hardware.between_nodes.latency_s

    def ring_fit(rings: int, bandwidths: list[float]) -> CollectiveFit:
        if ranks == 1:
            return CollectiveFit(latency_s=0.0, s_per_byte=0.0)
        latency_s = (hardware.start_latency_s + rings * steps_s) / (ranks - 1)
        return CollectiveFit(latency_s=latency_s, s_per_byte=rings / min(bandwidths))

    return Cluster(
        nodes=nodes,
        devices_per_node=ranks // nodes,
        device=f"cuda: {hardware.device}",
        backend=hardware.backend,
        link=Link(
            all_reduce=ring_fit(2, [link.all_reduce_bytes_per_s for link in links]),
            all_gather=ring_fit(1, [link.all_gather_bytes_per_s for link in links]),
            reduce_scatter=ring_fit(1, [link.reduce_scatter_bytes_per_s for link in links]),
        ),
        hierarchical_links=build_hierarchical_links(hardware, nodes, ranks // nodes) if 1 < nodes < ranks else None,
        overlap=hardware.overlap,
        reduce_scatter_copy_factor=0.0,  # NCCL sums into its output
    )


def build_hierarchical_links(hardware: Hardware, nodes: int, devices_per_node: int) -> HierarchicalLinks:
    """Return the links inside nodes, between them, and of hierarchical collectives, for n nodes of d devices, N in all.

    All d devices of a node share its adapter, so an all-reduce between nodes of one part per device takes d times the
    bytes of a part over it. A hierarchical collective moves (n - 1) / n of a tensor over the adapter and (d - 1) / d
    over each link inside, with one collective per node's row:

        latency = ((n + 1) start + (n - 1) between + n (d - 1) within) / (N - 1)
        s_per_byte = ((n - 1) / n / B_between + (d - 1) / d / B_within) N / (N - 1)
    """
    within, between, start_s = hardware.within_node, hardware.between_nodes, hardware.start_latency_s
    n, d, ranks = nodes, devices_per_node, nodes * devices_per_node
    assert between is not None, "there are several nodes"

    def ring_fit(bytes_per_s: float) -> CollectiveFit:
        return CollectiveFit(latency_s=start_s / (d - 1) + within.latency_s, s_per_byte=1 / bytes_per_s)

    def hierarchical_fit(inter_node_bytes_per_s: float, intra_node_bytes_per_s: float) -> CollectiveFit:
        latency_s = (n + 1) * start_s + (n - 1) * between.latency_s + n * (d - 1) * within.latency_s
        s_per_byte = (n - 1) / n / inter_node_bytes_per_s + (d - 1) / d / intra_node_bytes_per_s
        return CollectiveFit(latency_s=latency_s / (ranks - 1), s_per_byte=s_per_byte * ranks / (ranks - 1))

    return HierarchicalLinks(
        intra_node=ShardingLink(
            all_gather=ring_fit(within.all_gather_bytes_per_s),
            reduce_scatter=ring_fit(within.reduce_scatter_bytes_per_s),
        ),
        inter_node=CollectiveFit(
            latency_s=start_s / (n - 1) + 2 * between.latency_s, s_per_byte=2 * d / between.all_reduce_bytes_per_s
        ),
        hierarchical=ShardingLink(
            all_gather=hierarchical_fit(between.all_gather_bytes_per_s, within.all_gather_bytes_per_s),
            reduce_scatter=hierarchical_fit(between.reduce_scatter_bytes_per_s, within.reduce_scatter_bytes_per_s),
        ),
    )


def _min_nodes(hardware: Hardware, devices: int) -> int:
    """Return the fewest nodes over which the devices can be spread evenly."""
    if not 1 <= devices <= hardware.devices:
        networks = _join_with_or(_list_stems("networks"))
        hint = "" if hardware.nodes > 1 else f"; for more, name it as 2x{hardware.name}+NETWORK ({networks})"
        raise ConfigurationError(f"{hardware.name} has 1 to {hardware.devices} devices, not {devices}{hint}")
    for nodes in range(-(-devices // hardware.devices_per_node), hardware.nodes + 1):
        if devices % nodes == 0:
            return nodes
    raise ConfigurationError(
        f"{devices} devices can't be spread evenly over at most {hardware.nodes} nodes of {hardware.devices_per_node}"
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _combine(name: str) -> Hardware:
    match = _NAME.fullmatch(name)
    count, node, network = match.groups() if match is not None else (None, name, None)
    nodes, networks = _list_stems("nodes"), _list_stems("networks")
    if node not in nodes or (network is not None and network not in networks):
        raise ConfigurationError(
            f"no hardware is called {name!r}: give {_join_with_or(nodes)}, several of them as 2xNODE+NETWORK with "
            f"{_join_with_or(networks)} as the network, or the path of a .json file"
        )
    num_nodes = int(count) if count is not None else 1
    if num_nodes < 1 or (num_nodes > 1) != (network is not None):
        raise ConfigurationError(f"{name!r}: several nodes and the network between them go together: 2xNODE+NETWORK")
    text = (_FILES / "nodes" / f"{node}.json").read_text(encoding="utf-8")
    if network is None:
        return _parse(text, node)
    data, link = json.loads(text), json.loads((_FILES / "networks" / f"{network}.json").read_text(encoding="utf-8"))
    sources = {f"between_nodes.{field}": source for field, source in link.pop("sources").items() if field in link}
    link.pop("name")
    data |= {"name": name, "nodes": num_nodes, "between_nodes": link, "sources": data["sources"] | sources}
    return _parse(json.dumps(data), name)


def _parse(text: str, source: str) -> Hardware:
    try:
        hardware = Hardware.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigurationError(f"hardware {source}: {describe_error(error)}") from error
    if hardware.nodes > 1 and hardware.between_nodes is None:
        raise ConfigurationError(f"hardware {source}: between_nodes: is needed where there are several nodes")
    for place, link in (("within_node", hardware.within_node), ("between_nodes", hardware.between_nodes)):
        for field, value in (link.model_dump() if link is not None else {}).items():
            is_time = field == "latency_s"
            if value > MAX_LATENCY_S if is_time else value < MIN_BYTES_PER_S:
                what = f"{value:g} {'s' if is_time else 'bytes/s'}"
                raise ConfigurationError(f"hardware {source}: field {place}.{field}: {what} is no link: check its unit")
    return hardware


def _list_stems(kind: str) -> list[str]:
    names = (file.name for file in (_FILES / kind).iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def _join_with_or(words: Iterable[str]) -> str:
    return " or ".join(map(repr, words))

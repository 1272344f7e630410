"""The time of emulated collectives is what the planner predicts for the cluster that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.cost.sharding_scopes import scope_links
from lightning_osdp.planning.spec.choices import ShardingScope
from lightning_osdp.planning.whatif import hardware

MIB = 1 << 20
TWO_NODES = "2xa100-80gb-nvlink+200gbit"


def links(hardware: str, devices: int | None = None, nodes: int | None = None) -> EmulatedLinks:
    return EmulatedLinks(resolve_cluster(hardware, devices, nodes))


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("hardware", "devices"), [("h100-80gb-nvlink", 8), ("h100-80gb-nvlink", 3), (TWO_NODES, 16)])
def test_seconds_of_all_ranks_are_those_of_the_clusters_link(collective: str, hardware: str, devices: int) -> None:
    emulated = links(hardware, devices)
    expected = getattr(emulated.cluster.link, collective).time_s(16 * MIB, devices)
    assert emulated.seconds(collective, 16 * MIB, range(devices)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_seconds_inside_and_between_nodes_are_those_of_sharding_inside_nodes() -> None:
    emulated = links(TWO_NODES, 16)
    inside = scope_links(emulated.cluster, ShardingScope.NODE)
    assert emulated.seconds("all_gather", MIB, range(8)) == pytest.approx(inside.all_gather_s(MIB))
    assert emulated.seconds("reduce_scatter", MIB, range(8, 16)) == pytest.approx(inside.reduce_scatter_s(MIB))
    assert emulated.seconds("all_reduce", MIB // 8, (3, 11)) == pytest.approx(inside.inter_node_s(MIB))
    assert emulated.seconds("all_gather", MIB, (3, 11)) == pytest.approx(inside.inter_node_s(8 * MIB) / 2)


def test_seconds_of_one_rank_are_none() -> None:
    assert links("h100-80gb-nvlink").seconds("all_reduce", MIB, [5]) == 0.0


def test_groups_that_share_an_adapter_take_longer_by_their_number() -> None:
    emulated = links(TWO_NODES, 16)
    halves = [rank for rank in range(16) if rank % 8 < 4]
    whole, half = (emulated.seconds("all_gather", 512 * MIB, ranks) for ranks in (range(16), halves))
    assert half == pytest.approx(2 * whole * (7 / 8) / (15 / 16), rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(range(8), ("node",)), ((0, 8), ("network",)), (range(16), ("node", "network"))]
)
def test_occupied_links_follow_the_nodes_of_the_ranks(ranks: range, expected: tuple[str, ...]) -> None:
    assert links(TWO_NODES, 16).occupied(ranks) == expected


def test_resolve_cluster_lets_compute_hide_collectives_of_described_hardware_alone() -> None:
    found = resolve_cluster("2xtitan-rtx-pcie3+10gbit", 16)
    assert found.hierarchical_links is not None
    assert {found.link.all_gather.overlap_fraction, found.hierarchical_links.inter_node.overlap_fraction} == {1.0}
    measured = found.with_overlap(0.3)
    assert resolve_cluster(measured, None) == measured


def test_resolve_cluster_spreads_devices_over_given_nodes() -> None:
    cluster = resolve_cluster(TWO_NODES, 8, 2)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("hardware", "devices", "nodes", "words"),
    [
        (TWO_NODES, 15, 2, "15 devices can't be spread evenly over 2 nodes"),
        ("h100-80gb-nvlink", 8, 2, "can't be spread evenly over 2 nodes of h100-80gb-nvlink, which has 1 of 8"),
        ("h100-80gb-nvlink", 64, None, "has 1 to 8 devices, not 64"),
        ("no-such-thing", 8, None, "no hardware is called 'no-such-thing'"),
    ],
)
def test_resolve_cluster_of_impossible_numbers_names_them(
    hardware: str, devices: int, nodes: int | None, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve_cluster(hardware, devices, nodes)


HOLES = {
    "no latency inside a node": (lambda data: data["within_node"].pop("latency_s"), "within_node.latency_s"),
    "no bandwidth between nodes": (lambda data: data["between_nodes"].pop("all_gather_bytes_per_s"), "between_nodes"),
    "no network": (lambda data: data.pop("between_nodes"), "between_nodes: is needed where there are several nodes"),
    "no memory": (lambda data: data.pop("memory_bytes"), "memory_bytes"),
    "nothing in a node": (lambda data: data.update(within_node=None), "within_node"),
    "a bandwidth of nothing": (
        lambda data: data["within_node"].update(all_reduce_bytes_per_s=0),
        "within_node.all_reduce_bytes_per_s",
    ),
    "a latency that is no number": (lambda data: data["within_node"].update(latency_s="fast"), "within_node.latency_s"),
    "a bandwidth in GB/s": (
        lambda data: data["within_node"].update(all_gather_bytes_per_s=370),
        "within_node.all_gather_bytes_per_s: 370 bytes/s is no link: check its unit",
    ),
    "a latency in microseconds": (
        lambda data: data["between_nodes"].update(latency_s=5.7),
        "between_nodes.latency_s: 5.7 s is no link: check its unit",
    ),
    "no devices": (lambda data: data.update(devices_per_node=0), "devices_per_node"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_hardware_file_with_a_hole_is_an_error_that_names_it(hole: str, tmp_path: Path) -> None:
    make, words = HOLES[hole]
    data = hardware.load(TWO_NODES).model_dump(mode="json")
    make(data)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match=f"mine.json.*{words}"):
        resolve_cluster(file, 16)


@pytest.mark.parametrize("field", ["link", "devices_per_node", "device", "backend"])
def test_cluster_file_with_a_hole_is_an_error_that_names_it(field: str, tmp_path: Path) -> None:
    data = resolve_cluster(TWO_NODES, 16).model_dump(mode="json")
    del data[field]
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match=f"cluster.json is not a cluster file: .*{field}"):
        resolve_cluster(file, 16)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00", "[" * 5000])
def test_file_that_describes_nothing_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"hardware .*mine\.json"):
        resolve_cluster(file, 16)


def test_cluster_file_of_other_size_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(resolve_cluster(TWO_NODES, 16).model_dump_json())
    assert resolve_cluster(file, None).ranks == 16
    with pytest.raises(ConfigurationError, match="the cluster has 16 devices, not 64"):
        resolve_cluster(file, 64)
    with pytest.raises(ConfigurationError, match="the cluster has 2 nodes, not 4"):
        resolve_cluster(file, 16, 4)


@pytest.mark.parametrize(("devices", "nodes", "words"), [(0, None, "devices=0"), (16, -1, "nodes=-1")])
def test_numbers_that_are_not_positive_are_an_error(devices: int, nodes: int | None, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{words} is not a positive whole number"):
        resolve_cluster(TWO_NODES, devices, nodes)


def test_message_takes_half_of_what_two_ranks_gather() -> None:
    emulated = links(TWO_NODES, 16)
    inside = emulated.cluster.hierarchical_links
    assert inside is not None
    fit = inside.intra_node.all_gather
    assert emulated.message_s(MIB, (0, 1)) == pytest.approx(fit.latency_s + MIB * fit.s_per_byte)


def test_several_tensors_of_one_call_take_their_further_latency_each() -> None:
    cluster = resolve_cluster("h100-80gb-nvlink", 8)
    fit = cluster.link.all_gather.model_copy(update={"extra_tensor_latency_s": 0.5})
    link = cluster.link.model_copy(update={"all_gather": fit})
    emulated = EmulatedLinks(cluster.model_copy(update={"link": link}))
    one, three = (emulated.seconds("all_gather", MIB, range(8), tensors) for tensors in (1, 3))
    assert three - one == pytest.approx(7 * 2 * 0.5)

"""Hardware descriptions: each number has a source, and the ring's formula gives what can be worked out on paper."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.choices import Group
from lightning_osdp.planning.hardware import Hardware, Wire, cluster_of, load, names
from lightning_osdp.planning.topology import exchange


def wire(bandwidth: float, latency_s: float = 0.0) -> Wire:
    """The same bus bandwidth for all three collectives."""
    return Wire(
        latency_s=latency_s,
        all_reduce_bytes_per_s=bandwidth,
        all_gather_bytes_per_s=bandwidth,
        reduce_scatter_bytes_per_s=bandwidth,
    )


def hardware(**changes: object) -> Hardware:
    """Two nodes of four devices: 100 B/s and 1 s a step within a node, 10 B/s and 5 s between nodes, 2 s to start."""
    values: dict[str, object] = {
        "name": "made-up",
        "device": "Abacus",
        "nodes": 2,
        "devices_per_node": 4,
        "memory_bytes": 1000,
        "peak_flops": {"fp32": 1.0},
        "memory_bytes_per_s": 1.0,
        "start_latency_s": 2.0,
        "within_node": wire(100.0, 1.0),
        "between_nodes": wire(10.0, 5.0),
        "sources": {},
    }
    return Hardware(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_every_number_of_every_description_has_a_source(name: str) -> None:
    found = load(name)
    assert found.name == name
    assert cluster_of(found).ranks == found.devices
    numbers = {"memory_bytes", "peak_flops", "memory_bytes_per_s", "start_latency_s", "devices_per_node"}
    for kind in ("within_node", "between_nodes"):
        if getattr(found, kind) is not None:
            numbers |= {f"{kind}.{field}" for field in Wire.model_fields}
    assert numbers <= found.sources.keys()
    assert all(len(found.sources[number]) > 20 for number in numbers)


def test_names_cover_one_two_and_eight_nodes_and_two_networks() -> None:
    assert "titan-rtx-pcie3" in names()
    for node in ("titan-rtx-pcie3", "a100-80gb-nvlink", "h100-80gb-nvlink"):
        for count in (2, 8):
            for network in ("200gbit", "10gbit"):
                several = load(f"{count}x{node}+{network}")
                assert (several.nodes, several.devices) == (count, 8 * count)


def test_names_are_those_of_the_files() -> None:
    files = resources.files("lightning_osdp.planning") / "hardware_files" / "nodes"
    stems = {file.name.removesuffix(".json") for file in files.iterdir()}
    assert stems == {name for name in names() if "+" not in name}


def test_one_node_is_a_ring_of_steps() -> None:
    # 4 ranks, one ring: 2 s start + 3 steps of 1 s; each link carries 3/4 of 400 B at 100 B/s: 3 s. All-reduce: two
    # rings and one start.
    cluster = cluster_of(hardware(), 4)
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)
    assert cluster.link.all_gather.time_s(400, 4) == pytest.approx(2 + 3 + 3)
    assert cluster.link.reduce_scatter.time_s(400, 4) == pytest.approx(2 + 3 + 3)
    assert cluster.link.all_reduce.time_s(400, 4) == pytest.approx(2 + 2 * (3 + 3))


def test_the_slowest_link_decides_between_nodes() -> None:
    # 8 ranks on 2 nodes: 7 steps, one of them between nodes: 6 + 5 s; 7/8 of 800 B at 10 B/s: 70 s.
    cluster = cluster_of(hardware(), 8)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.link.all_gather.time_s(800, 8) == pytest.approx(2 + 6 + 5 + 70)
    assert cluster.link.all_reduce.time_s(800, 8) == pytest.approx(2 + 2 * (6 + 5 + 70))


def test_both_levels_follow_from_the_same_numbers() -> None:
    cluster = cluster_of(hardware(), 8)
    node, staged = exchange(cluster, Group.NODE), exchange(cluster, Group.WORLD, two_stage=True)
    assert node.all_gather_s(400) == pytest.approx(2 + 3 + 3)
    # Parts of 200 B go round 2 nodes twice by half, and 4 devices share the adapter: 2 * 100 * 4 B at 10 B/s.
    assert node.between_s(800) == pytest.approx(2 + 2 * 5 + 80)
    # Three starts, a step between nodes, 3 steps inside for each of 2 rows; half of it at 10 B/s, 3/4 of it at 100.
    assert staged.all_gather_s(800) == pytest.approx(3 * 2 + 5 + 2 * 3 + 40 + 6)
    assert staged.reduce_scatter_s(800) == pytest.approx(3 * 2 + 5 + 2 * 3 + 40 + 6)
    assert cluster_of(hardware(), 4).levels is None
    assert cluster_of(hardware(devices_per_node=1), 2).levels is None


def test_a_network_faster_than_the_node_does_not_help() -> None:
    fast = cluster_of(hardware(between_nodes=wire(1e6)), 8)
    assert fast.link.all_gather.s_per_byte == pytest.approx(1 / 100)


def test_one_device_for_each_node_uses_the_network_alone() -> None:
    cluster = cluster_of(hardware(devices_per_node=1, within_node=wire(1.0, 100.0)), 2)
    assert cluster.link.all_gather.time_s(20, 2) == pytest.approx(2 + 5 + 1)


def test_a_single_device_communicates_nothing() -> None:
    cluster = cluster_of(hardware(), 1)
    assert cluster.ranks == 1
    assert cluster.link.all_reduce.time_s(1e9, 1) == 0


def test_devices_are_spread_over_the_fewest_nodes_evenly() -> None:
    assert cluster_of(hardware(nodes=4), 6).nodes == 2
    assert cluster_of(hardware(nodes=4), 9).nodes == 3
    with pytest.raises(ConfigurationError, match="7 devices can't be spread evenly over at most 2 nodes of 4"):
        cluster_of(hardware(), 7)


@pytest.mark.parametrize("devices", [0, 9])
def test_more_devices_than_there_are_is_refused(devices: int) -> None:
    with pytest.raises(ConfigurationError, match=f"made-up has 1 to 8 devices, not {devices}"):
        cluster_of(hardware(), devices)


def test_too_many_for_one_node_says_how_to_name_several() -> None:
    with pytest.raises(ConfigurationError, match=r"2xh100-80gb-nvlink\+NETWORK \('10gbit' or '200gbit'\)"):
        cluster_of(load("h100-80gb-nvlink"), 16)


def test_the_backend_and_device_are_those_of_cuda() -> None:
    cluster = cluster_of(load("a100-80gb-nvlink"))
    assert cluster.device == "cuda: NVIDIA A100-SXM4-80GB"
    assert cluster.backend == "nccl"
    assert cluster.reduce_copy == 0


@pytest.mark.parametrize("name", ["h200", "2xh200+10gbit", "2xa100-80gb-nvlink+1gbit", ""])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match="'a100-80gb-nvlink' or 'h100-80gb-nvlink' or 'titan-rtx-pcie3'"):
        load(name)


@pytest.mark.parametrize("name", ["2xh100-80gb-nvlink", "h100-80gb-nvlink+10gbit", "0xh100-80gb-nvlink"])
def test_nodes_and_network_go_together(name: str) -> None:
    with pytest.raises(ConfigurationError, match="go together"):
        load(name)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(hardware().model_dump_json())
    assert load(file) == hardware()
    assert load(str(file)) == hardware()


def test_damaged_files_name_the_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    data = json.loads(hardware().model_dump_json())
    file.write_text(json.dumps(data | {"within_node": data["within_node"] | {"all_reduce_bytes_per_s": -1}}))
    with pytest.raises(ConfigurationError, match=r"within_node\.all_reduce_bytes_per_s"):
        load(file)
    file.write_text(json.dumps(data | {"between_nodes": None}))
    with pytest.raises(ConfigurationError, match="between_nodes: is needed"):
        load(file)
    with pytest.raises(ConfigurationError, match="there is no hardware file"):
        load(tmp_path / "other.json")


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'fp32' or 'fp16'"):
        load("titan-rtx-pcie3").peak("bf16")

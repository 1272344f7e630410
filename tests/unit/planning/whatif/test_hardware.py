"""Hardware descriptions: each number has a source, and the ring's formula gives what can be worked out on paper."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.cost.sharding_scopes import scope_links
from lightning_osdp.planning.spec.choices import ShardingScope
from lightning_osdp.planning.whatif.hardware import Hardware, LinkSpec, build_cluster, list_names, load


def link_spec(bandwidth: float, latency_s: float = 0.0) -> LinkSpec:
    """The same bus bandwidth for all three collectives."""
    return LinkSpec(
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
        "within_node": link_spec(100.0, 1.0),
        "between_nodes": link_spec(10.0, 5.0),
        "sources": {},
    }
    return Hardware(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list_names())
def test_hardware_files_cite_a_source_for_every_number(name: str) -> None:
    found = load(name)
    assert found.name == name
    assert build_cluster(found).ranks == found.devices
    numbers = {"memory_bytes", "peak_flops", "memory_bytes_per_s", "start_latency_s", "devices_per_node"}
    for kind in ("within_node", "between_nodes"):
        if getattr(found, kind) is not None:
            numbers |= {f"{kind}.{field}" for field in LinkSpec.model_fields}
    assert numbers <= found.sources.keys()
    assert all(len(found.sources[number]) > 20 for number in numbers)


def test_hardware_names_cover_one_two_and_eight_nodes_on_two_networks() -> None:
    assert "titan-rtx-pcie3" in list_names()
    for node in ("titan-rtx-pcie3", "a100-80gb-nvlink", "h100-80gb-nvlink", "rtx-4090-pcie4", "l4-pcie4"):
        for count in (2, 8):
            for network in ("200gbit", "10gbit"):
                several = load(f"{count}x{node}+{network}")
                assert (several.nodes, several.devices) == (count, 8 * count)


def test_hardware_names_match_packaged_files() -> None:
    files = resources.files("lightning_osdp.planning.whatif") / "hardware_files" / "nodes"
    stems = {file.name.removesuffix(".json") for file in files.iterdir()}
    assert stems == {name for name in list_names() if "+" not in name}


def test_build_cluster_on_one_node_follows_ring_formula() -> None:
    # 4 ranks, one ring: 2 s start + 3 steps of 1 s; each link carries 3/4 of 400 B at 100 B/s: 3 s. All-reduce: two
    # rings and one start.
    cluster = build_cluster(hardware(), 4)
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)
    assert cluster.link.all_gather.time_s(400, 4) == pytest.approx(2 + 3 + 3)
    assert cluster.link.reduce_scatter.time_s(400, 4) == pytest.approx(2 + 3 + 3)
    assert cluster.link.all_reduce.time_s(400, 4) == pytest.approx(2 + 2 * (3 + 3))


def test_build_cluster_on_two_nodes_follows_slowest_link() -> None:
    # 8 ranks on 2 nodes: 7 steps, one of them between nodes: 6 + 5 s; 7/8 of 800 B at 10 B/s: 70 s.
    cluster = build_cluster(hardware(), 8)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.link.all_gather.time_s(800, 8) == pytest.approx(2 + 6 + 5 + 70)
    assert cluster.link.all_reduce.time_s(800, 8) == pytest.approx(2 + 2 * (6 + 5 + 70))


def test_build_cluster_derives_hierarchical_links_from_same_numbers() -> None:
    cluster = build_cluster(hardware(), 8)
    node, staged = (
        scope_links(cluster, ShardingScope.NODE),
        scope_links(cluster, ShardingScope.WORLD, hierarchical=True),
    )
    assert node.all_gather_s(400) == pytest.approx(2 + 3 + 3)
    # Parts of 200 B go round 2 nodes twice by half, and 4 devices share the adapter: 2 * 100 * 4 B at 10 B/s.
    assert node.inter_node_s(800) == pytest.approx(2 + 2 * 5 + 80)
    # Three starts, a step between nodes, 3 steps inside for each of 2 rows; half of it at 10 B/s, 3/4 of it at 100.
    assert staged.all_gather_s(800) == pytest.approx(3 * 2 + 5 + 2 * 3 + 40 + 6)
    assert staged.reduce_scatter_s(800) == pytest.approx(3 * 2 + 5 + 2 * 3 + 40 + 6)
    assert build_cluster(hardware(), 4).hierarchical_links is None
    assert build_cluster(hardware(devices_per_node=1), 2).hierarchical_links is None


def test_build_cluster_with_fast_network_is_bounded_by_node_link() -> None:
    fast = build_cluster(hardware(between_nodes=link_spec(1e6)), 8)
    assert fast.link.all_gather.s_per_byte == pytest.approx(1 / 100)


def test_build_cluster_with_one_device_per_node_uses_network_only() -> None:
    cluster = build_cluster(hardware(devices_per_node=1, within_node=link_spec(1.0, 100.0)), 2)
    assert cluster.link.all_gather.time_s(20, 2) == pytest.approx(2 + 5 + 1)


def test_build_cluster_of_single_device_has_no_communication_cost() -> None:
    cluster = build_cluster(hardware(), 1)
    assert cluster.ranks == 1
    assert cluster.link.all_reduce.time_s(1e9, 1) == 0


def test_build_cluster_spreads_devices_evenly_over_fewest_nodes() -> None:
    assert build_cluster(hardware(nodes=4), 6).nodes == 2
    assert build_cluster(hardware(nodes=4), 9).nodes == 3
    with pytest.raises(ConfigurationError, match="7 devices can't be spread evenly over at most 2 nodes of 4"):
        build_cluster(hardware(), 7)


@pytest.mark.parametrize("devices", [0, 9])
def test_build_cluster_rejects_device_count_out_of_range(devices: int) -> None:
    with pytest.raises(ConfigurationError, match=f"made-up has 1 to 8 devices, not {devices}"):
        build_cluster(hardware(), devices)


def test_build_cluster_beyond_one_node_suggests_multi_node_name() -> None:
    with pytest.raises(ConfigurationError, match=r"2xh100-80gb-nvlink\+NETWORK \('10gbit' or '200gbit'\)"):
        build_cluster(load("h100-80gb-nvlink"), 16)


def test_build_cluster_uses_cuda_device_and_nccl_backend() -> None:
    cluster = build_cluster(load("a100-80gb-nvlink"))
    assert cluster.device == "cuda: NVIDIA A100-SXM4-80GB"
    assert cluster.backend == "nccl"
    assert cluster.reduce_scatter_copy_factor == 0


@pytest.mark.parametrize("name", ["h200", "2xh200+10gbit", "2xa100-80gb-nvlink+1gbit", ""])
def test_load_unknown_hardware_name_lists_known_names(name: str) -> None:
    with pytest.raises(ConfigurationError, match="'a100-80gb-nvlink' or 'h100-80gb-nvlink' or 'l4-pcie4' or"):
        load(name)


@pytest.mark.parametrize("name", ["2xh100-80gb-nvlink", "h100-80gb-nvlink+10gbit", "0xh100-80gb-nvlink"])
def test_load_requires_node_count_and_network_together(name: str) -> None:
    with pytest.raises(ConfigurationError, match="go together"):
        load(name)


def test_load_reads_user_hardware_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    real = hardware(within_node=link_spec(2e9, 1e-5), between_nodes=link_spec(1e6, 1.0))
    file.write_text(real.model_dump_json())
    assert load(file) == real
    assert load(str(file)) == real


def test_load_names_damaged_field_or_missing_hardware_file(tmp_path: Path) -> None:
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
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"the hardware file .*mine\.json can't be read: "):
        load(file)


def test_peak_unknown_dtype_lists_known_dtypes() -> None:
    with pytest.raises(ConfigurationError, match="'fp32' or 'fp16'"):
        load("titan-rtx-pcie3").get_peak_flops("bf16")


@pytest.mark.parametrize("name", ["rtx-4090-pcie4", "l4-pcie4"])
def test_cards_of_24_gb_compute_in_bf16_and_hold_less_than_24_gib(name: str) -> None:
    card = load(name)
    assert card.get_peak_flops("bf16") == card.get_peak_flops("fp16") > card.get_peak_flops("fp32")
    assert 22 << 30 < card.memory_bytes < 24 << 30

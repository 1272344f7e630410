"""The time of emulated collectives is what the planner predicts for the cluster that they stand for."""

from __future__ import annotations

import pytest

from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.cost.sharding_scopes import scope_links
from lightning_osdp.planning.spec.choices import ShardingScope

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

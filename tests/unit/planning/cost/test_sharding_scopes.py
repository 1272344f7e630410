"""Costs of sharding groups and stages, against formulas worked out by hand."""

from __future__ import annotations

import pytest

from bench.multinode.link_bytes import all_reduce_link_bytes, gather_link_bytes, reduce_link_bytes, step_link_bytes
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.cost.footprint import footprint
from lightning_osdp.planning.cost.sharding_scopes import scope_links
from lightning_osdp.planning.cost.step_time import communication_time
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem, make_plan
from lightning_osdp.planning.spec.choices import (
    Mode,
    ShardingChoice,
    ShardingScope,
    available_scopes,
    enumerate_choices,
)
from lightning_osdp.planning.spec.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    HierarchicalLinks,
    Link,
    OperatorTime,
    ShardingLink,
)
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Moment, Operator, ParameterInfo

P = 64 << 20


def fit(latency_s: float, s_per_byte: float) -> CollectiveFit:
    return CollectiveFit(latency_s=latency_s, s_per_byte=s_per_byte)


LINK = Link(all_reduce=fit(1.0, 1e-3), all_gather=fit(2.0, 1e-3), reduce_scatter=fit(3.0, 1e-3))
INSIDE = ShardingLink(all_gather=fit(0.2, 1e-6), reduce_scatter=fit(0.3, 1e-6))
LEVELS = HierarchicalLinks(
    intra_node=INSIDE,
    inter_node=fit(5.0, 1e-4),
    hierarchical=ShardingLink(all_gather=fit(7.0, 1e-5), reduce_scatter=fit(8.0, 1e-5)),
)


def cluster(nodes: int, per_node: int, levels: HierarchicalLinks | None = LEVELS, backend: str = "nccl") -> Cluster:
    return Cluster(
        nodes=nodes, devices_per_node=per_node, device="cpu", backend=backend, link=LINK, hierarchical_links=levels
    )


def test_cluster_file_without_hierarchical_links_offers_world_scope_only():
    text = cluster(2, 4, None).model_dump_json(exclude={"hierarchical_links", "devices_by_node"})
    assert Cluster.from_json(text) == cluster(2, 4, None)
    assert available_scopes(cluster(2, 4, None)) == ((ShardingScope.WORLD, False),)
    with pytest.raises(ConfigurationError, match="measure it anew"):
        scope_links(cluster(2, 4, None), ShardingScope.NODE)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (8, 1)])
def test_available_scopes_of_single_level_cluster_are_world_only(nodes, per_node):
    assert available_scopes(cluster(nodes, per_node)) == ((ShardingScope.WORLD, False),)
    assert scope_links(cluster(nodes, per_node), ShardingScope.NODE) == scope_links(
        cluster(nodes, per_node), ShardingScope.WORLD
    )


def test_scope_links_times_match_hand_computation():
    here = cluster(2, 4)
    assert len(available_scopes(here)) == 3
    world = scope_links(here, ShardingScope.WORLD)
    assert (world.ranks, world.inter_node_s(1e6)) == (8, 0.0)
    assert world.all_gather_s(8000) == pytest.approx(7 * (2.0 + 1e-3 * 1000))
    assert world.reduce_scatter_s(8000) == pytest.approx(7 * (3.0 + 1e-3 * 1000))
    staged = scope_links(here, ShardingScope.WORLD, hierarchical=True)
    assert (staged.ranks, staged.inter_node_s(1e6)) == (8, 0.0)
    assert staged.all_gather_s(8e6) == pytest.approx(7 * (7.0 + 1e-5 * 1e6))
    assert staged.reduce_scatter_s(8e6) == pytest.approx(7 * (8.0 + 1e-5 * 1e6))
    node = scope_links(here, ShardingScope.NODE)
    assert node.ranks == 4
    assert node.all_gather_s(4e6) == pytest.approx(3 * (0.2 + 1e-6 * 1e6))
    assert node.reduce_scatter_s(4e6) == pytest.approx(3 * (0.3 + 1e-6 * 1e6))
    assert node.inter_node_s(4e4) == pytest.approx(1 * (5.0 + 1e-4 * 1e4 / 2))  # a part of 1e4 bytes on two nodes


def test_inter_node_link_bytes_match_hand_computation():
    here = cluster(2, 8)
    assert gather_link_bytes(here, ShardingScope.WORLD, False, P) == P * 15 / 16
    assert gather_link_bytes(here, ShardingScope.WORLD, True, P) == P / 2
    assert gather_link_bytes(here, ShardingScope.NODE, False, P) == 0
    assert all_reduce_link_bytes(16, 2, P) == 2 * P * 15 / 16
    assert all_reduce_link_bytes(16, 1, P) == 0
    assert gather_link_bytes(cluster(1, 4), ShardingScope.WORLD, False, P) == 0


@pytest.mark.parametrize(
    ("mode", "group", "hierarchical", "expected"),
    [
        (Mode.DP, ShardingScope.WORLD, False, 2 * 3 / 4),
        (Mode.ZDP, ShardingScope.WORLD, False, 3 * 3 / 4),
        (Mode.ZDP2, ShardingScope.WORLD, False, 2 * 3 / 4),
        (Mode.ZDP, ShardingScope.WORLD, True, 3 / 2),
        (Mode.ZDP2, ShardingScope.WORLD, True, 2 / 2),
        (Mode.ZDP, ShardingScope.NODE, False, 1),
        (Mode.ZDP2, ShardingScope.NODE, False, 1),
    ],
)
def test_step_link_bytes_on_two_nodes_of_two_ranks_match_hand_computation(mode, group, hierarchical, expected):
    once = step_link_bytes(cluster(2, 2), mode, group, hierarchical, P)
    assert once == expected * P
    repeated = mode != Mode.DP and group == ShardingScope.WORLD  # the others cross the link once a step
    assert step_link_bytes(cluster(2, 2), mode, group, hierarchical, P, 3) == once * (3 if repeated else 1)


def test_reduce_link_bytes_on_gloo_send_small_tensors_directly():
    size = 1 << 20
    assert (
        reduce_link_bytes(cluster(2, 2, backend="gloo"), ShardingScope.WORLD, False, size) == size
    )  # 2 ranks x 2 parts of 4
    assert reduce_link_bytes(cluster(2, 2, backend="gloo"), ShardingScope.WORLD, True, size) == size / 2
    assert reduce_link_bytes(cluster(2, 2, backend="gloo"), ShardingScope.WORLD, False, size + 4) == (size + 4) * 3 / 4
    assert reduce_link_bytes(cluster(2, 1, backend="gloo"), ShardingScope.WORLD, False, size) == size / 2


def test_step_link_bytes_of_node_scope_with_one_rank_equal_replication():
    assert step_link_bytes(cluster(4, 1), Mode.ZDP, ShardingScope.NODE, False, P) == 2 * P * 3 / 4


def operator(shape: tuple[int, ...] = (1024, 1024)) -> Operator:
    """One matrix, with Adam's two moments."""
    size = 4 * shape[0] * shape[1]
    weight = ParameterInfo(name="op.weight", shape=shape, optimizer_bytes=2 * size)
    return Operator(name="op", kind="Linear", parameters=(weight,))


def test_node_scope_operator_time_and_footprint_match_hand_computation():
    here, one = cluster(2, 4), operator()
    size = one.parameters[0].parameter_bytes
    choice = ShardingChoice((Mode.ZDP,), scope=ShardingScope.NODE)
    cost = communication_time(one, choice, here)
    assert cost.per_step_s == pytest.approx(5.0 + 1e-4 * size / 4 / 2)
    assert cost.per_microbatch_s == pytest.approx(2 * 3 * (0.2 + 1e-6 * size / 4) + 3 * (0.3 + 1e-6 * size / 4))
    node, world = footprint(one, choice, here), footprint(one, ShardingChoice((Mode.ZDP,)), here)
    assert (node.states, world.states) == (3 * size / 4, 3 * size / 8)
    gradients = [each.replicated_gradients + each.sharded_gradients for each in (node, world)]
    assert gradients == [size / 4, size / 8]
    assert (node.local_trainable, node.unsharded_while_running) == (size / 4, size)


def test_footprint_hierarchical_gather_needs_buffer_on_nccl():
    one, choice = operator(), ShardingChoice((Mode.ZDP,), hierarchical=True)
    size = one.parameters[0].parameter_bytes
    assert footprint(one, choice, cluster(2, 4, backend="gloo")).unsharded_while_running == size
    assert footprint(one, choice, cluster(2, 4, backend="nccl")).unsharded_while_running == size * (1 + 1 / 4)
    assert footprint(one, choice, cluster(2, 4)).states == 3 * size / 8


def test_enumerate_choices_lists_each_sharded_choice_for_each_scope():
    groups = available_scopes(cluster(2, 4))
    plain = enumerate_choices(operator(), allowed_slices=(1,))
    rows = enumerate_choices(operator(), allowed_slices=(1,), scopes=groups)
    assert rows[: len(plain)] == plain
    assert len(rows) == 1 + 3 * (len(plain) - 1)
    assert ShardingChoice((Mode.ZDP2,), scope=ShardingScope.NODE) in rows
    assert ShardingChoice((Mode.ZDP,), hierarchical=True) in rows
    assert len(set(rows)) == len(rows)


def test_allowed_scopes_follow_constraint_and_explain_rejection():
    here = cluster(2, 4)
    assert SearchConstraints().allowed_scopes(here) == available_scopes(here)
    assert SearchConstraints(sharding_group="world").allowed_scopes(here) == (
        (ShardingScope.WORLD, False),
        (ShardingScope.WORLD, True),
    )
    assert SearchConstraints(sharding_group="node").allowed_scopes(here) == ((ShardingScope.NODE, False),)
    assert SearchConstraints(sharding_group="world").allowed_scopes(cluster(1, 4)) == ((ShardingScope.WORLD, False),)
    reasons = {
        "nodes have 3, 1 devices": Cluster(
            devices_per_node=4, devices_by_node=(3, 1), device="cpu", backend="gloo", link=LINK
        ),
        "1 x 4: it needs several of both": cluster(1, 4),
        "made before they were measured": cluster(2, 4, None),
    }
    for reason, there in reasons.items():
        with pytest.raises(ConfigurationError, match=reason):
            SearchConstraints(sharding_group="node").allowed_scopes(there)
    with pytest.raises(ConfigurationError, match="'auto' or 'world' or 'node', not 'pod'"):
        SearchConstraints(sharding_group="pod")


def test_make_plan_shards_within_nodes_where_inter_node_link_is_slow():
    """All-reduces over the slow link cost more than group sharding, world-wide sharding more than both."""
    slow, fast = fit(0.0, 1e-8), fit(0.0, 1e-10)
    levels = HierarchicalLinks(
        intra_node=ShardingLink(all_gather=fast, reduce_scatter=fast),
        inter_node=slow,
        hierarchical=ShardingLink(all_gather=slow, reduce_scatter=slow),
    )
    here = Cluster(
        nodes=2,
        devices_per_node=4,
        device="cpu",
        backend="gloo",
        link=Link(all_reduce=slow, all_gather=slow, reduce_scatter=slow),
        hierarchical_links=levels,
    )
    moments = tuple(Moment(phase=phase, operator=0, live=LinearInBatch()) for phase in ("forward", "backward"))
    model = ModelProfile(fingerprint="one", operators=(operator(),), moments=moments, batch_size=1)
    times = ComputeTimes(operators=(OperatorTime(),), unattributed=OperatorTime(forward=LinearInBatch(fixed=1e-3)),
                         optimizer_s_per_byte=0.0)  # fmt: skip

    def chosen(sharding_group: str) -> ShardingChoice:
        wishes = SearchConstraints(sharding_group=sharding_group)
        plan = make_plan(Problem(model, here, times, 1 << 40, constraints=wishes), BatchSizePolicy(batch_size=1))
        return plan.operators[0].choice

    assert chosen("auto").scope == ShardingScope.NODE
    assert chosen("world").scope == ShardingScope.WORLD

"""Costs of sharding groups and stages, against formulas worked out by hand."""

from __future__ import annotations

import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.choices import Choice, Group, Mode, menu
from lightning_osdp.planning.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    Levels,
    Link,
    OperatorTime,
    ShardingLink,
)
from lightning_osdp.planning.cost import communication, footprint
from lightning_osdp.planning.operators import Line, ModelDescription, Moment, Operator, ParameterInfo
from lightning_osdp.planning.schedule import BatchRule, Problem, make_plan
from lightning_osdp.planning.topology import (
    all_reduce_link_bytes,
    exchange,
    gather_link_bytes,
    reduce_link_bytes,
    sharding_groups,
    step_link_bytes,
)
from lightning_osdp.planning.wishes import Wishes

P = 64 << 20


def fit(latency_s: float, s_per_byte: float) -> CollectiveFit:
    return CollectiveFit(latency_s=latency_s, s_per_byte=s_per_byte)


LINK = Link(all_reduce=fit(1.0, 1e-3), all_gather=fit(2.0, 1e-3), reduce_scatter=fit(3.0, 1e-3))
INSIDE = ShardingLink(all_gather=fit(0.2, 1e-6), reduce_scatter=fit(0.3, 1e-6))
LEVELS = Levels(
    inside=INSIDE,
    between=fit(5.0, 1e-4),
    two_stage=ShardingLink(all_gather=fit(7.0, 1e-5), reduce_scatter=fit(8.0, 1e-5)),
)


def cluster(nodes: int, per_node: int, levels: Levels | None = LEVELS, backend: str = "nccl") -> Cluster:
    return Cluster(nodes=nodes, devices_per_node=per_node, device="cpu", backend=backend, link=LINK, levels=levels)


def test_an_old_file_says_nothing_of_levels():
    text = cluster(2, 4, None).model_dump_json(exclude={"levels", "uneven"})
    assert Cluster.model_validate_json(text) == cluster(2, 4, None)
    assert sharding_groups(cluster(2, 4, None)) == ((Group.WORLD, False),)
    with pytest.raises(ConfigurationError, match="measure it anew"):
        exchange(cluster(2, 4, None), Group.NODE)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (8, 1)])
def test_one_level_has_one_choice(nodes, per_node):
    assert sharding_groups(cluster(nodes, per_node)) == ((Group.WORLD, False),)
    assert exchange(cluster(nodes, per_node), Group.NODE) == exchange(cluster(nodes, per_node), Group.WORLD)


def test_seconds_by_hand():
    here = cluster(2, 4)
    assert len(sharding_groups(here)) == 3
    world = exchange(here, Group.WORLD)
    assert (world.ranks, world.between_s(1e6)) == (8, 0.0)
    assert world.all_gather_s(8000) == pytest.approx(7 * (2.0 + 1e-3 * 1000))
    assert world.reduce_scatter_s(8000) == pytest.approx(7 * (3.0 + 1e-3 * 1000))
    staged = exchange(here, Group.WORLD, two_stage=True)
    assert (staged.ranks, staged.between_s(1e6)) == (8, 0.0)
    assert staged.all_gather_s(8e6) == pytest.approx(7 * (7.0 + 1e-5 * 1e6))
    assert staged.reduce_scatter_s(8e6) == pytest.approx(7 * (8.0 + 1e-5 * 1e6))
    node = exchange(here, Group.NODE)
    assert node.ranks == 4
    assert node.all_gather_s(4e6) == pytest.approx(3 * (0.2 + 1e-6 * 1e6))
    assert node.reduce_scatter_s(4e6) == pytest.approx(3 * (0.3 + 1e-6 * 1e6))
    assert node.between_s(4e4) == pytest.approx(1 * (5.0 + 1e-4 * 1e4 / 2))  # a part of 1e4 bytes on two nodes


def test_bytes_over_the_slow_link_by_hand():
    here = cluster(2, 8)
    assert gather_link_bytes(here, Group.WORLD, False, P) == P * 15 / 16
    assert gather_link_bytes(here, Group.WORLD, True, P) == P / 2
    assert gather_link_bytes(here, Group.NODE, False, P) == 0
    assert all_reduce_link_bytes(16, 2, P) == 2 * P * 15 / 16
    assert all_reduce_link_bytes(16, 1, P) == 0
    assert gather_link_bytes(cluster(1, 4), Group.WORLD, False, P) == 0


@pytest.mark.parametrize(
    ("mode", "group", "two_stage", "expected"),
    [
        (Mode.DP, Group.WORLD, False, 2 * 3 / 4),
        (Mode.ZDP, Group.WORLD, False, 3 * 3 / 4),
        (Mode.ZDP2, Group.WORLD, False, 2 * 3 / 4),
        (Mode.ZDP, Group.WORLD, True, 3 / 2),
        (Mode.ZDP2, Group.WORLD, True, 2 / 2),
        (Mode.ZDP, Group.NODE, False, 1),
        (Mode.ZDP2, Group.NODE, False, 1),
    ],
)
def test_bytes_of_a_step_on_two_nodes_of_two(mode, group, two_stage, expected):
    once = step_link_bytes(cluster(2, 2), mode, group, two_stage, P)
    assert once == expected * P
    repeated = mode != Mode.DP and group == Group.WORLD  # the others cross the link once a step
    assert step_link_bytes(cluster(2, 2), mode, group, two_stage, P, 3) == once * (3 if repeated else 1)


def test_small_reductions_on_gloo_go_directly():
    size = 1 << 20
    assert reduce_link_bytes(cluster(2, 2, backend="gloo"), Group.WORLD, False, size) == size  # 2 ranks x 2 parts of 4
    assert reduce_link_bytes(cluster(2, 2, backend="gloo"), Group.WORLD, True, size) == size / 2
    assert reduce_link_bytes(cluster(2, 2, backend="gloo"), Group.WORLD, False, size + 4) == (size + 4) * 3 / 4
    assert reduce_link_bytes(cluster(2, 1, backend="gloo"), Group.WORLD, False, size) == size / 2


def test_sharded_over_a_node_of_one_rank_is_replicated():
    assert step_link_bytes(cluster(4, 1), Mode.ZDP, Group.NODE, False, P) == 2 * P * 3 / 4


def operator(shape: tuple[int, ...] = (1024, 1024)) -> Operator:
    """One matrix, with Adam's two moments."""
    size = 4 * shape[0] * shape[1]
    weight = ParameterInfo(name="op.weight", shape=shape, optimizer_bytes=2 * size)
    return Operator(name="op", kind="Linear", parameters=(weight,))


def test_a_group_sharded_operator_in_seconds_and_bytes():
    here, one = cluster(2, 4), operator()
    size = one.parameters[0].parameter_bytes
    choice = Choice((Mode.ZDP,), group=Group.NODE)
    cost = communication(one, choice, here)
    assert cost.once_s == pytest.approx(5.0 + 1e-4 * size / 4 / 2)
    assert cost.each_s == pytest.approx(2 * 3 * (0.2 + 1e-6 * size / 4) + 3 * (0.3 + 1e-6 * size / 4))
    node, world = footprint(one, choice, here), footprint(one, Choice((Mode.ZDP,)), here)
    assert (node.states, world.states) == (3 * size / 4, 3 * size / 8)
    assert (node.gradients, world.gradients) == (size / 4, size / 8)
    assert (node.updated, node.gathered) == (size / 4, size)


def test_two_stages_take_a_buffer_where_they_can_not_receive_in_place():
    one, choice = operator(), Choice((Mode.ZDP,), two_stage=True)
    size = one.parameters[0].parameter_bytes
    assert footprint(one, choice, cluster(2, 4, backend="gloo")).gathered == size
    assert footprint(one, choice, cluster(2, 4, backend="nccl")).gathered == size * (1 + 1 / 4)
    assert footprint(one, choice, cluster(2, 4)).states == 3 * size / 8


def test_the_menu_has_each_sharded_row_for_each_group():
    groups = sharding_groups(cluster(2, 4))
    plain = menu(operator(), wished=(1,))
    rows = menu(operator(), wished=(1,), groups=groups)
    assert rows[: len(plain)] == plain
    assert len(rows) == 1 + 3 * (len(plain) - 1)
    assert Choice((Mode.ZDP2,), group=Group.NODE) in rows
    assert Choice((Mode.ZDP,), two_stage=True) in rows
    assert len(set(rows)) == len(rows)


def test_wishes_steer_the_group_and_say_why_they_can_not():
    here = cluster(2, 4)
    assert Wishes().groups(here) == sharding_groups(here)
    assert Wishes(sharding_group="world").groups(here) == ((Group.WORLD, False), (Group.WORLD, True))
    assert Wishes(sharding_group="node").groups(here) == ((Group.NODE, False),)
    assert Wishes(sharding_group="world").groups(cluster(1, 4)) == ((Group.WORLD, False),)
    reasons = {
        "nodes have 3, 1 devices": Cluster(devices_per_node=4, uneven=(3, 1), device="cpu", backend="gloo", link=LINK),
        "1 x 4: it needs several of both": cluster(1, 4),
        "made before they were measured": cluster(2, 4, None),
    }
    for reason, there in reasons.items():
        with pytest.raises(ConfigurationError, match=reason):
            Wishes(sharding_group="node").groups(there)
    with pytest.raises(ConfigurationError, match="'auto' or 'world' or 'node', not 'pod'"):
        Wishes(sharding_group="pod")


def test_the_search_shards_inside_nodes_where_the_link_between_them_is_slow():
    """All-reduces over the slow link cost more than group sharding, world-wide sharding more than both."""
    slow, fast = fit(0.0, 1e-8), fit(0.0, 1e-10)
    levels = Levels(
        inside=ShardingLink(all_gather=fast, reduce_scatter=fast),
        between=slow,
        two_stage=ShardingLink(all_gather=slow, reduce_scatter=slow),
    )
    here = Cluster(
        nodes=2,
        devices_per_node=4,
        device="cpu",
        backend="gloo",
        link=Link(all_reduce=slow, all_gather=slow, reduce_scatter=slow),
        levels=levels,
    )
    moments = tuple(Moment(phase=phase, operator=0, live=Line()) for phase in ("forward", "backward"))
    model = ModelDescription(fingerprint="one", operators=(operator(),), moments=moments, batch_size=1)
    times = ComputeTimes(operators=(OperatorTime(),), outside=OperatorTime(forward=Line(fixed=1e-3)),
                         optimizer_s_per_byte=0.0)  # fmt: skip

    def chosen(sharding_group: str) -> Choice:
        wishes = Wishes(sharding_group=sharding_group)
        plan = make_plan(Problem(model, here, times, 1 << 40, wishes=wishes), BatchRule(batch_size=1))
        return plan.operators[0].choice

    assert chosen("auto").group == Group.NODE
    assert chosen("world").group == Group.WORLD

"""Waits for the link of whole plans: by hand, and what must hold of any plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.cost.link_schedule import can_be_played, exposed_communication_s
from lightning_osdp.planning.cost.sharding_scopes import scope_links
from lightning_osdp.planning.cost.shards import shards_of
from lightning_osdp.planning.cost.step_time import communication_time, inter_node_s
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    HierarchicalLinks,
    Link,
    OperatorTime,
    ShardingLink,
    SplitTime,
)
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Moment
from tests.support.small_models import blocks_of_one, linear

MIB = 1 << 20
DP, ZDP2, ZDP = (ShardingChoice((mode,)) for mode in (Mode.DP, Mode.ZDP2, Mode.ZDP))
SLICED = ShardingChoice((Mode.ZDP2,) * 4, 0)


def two_ranks(overlap_fraction: float = 1.0, prefetch_max_bytes: int = 1 << 30) -> Cluster:
    """A link that gathers or reduces 1 MiB a second, and all-reduces it in two."""

    def fit(seconds: float) -> CollectiveFit:
        return CollectiveFit(latency_s=0.0, s_per_byte=2 * seconds / MIB, overlap_fraction=overlap_fraction)

    link = Link(all_reduce=fit(2.0), all_gather=fit(1.0), reduce_scatter=fit(1.0))
    return Cluster(devices_per_node=2, device="cpu", backend="gloo", link=link, prefetch_max_bytes=prefetch_max_bytes)


def chain(*mebibytes: int) -> ModelProfile:
    """Matrices of these sizes, one after the other, outside of any block."""
    operators = tuple(linear(f"m{index}", size) for index, size in enumerate(mebibytes))
    indices = range(len(operators))
    moments = tuple(
        Moment(phase=phase, operator=index, live=LinearInBatch())
        for phase, order in (("forward", indices), ("backward", reversed(indices)))
        for index in order
    )
    return blocks_of_one(1, 1).model_copy(update={"operators": operators, "moments": moments, "blocks": ()})


def seconds(*forward_s: float) -> ComputeTimes:
    """Forward passes of these lengths; a backward pass takes twice as long, and splitting nothing."""
    times = tuple(
        OperatorTime(
            forward=LinearInBatch(fixed=each),
            backward=LinearInBatch(fixed=2 * each),
            splits=(SplitTime(dim=0, slices=4, forward=LinearInBatch(), backward=LinearInBatch()),),
        )
        for each in forward_s
    )
    return ComputeTimes(operators=times, unattributed=OperatorTime(), optimizer_s_per_byte=0.0)


def exposed_s(
    model: ModelProfile,
    choices: tuple[ShardingChoice, ...],
    compute: ComputeTimes,
    cluster: Cluster | None = None,
    recomputed: tuple[str, ...] = (),
    accumulation: int = 1,
) -> float:
    return exposed_communication_s(model, choices, recomputed, cluster or two_ranks(), compute, 1, accumulation)


@pytest.mark.parametrize(
    ("choices", "expected_s"),
    [
        ((DP, DP), 16 - 4),  # two all-reduces of 8 s, of which 4 s go on beside the first matrix's backward
        ((ZDP2, ZDP2), 4 + 2 + 4),  # the first gather; what 2 s leave of the second; the last reduction
        ((ZDP, ZDP2), 4 + 2 + 4 + 4 + 4),  # and a gather for the backward, behind the reduction that goes on
    ],
)
def test_exposed_communication_is_what_a_plan_waits_for(choices: tuple[ShardingChoice, ...], expected_s: float) -> None:
    assert exposed_s(chain(4, 4), choices, seconds(2.0, 2.0)) == pytest.approx(expected_s)


def test_a_unit_behind_one_in_slices_waits_for_the_gathers_of_all_slices() -> None:
    """Four slices are gathered and computed in 1 s each, then 4 MiB: 1 s of their gather is hidden, not 4 s."""
    model, compute = chain(4, 4), seconds(4.0, 4.0)
    forward_s = 1 + (4 - 1)  # the first slice's gather, and what the last slice leaves of the next unit's
    backward_s = (4 - 2) + 1  # what a slice's backward leaves of the unit's reduction, and the last slice's own
    assert exposed_s(model, (SLICED, ZDP2), compute) == pytest.approx(forward_s + backward_s)
    assert exposed_s(model, (ZDP2, ZDP2), compute) == pytest.approx(4 + 4)


def test_a_reduction_waits_for_the_all_reduce_before_it() -> None:
    """All-reduces of 16 s and 2 s begin after 2 s of the backward pass, which computes for 4 s more."""
    model, compute = chain(4, 1, 8), seconds(1.0, 1.0, 1.0)
    assert exposed_s(model, (ZDP2, DP, DP), compute) == pytest.approx(4 + (16 + 2 + 4 - 4))


def test_what_no_compute_hides_is_added() -> None:
    model, compute = chain(4), seconds(100.0)
    for cluster in (two_ranks(0.0), two_ranks(1.0, prefetch_max_bytes=0)):
        assert exposed_s(model, (ZDP,), compute, cluster) == pytest.approx(3 * 4)
    assert exposed_s(model, (DP,), compute, two_ranks(0.25)) == pytest.approx(8)


def test_averages_are_made_in_the_last_micro_batch_alone() -> None:
    model, compute = chain(4), seconds(1.0)
    assert exposed_s(model, (DP,), compute, accumulation=3) == pytest.approx(8)
    assert exposed_s(model, (ZDP2,), compute, accumulation=3) == pytest.approx(3 * 8)


def test_a_recomputed_unit_is_gathered_once_more() -> None:
    model = blocks_of_one(2, 1)
    compute = seconds(0.0, 0.0)
    assert exposed_s(model, (ZDP, ZDP), compute) == pytest.approx(2 * 3 * 4)
    assert exposed_s(model, (ZDP, ZDP), compute, recomputed=("blocks.0",)) == pytest.approx(2 * 3 * 4 + 4)
    assert exposed_s(model, (ZDP2, ZDP2), compute, recomputed=("blocks.0",)) == pytest.approx(2 * 2 * 4)


def two_nodes(inter_node_s: float) -> Cluster:
    """Two nodes of two ranks that average 1 MiB of a part of a gradient in this time; the rest is as for two ranks."""
    cluster = two_ranks()
    inside = ShardingLink(all_gather=cluster.link.all_gather, reduce_scatter=cluster.link.reduce_scatter)
    between = CollectiveFit(latency_s=0.0, s_per_byte=inter_node_s / MIB, overlap_fraction=1.0)
    levels = HierarchicalLinks(intra_node=inside, inter_node=between, hierarchical=inside)
    return cluster.model_copy(update={"nodes": 2, "hierarchical_links": levels})


@pytest.mark.parametrize("last", [DP, ZDP2])
def test_collective_of_all_ranks_waits_for_the_averages_between_nodes(last: ShardingChoice) -> None:
    """It came as if the link between nodes was free, and the averages before it were lost."""
    model, compute, cluster = chain(1, 64), seconds(0.0, 0.0), two_nodes(100.0)
    inside = ZDP2._replace(scope=ShardingScope.NODE)
    averages_s = inter_node_s(shards_of(model.operators[1], inside), scope_links(cluster, ShardingScope.NODE))
    alone_s = exposed_s(chain(1), (last,), seconds(0.0), cluster)
    assert averages_s > 1000
    assert exposed_s(model, (last, inside), compute, cluster) >= averages_s + alone_s / 2


@given(
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=5),
    picks=st.lists(st.sampled_from((DP, ZDP2, ZDP, SLICED)), min_size=5, max_size=5),
    inside=st.lists(st.booleans(), min_size=5, max_size=5),
    pace=st.sampled_from((0.1, 1.0, 10.0)),
)
def test_no_more_of_the_link_between_nodes_is_hidden_than_compute(
    sizes: list[int], picks: list[ShardingChoice], inside: list[bool], pace: float
) -> None:
    model, cluster, compute = chain(*sizes), two_nodes(pace), seconds(*[1.0] * len(sizes))
    scopes = [ShardingScope.NODE if each else ShardingScope.WORLD for each in inside]
    choices = tuple(
        pick if pick is DP else pick._replace(scope=scope)
        for pick, scope in zip(picks[: len(sizes)], scopes, strict=False)
    )
    between_s = sum(
        communication_time(operator, choice, cluster).total_s(1)
        if choice.scope == ShardingScope.WORLD
        else inter_node_s(shards_of(operator, choice), scope_links(cluster, choice.scope))
        for operator, choice in zip(model.operators, choices, strict=True)
    )
    found_s = exposed_s(model, choices, compute, cluster)
    assert max(0.0, between_s - 3 * len(sizes)) <= found_s * (1 + 1e-9) + 1e-9


def test_streams_are_not_played() -> None:
    assert can_be_played(two_ranks())
    assert not can_be_played(two_ranks().model_copy(update={"device": "cuda: NVIDIA H200", "backend": "nccl"}))
    assert not can_be_played(two_ranks().model_copy(update={"devices_per_node": 1}))


@given(
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=5),
    picks=st.lists(st.sampled_from((DP, ZDP2, ZDP, SLICED)), min_size=5, max_size=5),
    forward_s=st.lists(st.floats(0, 20), min_size=5, max_size=5),
    fraction=st.sampled_from((0.0, 0.3, 1.0)),
    accumulation=st.integers(1, 3),
)
def test_no_more_is_exposed_than_there_is_and_no_more_hidden_than_compute(
    sizes: list[int], picks: list[ShardingChoice], forward_s: list[float], fraction: float, accumulation: int
) -> None:
    model, cluster, compute = chain(*sizes), two_ranks(fraction), seconds(*forward_s[: len(sizes)])
    choices = tuple(picks[: len(sizes)])
    all_s = sum(
        communication_time(*each, cluster).total_s(accumulation) for each in zip(model.operators, choices, strict=True)
    )
    found_s = exposed_s(model, choices, compute, cluster, accumulation=accumulation)
    computed_s = accumulation * 3 * sum(forward_s[: len(sizes)])
    assert max(0.0, all_s - computed_s) <= found_s * (1 + 1e-9) + 1e-9
    assert found_s <= all_s * (1 + 1e-9) + 1e-9
    assert (1 - fraction) * all_s <= found_s * (1 + 1e-9) + 1e-9

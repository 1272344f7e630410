"""Communication that goes on beside compute, in seconds: by hand, and the same in the search's arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.cost.neighbours import Neighbours
from lightning_osdp.planning.cost.step_time import (
    Beside,
    OverlappedTime,
    Passes,
    TimeCost,
    communication_time,
    hidden_s,
    overlapped_time,
    time_cost,
)
from lightning_osdp.planning.search.batch_size_search import Problem
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, ComputeTimes, Link, OperatorTime, SplitTime
from lightning_osdp.planning.spec.model import LinearInBatch, Operator
from tests.support.option_times import assert_option_times_match_time_cost
from tests.support.small_models import MIB, blocks_of_one, blocks_of_two, cluster, compute, linear

LARGE = 1 << 30


def link(reduce: float, gather: float, scatter: float) -> Link:
    """A link with 1 s for an all-reduce of 4 MiB on two ranks, and half for the others; these shares are hidden."""

    def fit(seconds: float, share: float) -> CollectiveFit:
        return CollectiveFit(latency_s=0.0, s_per_byte=seconds / (2 * MIB), overlap_fraction=share)

    return Link(all_reduce=fit(1.0, reduce), all_gather=fit(0.5, gather), reduce_scatter=fit(0.5, scatter))


def two_ranks(prefetch_max_bytes: int = LARGE, shares: tuple[float, float, float] = (0.8, 0.6, 0.4)) -> Cluster:
    return Cluster(
        devices_per_node=2, device="cpu", backend="gloo", link=link(*shares), prefetch_max_bytes=prefetch_max_bytes
    )


def cost(
    choice: ShardingChoice, passes_s: float, *, prefetch_max_bytes: int = LARGE, recomputed: bool = False
) -> TimeCost:
    time = OperatorTime(forward=LinearInBatch(fixed=passes_s / 4), backward=LinearInBatch(fixed=passes_s * 3 / 4))
    times = ComputeTimes(operators=(time,), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    return time_cost(linear("one"), choice, two_ranks(prefetch_max_bytes), times, time, 1, recomputed=recomputed)


@pytest.mark.parametrize(
    ("mode", "recomputed", "all_s", "in_forward_s", "in_backward_s"),
    [
        (Mode.DP, False, 1.0, 0.0, 0.8),
        (Mode.DP, True, 1.0, 0.0, 0.8),
        (Mode.ZDP2, False, 0.5 + 0.5, 0.3, 0.2),
        (Mode.ZDP, False, 1.0 + 0.5, 0.3, 0.3 + 0.2),
        (Mode.ZDP, True, 1.5 + 0.5, 0.3, 0.6 + 0.2),
    ],
)
def test_time_cost_hides_communication_up_to_overlap_and_time_of_the_pass(
    mode: Mode, recomputed: bool, all_s: float, in_forward_s: float, in_backward_s: float
) -> None:
    """Neighbours take as long as the operator; a recomputed forward is a part of the backward."""
    for passes_s in (0.0, 0.1, 0.5, 10.0):
        found = cost(ShardingChoice((mode,)), passes_s, recomputed=recomputed)
        forward_s, backward_s = passes_s / 4, passes_s * (1.0 if recomputed else 3 / 4)
        hidden_s = min(in_forward_s, forward_s) + min(in_backward_s, backward_s)
        assert found.compute_s == pytest.approx(forward_s + backward_s)
        assert found.communication_s == pytest.approx(all_s - hidden_s)


def seconds(forward_s: float, backward_s: float) -> OperatorTime:
    return OperatorTime(forward=LinearInBatch(fixed=forward_s), backward=LinearInBatch(fixed=backward_s))


@pytest.mark.parametrize(
    ("mode", "before", "after", "expected"),
    [
        (Mode.ZDP2, (0.1, 0.15), (0.0, 0.0), 0.1 + 0.15),  # a gather of 0.3 in the forward, a reduction of 0.2
        (Mode.ZDP2, (0.0, 0.0), (9.0, 9.0), 0.0),  # the first unit: its gather and its reduction wait
        (Mode.ZDP, (9.0, 9.0), (0.0, 0.0), 0.3 + 0.2),  # the last one: the gather of its backward waits
        (Mode.ZDP, (0.0, 0.0), (9.0, 0.1), 0.1),
        (Mode.DP, (9.0, 0.5), (0.0, 0.0), 0.5),
    ],
)
def test_time_cost_hides_communication_beside_compute_of_the_neighbours(
    mode: Mode, before: tuple[float, float], after: tuple[float, float], expected: float
) -> None:
    own = seconds(1.0, 2.0)
    times = ComputeTimes(operators=(own,), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    first, last = seconds(*before), seconds(*after)
    places = (Neighbours(1.0, first.forward, first.backward, last.backward),)
    arguments = (linear("one"), ShardingChoice((mode,)), two_ranks(), times, own, 1)
    all_s = {Mode.DP: 1.0, Mode.ZDP2: 1.0, Mode.ZDP: 1.5}[mode]
    assert time_cost(*arguments, neighbours=places).communication_s == pytest.approx(all_s - expected)
    like_itself = Neighbours(1.0, own.forward, own.backward, own.backward)
    half = tuple(each._replace(share=0.5) for each in (*places, like_itself))
    alone_s = time_cost(*arguments).communication_s
    assert time_cost(*arguments, neighbours=half).communication_s == pytest.approx((all_s - expected + alone_s) / 2)


def test_early_gradients_are_reduced_beside_their_own_backward() -> None:
    weight = linear("one").parameters[0]
    first = weight.model_copy(update={"gradient_order": 1})  # of two alike, it comes last
    both = linear("one").model_copy(update={"parameters": (first, weight), "num_wrapped": 2})
    found = overlapped_time(both, ShardingChoice((Mode.ZDP2,)), two_ranks())
    assert found == pytest.approx((0.0, 0.6, 0.0, 0.2, 0.2, 0.0, 0.0))


def test_inner_slices_hide_their_communication_beside_other_slices() -> None:
    """Of two slices, one is gathered and reduced beside the other, and one beside nothing at all."""
    own, nothing = seconds(0.2, 10.0), LinearInBatch()
    split = own.model_copy(update={"splits": (SplitTime(dim=1, slices=2, forward=nothing, backward=nothing),)})
    times = ComputeTimes(operators=(split,), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    arguments = (linear("one"), ShardingChoice((Mode.ZDP,) * 2, 1), two_ranks(), times, split, 1)
    places = (Neighbours(1.0, nothing, nothing, nothing),)
    hidden_s = 0.5 * (0.2 + 0.5)  # of a gather of 0.3 as long as the forward takes; a gather and a reduction
    assert time_cost(*arguments, neighbours=places).communication_s == pytest.approx(1.5 - hidden_s)
    assert time_cost(*arguments).communication_s == pytest.approx(1.5 - 2 * hidden_s)


def test_overlapped_time_needs_prefetch_except_for_replicated_gradients() -> None:
    bound = linear("one").parameters[0].parameter_bytes - 1
    assert cost(ShardingChoice((Mode.ZDP,)), 10.0, prefetch_max_bytes=bound).communication_s == pytest.approx(1.5)
    assert overlapped_time(
        linear("one"), ShardingChoice((Mode.ZDP,) * 2, 1), two_ranks(bound)
    ).per_microbatch_s == pytest.approx(0.8)
    assert cost(ShardingChoice((Mode.DP,)), 10.0, prefetch_max_bytes=0).communication_s == pytest.approx(0.2)


NOTHING = OverlappedTime(*[0.0] * 7)


def two_nodes_of_two_ranks() -> Cluster:
    plain = two_ranks().link
    sharding = plain.model_dump(exclude={"all_reduce"})
    nodes = {"intra_node": sharding, "inter_node": plain.all_reduce, "hierarchical": sharding}
    return Cluster.model_validate(two_ranks().model_dump() | {"nodes": 2, "hierarchical_links": nodes})


def test_overlapped_time_per_microbatch_is_zero_where_ranks_share_the_link_that_is_used() -> None:
    everywhere, inside = ShardingChoice((Mode.ZDP,)), ShardingChoice((Mode.ZDP,), scope=ShardingScope.NODE)
    for choice in (everywhere, ShardingChoice((Mode.ZDP,), hierarchical=True)):
        assert overlapped_time(linear("one"), choice, two_nodes_of_two_ranks()) == NOTHING
    in_nodes = overlapped_time(linear("one"), inside, two_nodes_of_two_ranks())
    assert in_nodes[:5] == overlapped_time(linear("one"), everywhere, two_ranks())[:5]
    assert in_nodes.per_microbatch_s > 0
    without = two_nodes_of_two_ranks().model_copy(update={"prefetch_max_bytes": 0})
    assert overlapped_time(linear("one"), inside, without).per_microbatch_s == 0.0
    uneven = two_ranks().model_copy(update={"devices_per_node": 3, "devices_by_node": (2, 1)})
    assert overlapped_time(linear("one"), everywhere, uneven) == NOTHING
    one_each = two_ranks().model_copy(update={"nodes": 2, "devices_per_node": 1})
    assert overlapped_time(linear("one"), everywhere, one_each) == overlapped_time(
        linear("one"), everywhere, two_ranks()
    )


@pytest.mark.parametrize(
    ("slices", "sharded"), [((Mode.ZDP,), 1.0), ((Mode.ZDP2,) * 2, 1.0), ((Mode.DP, Mode.ZDP), 0.5)]
)
def test_overlapped_time_includes_inter_node_all_reduce_of_node_scope(slices: tuple[Mode, ...], sharded: float) -> None:
    """Parts of 2 MiB of 4 MiB are reduced on two nodes: half a second, of which compute hides 0.8."""
    here, choice = two_nodes_of_two_ranks(), ShardingChoice(slices, None if len(slices) == 1 else 1, ShardingScope.NODE)
    replicated_s = 0.8 * here.link.all_reduce.time_s(4 * MIB, 4) * (1 - sharded)
    found = overlapped_time(linear("one"), choice, here)
    assert found.per_step_s == pytest.approx(replicated_s)
    assert found.between_nodes_s == pytest.approx(0.8 * 0.5 * sharded)
    assert found.per_step_s + found.between_nodes_s < communication_time(linear("one"), choice, here).per_step_s


def test_hidden_s_lets_averages_between_nodes_go_on_beside_compute_and_waiting_inside_nodes() -> None:
    choice = ShardingChoice((Mode.ZDP,), scope=ShardingScope.NODE)
    here = two_nodes_of_two_ranks().model_copy(update={"prefetch_max_bytes": 0})
    found = overlapped_time(linear("one"), choice, here)
    per_pass = communication_time(linear("one"), choice, here).per_microbatch_s
    assert found.whole_backward_s == pytest.approx(per_pass * 2 / 3)  # a gather and a reduction; forward: a gather
    slow = found._replace(between_nodes_s=100.0)
    beside = Beside(0.3, 0.6, 0.6)
    for again in (0.0, 0.3):
        passes = Passes(0.3, 0.6, again)
        assert hidden_s(slow, passes, beside, 1, here) == pytest.approx(0.6 + found.whole_backward_s)
        assert hidden_s(slow._replace(early_reductions_s=0.2), passes, beside, 1, here) == pytest.approx(
            0.6 + found.whole_backward_s
        )
    assert hidden_s(slow, Passes(0.3, 0.6, 0.0), Beside(0.0, 0.0, 0.6), 1, here) == 0.0  # nothing comes after the first
    shared = slow._replace(per_step_s=0.4)  # on the same link
    passes = Passes(0.3, 0.6, 0.0)
    assert hidden_s(shared, passes, beside, 1, here) == pytest.approx(0.6 + found.whole_backward_s)
    assert hidden_s(found._replace(between_nodes_s=0.1), passes, beside, 1, here) == pytest.approx(0.1)


def every_choice(operator: Operator) -> list[ShardingChoice]:
    sliced = [ShardingChoice(modes, 1) for modes in ((Mode.ZDP,) * 2, (Mode.DP, Mode.ZDP), (Mode.ZDP2, Mode.ZDP))]
    return [ShardingChoice((mode,)) for mode in WEIGHT_MODES] + sliced * bool(operator.split_dims)


@given(shares=st.tuples(*[st.floats(0, 1)] * 3), ahead_mib=st.integers(0, 9), splittable=st.booleans())
def test_overlapped_time_never_exceeds_communication_time(
    shares: tuple[float, float, float], ahead_mib: int, splittable: bool
) -> None:
    operator = linear("one", 8, splittable=splittable)
    for choice in every_choice(operator):
        for recomputed in (False, True):
            own = (operator, choice, two_ranks(ahead_mib * MIB, shares))
            all_, beside = communication_time(*own, recomputed=recomputed), overlapped_time(*own, recomputed=recomputed)
            assert 0 <= beside.per_step_s <= all_.per_step_s * (1 + 1e-9)
            assert 0 <= beside.per_microbatch_s <= all_.per_microbatch_s * (1 + 1e-9)


@given(
    share=st.floats(0, 1),
    ahead_mib=st.sampled_from([0, 2, 4, 16]),
    accumulation=st.integers(1, 3),
    several=st.booleans(),
)
def test_option_times_match_time_cost_with_overlap(
    share: float, ahead_mib: int, accumulation: int, several: bool
) -> None:
    model, slow = blocks_of_two(2) if several else blocks_of_one(2, 2), cluster(6.0, 5.0, 4.0, latency_ms=0.5)
    fits = {
        name: getattr(slow.link, name).model_copy(update={"overlap_fraction": share})
        for name in type(slow.link).model_fields
    }
    changes = {"link": slow.link.model_copy(update=fits), "prefetch_max_bytes": ahead_mib * MIB}
    problem = Problem(model, slow.model_copy(update=changes), compute(model), 1 << 30)
    assert_option_times_match_time_cost(problem, 3, accumulation)

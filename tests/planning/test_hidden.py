"""Communication that goes on beside compute, in seconds: by hand, and the same in the search's arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planning.choices import Choice, Group, Mode
from lightning_osdp.planning.cluster import (
    Cluster,
    CollectiveFit,
    ComputeTimes,
    EngineOverhead,
    Link,
    ModeOverhead,
    OperatorTime,
)
from lightning_osdp.planning.cost import TimeCost, communication, hidden, time_cost
from lightning_osdp.planning.operators import Line, Operator
from lightning_osdp.planning.schedule import Problem
from lightning_osdp.planning.space import Space
from tests.planning.small import MIB, blocks_of_one, blocks_of_two, cluster, compute, linear

LARGE = 1 << 30


def link(reduce: float, gather: float, scatter: float) -> Link:
    """Of 1 s for an all-reduce of 4 MiB on two ranks, half for the others; the shares are hidden."""

    def fit(seconds: float, share: float) -> CollectiveFit:
        return CollectiveFit(latency_s=0.0, s_per_byte=seconds / (2 * MIB), hidden=share)

    return Link(all_reduce=fit(1.0, reduce), all_gather=fit(0.5, gather), reduce_scatter=fit(0.5, scatter))


def two_ranks(ahead_bytes: int = LARGE, shares: tuple[float, float, float] = (0.8, 0.6, 0.4)) -> Cluster:
    return Cluster(devices_per_node=2, device="cpu", backend="gloo", link=link(*shares), ahead_bytes=ahead_bytes)


def cost(choice: Choice, passes_s: float, *, ahead_bytes: int = LARGE, recomputed: bool = False) -> TimeCost:
    time = OperatorTime(forward=Line(fixed=passes_s / 4), backward=Line(fixed=passes_s * 3 / 4))
    times = ComputeTimes(operators=(time,), outside=OperatorTime(), optimizer_s_per_byte=0.0)
    return time_cost(linear("one"), choice, two_ranks(ahead_bytes), times, time, 1, recomputed=recomputed)


@pytest.mark.parametrize(
    ("mode", "recomputed", "all_s", "hidden_s"),
    [
        (Mode.DP, False, 1.0, 0.8),
        (Mode.DP, True, 1.0, 0.8),
        (Mode.ZDP2, False, 0.5 + 0.5, 0.3 + 0.2),
        (Mode.ZDP, False, 1.0 + 0.5, 0.6 + 0.2),
        (Mode.ZDP, True, 1.5 + 0.5, 0.9 + 0.2),
    ],
)
def test_as_much_as_the_link_lets_and_compute_takes(
    mode: Mode, recomputed: bool, all_s: float, hidden_s: float
) -> None:
    """Replicated gradients: as the backward pass takes, in which a recomputed forward is made."""
    again = 1.25 if recomputed else 1.0
    beside = again - 0.25 if mode == Mode.DP else again
    for passes_s in (0.0, 0.1, 0.5, 10.0):
        found = cost(Choice((mode,)), passes_s, recomputed=recomputed)
        assert found.compute_s == pytest.approx(passes_s * again)
        assert found.communication_s == pytest.approx(all_s - min(hidden_s, passes_s * beside))


def test_what_does_not_run_ahead_is_not_hidden_but_replicated_gradients_are() -> None:
    bound = linear("one").parameters[0].parameter_bytes - 1
    assert cost(Choice((Mode.ZDP,)), 10.0, ahead_bytes=bound).communication_s == pytest.approx(1.5)
    assert hidden(linear("one"), Choice((Mode.ZDP,) * 2, 1), two_ranks(bound)).each_s == pytest.approx(0.8)
    assert cost(Choice((Mode.DP,)), 10.0, ahead_bytes=0).communication_s == pytest.approx(0.2)


@pytest.mark.parametrize(("own_s", "hidden_s"), [(0.2, 0.8), (0.0, 0.8), (-0.5, 0.3), (-2.0, 0.0)])
def test_what_collectives_take_less_than_fitted_is_not_hidden_as_well(own_s: float, hidden_s: float) -> None:
    engine = EngineOverhead(zdp=ModeOverhead(fixed_s=own_s))
    found = hidden(linear("one"), Choice((Mode.ZDP,)), two_ranks().model_copy(update={"engine": engine}))
    assert found.each_s == pytest.approx(hidden_s)


def nodes_of_two() -> Cluster:
    plain = two_ranks().link
    sharding = plain.model_dump(exclude={"all_reduce"})
    nodes = {"inside": sharding, "between": plain.all_reduce, "two_stage": sharding}
    return Cluster.model_validate(two_ranks().model_dump() | {"nodes": 2, "levels": nodes})


def test_nothing_runs_ahead_where_ranks_of_a_node_share_its_link() -> None:
    everywhere, inside = Choice((Mode.ZDP,)), Choice((Mode.ZDP,), group=Group.NODE)
    for choice in (everywhere, Choice((Mode.ZDP,), two_stage=True)):
        assert hidden(linear("one"), choice, nodes_of_two()) == (0.0, 0.0)
    assert hidden(linear("one"), inside, nodes_of_two()).each_s == 0.0
    uneven = two_ranks().model_copy(update={"devices_per_node": 3, "uneven": (2, 1)})
    assert hidden(linear("one"), everywhere, uneven) == (0.0, 0.0)
    one_each = two_ranks().model_copy(update={"nodes": 2, "devices_per_node": 1})
    assert hidden(linear("one"), everywhere, one_each) == hidden(linear("one"), everywhere, two_ranks())


@pytest.mark.parametrize(
    ("slices", "sharded"), [((Mode.ZDP,), 1.0), ((Mode.ZDP2,) * 2, 1.0), ((Mode.DP, Mode.ZDP), 0.5)]
)
def test_averages_between_nodes_go_on_beside_the_backward_pass(slices: tuple[Mode, ...], sharded: float) -> None:
    """Of 4 MiB, parts of 2 MiB are reduced on two nodes: half a second, of which 0.8 go on."""
    here, choice = nodes_of_two(), Choice(slices, None if len(slices) == 1 else 1, Group.NODE)
    replicated_s = 0.8 * here.link.all_reduce.time_s(4 * MIB, 4) * (1 - sharded)
    found = hidden(linear("one"), choice, here)
    assert found.once_s == pytest.approx(0.8 * 0.5 * sharded + replicated_s)
    assert found.once_s < communication(linear("one"), choice, here).once_s


def every_choice(operator: Operator) -> list[Choice]:
    sliced = [Choice(modes, 1) for modes in ((Mode.ZDP,) * 2, (Mode.DP, Mode.ZDP), (Mode.ZDP2, Mode.ZDP))]
    return [Choice((mode,)) for mode in Mode] + sliced * bool(operator.split_dims)


@given(shares=st.tuples(*[st.floats(0, 1)] * 3), ahead_mib=st.integers(0, 9), splittable=st.booleans())
def test_no_more_is_hidden_than_there_is(shares: tuple[float, float, float], ahead_mib: int, splittable: bool) -> None:
    operator = linear("one", 8, splittable=splittable)
    for choice in every_choice(operator):
        for recomputed in (False, True):
            own = (operator, choice, two_ranks(ahead_mib * MIB, shares))
            all_, beside = communication(*own, recomputed=recomputed), hidden(*own, recomputed=recomputed)
            assert 0 <= beside.once_s <= all_.once_s * (1 + 1e-9)
            assert 0 <= beside.each_s <= all_.each_s * (1 + 1e-9)


@given(
    share=st.floats(0, 1),
    ahead_mib=st.sampled_from([0, 2, 4, 16]),
    accumulation=st.integers(1, 3),
    several=st.booleans(),
)
def test_the_searchs_arrays_say_the_same(share: float, ahead_mib: int, accumulation: int, several: bool) -> None:
    model, slow = blocks_of_two(2) if several else blocks_of_one(2, 2), cluster(6.0, 5.0, 4.0, latency_ms=0.5)
    fits = {
        name: getattr(slow.link, name).model_copy(update={"hidden": share}) for name in type(slow.link).model_fields
    }
    changes = {"link": slow.link.model_copy(update=fits), "ahead_bytes": ahead_mib * MIB}
    problem = Problem(model, slow.model_copy(update=changes), compute(model), 1 << 30)
    space, batch_size = Space(problem), 3
    times = space.times(batch_size, accumulation)
    for operator, menu_at, own in zip(model.operators, space.menu_of, problem.compute.operators, strict=True):
        menu = space.menus[menu_at]
        for row, choice in enumerate(menu.choices, menu.rows.start):
            for recomputed in (False, True):
                expected = time_cost(
                    operator,
                    choice,
                    problem.cluster,
                    problem.compute,
                    own,
                    batch_size,
                    accumulation,
                    recomputed=recomputed,
                )
                assert times.communication[int(recomputed), row] == pytest.approx(expected.communication_s, abs=1e-12)
                assert times.compute[int(recomputed), row] == pytest.approx(expected.compute_s, abs=1e-12)

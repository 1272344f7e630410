"""Menus, and what slices and recomputation cost, as formulas."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.choices import SMALLEST_SLICE_ELEMENTS, Choice, Mode, granularities, menu
from lightning_osdp.planning.cluster import EngineOverhead, ModeOverhead
from lightning_osdp.planning.cost import communication, engine, footprint, time_cost
from lightning_osdp.planning.operators import ParameterInfo
from lightning_osdp.planning.timeline import Timeline
from tests.planning.small import MIB, RANKS, blocks_of_one, cluster, compute, linear

DP, ZDP2, ZDP = Mode.DP, Mode.ZDP2, Mode.ZDP


def test_slices_are_offered_only_where_they_are_large_enough_or_wished_for() -> None:
    operator = linear("up", rows=16)  # 2**20 elements
    assert granularities(operator) == (2, 4, 8, 16)
    weight = operator.parameters[0].model_copy(update={"shape": (SMALLEST_SLICE_ELEMENTS // 8, 16)})
    small = operator.model_copy(update={"parameters": (weight,)})
    assert granularities(small) == (2,)
    assert granularities(small, (8,)) == (8,)
    assert granularities(small, (1,)) == ()
    assert granularities(linear("up", rows=4)) == (2, 4)  # no more slices than rows
    assert granularities(operator.model_copy(update={"calls": 2})) == ()
    assert granularities(linear("up", splittable=False)) == ()


def test_a_menu_has_every_number_of_sharded_slices_once() -> None:
    rows = menu(linear("up"), measured=(2, 4))
    assert rows[:3] == [Choice((mode,)) for mode in Mode]
    assert len(set(rows)) == len(rows) == 3 + (2 + 2 + 1) + (4 + 4 + 3)
    four = [row.slices for row in rows if len(row.slices) == 4]
    assert (ZDP,) * 4 in four
    assert (ZDP, DP, DP, DP) in four
    assert (ZDP2, ZDP2, DP, DP) in four
    assert (ZDP, ZDP2, ZDP2, ZDP2) in four
    assert (DP,) * 4 not in four  # nothing is gained by it
    assert {row.split_dim for row in rows[3:]} == {1}


def test_a_wish_replaces_the_whole_operator_but_not_its_replica() -> None:
    rows = menu(linear("up"), (4,), (2, 4))
    assert rows[0] == Choice((DP,))
    assert {len(row.slices) for row in rows[1:]} == {4}
    assert [len(row.slices) for row in menu(linear("up"), (1,), (2, 4))] == [1, 1, 1]
    assert menu(linear("up", splittable=False), (4,)) == [Choice((mode,)) for mode in Mode]


def test_slices_communicate_each_for_itself() -> None:
    # 4 MiB: 1 ms a collective, and 0.2 ms latency for each; a slice of 1 MiB takes 0.25 + 0.2.
    link = cluster(latency_ms=0.2)
    operator = linear("up")
    assert communication(operator, Choice((ZDP,)), link).each_s == pytest.approx(3 * 1.2e-3)
    split = Choice((ZDP, ZDP, ZDP2, DP), 1)
    plain, again = (communication(operator, split, link, recomputed=recomputed) for recomputed in (False, True))
    assert plain.each_s == pytest.approx((2 * 3 + 2) * 0.45e-3)
    assert plain.once_s == pytest.approx(0.45e-3)  # 1 MiB is reduced where it is
    assert again.each_s == pytest.approx((2 * 4 + 2) * 0.45e-3)  # zdp gathers once more
    assert again.once_s == plain.once_s


def test_the_engine_takes_its_time_for_each_slice() -> None:
    own = EngineOverhead(dp=ModeOverhead(fixed_s=1.0), zdp2=ModeOverhead(fixed_s=10.0), zdp=ModeOverhead(fixed_s=100.0))
    slow = cluster().model_copy(update={"engine": own})
    assert engine(linear("up"), Choice((ZDP,)), slow) == (0.0, 100.0)
    assert engine(linear("up"), Choice((ZDP, ZDP, ZDP2, DP), 1), slow) == (1.0, 210.0)
    assert engine(linear("up"), Choice((ZDP,)), slow, recomputed=True) == (0.0, 150.0)


def test_only_one_slice_is_gathered_and_reduced_at_a_time() -> None:
    found = footprint(linear("up"), Choice((ZDP, ZDP, ZDP2, DP), 1), cluster())
    # Slices of 1 MiB: three sharded (a quarter of 3 MiB of parameter and moments each), one whole.
    assert found.states == 3 * 3 * MIB / RANKS + 3 * MIB
    assert found.replicated_gradients == MIB
    assert found.sharded_gradients == 3 * MIB / RANKS
    assert found.kept == MIB
    assert found.gathered == MIB
    assert found.transient == 3 * MIB / RANKS  # parts; the gradient takes the place of the whole slice
    assert found.updated == found.largest_update == (1 + 3 / RANKS) * MIB
    assert found.collected == MIB  # of the slices' gradients, copied one by one, the largest
    assert (found.forward_per_sample, found.backward_per_sample) == (0.0, MIB)
    outputs = footprint(linear("up"), Choice((ZDP,) * 4, 0), cluster())
    assert (outputs.forward_per_sample, outputs.backward_per_sample) == (MIB, MIB)


def test_a_large_bias_is_sharded_beside_the_slices() -> None:
    bias = ParameterInfo(name="up.bias", shape=(1 << 18,), optimizer_bytes=2 * MIB)
    small = ParameterInfo(name="up.bias", shape=(64,))
    whole = linear("up")
    for extra, mode in ((bias, ZDP2), (small, DP)):
        operator = whole.model_copy(update={"parameters": (*whole.parameters, extra)})
        found = footprint(operator, Choice((DP, ZDP2), 1), cluster())
        assert found.kept == 2 * MIB + (extra.parameter_bytes if mode == ZDP2 else 0)


def test_time_of_slices_and_of_a_second_forward() -> None:
    model = blocks_of_one(1, 2)
    times, link = compute(model), cluster()
    whole = time_cost(model.operators[0], Choice((ZDP,)), link, times, times.operators[0], 2)
    assert whole == pytest.approx((2 * 3e-3, 3e-3))
    split = time_cost(model.operators[0], Choice((ZDP, ZDP), 1), link, times, times.operators[0], 2)
    assert split == pytest.approx((2 * 3.4e-3, 3e-3))
    again = time_cost(model.operators[0], Choice((ZDP, ZDP), 1), link, times, times.operators[0], 2, recomputed=True)
    assert again == pytest.approx((2 * (3.4e-3 + 1.2e-3), 4e-3))


# -- along the step ----------------------------------------------------------------------------------------------------


def curves(choices: list[Choice], recomputed: tuple[str, ...] = (), batch_size: int = 1) -> dict[str, list[float]]:
    timeline = Timeline(blocks_of_one(2, 5), cluster(), overhead_bytes=0)
    found = timeline.curves(choices, batch_size, recomputed=recomputed)
    return {name: (curve / MIB).tolist() for name, curve in found.items()}


def test_a_recomputed_block_keeps_its_input_and_grows_anew() -> None:
    kept = [Choice()] * 2
    assert curves(kept)["activations"] == [2, 7, 8, 13, 14, 14, 8, 8, 0]
    first = curves(kept, ("blocks.0",))["activations"]
    # 5 MiB less from its forward to its backward. Its second forward starts from 2 MiB, its input and the gradient of
    # its output, takes the one that it took the first time, and leaves what its backward needs and its output.
    assert first == [2, 7, 3, 8, 9, 9, 2 + 1, 2 + 6, 8, 8, 0]
    both = curves(kept, ("blocks.0", "blocks.1"))["activations"]
    assert both == [2, 7, 3, 8, 3 + 1, 3 + 6, 9, 9, 2 + 1, 2 + 6, 8, 8, 0]
    timeline = Timeline(blocks_of_one(2, 5), cluster(), overhead_bytes=0)
    assert timeline.phases(("blocks.0",))[6:8] == ["recompute", "recompute"]
    assert len(timeline.phases()) == 8


def test_operators_of_a_recomputed_block_are_gathered_three_times() -> None:
    sharded = [Choice((ZDP,)), Choice((ZDP2,))]
    assert curves(sharded)["gathered"] == [4, 0, 4, 4, 4, 4, 0, 4, 0]
    found = curves(sharded, ("blocks.0", "blocks.1"))["gathered"]
    assert found == [4, 0, 4, 4, 4, 4, 4, 4, 4, 0, 0, 4, 0]


def test_slices_lower_the_peak() -> None:
    split = [Choice((ZDP,) * 4, 1)] * 2
    found = curves(split)
    assert found["gathered"] == [1, 0, 1, 0, 0, 1, 0, 1, 0]
    # The parts of all slices' gradients (a slice's own takes the place of the slice), and the pieces of the input's
    # gradient (1 MiB a sample).
    assert found["transient"][5] == 4 / RANKS + 1
    assert curves(split, batch_size=3)["transient"][5] == 4 / RANKS + 3

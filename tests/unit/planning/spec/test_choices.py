"""Menus, and what slices and recomputation cost, as formulas."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.cost.footprint import footprint
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.step_time import communication_time, engine_time, time_cost
from lightning_osdp.planning.spec.choices import (
    MIN_SLICE_ELEMENTS,
    WEIGHT_MODES,
    Mode,
    ShardingChoice,
    enumerate_choices,
    slice_counts,
)
from lightning_osdp.planning.spec.cluster import EngineOverhead, ModeOverhead
from lightning_osdp.planning.spec.model import ParameterInfo
from tests.support.small_models import MIB, RANKS, blocks_of_one, cluster, compute, linear

DP, ZDP2, ZDP = Mode.DP, Mode.ZDP2, Mode.ZDP


def test_slice_counts_offers_only_large_enough_or_requested_slices() -> None:
    operator = linear("up", rows=16)  # 2**20 elements
    assert slice_counts(operator) == (2, 4, 8, 16)
    weight = operator.parameters[0].model_copy(update={"shape": (MIN_SLICE_ELEMENTS // 8, 16)})
    small = operator.model_copy(update={"parameters": (weight,)})
    assert slice_counts(small) == (2,)
    assert slice_counts(small, (8,)) == (8,)
    assert slice_counts(small, (1,)) == ()
    assert slice_counts(linear("up", rows=4)) == (2, 4)  # no more slices than rows
    assert slice_counts(operator.model_copy(update={"calls": 2})) == ()
    assert slice_counts(linear("up", splittable=False)) == ()


def test_enumerate_choices_lists_each_number_of_sharded_slices_once() -> None:
    rows = enumerate_choices(linear("up"), measured_slices=(2, 4))
    assert rows[:3] == [ShardingChoice((mode,)) for mode in WEIGHT_MODES]
    assert len(set(rows)) == len(rows) == 3 + (2 + 2 + 1) + (4 + 4 + 3)
    four = [row.slices for row in rows if len(row.slices) == 4]
    assert (ZDP,) * 4 in four
    assert (ZDP, DP, DP, DP) in four
    assert (ZDP2, ZDP2, DP, DP) in four
    assert (ZDP, ZDP2, ZDP2, ZDP2) in four
    assert (DP,) * 4 not in four  # nothing is gained by it
    assert {row.split_dim for row in rows[3:]} == {1}


def test_enumerate_choices_with_requested_slices_keeps_replicated_choice() -> None:
    rows = enumerate_choices(linear("up"), (4,), (2, 4))
    assert rows[0] == ShardingChoice((DP,))
    assert {len(row.slices) for row in rows[1:]} == {4}
    assert [len(row.slices) for row in enumerate_choices(linear("up"), (1,), (2, 4))] == [1, 1, 1]
    assert enumerate_choices(linear("up", splittable=False), (4,)) == [ShardingChoice((mode,)) for mode in WEIGHT_MODES]


def test_enumerate_choices_offers_only_what_the_engine_can_carry_out() -> None:
    only_zdp = enumerate_choices(linear("up"), measured_slices=(2,), engine_modes=(ZDP,))
    assert only_zdp == [
        ShardingChoice(),
        ShardingChoice((ZDP,)),
        ShardingChoice((ZDP, ZDP), linear("up").split_dims[0]),
    ]
    assert enumerate_choices(linear("up"), measured_slices=(2,), engine_modes=(DP,)) == [ShardingChoice()]
    alike = enumerate_choices(linear("up"), measured_slices=(2,), mixed_slices=False)
    assert all(len(set(choice.slices)) == 1 for choice in alike)


def test_communication_time_charges_latency_for_each_slice() -> None:
    # 4 MiB: 1 ms a collective, and 0.2 ms latency for each; a slice of 1 MiB takes 0.25 + 0.2.
    link = cluster(latency_ms=0.2)
    operator = linear("up")
    assert communication_time(operator, ShardingChoice((ZDP,)), link).per_microbatch_s == pytest.approx(3 * 1.2e-3)
    split = ShardingChoice((ZDP, ZDP, ZDP2, DP), 1)
    plain, again = (communication_time(operator, split, link, recomputed=recomputed) for recomputed in (False, True))
    assert plain.per_microbatch_s == pytest.approx((2 * 3 + 2) * 0.45e-3)
    assert plain.per_step_s == pytest.approx(0.45e-3)  # 1 MiB is reduced where it is
    assert again.per_microbatch_s == pytest.approx((2 * 4 + 2) * 0.45e-3)  # zdp gathers once more
    assert again.per_step_s == plain.per_step_s


def test_engine_time_counts_each_slice() -> None:
    own = EngineOverhead(dp=ModeOverhead(fixed_s=1.0), zdp2=ModeOverhead(fixed_s=10.0), zdp=ModeOverhead(fixed_s=100.0))
    slow = cluster().model_copy(update={"engine": own})
    assert engine_time(linear("up"), ShardingChoice((ZDP,)), slow) == (0.0, 100.0)
    assert engine_time(linear("up"), ShardingChoice((ZDP, ZDP, ZDP2, DP), 1), slow) == (1.0, 210.0)
    assert engine_time(linear("up"), ShardingChoice((ZDP,)), slow, recomputed=True) == (0.0, 150.0)


def test_footprint_gathers_and_reduces_one_slice_at_a_time() -> None:
    found = footprint(linear("up"), ShardingChoice((ZDP, ZDP, ZDP2, DP), 1), cluster())
    # Slices of 1 MiB: three sharded (a quarter of 3 MiB of parameter and moments each), one whole.
    assert found.states == 3 * 3 * MIB / RANKS + 3 * MIB
    assert found.replicated_gradients == MIB
    assert found.sharded_gradients == 3 * MIB / RANKS
    assert found.unsharded_between_passes == MIB
    assert found.unsharded_while_running == MIB
    assert found.transient == 3 * MIB / RANKS  # parts; the gradient takes the place of the whole slice
    assert found.local_trainable == found.largest_local_trainable == (1 + 3 / RANKS) * MIB
    assert found.slice_gradient_copy == MIB  # of the slices' gradients, copied one by one, the largest
    assert (found.forward_per_sample, found.backward_per_sample) == (0.0, MIB)
    outputs = footprint(linear("up"), ShardingChoice((ZDP,) * 4, 0), cluster())
    assert (outputs.forward_per_sample, outputs.backward_per_sample) == (MIB, MIB)


def test_footprint_of_input_slices_has_their_gradients_in_place_of_an_input_that_is_freed() -> None:
    """I&C on 64 emulated ranks was predicted 3.7 of 64 MiB too high."""
    last = linear("up").model_copy(update={"frees_input": True})
    inputs, outputs, whole = (
        footprint(last, choice, cluster())
        for choice in (ShardingChoice((ZDP,) * 4, 1), ShardingChoice((ZDP,) * 4, 0), ShardingChoice((ZDP,)))
    )
    assert [each.backward_per_sample for each in (inputs, outputs, whole)] == [0.0, MIB, 0.0]
    assert [each.has_partial_gradients for each in (inputs, outputs, whole)] == [1.0, 1.0, 0.0]


def test_footprint_shards_large_bias_beside_slices() -> None:
    bias = ParameterInfo(name="up.bias", shape=(1 << 18,), optimizer_bytes=2 * MIB)
    small = ParameterInfo(name="up.bias", shape=(64,))
    whole = linear("up")
    for extra, mode in ((bias, ZDP2), (small, DP)):
        operator = whole.model_copy(update={"parameters": (*whole.parameters, extra)})
        found = footprint(operator, ShardingChoice((DP, ZDP2), 1), cluster())
        assert found.unsharded_between_passes == 2 * MIB + (extra.parameter_bytes if mode == ZDP2 else 0)


def test_time_cost_includes_slice_overhead_and_recomputed_forward() -> None:
    model = blocks_of_one(1, 2)
    times, link = compute(model), cluster()
    whole = time_cost(model.operators[0], ShardingChoice((ZDP,)), link, times, times.operators[0], 2)
    assert whole == pytest.approx((2 * 3e-3, 3e-3))
    split = time_cost(model.operators[0], ShardingChoice((ZDP, ZDP), 1), link, times, times.operators[0], 2)
    assert split == pytest.approx((2 * 3.4e-3, 3e-3))
    again = time_cost(
        model.operators[0], ShardingChoice((ZDP, ZDP), 1), link, times, times.operators[0], 2, recomputed=True
    )
    assert again == pytest.approx((2 * (3.4e-3 + 1.2e-3), 4e-3))


# -- along the step ----------------------------------------------------------------------------------------------------


def curves(
    choices: list[ShardingChoice], recomputed: tuple[str, ...] = (), batch_size: int = 1
) -> dict[str, list[float]]:
    timeline = Timeline(blocks_of_one(2, 5), cluster(), overhead_bytes=0)
    found = timeline.curves(choices, batch_size, recomputed=recomputed)
    return {name: (curve / MIB).tolist() for name, curve in found.items()}


def test_timeline_recomputed_block_keeps_input_and_regrows_activations() -> None:
    kept = [ShardingChoice()] * 2
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


def test_timeline_gathers_operators_of_recomputed_block_again() -> None:
    sharded = [ShardingChoice((ZDP,)), ShardingChoice((ZDP2,))]
    assert curves(sharded)["gathered"] == [4, 0, 4, 4, 4, 4, 0, 4, 0]
    found = curves(sharded, ("blocks.0", "blocks.1"))["gathered"]
    assert found == [4, 0, 4, 4, 4, 4, 4, 4, 4, 0, 0, 4, 0]


def test_timeline_slices_lower_gathered_and_transient_bytes() -> None:
    split = [ShardingChoice((ZDP,) * 4, 1)] * 2
    found = curves(split)
    assert found["gathered"] == [1, 0, 1, 0, 0, 1, 0, 1, 0]
    # The parts of all slices' gradients (a slice's own takes the place of the slice), and the pieces of the input's
    # gradient (1 MiB a sample).
    assert found["transient"][5] == 4 / RANKS + 1
    assert curves(split, batch_size=3)["transient"][5] == 4 / RANKS + 3

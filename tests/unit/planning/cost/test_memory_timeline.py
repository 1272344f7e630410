"""Memory along a step, as formulas."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.cost.footprint import TENSOR_PARALLEL_UNITS, footprint
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.peak_text import explain_peak
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    Moment,
    NonTrainingWork,
    Operator,
    OptimizerStep,
    ParameterInfo,
)
from tests.support.models import some_cluster
from tests.support.small_models import blocks_of_one

MIB = 1 << 20
N = 2


def operator(name: str, mebibytes: int, trainable: bool = True) -> Operator:
    states = 2 * mebibytes * MIB if trainable else 0
    weight = ParameterInfo(
        name=f"{name}.weight", shape=(mebibytes, MIB // 4), optimizer_bytes=states, trainable=trainable
    )
    return Operator(name=name, kind="Linear", parameters=(weight,))


def model(**changes: object) -> ModelProfile:
    """``shard_offset`` (4 MiB) then ``second`` (8 MiB); 3 MiB a sample are alive between forward and backward."""
    moments = (
        Moment(phase="forward", operator=0, live=LinearInBatch(per_sample=1 * MIB)),
        Moment(phase="forward", operator=1, live=LinearInBatch(per_sample=2 * MIB)),
        Moment(phase="forward", operator=UNATTRIBUTED, live=LinearInBatch(fixed=MIB, per_sample=3 * MIB)),
        Moment(phase="backward", operator=1, live=LinearInBatch(per_sample=2 * MIB)),
        Moment(phase="backward", operator=0, live=LinearInBatch(per_sample=1 * MIB)),
    )
    operators = (operator("first", 4), operator("second", 8))
    values = {"fingerprint": "", "operators": operators, "moments": moments, "batch_size": 1} | changes
    return ModelProfile(**values)  # type: ignore[arg-type]


def unsliced_choices(modes: list[Mode]) -> list[ShardingChoice]:
    """Operators that are not split."""
    return [ShardingChoice((mode,)) for mode in modes]


def curves(
    modes: list[Mode],
    batch_size: int = 1,
    accumulation: int = 1,
    cluster: dict[str, int] | None = None,
    **changes: object,
) -> dict[str, list[float]]:
    timeline = Timeline(
        model(**changes), some_cluster(N, reduce_scatter_copy_factor=0.0, **(cluster or {})), overhead_bytes=7 * MIB
    )
    return {
        name: (curve / MIB).tolist()
        for name, curve in timeline.curves(unsliced_choices(modes), batch_size, accumulation).items()
    }


def test_timeline_replicated_operators_hold_full_states_and_gradients() -> None:
    found = curves([Mode.DP, Mode.DP], batch_size=2)
    assert found["states"] == [36.0] * 6  # parameter and two moments of 12 MiB
    assert found["gradients"] == [0, 0, 0, 8, 12, 12]  # freed after the optimizer's step
    assert found["gathered"] == found["transient"] == [0.0] * 6
    assert found["activations"] == [2, 4, 7, 4, 2, 0]
    assert found["overhead"] == [7.0] * 6


def test_timeline_zdp_gathers_only_running_operator() -> None:
    found = curves([Mode.ZDP, Mode.ZDP])
    assert found["states"] == [18.0] * 6
    assert found["gradients"] == [0, 0, 0, 0, 4, 6]  # a part is there once its whole gradient has been reduced
    assert found["gathered"] == [4, 8, 0, 8, 4, 0]
    assert found["transient"] == [0, 0, 0, 8, 4, 0]  # the whole gradient before it is reduced


def test_timeline_zdp2_keeps_parameters_unsharded_between_passes() -> None:
    found = curves([Mode.ZDP2, Mode.ZDP2])
    assert found["states"] == [18.0] * 6
    assert found["gathered"] == [4, 12, 12, 12, 4, 0]


AHEAD = {"prefetch_max_bytes": 1 << 30}


def test_timeline_prefetch_holds_next_parameters_and_previous_gradient() -> None:
    found = curves([Mode.ZDP, Mode.ZDP], cluster=AHEAD)
    assert found["gathered"] == [4 + 8, 8, 0, 8 + 4, 4, 0]  # the next one's parameters are on their way
    assert found["transient"] == [0, 0, 0, 8, 4 + 8, 0]  # the last one's gradient is still being reduced
    assert found["gradients"] == [0, 0, 0, 0, 4, 6]


def test_timeline_zdp2_with_prefetch_gathers_parameters_once() -> None:
    found = curves([Mode.ZDP2, Mode.ZDP2], cluster=AHEAD)
    assert found["gathered"] == [4 + 8, 12, 12, 12, 4, 0]
    assert found["transient"] == [0, 0, 0, 8, 4 + 8, 0]


@pytest.mark.parametrize("bound_mib", [7, 8])
def test_timeline_prefetches_only_units_up_to_prefetch_max_bytes(bound_mib: int) -> None:
    found = curves([Mode.ZDP, Mode.ZDP], cluster={"prefetch_max_bytes": bound_mib * MIB})
    ahead = 8 if bound_mib == 8 else 0
    assert found["gathered"] == [4 + ahead, 8, 0, 8 + 4, 4, 0]
    assert found["transient"] == [0, 0, 0, 8, 4 + ahead, 0]


def test_timeline_prefetch_spans_replicated_operator_in_between() -> None:
    three = model(
        operators=(operator("first", 4), operator("second", 8), operator("third", 2)),
        moments=(
            *(Moment(phase="forward", operator=at, live=LinearInBatch()) for at in range(3)),
            *(Moment(phase="backward", operator=at, live=LinearInBatch()) for at in reversed(range(3))),
        ),
    )
    timeline = Timeline(three, some_cluster(N, reduce_scatter_copy_factor=0.0, **AHEAD), overhead_bytes=0)
    found = timeline.curves(unsliced_choices([Mode.ZDP, Mode.DP, Mode.ZDP]), 1)
    assert (found["gathered"] / MIB).tolist() == [4 + 2, 2, 2, 2 + 4, 4, 4, 0]
    assert (found["transient"] / MIB).tolist() == [0, 0, 0, 2, 2, 4 + 2, 0]


def test_timeline_prefetch_holds_two_units_ahead() -> None:
    names, sizes = ("first", "second", "third", "fourth"), (4, 8, 2, 16)
    four = model(
        operators=tuple(operator(*each) for each in zip(names, sizes, strict=True)),
        moments=tuple(
            Moment(phase=phase, operator=at, live=LinearInBatch())
            for phase, order in (("forward", range(4)), ("backward", range(3, -1, -1)))
            for at in order
        ),
    )
    timeline = Timeline(four, some_cluster(N, reduce_scatter_copy_factor=0.0, **AHEAD), overhead_bytes=0)
    whole = timeline.curves(unsliced_choices([Mode.ZDP] * 4), 1)
    assert (whole["gathered"] / MIB).tolist() == [4 + 8 + 2, 8 + 2 + 16, 2 + 16, 16, 16 + 2 + 8, 2 + 8 + 4, 8 + 4, 4, 0]
    sliced = [ShardingChoice((Mode.ZDP,) * 4, 0) if at == 1 else ShardingChoice((Mode.ZDP,)) for at in range(4)]
    found = timeline.curves(sliced, 1)
    # Two slices are ahead of the first operator; of a slice two more, or both operators behind the last one.
    assert (found["gathered"] / MIB).tolist()[:4] == [4 + 2 + 2, 2 + 2 + 16, 2 + 16, 16]


def test_footprint_prefetches_next_slice() -> None:
    choice = ShardingChoice((Mode.ZDP,) * 4, 0)
    usual, found = (
        footprint(operator("one", 8), choice, some_cluster(N, reduce_scatter_copy_factor=0.0, **more))
        for more in ({}, AHEAD)
    )
    assert (usual.unsharded_while_running, usual.prefetched_parameters, usual.inflight_gradient) == (2 * MIB, 0, 0)
    assert (found.prefetched_parameters, found.prefetched_slice, found.inflight_gradient) == (2 * MIB,) * 3
    assert (found.unsharded_while_running, found.next_slices) == (2 * MIB + 4 * MIB, 4 * MIB)  # two slices ahead
    assert found.transient == usual.transient + 2 * MIB
    kept = footprint(
        operator("one", 8),
        ShardingChoice((Mode.ZDP2,) * 4, 0),
        some_cluster(N, reduce_scatter_copy_factor=0.0, **AHEAD),
    )
    assert (kept.unsharded_while_running, kept.unsharded_between_passes) == (0, 8 * MIB)


def test_footprint_inflight_gradient_includes_parts_received_from_ranks() -> None:
    found = footprint(
        operator("one", 8), ShardingChoice((Mode.ZDP,)), some_cluster(4, reduce_scatter_copy_factor=0.0, **AHEAD)
    )
    assert found.inflight_gradient == 8 * MIB * (1 + 2 / 4)


def test_footprint_inflight_gradient_is_the_gradient_alone_where_no_ring_receives_parts() -> None:
    cluster = some_cluster(64, backend="emulated", reduce_scatter_copy_factor=0.0, **AHEAD)
    assert footprint(operator("one", 8), ShardingChoice((Mode.ZDP,)), cluster).inflight_gradient == 8 * MIB


def test_footprint_has_no_prefetch_over_a_link_that_ranks_of_a_node_share() -> None:
    pair = Cluster.model_validate(some_cluster(4, **AHEAD).model_dump() | {"nodes": 2, "devices_per_node": 2})
    zdp = (Mode.ZDP,)
    for choice in (ShardingChoice(zdp), ShardingChoice(zdp, hierarchical=True)):
        assert footprint(operator("one", 8), choice, pair).prefetched_parameters == 0
    in_node = ShardingChoice(zdp, scope=ShardingScope.NODE)
    assert footprint(operator("one", 8), in_node, pair).prefetched_parameters == 8 * MIB
    apart = pair.model_copy(update={"nodes": 4, "devices_per_node": 1})
    assert footprint(operator("one", 8), ShardingChoice(zdp), apart).prefetched_parameters == 8 * MIB


def test_timeline_copying_reduce_scatter_counts_beyond_freed_parameter() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_scatter_copy_factor=1.5), overhead_bytes=0)
    found = timeline.curves(unsliced_choices([Mode.ZDP, Mode.ZDP]), 1)["transient"] / MIB
    assert found.tolist() == [0, 0, 0, 8 + 12 + 4 - 8, 4 + 6 + 2 - 4, 0]


@pytest.mark.parametrize(("ranks", "most", "extra"), [(2, 8, 0), (3, 8, 4 / 3), (4, 8, 2), (4, 1, 1)])
def test_footprint_reduction_buffers_depend_on_ranks_and_buffer_size(ranks: int, most: int, extra: float) -> None:
    """A slice of 4 MiB is freed before its gradient is made; 3 ranks hold one received part of it, more ranks two."""
    cluster = some_cluster(ranks, reduce_scatter_copy_factor=0.0, reduce_scatter_buffer_bytes=most * MIB)
    found = footprint(operator("one", 8), ShardingChoice((Mode.ZDP, Mode.ZDP), 0), cluster)
    assert found.transient / MIB == pytest.approx(8 / ranks + extra)


@pytest.mark.parametrize(("choice", "units"), [((Mode.DP,), 0), ((Mode.ZDP,), 1), ((Mode.ZDP2, Mode.DP, Mode.ZDP), 2)])
def test_footprint_counts_what_each_unit_takes_besides_tensors(choice: tuple[Mode, ...], units: int) -> None:
    plain = some_cluster(2)
    counted = plain.model_copy(update={"unit_bytes": 1000})
    slices, one = ShardingChoice(choice, 0 if len(choice) > 1 else None), operator("one", 12)
    assert footprint(one, slices, counted).states - footprint(one, slices, plain).states == units * 1000


def test_footprint_counts_what_a_tensor_parallel_operator_takes_besides_tensors() -> None:
    plain, cut = some_cluster(2), ShardingChoice((Mode.TP,), tensor_degree=2)
    counted = plain.model_copy(update={"unit_bytes": 1000})
    before, after = (footprint(operator("one", 12), cut, cluster).states for cluster in (plain, counted))
    assert after - before == TENSOR_PARALLEL_UNITS * 1000


@pytest.mark.parametrize("mode", [Mode.DP, Mode.ZDP, Mode.ZDP2])
def test_footprint_counts_objects_and_pages_of_gradients_and_states(mode: Mode) -> None:
    """Adam's two states and the gradient: each tensor of whole pages lies on one more, where its header is."""
    plain = some_cluster(2)
    counted = plain.model_copy(update={"tensor_bytes": 1000, "page_bytes": 4096})
    before, after = (footprint(operator("one", 12), ShardingChoice((mode,)), cluster) for cluster in (plain, counted))
    assert after.states - before.states == 2 * (1000 + 4096)
    gradients = [each.replicated_gradients + each.sharded_gradients for each in (before, after)]
    assert gradients[1] - gradients[0] == 1000 + 4096


def test_footprint_counts_no_objects_of_frozen_parameters() -> None:
    counted = some_cluster(2).model_copy(update={"tensor_bytes": 1000, "page_bytes": 4096})
    found = footprint(operator("one", 12, trainable=False), ShardingChoice((Mode.ZDP,)), counted)
    assert (found.states, found.sharded_gradients) == (6 * MIB, 0)


def test_timeline_accumulation_keeps_gradients_throughout() -> None:
    found = curves([Mode.DP, Mode.ZDP], accumulation=2)
    assert found["gradients"] == [4 + 4] * 6
    assert found["transient"] == [0, 0, 0, 8, 4, 0]


def test_timeline_frozen_operator_has_no_gradient_and_no_backward() -> None:
    operators = (operator("first", 4, trainable=False), operator("second", 8))
    moments = model().moments[:4]
    found = curves([Mode.ZDP2, Mode.DP], operators=operators, moments=moments)
    assert found["states"] == [2 + 24] * 5
    assert found["gradients"] == [0, 0, 0, 8, 8]
    assert found["gathered"] == [4, 4, 4, 4, 0]


@pytest.mark.parametrize(("of", "expected"), [("largest", 2 * 8), ("total", 2 * (8 + 2))])
def test_timeline_adds_optimizer_temporaries_at_step(of: str, expected: float) -> None:
    step = OptimizerStep(temporary_factor=2.0, temporaries_of=of)  # type: ignore[arg-type]
    assert curves([Mode.ZDP, Mode.DP], optimizer_step=step)["transient"][-1] == expected


def test_timeline_optimizer_in_backward_frees_sharded_gradients() -> None:
    step = OptimizerStep(per_parameter=True, in_backward=True)
    found, usual = curves([Mode.ZDP, Mode.DP], optimizer_step=step), curves([Mode.ZDP, Mode.DP])
    assert usual["gradients"] == [0, 0, 0, 8, 8, 8 + 2]
    assert found["gradients"] == [0, 0, 0, 8, 8, 8]  # the replicated one's waits for the step
    assert all(found[name] == usual[name] for name in ("states", "gathered", "transient", "activations"))


@pytest.mark.parametrize(
    "choice",
    [ShardingChoice((Mode.ZDP, Mode.DP), 0), ShardingChoice((Mode.ZDP,), scope=ShardingScope.NODE)],
    ids=["a slice", "in nodes"],
)
def test_footprint_operator_updated_at_step_keeps_its_gradients(choice: ShardingChoice) -> None:
    pair = Cluster.model_validate(some_cluster(4).model_dump() | {"nodes": 2, "devices_per_node": 2})
    one = operator("one", 8)
    assert footprint(one, choice, pair, updated_in_backward=True) == footprint(one, choice, pair)


def test_footprint_in_backward_keeps_slice_gradients_until_weight_is_complete() -> None:
    choice, cluster = ShardingChoice((Mode.ZDP, Mode.ZDP), 0), some_cluster(N, reduce_scatter_copy_factor=0.0)
    usual = footprint(operator("one", 8), choice, cluster)
    found = footprint(operator("one", 8), choice, cluster, updated_in_backward=True)
    assert (usual.sharded_gradients, usual.slice_gradient_copy, usual.transient) == (4 * MIB, 2 * MIB, 4 * MIB)
    assert (found.sharded_gradients, found.slice_gradient_copy, found.transient) == (0, 0, (4 + 2) * MIB)


@pytest.mark.parametrize(("most", "extra"), [(0, 0), (3, 3), (100, 6)])
def test_timeline_all_reduce_buffers_count_while_in_flight(most: int, extra: int) -> None:
    """Two ranks hold at most 6 of 12 MiB of gradients in buffers."""
    cluster = {"all_reduce_buffer_bytes": most * MIB}
    assert curves([Mode.DP, Mode.DP], cluster=cluster)["transient"] == [0, 0, 0, 0, extra, 0]
    assert curves([Mode.ZDP, Mode.ZDP], cluster=cluster) == curves([Mode.ZDP, Mode.ZDP])


def test_timeline_small_gradients_count_twice_while_bucket_is_reduced() -> None:
    bias = ParameterInfo(name="second.bias", shape=(MIB // 8,))  # 0.5 MiB
    operators = (operator("first", 4), operator("second", 8).model_copy(update={"parameters": (bias,)}))
    assert curves([Mode.DP, Mode.DP], operators=operators)["transient"] == [0, 0, 0, 0, 0.5, 0]


def test_timeline_holds_one_bucket_twice_while_it_is_packed() -> None:
    """Three gradients of 20 MiB fill a bucket of 25 with the second that comes, and another with the third."""
    three = model(
        operators=tuple(operator(name, 20) for name in ("first", "second", "third")),
        moments=(
            *(Moment(phase="forward", operator=at, live=LinearInBatch()) for at in range(3)),
            *(Moment(phase="backward", operator=at, live=LinearInBatch()) for at in reversed(range(3))),
        ),
    )
    timeline = Timeline(three, some_cluster(N, device="cuda: some"), overhead_bytes=0)
    found = timeline.curves(unsliced_choices([Mode.DP] * 3), 1)
    assert (found["gradients"] / MIB).tolist() == [0, 0, 0, 20, 40, 60, 60]
    assert (found["transient"] / MIB).tolist() == [0, 0, 0, 0, 25, 25, 0]


@pytest.mark.parametrize(
    ("reduce_dtype", "element_bytes", "transient"),
    [
        ("bfloat16", 4, [0, 0, 0, 4, 2 + 4, 0]),  # a copy of half the size; at the end the largest is beside its own
        ("float32", 2, [0, 0, 0, 8 + 16, 8 + 4 + 8 + 16, 0]),  # all are twice as large until then
        ("float32", 4, [0.0] * 6),
    ],
)
def test_timeline_counts_replicated_gradients_in_the_type_of_their_reduction(
    reduce_dtype: str, element_bytes: int, transient: list[float]
) -> None:
    """Gradients of 8 and 4 MiB, too large for a bucket of a CPU."""
    operators = tuple(
        each.model_copy(
            update={"parameters": (each.parameters[0].model_copy(update={"element_bytes": element_bytes}),)}
        )
        for each in (operator("first", 8 // element_bytes * 2), operator("second", 16 // element_bytes * 2))
    )
    described = model(operators=operators).with_reduce_dtype(reduce_dtype)  # type: ignore[arg-type]
    timeline = Timeline(described, some_cluster(N, reduce_scatter_copy_factor=0.0), overhead_bytes=0)
    found = timeline.curves(unsliced_choices([Mode.DP, Mode.DP]), 1)["transient"] / MIB
    assert found.tolist() == transient


def test_timeline_keeps_inputs_of_a_recomputed_block_until_its_backward_ends() -> None:
    plain = blocks_of_one(3, saved_mib=2)
    kept = LinearInBatch(per_sample=MIB)
    blocks = tuple(
        block.model_copy(update={"kept_inputs": kept, "recompute_saves": LinearInBatch(per_sample=MIB)})
        for block in plain.blocks
    )
    choices = [ShardingChoice((Mode.DP,))] * 3
    names = ["blocks.0", "blocks.2"]
    without = Timeline(plain, some_cluster(N), 0)
    before, after = (
        timeline.curves(choices, 1, recomputed=names)["activations"]
        for timeline in (without, Timeline(plain.model_copy(update={"blocks": blocks}), some_cluster(N), 0))
    )
    # forward of three blocks; recomputation and backward of the third; backward of the second; then of the first
    assert without.phases(names)[6:10] == ["recompute", "recompute", "backward", "backward"]
    expected = [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0]
    assert [round(float(size) / MIB) for size in after - before] == expected


def test_peak_saving_bytes_count_one_tensor_streamed_or_all_gathered() -> None:
    def saving_mib(how: str, choices: list[ShardingChoice]) -> float:
        between = NonTrainingWork(checkpoint_memory=how)  # type: ignore[arg-type]
        timeline = Timeline(
            model(buffer_bytes=3 * MIB), some_cluster(N, reduce_scatter_copy_factor=0.0), 7 * MIB, between
        )
        return timeline.peak(choices, batch_size=1).saving_bytes / MIB

    sharded, half = unsliced_choices([Mode.ZDP, Mode.ZDP2]), unsliced_choices([Mode.ZDP, Mode.DP])
    assert saving_mib("nothing", sharded) == 0
    assert saving_mib("streamed", sharded) == 7 + 3 + 18 + 8  # of parameters and moments the largest tensor
    assert saving_mib("gathered", sharded) == 7 + 3 + 18 + 36
    assert saving_mib("streamed", half) == 7 + 3 + 6 + 24 + 4
    assert saving_mib("gathered", half) == 7 + 3 + 6 + 24 + 12
    averaging = NonTrainingWork(gathers_parameters=True)
    timeline = Timeline(model(), some_cluster(N, reduce_scatter_copy_factor=0.0), 7 * MIB, averaging)
    assert timeline.peak(sharded, batch_size=1).saving_bytes == (7 + 18 + 12) * MIB  # parameters without moments
    assert timeline.peak(unsliced_choices([Mode.DP, Mode.DP]), batch_size=1).saving_bytes == (7 + 36) * MIB
    split = [
        ShardingChoice((Mode.ZDP,)),
        ShardingChoice((Mode.ZDP, Mode.DP), split_dim=1),
    ]  # whole, and a slice beside it
    assert saving_mib("streamed", split) == 7 + 3 + 6 + (6 + 12) + 8 + 4


def test_peak_evaluation_bytes_count_only_running_operators() -> None:
    moments = (
        Moment(phase="forward", operator=0, live=LinearInBatch(per_sample=1 * MIB)),
        Moment(phase="forward", operator=UNATTRIBUTED, live=LinearInBatch(per_sample=3 * MIB)),
        Moment(phase="forward", operator=1, live=LinearInBatch(fixed=MIB)),
    )

    def evaluation_mib(batch_size: int, modes: list[Mode]) -> float:
        between = NonTrainingWork(evaluation_batch_size=batch_size)
        timeline = Timeline(
            model(evaluation=moments), some_cluster(N, reduce_scatter_copy_factor=0.0), 7 * MIB, between
        )
        return timeline.peak(unsliced_choices(modes), batch_size=1).evaluation_bytes / MIB

    assert evaluation_mib(0, [Mode.DP, Mode.DP]) == 0
    assert evaluation_mib(2, [Mode.DP, Mode.DP]) == 7 + 36 + 6
    assert evaluation_mib(2, [Mode.ZDP, Mode.ZDP2]) == 7 + 18 + 1 + 8  # kept parameters are freed, too
    assert evaluation_mib(9, [Mode.ZDP, Mode.ZDP2]) == 7 + 18 + 27


def test_peak_evaluation_bytes_keep_tied_parameters_unsharded() -> None:
    moments = tuple(
        Moment(phase="forward", operator=index, live=LinearInBatch(fixed=MIB)) for index in (0, UNATTRIBUTED, 1)
    )
    first, *others = model().operators
    between = NonTrainingWork(evaluation_batch_size=1)

    def evaluation_mib(tied: bool) -> float:
        operators = (first.model_copy(update={"tied": tied}), *others)
        described = model(evaluation=moments, operators=operators)
        timeline = Timeline(described, some_cluster(N, reduce_scatter_copy_factor=0.0), 7 * MIB, between)
        return timeline.peak(unsliced_choices([Mode.ZDP2, Mode.ZDP]), batch_size=1).evaluation_bytes / MIB

    assert evaluation_mib(tied=False) == 7 + 18 + 1 + 8
    assert evaluation_mib(tied=True) == 7 + 18 + 1 + 8 + 4


def test_timeline_gradient_order_within_operator_lowers_transient() -> None:
    def transient(turns: tuple[int, int]) -> float:
        parameters = tuple(
            ParameterInfo(name=f"first.{turn}{n}", shape=(4, MIB // 4), gradient_order=turn)
            for n, turn in enumerate(turns)
        )
        operators = (operator("first", 4).model_copy(update={"parameters": parameters}), operator("second", 8))
        return curves([Mode.ZDP, Mode.ZDP], operators=operators)["transient"][4]

    assert transient((0, 0)) == 4 + 4
    # The first is freed but for a part of its gradient, so what the second makes is less.
    assert transient((1, 0)) == 4


def test_peak_names_moment_and_total_bytes() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_scatter_copy_factor=0.0), overhead_bytes=7 * MIB)
    peak = timeline.peak(unsliced_choices([Mode.DP, Mode.DP]), batch_size=1)
    assert peak.where == "backward of first"
    assert peak.total_bytes == (36 + 12 + 1 + 7) * MIB
    peak = timeline.peak(unsliced_choices([Mode.DP, Mode.DP]), batch_size=100)
    assert peak.where == "forward after second"
    assert peak.total_bytes == (36 + 301 + 7) * MIB


def test_timeline_explain_lists_largest_part_of_peak_first() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_scatter_copy_factor=0.0), overhead_bytes=7 * MIB)
    assert explain_peak(timeline.peak(unsliced_choices([Mode.ZDP, Mode.ZDP]), batch_size=2)) == (
        "reached in the backward of second: states 18.0 MiB (47%), gathered parameters 8.0 MiB (21%), transients "
        "(whole gradients on their way to be reduced, and buckets) 8.0 MiB (21%), activations 4.0 MiB (11%); beside "
        "7.0 MiB of the process before the model"
    )
    assert explain_peak(timeline.peak(unsliced_choices([Mode.DP, Mode.DP]), batch_size=1)).startswith(
        "reached in the backward of first: states 36.0"
    )


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64 / 2 / 4), ("cuda: some", 64 / 2)])
def test_footprint_slice_gradient_copy_depends_on_device(device: str, expected: float) -> None:
    """Each slice's is freed once copied; on a CPU the whole they go to takes memory no sooner than it is written."""
    split = ShardingChoice((Mode.ZDP,) * 4, split_dim=1)
    found = footprint(operator("split", 64), split, some_cluster(device=device))
    assert found.slice_gradient_copy == expected * MIB
    assert (
        footprint(operator("whole", 64), ShardingChoice((Mode.ZDP,)), some_cluster(device=device)).slice_gradient_copy
        == 0
    )

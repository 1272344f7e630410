"""Memory along a step, as formulas."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.choices import Choice, Group, Mode
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.cost import footprint
from lightning_osdp.planning.operators import (
    OUTSIDE,
    BetweenSteps,
    Line,
    ModelDescription,
    Moment,
    Operator,
    OptimizerStep,
    ParameterInfo,
)
from lightning_osdp.planning.timeline import Timeline
from tests.models import some_cluster

MIB = 1 << 20
N = 2


def operator(name: str, mebibytes: int, trainable: bool = True) -> Operator:
    states = 2 * mebibytes * MIB if trainable else 0
    weight = ParameterInfo(
        name=f"{name}.weight", shape=(mebibytes, MIB // 4), optimizer_bytes=states, trainable=trainable
    )
    return Operator(name=name, kind="Linear", parameters=(weight,))


def model(**changes: object) -> ModelDescription:
    """``first`` (4 MiB) then ``second`` (8 MiB); 3 MiB a sample are alive between forward and backward."""
    moments = (
        Moment(phase="forward", operator=0, live=Line(per_sample=1 * MIB)),
        Moment(phase="forward", operator=1, live=Line(per_sample=2 * MIB)),
        Moment(phase="forward", operator=OUTSIDE, live=Line(fixed=MIB, per_sample=3 * MIB)),
        Moment(phase="backward", operator=1, live=Line(per_sample=2 * MIB)),
        Moment(phase="backward", operator=0, live=Line(per_sample=1 * MIB)),
    )
    operators = (operator("first", 4), operator("second", 8))
    values = {"fingerprint": "", "operators": operators, "moments": moments, "batch_size": 1} | changes
    return ModelDescription(**values)  # type: ignore[arg-type]


def whole(modes: list[Mode]) -> list[Choice]:
    """Operators that are not split."""
    return [Choice((mode,)) for mode in modes]


def curves(
    modes: list[Mode],
    batch_size: int = 1,
    accumulation: int = 1,
    cluster: dict[str, int] | None = None,
    **changes: object,
) -> dict[str, list[float]]:
    timeline = Timeline(model(**changes), some_cluster(N, reduce_copy=0.0, **(cluster or {})), overhead_bytes=7 * MIB)
    return {
        name: (curve / MIB).tolist() for name, curve in timeline.curves(whole(modes), batch_size, accumulation).items()
    }


def test_replicated() -> None:
    found = curves([Mode.DP, Mode.DP], batch_size=2)
    assert found["states"] == [36.0] * 6  # parameter and two moments of 12 MiB
    assert found["gradients"] == [0, 0, 0, 8, 12, 12]  # freed after the optimizer's step
    assert found["gathered"] == found["transient"] == [0.0] * 6
    assert found["activations"] == [2, 4, 7, 4, 2, 0]
    assert found["overhead"] == [7.0] * 6


def test_sharded() -> None:
    found = curves([Mode.ZDP, Mode.ZDP])
    assert found["states"] == [18.0] * 6
    assert found["gradients"] == [0, 0, 0, 0, 4, 6]  # a part is there once its whole gradient has been reduced
    assert found["gathered"] == [4, 8, 0, 8, 4, 0]
    assert found["transient"] == [0, 0, 0, 8, 4, 0]  # the whole gradient before it is reduced


def test_sharded_states_with_whole_parameters() -> None:
    found = curves([Mode.ZDP2, Mode.ZDP2])
    assert found["states"] == [18.0] * 6
    assert found["gathered"] == [4, 12, 12, 12, 4, 0]


AHEAD = {"ahead_bytes": 1 << 30}


def test_units_that_run_ahead() -> None:
    found = curves([Mode.ZDP, Mode.ZDP], cluster=AHEAD)
    assert found["gathered"] == [4 + 8, 8, 0, 8 + 4, 4, 0]  # the next one's parameters are on their way
    assert found["transient"] == [0, 0, 0, 8, 4 + 8, 0]  # the last one's gradient is still being reduced
    assert found["gradients"] == [0, 0, 0, 0, 4, 6]


def test_what_is_whole_from_forward_to_backward_is_gathered_ahead_once() -> None:
    found = curves([Mode.ZDP2, Mode.ZDP2], cluster=AHEAD)
    assert found["gathered"] == [4 + 8, 12, 12, 12, 4, 0]
    assert found["transient"] == [0, 0, 0, 8, 4 + 8, 0]


@pytest.mark.parametrize("bound_mib", [7, 8])
def test_only_units_up_to_a_size_run_ahead(bound_mib: int) -> None:
    found = curves([Mode.ZDP, Mode.ZDP], cluster={"ahead_bytes": bound_mib * MIB})
    ahead = 8 if bound_mib == 8 else 0
    assert found["gathered"] == [4 + ahead, 8, 0, 8 + 4, 4, 0]
    assert found["transient"] == [0, 0, 0, 8, 4 + ahead, 0]


def test_an_operator_between_has_the_next_ones_parameters_beside_it() -> None:
    three = model(
        operators=(operator("first", 4), operator("second", 8), operator("third", 2)),
        moments=(
            *(Moment(phase="forward", operator=at, live=Line()) for at in range(3)),
            *(Moment(phase="backward", operator=at, live=Line()) for at in reversed(range(3))),
        ),
    )
    timeline = Timeline(three, some_cluster(N, reduce_copy=0.0, **AHEAD), overhead_bytes=0)
    found = timeline.curves(whole([Mode.ZDP, Mode.DP, Mode.ZDP]), 1)
    assert (found["gathered"] / MIB).tolist() == [4 + 2, 2, 2, 2 + 4, 4, 4, 0]
    assert (found["transient"] / MIB).tolist() == [0, 0, 0, 2, 2, 4 + 2, 0]


def test_slices_run_ahead_of_each_other() -> None:
    choice = Choice((Mode.ZDP,) * 4, 0)
    usual, found = (
        footprint(operator("one", 8), choice, some_cluster(N, reduce_copy=0.0, **more)) for more in ({}, AHEAD)
    )
    assert (usual.gathered, usual.ahead, usual.pending) == (2 * MIB, 0, 0)
    assert (found.gathered, found.ahead, found.pending) == (4 * MIB, 2 * MIB, 2 * MIB)
    assert found.transient == usual.transient + 2 * MIB
    kept = footprint(operator("one", 8), Choice((Mode.ZDP2,) * 4, 0), some_cluster(N, reduce_copy=0.0, **AHEAD))
    assert (kept.gathered, kept.kept) == (0, 8 * MIB)


def test_with_more_ranks_what_they_have_sent_waits_to_be_added() -> None:
    found = footprint(operator("one", 8), Choice((Mode.ZDP,)), some_cluster(4, reduce_copy=0.0, **AHEAD))
    assert found.pending == 8 * MIB * (1 + 2 / 4)


def test_nothing_runs_ahead_where_ranks_share_a_node_s_link() -> None:
    pair = Cluster.model_validate(some_cluster(4, **AHEAD).model_dump() | {"nodes": 2, "devices_per_node": 2})
    zdp = (Mode.ZDP,)
    for choice in (Choice(zdp), Choice(zdp, group=Group.NODE), Choice(zdp, two_stage=True)):
        assert footprint(operator("one", 8), choice, pair).ahead == 0
    apart = pair.model_copy(update={"nodes": 4, "devices_per_node": 1})
    assert footprint(operator("one", 8), Choice(zdp), apart).ahead == 8 * MIB


def test_a_copying_reduction_counts_from_where_it_exceeds_the_freed_parameter() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_copy=1.5), overhead_bytes=0)
    found = timeline.curves(whole([Mode.ZDP, Mode.ZDP]), 1)["transient"] / MIB
    assert found.tolist() == [0, 0, 0, 8 + 12 + 4 - 8, 4 + 6 + 2 - 4, 0]


@pytest.mark.parametrize(("ranks", "most", "extra"), [(2, 8, 0), (3, 8, 4 / 3), (4, 8, 2), (4, 1, 1)])
def test_a_reduction_has_buffers_where_it_goes_over_other_ranks(ranks: int, most: int, extra: float) -> None:
    """Of a slice of 4 MiB, which is freed before its gradient is made; with 3 ranks one part, with more of them two."""
    cluster = some_cluster(ranks, reduce_copy=0.0, reduce_buffer_bytes=most * MIB)
    found = footprint(operator("one", 8), Choice((Mode.ZDP, Mode.ZDP), 0), cluster)
    assert found.transient / MIB == pytest.approx(8 / ranks + extra)


def test_accumulation_keeps_gradients_throughout() -> None:
    found = curves([Mode.DP, Mode.ZDP], accumulation=2)
    assert found["gradients"] == [4 + 4] * 6
    assert found["transient"] == [0, 0, 0, 8, 4, 0]


def test_frozen_operators_have_no_gradient_and_may_have_no_backward() -> None:
    operators = (operator("first", 4, trainable=False), operator("second", 8))
    moments = model().moments[:4]
    found = curves([Mode.ZDP2, Mode.DP], operators=operators, moments=moments)
    assert found["states"] == [2 + 24] * 5
    assert found["gradients"] == [0, 0, 0, 8, 8]
    assert found["gathered"] == [4, 4, 4, 4, 0]


@pytest.mark.parametrize(("of", "expected"), [("largest", 2 * 8), ("total", 2 * (8 + 2))])
def test_optimizer_temporaries(of: str, expected: float) -> None:
    step = OptimizerStep(temporary_factor=2.0, of=of)  # type: ignore[arg-type]
    assert curves([Mode.ZDP, Mode.DP], optimizer_step=step)["transient"][-1] == expected


def test_updated_in_the_backward_pass_parts_of_gradients_are_not_kept() -> None:
    step = OptimizerStep(separable=True, in_backward=True)
    found, usual = curves([Mode.ZDP, Mode.DP], optimizer_step=step), curves([Mode.ZDP, Mode.DP])
    assert usual["gradients"] == [0, 0, 0, 8, 8, 8 + 2]
    assert found["gradients"] == [0, 0, 0, 8, 8, 8]  # the replicated one's waits for the step
    assert all(found[name] == usual[name] for name in ("states", "gathered", "transient", "activations"))


@pytest.mark.parametrize(
    "choice", [Choice((Mode.ZDP, Mode.DP), 0), Choice((Mode.ZDP,), group=Group.NODE)], ids=["a slice", "in nodes"]
)
def test_what_waits_for_the_step_keeps_its_gradients(choice: Choice) -> None:
    pair = Cluster.model_validate(some_cluster(4).model_dump() | {"nodes": 2, "devices_per_node": 2})
    one = operator("one", 8)
    assert footprint(one, choice, pair, updated_in_backward=True) == footprint(one, choice, pair)


def test_slices_keep_their_gradients_until_the_weights_is_complete() -> None:
    choice, cluster = Choice((Mode.ZDP, Mode.ZDP), 0), some_cluster(N, reduce_copy=0.0)
    usual = footprint(operator("one", 8), choice, cluster)
    found = footprint(operator("one", 8), choice, cluster, updated_in_backward=True)
    assert (usual.sharded_gradients, usual.collected, usual.transient) == (4 * MIB, 2 * MIB, 4 * MIB)
    assert (found.sharded_gradients, found.collected, found.transient) == (0, 0, (4 + 2) * MIB)


@pytest.mark.parametrize(("most", "extra"), [(0, 0), (3, 3), (100, 6)])
def test_averaging_takes_buffers_while_it_is_under_way(most: int, extra: int) -> None:
    """Of 12 MiB of gradients on two ranks 6 at most."""
    cluster = {"all_reduce_buffer_bytes": most * MIB}
    assert curves([Mode.DP, Mode.DP], cluster=cluster)["transient"] == [0, 0, 0, 0, extra, 0]
    assert curves([Mode.ZDP, Mode.ZDP], cluster=cluster) == curves([Mode.ZDP, Mode.ZDP])


def test_small_gradients_stand_twice_while_their_bucket_is_reduced() -> None:
    bias = ParameterInfo(name="second.bias", shape=(MIB // 8,))  # 0.5 MiB
    operators = (operator("first", 4), operator("second", 8).model_copy(update={"parameters": (bias,)}))
    assert curves([Mode.DP, Mode.DP], operators=operators)["transient"] == [0, 0, 0, 0, 0.5, 0]


def test_saving_makes_sharded_tensors_whole_one_by_one_or_at_once() -> None:
    def saving_mib(how: str, choices: list[Choice]) -> float:
        between = BetweenSteps(saving=how)  # type: ignore[arg-type]
        timeline = Timeline(model(buffer_bytes=3 * MIB), some_cluster(N, reduce_copy=0.0), 7 * MIB, between)
        return timeline.peak(choices, batch_size=1).saving_bytes / MIB

    sharded, half = whole([Mode.ZDP, Mode.ZDP2]), whole([Mode.ZDP, Mode.DP])
    assert saving_mib("nothing", sharded) == 0
    assert saving_mib("streamed", sharded) == 7 + 3 + 18 + 8  # of parameters and moments the largest tensor
    assert saving_mib("gathered", sharded) == 7 + 3 + 18 + 36
    assert saving_mib("streamed", half) == 7 + 3 + 6 + 24 + 4
    assert saving_mib("gathered", half) == 7 + 3 + 6 + 24 + 12
    split = [Choice((Mode.ZDP,)), Choice((Mode.ZDP, Mode.DP), split_dim=1)]  # whole, and a slice beside it
    assert saving_mib("streamed", split) == 7 + 3 + 6 + (6 + 12) + 8 + 4


def test_evaluation_keeps_nothing_but_what_runs() -> None:
    moments = (
        Moment(phase="forward", operator=0, live=Line(per_sample=1 * MIB)),
        Moment(phase="forward", operator=OUTSIDE, live=Line(per_sample=3 * MIB)),
        Moment(phase="forward", operator=1, live=Line(fixed=MIB)),
    )

    def evaluation_mib(batch_size: int, modes: list[Mode]) -> float:
        between = BetweenSteps(evaluation_batch_size=batch_size)
        timeline = Timeline(model(evaluation=moments), some_cluster(N, reduce_copy=0.0), 7 * MIB, between)
        return timeline.peak(whole(modes), batch_size=1).evaluation_bytes / MIB

    assert evaluation_mib(0, [Mode.DP, Mode.DP]) == 0
    assert evaluation_mib(2, [Mode.DP, Mode.DP]) == 7 + 36 + 6
    assert evaluation_mib(2, [Mode.ZDP, Mode.ZDP2]) == 7 + 18 + 1 + 8  # kept parameters are freed, too
    assert evaluation_mib(9, [Mode.ZDP, Mode.ZDP2]) == 7 + 18 + 27


def test_in_evaluation_what_is_tied_is_whole_while_anything_runs() -> None:
    moments = tuple(Moment(phase="forward", operator=index, live=Line(fixed=MIB)) for index in (0, OUTSIDE, 1))
    first, *others = model().operators
    between = BetweenSteps(evaluation_batch_size=1)

    def evaluation_mib(tied: bool) -> float:
        operators = (first.model_copy(update={"tied": tied}), *others)
        described = model(evaluation=moments, operators=operators)
        timeline = Timeline(described, some_cluster(N, reduce_copy=0.0), 7 * MIB, between)
        return timeline.peak(whole([Mode.ZDP2, Mode.ZDP]), batch_size=1).evaluation_bytes / MIB

    assert evaluation_mib(tied=False) == 7 + 18 + 1 + 8
    assert evaluation_mib(tied=True) == 7 + 18 + 1 + 8 + 4


def test_gradients_of_an_operator_that_come_in_turns_are_not_there_at_once() -> None:
    def transient(turns: tuple[int, int]) -> float:
        parameters = tuple(
            ParameterInfo(name=f"first.{turn}{n}", shape=(4, MIB // 4), turn=turn) for n, turn in enumerate(turns)
        )
        operators = (operator("first", 4).model_copy(update={"parameters": parameters}), operator("second", 8))
        return curves([Mode.ZDP, Mode.ZDP], operators=operators)["transient"][4]

    assert transient((0, 0)) == 4 + 4
    # The first is freed but for a part of its gradient, so what the second makes is less.
    assert transient((1, 0)) == 4


def test_peak_says_where_and_what() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_copy=0.0), overhead_bytes=7 * MIB)
    peak = timeline.peak(whole([Mode.DP, Mode.DP]), batch_size=1)
    assert peak.where == "backward of first"
    assert peak.total_bytes == (36 + 12 + 1 + 7) * MIB
    peak = timeline.peak(whole([Mode.DP, Mode.DP]), batch_size=100)
    assert peak.where == "forward after second"
    assert peak.total_bytes == (36 + 301 + 7) * MIB


def test_the_peak_is_explained_largest_part_first() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_copy=0.0), overhead_bytes=7 * MIB)
    assert timeline.explain(whole([Mode.ZDP, Mode.ZDP]), batch_size=2) == (
        "reached in the backward of second: states 18.0 MiB (47%), gathered parameters 8.0 MiB (21%), transients "
        "(whole gradients on their way to be reduced, and buckets) 8.0 MiB (21%), activations 4.0 MiB (11%); beside "
        "7.0 MiB of the process before the model"
    )
    assert timeline.explain(whole([Mode.DP, Mode.DP]), batch_size=1).startswith(
        "reached in the backward of first: states 36.0"
    )


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64 / 2 / 4), ("cuda: some", 64 / 2)])
def test_collecting_the_gradients_of_slices(device: str, expected: float) -> None:
    """Each slice's is freed once copied; on a CPU the whole they go to takes memory no sooner than it is written."""
    split = Choice((Mode.ZDP,) * 4, split_dim=1)
    found = footprint(operator("split", 64), split, some_cluster(device=device))
    assert found.collected == expected * MIB
    assert footprint(operator("whole", 64), Choice((Mode.ZDP,)), some_cluster(device=device)).collected == 0

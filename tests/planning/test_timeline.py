"""Memory along a step, as formulas."""

from __future__ import annotations

import pytest

from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.cost import footprint
from lightning_osdp.planning.operators import (
    OUTSIDE,
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


def curves(modes: list[Mode], batch_size: int = 1, accumulation: int = 1, **changes: object) -> dict[str, list[float]]:
    timeline = Timeline(model(**changes), some_cluster(N, reduce_copy=0.0), overhead_bytes=7 * MIB)
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


def test_a_copying_reduction_counts_from_where_it_exceeds_the_freed_parameter() -> None:
    timeline = Timeline(model(), some_cluster(N, reduce_copy=1.5), overhead_bytes=0)
    found = timeline.curves(whole([Mode.ZDP, Mode.ZDP]), 1)["transient"] / MIB
    assert found.tolist() == [0, 0, 0, 8 + 12 + 4 - 8, 4 + 6 + 2 - 4, 0]


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


def test_small_gradients_stand_twice_while_their_bucket_is_reduced() -> None:
    bias = ParameterInfo(name="second.bias", shape=(MIB // 8,))  # 0.5 MiB
    operators = (operator("first", 4), operator("second", 8).model_copy(update={"parameters": (bias,)}))
    assert curves([Mode.DP, Mode.DP], operators=operators)["transient"] == [0, 0, 0, 0, 0.5, 0]


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

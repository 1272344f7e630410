"""The compute beside which collectives go on, by the places of operators."""

from __future__ import annotations

from lightning_osdp.planning.cost.neighbours import Neighbours, neighbours_of, neighbours_of_slices
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Moment, RepeatedBlock
from tests.support.small_models import blocks_of_one, linear

BLOCKS = {"b.0": (2, 3, 4, 5), "b.1": (6, 7)}
"""Operators of ``model_and_times`` in each block."""


def time_of(seconds: float) -> OperatorTime:
    return OperatorTime(forward=line(seconds), backward=line(2 * seconds))


def line(seconds: float) -> LinearInBatch:
    return LinearInBatch(per_sample=seconds)


def place(share: float, before: float, after: float) -> Neighbours:
    return Neighbours(share, line(before), line(2 * before), line(2 * after))


def model_and_times() -> tuple[ModelProfile, ComputeTimes]:
    """A table, then three times a norm and a matrix, then a head; a second matrix never runs."""
    norm = linear("norm").model_copy(update={"kind": "Norm", "replicated_reason": "it is small"})
    table = linear("table").model_copy(update={"kind": "Embedding"})
    unused = linear("unused", 2)
    matrices = [linear(name) for name in ("one", "two", "three")]
    operators = (unused, table, *(each for matrix in matrices for each in (norm, matrix)), linear("head", 8))
    seconds = (7.0, 0.0, *(0.5, 1.0) * 3, 4.0)
    moments = tuple(
        Moment(phase=phase, operator=index, live=LinearInBatch())
        for phase, indices in (("forward", range(1, 9)), ("backward", range(8, 0, -1)))
        for index in indices
    )
    model = blocks_of_one(1, 1).model_copy(update={"operators": operators, "moments": moments, "blocks": ()})
    times = ComputeTimes(operators=tuple(map(time_of, seconds)), unattributed=OperatorTime(), optimizer_s_per_byte=0.0)
    return model, times


def test_neighbours_of_counts_compute_up_to_the_nearest_operator_that_may_be_sharded() -> None:
    _, table, norm, one, _, two, _, _, head = neighbours_of(*model_and_times())
    assert table == (place(1.0, 0.0, 1.5),)  # nothing is before the first one
    assert head == (place(1.0, 1.0, 0.0),)
    assert one == two == (place(1 / 3, 0.5, 1.5), place(1 / 3, 1.5, 1.5), place(1 / 3, 1.5, 4.0))
    assert norm == (place(1 / 3, 0.0, 1.0), place(2 / 3, 1.0, 1.0))


def test_neighbours_of_count_equal_parts_of_what_a_block_computes_between_operators() -> None:
    model, times = model_and_times()
    blocks = tuple(
        RepeatedBlock(
            name=name, kind="B", operators=operators, forward=(0, 0), backward=(0, 0), recompute_saves=line(0.0)
        )
        for name, operators in BLOCKS.items()
    )
    model = model.model_copy(update={"blocks": blocks})
    unattributed = OperatorTime(forward=line(8.0), backward=line(4.0))
    times = times.model_copy(update={"unattributed": unattributed, "blocks": (line(4.0), line(2.0))})
    head = neighbours_of(model, times)[-1]
    assert head == (Neighbours(1.0, line(1.0 + 1.0), line(2.0 + 0.5), line(0.0)),)
    places = neighbours_of(model, times)[3]  # one, two and three cost the same
    assert [place.forward for place in places] == [line(0.5 + 1.0), line(1.5 + 2.0), line(1.5 + 2.0)]


def test_neighbours_of_an_operator_that_never_runs_take_no_time() -> None:
    model, times = model_and_times()
    assert neighbours_of(model, times)[0] == (place(1.0, 0.0, 0.0),)


def test_neighbours_of_slices_are_other_slices_but_for_the_first_and_the_last() -> None:
    own, places = (line(2.0), line(4.0)), (place(0.25, 0.0, 1.0), place(0.75, 1.0, 1.0))
    assert neighbours_of_slices(places, own, 1) == list(places)
    assert neighbours_of_slices((), own, 3) == [place(1.0, 2.0, 2.0)]
    assert neighbours_of_slices(places, own, 4) == [
        place(0.75, 2.0, 2.0),
        place(0.0625, 0.0, 1.0),
        place(0.1875, 1.0, 1.0),
    ]

"""The compute beside which an operator's collectives go on: that of its neighbours.

A unit's parameters are gathered while the operators before it compute, and in the backward pass while those after it
do; its last gradient is reduced while those before it do. Slices are units, too. So the first unit's gather and the
last reduction wait for their link, however much the units themselves compute.

What a block computes between its operators, such as attention, is beside collectives as well. It is known as one sum,
of which each operator of the block is taken to have an equal part.

Operators of equal cost are one kind for the search, wherever they are: each counts the average over the places of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Operator

TYPICAL_BATCH_SIZE = 8
"""At which a block's part of the forward tells its part of the backward."""


class Neighbours(NamedTuple):
    """Seconds, by batch size, of the compute between an operator and the nearest ones that may be sharded."""

    share: float
    """Fraction of the operators of equal cost that have these neighbours."""
    forward: LinearInBatch
    """The forward of the operators before it."""
    backward_before: LinearInBatch
    """The backward of the same ones."""
    backward_after: LinearInBatch
    """The backward of the operators after it."""


def neighbours_of_slices(
    places: Sequence[Neighbours], own: tuple[LinearInBatch, LinearInBatch], num_slices: int
) -> list[Neighbours]:
    """Return the neighbours of an operator's slices: other slices, but for the first and the last.

    Args:
        places: the neighbours of the operators that cost the same; empty if they take as long as the operator.
        own: forward and backward of the operator.
        num_slices: its number of slices.
    """
    forward, backward = own
    at_ends = 1 / num_slices if places else 0.0
    inside = [Neighbours(1 - at_ends, forward, backward, backward)] if at_ends < 1 else []
    return [*inside, *(place._replace(share=at_ends * place.share) for place in places)]


def operator_key(operator: Operator, time: OperatorTime) -> tuple[object, ...]:
    """Return a key that is equal for operators whose choices cost the same."""
    return operator.signature, time


def neighbours_of(model: ModelProfile, compute: ComputeTimes) -> list[tuple[Neighbours, ...]]:
    """Return for each operator the neighbours of all that are of equal cost."""
    order, zero, times = forward_order(model), OperatorTime(), with_work_between(model, compute)
    before = _compute_since_unit(model, times, order)
    after = _compute_since_unit(model, times, order[::-1])
    keys = [operator_key(*pair) for pair in zip(model.operators, compute.operators, strict=True)]
    places: dict[tuple[object, ...], Counter[tuple[LinearInBatch, ...]]] = {}
    for index, key in enumerate(keys):
        first, last = before.get(index, zero), after.get(index, zero)
        places.setdefault(key, Counter())[first.forward, first.backward, last.backward] += 1
    known = {
        key: tuple(Neighbours(count / counts.total(), *lines) for lines, count in counts.items())
        for key, counts in places.items()
    }
    return [known[key] for key in keys]


def forward_order(model: ModelProfile) -> list[int]:
    """Return the operators in the order in which they first run."""
    ran = dict.fromkeys(moment.operator for moment in model.moments if moment.phase == "forward")
    indices = range(len(model.operators))
    return [index for index in ran if index in indices] if ran else list(indices)


def with_work_between(model: ModelProfile, compute: ComputeTimes) -> list[OperatorTime]:
    """Return each operator's time and its part of what its block computes between operators."""
    times, rest = list(compute.operators), compute.unattributed
    in_all_s = rest.forward.value_at(TYPICAL_BATCH_SIZE)
    for block, forward in zip(model.blocks, compute.blocks, strict=False):  # no times if they were not measured
        share = min(1.0, forward.value_at(TYPICAL_BATCH_SIZE) / in_all_s) if in_all_s else 0.0
        for index in block.operators:
            own, part = times[index], 1 / len(block.operators)
            times[index] = OperatorTime(
                forward=own.forward.plus(forward.scale(part)),
                backward=own.backward.plus(rest.backward.scale(share * part)),
            )
    return times


def _compute_since_unit(
    model: ModelProfile, operator_times: Sequence[OperatorTime], order: Sequence[int]
) -> dict[int, OperatorTime]:
    """Return for each operator the time of those before it in ``order``, from the last one that may be sharded on."""
    times, since = {index: OperatorTime() for index in order[:1]}, OperatorTime()
    for last, index in pairwise(order):
        own = operator_times[last]
        start = OperatorTime() if model.operators[last].is_shardable else since
        since = OperatorTime(forward=start.forward.plus(own.forward), backward=start.backward.plus(own.backward))
        times[index] = since
    return times

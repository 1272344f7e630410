"""What a rehearsal of the whole step says of times that were measured in parts.

Kernels that are timed one by one find other data in the caches than in a step, and collectives between operators of
another size, ranks that are out of step in other ways. A rehearsal gives the sums: forward and backward of the plain
module at one or two batch sizes, and what each mode adds to it. The parts keep their shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_osdp.planning.choices import Choice, Mode, legal_modes
from lightning_osdp.planning.cluster import Cluster, ComputeTimes, EngineOverhead, OperatorTime, SplitTime
from lightning_osdp.planning.cost import communication, engine
from lightning_osdp.planning.joining import Joined, Units
from lightning_osdp.planning.operators import Line, ModelDescription, Operator

MOST = 3.0
"""Parts are changed by this factor at most: a machine that was busy for a moment teaches nothing."""


def rising(points: Sequence[tuple[int, float]]) -> Line:
    """The line through one or two points (batch size, value) with neither slope nor intercept below zero, least squares
    of the rest."""
    if len(points) == 1:
        return Line(fixed=points[0][1])
    (low, first), (high, second) = points
    slope = (second - first) / (high - low)
    if slope < 0:
        return Line(fixed=(first + second) / 2)
    if first < slope * low:
        return Line(per_sample=sum(b * t for b, t in points) / sum(b * b for b, _ in points))
    return Line(fixed=first - slope * low, per_sample=slope)


JOINED_MODE = Mode.ZDP2
"""Of all operators when shared units are rehearsed."""


def compute_s(compute: ComputeTimes, batch_size: int) -> float:
    """Seconds of forward and backward of the plain module, as a sum of its parts."""
    return sum(time.at(batch_size) for time in (*compute.operators, compute.outside))


def rehearsed_compute(compute: ComputeTimes, seconds: Mapping[int, float]) -> ComputeTimes:
    """The same parts, scaled so that their sums come to what was rehearsed.

    Args:
        compute: as measured in parts.
        seconds: of forward and backward, by batch size; one or two of them.
    """
    factors = {size: _within(took, compute_s(compute, size)) for size, took in sorted(seconds.items())}

    def scaled(line: Line) -> Line:
        if len(factors) == 1:
            (factor,) = factors.values()
            return Line(fixed=line.fixed * factor, per_sample=line.per_sample * factor)
        return rising([(size, factor * line.at(size)) for size, factor in factors.items()])

    def split(one: SplitTime) -> SplitTime:
        return one.model_copy(update={"forward": scaled(one.forward), "backward": scaled(one.backward)})

    def whole(one: OperatorTime) -> OperatorTime:
        splits = tuple(map(split, one.splits))
        return OperatorTime(forward=scaled(one.forward), backward=scaled(one.backward), splits=splits)

    return compute.model_copy(
        update={
            "operators": tuple(map(whole, compute.operators)),
            "outside": whole(compute.outside),
            "blocks": tuple(map(scaled, compute.blocks)),
        }
    )


def alike(operator: Operator, mode: Mode) -> Choice:
    """The choice for an operator, not split, where all that can are in one mode; what it may come nearest to that."""
    legal = legal_modes(operator)
    return Choice((mode if mode in legal else legal[-1],))


def rehearsed_engine(
    model: ModelDescription,
    cluster: Cluster,
    seconds: Mapping[Mode, float],
    units: Units = (),
    joined_s: float | None = None,
) -> EngineOverhead:
    """The engine's time with a factor for each mode, so that all operators in it add what was rehearsed.

    Args:
        model: whose step it was.
        cluster: with links and engine as measured in parts.
        seconds: that each mode, all operators in it, adds to a step of one micro-batch.
        units: which operators shared units in one more rehearsal.
        joined_s: what that one added, all operators in ``JOINED_MODE``.
    """
    found = cluster.engine
    for mode in sorted(seconds, key=list(Mode).index):  # replicated first: some operators can't be sharded
        own, others = _parts_s(model.operators, mode, cluster.model_copy(update={"engine": found}))
        factor = _within(seconds[mode] - others, own)
        found = found.model_copy(update={mode.value: found.of(mode).model_copy(update={"factor": factor})})
    if joined_s is None:
        return found
    operators = Joined.of(model, units).model.operators
    shared = [operator for operator in operators if operator.joins > 1]
    alone = [operator for operator in operators if operator.joins == 1]
    now = cluster.model_copy(update={"engine": found})
    own, others = sum(_parts_s(shared, JOINED_MODE, now)), sum(_parts_s(alone, JOINED_MODE, now))
    return found.model_copy(update={"joined": _within(joined_s - others, own)})


def added_s(model: ModelDescription, cluster: Cluster, mode: Mode, units: Units) -> float:
    """Seconds that all operators in one mode add to a step of one micro-batch, as a sum of parts."""
    return sum(_parts_s(Joined.of(model, units).model.operators, mode, cluster))


def _parts_s(operators: Sequence[Operator], mode: Mode, cluster: Cluster) -> tuple[float, float]:
    """Seconds that operators add to a step of one micro-batch: of those that can be in ``mode``, and of the others."""
    seconds = {True: 0.0, False: 0.0}
    for operator in operators:
        choice = alike(operator, mode)
        added = sum(communication(operator, choice, cluster)) + sum(engine(operator, choice, cluster))
        seconds[choice.slices == (mode,)] += added
    return seconds[True], seconds[False]


def _within(rehearsed_s: float, parts_s: float) -> float:
    if parts_s <= 0:
        return 1.0
    return min(MOST, max(1 / MOST, rehearsed_s / parts_s))

"""Memory in flight on CUDA, where the host runs ahead: what streams still use stays until work that follows is ordered.

The engine bounds it in bytes (``backend.streams``), by the second largest unit: what compute has used is freed, the
oldest first, until no more than that waits; and before gradients are reduced, earlier ones are freed until no more than
that is on its way. So at any moment there are, besides what the running operator holds,

    gathered     what operators before it have used, up to the bound
    transient    gradients of operators before it that are being reduced, up to the bound, or the last one's
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.footprint import Footprint
from lightning_osdp.planning.cost.moments import Flags, Floats, Held, Intervals, Ints, OperatorRuns


def stream_held(
    runs: OperatorRuns, own: Footprint[Floats], recomputed_blocks: Flags, wrapped: Flags, num_moments: int
) -> Iterator[Held]:
    """Yield what is in flight between operators.

    Args:
        runs: When operators run.
        own: Their footprints.
        recomputed_blocks: Whether each block is recomputed.
        wrapped: Whether an operator stands for several that share a unit.
        num_moments: Number of moments, the optimizer's step included.
    """
    end = num_moments - 1
    recomputed = runs.are_recomputed(recomputed_blocks)
    is_zdp, is_gathered = own.unsharded_while_running > 0, own.eval_unsharded > 0
    again = recomputed & is_zdp
    # A shared unit is gathered once for its recomputed forward and its backward.
    in_backward = (own.unsharded_in_backward > 0) & runs.has_backward
    passes = (
        (runs.forward, is_gathered, is_zdp),
        (runs.recompute, again, again & ~(wrapped & in_backward)),
        (runs.backward, in_backward & ~(again & wrapped), in_backward | (is_gathered & ~is_zdp & runs.has_backward)),
    )
    starts = np.sort(np.concatenate([intervals.start[begins] for intervals, begins, _ in passes]))
    frees = np.concatenate([np.flatnonzero(ends) for *_, ends in passes])
    begin, stop = (
        np.concatenate([getattr(intervals, name)[ends] for intervals, _, ends in passes]) for name in ("start", "stop")
    )
    order = np.argsort(stop, kind="stable")
    frees, begin, stop = frees[order], begin[order], stop[order]
    if len(frees):
        unit, total = own.eval_unsharded[frees], own.gathered_in_total[frees]
        bound = second_largest(own.eval_unsharded, own.gathered_in_total)
        waiting = _wait(unit, total, bound)
        yield from _held("gathered", begin, stop, waiting, end)
        following = np.append(starts, end)[np.searchsorted(starts, stop)]
        # The last operator of the forward may find its own parameters still there.
        is_first = (runs.backward.start[frees] == following) & (runs.backward.stop[frees] > stop) & (total == unit)
        index = np.flatnonzero(is_first & runs.has_backward[frees])
        yield Held("gathered", runs.backward.select(frees[index]), -np.minimum(unit[index], waiting.after[index]))
    reduced = np.flatnonzero((own.inflight_gradient > 0) & runs.has_backward)
    reduced = reduced[np.argsort(runs.backward.stop[reduced], kind="stable")]
    if len(reduced):
        unit, total = own.inflight_gradient[reduced], own.reduced_in_total[reduced]
        bound = second_largest(own.inflight_gradient, own.reduced_in_total)
        begin, stop = runs.backward.select(reduced)
        waiting = _wait(unit, total, bound)
        yield from _held("transient", begin, stop, waiting, end)
        # A gradient may be on its way whatever its size, if it is the only one.
        yield Held("transient", Intervals(stop, np.append(stop[1:], end)), np.maximum(0.0, unit - waiting.after))


def second_largest(units: Floats, totals: Floats) -> float:
    """Return the bytes of the second largest unit; an operator in slices has several of one size."""
    sizes = np.concatenate([units, np.where(totals >= 2 * units, units, 0.0), [0.0, 0.0]])
    return float(np.partition(sizes, -2)[-2])


class _Waiting(NamedTuple):
    """Bytes that wait to be freed, by the operators that leave them."""

    after: Floats
    """When the operator is over."""
    running: Floats
    """What its own earlier slices add while it runs."""


def _wait(unit: Floats, total: Floats, bound: float) -> _Waiting:
    is_large = unit > bound  # the largest unit: for it, all others are freed
    sums = np.cumsum(np.where(is_large, 0.0, total))
    sums -= np.maximum.accumulate(np.where(is_large, sums, 0.0))
    after = np.where(is_large, 0.0, np.minimum(bound, sums))
    before = np.append(0.0, after[:-1])
    running = np.where(is_large, 0.0, np.minimum(bound, np.maximum(before, sums - unit)) - before)
    return _Waiting(after, running)


def _held(category: str, begin: Ints, stop: Ints, waiting: _Waiting, end: int) -> Iterator[Held]:
    yield Held(category, Intervals(stop, np.full(len(stop), end)), np.diff(waiting.after, prepend=0.0))
    yield Held(category, Intervals(begin, stop), waiting.running)

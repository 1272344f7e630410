"""The fastest plans under the memory limit at every moment of the step, for models of few operators.

Operators of equal cost differ in when they run, so which of them shard decides the memory of moments that lie apart.
Here operators are decided one by one. A partial plan is a label (the word of the shortest-path problem with resources)
with its seconds and its bytes at every moment. It is dropped if the least memory of all other operators exceeds what is
available, or if no plan that begins like this can be faster than a known one by Lagrange's bound, whose prices of
memory, one per moment, come from subgradient steps (Held, Wolfe and Crowder, "Validation of subgradient optimization",
1974).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_osdp.planning.cost.moments import Flags, Floats, Ints
from lightning_osdp.planning.search.subproblem import OptionCosts

MAX_SUBGRADIENT_STEPS = 60
"""Subgradient steps: the bound hardly moves after that."""

MAX_LABEL_ENTRIES, MAX_LABELS = 10_000_000, 4096
"""Limits of the numbers computed (options of all labels at all moments), and of the labels that are followed."""

MIN_LABELS = 16
"""With fewer labels a search is not worth starting."""


@dataclass(frozen=True)
class LabelProblem:
    """The options of each operator, with their time and their bytes at every moment.

    Attributes:
        options: positions in the space of all operators' options, one operator after the other, (rows,).
        slices: the rows of each operator.
        time_s: seconds, (rows,).
        bytes_per_moment: bytes, (rows, moments).
        available_bytes: bytes that all operators may take together, (moments,).
        max_labels: limit of the labels that are followed.
        scope_of: the scope of each operator, -1 if it has none, (operators,).
        degrees: ranks over which each row cuts its operator, equal within a scope, (rows,).
    """

    options: Ints
    slices: tuple[slice, ...]
    time_s: Floats
    bytes_per_moment: Floats
    available_bytes: Floats
    max_labels: int
    scope_of: Ints
    degrees: Ints

    @classmethod
    def create(cls, costs: OptionCosts, recomputed_blocks: Flags) -> LabelProblem | None:
        """Return the problem of all operators; None if it has too many options or moments."""
        space, batch = costs.space, (costs.batch_size, costs.accumulation)
        ranges = [space.option_groups[group].options for group in space.group_of]
        sizes = [options.stop - options.start for options in ranges]
        other_bytes = space.timeline.unattributed_bytes(costs.batch_size, recomputed_blocks)
        max_labels = min(MAX_LABELS, MAX_LABEL_ENTRIES // max(1, sum(sizes) * len(other_bytes)))
        if max_labels < MIN_LABELS or not sizes:
            return None
        operators, stops = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes).tolist()
        options = np.concatenate([np.arange(options.start, options.stop) for options in ranges])
        return cls(
            options=options,
            slices=tuple(slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)),
            time_s=costs.times.total[space.recompute_flags(recomputed_blocks)[operators], options],
            bytes_per_moment=space.timeline.bytes_per_moment(
                operators, space.footprints[options], *batch, recomputed_blocks
            ),
            available_bytes=space.problem.memory_limit_bytes + 1.0 - other_bytes,  # a byte for rounding
            max_labels=max_labels,
            scope_of=space.scope_of,
            degrees=space.option_degrees[options],
        )


def enumerate_plans(problem: LabelProblem, upper_bound_s: float) -> Iterator[Ints]:
    """Yield plans faster than ``upper_bound_s``, the fastest first, as one option per operator.

    None is missed unless more than ``max_labels`` partial plans are worth following; those of the least bounds are
    then. Memory that operators do not take one by one is not counted (``Timeline.bytes_per_moment``), so some of the
    plans may not fit.
    """
    slowest_s = sum(float(problem.time_s[rows].max()) for rows in problem.slices)
    upper_bound_s = min(upper_bound_s, slowest_s + 1e-6)  # finite, as subgradient steps need it
    prices, bound_s = _lagrange_multipliers(problem, upper_bound_s)
    if bound_s >= upper_bound_s:
        return
    reduced_s = problem.time_s + problem.bytes_per_moment @ prices
    order = sorted(range(len(problem.slices)), key=lambda index: -float(np.ptp(reduced_s[problem.slices[index]])))
    slices = [problem.slices[index] for index in order]
    least_bytes = np.array([problem.bytes_per_moment[rows].min(axis=0) for rows in slices])
    least_s = np.array([reduced_s[rows].min() for rows in slices])
    later_bytes = least_bytes.sum(axis=0) - np.cumsum(least_bytes, axis=0)
    later_s = least_s.sum() - np.cumsum(least_s) - prices @ problem.available_bytes
    time_s, bytes_ = np.zeros(1), np.zeros((1, len(problem.available_bytes)))
    chosen = np.zeros((1, 0), dtype=np.int64)
    for depth, rows in enumerate(slices):
        next_bytes = (bytes_[:, None] + problem.bytes_per_moment[rows]).reshape(-1, bytes_.shape[1])
        next_s = (time_s[:, None] + problem.time_s[rows]).ravel()
        bounds = next_s + next_bytes @ prices + later_s[depth]
        fits = (next_bytes + later_bytes[depth] <= problem.available_bytes).all(axis=1)
        fits &= _agree_with_scope(problem, order[: depth + 1], chosen, rows)
        kept = np.flatnonzero((bounds < upper_bound_s) & fits)
        if len(kept) > problem.max_labels:
            kept = kept[np.argsort(bounds[kept], kind="stable")[: problem.max_labels]]
        label, choice = np.divmod(kept, rows.stop - rows.start)
        time_s, bytes_ = next_s[kept], next_bytes[kept]
        chosen = np.column_stack([chosen[label], choice + rows.start])
    fastest = np.argsort(time_s, kind="stable")
    fastest = fastest[time_s[fastest] < upper_bound_s]  # a bound below it does not mean that the plan is
    yield from problem.options[chosen[fastest][:, np.argsort(order)]]


def _agree_with_scope(problem: LabelProblem, order: list[int], chosen: Ints, rows: slice) -> Flags:
    """Return whether each label may be continued by each row, (labels x rows,): one degree in a scope.

    Args:
        problem: the problem.
        order: the operators that are decided in turn, the last one now.
        chosen: the rows of the others, (labels, operators).
        rows: the rows of the last one.
    """
    *earlier, operator = order
    scope = problem.scope_of[operator]
    partner = next((at for at, other in enumerate(earlier) if problem.scope_of[other] == scope), None)
    if scope < 0 or partner is None:
        return np.ones(len(chosen) * (rows.stop - rows.start), dtype=bool)
    return np.asarray(problem.degrees[chosen[:, partner]][:, None] == problem.degrees[rows]).ravel()


def _lagrange_multipliers(problem: LabelProblem, upper_bound_s: float) -> tuple[Floats, float]:
    """Return seconds per byte at each moment, and the bound of the step time that they give."""
    prices = best = np.zeros(len(problem.available_bytes))
    best_s = -np.inf
    for step in range(MAX_SUBGRADIENT_STEPS):
        reduced_s = problem.time_s + problem.bytes_per_moment @ prices
        cheapest = np.array([rows.start + int(reduced_s[rows].argmin()) for rows in problem.slices], dtype=np.int64)
        bound_s = float(reduced_s[cheapest].sum() - prices @ problem.available_bytes)
        if bound_s > best_s:
            best, best_s = prices, bound_s
        excess = problem.bytes_per_moment[cheapest].sum(axis=0) - problem.available_bytes
        excess[(excess < 0) & (prices == 0)] = 0.0
        length = float(excess @ excess)
        if not length or best_s >= upper_bound_s:
            break
        prices = np.maximum(0.0, prices + (upper_bound_s - bound_s) / (1 + step / 10) / length * excess)
    return best, best_s

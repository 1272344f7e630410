"""The best plan at one batch size.

Each is found by the exact search (``search.solve``) on the bytes that count at one moment of the step, the one where a
first plan has its peak. The timeline then gives the true peak; what it leaves unused is given back to the search, what
it exceeds is taken away, and where another moment turns out to be worse that one takes its place. Where operators are
few, all moments are then looked at together (``labels``). How many blocks of a kind are recomputed is enumerated, those
of the least lower bound first (``bounds``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_osdp.planning.bounds import Bounds, smallest_rows
from lightning_osdp.planning.choices import Choice, Mode
from lightning_osdp.planning.groups import Groups, RowCosts
from lightning_osdp.planning.joining import Joined, Units
from lightning_osdp.planning.labels import Rows, plans
from lightning_osdp.planning.remedies import nothing_fits
from lightning_osdp.planning.space import Problem, Space
from lightning_osdp.planning.timeline import Flags, Floats, Ints, Peak

REFINEMENTS = 12
"""Solutions at most, while budget and true peak are brought together."""

QUICK_REFINEMENTS = 3
"""The same for a first look at a batch size."""

FEW_OPERATORS, POLISHED_WAYS = 64, 4
"""Up to so many operators, the best plans of so many ways to recompute blocks are polished, else only the very best."""

PAIRED_ROWS = 256
"""Up to so many rows to exchange, pairs of them are looked at, too."""

MOST_WAYS = 24
"""Ways to recompute blocks that are tried at one batch size, of those that the bound does not rule out."""

POLISHES, POLISHED_OPERATORS = 32, 1024
"""Exchanges that are tried on the best plan of a batch size, to use what its true peak still leaves: so many, and so
many more over the number of operators. Where these are few, each one counts, and a try takes little."""

WORTH_TRYING = 1e-3
"""Relative: other ways to recompute blocks are not tried for less than this."""


@dataclass(frozen=True)
class Candidate:
    """The best plan found at one batch size."""

    batch_size: int
    accumulation: int
    choices: tuple[Choice, ...]
    recomputed: tuple[str, ...]
    """Names of the blocks that are."""
    compute_s: float
    communication_s: float
    peak: Peak
    ranks: int
    bound_s: float = 0.0
    """No plan at this batch size takes less, as far as is known."""
    units: Units = ()
    """Which operators share units; what is replicated shares none."""

    @property
    def step_time_s(self) -> float:
        """Of one optimizer step."""
        return self.compute_s + self.communication_s

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.global_batch_size / self.step_time_s


@dataclass(frozen=True)
class _Found:
    """A plan as rows of the space."""

    rows: Ints
    seconds: float
    peak: Peak


class Desk:
    """Finds candidates for one problem; what does not depend on the batch size is prepared once.

    Args:
        problem: what there is.
        units: which operators share units (``joining``); None if none do.

    Raises:
        ConfigurationError: a wish's pattern matches nothing.
    """

    def __init__(self, problem: Problem, units: Units | None = None) -> None:
        problem.wishes.check(problem.model)
        self.problem = problem
        self.units = units or ("",) * len(problem.model.operators)
        self.joined = Joined.of(problem.model, self.units)
        self.space = Space(replace(problem, model=self.joined.model, compute=self.joined.times(problem.compute)))
        self.bounds = Bounds(self.space)
        self._at: dict[tuple[int, int], AtBatchSize] = {}
        self.smallest = list(smallest_rows(self.space))

    def best(self, batch_size: int, accumulation: int = 1, *, quick: bool = False) -> Candidate:
        """The fastest plan whose true peak is within the limit.

        Args:
            batch_size: samples per device and micro-batch.
            accumulation: micro-batches per optimizer step.
            quick: whether a good plan is enough; its ``bound_s`` tells what the best may reach.

        Raises:
            InfeasibleError: none is.
        """
        found = self.under(np.inf, batch_size, accumulation, quick=quick)
        if found is None:
            raise nothing_fits(self.problem, self.least(batch_size, accumulation).peak, batch_size)
        return found

    def under(self, seconds: float, batch_size: int, accumulation: int = 1, *, quick: bool = False) -> Candidate | None:
        """``best`` where only a plan that takes less than ``seconds`` is of use: ways to recompute blocks that can't
        are left out. None where that leaves nothing."""
        at = self.at(batch_size, accumulation)
        bounds = at.lower_s
        found: dict[int, _Found] = {}
        for vector in self._ways(np.where(bounds < seconds, bounds, np.inf), found, quick):
            one = at.refined(vector, QUICK_REFINEMENTS if quick else REFINEMENTS)
            if one is not None:
                found[vector] = one
        if not found:
            return None
        ranking = sorted(found, key=lambda vector: found[vector].seconds)
        few = len(self.space.menu_of) <= FEW_OPERATORS
        for vector in ranking[: 0 if quick else POLISHED_WAYS if few else 1]:
            flags = self.space.recomputed(vector)
            known_s = min(seconds, *(one.seconds for one in found.values()))
            found[vector] = at.faster(at.polished(found[vector], flags), flags, known_s)
        vector = min(found, key=lambda vector: found[vector].seconds)
        return at.candidate(found[vector].rows, self.space.recomputed(vector), float(bounds.min()))

    def least(self, batch_size: int, accumulation: int = 1) -> Candidate:
        """The plan that takes least memory, whatever the limit."""
        at = self.at(batch_size, accumulation)
        vectors = self.space.vectors
        ways = {0, int(vectors.sum(axis=1).argmax())}
        plans = [(rows, self.space.recomputed(way)) for way in sorted(ways) for rows in self.smallest]
        found = [at.candidate(rows, flags) for rows, flags in plans]
        return min(found, key=lambda candidate: candidate.peak.most_bytes)

    def candidate(
        self, choices: tuple[Choice, ...], batch_size: int, accumulation: int = 1, recomputed: tuple[str, ...] = ()
    ) -> Candidate:
        """What a given plan costs, whether it fits or not."""
        names = [block.name for block in self.problem.model.blocks]
        flags = np.array([name in recomputed for name in names], dtype=bool)
        return self.at(batch_size, accumulation).candidate(self.rows_of(choices), flags)

    def bound_s(self, batch_size: int, accumulation: int = 1) -> float:
        """Seconds of an optimizer step that no plan undercuts, whether one fits or not."""
        return float(self.at(batch_size, accumulation).lower_s.min())

    def at(self, batch_size: int, accumulation: int = 1) -> AtBatchSize:
        """The desk at one batch size, made once."""
        key = (batch_size, accumulation)
        if key not in self._at:
            self._at[key] = AtBatchSize(self, *key)
        return self._at[key]

    def rows_of(self, choices: Sequence[Choice]) -> Ints:
        """One row for each operator of the space, from one choice for each of the model."""
        return self.space.rows_of(self.joined.gathered(choices))

    def _ways(self, bounds: Floats, found: dict[int, _Found], quick: bool) -> Iterator[int]:
        """Vectors to try: the one of least bound, then around the best one found, then any that may be better yet."""
        order = np.argsort(bounds, kind="stable").tolist()
        tried: set[int] = set()

        def worth(vector: int) -> bool:
            best = min((one.seconds for one in found.values()), default=np.inf)
            return vector not in tried and bounds[vector] < best * (1 - WORTH_TRYING)

        def attempt(vector: int) -> Iterator[int]:
            if worth(vector) and len(found) < MOST_WAYS:
                tried.add(vector)
                yield vector

        for vector in order:  # up to the first that fits; that one does not is soon seen
            yield from attempt(vector)
            if found:
                break
        step = max(1, int(self.space.vectors.max(initial=1)) // 2)
        while step and found and not quick:
            best = min(found, key=lambda vector: found[vector].seconds)
            for vector in self._around(best, step):
                yield from attempt(vector)
            step //= 2
        for vector in order if not quick else ():
            yield from attempt(vector)

    def _around(self, vector: int, step: int) -> Iterator[int]:
        """The vectors that differ in one kind by about ``step`` blocks."""
        vectors = self.space.vectors
        for kind in range(vectors.shape[1]):
            others = np.delete(vectors == vectors[vector], kind, axis=1).all(axis=1)
            for sign in (1, -1):
                wanted = vectors[vector, kind] + sign * step
                near = np.where(others, np.abs(vectors[:, kind] - wanted), np.inf)
                yield int(near.argmin())


class AtBatchSize(RowCosts):
    """The desk at one batch size."""

    def __init__(self, desk: Desk, batch_size: int, accumulation: int) -> None:
        super().__init__(desk.space, batch_size, accumulation)
        self.desk = desk

    @cached_property
    def lower_s(self) -> Floats:
        """See ``Bounds.lower_s``."""
        return self.desk.bounds.lower_s(self.times, self.batch_size, self.accumulation)

    def refined(self, vector: int, refinements: int) -> _Found | None:
        """The fastest plan that fits with these blocks recomputed; None if none does."""
        flags, limit = self.space.recomputed(vector), self.desk.problem.memory_limit_bytes
        smallest = [self.found(rows, flags) for rows in self.desk.smallest]
        best = min(smallest, key=lambda one: one.peak.most_bytes)
        if best.peak.most_bytes > limit:
            return None
        moments = {best.peak.moment}
        groups = Groups(self, flags, best.peak)
        near = limit // 2000
        low, high, budget = 0, 0, groups.budget(limit)
        for _ in range(refinements):
            solution = groups.solve(budget)
            if solution is None:  # less than the least, as these groups count; the last one exceeded the limit
                if high - budget <= near:
                    break
                low, budget = budget, (budget + high) // 2
                continue
            found = self.found(groups.rows(solution), flags)
            slack = limit - found.peak.most_bytes
            if slack >= 0:
                best = min(best, found, key=lambda one: one.seconds)
                if not solution.price_s_per_byte:
                    break
                low = budget
            elif found.peak.moment not in moments:
                moments.add(found.peak.moment)
                groups = Groups(self, flags, found.peak)
                low, high, budget = 0, 0, groups.budget(limit)
                continue
            else:
                high = budget
            proposal = budget + slack if slack >= 0 else budget + min(slack, -near)
            if low and high and not low < proposal < high:
                proposal = (low + high) // 2
            if slack >= 0 and proposal - budget <= near:  # a plan that exceeds the limit by little does not fit either
                break
            budget = proposal
        return best

    def polished(self, plan: _Found, flags: Flags) -> _Found:
        """The plan with a faster row for one operator, or another row for each of two, while the true peak allows it.

        Operators that are alike for the search differ in when they run: of those with the same row only the first and
        the last are tried.
        """
        if not len(plan.rows):
            return plan
        tries, again = POLISHES + POLISHED_OPERATORS // len(plan.rows), self.space.in_recomputed(flags)
        gaining = True
        while gaining:
            gaining = False
            for exchange in self._exchanges(plan.rows, again, tries):
                tries -= 1
                rows = plan.rows.copy()
                for operator, row in exchange:
                    rows[operator] = row
                other = self.found(rows, flags)
                if other.peak.most_bytes <= self.desk.problem.memory_limit_bytes:
                    plan, gaining = other, True
                    break
        return plan

    def faster(self, plan: _Found, flags: Flags, known_s: float) -> _Found:
        """The fastest of all plans if it is faster than this one and than what is known; where operators are few."""
        limit, again = self.desk.problem.memory_limit_bytes, self.space.in_recomputed(flags)
        rows = Rows.of(self.space, self.times, self.batch_size, self.accumulation, flags)
        if rows is None:
            return plan
        other_s = plan.seconds - float(self.times.total[again, plan.rows].sum())
        under_s = (min(plan.seconds, known_s) - other_s) * (1 - 1e-9)
        faster = (self.found(chosen, flags) for chosen in plans(rows, under_s))
        return next((one for one in faster if one.peak.most_bytes <= limit), plan)

    def _exchanges(self, rows: Ints, again: Ints, most: int) -> list[tuple[tuple[int, int], ...]]:
        """One or two of (operator, row), those that save most first."""
        _, first, inverse = np.unique(rows * 2 + again, return_index=True, return_inverse=True)
        last = np.zeros(len(first), dtype=np.int64)
        last[inverse] = np.arange(len(rows))
        saved_s: list[float] = []
        moves: list[tuple[int, int]] = []
        for operator in sorted({*first.tolist(), *last.tolist()}):
            menu, own = self.space.menus[self.space.menu_of[operator]].rows, rows[operator]
            saved = self.times.total[again[operator], own] - self.times.total[again[operator], menu]
            saved_s += saved.tolist()
            moves += [(operator, row) for row in range(menu.start, menu.stop)]
        single, operators = np.array(saved_s), np.array([operator for operator, _ in moves])
        few = slice(len(moves) if len(moves) <= PAIRED_ROWS else 0)
        pairs = np.where(operators[:, None] < operators[few], single[:, None] + single[few], 0.0)
        gains = np.concatenate([single, pairs.ravel()])
        best = np.argsort(-gains, kind="stable")[:most]
        width = pairs.shape[1]
        chosen = [divmod(at - len(moves), width) if at >= len(moves) else (at, at) for at in best.tolist()]
        worth = (gains[best] > 1e-12 * float(self.times.total.max())).tolist()
        return [tuple({moves[one], moves[two]}) for (one, two), gain in zip(chosen, worth, strict=True) if gain]

    def found(self, rows: Ints, flags: Flags) -> _Found:
        """A plan's time and true peak."""
        again = self.space.in_recomputed(flags)
        seconds = float(self.times.total[again, rows].sum())
        blocks = float(self.space.block_s(self.batch_size, self.accumulation)[flags].sum())
        peak = self.space.timeline.peak_of(self.space.footprints[rows], self.batch_size, self.accumulation, flags)
        return _Found(rows, seconds + blocks + self.space.outside_s(self.batch_size, self.accumulation), peak)

    def candidate(self, rows: Ints, flags: Flags, bound_s: float = 0.0) -> Candidate:
        """The plan with all that it costs."""
        problem, again = self.desk.problem, self.space.in_recomputed(flags)
        outside = self.space.outside_s(self.batch_size, self.accumulation)
        blocks = float(self.space.block_s(self.batch_size, self.accumulation)[flags].sum())
        choices = self.desk.joined.spread(self.space.choices_of(rows))
        return Candidate(
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            choices=choices,
            recomputed=tuple(block.name for block, flag in zip(problem.model.blocks, flags, strict=True) if flag),
            compute_s=outside + blocks + float(self.times.compute[again, rows].sum()),
            communication_s=float(self.times.communication[again, rows].sum()),
            peak=self.space.timeline.peak_of(self.space.footprints[rows], self.batch_size, self.accumulation, flags),
            ranks=problem.cluster.ranks,
            bound_s=bound_s,
            units=tuple(
                unit if any(mode != Mode.DP for mode in choice.slices) else ""
                for unit, choice in zip(self.desk.units, choices, strict=True)
            ),
        )

"""All that may be decided for a problem, as arrays: one row for each choice of each kind of operator.

Operators with the same menu are costed once. Rows do not depend on the batch size but for their compute time, so a
whole walk over the batch sizes shares them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.choices import Choice, Group, menu
from lightning_osdp.planning.cluster import Cluster, ComputeTimes, OperatorTime
from lightning_osdp.planning.cost import communication, compute_lines, engine, excess, footprint, hidden
from lightning_osdp.planning.heap import NO_HEAP, HeapUse
from lightning_osdp.planning.operators import NOTHING_BETWEEN, BetweenSteps, ModelDescription, Operator
from lightning_osdp.planning.timeline import COLUMN, Flags, Floats, Ints, Lines, Timeline
from lightning_osdp.planning.wishes import NO_WISHES, Wishes

PARTS = (communication, hidden, engine, excess)
"""What sharing adds to an operator's time beside its compute, and what compute may hide of it."""

AHEAD_SHARE = 1 / 24
"""Of the memory limit: units up to this size, a power of two, run ahead where any do. For larger ones the memory (one
is whole more, and one's gradients) is of more use elsewhere."""

WORTH_HIDING = 0.15
"""Share of a collective's time that has to go on beside compute for units to run ahead."""

MOST_VECTORS = 700
"""Ways to recompute blocks that are told apart. Where there are more (many kinds of blocks), the number of recomputed
blocks of a kind is counted in larger steps."""


@dataclass(frozen=True)
class Problem:
    """Everything that the schedule decides from.

    Attributes:
        memory_limit_bytes: per device; no plan's predicted peak exceeds it.
        overhead_bytes: of the process before the model.
        wishes: what is not left to the search.
        between: what is done between steps.
        kept_compute: ``compute`` where freed tensors stay in the heap; None if that is not known, or can't be.
        kept_batch_size: the largest at which they may; None if any. Of larger batches' tensors fewer find room.
        heap: what it takes if they do.
    """

    model: ModelDescription
    cluster: Cluster
    compute: ComputeTimes
    memory_limit_bytes: int
    overhead_bytes: int = 0
    wishes: Wishes = NO_WISHES
    between: BetweenSteps = NOTHING_BETWEEN
    kept_compute: ComputeTimes | None = None
    kept_batch_size: int | None = None
    heap: HeapUse = NO_HEAP

    @property
    def runs_ahead(self) -> bool:
        """Whether collectives of units go on beside compute."""
        return self.cluster.ahead_bytes > 0

    def running_ahead(self) -> Problem:
        """The same, but so, where there is a link that can be hidden."""
        cluster = self.cluster
        if not cluster.may_run_ahead or cluster.link.all_gather.hidden < WORTH_HIDING:
            return self
        most = AHEAD_SHARE * self.memory_limit_bytes
        ahead_bytes = 1 << max(20, int(most).bit_length() - 1)
        return replace(self, cluster=cluster.model_copy(update={"ahead_bytes": ahead_bytes}))

    @property
    def updates_in_backward(self) -> bool:
        """Whether sharded parameters are updated in the backward pass."""
        return self.model.optimizer_step.in_backward

    def updating_in_backward(self) -> Problem:
        """The same, but so."""
        step = self.model.optimizer_step.model_copy(update={"in_backward": True})
        return replace(self, model=self.model.model_copy(update={"optimizer_step": step}))

    @property
    def keeps_heap(self) -> bool:
        """Whether freed tensors stay in the heap."""
        return self.heap != NO_HEAP

    def keeping_heap(self) -> Problem:
        """The same, but so, where it is known what that brings."""
        if self.kept_compute is None:
            return self
        return replace(self, compute=self.kept_compute, heap=HeapUse.of(self.model))


@dataclass(frozen=True)
class Menu:
    """The rows of operators that cost the same.

    Attributes:
        choices: what each row stands for.
        rows: where they are among the rows of all menus.
    """

    choices: tuple[Choice, ...]
    rows: slice


class Times(NamedTuple):
    """Seconds in one optimizer step by row, (2, rows): in a block that is kept, and in one that is recomputed."""

    compute: Floats
    communication: Floats

    @property
    def total(self) -> Floats:
        """Both together."""
        return self.compute + self.communication


class Space:
    """What may be decided, prepared once for all batch sizes.

    Attributes:
        problem: what it was made from.
        timeline: of its model.
        menus: those that differ.
        menu_of: index of each operator's menu.
        footprints: of each row, (rows, fields of ``Footprint``).
        vectors: how many blocks of each kind are recomputed, (vectors, kinds): one row is one way to recompute.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.timeline = Timeline(problem.model, problem.cluster, problem.overhead_bytes, problem.between, problem.heap)
        self._set_menus()
        self._set_kinds()

    # -- menus ---------------------------------------------------------------------------------------------------------

    def _set_menus(self) -> None:
        problem = self.problem
        groups = problem.wishes.groups(problem.cluster)
        known: dict[tuple[object, ...], int] = {}
        self.menus: list[Menu] = []
        self.menu_of = np.zeros(len(problem.model.operators), dtype=np.int64)
        columns: list[tuple[object, ...]] = []
        for index, (operator, times) in enumerate(zip(problem.model.operators, problem.compute.operators, strict=True)):
            wished = problem.wishes.granularities(operator.name)
            key = (operator.signature, times, wished)
            if key not in known:
                known[key] = len(self.menus)
                choices = _choices(operator, times, wished, groups)
                self.menus.append(Menu(choices, slice(len(columns), len(columns) + len(choices))))
                columns += [self._row(operator, choice, times) for choice in choices]
            self.menu_of[index] = known[key]
        prints, plain, again, forward, backward = zip(*columns, strict=True) if columns else ((),) * 5
        self.footprints = np.array(prints, dtype=np.float64).reshape(len(columns), len(COLUMN))
        costs = np.array([plain, again], dtype=np.float64).reshape(2, len(columns), len(PARTS), 2)
        self._collectives, self._hidden, self._engine, self._excess = np.moveaxis(costs, 2, 0)
        self._forward, self._backward = Lines.of(forward), Lines.of(backward)
        self.first_row = np.array([found.rows.start for found in self.menus], dtype=np.int64)

    def _row(self, operator: Operator, choice: Choice, times: OperatorTime) -> tuple[object, ...]:
        """Footprint, ``PARTS`` x (once, each) kept and recomputed, compute forward and backward."""
        cluster, at_once = self.problem.cluster, self.problem.model.optimizer_step.in_backward
        plain, again = (
            [part(operator, choice, cluster, recomputed=recomputed) for part in PARTS] for recomputed in (False, True)
        )
        own = footprint(operator, choice, cluster, updated_in_backward=at_once)
        return own.grown(self.problem.heap.growth), plain, again, *compute_lines(times, choice)

    def times(self, batch_size: int, accumulation: int) -> Times:
        """What each row takes at one batch size (``cost.time_cost``, for all rows at once)."""
        forward = np.maximum(0.0, self._forward.at(batch_size))
        backward = np.maximum(0.0, self._backward.at(batch_size))
        backward_pass = np.outer([0.0, 1.0], forward) + backward
        passes = accumulation * (forward + backward_pass)
        together, own, more = (
            part[..., 0] + accumulation * part[..., 1] for part in (self._collectives, self._engine, self._excess)
        )
        hidden_once, hidden_each = self._hidden[..., 0], self._hidden[..., 1]
        beside = np.minimum(hidden_once, np.maximum(0.0, backward_pass)) + accumulation * hidden_each
        together = together - np.minimum(beside, np.maximum(0.0, passes))
        exposed = np.maximum(0.0, together - self.problem.cluster.overlap * passes)
        update = self.problem.compute.optimizer_s_per_byte * self.footprints[:, COLUMN["updated"]]
        return Times(np.maximum(0.0, passes + update + own), np.maximum(0.0, exposed + more))

    def rows_of(self, choices: Sequence[Choice]) -> Ints:
        """The row of each operator's choice.

        Raises:
            ValueError: an operator's menu does not have its choice.
        """
        found = [self.menus[menu].choices.index(choice) for menu, choice in zip(self.menu_of, choices, strict=True)]
        return np.asarray(np.array(found, dtype=np.int64) + self.first_row[self.menu_of], dtype=np.int64)

    def choices_of(self, rows: Ints) -> tuple[Choice, ...]:
        """What each operator's row stands for."""
        places = (rows - self.first_row[self.menu_of]).tolist()
        return tuple(self.menus[menu].choices[at] for menu, at in zip(self.menu_of.tolist(), places, strict=True))

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _set_kinds(self) -> None:
        """Blocks that differ in nothing but their name are one kind; of a kind the earliest are recomputed first.

        Theirs live longest, and are made again when those of the later ones are gone.
        """
        model, wishes = self.problem.model, self.problem.wishes
        kinds: dict[tuple[object, ...], list[int]] = {}
        self._always = np.zeros(len(model.blocks), dtype=bool)
        for index, block in enumerate(model.blocks):
            wish = False if block.pinned else wishes.recompute(block.name)
            self._always[index] = wish is True
            if wish is None:
                menus = tuple(self.menu_of[list(block.operators)].tolist())
                kinds.setdefault((block.kind, menus), []).append(index)
        self.kinds = list(kinds.values())
        self._order = np.full(len(model.blocks), math.inf)
        self._kind = np.zeros(len(model.blocks), dtype=np.int64)
        for kind, blocks in enumerate(self.kinds):
            self._order[blocks], self._kind[blocks] = range(len(blocks)), kind
        self.vectors = _vectors([len(blocks) for blocks in self.kinds])

    def recomputed(self, vector: int) -> Flags:
        """Which blocks are recomputed in one way of ``vectors``."""
        if not self.kinds:
            return self._always
        return np.asarray(self._always | (self._order < self.vectors[vector][self._kind]), dtype=bool)

    @cached_property
    def every_recomputed(self) -> Flags:
        """``recomputed`` of all vectors, (vectors, blocks)."""
        found = [self.recomputed(vector) for vector in range(len(self.vectors))]
        return np.array(found, dtype=bool).reshape(len(found), len(self.problem.model.blocks))

    def in_recomputed(self, flags: Flags) -> Ints:
        """1 for each operator that lies in a recomputed block, else 0."""
        return np.append(flags, False)[self.timeline.block_of].astype(np.int64)

    def block_s(self, batch_size: int, accumulation: int) -> Floats:
        """Seconds that recomputing each block adds, its operators apart."""
        lines = self.problem.compute.blocks
        seconds = [accumulation * line.at(batch_size) for line in lines]
        return np.array(seconds or [0.0] * len(self.problem.model.blocks), dtype=np.float64)

    def outside_s(self, batch_size: int, accumulation: int) -> float:
        """Seconds of the work that belongs to no operator, nothing recomputed."""
        return accumulation * self.problem.compute.outside.at(batch_size)


def _choices(
    operator: Operator,
    times: OperatorTime,
    wished: tuple[int, ...] | None,
    groups: Sequence[tuple[Group, bool]],
) -> tuple[Choice, ...]:
    dims = operator.split_dims[:1]
    return tuple(menu(operator, wished, [split.slices for split in times.splits if split.dim in dims], groups))


def _vectors(sizes: Sequence[int]) -> Ints:
    """All counts of 0 to each of ``sizes``, in steps that keep their number within ``MOST_VECTORS``."""
    if not sizes:
        return np.zeros((1, 0), dtype=np.int64)
    steps = list(sizes)
    while math.prod(step + 1 for step in steps) > MOST_VECTORS and max(steps) > 1:
        at = steps.index(max(steps))
        steps[at] = max(1, steps[at] // 2)
    while math.prod(step + 1 for step in steps) > MOST_VECTORS:  # so many kinds that only the first ones count
        steps[max(at for at, step in enumerate(steps) if step)] = 0
    counts = [
        np.unique(np.linspace(0, size, step + 1).round().astype(np.int64)) if step else np.zeros(1, dtype=np.int64)
        for size, step in zip(sizes, steps, strict=True)
    ]
    return np.array(list(itertools.product(*counts)), dtype=np.int64).reshape(-1, len(sizes))

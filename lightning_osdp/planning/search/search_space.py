"""All that may be decided for a problem, as arrays: one row for each choice of each kind of operator.

Operators with the same menu are costed once. Rows do not depend on the batch size but for their compute time, so a
whole walk over the batch sizes shares them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_osdp.planning.cost.cpu_effects import HeapModel
from lightning_osdp.planning.cost.footprint import COLUMN, footprint
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints, LineArray
from lightning_osdp.planning.cost.step_time import (
    calibration_time,
    communication_time,
    engine_time,
    forward_backward_time,
    overlapped_time,
)
from lightning_osdp.planning.spec.capabilities import EngineCapabilities
from lightning_osdp.planning.spec.choices import ShardingChoice, ShardingScope, enumerate_choices
from lightning_osdp.planning.spec.cluster import OperatorTime
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.problem import Problem

OVERHEAD_TERMS = (communication_time, overlapped_time, engine_time, calibration_time)
"""What sharing adds to an operator's time beside its compute, and what compute may hide of it."""

MAX_RECOMPUTE_COUNTS = 700
"""Ways to recompute blocks that are told apart. Where there are more (many kinds of blocks), the number of recomputed
blocks of a kind is counted in larger steps."""


@dataclass(frozen=True)
class OptionGroup:
    """The rows of operators that cost the same.

    Attributes:
        choices: what each row stands for.
        options: where they are among the rows of all menus.
    """

    choices: tuple[ShardingChoice, ...]
    options: slice


class OptionTimes(NamedTuple):
    """Seconds in one optimizer step by row, (2, rows): in a block that is kept, and in one that is recomputed."""

    compute: Floats
    communication: Floats

    @property
    def total(self) -> Floats:
        """Both together."""
        return self.compute + self.communication


class SearchSpace:
    """What may be decided, prepared once for all batch sizes.

    Attributes:
        problem: what it was made from.
        timeline: of its model.
        option_groups: those that differ.
        group_of: index of each operator's menu.
        footprints: of each row, (rows, fields of ``Footprint``).
        recompute_counts: how many blocks of each kind are recomputed, (vectors, kinds): one row is one way to recompute.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._heap = HeapModel.for_model(problem.model, retained=problem.has_retained_heap)
        self.timeline = Timeline(
            problem.model, problem.cluster, problem.overhead_bytes, problem.non_training, self._heap
        )
        self._build_option_groups()
        self._build_block_kinds()

    # -- menus ---------------------------------------------------------------------------------------------------------

    def _build_option_groups(self) -> None:
        problem = self.problem
        groups = problem.constraints.allowed_scopes(problem.cluster)
        known: dict[tuple[object, ...], int] = {}
        self.option_groups: list[OptionGroup] = []
        self.group_of = np.zeros(len(problem.model.operators), dtype=np.int64)
        columns: list[tuple[object, ...]] = []
        for index, (operator, times) in enumerate(zip(problem.model.operators, problem.compute.operators, strict=True)):
            wished = problem.constraints.allowed_slices(operator.name)
            key = (operator.signature, times, wished)
            if key not in known:
                known[key] = len(self.option_groups)
                choices = _available_choices(operator, times, wished, groups, problem.constraints.capabilities)
                self.option_groups.append(OptionGroup(choices, slice(len(columns), len(columns) + len(choices))))
                columns += [self._option_columns(operator, choice, times) for choice in choices]
            self.group_of[index] = known[key]
        prints, plain, again, forward, backward = zip(*columns, strict=True) if columns else ((),) * 5
        self.footprints = np.array(prints, dtype=np.float64).reshape(len(columns), len(COLUMN))
        costs = np.array([plain, again], dtype=np.float64).reshape(2, len(columns), len(OVERHEAD_TERMS), 2)
        self._communication, self._overlapped, self._engine, self._calibration = np.moveaxis(costs, 2, 0)
        self._forward, self._backward = LineArray.from_lines(forward), LineArray.from_lines(backward)
        self.first_option = np.array([found.options.start for found in self.option_groups], dtype=np.int64)

    def _option_columns(self, operator: Operator, choice: ShardingChoice, times: OperatorTime) -> tuple[object, ...]:
        """Footprint, ``OVERHEAD_TERMS`` x (once, each) kept and recomputed, compute forward and backward."""
        cluster, at_once = self.problem.cluster, self.problem.model.optimizer_step.in_backward
        plain, again = (
            [part(operator, choice, cluster, recomputed=recomputed) for part in OVERHEAD_TERMS]
            for recomputed in (False, True)
        )
        own = footprint(operator, choice, cluster, updated_in_backward=at_once)
        return self._heap.grow(own), plain, again, *forward_backward_time(times, choice)

    def option_times(self, batch_size: int, accumulation: int) -> OptionTimes:
        """What each row takes at one batch size (``step_time.time_cost``, for all rows at once)."""
        forward = np.maximum(0.0, self._forward.value_at(batch_size))
        backward = np.maximum(0.0, self._backward.value_at(batch_size))
        backward_pass = np.outer([0.0, 1.0], forward) + backward
        passes = accumulation * (forward + backward_pass)
        together, own, more = (
            part[..., 0] + accumulation * part[..., 1]
            for part in (self._communication, self._engine, self._calibration)
        )
        hidden_once, hidden_each = self._overlapped[..., 0], self._overlapped[..., 1]
        beside = np.minimum(hidden_once, np.maximum(0.0, backward_pass)) + accumulation * hidden_each
        together = together - np.minimum(beside, np.maximum(0.0, passes))
        exposed = np.maximum(0.0, together - self.problem.cluster.overlap * passes)
        update = self.problem.compute.optimizer_s_per_byte * self.footprints[:, COLUMN["local_trainable"]]
        return OptionTimes(np.maximum(0.0, passes + update + own), np.maximum(0.0, exposed + more))

    def options_of(self, choices: Sequence[ShardingChoice]) -> Ints:
        """The row of each operator's choice.

        Raises:
            ValueError: an operator's menu does not have its choice.
        """
        found = [
            self.option_groups[menu].choices.index(choice) for menu, choice in zip(self.group_of, choices, strict=True)
        ]
        return np.asarray(np.array(found, dtype=np.int64) + self.first_option[self.group_of], dtype=np.int64)

    def choices_of(self, options: Ints) -> tuple[ShardingChoice, ...]:
        """What each operator's row stands for."""
        places = (options - self.first_option[self.group_of]).tolist()
        return tuple(
            self.option_groups[menu].choices[at] for menu, at in zip(self.group_of.tolist(), places, strict=True)
        )

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _build_block_kinds(self) -> None:
        """Blocks that differ in nothing but their name are one kind; of a kind the earliest are recomputed first.

        Theirs live longest, and are made again when those of the later ones are gone.
        """
        model, wishes = self.problem.model, self.problem.constraints
        kinds: dict[tuple[object, ...], list[int]] = {}
        self._always_recomputed = np.zeros(len(model.blocks), dtype=bool)
        for index, block in enumerate(model.blocks):
            wish = False if block.recompute_blocker else wishes.forced_recompute(block.name)
            self._always_recomputed[index] = wish is True
            if wish is None:
                menus = tuple(self.group_of[list(block.operators)].tolist())
                kinds.setdefault((block.kind, menus), []).append(index)
        self.block_kinds = list(kinds.values())
        self._recompute_order = np.full(len(model.blocks), math.inf)
        self._block_kind = np.zeros(len(model.blocks), dtype=np.int64)
        for kind, blocks in enumerate(self.block_kinds):
            self._recompute_order[blocks], self._block_kind[blocks] = range(len(blocks)), kind
        self.recompute_counts = _enumerate_recompute_counts([len(blocks) for blocks in self.block_kinds])

    def recompute_mask(self, counts_index: int) -> Flags:
        """Which blocks are recomputed in one way of ``recompute_counts``."""
        if not self.block_kinds:
            return self._always_recomputed
        return np.asarray(
            self._always_recomputed | (self._recompute_order < self.recompute_counts[counts_index][self._block_kind]),
            dtype=bool,
        )

    @cached_property
    def recompute_masks(self) -> Flags:
        """``recomputed`` of all vectors, (vectors, blocks)."""
        found = [self.recompute_mask(vector) for vector in range(len(self.recompute_counts))]
        return np.array(found, dtype=bool).reshape(len(found), len(self.problem.model.blocks))

    def recompute_flags(self, recomputed_blocks: Flags) -> Ints:
        """1 for each operator that lies in a recomputed block, else 0."""
        return np.append(recomputed_blocks, False)[self.timeline.block_of].astype(np.int64)

    def recompute_s(self, batch_size: int, accumulation: int) -> Floats:
        """Seconds that recomputing each block adds, its operators apart."""
        lines = self.problem.compute.blocks
        seconds = [accumulation * line.value_at(batch_size) for line in lines]
        return np.array(seconds or [0.0] * len(self.problem.model.blocks), dtype=np.float64)

    def unattributed_s(self, batch_size: int, accumulation: int) -> float:
        """Seconds of the work that belongs to no operator, nothing recomputed."""
        return accumulation * self.problem.compute.unattributed.seconds_at(batch_size)


def _available_choices(
    operator: Operator,
    times: OperatorTime,
    allowed_slices: tuple[int, ...] | None,
    scopes: Sequence[tuple[ShardingScope, bool]],
    capabilities: EngineCapabilities,
) -> tuple[ShardingChoice, ...]:
    dims = operator.split_dims[:1]
    measured_slices = [split.slices for split in times.splits if split.dim in dims]
    return tuple(
        enumerate_choices(
            operator, allowed_slices, measured_slices, scopes, capabilities.modes, capabilities.mixed_slices
        )
    )


def _enumerate_recompute_counts(sizes: Sequence[int]) -> Ints:
    """All counts of 0 to each of ``sizes``, in steps that keep their number within ``MAX_RECOMPUTE_COUNTS``."""
    if not sizes:
        return np.zeros((1, 0), dtype=np.int64)
    steps = list(sizes)
    while math.prod(step + 1 for step in steps) > MAX_RECOMPUTE_COUNTS and max(steps) > 1:
        at = steps.index(max(steps))
        steps[at] = max(1, steps[at] // 2)
    while math.prod(step + 1 for step in steps) > MAX_RECOMPUTE_COUNTS:  # so many kinds that only the first ones count
        steps[max(at for at, step in enumerate(steps) if step)] = 0
    counts = [
        np.unique(np.linspace(0, size, step + 1).round().astype(np.int64)) if step else np.zeros(1, dtype=np.int64)
        for size, step in zip(sizes, steps, strict=True)
    ]
    return np.array(list(itertools.product(*counts)), dtype=np.int64).reshape(-1, len(sizes))

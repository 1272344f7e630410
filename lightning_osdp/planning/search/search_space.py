"""All options of a problem as arrays: one row per choice of each kind of operator, and the blocks to recompute.

Operators with the same options form a group, which is costed once. Options do not depend on the batch size except for
their compute time and activations, so a whole walk over the batch sizes shares them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_osdp.planning.cost.cpu_effects import HeapModel
from lightning_osdp.planning.cost.footprint import COLUMN, footprint
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.cost.moments import Flags, Floats, Ints, LineArray
from lightning_osdp.planning.cost.neighbours import Neighbours, neighbours_of, neighbours_of_slices, operator_key
from lightning_osdp.planning.cost.sharding_scopes import PREFETCHED_UNITS
from lightning_osdp.planning.cost.step_time import (
    Beside,
    OverlappedTime,
    Passes,
    calibration_time,
    communication_time,
    engine_time,
    exchange_time,
    forward_backward_time,
    hidden_s,
    host_time,
    overlapped_time,
)
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, enumerate_choices
from lightning_osdp.planning.spec.cluster import OperatorTime
from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.planning.spec.problem import Problem

OVERHEAD_TERMS = (communication_time, host_time, engine_time, calibration_time)
"""Parts of an operator's time other than its compute, which hides ``overlapped_time`` and ``host_time`` of them."""

MAX_RECOMPUTE_COUNTS = 700
"""Limit of the ways to recompute blocks that are distinguished. Above it (many kinds of blocks), the number of
recomputed blocks of a kind is counted in larger steps."""

BEFORE_BACKWARD, IN_BACKWARD, AFTER_BACKWARD = range(NUM_PHASES := 3)
"""Phase of an operator at a moment of the step, relative to its backward."""


@dataclass(frozen=True)
class OptionGroup:
    """The options that operators of equal cost share.

    Attributes:
        choices: the choice of each option.
        options: positions of these options among those of all groups.
    """

    choices: tuple[ShardingChoice, ...]
    options: slice


class OptionTimes(NamedTuple):
    """Seconds per optimizer step of each option, (2, options): in a block that is kept, and in a recomputed one."""

    compute: Floats
    communication: Floats

    @property
    def total(self) -> Floats:
        """Compute and exposed communication together."""
        return self.compute + self.communication


class _NeighbourRows(NamedTuple):
    """The neighbours of each option: one row for each of them, several for an option."""

    options: Ints
    share: Floats
    beside: tuple[LineArray, ...]
    """The fields of ``step_time.Beside``."""

    @classmethod
    def of_options(cls, neighbours: Sequence[Sequence[Neighbours]]) -> _NeighbourRows:
        """Return the rows, given the neighbours of each option."""
        rows = [(option, *each) for option, own in enumerate(neighbours) for each in own]
        options, share, *lines = zip(*rows, strict=True) if rows else ((),) * (1 + len(Neighbours._fields))
        arrays = tuple(LineArray.from_lines(each) for each in lines)
        return cls(np.array(options, dtype=np.int64), np.array(share, dtype=np.float64), arrays)


class SearchSpace:
    """All options of a problem, prepared once for all batch sizes.

    Args:
        problem: the problem.
        forced_modes: the only mode of each operator, None where any is possible. Not given: what the constraints say.

    Attributes:
        problem: the problem.
        timeline: the memory timeline of its model.
        option_groups: the distinct lists of options.
        group_of: index of each operator's option group, (operators,).
        first_option: position of each group's first option, (groups,).
        option_degrees: ranks over which each option cuts its operator, 1 if it does not, (options,).
        scopes: the operators of each scope, which are tensor parallel together.
        scope_of: index of each operator's scope, -1 if it has none, (operators,).
        footprints: memory of each option, (options, fields of ``Footprint``).
        block_kinds: indices of the blocks of each kind that the search may recompute.
        recompute_counts: recomputed blocks per kind, (ways to recompute, kinds).
    """

    def __init__(self, problem: Problem, forced_modes: Sequence[Mode | None] | None = None) -> None:
        self.problem = problem
        self._forced_modes = forced_modes or tuple(map(problem.constraints.forced_mode, problem.model.operators))
        self._heap = HeapModel.for_model(problem.model, retained=problem.has_retained_heap)
        self.timeline = Timeline(
            problem.model, problem.cluster, problem.overhead_bytes, problem.non_training, self._heap
        )
        self._build_option_groups()
        self._build_scopes()
        self._build_block_kinds()

    # -- options -------------------------------------------------------------------------------------------------------

    def _build_option_groups(self) -> None:
        problem, constraints = self.problem, self.problem.constraints
        scopes = constraints.allowed_scopes(problem.cluster)
        known: dict[tuple[object, ...], int] = {}
        self.option_groups: list[OptionGroup] = []
        self.group_of = np.zeros(len(problem.model.operators), dtype=np.int64)
        columns: list[tuple[Any, ...]] = []
        neighbours = neighbours_of(problem.model, problem.compute)
        for index, (operator, times) in enumerate(zip(problem.model.operators, problem.compute.operators, strict=True)):
            allowed_slices = constraints.allowed_slices(operator.name)
            forced_mode = self._forced_modes[index]
            key = (*operator_key(operator, times), allowed_slices, forced_mode)
            if key not in known:
                known[key] = len(self.option_groups)
                measured = [split.slices for split in times.splits if split.dim in operator.split_dims[:1]]
                modes, mixed_slices = constraints.capabilities.modes, constraints.capabilities.mixed_slices
                degrees = operator.tensor.degrees if operator.tensor is not None else ()
                limits = (allowed_slices, measured, scopes, modes, mixed_slices, forced_mode, degrees)
                choices = tuple(enumerate_choices(operator, *limits))
                self.option_groups.append(OptionGroup(choices, slice(len(columns), len(columns) + len(choices))))
                columns += [self._option_columns(operator, choice, times, neighbours[index]) for choice in choices]
            self.group_of[index] = known[key]
        footprints, plain, recomputed, overlapped, exchange, forward, backward, beside = (
            zip(*columns, strict=True) if columns else ((),) * 8
        )
        self.footprints = np.array(footprints, dtype=np.float64).reshape(len(columns), len(COLUMN))
        terms = np.array([plain, recomputed], dtype=np.float64).reshape(2, len(columns), len(OVERHEAD_TERMS), 2)
        self._communication, self._host, self._engine, self._calibration = np.moveaxis(terms, 2, 0)
        fields = np.array(overlapped, dtype=np.float64).reshape(len(columns), 2, len(OverlappedTime._fields))
        self._overlapped = np.moveaxis(fields, (2, 1), (0, 1))
        self._exchange = np.array(exchange, dtype=np.float64).reshape(len(columns), 2, 2).swapaxes(0, 1)
        self._forward, self._backward = LineArray.from_lines(forward), LineArray.from_lines(backward)
        self.first_option = np.array([group.options.start for group in self.option_groups], dtype=np.int64)
        self._neighbours = _NeighbourRows.of_options(beside)

    def _build_scopes(self) -> None:
        degrees = [choice.tensor_degree for group in self.option_groups for choice in group.choices]
        self.option_degrees = np.array(degrees, dtype=np.int64)
        self.scopes, self.scope_of = self.timeline.scopes, self.timeline.scope_of

    def _option_columns(
        self, operator: Operator, choice: ShardingChoice, times: OperatorTime, places: Sequence[Neighbours]
    ) -> tuple[Any, ...]:
        """Return the footprint, ``OVERHEAD_TERMS`` plain and recomputed, exchanges likewise, compute, neighbours."""
        cluster = self.problem.cluster
        plain, recomputed = (
            [term(operator, choice, cluster, recomputed=is_recomputed) for term in OVERHEAD_TERMS]
            for is_recomputed in (False, True)
        )
        memory = footprint(operator, choice, cluster, updated_in_backward=self.problem.model.optimizer_step.in_backward)
        exchanges = [
            exchange_time(operator, choice, cluster, recomputed=is_recomputed) for is_recomputed in (False, True)
        ]
        overlapped = [overlapped_time(operator, choice, cluster, recomputed=again) for again in (False, True)]
        own = forward_backward_time(times, choice)
        beside = neighbours_of_slices(places, own, len(choice.slices))
        return self._heap.grow(memory), plain, recomputed, overlapped, exchanges, *own, beside

    def option_times(self, batch_size: int, accumulation: int) -> OptionTimes:
        """Return the time of each option at one batch size (``step_time.time_cost``, for all options at once)."""
        forward = np.maximum(0.0, self._forward.value_at(batch_size))
        backward = np.maximum(0.0, self._backward.value_at(batch_size))
        again = np.outer([0.0, 1.0], forward)
        passes = accumulation * (forward + again + backward)
        communication, host, engine, calibration = (
            term[..., 0] + accumulation * term[..., 1]
            for term in (self._communication, self._host, self._engine, self._calibration)
        )
        exchange = accumulation * (self._exchange[..., 0] + batch_size * self._exchange[..., 1])
        hidden = self._hidden_s(Passes(forward, backward, again), batch_size, accumulation)
        fixed, fixed_backward = np.maximum(0.0, self._forward.fixed), np.maximum(0.0, self._backward.fixed)
        launched = accumulation * (fixed + np.outer([0.0, 1.0], fixed) + fixed_backward)
        exposed = np.maximum(0.0, communication - hidden)
        engine = engine - np.minimum(host, np.maximum(0.0, passes + exposed - launched))
        update = self.problem.compute.optimizer_s_per_byte * self.footprints[:, COLUMN["local_trainable"]]
        return OptionTimes(passes + update + engine, exposed + calibration + exchange)

    def _hidden_s(self, passes: Passes, batch_size: int, accumulation: int) -> Floats:
        """Return the seconds of communication that compute hides, (2, options): the mean over all neighbours."""
        rows = self._neighbours.options
        own = Passes(passes.forward_s[rows], passes.backward_s[rows], passes.again_s[:, rows])
        beside = Beside(*(np.maximum(0.0, line.value_at(batch_size)) for line in self._neighbours.beside))
        seconds = hidden_s(self._overlapped[..., rows], own, beside, accumulation, self.problem.cluster)
        num_options = len(self.footprints)
        return np.array([np.bincount(rows, self._neighbours.share * row, minlength=num_options) for row in seconds])

    def resident_bytes(self, batch_size: int, accumulation: int) -> Floats:
        """Return the bytes before, in and after an operator's backward, plain and recomputed, (phases, 2, options)."""
        column = {name: self.footprints[:, index] for name, index in COLUMN.items()}
        replicated, gradients = (
            column["replicated_gradients"],
            column["replicated_gradients"] + column["sharded_gradients"],
        )
        accumulated = gradients if accumulation > 1 else 0.0
        inputs = column["gathered_per_sample"] * batch_size
        before = column["states"] + column["unsharded_between_passes"] + accumulated
        backward = self._backward_bytes(batch_size) - column["transient"] + column["transient_in_first_quarter"]
        running = before + inputs + replicated + backward - column["casts_before_gradients"]
        after = column["states"] + gradients
        released = before - column["replicated_casts"]
        return np.array([[before + inputs, released], [running, running], [after, after]], dtype=np.float64)

    def between_passes_bytes(self, batch_size: int) -> Floats:
        """Return the bytes of each option that stay until its operator's own backward ends, (options,)."""
        inputs = self.footprints[:, COLUMN["gathered_per_sample"]] * batch_size
        return np.asarray(self.footprints[:, COLUMN["unsharded_between_passes"]] + inputs)

    def transient_bytes(self, batch_size: int, accumulation: int) -> Floats:
        """Return the bytes of each option that exist only while its operator runs, (options,)."""
        column = {name: self.footprints[:, index] for name, index in COLUMN.items()}
        # Approximation: what is prefetched for, or still in flight from, a neighbour is taken to be equally large.
        num_ahead = 1 if self.problem.cluster.has_streams else PREFETCHED_UNITS
        prefetched = np.maximum(0.0, num_ahead * column["prefetched_parameters"] - column["next_slices"])
        backward = self._backward_bytes(batch_size) + prefetched + column["inflight_gradient"]
        if accumulation > 1:  # the new gradient exists next to the accumulated one until it is added
            backward = backward + column["replicated_gradients"]
        forward = column["unsharded_while_running"] + prefetched + column["forward_per_sample"] * batch_size
        return np.asarray(np.maximum(forward, backward))

    def _backward_bytes(self, batch_size: int) -> Floats:
        fixed = self.footprints[:, COLUMN["unsharded_in_backward"]] + self.footprints[:, COLUMN["transient"]]
        return np.asarray(fixed + self.footprints[:, COLUMN["backward_per_sample"]] * batch_size)

    def options_of(self, choices: Sequence[ShardingChoice]) -> Ints:
        """Return the option of each operator's choice, (operators,).

        Raises:
            ValueError: an operator does not have its choice.
        """
        groups = (self.option_groups[group] for group in self.group_of)
        index = [group.choices.index(choice) for group, choice in zip(groups, choices, strict=True)]
        return np.asarray(np.array(index, dtype=np.int64) + self.first_option[self.group_of], dtype=np.int64)

    def choices_of(self, options: Ints) -> tuple[ShardingChoice, ...]:
        """Return the choice of each operator's option."""
        index = (options - self.first_option[self.group_of]).tolist()
        groups = (self.option_groups[group] for group in self.group_of)
        return tuple(group.choices[at] for group, at in zip(groups, index, strict=True))

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _build_block_kinds(self) -> None:
        """Group blocks that differ only in their name; the earliest blocks of a kind are recomputed first.

        Activations of early blocks live longest, and are computed again when those of later blocks are gone.
        """
        model, constraints = self.problem.model, self.problem.constraints
        kinds: dict[tuple[object, ...], list[int]] = {}
        self._always_recomputed = np.zeros(len(model.blocks), dtype=bool)
        for index, block in enumerate(model.blocks):
            forced = False if block.recompute_blocker else constraints.forced_recompute(block.name)
            self._always_recomputed[index] = forced is True
            if forced is None:
                groups = tuple(self.group_of[list(block.operators)].tolist())
                kinds.setdefault((block.kind, groups), []).append(index)
        self.block_kinds = list(kinds.values())
        self._recompute_order = np.full(len(model.blocks), math.inf)
        self._block_kind = np.zeros(len(model.blocks), dtype=np.int64)
        for kind, blocks in enumerate(self.block_kinds):
            self._recompute_order[blocks], self._block_kind[blocks] = range(len(blocks)), kind
        self.recompute_counts = _enumerate_recompute_counts([len(blocks) for blocks in self.block_kinds])

    def recompute_mask(self, counts_index: int) -> Flags:
        """Return whether each block is recomputed in one row of ``recompute_counts``, (blocks,)."""
        if not self.block_kinds:
            return self._always_recomputed
        is_chosen = self._recompute_order < self.recompute_counts[counts_index][self._block_kind]
        return np.asarray(self._always_recomputed | is_chosen, dtype=bool)

    @cached_property
    def recompute_masks(self) -> Flags:
        """Return whether each block is recomputed, (rows of ``recompute_counts``, blocks)."""
        masks = [self.recompute_mask(index) for index in range(len(self.recompute_counts))]
        return np.array(masks, dtype=bool).reshape(len(masks), len(self.problem.model.blocks))

    def recompute_flags(self, recomputed_blocks: Flags) -> Ints:
        """Return 1 for each operator in a recomputed block, else 0, (operators,)."""
        return np.append(recomputed_blocks, False)[self.timeline.block_of].astype(np.int64)

    def recompute_s(self, batch_size: int, accumulation: int) -> Floats:
        """Return the seconds that recomputing each block adds outside its operators, (blocks,)."""
        lines = self.problem.compute.blocks
        seconds = [accumulation * line.value_at(batch_size) for line in lines]
        return np.array(seconds or [0.0] * len(self.problem.model.blocks), dtype=np.float64)

    def unattributed_s(self, batch_size: int, accumulation: int) -> float:
        """Return the seconds of the work that belongs to no operator, nothing recomputed."""
        return accumulation * self.problem.compute.unattributed.seconds_at(batch_size)


def _enumerate_recompute_counts(sizes: Sequence[int]) -> Ints:
    """Return all counts from 0 to each of ``sizes``, in steps that keep their number within the limit."""
    if not sizes:
        return np.zeros((1, 0), dtype=np.int64)
    steps = list(sizes)
    while math.prod(step + 1 for step in steps) > MAX_RECOMPUTE_COUNTS and max(steps) > 1:
        at = steps.index(max(steps))
        steps[at] = max(1, steps[at] // 2)
    while (
        math.prod(step + 1 for step in steps) > MAX_RECOMPUTE_COUNTS
    ):  # too many kinds: only the first ones are recomputed
        steps[max(at for at, step in enumerate(steps) if step)] = 0
    counts = [
        np.unique(np.linspace(0, size, step + 1).round().astype(np.int64)) if step else np.zeros(1, dtype=np.int64)
        for size, step in zip(sizes, steps, strict=True)
    ]
    return np.array(list(itertools.product(*counts)), dtype=np.int64).reshape(-1, len(sizes))

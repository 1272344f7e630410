"""Memory along one training step, moment by moment: the peak, what makes it up, and where it is.

At each moment of the step the sum of

    states       parameters and optimizer states, whole (dp) or a part (zdp, zdp2), and buffers
    gradients    those that exist already: whole for dp, parts for sharded slices once they are reduced
    gathered     whole parameters of sharded slices that are there: of zdp the largest while the operator runs, of
                 zdp2 all from its forward to its backward; and the next one's, where units run ahead (``cost``)
    transient    the whole gradient of the sharded slice that runs backward, the copy that its reduction makes, the
                 gradient before it where that is still being reduced, the buckets of replicated gradients from when
                 they are full, the optimizer's temporaries
    activations  what was traced: tensors kept for backward and temporaries, at this batch size
    overhead     the process before the model
    heap         where freed tensors stay in the process's heap: what that takes beside those that are live

Gradients are freed after each optimizer step, so they are absent from the forward unless micro-batches accumulate.
Between steps there are the states alone. While a checkpoint is saved, tensors that are sharded become whole one after
the other, or all at once. Evaluation keeps no activations, and frees an operator's parameters after it ran: at the same
batch size it never takes more than the step's forward.

Transients occur at one moment each: the peak is a maximum over moments, not their sum.

A block that is recomputed keeps nothing from its forward to its backward but its input. Before its backward begins its
forward runs once more, with its own moments: operators are gathered again, and what its backward needs grows anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_osdp.planning.cost.cpu_effects import NO_RETENTION, HeapModel
from lightning_osdp.planning.cost.peak_text import explain_peak
from lightning_osdp.planning.cost.step_time import BUCKET_BYTES, Footprint, footprint
from lightning_osdp.planning.spec.choices import ShardingChoice
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import (
    NO_NON_TRAINING_WORK,
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    NonTrainingWork,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

COLUMN = {name: index for index, name in enumerate(Footprint._fields)}
"""Of a footprint in an array."""

NOT_RECOMPUTED = -1
"""``_Moments.recomputed_block`` of a moment that is not part of a block's second forward."""


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held, in bytes by category."""

    where: str
    """``forward of NAME``, ``backward of NAME``, ``optimizer step``."""
    states: float
    gradients: float
    gathered: float
    transient: float
    activations: float
    overhead: float
    heap: float = 0.0
    moment: int = 0
    """Its index into the moments of the timeline."""
    saving_bytes: int = 0
    """What is held between steps while a checkpoint is saved; 0 if none is."""
    evaluation_bytes: int = 0
    """The same in evaluation, if its batch size is known and not the step's."""

    @property
    def total_bytes(self) -> int:
        """Sum of all categories: the peak of the step."""
        held = (self.states, self.gradients, self.gathered, self.transient, self.activations)
        return round(sum(held) + self.overhead + self.heap)

    @property
    def max_bytes(self) -> int:
        """In steps and between them."""
        return max(self.total_bytes, self.saving_bytes, self.evaluation_bytes)


class LineArray(NamedTuple):
    """Many ``Line``s as arrays."""

    fixed: Floats
    per_sample: Floats

    def value_at(self, batch_size: int) -> Floats:
        """Their values; unlike ``Line.at``'s they may be negative."""
        return np.asarray(self.fixed + self.per_sample * batch_size, dtype=np.float64)

    def scale(self, factor: float) -> LineArray:
        """Each by so much."""
        return LineArray(self.fixed * factor, self.per_sample * factor)

    @classmethod
    def from_lines(cls, lines: Sequence[LinearInBatch]) -> LineArray:
        """From values."""
        return cls(
            np.array([line.fixed for line in lines], dtype=np.float64),
            np.array([line.per_sample for line in lines], dtype=np.float64),
        )


class Intervals(NamedTuple):
    """When operators (or blocks) run: first moment, and one past the last."""

    start: Ints
    stop: Ints

    def select(self, indices: Ints | slice) -> Intervals:
        """Those of some of them."""
        return Intervals(self.start[indices], self.stop[indices])


@dataclass(frozen=True)
class _Moments:
    """The moments of the model, and before the backward of each block those of its second forward.

    Attributes:
        source: index into the model's moments.
        recomputed_block: whose second forward it belongs to; NORMAL for all others.
        position: where each moment of the model is.
        recompute_start: where the second forward of each block begins; -1 for blocks that are never recomputed.
    """

    source: Ints
    recomputed_block: Ints
    position: Ints
    recompute_start: Ints

    @classmethod
    def for_model(cls, model: ModelProfile) -> _Moments:
        begins = {block.backward[0]: index for index, block in enumerate(model.blocks) if not block.recompute_blocker}
        source: list[int] = []
        owner: list[int] = []
        place: list[int] = []
        again = [-1] * len(model.blocks)
        for moment in range(len(model.moments)):
            if moment in begins:
                index = begins[moment]
                first, last = model.blocks[index].forward
                again[index] = len(source)
                source += range(first, last + 1)
                owner += [index] * (last + 1 - first)
            place.append(len(source))
            source.append(moment)
            owner.append(NOT_RECOMPUTED)
        return cls(*(np.array(column, dtype=np.int64) for column in (source, owner, place, again)))


class Timeline:
    """The moments of one model, prepared once, to be asked for many plans.

    Args:
        model: the traced model.
        cluster: number of ranks and what a reduction copies.
        overhead_bytes: the process before the model.
        between: what is done between steps. Nothing freed stays in the heap then.
        heap: what it takes in steps if freed tensors stay in it.
    """

    def __init__(
        self,
        model: ModelProfile,
        cluster: Cluster,
        overhead_bytes: int,
        non_training: NonTrainingWork = NO_NON_TRAINING_WORK,
        heap: HeapModel = NO_RETENTION,
    ) -> None:
        self._non_training = non_training
        self._evaluation_live_bytes = LineArray.from_lines([moment.live for moment in model.evaluation]).value_at(
            non_training.evaluation_batch_size
        )
        self._evaluation_operators = np.array([moment.operator for moment in model.evaluation], dtype=np.int64)
        self._model = model
        self._cluster = cluster
        self._overhead = float(overhead_bytes)
        self.heap_growth_factor, self.heap_headroom = 1.0 + heap.growth, heap.headroom
        self._moments = _Moments.for_model(model)
        self._build_operator_intervals()
        self._build_activations()
        self._footprint_cache: dict[tuple[object, ...], Footprint] = {}

    def peak(
        self, choices: Sequence[ShardingChoice], batch_size: int, accumulation: int = 1, recomputed: Iterable[str] = ()
    ) -> Peak:
        """The largest sum along the step, and what is held between steps.

        Args:
            choices: one for each operator of the model.
            batch_size: samples per micro-batch.
            accumulation: micro-batches per optimizer step.
            recomputed: names of the blocks that are.
        """
        return self.peak_of_footprints(
            self._footprints(choices), batch_size, accumulation, self._recompute_mask(recomputed)
        )

    def peak_of_footprints(
        self, footprints: Floats, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> Peak:
        """The same, with an array of footprints, (operators, fields), and a flag for each block."""
        curves = self._curves(footprints, batch_size, accumulation, recomputed_blocks)
        total = sum(curves.values())
        assert isinstance(total, np.ndarray)
        worst = int(np.argmax(total))
        parts = {name: float(curve[worst]) for name, curve in curves.items()}
        saving, evaluation = self._saving_bytes(footprints), self._evaluation_bytes(footprints)
        where = self._describe_moment(worst)
        return Peak(where=where, moment=worst, saving_bytes=saving, evaluation_bytes=evaluation, **parts)

    def bytes_per_moment(
        self, operators: Ints, footprints: Floats, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> Floats:
        """Bytes that each footprint adds at each moment, (footprints, moments), as far as they add up (``_held``).

        Args:
            operators: of each footprint, its operator's index.
            footprints: (footprints, fields).
            batch_size: samples per micro-batch.
            accumulation: micro-batches per optimizer step.
            recomputed_blocks: a flag for each block.
        """
        changes = np.zeros((len(operators), len(self._moments.source) + 2))
        every = np.arange(len(operators))
        for _, spans, amounts in self._additive_terms(
            operators, footprints, batch_size, accumulation, recomputed_blocks
        ):
            changes[every, spans.start] += amounts
            changes[every, spans.stop] -= amounts
        return np.asarray(np.cumsum(changes, axis=1)[:, :-1], dtype=np.float64)

    def unattributed_bytes(self, batch_size: int, recomputed_blocks: Flags) -> Floats:
        """Bytes at each moment that belong to no operator."""
        nothing = np.zeros((len(self._model.operators), len(COLUMN)))
        return np.asarray(sum(self._curves(nothing, batch_size, 1, recomputed_blocks).values()), dtype=np.float64)

    def explain(
        self, choices: Sequence[ShardingChoice], batch_size: int, accumulation: int = 1, recomputed: Iterable[str] = ()
    ) -> str:
        """What makes up the peak, and at which operator and phase it occurs, in words."""
        return explain_peak(self.peak(choices, batch_size, accumulation, recomputed))

    def curves(
        self, choices: Sequence[ShardingChoice], batch_size: int, accumulation: int = 1, recomputed: Iterable[str] = ()
    ) -> dict[str, Floats]:
        """Bytes by category at each moment, the optimizer's step as one more moment at the end.

        Second forwards are there for the blocks that are recomputed: see ``phases``.
        """
        flags = self._recompute_mask(recomputed)
        curves = self._curves(self._footprints(choices), batch_size, accumulation, flags)
        shown = np.append(self._visible_moments(flags), True)
        return {name: curve[shown] for name, curve in curves.items()}

    def phases(self, recomputed: Iterable[str] = ()) -> list[str]:
        """``forward`` or ``mark_backward`` (``recompute`` in it) for each moment of ``curves`` but the optimizer's step."""
        shown = self._visible_moments(self._recompute_mask(recomputed))
        return [
            "recompute" if block != NOT_RECOMPUTED else self._model.moments[source].phase
            for source, block in zip(self._moments.source[shown], self._moments.recomputed_block[shown], strict=True)
        ]

    # -- what was prepared ---------------------------------------------------------------------------------------------

    def _build_operator_intervals(self) -> None:
        """When each operator runs. One never traced counts as there throughout; one without a gradient as kept."""
        where: dict[tuple[int, str], list[int]] = {}
        for index, moment in enumerate(self._model.moments):
            where.setdefault((moment.operator, moment.phase), []).append(index)
        last, count = len(self._model.moments) - 1, len(self._model.operators)
        forward = [where.get((operator, "forward"), [0, last]) for operator in range(count)]
        backward = [where.get((operator, "backward")) for operator in range(count)]
        self.forward = self._to_intervals([(found[0], found[-1]) for found in forward])
        self.backward = self._to_intervals([(found[0], found[-1]) if found else (last, last) for found in backward])
        self._tied = np.array([operator.tied for operator in self._model.operators], dtype=bool)
        self._wrapped = np.array([operator.num_wrapped > 1 for operator in self._model.operators], dtype=bool)
        self._has_backward = np.array([found is not None for found in backward], dtype=bool)
        self.block_of = np.full(count, NOT_RECOMPUTED, dtype=np.int64)
        for index, block in enumerate(self._model.blocks):
            self.block_of[list(block.operators)] = index
        inside = np.append(self._moments.recompute_start, NOT_RECOMPUTED)[self.block_of] != NOT_RECOMPUTED
        starts = np.array([block.forward[0] for block in self._model.blocks] or [0], dtype=np.int64)
        offset = np.array([found[0] for found in forward], dtype=np.int64) - starts[self.block_of]
        length = self.forward.stop - self.forward.start
        again = np.append(self._moments.recompute_start, 0)[self.block_of] + offset
        self._recompute_intervals = Intervals(np.where(inside, again, 0), np.where(inside, again + length, 0))

    def _to_intervals(self, ranges: Sequence[tuple[int, int]]) -> Intervals:
        if not len(self._moments.position):
            return Intervals(np.zeros(len(ranges), dtype=np.int64), np.zeros(len(ranges), dtype=np.int64))
        edges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return Intervals(self._moments.position[edges[:, 0]], self._moments.position[edges[:, 1]] + 1)

    def _build_activations(self) -> None:
        """What is alive, as lines over the batch size, if no block is recomputed and if the moment's own is."""
        moments, blocks = self._moments, self._model.blocks
        live = LineArray.from_lines([moment.live for moment in self._model.moments]).scale(self.heap_growth_factor)
        begins, ends, self.recompute_saves = (
            LineArray.from_lines([getattr(block, name) for block in blocks]).scale(self.heap_growth_factor)
            for name in ("live_before_forward", "live_before_backward", "recompute_saves")
        )
        self.released_intervals = Intervals(  # from the end of the first forward to the beginning of the second
            np.array([moments.position[block.forward[1]] + 1 for block in blocks], dtype=np.int64),
            moments.recompute_start,
        )
        second = moments.recomputed_block != NOT_RECOMPUTED
        owner, source = moments.recomputed_block[second], moments.source[second]
        plain, again = [], []
        for field in range(2):
            usual = live[field][moments.source]
            usual[second] = ends[field][owner]
            plain.append(usual)
            redone = (
                ends[field][owner] - self.recompute_saves[field][owner] + live[field][source] - begins[field][owner]
            )
            again.append(redone)
        self.live, self._recomputed_live = LineArray(*plain), LineArray(*again)
        self._recompute_moments = np.flatnonzero(second)

    def _footprints(self, choices: Sequence[ShardingChoice]) -> Floats:
        rows = []
        for operator, choice in zip(self._model.operators, choices, strict=True):
            key = (operator.signature, choice)
            if key not in self._footprint_cache:
                at_once = self._model.optimizer_step.in_backward
                own = footprint(operator, choice, self._cluster, updated_in_backward=at_once)
                self._footprint_cache[key] = own.with_heap_growth(self.heap_growth_factor - 1)
            rows.append(self._footprint_cache[key])
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(COLUMN))

    def _recompute_mask(self, recomputed: Iterable[str]) -> Flags:
        names = set(recomputed)
        return np.array([block.name in names for block in self._model.blocks], dtype=bool)

    def _visible_moments(self, recomputed_blocks: Flags) -> Flags:
        return np.append(recomputed_blocks, True)[self._moments.recomputed_block]

    # -- one plan ------------------------------------------------------------------------------------------------------

    def _saving_bytes(self, footprints: Floats) -> int:
        if self._non_training.checkpoint_memory == "nothing":
            return 0
        largest, every = (
            footprints[:, COLUMN["checkpoint_tensor"]].max(initial=0.0),
            footprints[:, COLUMN["unsharded_state"]].sum(),
        )
        return round(
            self._idle_bytes(footprints)
            + float(largest if self._non_training.checkpoint_memory == "streamed" else every)
        )

    def _evaluation_bytes(self, footprints: Floats) -> int:
        batch_size = self._non_training.evaluation_batch_size
        if not batch_size or not len(self._evaluation_operators):
            return 0
        alone = footprints[:, COLUMN["eval_unsharded"]]
        throughout = float(alone[self._tied].sum())
        own = alone * ~self._tied + footprints[:, COLUMN["forward_per_sample"]] / self.heap_growth_factor * batch_size
        running = np.append(own, 0.0)[self._evaluation_operators]  # OUTSIDE, the last, is no operator
        return round(self._idle_bytes(footprints) + throughout + float((self._evaluation_live_bytes + running).max()))

    def _idle_bytes(self, footprints: Floats) -> float:
        """What is held between steps whatever is done."""
        return float(self._overhead + self._model.buffer_bytes + footprints[:, COLUMN["states"]].sum())

    def _curves(
        self, footprints: Floats, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> dict[str, Floats]:
        count = len(self._moments.source) + 1
        changes = {name: np.zeros(count + 1) for name in ("states", "gradients", "gathered", "transient")}
        for name, spans, amounts in self._additive_terms(
            slice(None), footprints, batch_size, accumulation, recomputed_blocks
        ):
            changes[name] += _interval_changes(spans, amounts, count)
        found = {name: _cumulative_sums(each) for name, each in changes.items()}
        ends = [float(footprints[:, COLUMN["slice_gradient_copy"]].max(initial=0.0)), 0.0]
        if self._model.optimizer_step.temporaries_of == "largest":
            largest = float(footprints[:, COLUMN["largest_local_trainable"]].max(initial=0.0))
            ends[1] = self._model.optimizer_step.temporary_factor * largest
        found["transient"][-2:] += np.array(ends)[-count:]
        found["transient"] += self._filled_buckets(footprints[:, COLUMN["bucketed"]], count)
        found["transient"] += self._all_reduce_buffers(footprints[:, COLUMN["replicated_gradients"]], count)
        if self._cluster.prefetch_max_bytes:
            found["gathered"] += self._prefetched(footprints, recomputed_blocks, count)
            found["transient"] += self._inflight_reductions(footprints, count)
        found["states"] += self._model.buffer_bytes
        found["activations"] = np.append(self._activations(batch_size, recomputed_blocks), 0.0)
        found["overhead"] = np.full(count, self._overhead)
        freed = ("gradients", "gathered", "transient", "activations")  # with what they take more in a heap
        larger = (1 - 1 / self.heap_growth_factor) * sum(found[name] for name in freed)
        found["heap"] = np.asarray(larger + self.heap_headroom.value_at(batch_size))
        return found | {name: found[name] / self.heap_growth_factor for name in freed}

    def _prefetched(self, footprints: Floats, recomputed_blocks: Flags, count: int) -> Floats:
        """Parameters of the unit that is gathered next, from when the unit before is: in each of both passes."""
        column = {name: footprints[:, index] for name, index in COLUMN.items()}
        sharded, freed = column["eval_unsharded"] > 0, column["unsharded_while_running"] > 0
        again = np.append(recomputed_blocks, False)[self.block_of] & (self._recompute_intervals.stop > 0)
        # what shares a unit is gathered once for its second forward and its backward
        backward = freed & self._has_backward & ~(again & self._wrapped)
        total = np.zeros(count)
        for passes in (
            ((self.forward, sharded),),
            ((self._recompute_intervals, freed & again), (self.backward, backward)),
        ):
            starts = np.concatenate([spans.start[which] for spans, which in passes])
            early = np.concatenate([column["prefetched_parameters"][which] for _, which in passes])
            order = np.argsort(starts, kind="stable")
            starts, early = starts[order], early[order]
            total += _cumulative_sums(_interval_changes(Intervals(starts[:-1], starts[1:]), early[1:], count))
        return total

    def _inflight_reductions(self, footprints: Floats, count: int) -> Floats:
        """Gradients that are being reduced while the next unit runs backward."""
        pending = footprints[:, COLUMN["inflight_gradient"]]
        which = np.flatnonzero((footprints[:, COLUMN["eval_unsharded"]] > 0) & self._has_backward)
        stops, pending = self.backward.stop[which], pending[which]
        order = np.argsort(stops, kind="stable")
        stops, pending = stops[order], pending[order]
        return _cumulative_sums(_interval_changes(Intervals(stops[:-1], stops[1:]), pending[:-1], count))

    def _filled_buckets(self, bucketed: Floats, count: int) -> Floats:
        """Buckets that are full before the backward ends: gradients are copied into them then, and both stay.

        At the end of the backward all are, which ``_held`` knows.
        """
        total = np.zeros(count)
        bucket = BUCKET_BYTES * self.heap_growth_factor
        if bucketed.sum() < bucket:
            return total
        total[:] = np.cumsum(np.bincount(self.backward.stop, bucketed, count)[:count])
        full = np.floor(total / bucket) * bucket
        full[-2:] = 0.0
        return np.asarray(full, dtype=np.float64)

    def _all_reduce_buffers(self, gradients: Floats, count: int) -> Floats:
        """What averaging replicated gradients takes beside them: from the first ones to the end of the backward."""
        begun = np.cumsum(np.bincount(self.backward.stop, gradients, count)[:count])
        begun[-2:] = [begun[-1], 0.0][-count:]  # the optimizer's step is the last moment
        most = self._cluster.all_reduce_buffer_bytes * self.heap_growth_factor
        return np.asarray(np.minimum(begun / self._cluster.ranks, most))

    def _additive_terms(
        self, operators: Ints | slice, footprints: Floats, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> Iterator[tuple[str, Intervals, Floats]]:
        """What is there of footprints of these operators: category, from when to when, and bytes of each.

        All but what operators do not add one by one: buckets that are full, what runs ahead (which other operators'
        moments does it fall into?), and what only the largest adds (a copy of a split operator's gradients, some
        optimizers' temporaries).
        """
        column = {name: footprints[:, index] for name, index in COLUMN.items()}
        forward, again, backward = (
            spans.select(operators) for spans in (self.forward, self._recompute_intervals, self.backward)
        )
        runs_backward = np.where(self._has_backward[operators], 1.0, 0.0)
        redone = np.append(recomputed_blocks, False)[self.block_of[operators]].astype(np.float64)
        last = len(self._moments.source)
        first, end = np.zeros(len(footprints), dtype=np.int64), np.full(len(footprints), last + 1)

        yield "states", Intervals(first, end), column["states"]
        yield "gathered", Intervals(forward.start, backward.stop), column["unsharded_between_passes"]
        own = column["forward_per_sample"] * batch_size
        for spans, share in ((forward, 1.0), (again, redone)):
            yield "gathered", spans, column["unsharded_while_running"] * share
            yield "transient", spans, own * share
        yield "gathered", backward, column["unsharded_while_running"] * runs_backward
        own = column["transient"] + column["backward_per_sample"] * batch_size
        yield "transient", backward, own * runs_backward
        whole, pieces = column["replicated_gradients"], column["sharded_gradients"]
        if accumulation > 1:  # the new gradient stands beside the accumulated one until it is added
            yield "gradients", Intervals(first, end), whole + pieces
            yield "transient", backward, whole
        else:
            yield "gradients", Intervals(backward.start, end), whole
            yield "gradients", Intervals(backward.stop, end), pieces
        if last:
            yield "transient", Intervals(first + last - 1, first + last), column["bucketed"]
        if self._model.optimizer_step.temporaries_of != "largest":
            updated = self._model.optimizer_step.temporary_factor * column["local_trainable"] * self.heap_growth_factor
            yield "transient", Intervals(first + last, end), updated

    def _activations(self, batch_size: int, recomputed_blocks: Flags) -> Floats:
        live = self.live.value_at(batch_size)
        if recomputed_blocks.any():
            owner = self._moments.recomputed_block[self._recompute_moments]
            live[self._recompute_moments] = np.where(
                recomputed_blocks[owner], self._recomputed_live.value_at(batch_size), live[self._recompute_moments]
            )
            freed = np.maximum(0.0, self.recompute_saves.value_at(batch_size)[recomputed_blocks])
            live -= _cumulative_sums(
                _interval_changes(self.released_intervals.select(np.flatnonzero(recomputed_blocks)), freed, len(live))
            )
        return np.maximum(0.0, live)

    def _describe_moment(self, index: int) -> str:
        if index == len(self._moments.source):
            return "optimizer step"
        source, again = int(self._moments.source[index]), self._moments.recomputed_block[index] != NOT_RECOMPUTED
        moment = self._model.moments[source]
        phase = "recomputation" if again else moment.phase
        if moment.operator == UNATTRIBUTED:
            before = [m.operator for m in self._model.moments[:source] if m.operator != UNATTRIBUTED]
            near = self._model.operators[before[-1]].name if before else "the start"
            return f"{phase} after {near or 'the whole model'}"
        return f"{phase} of {self._model.operators[moment.operator].name or 'the whole model'}"


def _interval_changes(intervals: Intervals, amounts: Floats, count: int) -> Floats:
    """Of amounts that are there from one moment to another: what is more at each of ``world_size`` moments and the end."""
    more, less = (np.bincount(at, amounts, count + 1) for at in (intervals.start, intervals.stop))
    return np.asarray(more - less, dtype=np.float64)


def _cumulative_sums(changes: Floats) -> Floats:
    """What is there at each moment."""
    return np.asarray(np.cumsum(changes)[:-1], dtype=np.float64)

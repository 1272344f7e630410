"""Memory along one training step, moment by moment: the peak, its parts, and where it is.

At each moment of the step, the memory is the sum of

    states       parameters and optimizer states, unsharded (dp) or a part (zdp, zdp2), and buffers
    gradients    those that exist already: unsharded for dp, a part for sharded slices once they are reduced
    gathered     unsharded parameters of sharded slices: for zdp the largest while the operator runs, for zdp2 all from
                 its forward to its backward; and the next unit's if units are prefetched, or what streams still use
                 (``stream_memory``)
    transient    the unsharded gradient of the sharded slice that runs backward, buffers of its reduction, the gradient
                 before it while that is still being reduced, the bucket into which replicated gradients are packed,
                 the optimizer's temporaries
    activations  as traced: tensors kept for backward and temporaries, at this batch size; and the inputs that tensor
                 parallel operators have gathered
    overhead     the process before the model
    heap         what a heap that retains freed tensors takes in addition to the live ones

Gradients are freed after each optimizer step, so they are absent from the forward unless micro-batches accumulate.
Between steps there are the states alone. While a checkpoint is saved, sharded tensors are gathered one by one, or all
at once. Evaluation keeps no activations and frees an operator's parameters after it ran, so at the same batch size it
never exceeds the step's forward.

A block that is recomputed keeps only its input from forward to backward. Before its backward its forward runs once
more, with its own moments: operators are gathered again, and what its backward needs grows anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_osdp.planning.cost.cpu_effects import (
    AMPLE_HEAP_GROWTH,
    HEAP_GROWTH,
    HEAP_LIMIT_MARGIN,
    NO_RETENTION,
    HeapModel,
    prefetch_held,
)
from lightning_osdp.planning.cost.footprint import COLUMN, Footprint, as_rows, footprint
from lightning_osdp.planning.cost.moments import (
    NOT_RECOMPUTED,
    Flags,
    Floats,
    Held,
    Intervals,
    Ints,
    LineArray,
    OperatorRuns,
    StepMoments,
)
from lightning_osdp.planning.cost.stream_memory import second_largest, stream_held
from lightning_osdp.planning.spec.choices import ShardingChoice
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, UNATTRIBUTED, ModelProfile, NonTrainingWork


@dataclass(frozen=True)
class Peak:
    """The moment with the largest memory, in bytes by category."""

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
    """Index into the moments of the timeline."""
    saving_bytes: int = 0
    """Memory while a checkpoint is saved or weights are averaged; 0 if nothing is gathered for that."""
    evaluation_bytes: int = 0
    """Memory in evaluation, if its batch size is known and not the step's, or if tensor parallel operators are gathered
    for it; 0 if the step decides."""

    @property
    def freed_bytes(self) -> float:
        """Return the bytes that are freed within a step."""
        return self.gradients + self.gathered + self.transient + self.activations

    @property
    def total_bytes(self) -> int:
        """Sum of all categories: the peak of the step."""
        return round(self.states + self.freed_bytes + self.overhead + self.heap)

    @property
    def max_bytes(self) -> int:
        """Largest memory in steps and between them."""
        return max(self.total_bytes, self.saving_bytes, self.evaluation_bytes)

    def with_heap_within(self, limit_bytes: int) -> Peak:
        """Return the peak with a retained heap as large as is useful; ``HEAP_LIMIT_MARGIN`` of the limit stays free.

        Without a retained heap, or if it is above the limit, the peak stays as it is.
        """
        if not self.heap or self.total_bytes > limit_bytes:
            return self
        useful = self.heap + (AMPLE_HEAP_GROWTH - HEAP_GROWTH) * self.freed_bytes
        room = (1 - HEAP_LIMIT_MARGIN) * limit_bytes - (self.total_bytes - self.heap)
        return replace(self, heap=max(0.0, min(useful, room)))


class Timeline:
    """The moments of one model, prepared once for the footprints of many plans.

    Attributes:
        backward: When each operator runs backward and has gradients.
        block_of: Index of each operator's block.
        scopes: The operators of each scope, which are tensor parallel together.
        scope_of: Index of each operator's scope, -1 if it has none, (operators,).
        live: Live bytes at each moment, if no block is recomputed.
        recompute_saves: Bytes that recomputing each block frees during its interval of ``released_intervals``.
        heap_growth_factor: Factor on everything that is freed within a step.
        heap_headroom: Bytes that stay free in the heap.
    """

    def __init__(
        self,
        model: ModelProfile,
        cluster: Cluster,
        overhead_bytes: int,
        non_training: NonTrainingWork = NO_NON_TRAINING_WORK,
        heap: HeapModel = NO_RETENTION,
    ) -> None:
        self._model, self._cluster, self._non_training, self._heap = model, cluster, non_training, heap
        self._overhead = float(overhead_bytes)
        self.heap_growth_factor, self.heap_headroom = 1.0 + heap.growth, heap.headroom
        self._moments = StepMoments.from_model(model)
        self._num_moments = len(self._moments.source) + 1  # the optimizer's step is the last
        self._runs = OperatorRuns.from_model(model, self._moments)
        self.backward, self.block_of = self._runs.with_gradients, self._runs.block
        self._tied = np.array([operator.tied for operator in model.operators], dtype=bool)
        self._wrapped = np.array([operator.num_wrapped > 1 for operator in model.operators], dtype=bool)
        self.scopes = _find_scopes(model)
        self.scope_of = np.full(len(model.operators), -1, dtype=np.int64)
        for index, scope in enumerate(self.scopes):
            self.scope_of[scope] = index
        self._prepare_activations()
        self._evaluation_operators = np.array([moment.operator for moment in model.evaluation], dtype=np.int64)
        evaluation_live = LineArray.from_lines([moment.live for moment in model.evaluation])
        self._evaluation_live_bytes = evaluation_live.value_at(non_training.evaluation_batch_size)
        self._footprint_cache: dict[tuple[object, ...], Footprint[float]] = {}

    def _prepare_activations(self) -> None:
        moments, blocks = self._moments, self._model.blocks
        live, before_forward, before_backward, saves, kept = (
            np.array(LineArray.from_lines(lines)) * self.heap_growth_factor
            for lines in (
                [moment.live for moment in self._model.moments],
                [block.live_before_forward for block in blocks],
                [block.live_before_backward for block in blocks],
                [block.recompute_saves for block in blocks],
                [block.kept_inputs for block in blocks],
            )
        )
        self._recompute_moments = np.flatnonzero(moments.recomputed_block != NOT_RECOMPUTED)
        block = moments.recomputed_block[self._recompute_moments]
        source = moments.source[self._recompute_moments]
        usual = live[:, moments.source]
        usual[:, self._recompute_moments] = before_backward[:, block]
        recomputed = before_backward[:, block] - saves[:, block] + live[:, source] - before_forward[:, block]
        self.live, self._recomputed_live, self.recompute_saves, self._kept_inputs = (
            LineArray(*lines) for lines in (usual, recomputed, saves, kept)
        )
        ends = np.array([moments.position[block.forward[1]] + 1 for block in blocks], dtype=np.int64)
        self.released_intervals = Intervals(ends, moments.recompute_start)
        self._block_backwards = moments.to_intervals([block.backward for block in blocks])

    # -- peaks and curves ----------------------------------------------------------------------------------------------

    def peak(
        self, choices: Sequence[ShardingChoice], batch_size: int, accumulation: int = 1, recomputed: Iterable[str] = ()
    ) -> Peak:
        """Return the largest memory along the step, and the memory between steps.

        Args:
            choices: One for each operator of the model.
            batch_size: Samples per micro-batch.
            accumulation: Micro-batches per optimizer step.
            recomputed: Names of the blocks that are recomputed.
        """
        recomputed_blocks = self._recompute_mask(recomputed)
        return self.peak_of_footprints(self._footprints(choices), batch_size, accumulation, recomputed_blocks)

    def peak_of_footprints(
        self, footprints: Floats, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> Peak:
        """Return the peak for an array of footprints, (operators, fields), and a flag for each block."""
        columns = Footprint(*footprints.T)
        curves = self._curves(columns, batch_size, accumulation, recomputed_blocks)
        moment = int(np.argmax(sum(curves.values())))
        return Peak(
            where=self._describe_moment(moment),
            moment=moment,
            saving_bytes=self._saving_bytes(columns),
            evaluation_bytes=self._evaluation_bytes(columns),
            **{name: float(curve[moment]) for name, curve in curves.items()},
        )

    def bytes_per_moment(
        self, operators: Ints, footprints: Floats, batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> Floats:
        """Return the bytes that each footprint adds at each moment, (footprints, moments), as far as they are additive.

        Args:
            operators: Index of each footprint's operator.
            footprints: Array of (footprints, fields).
            batch_size: Samples per micro-batch.
            accumulation: Micro-batches per optimizer step.
            recomputed_blocks: A flag for each block.
        """
        changes = np.zeros((len(operators), self._num_moments + 1))
        rows, runs = np.arange(len(operators)), self._runs.select(operators)
        columns = Footprint(*footprints.T)
        for _, intervals, amounts in self._additive(runs, columns, batch_size, accumulation, recomputed_blocks):
            changes[rows, intervals.start] += amounts
            changes[rows, intervals.stop] -= amounts
        return np.asarray(np.cumsum(changes, axis=1)[:, :-1], dtype=np.float64)

    def unattributed_bytes(self, batch_size: int, recomputed_blocks: Flags) -> Floats:
        """Return the bytes at each moment that belong to no operator."""
        nothing = Footprint(*np.zeros((len(COLUMN), len(self._model.operators))))
        curves = self._curves(nothing, batch_size, 1, recomputed_blocks)
        return np.asarray(sum(curves.values()), dtype=np.float64)

    def curves(
        self, choices: Sequence[ShardingChoice], batch_size: int, accumulation: int = 1, recomputed: Iterable[str] = ()
    ) -> dict[str, Floats]:
        """Return the bytes by category at each moment that happens; the optimizer's step is the last one."""
        flags = self._recompute_mask(recomputed)
        curves = self._curves(Footprint(*self._footprints(choices).T), batch_size, accumulation, flags)
        visible = np.append(self._visible_moments(flags), True)
        return {name: curve[visible] for name, curve in curves.items()}

    def phases(self, recomputed: Iterable[str] = ()) -> list[str]:
        """Return ``forward``, ``backward`` or ``recompute`` for each moment of ``curves`` but the optimizer's step."""
        visible = self._visible_moments(self._recompute_mask(recomputed))
        return [
            "recompute" if block != NOT_RECOMPUTED else self._model.moments[source].phase
            for source, block in zip(
                self._moments.source[visible], self._moments.recomputed_block[visible], strict=True
            )
        ]

    def _curves(
        self, columns: Footprint[Floats], batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> dict[str, Floats]:
        held = [*self._additive(self._runs, columns, batch_size, accumulation, recomputed_blocks)]
        held += self._largest_only(columns)
        if self._cluster.prefetch_max_bytes:
            held += prefetch_held(self._runs, columns, recomputed_blocks, self._wrapped)
        if self._cluster.has_streams:
            held += stream_held(self._runs, columns, recomputed_blocks, self._wrapped, self._num_moments)
        categories = ("states", "gradients", "gathered", "transient", "activations")
        changes = {name: np.zeros(self._num_moments) for name in categories}
        for category, intervals, amounts in held:
            changes[category] += intervals.changes(amounts, self._num_moments)
        curves = {name: np.cumsum(change) for name, change in changes.items()}
        curves["states"] += self._model.buffer_bytes
        curves["transient"] += self._replicated_reduction_bytes(columns)
        curves["activations"] += np.append(self._activations(batch_size, recomputed_blocks), 0.0)
        curves["overhead"] = np.full(self._num_moments, self._overhead)
        return self._heap.separate(curves, batch_size)

    def _additive(
        self, runs: OperatorRuns, own: Footprint[Floats], batch_size: int, accumulation: int, recomputed_blocks: Flags
    ) -> Iterator[Held]:
        """Yield what operators hold independently of each other."""
        count = self._num_moments
        start, end = np.zeros(len(own.states), dtype=np.int64), np.full(len(own.states), count)
        is_recomputed = np.append(recomputed_blocks, False)[runs.block]
        yield Held("states", Intervals(start, end), own.states)
        yield Held("gathered", Intervals(runs.forward.start, runs.backward.stop), own.unsharded_between_passes)
        for intervals, happens in ((runs.forward, 1.0), (runs.recompute, is_recomputed)):
            yield Held("gathered", intervals, own.unsharded_while_running * happens)
            yield Held("transient", intervals, own.forward_per_sample * batch_size * happens)
        if own.gathered_per_sample.any():
            inputs = own.gathered_per_sample * batch_size
            yield Held("activations", Intervals(runs.forward.start, runs.backward.stop), inputs * ~is_recomputed)
            yield Held("activations", runs.forward, inputs * is_recomputed)
            yield Held("activations", Intervals(runs.recompute.start, runs.backward.stop), inputs * is_recomputed)
        yield Held("gathered", runs.unsharded_backward, own.unsharded_in_backward * runs.has_backward)
        # A block that is recomputed makes its casts anew.
        released = Intervals(runs.forward.stop, np.maximum(runs.forward.stop, runs.recompute.start))
        yield Held("gathered", released, -own.replicated_casts * is_recomputed)
        # Slices have their gradients one after the other, as products are made of them.
        is_whole = own.has_partial_gradients == 0
        graded = Intervals(np.where(is_whole, runs.with_gradients.start, runs.backward.start), runs.backward.stop)
        yield Held("gathered", graded, -own.casts_before_gradients * runs.has_backward)
        begins = (graded.start, *np.maximum(graded.start, runs.quarters), graded.stop)
        transients = (own.transient_in_first_quarter, own.transient_in_second, own.transient_in_third, own.transient)
        for begin, stop, transient in zip(begins, begins[1:], transients, strict=False):
            yield Held("transient", Intervals(begin, np.maximum(begin, stop)), transient * runs.has_backward)
        yield Held("transient", runs.backward, own.backward_per_sample * batch_size * runs.has_backward)
        if accumulation > 1:  # the new gradient exists beside the accumulated one until it is added
            yield Held("gradients", Intervals(start, end), own.replicated_gradients + own.sharded_gradients)
            yield Held("transient", graded, own.replicated_gradients)
        else:
            yield Held("gradients", Intervals(graded.start, end), own.replicated_gradients)
            yield Held("gradients", Intervals(runs.backward.stop, end), own.sharded_gradients)
        if count > 1 and own.reduction_growth.any():
            yield Held("transient", Intervals(runs.backward.start, end - 1), own.reduction_growth)
        yield Held("transient", graded, own.reduced_copy)
        step = self._model.optimizer_step
        if step.temporaries_of == "total":
            updated = step.temporary_factor * own.local_trainable * self.heap_growth_factor
            yield Held("transient", Intervals(end - 1, end), updated)

    def _largest_only(self, columns: Footprint[Floats]) -> Iterator[Held]:
        """Yield what only the operator with the largest amount holds, at the end of the backward or in the step."""
        last = np.array([self._num_moments - 1])
        if self._num_moments > 1:
            copied = np.array([columns.slice_gradient_copy.max(initial=0.0)])
            yield Held("transient", Intervals(last - 1, last), copied)
            unpacked = np.array([columns.reduced_copy.max(initial=0.0)])
            yield Held("transient", Intervals(last - 1, last), unpacked)
        step = self._model.optimizer_step
        if step.temporaries_of == "largest":
            largest = np.array([columns.largest_local_trainable.max(initial=0.0)])
            yield Held("transient", Intervals(last, last + 1), step.temporary_factor * largest)

    def _replicated_reduction_bytes(self, columns: Footprint[Floats]) -> Floats:
        """Return what averaging replicated gradients takes in addition to them, at each moment.

        A bucket that is full is a second copy while it is packed, as is the last one at the end of the backward.
        Buffers of all-reduces are held from the first gradients to the end of the backward.
        """
        count, factor = self._num_moments, self.heap_growth_factor
        if count == 1:
            return np.zeros(count)
        stop, bucket_bytes = self.backward.stop, self._cluster.bucket_bytes * factor
        bucketed = np.cumsum(np.bincount(np.maximum(stop, 1) - 1, columns.bucketed, count)[:-1])
        gradients = np.cumsum(np.bincount(stop, columns.replicated_gradients, count)[:-1])
        gradients[-1] = columns.replicated_gradients.sum()
        packed = np.where(np.diff(np.floor(bucketed / bucket_bytes), prepend=0.0) > 0, bucket_bytes, 0.0)
        packed[-1] = min(bucket_bytes, columns.bucketed.sum())
        buffers = np.minimum(gradients / self._cluster.ranks, self._cluster.all_reduce_buffer_bytes * factor)
        return np.append(packed + buffers, 0.0)

    def _activations(self, batch_size: int, recomputed_blocks: Flags) -> Floats:
        live = self.live.value_at(batch_size)
        if recomputed_blocks.any():
            is_recomputed = recomputed_blocks[self._moments.recomputed_block[self._recompute_moments]]
            changed = self._recompute_moments[is_recomputed]
            live[changed] = self._recomputed_live.value_at(batch_size)[is_recomputed]
            freed = np.maximum(0.0, self.recompute_saves.value_at(batch_size)[recomputed_blocks])
            live -= np.cumsum(self.released_intervals.select(recomputed_blocks).changes(freed, len(live)))
            kept = np.maximum(0.0, self._kept_inputs.value_at(batch_size)[recomputed_blocks])
            live += np.cumsum(self._block_backwards.select(recomputed_blocks).changes(kept, len(live)))
        return np.maximum(0.0, live)

    # -- between steps -------------------------------------------------------------------------------------------------

    def _saving_bytes(self, columns: Footprint[Floats]) -> int:
        work = self._non_training
        if work.checkpoint_memory == "nothing" and not work.gathers_parameters:
            return 0
        gathered = {
            "nothing": 0.0,
            "streamed": float(columns.checkpoint_tensor.max(initial=0.0)),
            "gathered": float(columns.unsharded_state.sum()),
        }[work.checkpoint_memory]
        averaged = float(columns.unsharded_parameters.sum()) if work.gathers_parameters else 0.0
        return round(self._idle_bytes(columns) + max(gathered, averaged))

    def _evaluation_bytes(self, columns: Footprint[Floats]) -> int:
        batch_size = self._non_training.evaluation_batch_size
        cut = self._gathered_when_cut(columns)
        if not batch_size or not len(self._evaluation_operators):
            return round(self._idle_bytes(columns) + cut.max()) if cut.any() else 0
        per_sample = columns.forward_per_sample + columns.gathered_per_sample
        exchanged = per_sample / self.heap_growth_factor * batch_size
        own = columns.eval_unsharded * ~self._tied + np.where(cut > 0, cut, exchanged)
        running = np.append(own, 0.0)[self._evaluation_operators]  # UNATTRIBUTED is the last index
        tied = float(columns.eval_unsharded[self._tied].sum())
        casts = float(columns.replicated_casts.sum()) / self.heap_growth_factor  # autocast caches them
        if self._cluster.has_streams:
            casts += second_largest(columns.eval_unsharded, columns.gathered_in_total)
        live = float((self._evaluation_live_bytes + running).max())
        return round(self._idle_bytes(columns) + tied + casts + live)

    def _gathered_when_cut(self, columns: Footprint[Floats]) -> Floats:
        """Return what each operator takes outside of training if it is tensor parallel together with others.

        They are gathered together then, since they were proven to be parallel in the training step alone.
        """
        is_cut = (self.scope_of >= 0) & (columns.gathered_in_total == 0)
        by_scope = np.bincount(self.scope_of + 1, columns.unsharded_parameters * is_cut)
        return np.asarray(by_scope[self.scope_of + 1] * is_cut, dtype=np.float64)

    def _idle_bytes(self, columns: Footprint[Floats]) -> float:
        return float(self._overhead + self._model.buffer_bytes + columns.states.sum())

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _footprints(self, choices: Sequence[ShardingChoice]) -> Floats:
        rows = []
        in_backward = self._model.optimizer_step.in_backward
        for operator, choice in zip(self._model.operators, choices, strict=True):
            key = (operator.signature, choice)
            if key not in self._footprint_cache:
                own = footprint(operator, choice, self._cluster, updated_in_backward=in_backward)
                self._footprint_cache[key] = self._heap.grow(own)
            rows.append(self._footprint_cache[key])
        return as_rows(rows)

    def _recompute_mask(self, recomputed: Iterable[str]) -> Flags:
        names = set(recomputed)
        return np.array([block.name in names for block in self._model.blocks], dtype=bool)

    def _visible_moments(self, recomputed_blocks: Flags) -> Flags:
        return np.append(recomputed_blocks, True)[self._moments.recomputed_block]

    def _describe_moment(self, index: int) -> str:
        if index == self._num_moments - 1:
            return "optimizer step"
        source, block = int(self._moments.source[index]), self._moments.recomputed_block[index]
        moment = self._model.moments[source]
        phase = moment.phase if block == NOT_RECOMPUTED else "recomputation"
        operator, relation = moment.operator, "of"
        if operator == UNATTRIBUTED:
            relation = "after"
            earlier = (m.operator for m in reversed(self._model.moments[:source]) if m.operator != UNATTRIBUTED)
            operator = next(earlier, UNATTRIBUTED)
        name = "the start" if operator == UNATTRIBUTED else self._model.operators[operator].name
        return f"{phase} {relation} {name or 'the whole model'}"


def _find_scopes(model: ModelProfile) -> list[Ints]:
    """Return the indices of the operators of each scope, which are tensor parallel together or not at all."""
    index_of = {operator.name: index for index, operator in enumerate(model.operators) if operator.tensor is not None}
    several = (names for candidate in model.tensor_candidates if len(names := candidate.operators) > 1)
    found = ([index_of[name] for name in names] for names in several if index_of.keys() >= set(names))
    return [np.array(scope, dtype=np.int64) for scope in found]

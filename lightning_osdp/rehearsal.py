"""Rehearses the module's own training step, on a copy: as it is, with all operators in one mode, and as it was planned.

What was measured in parts (kernels, collectives, the engine) is then changed to what the step really takes
(``planning.rehearsed``). The copy needs memory for gradients, activations and what is sharded, but it shares whole
parameters with the module and has no optimizer states; where there is no room for it, the parts are all that is known.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from lightning_osdp.collectives import least_room, on_all_ranks
from lightning_osdp.copies import FEWEST, SECONDS, WARM_UP, Stage, Took, handed_back_and_kept, in_turns_s, timed
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.choices import Group, Mode
from lightning_osdp.planning.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.heap import HEAP_GROWTH, kept_batch_size
from lightning_osdp.planning.joining import Units, ways
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.rehearsed import (
    CHOSEN_ERROR,
    Passes,
    Rehearsal,
    alike,
    copy_bytes,
    fitted_s,
    foreseen,
    passes_s,
    rehearsed_compute,
    training_bytes,
)
from lightning_osdp.planning.topology import sharding_groups
from lightning_osdp.planning.wishes import NO_WISHES
from lightning_osdp.profiling.heap import HEAP
from lightning_osdp.profiling.memory import counts_peaks
from lightning_osdp.profiling.standins import kept_randomness
from lightning_osdp.profiling.trace import Trace
from lightning_osdp.sharding.overhead import bare_plan

LONGEST_S = 10.0
"""From how long plain steps on there is no rehearsal."""

CHOSEN_SECONDS = 3.0
"""How long the plan that was found is rehearsed, where there is time: its time is what people are told."""

ODD, CHOSEN_ODD = 0.2, 0.05
"""Share by which a rehearsal may differ from what is likely: of all operators in one mode, and of a plan that was
found. Beyond, it is made once more: other work on the machine lasts for some seconds at times."""

SHORT_S = 1.0
"""Rehearsals of steps that take longer are not repeated: that takes long, and the first has lasted through more of what
goes on beside it."""

PLAIN_S = LONGEST_S / 3
"""How long a plain step at the larger of two batch sizes may take: a start has 30 s."""

FARTHER = 2
"""Of two batch sizes of the plain step the larger is at least so many times the smaller: closer ones say little of what
a sample takes. [measured, GPT-2, 4 ranks on 2 cores, with room for 2 samples and not for the 8 that were traced: scaled
by the step of 2 alone, steps of 8 to 22 samples are foreseen 10 to 40 % too short]"""

FILLING_S = 0.4
"""How long a plain step on CUDA may take, by its parts: where there is memory for such batches, kernels take longer
than it takes to launch them. [measured, H100, GPT-2 of 354 M parameters, bf16, room for 204 samples: by steps of 2 and
16 samples 0.8 ms for each, 1.9 in training]"""

MODES_LEFT_S, STEP_LEFT_S, KEPT_LEFT_S = 14.0, 8.0, 4.5
"""Seconds of the start that must be left: for finding a plan, rehearsing and applying it, when the step is rehearsed in
one more mode; for searches that are not cut short and applying what they find, after a single step of a mode; for
finding and applying a plan, after what is gained by a heap that keeps freed tensors. Where there is room for that, it
matters more than to rehearse the plan. [measured, 4 ranks on 2 cores: GPT-2 17.4 samples a second, 11.1 where no time
was left to know it; I&C 20.4, and 15.0 where searches had 2 s and came to no plan that keeps them]"""

KEPT_SHARE = 0.9
"""Part of a step's compute that is taken for what it takes where freed tensors stay in the heap, where there is no time
to look. [measured, six models, alone and with 4 ranks on 2 cores: 0.67 to 0.94; GPT-2, 4 ranks, 2 Gbit/s, 13.4 samples
a second, and 9.3 where a start had no time and counted on nothing]"""

MARGIN = 1.1
"""Room for a rehearsal, as a multiple of what it is thought to need."""


def _forever() -> float:
    return math.inf


def rehearse(
    stage: Stage,
    traced: Trace,
    group: dist.ProcessGroup,
    cluster: Cluster,
    compute: ComputeTimes,
    free_bytes: Callable[[], int],
    left_s: Callable[[], float] = _forever,
) -> tuple[ComputeTimes, ComputeTimes | None, tuple[Rehearsal, ...]]:
    """Compute whose sums are those of the plain step, the same where freed tensors stay in the heap
    (``rehearse_kept``), and what the step takes with all operators in one mode.

    Collective: all ranks call it alike.

    Args:
        stage: what to rehearse.
        traced: the step, at one or two batch sizes: those that fit are rehearsed, or on CUDA larger ones, and the modes
            at the smaller of them, where what they add is most of the step.
        group: the ranks.
        cluster: with links and engine as measured.
        compute: as measured in parts.
        free_bytes: that this rank may take now.
        left_s: seconds that the start may still take. Collective.

    Returns:
        ``compute`` as it was, and nothing else, where a rehearsal is not possible or would take too long.
    """
    model = traced.description

    def late() -> bool:
        return left_s() < MODES_LEFT_S

    try:
        with kept_randomness(stage.device):
            uniform = _uniform(model, cluster)
            room = stage.room(free_bytes(), group)
            plain = on_all_ranks(group, partial(_plain, stage, traced, group, cluster, compute, room))
            if sum(one.step_s for one in plain.values()) > LONGEST_S:
                return compute, None, ()
            times, kept = _as_plain(compute, plain), None
            smallest = min(plain, default=traced.sizes[0])
            # Before the modes: where there is room for it, they matter least.
            if plain and can_keep_heap(stage.device, group):
                usual = plain[smallest]
                hurried = left_s() - in_turns_s(usual) <= KEPT_LEFT_S
                kept = rehearse_kept(stage, traced, group, cluster, times, free_bytes(), usual, hurried)
            shown = []
            # First what adds most to a plain step; where there may be no time for all, what is nearest to it.
            modes = () if group.size() == 1 else _plainest_first(uniform) if late() else uniform[::-1]
            for plan in modes:
                expected = foreseen(model, times, cluster, plan, smallest)
                room = stage.room(free_bytes(), group)  # each copy leaves a little behind
                if not _short(expected) or not _fits(model, cluster, plan, smallest, room):
                    continue
                if not late():
                    shown.append(_rehearsed(stage, expected, plan, smallest, group, late))
                elif left_s() - (WARM_UP + 1) * expected.foreseen_s > STEP_LEFT_S:
                    shown.append(_rehearsed(stage, expected, plan, smallest, group, late, seconds=0.0))
            return times, kept, tuple(shown)
    except Exception as error:
        _warn(error)
        return compute, None, ()


def rehearse_alone(
    stage: Stage, traced: Trace, cluster: Cluster, compute: ComputeTimes, room_bytes: int
) -> ComputeTimes:
    """Compute whose sums are those of the plain step, in a process without others; ``compute`` where that is not
    possible. Arguments as in ``rehearse``."""
    room = stage.room(room_bytes, None)
    try:
        with kept_randomness(stage.device):
            return _as_plain(compute, _plain(stage, traced, None, cluster, compute, room))
    except Exception as error:
        _warn(error)
        return compute


def can_keep_heap(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether freed tensors can stay in the heap, and it can be told how far that grows, on all ranks. Collective."""
    here = device.type == "cpu" and HEAP.can_keep and counts_peaks(device)
    return here if group is None else bool(least_room(int(here), group, device))


def rehearse_kept(
    stage: Stage,
    traced: Trace,
    group: dist.ProcessGroup | None,
    cluster: Cluster,
    compute: ComputeTimes,
    room_bytes: int,
    usual: Took | None = None,
    hurried: bool = False,
) -> ComputeTimes | None:
    """``compute`` where freed tensors stay in the heap; None where training, with all operators replicated, leaves no
    room for the heap to grow by as much again as the copy takes, or where even this batch's are too large to stay.
    Collective where there is a group.

    Args:
        stage: what to rehearse.
        traced: the step; it is made at the smallest batch size.
        group: the ranks; None for a process without others.
        cluster: their number.
        compute: its sums as rehearsed where freed tensors are handed back.
        room_bytes: that this rank may take now.
        usual: what such a step takes where freed tensors are handed back, if known.
        hurried: whether there is no time to look, and ``KEPT_SHARE`` has to do.
    """
    model, size, room = traced.description, traced.sizes[0], stage.room(room_bytes, group)
    replicated = _uniform(model, cluster)[0]
    copied, trained = (count(model, cluster, replicated, size) for count in (copy_bytes, training_bytes))
    if copied + max(copied, trained) > room or kept_batch_size(model) < size:
        return None
    if hurried:
        return compute.changed(lambda line: line.times(KEPT_SHARE))
    step = partial(handed_back_and_kept, stage, size, group, _heap_bytes(copied), usual)
    try:
        with kept_randomness(stage.device):
            usual, kept = step() if group is None else on_all_ranks(group, step)
    except Exception as error:
        _warn(error)
        return None
    share = min(1.0, kept.step_s / usual.step_s)
    return compute.changed(lambda line: line.times(share))


def _as_plain(compute: ComputeTimes, plain: Mapping[int, Took]) -> ComputeTimes:
    """``compute`` with the sums that plain steps have."""
    took = {size: Passes(one.forward_s, one.step_s - one.forward_s) for size, one in plain.items()}
    return rehearsed_compute(compute, took) if took else compute


def rehearse_chosen(
    stage: Stage,
    traced: Trace,
    group: dist.ProcessGroup,
    cluster: Cluster,
    compute: ComputeTimes,
    plan: ExecutionPlan,
    room_bytes: int,
    left_s: Callable[[], float] = _forever,
) -> Rehearsal | None:
    """What the step takes under a plan that was found; None where that can't be rehearsed. Collective.

    Args:
        stage: what to rehearse.
        traced: the step.
        group: the ranks.
        cluster: with links and engine as measured.
        compute: as measured, its sums as rehearsed.
        plan: at its batch size, or a smaller one that was traced, if that takes too long or too much.
        room_bytes: that a rehearsal may take on this rank.
        left_s: seconds that the start may still take. Rehearsing takes half of that at most, where it can, also when it
            is made twice; a step too long for that takes all, or is timed once, within three quarters. Collective.
    """
    sizes, model = traced.sizes, traced.description
    wanted = _wanted(plan.batch_size, sizes, stage.device)
    room, half_s = stage.room(room_bytes, group), left_s() / 2
    rather = [(size, min(half_s, LONGEST_S), FEWEST) for size in wanted]
    least = [(sizes[0], min(share * half_s, LONGEST_S), steps) for share, steps in ((2.0, FEWEST), (1.5, 1))]
    for size, longest_s, steps in rather + least:
        expected = foreseen(model, compute, cluster, plan, size)
        if _short(expected, longest_s, steps) and _fits(model, cluster, plan, size, room):
            break
    else:
        return None
    try:
        with kept_randomness(stage.device):
            likely_s = fitted_s(expected, plan.cluster.engine.excess)
            seconds = min(CHOSEN_SECONDS, max(SECONDS, half_s / 2)) if steps > 1 else 0.0
            shown = _rehearsed(
                stage,
                expected,
                plan,
                size,
                group,
                lambda: left_s() < half_s,
                seconds,
                (likely_s, CHOSEN_ODD),
                _heap_bytes(copy_bytes(model, cluster, plan, size)) if plan.keep_heap else None,
            )
    except Exception as error:
        _warn(error)
        return None
    return shown.model_copy(update={"error": CHOSEN_ERROR, "plan": plan.without_reasons()})


def _wanted(batch_size: int, traced: Sequence[int], device: torch.device) -> Sequence[int]:
    """Batch sizes to rehearse a plan at, what says most first: on CUDA, where few samples say little, its own and then
    halves of it."""
    if len(traced) == 1:
        return traced
    if device.type != "cuda":
        return [batch_size, sum(traced) // len(traced), traced[0]]
    halves = (batch_size >> times for times in range(batch_size.bit_length()))
    return [*(size for size in halves if size > traced[0]), traced[0]]


def _plain(
    stage: Stage,
    traced: Trace,
    group: dist.ProcessGroup | None,
    cluster: Cluster,
    parts: ComputeTimes,
    room: int,
) -> dict[int, Took]:
    """What the plain step takes, at the smallest traced batch size and at the largest, or the largest in between that
    fits with all operators replicated and does not take too long; on CUDA, at sizes that fill the device."""
    model, smallest = traced.description, traced.sizes[0]
    replicated = _uniform(model, cluster)[0]
    to_fill = stage.device.type == "cuda" and len(traced.sizes) > 1
    longest_s = FILLING_S if to_fill else PLAIN_S

    def fits(size: int) -> bool:
        return _fits(model, cluster, replicated, size, room) and sum(passes_s(parts, size)) <= longest_s

    if not _fits(model, cluster, replicated, smallest, room):
        return {}
    if to_fill:
        sizes = _filling(smallest, fits)
    else:
        apart = range(traced.sizes[-1], FARTHER * smallest - 1, -1)
        sizes = [smallest, *islice(filter(fits, apart), 1)]
    return timed(stage, sizes, group, None)


def _filling(smallest: int, fits: Callable[[int], bool]) -> list[int]:
    """The largest batch size that ``fits``, by doubling, and half of it: a line through both holds for those beyond.
    One through fewer samples does not, which take as long as it takes to launch their kernels."""
    larger = smallest
    while fits(2 * larger):
        larger *= 2
    return sorted({max(smallest, larger // 2), larger})


def _fits(model: ModelDescription, cluster: Cluster, plan: ExecutionPlan, size: int, room: float) -> bool:
    """Whether there is room for the step, and some more for what is not counted: a control group's limit ends the
    process."""
    return MARGIN * (1 + HEAP_GROWTH * plan.keep_heap) * copy_bytes(model, cluster, plan, size) <= room


def _heap_bytes(copied_bytes: int) -> int:
    """Room for freed tensors of a copy."""
    return int((1 + HEAP_GROWTH) * copied_bytes)


def _short(expected: Rehearsal, longest_s: float = LONGEST_S, steps: int = FEWEST) -> bool:
    """Whether that many timed steps end in time. Of a long one, a single one tells what parts can't."""
    return expected.foreseen_s * (WARM_UP + steps) < longest_s


def _warn(error: Exception) -> None:
    """Whatever the user's code has raised: it will in training, too, or it minds being copied."""
    text = f"the step can't be rehearsed, so its time is less sure: {error}"
    warnings.warn(text, OSDPWarning, stacklevel=3)


def _uniform(description: ModelDescription, cluster: Cluster) -> tuple[ExecutionPlan, ...]:
    """All operators replicated, sharded inside nodes where there are two levels, and in the other modes, as far as they
    can; where blocks may share units, kept parameters do."""
    apart, *joined = ways(description, NO_WISHES)
    together = joined[-1] if joined else apart
    inside = [(Mode.ZDP2, together, Group.NODE)] if (Group.NODE, False) in sharding_groups(cluster) else []
    everywhere = [(Mode.ZDP2, together, Group.WORLD), (Mode.ZDP, apart, Group.WORLD)]
    kinds = [(Mode.DP, apart, Group.WORLD), *inside, *everywhere]
    return tuple(_plan(description, cluster, *kind) for kind in kinds)


def _rehearsed(
    stage: Stage,
    expected: Rehearsal,
    plan: ExecutionPlan,
    size: int,
    group: dist.ProcessGroup,
    late: Callable[[], bool],
    seconds: float = SECONDS,
    likely: tuple[float, float] | None = None,
    heap_bytes: int | None = None,
) -> Rehearsal:
    """With what it took. Where that is not ``likely`` (seconds, and a share of them; as foreseen if None), it is tried
    once more unless it is ``late``: if both agree, that is it, else one of them was disturbed, and the less counts."""
    likely_s, odd = likely or (expected.foreseen_s, ODD)

    def once() -> Took:
        step = partial(timed, stage, [size], group, plan, seconds, heap_bytes)
        return on_all_ranks(group, step)[size]

    tries = [once()]
    if tries[0].step_s <= SHORT_S and abs(tries[0].step_s / likely_s - 1) > odd and not late():
        tries.append(once())
    if max(tries).step_s / min(tries).step_s - 1 > ODD:  # else the mean: the less would be less than a step takes
        tries = [min(tries)]
    took = Took(*map(statistics.mean, zip(*tries, strict=True)))
    # on CUDA, what the host waits for is not what the device does
    waited_s = took.waited_s if stage.device.type == "cpu" else None
    return expected.model_copy(update={"took_s": took.step_s, "waited_s": waited_s})


def _plainest_first(uniform: Sequence[ExecutionPlan]) -> list[ExecutionPlan]:
    """What is sharded inside nodes even before what is replicated: that is what the search finds next to it where there
    is memory, and what was found is rehearsed anyway."""
    return sorted(uniform, key=lambda plan: all(op.sharding_group != Group.NODE for op in plan.operators))


def _plan(description: ModelDescription, cluster: Cluster, mode: Mode, units: Units, group: Group) -> ExecutionPlan:
    operators = (
        OperatorPlan(
            name=operator.name,
            slices=alike(operator, mode).slices,
            sharding_group=group,
            unit=unit,
            num_parameters=operator.num_parameters,
            pinned=operator.pinned,
        )
        for operator, unit in zip(description.operators, units, strict=True)
    )
    return bare_plan(operators, cluster.model_copy(update={"ahead_bytes": 0}))

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

from lightning_osdp.autotune.trial_step import (
    MIN_STEPS,
    TRIAL_S,
    WARMUP_STEPS,
    StepTiming,
    TrialContext,
    release_and_retain_duration_s,
    time_release_and_retain,
    time_step,
)
from lightning_osdp.backend.agree import all_reduce_min, raise_on_all_ranks
from lightning_osdp.backend.allocator import can_measure_retention
from lightning_osdp.backend.work import is_driven_by_host
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.cpu_effects import HEAP_GROWTH, max_retained_batch_size
from lightning_osdp.planning.cost.trial_correction import (
    PLAN_TRIAL_RELATIVE_ERROR,
    PassTimes,
    Trial,
    calibrated_s,
    pass_times,
    predict_trial,
    scale_to_trial,
    training_peak_bytes,
    trial_peak_bytes,
    uniform_choice,
)
from lightning_osdp.planning.spec.choices import Mode, ShardingScope, available_scopes
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.wrapping import WrapAssignment, wrap_assignments
from lightning_osdp.profiling.tracing.stand_ins import fork_rng
from lightning_osdp.profiling.tracing.trace import TracedStep

MAX_TRIAL_S = 10.0
"""From how long plain steps on there is no rehearsal."""

PLAN_TRIAL_S = 3.0
"""How long the plan that was found is rehearsed, where there is time: its time is what people are told."""

RETRY_TOLERANCE, PLAN_RETRY_TOLERANCE = 0.2, 0.05
"""Share by which a rehearsal may differ from what is likely: of all operators in one mode, and of a plan that was
found. Beyond, it is made once more: other work on the machine lasts for some seconds at times."""

NO_RETRY_ABOVE_S = 1.0
"""Rehearsals of steps that take longer are not repeated: that takes long, and the first has lasted through more of what
goes on beside it."""

MAX_LARGE_BATCH_S = MAX_TRIAL_S / 3
"""How long a plain step at the larger of two batch sizes may take: a start has 30 s."""

MIN_SIZE_RATIO = 2
"""Of two batch sizes of the plain step the larger is at least so many times the smaller: closer ones say little of what
a sample takes. [measured, GPT-2, 4 ranks on 2 cores, with room for 2 samples and not for the 8 that were traced: scaled
by the step of 2 alone, steps of 8 to 22 samples are foreseen 10 to 40 % too short]"""

SATURATED_STEP_S = 0.4
"""How long a plain step on CUDA may take, by its parts: where there is memory for such batches, kernels take longer
than it takes to launch them. [measured, H100, GPT-2 of 354 M parameters, bf16, room for 204 samples: by steps of 2 and
16 samples 0.8 ms for each, 1.9 in training]"""

MODE_TRIALS_RESERVE_S, SINGLE_STEP_RESERVE_S, HEAP_TRIAL_RESERVE_S = 14.0, 8.0, 4.5
"""Seconds of the start that must be left: for finding a plan, rehearsing and applying it, when the step is rehearsed in
one more mode; for searches that are not cut short and applying what they find, after a single step of a mode; for
finding and applying a plan, after what is gained by a heap that keeps freed tensors. Where there is room for that, it
matters more than to rehearse the plan. [measured, 4 ranks on 2 cores: GPT-2 17.4 samples a second, 11.1 where no time
was left to know it; I&C 20.4, and 15.0 where searches had 2 s and came to no plan that keeps them]"""

ASSUMED_RETAIN_TIME_RATIO = 0.9
"""Part of a step's compute that is taken for what it takes where freed tensors stay in the heap, where there is no time
to look. [measured, six models, alone and with 4 ranks on 2 cores: 0.67 to 0.94; GPT-2, 4 ranks, 2 Gbit/s, 13.4 samples
a second, and 9.3 where a start had no time and counted on nothing]"""

MEMORY_MARGIN = 1.1
"""Room for a rehearsal, as a multiple of what it is thought to need."""


def _no_time_limit() -> float:
    return math.inf


def run_calibration_trials(
    trial_context: TrialContext,
    traced: TracedStep,
    group: dist.ProcessGroup,
    cluster: Cluster,
    compute: ComputeTimes,
    free_bytes: Callable[[], int],
    remaining_s: Callable[[], float] = _no_time_limit,
) -> tuple[ComputeTimes, ComputeTimes | None, tuple[Trial, ...]]:
    """Compute whose sums are those of the plain step, the same where freed tensors stay in the heap
    (``run_heap_trial``), and what the step takes with all operators in one mode.

    Collective: all ranks call it alike.

    Args:
        trial_context: what to rehearse.
        traced: the step, at one or two batch sizes: those that fit are rehearsed, or on CUDA larger ones, and the modes
            at the smaller of them, where what they add is most of the step.
        group: the ranks.
        cluster: with links and engine as measured.
        compute: as measured in parts.
        free_bytes: that this rank may take now.
        remaining_s: seconds that the start may still take. Collective.

    Returns:
        ``compute`` as it was, and nothing else, where a rehearsal is not possible or would take too long.
    """
    model = traced.model_profile

    def deadline_reached() -> bool:
        return remaining_s() < MODE_TRIALS_RESERVE_S

    try:
        with fork_rng(trial_context.device):
            uniform = _uniform_plans(model, cluster)
            room = trial_context.available_bytes(free_bytes(), group)
            plain = raise_on_all_ranks(
                group, partial(_time_unsharded_step, trial_context, traced, group, cluster, compute, room)
            )
            if sum(one.step_s for one in plain.values()) > MAX_TRIAL_S:
                return compute, None, ()
            times, kept = _scale_to_trial(compute, plain), None
            smallest = min(plain, default=traced.batch_sizes[0])
            # Before the modes: where there is room for it, they matter least.
            if plain and can_measure_heap_retention(trial_context.device, group):
                usual = plain[smallest]
                hurried = remaining_s() - release_and_retain_duration_s(usual) <= HEAP_TRIAL_RESERVE_S
                kept = run_heap_trial(trial_context, traced, group, cluster, times, free_bytes(), usual, hurried)
            shown = []
            # First what adds most to a plain step; where there may be no time for all, what is nearest to it.
            modes = () if group.size() == 1 else _cheapest_first(uniform) if deadline_reached() else uniform[::-1]
            for plan in modes:
                expected = predict_trial(model, times, cluster, plan, smallest)
                room = trial_context.available_bytes(free_bytes(), group)  # each copy leaves a little behind
                if not _fits_time(expected) or not _fits_memory(model, cluster, plan, smallest, room):
                    continue
                if not deadline_reached():
                    shown.append(_run_trial(trial_context, expected, plan, smallest, group, deadline_reached))
                elif remaining_s() - (WARMUP_STEPS + 1) * expected.predicted_s > SINGLE_STEP_RESERVE_S:
                    shown.append(
                        _run_trial(trial_context, expected, plan, smallest, group, deadline_reached, seconds=0.0)
                    )
            return times, kept, tuple(shown)
    except Exception as error:
        _warn(error)
        return compute, None, ()


def run_local_trial(
    trial_context: TrialContext, traced: TracedStep, cluster: Cluster, compute: ComputeTimes, free_bytes: int
) -> ComputeTimes:
    """Compute whose sums are those of the plain step, in a process without others; ``compute`` where that is not
    possible. Arguments as in ``run_calibration_trials``."""
    room = trial_context.available_bytes(free_bytes, None)
    try:
        with fork_rng(trial_context.device):
            return _scale_to_trial(compute, _time_unsharded_step(trial_context, traced, None, cluster, compute, room))
    except Exception as error:
        _warn(error)
        return compute


def can_measure_heap_retention(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether freed tensors can stay in the heap, and it can be told how far that grows, on all ranks. Collective."""
    here = can_measure_retention(device)
    return here if group is None else bool(all_reduce_min(int(here), group, device))


def run_heap_trial(
    trial_context: TrialContext,
    traced: TracedStep,
    group: dist.ProcessGroup | None,
    cluster: Cluster,
    compute: ComputeTimes,
    free_bytes: int,
    released: StepTiming | None = None,
    skip_measurement: bool = False,
) -> ComputeTimes | None:
    """``compute`` where freed tensors stay in the heap; None where training, with all operators replicated, leaves no
    room for the heap to grow by as much again as the copy takes, or where even this batch's are too large to stay.
    Collective where there is a group.

    Args:
        trial_context: what to rehearse.
        traced: the step; it is made at the smallest batch size.
        group: the ranks; None for a process without others.
        cluster: their number.
        compute: its sums as rehearsed where freed tensors are handed back.
        free_bytes: that this rank may take now.
        released: what such a step takes where freed tensors are handed back, if known.
        skip_measurement: whether there is no time to look, and ``ASSUMED_RETAIN_TIME_RATIO`` has to do.
    """
    model, size, room = traced.model_profile, traced.batch_sizes[0], trial_context.available_bytes(free_bytes, group)
    replicated = _uniform_plans(model, cluster)[0]
    copied, trained = (count(model, cluster, replicated, size) for count in (trial_peak_bytes, training_peak_bytes))
    if copied + max(copied, trained) > room or max_retained_batch_size(model) < size:
        return None
    if skip_measurement:
        return compute.map_lines(lambda line: line.scale(ASSUMED_RETAIN_TIME_RATIO))
    step = partial(time_release_and_retain, trial_context, size, group, _heap_bytes(copied), released)
    try:
        with fork_rng(trial_context.device):
            released, kept = step() if group is None else raise_on_all_ranks(group, step)
    except Exception as error:
        _warn(error)
        return None
    share = min(1.0, kept.step_s / released.step_s)
    return compute.map_lines(lambda line: line.scale(share))


def _scale_to_trial(compute: ComputeTimes, timings: Mapping[int, StepTiming]) -> ComputeTimes:
    """``compute`` with the sums that plain steps have."""
    took = {size: PassTimes(one.forward_s, one.step_s - one.forward_s) for size, one in timings.items()}
    return scale_to_trial(compute, took) if took else compute


def run_plan_trial(
    trial_context: TrialContext,
    traced: TracedStep,
    group: dist.ProcessGroup,
    cluster: Cluster,
    compute: ComputeTimes,
    plan: ExecutionPlan,
    free_bytes: int,
    remaining_s: Callable[[], float] = _no_time_limit,
) -> Trial | None:
    """What the step takes under a plan that was found; None where that can't be rehearsed. Collective.

    Args:
        trial_context: what to rehearse.
        traced: the step.
        group: the ranks.
        cluster: with links and engine as measured.
        compute: as measured, its sums as rehearsed.
        plan: at its batch size, or a smaller one that was traced, if that takes too long or too much.
        free_bytes: that a rehearsal may take on this rank.
        remaining_s: seconds that the start may still take. Rehearsing takes half of that at most, where it can, also when it
            is made twice; a step too long for that takes all, or is timed once, within three quarters. Collective.
    """
    sizes, model = traced.batch_sizes, traced.model_profile
    wanted = _trial_batch_sizes(plan.batch_size, sizes, trial_context.device)
    room, half_s = trial_context.available_bytes(free_bytes, group), remaining_s() / 2
    rather = [(size, min(half_s, MAX_TRIAL_S), MIN_STEPS) for size in wanted]
    least = [(sizes[0], min(share * half_s, MAX_TRIAL_S), steps) for share, steps in ((2.0, MIN_STEPS), (1.5, 1))]
    for size, longest_s, steps in rather + least:
        expected = predict_trial(model, compute, cluster, plan, size)
        if _fits_time(expected, longest_s, steps) and _fits_memory(model, cluster, plan, size, room):
            break
    else:
        return None
    try:
        with fork_rng(trial_context.device):
            likely_s = calibrated_s(expected, plan.cluster.engine.calibration)
            seconds = min(PLAN_TRIAL_S, max(TRIAL_S, half_s / 2)) if steps > 1 else 0.0
            shown = _run_trial(
                trial_context,
                expected,
                plan,
                size,
                group,
                lambda: remaining_s() < half_s,
                seconds,
                (likely_s, PLAN_RETRY_TOLERANCE),
                _heap_bytes(trial_peak_bytes(model, cluster, plan, size)) if plan.retain_freed_memory else None,
            )
    except Exception as error:
        _warn(error)
        return None
    return shown.model_copy(update={"relative_error": PLAN_TRIAL_RELATIVE_ERROR, "plan": plan.without_alternatives()})


def _trial_batch_sizes(batch_size: int, traced_sizes: Sequence[int], device: torch.device) -> Sequence[int]:
    """Batch sizes to rehearse a plan at, what says most first: on CUDA, where few samples say little, its own and then
    halves of it."""
    if len(traced_sizes) == 1:
        return traced_sizes
    if device.type != "cuda":
        return [batch_size, sum(traced_sizes) // len(traced_sizes), traced_sizes[0]]
    halves = (batch_size >> times for times in range(batch_size.bit_length()))
    return [*(size for size in halves if size > traced_sizes[0]), traced_sizes[0]]


def _time_unsharded_step(
    trial_context: TrialContext,
    traced: TracedStep,
    group: dist.ProcessGroup | None,
    cluster: Cluster,
    compute: ComputeTimes,
    available_bytes: int,
) -> dict[int, StepTiming]:
    """What the plain step takes, at the smallest traced batch size and at the largest, or the largest in between that
    fits with all operators replicated and does not take too long; on CUDA, at sizes that fill the device."""
    model, smallest = traced.model_profile, traced.batch_sizes[0]
    replicated = _uniform_plans(model, cluster)[0]
    to_fill = trial_context.device.type == "cuda" and len(traced.batch_sizes) > 1
    longest_s = SATURATED_STEP_S if to_fill else MAX_LARGE_BATCH_S

    def fits(size: int) -> bool:
        return (
            _fits_memory(model, cluster, replicated, size, available_bytes)
            and sum(pass_times(compute, size)) <= longest_s
        )

    if not _fits_memory(model, cluster, replicated, smallest, available_bytes):
        return {}
    if to_fill:
        sizes = _saturating_batch_sizes(smallest, fits)
    else:
        apart = range(traced.batch_sizes[-1], MIN_SIZE_RATIO * smallest - 1, -1)
        sizes = [smallest, *islice(filter(fits, apart), 1)]
    return time_step(trial_context, sizes, group, None)


def _saturating_batch_sizes(smallest: int, fits: Callable[[int], bool]) -> list[int]:
    """The largest batch size that ``fits``, by doubling, and half of it: a line through both holds for those beyond.
    One through fewer samples does not, which take as long as it takes to launch their kernels."""
    larger = smallest
    while fits(2 * larger):
        larger *= 2
    return sorted({max(smallest, larger // 2), larger})


def _fits_memory(model: ModelProfile, cluster: Cluster, plan: ExecutionPlan, size: int, available_bytes: float) -> bool:
    """Whether there is room for the step, and some more for what is not counted: a control group's limit ends the
    process."""
    return (
        MEMORY_MARGIN * (1 + HEAP_GROWTH * plan.retain_freed_memory) * trial_peak_bytes(model, cluster, plan, size)
        <= available_bytes
    )


def _heap_bytes(copied_bytes: int) -> int:
    """Room for freed tensors of a copy."""
    return int((1 + HEAP_GROWTH) * copied_bytes)


def _fits_time(predicted: Trial, max_trial_s: float = MAX_TRIAL_S, steps: int = MIN_STEPS) -> bool:
    """Whether that many timed steps end in time. Of a long one, a single one tells what parts can't."""
    return predicted.predicted_s * (WARMUP_STEPS + steps) < max_trial_s


def _warn(error: Exception) -> None:
    """Whatever the user's code has raised: it will in training, too, or it minds being copied."""
    text = f"the step can't be rehearsed, so its time is less sure: {error}"
    warnings.warn(text, OSDPWarning, stacklevel=3)


def _uniform_plans(model_profile: ModelProfile, cluster: Cluster) -> tuple[ExecutionPlan, ...]:
    """All operators replicated, sharded inside nodes where there are two levels, and in the other modes, as far as they
    can; where blocks may share units, kept parameters do."""
    apart, *joined = wrap_assignments(model_profile, UNCONSTRAINED)
    together = joined[-1] if joined else apart
    inside = (
        [(Mode.ZDP2, together, ShardingScope.NODE)] if (ShardingScope.NODE, False) in available_scopes(cluster) else []
    )
    everywhere = [(Mode.ZDP2, together, ShardingScope.WORLD), (Mode.ZDP, apart, ShardingScope.WORLD)]
    kinds = [(Mode.DP, apart, ShardingScope.WORLD), *inside, *everywhere]
    return tuple(_uniform_plan(model_profile, cluster, *kind) for kind in kinds)


def _run_trial(
    trial_context: TrialContext,
    predicted: Trial,
    plan: ExecutionPlan,
    size: int,
    group: dist.ProcessGroup,
    deadline_reached: Callable[[], bool],
    seconds: float = TRIAL_S,
    expected_time: tuple[float, float] | None = None,
    heap_bytes: int | None = None,
) -> Trial:
    """With what it took. Where that is not ``expected_time`` (seconds, and a share of them; as foreseen if None), it is tried
    once more unless it is ``deadline_reached``: if both agree, that is it, else one of them was disturbed, and the less counts."""
    likely_s, odd = expected_time or (predicted.predicted_s, RETRY_TOLERANCE)

    def time_once() -> StepTiming:
        step = partial(time_step, trial_context, [size], group, plan, seconds, heap_bytes)
        return raise_on_all_ranks(group, step)[size]

    tries = [time_once()]
    if tries[0].step_s <= NO_RETRY_ABOVE_S and abs(tries[0].step_s / likely_s - 1) > odd and not deadline_reached():
        tries.append(time_once())
    if (
        max(tries).step_s / min(tries).step_s - 1 > RETRY_TOLERANCE
    ):  # else the mean: the less would be less than a step takes
        tries = [min(tries)]
    took = StepTiming(*map(statistics.mean, zip(*tries, strict=True)))
    # on CUDA, what the host waits for is not what the device does
    waited_s = took.exposed_comm_s if is_driven_by_host(trial_context.device) else None
    return predicted.model_copy(update={"measured_s": took.step_s, "exposed_comm_s": waited_s})


def _cheapest_first(uniform_plans: Sequence[ExecutionPlan]) -> list[ExecutionPlan]:
    """What is sharded inside nodes even before what is replicated: that is what the search finds next to it where there
    is memory, and what was found is rehearsed anyway."""
    return sorted(uniform_plans, key=lambda plan: all(op.sharding_group != ShardingScope.NODE for op in plan.operators))


def _uniform_plan(
    model_profile: ModelProfile, cluster: Cluster, mode: Mode, units: WrapAssignment, scope: ShardingScope
) -> ExecutionPlan:
    operators = (
        OperatorPlan(
            name=operator.name,
            slices=uniform_choice(operator, mode).slices,
            sharding_group=scope,
            unit=unit,
            num_parameters=operator.num_parameters,
            replicated_reason=operator.replicated_reason,
        )
        for operator, unit in zip(model_profile.operators, units, strict=True)
    )
    return ExecutionPlan.minimal(operators, cluster.model_copy(update={"prefetch_max_bytes": 0}))

"""Steps on a copy of the user's module: what they take, with whatever plan, while the module stays as it is.

The copy needs memory for gradients, activations and what is sharded, but it shares whole parameters with the module and
has no optimizer states.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.backend.agree import all_reduce_max, all_reduce_min
from lightning_osdp.backend.allocator import retain_freed_memory
from lightning_osdp.backend.memory import growth_reserve, trim
from lightning_osdp.backend.timer import elapsed_s, record_event, synchronize
from lightning_osdp.backend.work import COMM_WAIT
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.sliced_operator import release_storage
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling.tracing.optimizer_step import build_optimizers
from lightning_osdp.profiling.tracing.stand_ins import (
    detached_from_trainer,
    extract_loss,
    lazy_clone,
    lazy_clone_bytes,
    move_batch,
    real_batch,
    step_arguments,
)

TRIAL_S = 1.5
"""About how long each rehearsal takes."""

MIN_STEPS, MAX_STEPS, WARMUP_STEPS = 3, 9, 1
"""Steps that are timed within that, if they take no more than half as long again, and those before them."""

CUDA_WARMUP_STEPS = 2
"""The latter on CUDA: in the first, kernels are loaded and memory is taken, and it says little of how long steps take.
"""

ALTERNATIONS, SLOW_STEP_S, SLOW_TRIAL_S = 2, 0.4, 1.0
"""How often steps are made with either use of the heap, twice each time. Steps that take longer are not made in turns;
of those that were timed before, only where freed tensors stay, for so many seconds, as there may be no time for more.
[measured, I&C, 4 ranks on 2 cores, steps of 0.55 s: from a single one 0.75 of the time, and 0.85]"""

GC_GENERATION = 1
"""Generation of Python's objects up to which a copy is looked for when it is no longer needed."""


class StepTiming(NamedTuple):
    """What a step takes, means of the rank with most."""

    step_s: float
    exposed_comm_s: float = 0.0
    """Part of the seconds in which it waited for collectives."""
    forward_s: float = 0.0
    """Part of the seconds that the forward pass took."""

    @property
    def is_slow(self) -> bool:
        """Whether such a step is made as seldom as may be."""
        return self.step_s >= SLOW_STEP_S


StepFunction = Callable[[], Any]
"""Forward and backward; returns the instant between them (``instants``)."""

TimingProcedure = Callable[[Sequence[StepFunction]], list[StepTiming]]
"""What is done with steps, one for each batch size."""


@dataclass(frozen=True)
class TrialContext:
    """What a step is rehearsed with.

    Attributes:
        module: the user's; it is copied.
        batch: as the data loader gives it.
        batch_size: samples in it.
        device: of this rank.
        step_context: what ``training_step`` runs in (autocast).
    """

    module: LightningModule
    batch: Any
    batch_size: int
    device: torch.device
    step_context: Callable[[], AbstractContextManager[Any]]

    def available_bytes(self, free_bytes: int, group: dist.ProcessGroup | None) -> int:
        """The least that a step may take on any rank of ``free_bytes``, beside the copy and a process's first steps;
        below 0 where it can't be repeated. Collective."""
        own = free_bytes - lazy_clone_bytes(self.module, self.device) - growth_reserve(self.device, after_trial=False)
        room = own if self.is_repeatable else -1
        return room if group is None else int(all_reduce_min(room, group, self.device))

    @property
    def is_repeatable(self) -> bool:
        """Not if the module steps its optimizers itself, has no values yet, or would have to be compiled again."""
        return (
            self.module.automatic_optimization
            and not any(parameter.is_meta for parameter in self.module.parameters())
            and not any(isinstance(each, torch._dynamo.OptimizedModule) for each in self.module.modules())
        )


def time_step(
    trial_context: TrialContext,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    plan: ExecutionPlan | None,
    seconds: float = TRIAL_S,
    heap_bytes: int | None = None,
) -> dict[int, StepTiming]:
    """What forward and backward take, by batch size. It lasts for about ``time_s``.

    Args:
        trial_context: the module and its batch.
        sizes: of batches.
        group: the ranks; None for a process without others.
        plan: what is carried out; None for the plain module.
        seconds: for all sizes together.
        heap_bytes: that freed tensors may take which stay in the heap; None if they are handed back.
    """
    means: TimingProcedure = partial(_time_repeats, group=group, device=trial_context.device, seconds=seconds)
    if heap_bytes is not None:
        means = partial(_with_retained_heap, means, heap_bytes)
    return dict(zip(sizes, _with_module_copy(trial_context, sizes, group, plan, means), strict=True))


def time_release_and_retain(
    trial_context: TrialContext,
    size: int,
    group: dist.ProcessGroup | None,
    heap_bytes: int,
    released: StepTiming | None = None,
) -> tuple[StepTiming, StepTiming]:
    """What forward and backward of the plain module take where freed tensors are handed back, and where they stay in
    a heap of so much room. Both take turns, unless the first is ``released_intervals`` to be long: other work on the machine lasts
    for some seconds at times."""
    if released is not None and released.is_slow:
        return released, time_step(trial_context, [size], group, None, SLOW_TRIAL_S, heap_bytes)[size]
    means: TimingProcedure = partial(_time_repeats, group=group, device=trial_context.device, seconds=0.0)
    usual, kept = _with_module_copy(trial_context, [size], group, None, partial(_alternate, means, heap_bytes))
    return usual, kept


def release_and_retain_duration_s(released: StepTiming) -> float:
    """About how long ``time_release_and_retain`` lasts."""
    steps = (
        WARMUP_STEPS + _num_repeats(released.step_s, SLOW_TRIAL_S)
        if released.is_slow
        else 2 * ALTERNATIONS * (WARMUP_STEPS + 1)
    )
    return steps * released.step_s


def _with_module_copy(
    trial_context: TrialContext,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    plan: ExecutionPlan | None,
    time_steps: TimingProcedure,
) -> list[StepTiming]:
    """What ``time_steps`` makes of steps on a copy, of which nothing is left."""
    twin = lazy_clone(trial_context.module)
    engine = None if plan is None else FairScaleEngine(trial_context.device, group, broadcast=False)
    try:
        return _run_on_copy(twin, engine, trial_context, sizes, plan, time_steps)
    finally:
        release_storage(twin.parameters())
        if engine is not None:
            engine.close()
        del twin, engine
        trim(trial_context.device, GC_GENERATION)


class _NoOpOptimizer(Optimizer):
    """Stands in for the optimizer of a plan that updates in the backward pass: gradients are freed as they come there,
    and so they are in the copy, which may have room for no others."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @override
    def step(self, closure: Any = None) -> Any:
        """Changes nothing."""


def _run_on_copy(
    module_copy: LightningModule,
    engine: FairScaleEngine | None,
    trial_context: TrialContext,
    sizes: Sequence[int],
    plan: ExecutionPlan | None,
    time_steps: TimingProcedure,
) -> list[StepTiming]:
    if engine is None or plan is None:
        module_copy.to(trial_context.device)
    else:
        engine.apply(module_copy, plan, [_NoOpOptimizer(module_copy.parameters())] if plan.update_in_backward else ())
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    with detached_from_trainer(module_copy, optimizers, schedulers), torch.compiler.set_stance("force_eager"):
        with engine.unsharded_shapes() if engine is not None else nullcontext():
            optimizers[:], schedulers[:] = build_optimizers(module_copy)
        batches = [
            move_batch(
                module_copy, real_batch(trial_context.batch, trial_context.batch_size, size), trial_context.device
            )
            for size in sizes
        ]
        steps = [partial(_forward_backward, trial_context, module_copy, batch, engine) for batch in batches]
        return time_steps(steps)


def _forward_backward(
    trial_context: TrialContext, module_copy: LightningModule, batch: Any, engine: FairScaleEngine | None
) -> Any:
    """Forward and backward; gradients are freed. Returns the instant between them."""
    if engine is not None:
        engine.before_forward()
    with trial_context.step_context():
        output = module_copy.training_step(*step_arguments(module_copy, batch))
    middle = record_event(trial_context.device)
    module_copy.backward(extract_loss(output))
    if engine is not None:
        engine.finish_backward()
        engine.after_optimizer_step()
    module_copy.zero_grad(set_to_none=True)
    return middle


def _with_retained_heap(
    time_steps: TimingProcedure, heap_bytes: int, steps: Sequence[StepFunction]
) -> list[StepTiming]:
    """``time_steps`` where freed tensors stay in the heap."""
    with retain_freed_memory(heap_bytes):
        return time_steps(steps)


def _alternate(time_steps: TimingProcedure, heap_bytes: int, steps: Sequence[StepFunction]) -> list[StepTiming]:
    """``time_release_and_retain`` of one step."""
    usual: list[StepTiming] = []
    kept: list[StepTiming] = []
    while len(usual) < (1 if usual and usual[0].is_slow else ALTERNATIONS):
        usual += time_steps(steps)
        kept += _with_retained_heap(time_steps, heap_bytes, steps)
    return [StepTiming(*map(statistics.mean, zip(*each, strict=True))) for each in (usual, kept)]


def _time_repeats(
    steps: Sequence[StepFunction], group: dist.ProcessGroup | None, device: torch.device, seconds: float
) -> list[StepTiming]:
    """Of some repetitions in turn. Of so few a median is off by more [measured, 37 plans: 9.0 % of what training takes,
    means 8.3 %], and a step that is disturbed makes ``_run_trial`` look again.

    Of several that take long on a CPU the turn that is to warm up counts, but for the first one, which warms up for the
    others. [measured, language model, 4 ranks on 2 cores, 8 samples after 2: 2.07 and 2.19 s, later 1.73 to 2.26]
    On CUDA the median counts: the allocator may still take memory in the first of them.
    """
    on_cuda = device.type == "cuda"
    typical = statistics.median if on_cuda else statistics.mean

    def time_each_once(steps: Sequence[StepFunction]) -> list[StepTiming]:
        took = []
        for step in steps:
            synchronize(device)
            if group is not None:
                dist.barrier(group)
            start, waited_s = record_event(device), COMM_WAIT.seconds
            middle = step()
            synchronize(device)
            end = record_event(device)
            took.append(StepTiming(elapsed_s(start, end), COMM_WAIT.seconds - waited_s, elapsed_s(start, middle)))
        return took

    def max_over_ranks(timings: Sequence[StepTiming]) -> list[StepTiming]:
        if group is None:
            return list(timings)
        numbers = iter(all_reduce_max([each for one in timings for each in one], group, device))
        return [StepTiming(*each) for each in zip(numbers, numbers, numbers, strict=True)]

    for _ in range(CUDA_WARMUP_STEPS if on_cuda else WARMUP_STEPS):
        first = max_over_ranks(time_each_once(steps))
    first_s = sum(one.step_s for one in first)
    if not on_cuda and len(steps) > 1 and first_s > seconds:
        return [*max_over_ranks(time_each_once(steps[:1])), *first[1:]]
    turns = zip(*(time_each_once(steps) for _ in range(_num_repeats(first_s, seconds))), strict=True)
    return max_over_ranks([StepTiming(*map(typical, zip(*each, strict=True))) for each in turns])


def _num_repeats(step_s: float, seconds: float) -> int:
    """How often steps of ``step_s`` are timed within about ``time_s``."""
    least = max(1, min(MIN_STEPS, int(1.5 * seconds / step_s)))
    return min(MAX_STEPS, max(least, int(seconds / step_s)))

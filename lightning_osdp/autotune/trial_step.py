"""Timed steps on a copy of the user's module, under any plan. The module itself stays as it is.

The copy needs memory for gradients, activations and sharded parameters. It shares its other parameters with the module
and has no optimizer states.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import SLOW_STEP_S, SLOW_TRIAL_S, TRIAL_S
from lightning_osdp.backend import memory
from lightning_osdp.backend.agree import is_lost_connection
from lightning_osdp.backend.allocator import retain_freed_memory
from lightning_osdp.backend.timer import elapsed_s, record_event, synchronize
from lightning_osdp.backend.work import COMM_WAIT
from lightning_osdp.engine.base import Engine, create_engine
from lightning_osdp.errors import RecoverableError, format_error
from lightning_osdp.planning.spec.capabilities import DEFAULT_ENGINE
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling.tracing.isolation import isolated
from lightning_osdp.profiling.tracing.optimizer_step import build_optimizers
from lightning_osdp.profiling.tracing.stand_ins import (
    detached_from_trainer,
    extract_loss,
    fork_rng,
    lazy_clone,
    lazy_clone_bytes,
    move_batch,
    real_batch,
    step_arguments,
)

MIN_STEPS, MAX_STEPS, WARMUP_STEPS = 3, 9, 1
"""Timed steps of a trial, if these take at most half as long again as the trial should, and steps before them."""

CUDA_WARMUP_STEPS = 2
"""Warm-up steps on CUDA. The first one loads kernels and takes memory: its time says little of how many to make."""

MAX_NEW_PAGES, MAX_REPEATED_STEPS = 0.1, 2
"""A step with freed tensors retained is made again while it takes more than this fraction of the new pages that it
takes if they are released, and at most this often."""

FILLED_NUMEL = 1 << 20
"""Elements of a tensor that is filled to time new pages: 4 MiB, which glibc maps and unmaps."""

ALTERNATIONS = 2
"""How often the two heap policies take turns, twice each time."""

GC_GENERATION = 1
"""Generation of Python's objects up to which garbage of a copy is collected."""


class TrialError(RecoverableError):
    """The user's step failed in a trial, or the module can't be copied."""


class StepTiming(NamedTuple):
    """The time of a step on the slowest rank, averaged over repeats."""

    step_s: float
    exposed_comm_s: float = 0.0
    """Time within the step in which it waited for collectives."""
    forward_s: float = 0.0
    """Time of the forward pass."""
    page_faults: float = 0.0
    """Pages that the system had to provide (CPU)."""

    @property
    def is_slow(self) -> bool:
        """Return whether such a step is repeated as rarely as possible."""
        return self.step_s >= SLOW_STEP_S


StepFunction = Callable[[], Any]
"""Runs forward and backward; returns the event between them (``backend.timer``)."""


@dataclass(frozen=True)
class TrialContext:
    """The user's step.

    Attributes:
        module: the user's module, which is copied.
        batch: a batch as the data loader gives it.
        batch_size: number of samples in ``batch``.
        device: device of this rank.
        step_context: makes the context that ``training_step`` runs in (autocast).
        engine: name of the engine that applies plans.
        largest_batch: a batch of as many samples that takes more memory; None if ``batch`` does.
        tensor_degrees: numbers of ranks that operators may be cut over; empty if none may be.
    """

    module: LightningModule
    batch: Any
    batch_size: int
    device: torch.device
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    engine: str = DEFAULT_ENGINE
    largest_batch: Any = None
    tensor_degrees: tuple[int, ...] = ()

    def available_bytes(self, free_bytes: int, ranks: RankGroup, progress: memory.Progress) -> int:
        """Return the bytes that a step of the copy may take on the rank with least.

        That is ``free_bytes`` without the copy, and without what steps still leave in the process (``growth_reserve``).
        Negative if the step can't be repeated. Collective: every rank must call it.
        """
        own = free_bytes - lazy_clone_bytes(self.module, self.device) - memory.growth_reserve(self.device, progress)
        return ranks.all_reduce_min(own if self.is_repeatable else -1)

    @property
    def is_repeatable(self) -> bool:
        """Return whether the step can run on a copy.

        It can't if the module steps its optimizers itself, has no values yet, or would have to be compiled again.
        """
        return (
            self.module.automatic_optimization
            and not any(parameter.is_meta for parameter in self.module.parameters())
            and not any(isinstance(inner, torch._dynamo.OptimizedModule) for inner in self.module.modules())
        )


def time_step(
    trial_context: TrialContext,
    sizes: Sequence[int],
    ranks: RankGroup,
    plan: ExecutionPlan | None,
    duration_s: float = TRIAL_S,
    heap_bytes: int | None = None,
    *,
    frees_gradients: bool = False,
) -> dict[int, StepTiming]:
    """Time forward and backward, by batch size. Collective: every rank must call it.

    Args:
        trial_context: the user's step.
        sizes: batch sizes.
        ranks: the ranks.
        plan: the plan to run; None for the unsharded module.
        duration_s: approximate time for all batch sizes together.
        heap_bytes: maximum bytes of freed tensors retained in the heap; None to release them.
        frees_gradients: whether each gradient of the unsharded module is freed as soon as it is made.

    Raises:
        TrialError: the user's step fails, or the module can't be copied.
    """
    heap = nullcontext() if heap_bytes is None else retain_freed_memory(heap_bytes)
    copied = _copied_steps(trial_context, sizes, ranks, plan, frees_gradients=frees_gradients)
    with fork_rng(trial_context.device), copied as steps, heap:
        return dict(zip(sizes, _time_repeats(steps, ranks, trial_context.device, duration_s=duration_s), strict=True))


def time_release_and_retain(
    trial_context: TrialContext, size: int, ranks: RankGroup, heap_bytes: int, released: StepTiming
) -> tuple[StepTiming, StepTiming]:
    """Time forward and backward of the unsharded module with either heap policy. Collective: every rank must call it.

    The policies alternate, since other work on a machine lasts for seconds at times. If ``released``, the known time
    with freed tensors released, is slow, it is returned as it is.

    Raises:
        TrialError: the user's step fails, or the module can't be copied.
    """
    if released.is_slow:
        return released, _time_filled_heap(trial_context, size, ranks, heap_bytes, released)
    timings: tuple[list[StepTiming], list[StepTiming]] = ([], [])
    with fork_rng(trial_context.device), _copied_steps(trial_context, [size], ranks, None) as steps:
        for _ in range(ALTERNATIONS):
            timings[0].extend(_time_repeats(steps, ranks, trial_context.device, duration_s=0.0))
            with retain_freed_memory(heap_bytes):
                timings[1].extend(_time_repeats(steps, ranks, trial_context.device, duration_s=0.0))
            if timings[0][0].is_slow:
                break
    return _average(statistics.mean, timings[0]), _average(statistics.mean, timings[1])


def time_filling(ranks: RankGroup, device: torch.device) -> tuple[StepTiming, StepTiming]:
    """Time filling a new tensor, and filling one whose pages are there already [M-autotune-14]. Collective.

    All ranks do so at the same time, since they share the memory's bandwidth.
    """
    filled = torch.ones(FILLED_NUMEL)

    def fill_new() -> Any:
        torch.ones(FILLED_NUMEL)
        return record_event(device)

    def fill_again() -> Any:
        filled.fill_(1.0)
        return record_event(device)

    steps = [fill_new, fill_again]
    repeats = [_time_each_once(steps, ranks, device) for _ in range(WARMUP_STEPS + MAX_STEPS)]
    new, old = (_average(statistics.median, timings) for timings in zip(*repeats[WARMUP_STEPS:], strict=True))
    new, old = _max_over_ranks([new, old], ranks)
    return new, old


def _time_filled_heap(
    trial_context: TrialContext, size: int, ranks: RankGroup, heap_bytes: int, released: StepTiming
) -> StepTiming:
    """Time the steps that find most of their memory in the heap, or if none does, the last one [M-autotune-13].

    Collective: every rank must call it.
    """
    device, heap, steady = trial_context.device, retain_freed_memory(heap_bytes), list[StepTiming]()
    with fork_rng(device), _copied_steps(trial_context, [size], ranks, None) as steps, heap:
        (warmup,) = _max_over_ranks(_time_each_once(steps, ranks, device), ranks)
        repeats = _num_repeats(warmup.step_s, SLOW_TRIAL_S)
        for _ in range(repeats + MAX_REPEATED_STEPS):
            (timing,) = _max_over_ranks(_time_each_once(steps, ranks, device), ranks)
            if timing.page_faults <= MAX_NEW_PAGES * released.page_faults:
                steady.append(timing)
            if len(steady) == repeats:
                break
    return _average(statistics.mean, steady or [timing])


def release_and_retain_duration_s(released: StepTiming) -> float:
    """Return the approximate duration of ``time_release_and_retain``."""
    if released.is_slow:
        num_steps = WARMUP_STEPS + _num_repeats(released.step_s, SLOW_TRIAL_S)
    else:
        num_steps = 2 * ALTERNATIONS * (WARMUP_STEPS + 1)
    return num_steps * released.step_s


# -- the copy ----------------------------------------------------------------------------------------------------------


_ENGINE_ERRORS = (RuntimeError, MemoryError)
"""Errors that are no faults of the engine: of allocators, devices and process groups, and ``ShardingError``."""


@contextmanager
def _raise_trial_error(errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Raise ``errors`` as ``TrialError``: any error where the user's code runs."""
    try:
        yield
    except TrialError:
        raise
    except errors as error:
        if is_lost_connection(error):
            raise  # another rank is gone: there is nothing to go on with
        traceback.clear_frames(error.__traceback__)  # they hold tensors, and there may be no memory
        failed = f"rank {dist.get_rank()} failed: " if dist.is_initialized() else ""
        raise TrialError(f"{failed}{format_error(error)}") from error


class _NoOpOptimizer(Optimizer):
    """Stands in for the optimizer of a plan that updates in the backward pass, so that gradients are freed there."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @override
    def step(self, closure: Any = None) -> Any:
        """Change nothing."""


@contextmanager
def _copied_steps(
    trial_context: TrialContext,
    sizes: Sequence[int],
    ranks: RankGroup,
    plan: ExecutionPlan | None,
    *,
    frees_gradients: bool = False,
) -> Iterator[list[StepFunction]]:
    """Yield a step for each batch size on a copy of the module, and free all of the copy afterwards."""
    device = trial_context.device
    with _raise_trial_error():
        module_copy = lazy_clone(trial_context.module)
    engine = None if plan is None else create_engine(trial_context.engine, device, ranks.group, broadcast=False)
    steps: list[StepFunction] = []
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    try:
        with isolated(trial_context.module), _raise_trial_error(_ENGINE_ERRORS):
            ranks.raise_on_all_ranks(partial(_put_on_device, module_copy, device, engine, plan))
            if frees_gradients:
                _free_gradients_as_made(module_copy)
            with detached_from_trainer(module_copy, optimizers, schedulers), torch.compiler.set_stance("force_eager"):
                optimizers[:], schedulers[:] = ranks.raise_on_all_ranks(partial(_build_optimizers, module_copy, engine))
                moved = ranks.raise_on_all_ranks(partial(_move_batches, trial_context, module_copy, sizes))
                steps += [partial(_forward_backward, trial_context, module_copy, batch, engine) for batch in moved]
                moved.clear()
                yield steps
    finally:
        steps.clear()
        if engine is not None:
            engine.close()
        for parameter in module_copy.parameters():  # others may still refer to them
            parameter.data = parameter.data.new_empty(0)
        del module_copy, engine
        memory.trim(device, GC_GENERATION)


def _free_gradients_as_made(module_copy: LightningModule) -> None:
    def free(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in module_copy.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(free)  # type: ignore[no-untyped-call]


def _build_optimizers(module_copy: LightningModule, engine: Engine | None) -> tuple[list[Any], list[Any]]:
    with engine.unsharded_shapes() if engine is not None else nullcontext(), _raise_trial_error():
        return build_optimizers(module_copy)


def _move_batches(trial_context: TrialContext, module_copy: LightningModule, sizes: Sequence[int]) -> list[Any]:
    with _raise_trial_error():
        batches = (real_batch(trial_context.batch, trial_context.batch_size, size) for size in sizes)
        return [move_batch(module_copy, batch, trial_context.device) for batch in batches]


def _put_on_device(
    module_copy: LightningModule, device: torch.device, engine: Engine | None, plan: ExecutionPlan | None
) -> None:
    if engine is None or plan is None:
        with _raise_trial_error():
            module_copy.to(device)
        return
    with _raise_trial_error(_ENGINE_ERRORS):
        engine.apply(module_copy, plan, [_NoOpOptimizer(module_copy.parameters())] if plan.update_in_backward else [])


def _forward_backward(
    trial_context: TrialContext, module_copy: LightningModule, batch: Any, engine: Engine | None
) -> Any:
    """Run forward and backward and free the gradients; return the event between the passes.

    Where that fails on this rank, others may be in the middle of the same step, with collectives that need this rank.
    """
    try:
        with _raise_trial_error(_ENGINE_ERRORS):
            event = _run_passes(trial_context, module_copy, batch, engine)
    except TrialError:
        with _raise_trial_error():
            module_copy.zero_grad(set_to_none=True)
        if engine is not None:
            engine.leave_step()
        raise
    with _raise_trial_error():
        module_copy.zero_grad(set_to_none=True)
    return event


def _run_passes(trial_context: TrialContext, module_copy: LightningModule, batch: Any, engine: Engine | None) -> Any:
    if engine is not None:
        engine.before_forward()
    with _raise_trial_error():
        with trial_context.step_context():
            output = module_copy.training_step(*step_arguments(module_copy, batch))
        event = record_event(trial_context.device)
        module_copy.backward(extract_loss(output))
    if engine is not None:
        engine.finish_backward()
        engine.after_optimizer_step()
    return event


# -- how repeats are timed ---------------------------------------------------------------------------------------------


def _time_repeats(
    steps: Sequence[StepFunction], ranks: RankGroup, device: torch.device, duration_s: float
) -> list[StepTiming]:
    """Time each step several times, within about ``duration_s`` for all; the slowest rank counts.

    On CUDA medians are taken, since the allocator may still take memory in the first of the repeats; on the CPU means,
    which for few repeats are closer to training [M-autotune-5].
    """
    is_cuda = device.type == "cuda"
    for _ in range(CUDA_WARMUP_STEPS if is_cuda else WARMUP_STEPS):
        warmup = _max_over_ranks(_time_each_once(steps, ranks, device), ranks)
    total_s = sum(timing.step_s for timing in warmup)
    if not is_cuda and len(steps) > 1 and total_s > duration_s:
        # Only the first step again: it has warmed up the process for the others [M-autotune-6].
        return [*_max_over_ranks(_time_each_once(steps[:1], ranks, device), ranks), *warmup[1:]]
    repeats = [_time_each_once(steps, ranks, device) for _ in range(_num_repeats(total_s, duration_s))]
    average = statistics.median if is_cuda else statistics.mean
    return _max_over_ranks([_average(average, timings) for timings in zip(*repeats, strict=True)], ranks)


def _time_each_once(steps: Sequence[StepFunction], ranks: RankGroup, device: torch.device) -> list[StepTiming]:
    """Time each step on this rank; raise an error of one rank on all, which go on together then."""
    timings = []
    for step in steps:
        synchronize(device)
        ranks.barrier()
        timings.append(ranks.raise_on_all_ranks(partial(_time_once, step, device)))
    return timings


def _time_once(step: StepFunction, device: torch.device) -> StepTiming:
    page_faults = memory.page_faults(device)
    start, waited_s = record_event(device), COMM_WAIT.seconds
    with _raise_trial_error(_ENGINE_ERRORS):
        middle = step()
        synchronize(device)
    end = record_event(device)
    comm_s, page_faults = COMM_WAIT.seconds - waited_s, memory.page_faults(device) - page_faults
    return StepTiming(elapsed_s(start, end), comm_s, elapsed_s(start, middle), page_faults)


def _max_over_ranks(timings: Sequence[StepTiming], ranks: RankGroup) -> list[StepTiming]:
    numbers = iter(ranks.all_reduce_max([number for timing in timings for number in timing]))
    return [StepTiming(*islice(numbers, len(timing))) for timing in timings]


def _average(average: Callable[[Sequence[float]], float], timings: Sequence[StepTiming]) -> StepTiming:
    return StepTiming(*map(average, zip(*timings, strict=True)))


def _num_repeats(step_s: float, duration_s: float) -> int:
    """Return how often steps that take ``step_s`` together are timed within about ``duration_s``."""
    minimum = max(1, min(MIN_STEPS, int(1.5 * duration_s / step_s)))
    return min(MAX_STEPS, max(minimum, int(duration_s / step_s)))

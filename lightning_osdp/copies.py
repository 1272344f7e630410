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

from lightning_osdp.collectives import WAITED, largest_of_ranks, least_room
from lightning_osdp.instants import instant, seconds_between, synchronize
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.profiling.heap import HEAP
from lightning_osdp.profiling.memory import allowance, release_unused
from lightning_osdp.profiling.optimizers import configured
from lightning_osdp.profiling.standins import (
    copied_bytes,
    loss_of,
    real_batch,
    real_copy,
    silenced,
    step_arguments,
    transferred,
)
from lightning_osdp.sharding.fairscale import FairScaleEngine
from lightning_osdp.sharding.splitting import forget

SECONDS = 1.5
"""About how long each rehearsal takes."""

FEWEST, MOST, WARM_UP = 3, 9, 1
"""Steps that are timed within that, if they take no more than half as long again, and those before them."""

CUDA_WARM_UP = 2
"""The latter on CUDA: in the first, kernels are loaded and memory is taken, and it says little of how long steps take.
"""

TURNS, SHORT_S, LONG_SECONDS = 2, 0.4, 1.0
"""How often steps are made with either use of the heap, twice each time. Steps that take longer are not made in turns;
of those that were timed before, only where freed tensors stay, for so many seconds, as there may be no time for more.
[measured, I&C, 4 ranks on 2 cores, steps of 0.55 s: from a single one 0.75 of the time, and 0.85]"""

GARBAGE = 1
"""Generation of Python's objects up to which a copy is looked for when it is no longer needed."""


class Took(NamedTuple):
    """What a step takes, means of the rank with most."""

    step_s: float
    waited_s: float = 0.0
    """Part of the seconds in which it waited for collectives."""
    forward_s: float = 0.0
    """Part of the seconds that the forward pass took."""

    @property
    def long(self) -> bool:
        """Whether such a step is made as seldom as may be."""
        return self.step_s >= SHORT_S


Step = Callable[[], Any]
"""Forward and backward; returns the instant between them (``instants``)."""

Work = Callable[[Sequence[Step]], list[Took]]
"""What is done with steps, one for each batch size."""


@dataclass(frozen=True)
class Stage:
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

    def room(self, room_bytes: int, group: dist.ProcessGroup | None) -> int:
        """The least that a step may take on any rank of ``room_bytes``, beside the copy and a process's first steps;
        below 0 where it can't be repeated. Collective."""
        own = room_bytes - copied_bytes(self.module, self.device) - allowance(self.device, stepped=False)
        room = own if self.repeatable else -1
        return room if group is None else int(least_room(room, group, self.device))

    @property
    def repeatable(self) -> bool:
        """Not if the module steps its optimizers itself, has no values yet, or would have to be compiled again."""
        return (
            self.module.automatic_optimization
            and not any(parameter.is_meta for parameter in self.module.parameters())
            and not any(isinstance(each, torch._dynamo.OptimizedModule) for each in self.module.modules())
        )


def timed(
    stage: Stage,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    plan: ExecutionPlan | None,
    seconds: float = SECONDS,
    heap_bytes: int | None = None,
) -> dict[int, Took]:
    """What forward and backward take, by batch size. It lasts for about ``seconds``.

    Args:
        stage: the module and its batch.
        sizes: of batches.
        group: the ranks; None for a process without others.
        plan: what is carried out; None for the plain module.
        seconds: for all sizes together.
        heap_bytes: that freed tensors may take which stay in the heap; None if they are handed back.
    """
    means: Work = partial(_means, group=group, device=stage.device, seconds=seconds)
    if heap_bytes is not None:
        means = partial(_kept, means, heap_bytes)
    return dict(zip(sizes, _on_copy(stage, sizes, group, plan, means), strict=True))


def handed_back_and_kept(
    stage: Stage, size: int, group: dist.ProcessGroup | None, heap_bytes: int, known: Took | None = None
) -> tuple[Took, Took]:
    """What forward and backward of the plain module take where freed tensors are handed back, and where they stay in
    a heap of so much room. Both take turns, unless the first is ``known`` to be long: other work on the machine lasts
    for some seconds at times."""
    if known is not None and known.long:
        return known, timed(stage, [size], group, None, LONG_SECONDS, heap_bytes)[size]
    means: Work = partial(_means, group=group, device=stage.device, seconds=0.0)
    usual, kept = _on_copy(stage, [size], group, None, partial(_in_turns, means, heap_bytes))
    return usual, kept


def in_turns_s(known: Took) -> float:
    """About how long ``handed_back_and_kept`` lasts."""
    steps = WARM_UP + _repeats(known.step_s, LONG_SECONDS) if known.long else 2 * TURNS * (WARM_UP + 1)
    return steps * known.step_s


def _on_copy(
    stage: Stage, sizes: Sequence[int], group: dist.ProcessGroup | None, plan: ExecutionPlan | None, work: Work
) -> list[Took]:
    """What ``work`` makes of steps on a copy, of which nothing is left."""
    twin = real_copy(stage.module)
    engine = None if plan is None else FairScaleEngine(stage.device, group, broadcast=False)
    try:
        return _on(twin, engine, stage, sizes, plan, work)
    finally:
        forget(twin.parameters())
        if engine is not None:
            engine.forget_slices()
        del twin, engine
        release_unused(stage.device, GARBAGE)


class _Freeing(Optimizer):
    """Stands in for the optimizer of a plan that updates in the backward pass: gradients are freed as they come there,
    and so they are in the copy, which may have room for no others."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @override
    def step(self, closure: Any = None) -> Any:
        """Changes nothing."""


def _on(
    twin: LightningModule,
    engine: FairScaleEngine | None,
    stage: Stage,
    sizes: Sequence[int],
    plan: ExecutionPlan | None,
    work: Work,
) -> list[Took]:
    if engine is None or plan is None:
        twin.to(stage.device)
    else:
        engine.apply(twin, plan, [_Freeing(twin.parameters())] if plan.update_in_backward else ())
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    with silenced(twin, optimizers, schedulers), torch.compiler.set_stance("force_eager"):
        with engine.whole_shapes() if engine is not None else nullcontext():
            optimizers[:], schedulers[:] = configured(twin)
        batches = [transferred(twin, real_batch(stage.batch, stage.batch_size, size), stage.device) for size in sizes]
        steps = [partial(_step, stage, twin, batch, engine) for batch in batches]
        return work(steps)


def _step(stage: Stage, twin: LightningModule, batch: Any, engine: FairScaleEngine | None) -> Any:
    """Forward and backward; gradients are freed. Returns the instant between them."""
    if engine is not None:
        engine.before_forward()
    with stage.step_context():
        output = twin.training_step(*step_arguments(twin, batch))
    middle = instant(stage.device)
    twin.backward(loss_of(output))
    if engine is not None:
        engine.finish_backward()
        engine.after_optimizer_step()
    twin.zero_grad(set_to_none=True)
    return middle


def _kept(means: Work, heap_bytes: int, steps: Sequence[Step]) -> list[Took]:
    """``means`` where freed tensors stay in the heap."""
    with HEAP.kept(heap_bytes):
        return means(steps)


def _in_turns(means: Work, heap_bytes: int, steps: Sequence[Step]) -> list[Took]:
    """``handed_back_and_kept`` of one step."""
    usual: list[Took] = []
    kept: list[Took] = []
    while len(usual) < (1 if usual and usual[0].long else TURNS):
        usual += means(steps)
        kept += _kept(means, heap_bytes, steps)
    return [Took(*map(statistics.mean, zip(*each, strict=True))) for each in (usual, kept)]


def _means(steps: Sequence[Step], group: dist.ProcessGroup | None, device: torch.device, seconds: float) -> list[Took]:
    """Of some repetitions in turn. Of so few a median is off by more [measured, 37 plans: 9.0 % of what training takes,
    means 8.3 %], and a step that is disturbed makes ``_rehearsed`` look again.

    Of several that take long on a CPU the turn that is to warm up counts, but for the first one, which warms up for the
    others. [measured, language model, 4 ranks on 2 cores, 8 samples after 2: 2.07 and 2.19 s, later 1.73 to 2.26]
    On CUDA the median counts: the allocator may still take memory in the first of them.
    """
    on_cuda = device.type == "cuda"
    typical = statistics.median if on_cuda else statistics.mean

    def once(chosen: Sequence[Step]) -> list[Took]:
        took = []
        for step in chosen:
            synchronize(device)
            if group is not None:
                dist.barrier(group)
            start, waited_s = instant(device), WAITED.seconds
            middle = step()
            synchronize(device)
            end = instant(device)
            took.append(Took(seconds_between(start, end), WAITED.seconds - waited_s, seconds_between(start, middle)))
        return took

    def most(took: Sequence[Took]) -> list[Took]:
        if group is None:
            return list(took)
        numbers = iter(largest_of_ranks([each for one in took for each in one], group, device))
        return [Took(*each) for each in zip(numbers, numbers, numbers, strict=True)]

    for _ in range(CUDA_WARM_UP if on_cuda else WARM_UP):
        first = most(once(steps))
    first_s = sum(one.step_s for one in first)
    if not on_cuda and len(steps) > 1 and first_s > seconds:
        return [*most(once(steps[:1])), *first[1:]]
    turns = zip(*(once(steps) for _ in range(_repeats(first_s, seconds))), strict=True)
    return most([Took(*map(typical, zip(*each, strict=True))) for each in turns])


def _repeats(step_s: float, seconds: float) -> int:
    """How often steps of ``step_s`` are timed within about ``seconds``."""
    least = max(1, min(FEWEST, int(1.5 * seconds / step_s)))
    return min(MOST, max(least, int(seconds / step_s)))

"""Rehearses the module's own training step, on a copy: as it is, with all operators in one mode, and as it was planned.

What was measured in parts (kernels, collectives, the engine) is then changed to what the step really takes
(``planning.rehearsed``). The copy needs memory for gradients, activations and what is sharded, but it shares whole
parameters with the module and has no optimizer states; where there is no room for it, the parts are all that is known.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
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

from lightning_osdp.collectives import WAITED, largest_of_ranks, least_room, on_all_ranks
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.joining import Units, ways
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.rehearsed import (
    CHOSEN_ERROR,
    Rehearsal,
    alike,
    copy_bytes,
    fitted_s,
    foreseen,
    rehearsed_compute,
)
from lightning_osdp.planning.wishes import NO_WISHES
from lightning_osdp.profiling.memory import allowance, release_unused
from lightning_osdp.profiling.optimizers import configured
from lightning_osdp.profiling.standins import (
    copied_bytes,
    kept_randomness,
    loss_of,
    real_batch,
    real_copy,
    silenced,
    step_arguments,
    transferred,
)
from lightning_osdp.profiling.trace import Trace
from lightning_osdp.sharding.fairscale import FairScaleEngine
from lightning_osdp.sharding.overhead import bare_plan, synchronize
from lightning_osdp.sharding.splitting import forget

SECONDS, LONGEST_S = 1.5, 10.0
"""About how long each rehearsal takes; and from how long plain steps on there is none."""

FEWEST, MOST, WARM_UP = 3, 9, 1
"""Steps that are timed within that, if they take no more than half as long again, and those before them."""

CHOSEN_SECONDS = 3.0
"""How long the plan that was found is rehearsed, where there is time: its time is what people are told."""

ODD, CHOSEN_ODD = 0.2, 0.05
"""Share by which a rehearsal may differ from what is likely: of all operators in one mode, and of a plan that was
found. Beyond, it is made once more: other work on the machine lasts for some seconds at times."""

SHORT_S = 1.0
"""Rehearsals of steps that take longer are not repeated: that takes long, and the first has lasted through more of what
goes on beside it."""

GARBAGE = 1
"""Generation of Python's objects up to which a copy is looked for when it is no longer needed."""

MARGIN = 1.1
"""Room for a rehearsal, as a multiple of what it is thought to need."""


class Took(NamedTuple):
    """Seconds of a step, means of the rank with most."""

    step_s: float
    waited_s: float = 0.0
    """Part of them in which it waited for collectives."""


def _never() -> bool:
    return False


def _forever() -> float:
    return math.inf


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


def rehearse(
    stage: Stage,
    traced: Trace,
    group: dist.ProcessGroup,
    cluster: Cluster,
    compute: ComputeTimes,
    free_bytes: Callable[[], int],
    late: Callable[[], bool] = _never,
) -> tuple[ComputeTimes, tuple[Rehearsal, ...]]:
    """Compute whose sums are those of the plain step, and what the step takes with all operators in one mode.

    Collective: all ranks call it alike.

    Args:
        stage: what to rehearse.
        traced: the step, at one or two batch sizes: those that fit are rehearsed, and the modes at the smallest, where
            what they add is most of the step.
        group: the ranks.
        cluster: with links and engine as measured.
        compute: as measured in parts.
        free_bytes: that this rank may take now.
        late: whether the start has taken so long that no more modes are to be rehearsed. Collective.

    Returns:
        ``compute`` as it was, and nothing, where a rehearsal is not possible or would take too long.
    """
    model, smallest = traced.description, traced.sizes[0]

    try:
        with kept_randomness(stage.device):
            uniform = _uniform(model, group.size())
            room = stage.room(free_bytes(), group)
            plain = on_all_ranks(group, partial(_plain, stage, traced, group, cluster, uniform[0], room))
            if sum(plain.values()) > LONGEST_S:
                return compute, ()
            times = rehearsed_compute(compute, plain) if plain else compute
            shown = []
            for plan in reversed(uniform) if group.size() > 1 else ():  # first what adds most to a plain step
                expected = foreseen(model, times, cluster, plan, smallest)
                room = stage.room(free_bytes(), group)  # each copy leaves a little behind
                if _short(expected) and _fits(model, cluster, plan, smallest, room) and not late():
                    shown.append(_rehearsed(stage, expected, plan, smallest, group, late))
            return times, tuple(shown)
    except Exception as error:
        _warn(error)
        return compute, ()


def rehearse_alone(
    stage: Stage, traced: Trace, cluster: Cluster, compute: ComputeTimes, room_bytes: int
) -> ComputeTimes:
    """Compute whose sums are those of the plain step, in a process without others; ``compute`` where that is not
    possible. Arguments as in ``rehearse``."""
    room = stage.room(room_bytes, None)
    try:
        with kept_randomness(stage.device):
            replicated = _uniform(traced.description, cluster.ranks)[0]
            plain = _plain(stage, traced, None, cluster, replicated, room)
    except Exception as error:
        _warn(error)
        return compute
    return rehearsed_compute(compute, plain) if plain else compute


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
    wanted = [plan.batch_size, sum(sizes) // len(sizes), sizes[0]] if len(sizes) > 1 else sizes
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
                stage, expected, plan, size, group, lambda: left_s() < half_s, seconds, (likely_s, CHOSEN_ODD)
            )
    except Exception as error:
        _warn(error)
        return None
    return shown.model_copy(update={"error": CHOSEN_ERROR, "plan": plan.without_reasons()})


def _plain(
    stage: Stage,
    traced: Trace,
    group: dist.ProcessGroup | None,
    cluster: Cluster,
    replicated: ExecutionPlan,
    room: int,
) -> dict[int, float]:
    """Seconds of the plain step, of those traced batch sizes at which all replicated operators fit."""
    model = traced.description
    sizes = [size for size in traced.sizes if _fits(model, cluster, replicated, size, room)]
    took = _timed(stage, sizes, group, None) if sizes else {}
    return {size: one.step_s for size, one in took.items()}


def _fits(model: ModelDescription, cluster: Cluster, plan: ExecutionPlan, size: int, room: int) -> bool:
    """Whether there is room for the step, and some more for what is not counted: a control group's limit ends the
    process."""
    return MARGIN * copy_bytes(model, cluster, plan, size) <= room


def _short(expected: Rehearsal, longest_s: float = LONGEST_S, steps: int = FEWEST) -> bool:
    """Whether that many timed steps end in time. Of a long one, a single one tells what parts can't."""
    return expected.foreseen_s * (WARM_UP + steps) < longest_s


def _warn(error: Exception) -> None:
    """Whatever the user's code has raised: it will in training, too, or it minds being copied."""
    text = f"the step can't be rehearsed, so its time is less sure: {error}"
    warnings.warn(text, OSDPWarning, stacklevel=3)


def _uniform(description: ModelDescription, ranks: int) -> tuple[ExecutionPlan, ...]:
    """All operators replicated, and in the other modes, as far as they can; where blocks may share units, kept
    parameters do."""
    apart, *joined = ways(description, NO_WISHES)
    return (
        _plan(description, Mode.DP, apart, ranks),
        _plan(description, Mode.ZDP2, joined[-1] if joined else apart, ranks),
        _plan(description, Mode.ZDP, apart, ranks),
    )


def _rehearsed(
    stage: Stage,
    expected: Rehearsal,
    plan: ExecutionPlan,
    size: int,
    group: dist.ProcessGroup,
    late: Callable[[], bool],
    seconds: float = SECONDS,
    likely: tuple[float, float] | None = None,
) -> Rehearsal:
    """With what it took. Where that is not ``likely`` (seconds, and a share of them; as foreseen if None), it is tried
    once more unless it is ``late``: if both agree, that is it, else one of them was disturbed, and the less counts."""
    likely_s, odd = likely or (expected.foreseen_s, ODD)

    def once() -> Took:
        return on_all_ranks(group, partial(_timed, stage, [size], group, plan, seconds))[size]

    tries = [once()]
    if tries[0].step_s <= SHORT_S and abs(tries[0].step_s / likely_s - 1) > odd and not late():
        tries.append(once())
    if max(tries).step_s / min(tries).step_s - 1 > ODD:  # else the mean: the less would be less than a step takes
        tries = [min(tries)]
    took = Took(*map(statistics.mean, zip(*tries, strict=True)))
    # on CUDA, what the host waits for is not what the device does
    waited_s = took.waited_s if stage.device.type == "cpu" else None
    return expected.model_copy(update={"took_s": took.step_s, "waited_s": waited_s})


def _timed(
    stage: Stage,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    plan: ExecutionPlan | None,
    seconds: float = SECONDS,
) -> dict[int, Took]:
    """Of forward and backward, by batch size; as a plain module without a plan. It takes about ``seconds``."""
    twin = real_copy(stage.module)
    engine = None if plan is None else FairScaleEngine(stage.device, group, broadcast=False)
    try:
        return _timed_on(twin, engine, stage, sizes, group, plan, seconds)
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


def _timed_on(
    twin: LightningModule,
    engine: FairScaleEngine | None,
    stage: Stage,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    plan: ExecutionPlan | None,
    seconds: float,
) -> dict[int, Took]:
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
        return dict(zip(sizes, _means(steps, group, stage.device, seconds), strict=True))


def _step(stage: Stage, twin: LightningModule, batch: Any, engine: FairScaleEngine | None) -> None:
    """Forward and backward; gradients are freed."""
    if engine is not None:
        engine.before_forward()
    with stage.step_context():
        output = twin.training_step(*step_arguments(twin, batch))
    twin.backward(loss_of(output))
    if engine is not None:
        engine.finish_backward()
        engine.after_optimizer_step()
    twin.zero_grad(set_to_none=True)


def _means(
    steps: Sequence[Callable[[], None]], group: dist.ProcessGroup | None, device: torch.device, seconds: float
) -> list[Took]:
    """Of some repetitions in turn. Of so few a median is off by more [measured, 37 plans: 9.0 % of what training takes,
    means 8.3 %], and a step that is disturbed makes ``_rehearsed`` look again."""

    def once() -> list[Took]:
        took = []
        for step in steps:
            synchronize(device)
            if group is not None:
                dist.barrier(group)
            start, waited_s = time.perf_counter(), WAITED.seconds
            step()
            synchronize(device)
            took.append(Took(time.perf_counter() - start, WAITED.seconds - waited_s))
        return took

    def most(took: Sequence[Took]) -> list[Took]:
        if group is None:
            return list(took)
        numbers = largest_of_ranks([each for one in took for each in one], group, device)
        return [Took(*each) for each in zip(numbers[::2], numbers[1::2], strict=True)]

    for _ in range(WARM_UP):
        first_s = sum(one.step_s for one in most(once()))
    least = max(1, min(FEWEST, int(1.5 * seconds / first_s)))
    repeats = min(MOST, max(least, int(seconds / first_s)))
    turns = zip(*(once() for _ in range(repeats)), strict=True)
    return most([Took(*map(statistics.mean, zip(*each, strict=True))) for each in turns])


def _plan(description: ModelDescription, mode: Mode, units: Units, ranks: int) -> ExecutionPlan:
    return bare_plan(
        (
            OperatorPlan(
                name=operator.name,
                slices=alike(operator, mode).slices,
                unit=unit,
                num_parameters=operator.num_parameters,
                pinned=operator.pinned,
            )
            for operator, unit in zip(description.operators, units, strict=True)
        ),
        ranks,
    )

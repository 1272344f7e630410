"""Module + batch + hardware -> plan: joins measurements and planning."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch

from lightning_osdp import collectives, measurements
from lightning_osdp.copies import Stage
from lightning_osdp.errors import ConfigurationError, OSDPWarning, PlanMismatchError, TraceError
from lightning_osdp.measurements import NO_CORRECTION, NO_LINK, Measurements, Ranks
from lightning_osdp.planning.calibration import Correction
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.operators import NOTHING_BETWEEN, BetweenSteps
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule, Problem
from lightning_osdp.planning.settled import Settled, asked, kept, settled, way_of
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.memory import Limit, memory_in_use, memory_limit
from lightning_osdp.profiling.trace import Trace, looks_of, trace, trace_real
from lightning_osdp.rehearsal import can_keep_heap, rehearse_alone, rehearse_kept
from lightning_osdp.team import UNSEEN_GAIN, Team, not_for_the_model, problem_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """A plan and how it came about."""

    plan: ExecutionPlan
    profiling_s: float | None = None
    """Seconds that measuring took; None if the plan was there already."""
    from_cache: bool = False
    """Whether all that it was made from was measured before."""
    correction: Correction = NO_CORRECTION
    """That the plan was predicted with."""
    file: Path | None = None
    """Where the measurements are kept, on the first rank."""
    again: Callable[[Correction, BatchRule], ExecutionPlan] | None = None
    """Plans from the same measurements, but corrected, and handing freed memory back; collective. None if nothing was
    measured."""
    problem: Problem | None = None
    """What the plan solves, where it was made without a process group."""
    settled: bool = False
    """Whether an earlier start had come to the plan, so that nothing was searched for."""


def on_all_ranks(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """See ``collectives.on_all_ranks``."""
    return collectives.on_all_ranks(ranks.group, work)


def describe(
    module: pl.LightningModule,
    batch: Any,
    batch_size: int,
    device: torch.device,
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    between: BetweenSteps = NOTHING_BETWEEN,
    cache: Path | None = None,
    name: str = "",
) -> Trace:
    """Reads the module's training step on fake tensors, or by one real step on a small batch where it can't be; where
    ``between`` steps something is evaluated in batches of its own, what that takes, too, as far as it can be told.
    Steps that ``cache`` knows are only read as far as needed to know them again, and not at all where their ``name`` is
    known."""
    known = measurements.StepsKept(cache) if cache is not None else None
    try:
        return trace(
            module,
            batch,
            batch_size,
            device=device,
            step_context=step_context,
            evaluation=between.evaluates,
            known=known,
            name=name,
        )
    except TraceError as error:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise  # a module without values can't run for real
        warnings.warn(
            f"training_step can't be traced on fake tensors ({error}); one real step on a small batch is run instead",
            OSDPWarning,
            stacklevel=2,
        )
    where = next(module.parameters()).device  # on CUDA the module is still on the host, where the step runs as well
    return trace_real(module, batch, batch_size, device=where, step_context=step_context)


def describe_together(
    ranks: Ranks, module: pl.LightningModule, cache: Path | None, read: Callable[[str], Trace]
) -> Trace:
    """What each rank ``read`` of the step, given its name if that is known. Collective.

    Where steps of such a module were read before, the first rank reads it alone, and tells the others the name under
    which it is known: ranks may share cores, and a start that knows everything else does little but read.
    """

    def seen() -> bool:
        return ranks.is_first and cache is not None and measurements.StepsKept(cache).any(looks_of(module))

    if not collectives.of_first_rank(ranks.group, on_all_ranks(ranks, seen)):
        return on_all_ranks(ranks, lambda: read(""))
    first = on_all_ranks(ranks, lambda: read("") if ranks.is_first else None)
    name = collectives.of_first_rank(ranks.group, first.name if first is not None else "")
    return on_all_ranks(ranks, lambda: first if first is not None else read(name))


def measure_and_plan(
    traced: Trace,
    ranks: Ranks,
    rule: BatchRule,
    limit: Limit,
    model_bytes: int,
    *,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    wishes: Wishes = NO_WISHES,
    between: BetweenSteps = NOTHING_BETWEEN,
    stage: Stage | None = None,
    began_s: float,
) -> Outcome:
    """Measures what is not known yet and plans on the first rank; the same plan comes back on every rank.

    Args:
        traced: the model, the same on every rank.
        ranks: who trains together.
        rule: which batch sizes to try.
        limit: bytes per device; the smallest over the ranks counts. Asked for when all is measured: it may count pages
            of libraries, which grow by what measuring runs.
        model_bytes: of parameters and buffers on the device now.
        cluster: hardware that is known already; its links are not measured.
        cache: folder of measurements; None to keep none.
        wishes: what is not left to the search.
        between: what the run does between steps.
        stage: to rehearse the step on; None to leave it at times that are measured in parts.
        began_s: when the start began (``time.monotonic``), which is to end in time (``team.START_S``).

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: ``cluster`` has another number of ranks, the batch sizes contradict each other, or a wish
            matches nothing.
    """
    if cluster is not None and cluster.ranks != ranks.count:
        raise ConfigurationError(f"cluster describes {cluster.ranks} ranks, this run has {ranks.count}")
    start = time.monotonic()
    team = Team(traced, ranks, cluster, limit, model_bytes, wishes, between, began_s)
    measured, from_cache, file = measurements.measured(
        traced, ranks, cluster, cache, wishes, team.free_bytes, stage, team.left_s
    )
    question = asked(rule, wishes, between, measured.correction)
    if from_cache:
        earlier, room = team.as_before(measured, rule, question)
    else:
        earlier, room = None, team.room(stepped=False)
    plan = earlier
    if plan is None:
        plan, measured, room = team.found(measured, rule, room, stage)
        stepped = any(one.plan is not None for one in measured.rehearsals)  # plain steps leave less behind
        new = Settled(
            asked=question,
            plan=plan.without_reasons(),
            used_bytes=room.used,
            guessed_bytes=0 if stepped else room.guessed,
            file_bytes=room.files,
        )
        measured = measured.model_copy(update={"settled": kept(measured.settled, new)})
        if ranks.is_first and file is not None:
            measurements.write(file, measured.model_dump_json())

    def again(correction: Correction, rule: BatchRule) -> ExecutionPlan:
        known = measured.model_copy(update={"correction": correction, "kept_compute": None})  # memory is short
        return team.decide(known, rule, room, UNSEEN_GAIN)

    return Outcome(
        plan, time.monotonic() - start, from_cache, measured.correction, file, again, settled=earlier is not None
    )


def still_right(
    plan: ExecutionPlan | None,
    traced: Trace,
    ranks: Ranks,
    rule: BatchRule,
    memory_limit_bytes: int,
) -> ExecutionPlan | None:
    """The first rank's ``plan`` on every rank, if a run like this one made it; else None on every rank.

    It must be for this model, this kind and number of devices, within the memory limit, and with a batch size that
    ``rule`` allows.
    """
    text = collectives.of_first_rank(ranks.group, plan.to_json() if plan is not None else None)
    limit = collectives.least_room(memory_limit_bytes, ranks.group, ranks.device)
    if text is None:
        return None
    earlier = ExecutionPlan.from_json(text)
    here, there = measurements.this_cluster(ranks, NO_LINK), earlier.cluster
    try:
        earlier.check(traced.description, ranks.count)
    except PlanMismatchError:
        return None
    same = all(getattr(here, name) == getattr(there, name) for name in ("nodes", "device", "backend"))
    fits = earlier.predicted.most_memory_bytes <= limit
    allowed = (earlier.batch_size, earlier.accumulate_grad_batches) in set(rule.pairs(ranks.count))
    return earlier if same and fits and allowed else None


def plan_alone(
    traced: Trace,
    cluster: Cluster,
    device: torch.device,
    rule: BatchRule,
    memory_limit_bytes: int,
    model_bytes: int,
    *,
    cache: Path | None = None,
    wishes: Wishes = NO_WISHES,
    between: BetweenSteps = NOTHING_BETWEEN,
    stage: Stage | None = None,
) -> Outcome:
    """Plans for a known cluster in this one process, without a process group.

    Compute is measured here, on a device that the other ranks don't use meanwhile; measurements that such ranks made
    together on this machine are preferred where the cache has them.

    Args:
        traced: the model.
        cluster: the hardware to plan for.
        device: a device of that hardware.
        rule: which batch sizes to try.
        memory_limit_bytes: per device.
        model_bytes: of parameters and buffers on the device now.
        cache: folder of measurements; None to keep none.
        wishes: what is not left to the search.
        between: what the run does between steps.
        stage: to rehearse the plain step on; None to leave its compute at times that are measured in parts.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: a wish matches nothing, or the batch sizes contradict each other.
    """
    start = time.monotonic()
    files = (
        [cache / f"{measurements.key_of(traced, device, cluster, wishes, alone)}.json" for alone in (False, True)]
        if cache
        else []
    )
    stored = (measurements.read(file, Measurements) for file in files)
    known = next((found for found in stored if found is not None), None)
    if known is None:
        traced = traced.whole()
        with measurements.progress(True, ("compute",)) as advance:
            shown = partial(advance, "compute")
            times = compute.measure(traced, device, progress=shown, wishes=wishes)
        kept = None
        if stage is not None:
            room_bytes = max(0, memory_limit(device, cluster.devices_per_node) - memory_in_use(device))
            parts, times = times, rehearse_alone(stage, traced, cluster, times, room_bytes)
            if times is not parts and can_keep_heap(device, None):
                kept = rehearse_kept(stage, traced, None, cluster, times, room_bytes)
        known = Measurements(link=cluster.link, levels=cluster.levels, compute=times, kept_compute=kept)
        from_cache = False
        if files:
            measurements.write(files[-1], known.model_dump_json())
    else:
        compute.warm_up(traced, device)
        from_cache = True
    profiling_s = time.monotonic() - start
    used = not_for_the_model(traced, device, model_bytes, between)
    problem = problem_of(traced, cluster, known, memory_limit_bytes, used, wishes, between)
    plan = settled(problem, rule, ())
    return Outcome(plan, profiling_s, from_cache, known.correction, problem=way_of(plan, problem))

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

from lightning_osdp.autotune import measure
from lightning_osdp.autotune.coordinator import UNTRIED_PLAN_MARGIN, PlanningCoordinator, build_problem, non_model_bytes
from lightning_osdp.autotune.measure import NO_CORRECTION, NO_LINK, Profile, RankGroup
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.autotune.trials import can_measure_heap_retention, run_heap_trial, run_local_trial
from lightning_osdp.backend import agree
from lightning_osdp.backend.memory import MemoryLimit, memory_in_use, memory_limit
from lightning_osdp.errors import ConfigurationError, OSDPWarning, PlanMismatchError, TraceError
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy, Problem
from lightning_osdp.planning.search.plan_selection import (
    CachedPlan,
    append_cached_plan,
    request_key,
    select_plan,
    variant_of_plan,
)
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.tracing.trace import TracedStep, architecture_key, trace, trace_by_running

Result = TypeVar("Result")


@dataclass(frozen=True)
class PlanningResult:
    """A plan and how it came about."""

    plan: ExecutionPlan
    profiling_s: float | None = None
    """Seconds that measuring took; None if the plan was there already."""
    from_cache: bool = False
    """Whether all that it was made from was measured before."""
    correction: Correction = NO_CORRECTION
    """That the plan was predicted with."""
    cache_file: Path | None = None
    """Where the measurements are kept, on the first rank."""
    replan: Callable[[Correction, BatchSizePolicy], ExecutionPlan] | None = None
    """Plans from the same measurements, but corrected, and handing freed memory back; collective. None if nothing was
    measured."""
    problem: Problem | None = None
    """What the plan solves, where it was made without a process group."""
    reused: bool = False
    """Whether an earlier start had come to the plan, so that nothing was searched for."""


def raise_on_all_ranks(rank_group: RankGroup, work: Callable[[], Result]) -> Result:
    """See ``agree.raise_on_all_ranks``."""
    return agree.raise_on_all_ranks(rank_group.group, work)


def profile_model(
    module: pl.LightningModule,
    batch: Any,
    batch_size: int,
    device: torch.device,
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    non_training: NonTrainingWork = NO_NON_TRAINING_WORK,
    cache: Path | None = None,
    key: str = "",
) -> TracedStep:
    """Reads the module's training step on fake tensors, or by one real step on a small batch where it can't be; where
    ``non_training`` steps something is evaluated in batches of its own, what that takes, too, as far as it can be told.
    Steps that ``cache`` knows are only read as far as needed to know them again, and not at all where their ``key`` is
    known."""
    known = measure.ModelProfileCache(cache) if cache is not None else None
    try:
        return trace(
            module,
            batch,
            batch_size,
            device=device,
            step_context=step_context,
            evaluation=non_training.has_own_evaluation_batch_size,
            store=known,
            key=key,
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
    return trace_by_running(module, batch, batch_size, device=where, step_context=step_context)


def profile_model_on_ranks(
    rank_group: RankGroup, module: pl.LightningModule, cache: Path | None, trace_step: Callable[[str], TracedStep]
) -> TracedStep:
    """What each rank ``trace_step`` of the step, given its name if that is known. Collective.

    Where steps of such a module were read before, the first rank reads it alone, and tells the others the name under
    which it is known: ranks may share cores, and a start that knows everything else does little but read.
    """

    def is_known() -> bool:
        return (
            rank_group.is_rank_zero
            and cache is not None
            and measure.ModelProfileCache(cache).contains(architecture_key(module))
        )

    if not agree.broadcast_object(rank_group.group, raise_on_all_ranks(rank_group, is_known)):
        return raise_on_all_ranks(rank_group, lambda: trace_step(""))
    first = raise_on_all_ranks(rank_group, lambda: trace_step("") if rank_group.is_rank_zero else None)
    name = agree.broadcast_object(rank_group.group, first.key if first is not None else "")
    return raise_on_all_ranks(rank_group, lambda: first if first is not None else trace_step(name))


def autotune(
    traced: TracedStep,
    rank_group: RankGroup,
    policy: BatchSizePolicy,
    limit: MemoryLimit,
    model_bytes: int,
    *,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    constraints: SearchConstraints = UNCONSTRAINED,
    non_training: NonTrainingWork = NO_NON_TRAINING_WORK,
    trial_context: TrialContext | None = None,
    started_at_s: float,
) -> PlanningResult:
    """Measures what is not known yet and plans on the first rank; the same plan comes back on every rank.

    Args:
        traced: the model, the same on every rank.
        rank_group: who trains together.
        policy: which batch sizes to try.
        limit: bytes per device; the smallest over the ranks counts. Asked for when all is measured: it may count pages
            of libraries, which grow by what measuring runs.
        model_bytes: of parameters and buffers on the device now.
        cluster: hardware that is known already; its links are not measured.
        cache: folder of measurements; None to keep none.
        constraints: what is not left to the search.
        non_training: what the run does between steps.
        trial_context: to rehearse the step on; None to leave it at times that are measured in parts.
        started_at_s: when the start began (``time.monotonic``), which is to end in time (``coordinator.STARTUP_BUDGET_S``).

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: ``cluster`` has another number of ranks, the batch sizes contradict each other, or a wish
            matches nothing.
    """
    if cluster is not None and cluster.ranks != rank_group.world_size:
        raise ConfigurationError(f"cluster describes {cluster.ranks} ranks, this run has {rank_group.world_size}")
    start = time.monotonic()
    team = PlanningCoordinator(traced, rank_group, cluster, limit, model_bytes, constraints, non_training, started_at_s)
    measured, from_cache, file = measure.load_or_measure(
        traced, rank_group, cluster, cache, constraints, team.free_bytes, trial_context, team.remaining_s
    )
    question = request_key(policy, constraints, non_training, measured.correction)
    if from_cache:
        earlier, room = team.reuse_cached_plan(measured, policy, question)
    else:
        earlier, room = None, team.memory_budget(after_trial=False)
    plan = earlier
    if plan is None:
        plan, measured, room = team.search_and_trial(measured, policy, room, trial_context)
        stepped = any(one.plan is not None for one in measured.trials)  # plain steps leave less behind
        new = CachedPlan(
            request_key=question,
            plan=plan.without_alternatives(),
            non_model_bytes=room.non_model,
            estimated_bytes=0 if stepped else room.estimated,
            file_page_bytes=room.file_pages,
        )
        measured = measured.model_copy(update={"cached_plans": append_cached_plan(measured.cached_plans, new)})
        if rank_group.is_rank_zero and file is not None:
            measure.write(file, measured.model_dump_json())

    def replan(correction: Correction, policy: BatchSizePolicy) -> ExecutionPlan:
        known = measured.model_copy(
            update={"correction": correction, "compute_with_retained_heap": None}
        )  # memory is short
        return team.plan_on_rank_zero(known, policy, room, UNTRIED_PLAN_MARGIN)

    return PlanningResult(
        plan, time.monotonic() - start, from_cache, measured.correction, file, replan, reused=earlier is not None
    )


def reuse_if_valid(
    plan: ExecutionPlan | None,
    traced: TracedStep,
    rank_group: RankGroup,
    policy: BatchSizePolicy,
    memory_limit_bytes: int,
) -> ExecutionPlan | None:
    """The first rank's ``make_plan`` on every rank, if a run like this one made it; else None on every rank.

    It must be for this model, this kind and number of devices, within the memory limit, and with a batch size that
    ``policy`` allows.
    """
    text = agree.broadcast_object(rank_group.group, plan.to_json() if plan is not None else None)
    limit = agree.all_reduce_min(memory_limit_bytes, rank_group.group, rank_group.device)
    if text is None:
        return None
    earlier = ExecutionPlan.from_json(text)
    here, there = measure.current_cluster(rank_group, NO_LINK), earlier.cluster
    try:
        earlier.check(traced.model_profile, rank_group.world_size)
    except PlanMismatchError:
        return None
    same = all(getattr(here, name) == getattr(there, name) for name in ("nodes", "device", "backend"))
    fits = earlier.predicted.max_memory_bytes <= limit
    allowed = (earlier.batch_size, earlier.accumulate_grad_batches) in set(policy.candidates(rank_group.world_size))
    return earlier if same and fits and allowed else None


def plan_offline(
    traced: TracedStep,
    cluster: Cluster,
    device: torch.device,
    policy: BatchSizePolicy,
    memory_limit_bytes: int,
    model_bytes: int,
    *,
    cache: Path | None = None,
    constraints: SearchConstraints = UNCONSTRAINED,
    non_training: NonTrainingWork = NO_NON_TRAINING_WORK,
    trial_context: TrialContext | None = None,
) -> PlanningResult:
    """Plans for a known cluster in this one process, without a process group.

    Compute is measured here, on a device that the other ranks don't use meanwhile; measurements that such ranks made
    together on this machine are preferred where the cache has them.

    Args:
        traced: the model.
        cluster: the hardware to plan for.
        device: a device of that hardware.
        policy: which batch sizes to try.
        memory_limit_bytes: per device.
        model_bytes: of parameters and buffers on the device now.
        cache: folder of measurements; None to keep none.
        constraints: what is not left to the search.
        non_training: what the run does between steps.
        trial_context: to rehearse the plain step on; None to leave its compute at times that are measured in parts.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: a wish matches nothing, or the batch sizes contradict each other.
    """
    start = time.monotonic()
    files = (
        [cache / f"{measure.cache_key(traced, device, cluster, constraints, alone)}.json" for alone in (False, True)]
        if cache
        else []
    )
    stored = (measure.read(file, Profile) for file in files)
    known = next((found for found in stored if found is not None), None)
    if known is None:
        traced = traced.with_all_kernels()
        with measure.show_progress(True, ("compute",)) as advance:
            shown = partial(advance, "compute")
            times = compute.measure_compute(traced, device, progress=shown, constraints=constraints)
        kept = None
        if trial_context is not None:
            room_bytes = max(0, memory_limit(device, cluster.devices_per_node) - memory_in_use(device))
            parts, times = times, run_local_trial(trial_context, traced, cluster, times, room_bytes)
            if times is not parts and can_measure_heap_retention(device, None):
                kept = run_heap_trial(trial_context, traced, None, cluster, times, room_bytes)
        known = Profile(
            link=cluster.link,
            hierarchical_links=cluster.hierarchical_links,
            compute=times,
            compute_with_retained_heap=kept,
        )
        from_cache = False
        if files:
            measure.write(files[-1], known.model_dump_json())
    else:
        compute.warm_up(traced, device)
        from_cache = True
    profiling_s = time.monotonic() - start
    used = non_model_bytes(traced, device, model_bytes, non_training)
    problem = build_problem(traced, cluster, known, memory_limit_bytes, used, constraints, non_training)
    plan = select_plan(problem, policy, ())
    return PlanningResult(plan, profiling_s, from_cache, known.correction, problem=variant_of_plan(plan, problem))

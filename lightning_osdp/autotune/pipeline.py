"""The start of a run, in order: from a module, a batch and some hardware to an execution plan.

1. Describe: trace the training step on all ranks (``profile_model_on_ranks``).
2. Look up what earlier starts have measured, and the plan that they have chosen.
3. Measure links, the engine's overhead and kernels.
4. Calibrate: try the user's own step, and scale the measurements to it.
5. Search for a plan.
6. Try it and the simple plans in turns, and take the fastest.
7. Search again with what the trials have shown; try what is new.
8. Cache the plan.

``autotune`` does steps 2 to 8 for ranks that train together, or for a single process without a process group, which
plans for a known cluster without a deadline: kernels are measured there, measurements that such ranks have made
together on this machine are preferred, no links are measured, and no plan is tried. All functions are collective.
"""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_osdp.autotune.calibration import assume_retained_heap, run_calibration_trials
from lightning_osdp.autotune.coordinator import MemoryBudget, PlanningCoordinator, PlanRequest, Replanner
from lightning_osdp.autotune.finalists import make_trial_setup, search_and_trial, search_or_take
from lightning_osdp.autotune.measure import agrees_with_kept, is_cache_valid, measure_profile
from lightning_osdp.autotune.profile import NO_CORRECTION, Profile
from lightning_osdp.autotune.profile_cache import ModelProfileCache, ProfileCache
from lightning_osdp.autotune.ranks import RankGroup, current_cluster, resolve_cluster
from lightning_osdp.autotune.startup_budget import MAX_TRIAL_S, StartupBudget
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.backend.recursion import allow_depth_of
from lightning_osdp.backend.timer import CORE_SHARING
from lightning_osdp.errors import ConfigurationError, OSDPWarning, PlanMismatchError, TraceError
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.search.plan_selection import CachedPlan, append_cached_plan, request_key, variant_of_plan
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.formatting import format_bytes, format_seconds
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.profiling import compute, engine_overhead
from lightning_osdp.profiling.tracing.profile_store import architecture_key, trace_with_store
from lightning_osdp.profiling.tracing.trace import CollectiveError, TracedStep, TrainingStep, trace, trace_by_running

KEY_SEPARATOR = "+"
"""Between the keys of the typical batch and of the largest one."""

log_info = rank_zero_only(logging.getLogger(__name__).info)


@dataclass(frozen=True)
class PlanningResult:
    """A plan and how it came about.

    Attributes:
        plan: the plan.
        profiling_s: time from looking up measurements to the plan; None if there was a plan already.
        from_cache: whether all measurements were cached.
        correction: the correction that the plan was predicted with.
        cache_file: the file that holds the measurements on the first rank; None if they are not cached.
        replanner: plans again from the same measurements; None if nothing was measured.
        is_reused: whether an earlier start had chosen the plan, so that nothing was searched.
    """

    plan: ExecutionPlan
    profiling_s: float | None = None
    from_cache: bool = False
    correction: Correction = NO_CORRECTION
    cache_file: Path | None = None
    replanner: Replanner | None = None
    is_reused: bool = False

    @property
    def problem(self) -> Problem:
        """The problem that the plan solves."""
        assert self.replanner is not None
        problem = self.replanner.coordinator.build_problem(self.replanner.profile, self.replanner.memory_budget)
        return variant_of_plan(self.plan, problem)


# -- step 1 ------------------------------------------------------------------------------------------------------------


def profile_model(
    context: TrialContext,
    non_training: NonTrainingWork = NO_NON_TRAINING_WORK,
    cache: Path | None = None,
    key: str = "",
    is_alone: bool = False,
) -> TracedStep:
    """Trace the user's step on fake tensors, or if that fails by one real step on a small batch. Not collective.

    Args:
        context: the user's step.
        non_training: what the run does between steps: evaluation with its own batch size is traced as well.
        cache: folder of traced steps; None for none. A cached step is traced only as far as it takes to recognise it.
        key: the key of the cached step, if another rank has recognised it: nothing is traced then.
        is_alone: whether other ranks wait meanwhile.

    Raises:
        CollectiveError: this rank is alone, and the step has a collective in it.
        TraceError: the step can't be traced in either way.
    """
    module = context.module
    allow_depth_of(module)
    step = TrainingStep(
        module,
        context.batch,
        context.batch_size,
        context.device,
        step_context=context.step_context,
        evaluation=non_training.has_own_evaluation_batch_size,
        tensor_degrees=context.tensor_degrees,
        is_alone=is_alone,
    )
    try:
        return _trace_on_fake_tensors(step, context.largest_batch, cache, key)
    except TraceError as error:
        failure = error
    if isinstance(failure.__cause__, RuntimeError | ValueError | IndexError):  # shapes that do not match
        with suppress(TraceError):
            traced = _trace_on_fake_tensors(step.at_own_batch_size(), context.largest_batch, cache, key)
            warnings.warn(
                f"training_step works with {step.batch_size} samples alone, as many as the data loader gives, and no "
                f"other batch size is planned ({failure})",
                OSDPWarning,
                stacklevel=2,
            )
            return traced
    if any(parameter.is_meta for parameter in module.parameters()):
        raise failure  # a module without values can't run for real
    warnings.warn(
        f"training_step can't be traced on fake tensors ({failure}); one real step on a small batch is run instead",
        OSDPWarning,
        stacklevel=2,
    )
    # On CUDA the module is still on the host and runs there.
    batch = context.batch if context.largest_batch is None else context.largest_batch
    return trace_by_running(replace(step, batch=batch, device=next(module.parameters()).device))


def _trace_on_fake_tensors(step: TrainingStep, largest_batch: Any, cache: Path | None, key: str) -> TracedStep:
    """Return the typical batch's step, with the memory of the largest batch's, if there is one."""
    typical_key, _, largest_key = key.partition(KEY_SEPARATOR)
    traced = _trace_or_load(step, cache, typical_key)
    if largest_batch is None:
        return traced
    largest = _trace_or_load(replace(step, batch=largest_batch), cache, largest_key)
    return replace(traced.with_memory_of(largest), key=KEY_SEPARATOR.join(filter(None, (traced.key, largest.key))))


def _trace_or_load(step: TrainingStep, cache: Path | None, key: str) -> TracedStep:
    return trace(step) if cache is None else trace_with_store(step, ModelProfileCache(cache), key)


def profile_model_on_ranks(
    ranks: RankGroup, context: TrialContext, non_training: NonTrainingWork, cache: Path | None
) -> TracedStep:
    """Step 1. Trace the user's step on all ranks; arguments as in ``profile_model``.

    If steps of such a module are cached, the first rank recognises the step and tells the others its key: ranks may
    share cores, and a start with everything cached does little but trace.
    """

    def is_cached() -> bool:
        if not ranks.is_rank_zero or cache is None:
            return False
        return ModelProfileCache(cache).contains(architecture_key(context.module))

    def trace_step(key: str = "", is_alone: bool = False) -> TracedStep:
        return profile_model(context, non_training, cache, key, is_alone)

    def trace_first() -> TracedStep | None:
        with suppress(CollectiveError):  # all ranks trace it then
            return trace_step(is_alone=ranks.world_size > 1) if ranks.is_rank_zero else None
        return None

    began_s = time.monotonic()
    first, key = None, None
    if ranks.broadcast_object(ranks.raise_on_all_ranks(is_cached)):
        first = ranks.raise_on_all_ranks(trace_first)
        key = ranks.broadcast_object(None if first is None else first.key)
    traced = ranks.raise_on_all_ranks(lambda: first if first is not None else trace_step(key or ""))
    traced = _agree_on_route(ranks, context.module, traced)
    num_operators, seconds = len(traced.model_profile.operators), format_seconds(time.monotonic() - began_s)
    log_info("traced the training step: %d operators, in %s", num_operators, seconds)
    return traced


def _agree_on_route(ranks: RankGroup, module: torch.nn.Module, traced: TracedStep) -> TracedStep:
    """Return the first rank's trace where the ranks' data took other ways through the same module (experts)."""
    facts = ranks.all_gather_object((architecture_key(module), traced.model_profile.fingerprint))
    if len(set(facts)) == 1 or len({key for key, _ in facts}) > 1:
        return traced
    log_info("the ranks' batches run the module's operators in different order: the first rank's order is planned")
    whole = ranks.raise_on_all_ranks(lambda: traced.with_all_kernels() if ranks.is_rank_zero else traced)
    return ranks.broadcast_object(replace(whole, retrace=None))


# -- steps 2 to 8 ------------------------------------------------------------------------------------------------------


def autotune(
    traced: TracedStep,
    request: PlanRequest,
    ranks: RankGroup,
    budget: StartupBudget,
    *,
    cache: Path | None = None,
    trial_context: TrialContext | None = None,
) -> PlanningResult:
    """Measure what is not cached, search and try plans; return the same plan on every rank.

    Args:
        traced: the step of the model, the same on every rank.
        request: what the plan is asked for.
        ranks: the ranks that train together.
        budget: the time of the start.
        cache: folder of measurements; None to cache nothing.
        trial_context: the user's step, to try; None to plan from measurements alone.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: the given cluster has another number of ranks, the batch sizes contradict each other, or a
            pattern matches nothing.
    """
    began_s = time.monotonic()
    _prepare_ranks(request, ranks)
    coordinator = PlanningCoordinator(request, ranks, budget, traced.model_profile, traced.batch_sizes)
    files = ProfileCache.open(cache, ranks, traced, request.cluster, request.constraints)
    # 2. Look up.
    profile = _load_valid_profile(files, request)
    from_cache, plan = profile is not None, None
    if profile is not None:
        plan, memory_budget = _reuse_cached_plan(coordinator, profile, traced)
    else:
        # 3. Measure, 4. calibrate.
        profile = _measure_and_calibrate(coordinator, traced, files, trial_context)
        memory_budget = coordinator.memory_budget("measured")
    is_reused = plan is not None
    if plan is None:
        # 5. Search, 6. try the plan, 7. search again.
        plan, profile, memory_budget = search_and_trial(coordinator, profile, memory_budget, trial_context)
        # 8. Cache it, unless there was no time to try it: the next start need not measure, and has that time.
        if plan.tried or trial_context is None or budget.remaining_s() > MAX_TRIAL_S:
            profile = _cache_plan(request, profile, plan, memory_budget, files)
    plan = coordinator.with_baselines(profile, memory_budget, plan)
    if not is_reused:
        plan, memory_budget = _fit_beside_leftovers(coordinator, profile, memory_budget, plan)
    seconds = time.monotonic() - began_s
    log_info("planned in %s", format_seconds(seconds))
    replanner = Replanner(coordinator, profile, memory_budget)
    return PlanningResult(plan, seconds, from_cache, profile.correction, files.file, replanner, is_reused)


def _fit_beside_leftovers(
    coordinator: PlanningCoordinator, profile: Profile, memory_budget: MemoryBudget, plan: ExecutionPlan
) -> tuple[ExecutionPlan, MemoryBudget]:
    """Return the plan with the memory of now: the process may take less than when the plan was searched, or more.

    If it takes more than is reserved, and there is no room for that, another plan is returned. The first rank's
    searches leave some KiB for each operator, which count where there are a thousand.
    """
    now = coordinator.memory_budget(memory_budget.progress if plan.tried else "searched")
    left_bytes = now.non_model - memory_budget.non_model
    if left_bytes < 0:
        return coordinator.repredict_memory(profile, now, plan), now
    if left_bytes <= memory_budget.estimated or plan.predicted.peak_memory_bytes + left_bytes <= now.limit:
        return plan, memory_budget
    log_info("planning has left %s behind: searching a plan that fits beside it", format_bytes(left_bytes))
    found, _, now = search_or_take(coordinator, profile, now, plan)
    return coordinator.with_baselines(profile, now, found), now


def _prepare_ranks(request: PlanRequest, ranks: RankGroup) -> None:
    """Check the number of ranks, and load what the engine loads at its first use."""
    if ranks.is_offline:
        return
    if request.cluster is not None and request.cluster.ranks != ranks.world_size:
        raise ConfigurationError(f"cluster describes {request.cluster.ranks} ranks, this run has {ranks.world_size}")
    if ranks.device.type == "cpu":
        CORE_SHARING.set_process_count(ranks.count_equal(CORE_SHARING.key()))
    engine_overhead.warm_up(ranks.group, ranks.device, request.constraints.capabilities)


def _load_valid_profile(files: ProfileCache, request: PlanRequest) -> Profile | None:
    """Step 2. Return the cached measurements; None if there are none, or if the links have changed since."""
    profile, cluster = files.load_profile(), request.cluster
    if profile is None:
        return None
    if files.ranks.is_offline and cluster is not None:
        # Trials and plans are those of ranks that have measured together; the cluster has its own engine.
        return profile.model_copy(update={"trials": (), "cached_plans": (), "engine": cluster.engine})
    if cluster is None and not (agrees_with_kept(profile, files) and is_cache_valid(profile, files.ranks)):
        return None
    log_info("found the measurements of an earlier start in %s", files.file)
    return profile


def _reuse_cached_plan(
    coordinator: PlanningCoordinator, profile: Profile, traced: TracedStep
) -> tuple[ExecutionPlan | None, MemoryBudget]:
    """Step 2. Return the plan that an earlier start has chosen, if it is still right, and the memory that there is."""
    key = _request_key(coordinator.request, profile)
    earlier = [cached for cached in profile.cached_plans if cached.request_key == key]
    memory_budget = coordinator.cached_memory_budget(earlier[-1]) if earlier else None
    plan = None
    if memory_budget is not None:
        plan = coordinator.look_up_plan(profile, memory_budget, key, earlier)
    if memory_budget is None or plan is None:
        coordinator.ranks.raise_on_all_ranks(lambda: compute.warm_up(traced, coordinator.ranks.device))
        memory_budget = coordinator.memory_budget("measured")
        memory_budget = memory_budget.with_observed_usage(earlier[-1]) if earlier else memory_budget
        plan = coordinator.look_up_plan(profile, memory_budget, key, earlier)
    if plan is not None:
        log_info("took the plan of an earlier start")
    return plan, memory_budget


def _measure_and_calibrate(
    coordinator: PlanningCoordinator, traced: TracedStep, files: ProfileCache, trial_context: TrialContext | None
) -> Profile:
    """Measure and calibrate (steps 3 and 4), and cache the result. Kernels that only this takes are freed after it."""
    ranks, request = coordinator.ranks, coordinator.request
    coordinator.budget.begin_stage("measuring links and kernels")
    traced = ranks.raise_on_all_ranks(traced.with_all_kernels)
    profile = measure_profile(traced, ranks, request.cluster, files, request.constraints, coordinator.free_bytes())
    profile = _calibrate(coordinator, profile, traced, trial_context)
    files.save_profile(profile)
    return profile


def _calibrate(
    coordinator: PlanningCoordinator, profile: Profile, traced: TracedStep, trial_context: TrialContext | None
) -> Profile:
    """Step 4. Return the measurements, scaled to the user's own step."""
    if trial_context is not None:
        coordinator.budget.begin_stage("measuring the unsharded step")
        began_s = time.monotonic()
        calibration = run_calibration_trials(make_trial_setup(coordinator, profile, trial_context), profile.compute)
        profile = profile.model_copy(
            update={
                "compute": calibration.compute,
                "compute_with_retained_heap": calibration.compute_with_retained_heap,
            }
        )
        sizes = ", ".join(f"{size} samples {format_seconds(one.step_s)}" for size, one in calibration.unsharded.items())
        log_info("tried the unsharded step: %s, in %s", sizes or "no", format_seconds(time.monotonic() - began_s))
        if calibration.unsharded:
            return profile
    # No step was made, and each of several ranks has run only its share of the kernels.
    ranks = coordinator.ranks
    if ranks.is_offline or ranks.is_emulated:
        return profile
    ranks.raise_on_all_ranks(lambda: compute.warm_up(traced, ranks.device))
    cluster = resolve_cluster(ranks, coordinator.request.cluster, profile)
    retained = assume_retained_heap(
        profile.compute, coordinator.model, cluster, coordinator.batch_sizes[0], coordinator.free_bytes(), ranks
    )
    return profile.model_copy(update={"compute_with_retained_heap": retained})


def _cache_plan(
    request: PlanRequest, profile: Profile, plan: ExecutionPlan, memory_budget: MemoryBudget, files: ProfileCache
) -> Profile:
    """Step 8. Return the measurements with the plan, and write them."""
    if files.ranks.is_offline:
        return profile
    new = CachedPlan(
        request_key=_request_key(request, profile),
        plan=plan.without_alternatives(),
        non_model_bytes=memory_budget.non_model,
        estimated_bytes=0 if profile.trials else memory_budget.estimated,  # trials of plans leave behind what steps do
        file_page_bytes=memory_budget.file_pages,
    )
    profile = profile.model_copy(update={"cached_plans": append_cached_plan(profile.cached_plans, new)})
    files.save_profile(profile)
    return profile


def _request_key(request: PlanRequest, profile: Profile) -> str:
    return request_key(request.policy, request.constraints, request.non_training, profile.correction)


# -- a plan that is there already --------------------------------------------------------------------------------------


def reuse_if_valid(
    plan: ExecutionPlan | None, traced: TracedStep, ranks: RankGroup, policy: BatchSizePolicy, memory_limit_bytes: int
) -> ExecutionPlan | None:
    """Return the first rank's ``plan`` on every rank if a run like this one made it; else None on every rank.

    It must be for this model, this kind and number of devices, within the memory limit, and with a batch size that
    ``policy`` allows.
    """
    text = ranks.broadcast_object(plan.to_json() if plan is not None else None)
    limit_bytes = ranks.all_reduce_min(memory_limit_bytes)
    if text is None:
        return None
    earlier = ExecutionPlan.from_json(text)
    try:
        ranks.raise_on_all_ranks(lambda: earlier.check(traced.model_profile, ranks.world_size))
    except PlanMismatchError:
        return None
    cluster = current_cluster(ranks)
    is_same = all(getattr(cluster, name) == getattr(earlier.cluster, name) for name in ("nodes", "device", "backend"))
    fits = earlier.predicted.max_memory_bytes <= limit_bytes
    is_allowed = (earlier.batch_size, earlier.accumulate_grad_batches) in set(policy.candidates(ranks.world_size))
    return earlier if ranks.all_reduce_min(is_same and fits and is_allowed) else None

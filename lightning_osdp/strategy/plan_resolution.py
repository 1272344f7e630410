"""Where a run's plan comes from: given, stored in a checkpoint, or made now; a new one when memory drifts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_osdp.autotune import pipeline
from lightning_osdp.autotune.pipeline import PlanningResult
from lightning_osdp.autotune.ranks import RankGroup, current_cluster, ranks_sharing_memory_limit
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.planning.cost.run_correction import Correction, MeasuredStep, update_correction
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, CheckpointMemory, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy.batch_agreement import agree_on_batches
from lightning_osdp.strategy.dataloader import TrainData
from lightning_osdp.strategy.failure_detector import assert_equal_on_ranks
from lightning_osdp.strategy.planning_options import PlanningOptions, check_given_plan
from lightning_osdp.strategy.run_warnings import warn_if_device_has_less
from lightning_osdp.strategy.weight_averages import count_averaged_copies


@dataclass(frozen=True)
class RunRequest:
    """What a run asks of its plan.

    Attributes:
        options: the strategy's arguments about planning.
        constraints: the constraints of OSDPCallback.
        checkpoint_memory: where a checkpoint gathers the model while it is saved.
        ranks_per_node: number of ranks on this machine.
        resumed_plan: the plan of the checkpoint to resume from, to use again if it is still valid.
    """

    options: PlanningOptions
    constraints: SearchConstraints
    checkpoint_memory: CheckpointMemory
    ranks_per_node: int
    resumed_plan: ExecutionPlan | None


def read_step_on_ranks(
    ranks: RankGroup, options: PlanningOptions, trainer: pl.Trainer, device: torch.device
) -> tuple[TrainData, TrialContext]:
    """Return the training data, and the training step on the batches that all ranks plan with. Collective.

    Raises:
        ConfigurationError: there are no train data, or they can't be read.
    """
    data, context = ranks.raise_on_all_ranks(lambda: options.read_step(trainer, device))
    return data, agree_on_batches(ranks, data, context)


def resolve_plan(
    trainer: pl.Trainer,
    budget: StartupBudget,
    given_plan: ExecutionPlan | None,
    data: TrainData,
    context: TrialContext,
    run: RunRequest,
) -> PlanningResult:
    """Return the plan that was given or that a checkpoint holds, once it is known to be valid, or a new one."""
    ranks, options = budget.ranks, run.options
    non_training = NO_NON_TRAINING_WORK
    if given_plan is None:
        evaluation_batch_size = int(ranks.all_reduce_max([data.evaluation_batch_size()])[0])
        non_training = NonTrainingWork(
            checkpoint_memory=run.checkpoint_memory, evaluation_batch_size=evaluation_batch_size
        )
        non_training = count_averaged_copies(trainer, context.device, non_training)
    if given_plan is None or given_plan.has_unproven_scopes:
        context = options.with_tensor_degrees(context, run.constraints, current_cluster(ranks))
    budget.begin_stage("tracing the training step")
    traced = pipeline.profile_model_on_ranks(ranks, context, non_training, options.cache_folder)
    traced = options.with_reduce_dtype(traced)
    assert_equal_on_ranks(ranks.group, "the model (fingerprint)", traced.model_profile.fingerprint[:12])
    blocker = options.in_backward_blocker(trainer, traced)
    constraints = options.constraints(run.constraints, blocker, context.device)
    ranks.raise_on_all_ranks(lambda: constraints.check(traced.model_profile, current_cluster(ranks)))
    if given_plan is not None:
        ranks.raise_on_all_ranks(lambda: check_given_plan(given_plan, traced, ranks, blocker, constraints))
        sizes = ranks.all_gather_object(data.loader_batch_size or context.batch_size)
        ranks.raise_on_all_ranks(lambda: options.check_sizes(given_plan, sizes, trainer.accumulate_grad_batches))
        proven = ranks.raise_on_all_ranks(lambda: given_plan.with_proven_scopes(traced.model_profile))
        return PlanningResult(proven.with_types_of(traced.model_profile))
    limit = options.limit_on(context.device, run.ranks_per_node, ranks_sharing_memory_limit(ranks))
    facts = (trainer, data, context.batch_size, ranks.world_size, limit, constraints, non_training)
    only = traced.model_profile.only_batch_size
    request = ranks.raise_on_all_ranks(lambda: options.request(*facts, only))
    request = replace(request, policy=_agree_on_batch_sizes(request.policy, ranks))
    resumed = pipeline.reuse_if_valid(run.resumed_plan, traced, ranks, request.policy, limit.current())
    if resumed is not None and not (resumed.update_in_backward and blocker):
        return PlanningResult(resumed.with_types_of(traced.model_profile))
    step = context if options.trial_steps else None
    result = pipeline.autotune(traced, request, ranks, budget, cache=options.cache_folder, trial_context=step)
    if not ranks.is_emulated:
        warn_if_device_has_less(result.plan, limit)
    return result


def _agree_on_batch_sizes(policy: BatchSizePolicy, ranks: RankGroup) -> BatchSizePolicy:
    """Return the batch sizes that the data of every rank allow: a loader of one alone may be fixed.

    Where ranks keep loaders of other batch sizes, it is the largest.
    """
    policies = ranks.all_gather_object(policy)
    fixed = [policy.batch_size for policy in policies if policy.batch_size is not None]
    bounds = [(each.max_batch_size, each.bounding_setting) for each in policies if each.max_batch_size is not None]
    bound, setting = min(bounds, key=lambda each: each[0], default=(None, ""))
    return replace(policies[0], batch_size=max(fixed, default=None), max_batch_size=bound, bounding_setting=setting)


def replan(
    result: PlanningResult, measured_step: MeasuredStep, is_automatic: bool
) -> tuple[ExecutionPlan, Correction] | None:
    """Return a plan that fits ``measured_step`` better at the same batch size; None, with a warning, if there is none.

    Args:
        result: what planning has made, with the plan in use.
        measured_step: step time and peak memory under that plan.
        is_automatic: whether Lightning runs the backward pass.
    """
    plan, replanner, unchanged = result.plan, result.replanner, "memory left its prediction, but the plan is kept"
    if replanner is None or not is_automatic:
        reason = "it was given" if replanner is None else "gradients are the module's own (manual optimization)"
        rank_zero_warn(f"{unchanged}: {reason}", category=OSDPWarning)
        return None
    correction = update_correction(result.correction, plan, measured_step)
    policy = BatchSizePolicy(batch_size=plan.batch_size, accumulation=plan.accumulate_grad_batches)
    try:
        return replanner.replan(correction, policy), correction
    except InfeasibleError as error:
        rank_zero_warn(f"{unchanged}: {error}", category=OSDPWarning)
        return None

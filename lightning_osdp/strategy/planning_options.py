"""The arguments of OSDPStrategy that say what to plan, checked, and what follows from them for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_osdp.autotune import profile_cache
from lightning_osdp.autotune.coordinator import PlanRequest
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.backend.memory import MemoryLimit
from lightning_osdp.engine.base import engine_capabilities, find_engine
from lightning_osdp.errors import ConfigurationError, check_kind
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.capabilities import DEFAULT_ENGINE
from lightning_osdp.planning.spec.choices import Mode, slice_counts, tensor_degrees
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import SearchConstraints, matches
from lightning_osdp.planning.spec.formatting import parse_memory_limit
from lightning_osdp.planning.spec.model import ModelProfile, NonTrainingWork, Operator
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.profiling.tracing.trace import TracedStep
from lightning_osdp.strategy import arguments
from lightning_osdp.strategy.dataloader import TrainData, read_data

USUAL_DEGREES = (2, 4, 8)
"""Numbers of ranks that operators are tried to be cut over where the cluster is not known yet."""


@dataclass(frozen=True)
class PlanningOptions:
    """The arguments of ``OSDPStrategy`` that say what to plan, by its names.

    Raises:
        ConfigurationError: an argument can't be used.
    """

    memory_limit: int | str = "auto"
    batch_size: int | str = "auto"
    max_batch_size: int | None = None
    global_batch_size: int | str | None = None
    cluster: str | Path | Cluster | None = None
    sharding_group: str = "auto"
    cache: str | Path | None = None
    trial_steps: bool = True
    update_in_backward: bool = True
    engine: str = DEFAULT_ENGINE
    min_steps_per_epoch: int = 100
    sample_batches: int = 8
    sample_batch: Any = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        """Check the arguments, and import the engine: later that would count as memory that training takes."""
        for name in ("engine", "sharding_group"):
            check_kind(name, getattr(self, name), str, "a name")
        for name in ("trial_steps", "update_in_backward"):
            check_kind(name, getattr(self, name), bool, "True or False")
        for name in ("min_steps_per_epoch", "sample_batches"):
            check_kind(name, getattr(self, name), Integral, "a positive whole number")
            arguments.validate_positive(name, getattr(self, name))
        check_kind("cache", self.cache, (str, Path, NoneType), "a folder, '' for none, or None for the user's own")
        wanted = "a Cluster or the path of a file of `osdp profile`"
        check_kind("cluster", self.cluster, (str, Path, Cluster, NoneType), wanted)
        find_engine(self.engine)
        if self.batch_size == self.global_batch_size == "keep":
            raise ConfigurationError("batch_size='keep' keeps the global batch size too: give one of both")
        arguments.parse_reduce_dtype(self.reduce_dtype)
        _ = self.policy, self.memory_limit_bytes, SearchConstraints(sharding_group=self.sharding_group)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit in bytes; None for ``memory_share`` of what the device has."""
        return parse_memory_limit(self.memory_limit)[0]

    @property
    def memory_share(self) -> float:
        """The share of the device's memory that may be used where ``memory_limit_bytes`` is None."""
        return parse_memory_limit(self.memory_limit)[1]

    def limit_on(self, device: torch.device, local_ranks: int, group_ranks: int | None = None) -> MemoryLimit:
        """Return what a rank may use of ``device``; the numbers of ranks are those of ``MemoryLimit``."""
        return MemoryLimit(device, local_ranks, group_ranks, self.memory_limit_bytes, self.memory_share)

    @property
    def policy(self) -> BatchSizePolicy:
        """The requested batch sizes, without what the data and the Trainer say."""
        return BatchSizePolicy(
            arguments.validate_positive("batch_size", self.batch_size, ("auto", "keep")),
            arguments.validate_positive("max_batch_size", self.max_batch_size),
            arguments.validate_positive("global_batch_size", self.global_batch_size, ("keep",)),
        )

    @property
    def cache_folder(self) -> Path | None:
        """The folder of measurements; None to cache nothing."""
        return profile_cache.cache_folder(self.cache)

    def constraints(
        self, from_callback: SearchConstraints, in_backward_blocker: str, device: torch.device
    ) -> SearchConstraints:
        """Return what is not left to the search.

        Args:
            from_callback: the constraints of OSDPCallback.
            in_backward_blocker: why parameters may not be updated in the backward pass; empty if they may.
            device: the device to train on.
        """
        return replace(
            from_callback,
            sharding_group=self.sharding_group,
            update_in_backward=not in_backward_blocker,
            capabilities=engine_capabilities(self.engine, device),
        )

    def with_reduce_dtype(self, traced: TracedStep) -> TracedStep:
        """Return the traced step, whose gradients are reduced in the type that is asked for."""
        dtype = arguments.parse_reduce_dtype(self.reduce_dtype)
        return replace(traced, model_profile=traced.model_profile.with_reduce_dtype(dtype)) if dtype else traced

    def in_backward_blocker(self, trainer: pl.Trainer, traced: TracedStep) -> str:
        """Return why the run may not update parameters in the backward pass, in words; empty if it may."""
        return arguments.in_backward_blocker(
            trainer,
            trainer.precision_plugin,
            is_allowed=self.update_in_backward,
            per_parameter=traced.model_profile.optimizer_step.per_parameter,
        )

    def read_step(self, trainer: pl.Trainer, device: torch.device) -> tuple[TrainData, TrialContext]:
        """Return the training data, and the training step on a batch of them on ``device``.

        Raises:
            ConfigurationError: there are no train data, or they can't be read.
        """
        module, precision = trainer.lightning_module, trainer.precision_plugin
        data, batch, batch_size = read_data(trainer, module, self.sample_batches, self.sample_batch)
        typical = precision.convert_input(data.typical_batch)
        largest = precision.convert_input(batch) if data.typical_batch is not batch else None
        step_context = precision.train_step_context
        return data, TrialContext(module, typical, batch_size, device, step_context, self.engine, largest)

    def with_tensor_degrees(
        self, context: TrialContext, constraints: SearchConstraints, cluster: Cluster | None = None
    ) -> TrialContext:
        """Return ``context`` with the numbers of ranks that operators may be cut over."""
        capabilities = engine_capabilities(self.engine, context.device)
        if Mode.TP not in capabilities.modes or constraints.tensor_parallel is False:
            return context
        return replace(context, tensor_degrees=USUAL_DEGREES if cluster is None else tensor_degrees(cluster))

    def policy_with_kept_sizes(self, trainer: pl.Trainer, batch_size: int, num_ranks: int) -> BatchSizePolicy:
        """Return the requested batch sizes, where ``"keep"`` means those of a data loader that gives ``batch_size``.

        Raises:
            ConfigurationError: the batch size is fixed, and above its maximum.
        """
        accumulation = arguments.validate_positive("accumulate_grad_batches", trainer.accumulate_grad_batches)
        policy = replace(self.policy, accumulation=accumulation or 1)
        if self.batch_size == "keep":
            policy = replace(policy, batch_size=batch_size)
        fixed, largest = policy.batch_size, policy.max_batch_size
        if fixed is not None and largest is not None and fixed > largest:
            text = f"batch_size={self.batch_size!r} is {fixed} per device, more than max_batch_size={largest}"
            raise ConfigurationError(f"{text}: give one of both")
        if self.global_batch_size == "keep":
            policy = replace(policy, global_batch_size=batch_size * num_ranks * policy.accumulation)
        return policy

    def check_sizes(self, plan: ExecutionPlan, present: Sequence[int], accumulation: int) -> None:
        """Refuse a plan that was given beside a batch size that it does not have.

        Args:
            plan: the plan.
            present: the batch size of each rank's loader.
            accumulation: batches per optimizer step that the Trainer asks for.

        Raises:
            ConfigurationError: an argument and the plan contradict each other.
        """
        size, total = plan.batch_size, plan.batch_size * plan.accumulate_grad_batches * len(present)
        kept_total = present[0] * accumulation * len(present)
        requests: list[tuple[str, Any, int, int]] = [
            ("batch_size", self.batch_size, max(present), size),
            ("global_batch_size", self.global_batch_size, kept_total, total),
        ]
        if self.max_batch_size is not None and size > self.max_batch_size:
            requests.append(("max_batch_size", self.max_batch_size, size, size))
        for name, value, kept, planned in requests:
            if value not in (None, "auto") and (kept if value == "keep" else value) != planned:
                loaders = f", the train dataloader's {kept}" if value == "keep" else ""
                text = f"plan and {name}={value!r} contradict each other: the plan's is {planned}{loaders}"
                raise ConfigurationError(f"{text}. Leave one of them out")

    def remedy(self, plan: ExecutionPlan, present: int, ranks: int, is_given: bool) -> str:
        """Say how the batch size and accumulation stay as they were; empty where the user asked for other ones.

        Args:
            plan: the plan that changes them.
            present: the loader's batch size.
            ranks: number of ranks.
            is_given: whether the plan was given.
        """
        if self.batch_size != "auto":
            return ""
        if is_given:
            return "the plan that was given says so: batch_size='keep' without it keeps yours"
        total = self.global_batch_size
        if plan.batch_size == present or (isinstance(total, Integral) and total % (present * ranks)):
            return ""
        return f"batch_size='keep'{' in place of global_batch_size' * (total == 'keep')} keeps yours"

    def request(
        self,
        trainer: pl.Trainer,
        data: TrainData,
        batch_size: int,
        num_ranks: int,
        memory_limit: MemoryLimit,
        constraints: SearchConstraints,
        non_training: NonTrainingWork,
        only_batch_size: int,
    ) -> PlanRequest:
        """Return what a plan is asked for.

        Args:
            trainer: the Trainer of the run.
            data: its training data.
            batch_size: number of samples that the data loader gives now.
            num_ranks: number of ranks.
            memory_limit: memory limit of a device.
            constraints: what is not left to the search.
            non_training: what the run does between steps.
            only_batch_size: the batch size at which alone the step works; 0 for any.

        Raises:
            ConfigurationError: a batch size can't be set, or the cluster can't be read.
        """
        module, device = trainer.lightning_module, memory_limit.device
        present = data.loader_batch_size or batch_size
        policy = self.policy_with_kept_sizes(trainer, present, num_ranks)
        policy = data.batch_size_policy(
            present, policy, num_ranks, not trainer.is_global_zero, self.min_steps_per_epoch
        )
        tensors = (*module.parameters(), *module.buffers())
        return PlanRequest(
            policy=policy.restricted_to(only_batch_size),
            memory_limit=memory_limit,
            model_bytes=sum(tensor.nbytes for tensor in tensors if tensor.device == device),
            cluster=arguments.read_cluster(self.cluster),
            constraints=constraints,
            non_training=non_training,
        )


def check_and_read_plan(trainer: pl.Trainer, plan: str | Path | ExecutionPlan | None) -> ExecutionPlan | None:
    """Reject what can't work, and read the plan that was given, before anything else is done.

    Raises:
        ConfigurationError: the run can't work, or the plan can't be read.
    """
    arguments.reject_unsupported(trainer, trainer.precision_plugin)
    if not any(parameter.requires_grad for parameter in trainer.lightning_module.parameters()):
        raise ConfigurationError("the module has no trainable parameters: there is nothing to plan or train")
    return arguments.read_plan(plan)


def check_given_plan(
    plan: ExecutionPlan, traced: TracedStep, ranks: RankGroup, in_backward_blocker: str, constraints: SearchConstraints
) -> None:
    """Reject a plan that is not for this model, these ranks and this run.

    Raises:
        PlanMismatchError: the plan is for another model or other ranks.
        ConfigurationError: the plan updates parameters in the backward pass, which the run does not allow, or an
            operator or block is not as OSDPCallback asks for.
    """
    plan.check(traced.model_profile, ranks.world_size, ranks.nodes)
    arguments.check_plan_allows_in_backward(plan, in_backward_blocker)
    model = constraints.restrict_tensor_parallel(traced.model_profile, plan.cluster)
    pairs = list(zip(model.operators, plan.operators_of(model), strict=True))
    blocks = _contradicted_blocks(constraints, model, plan)
    for argument, text in (*_contradicted_requests(constraints, pairs), *blocks):
        raise ConfigurationError(
            f"plan and OSDPCallback({argument}=...) contradict each other: {text}. Leave one of them out"
        )


def _contradicted_requests(
    constraints: SearchConstraints, pairs: Sequence[tuple[Operator, OperatorPlan]]
) -> Iterator[tuple[str, str]]:
    """Yield the argument of OSDPCallback and what the plan says, where an operator is not as it asks."""
    for operator, planned in pairs:
        mode, has = constraints.forced_mode(operator), f"{operator.name} is {' + '.join(planned.slices)} in the plan"
        if mode is not None and set(planned.slices) != {mode}:
            yield "modes", f"{has}, {mode} by modes"
        if planned.tensor is not None and not _allows(constraints, operator, planned.tensor.degree):
            yield "tensor_parallel", f"{operator.name} is cut over {planned.tensor.degree} ranks in the plan"
        is_auto, count = constraints.slice_granularity == "auto", len(planned.slices)
        allowed = None if is_auto else constraints.allowed_slices(operator.name)
        is_free = count == 1 and (set(planned.slices) <= {Mode.DP, Mode.TP} or not slice_counts(operator, allowed))
        if allowed is not None and count not in allowed and not is_free:
            yield "slice_granularity", f"{has}, and so in {count} slice{'s' * (count > 1)}"
    for argument, pattern in constraints.patterns_of_tensor_parallelism():
        if not any(planned.tensor for operator, planned in pairs if matches(pattern, operator.name)):
            yield argument, f"nothing that {pattern!r} matches is tp in the plan"


def _contradicted_blocks(
    constraints: SearchConstraints, model: ModelProfile, plan: ExecutionPlan
) -> Iterator[tuple[str, str]]:
    for block in model.blocks:
        forced, is_recomputed = constraints.forced_recompute(block.name), block.name in plan.recomputed
        if forced is not None and forced != is_recomputed and not block.recompute_blocker:
            yield "activation_checkpointing", f"{block.name} is {'' if is_recomputed else 'not '}recomputed in the plan"


def _allows(constraints: SearchConstraints, operator: Operator, degree: int) -> bool:
    """Return whether the user lets an operator be cut over ``degree`` ranks; what was found possible does not count."""
    if operator.tensor is not None and operator.tensor.is_required:
        return degree in operator.tensor.degrees
    return constraints.tensor_parallel is not False and constraints.requested_degree(operator.name) in (None, degree)

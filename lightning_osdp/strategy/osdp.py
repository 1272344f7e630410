"""OSDPStrategy: Lightning's hooks in order. Plans on rank 0, applies the plan, and lets the engine do its work."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.autotune import measure, pipeline
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.backend import memory
from lightning_osdp.backend.allocator import HeapController
from lightning_osdp.backend.fused_adam import fused_step
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.meta_init import MetaInitializer, check_initializable, is_meta
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPWarning
from lightning_osdp.planning.cost.run_correction import Correction, MeasuredStep, update_correction
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.formatting import parse_bytes
from lightning_osdp.planning.spec.model import NO_NON_TRAINING_WORK, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import tables
from lightning_osdp.state.checkpoint import CheckpointFormat
from lightning_osdp.strategy import arguments, model_summary, out_of_memory, precision, preemption
from lightning_osdp.strategy.dataloader import TrainData, apply_batch_size, read_data
from lightning_osdp.strategy.failure_detector import assert_equal_on_ranks
from lightning_osdp.strategy.monitor import PredictionMonitor
from lightning_osdp.strategy.processes import ProcessGroupStrategy

REPLAN_MODES = ("never", "on_drift")
"""What ``replan`` may be."""

PLAN_FILE = "osdp_plan.json"
"""Name of the plan in the trainer's log directory."""


class OSDPStrategy(ProcessGroupStrategy):
    """Optimal sharded data parallelism (Jiang et al., arXiv 2209.13258) as a Lightning strategy.

    Before training it reads the module's training step, measures the hardware, searches the batch size and for each
    operator whether to replicate or shard it, and applies that plan with FairScale units.

    Args:
        memory_limit: per device: ``"auto"`` (what the device has), bytes, or text such as ``"8GiB"``.
        batch_size: per device: ``"auto"`` to search it, or a number to keep.
        max_batch_size: upper end of the search.
        global_batch_size: if given, batch size x accumulation x ranks makes exactly this.
        plan: a plan, or the path of one, to use as it is: nothing is profiled or searched.
        cluster: hardware that is known already, or the path of its JSON: links are not measured.
        sharding_group: where there are several nodes: ``"auto"`` chooses for each operator whether it is sharded over
            all ranks or over those of its node (gradients are then averaged between nodes), ``"world"`` and
            ``"node"`` allow one of them.
        engine: what carries the plan out; ``"fairscale"`` is the only one.
        save_format: ``"full"`` saves one ordinary file; ``"sharded"`` a folder that every rank writes its part of.
        replan: ``"on_drift"`` makes a new plan, at the same batch size and with nothing lost, when the measured peak of
            memory leaves the predicted one by more than 5 % or exceeds the limit; ``"never"`` only reports it.
        trial_steps: whether the module's own step is run some 30 times on a copy while planning, where there is room for
            it. False where ``training_step`` does things that can't be repeated; predicted times are less sure then.
        update_in_backward: whether sharded parameters may be updated in the backward pass, each as soon as its gradient
            is there, which then need not be kept. It is done where memory is so short that it pays, and where nothing
            needs all gradients at once: no clipping, accumulation, loss scale, hooks that look at gradients; one
            optimizer of ``torch.optim`` without temporaries (``fused_step``; Adam and AdamW are that by themselves).
        cache: folder for measurements; None for the user's cache folder, ``""`` to keep none.
        timeout: of the process group; 30 minutes if None.
        process_group_backend: default: NCCL on CUDA, gloo on the CPU.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        checkpoint_io: set by the Trainer.
        precision_plugin: set by the Trainer.

    Raises:
        ConfigurationError: an argument can't be used.
    """

    def __init__(
        self,
        memory_limit: int | str = "auto",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        global_batch_size: int | None = None,
        plan: str | Path | ExecutionPlan | None = None,
        cluster: str | Path | Cluster | None = None,
        sharding_group: str = "auto",
        engine: str = "fairscale",
        save_format: str = "full",
        replan: str = "never",
        trial_steps: bool = True,
        update_in_backward: bool = True,
        cache: str | Path | None = None,
        timeout: timedelta | None = None,
        process_group_backend: str | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            timeout or timedelta(minutes=30),
            process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._memory_limit = None if memory_limit == "auto" else parse_bytes(memory_limit)
        self._batch_size = arguments.validate_positive("batch_size", None if batch_size == "auto" else batch_size)
        self._max_batch_size = arguments.validate_positive("max_batch_size", max_batch_size)
        self._global_batch_size = arguments.validate_positive("global_batch_size", global_batch_size)
        self._given_plan, self._given_cluster = plan, cluster
        self._sharding_group = SearchConstraints(sharding_group=sharding_group).sharding_group
        if engine != "fairscale":
            raise ConfigurationError(f"engine={engine!r} is not known: the only one is 'fairscale'")
        self._checkpoint_format = CheckpointFormat(save_format)
        self._engine: FairScaleEngine | None = None
        self._cache = measure.cache_folder(cache)
        self._replan_mode = arguments.validate_choice("replan", replan, REPLAN_MODES)
        self._trial_steps = trial_steps
        self._update_in_backward = update_in_backward
        self._plan: ExecutionPlan | None = None
        self._monitor: PredictionMonitor | None = None
        self._heap_controller: HeapController | None = None
        self._planning_result: pipeline.PlanningResult | None = None
        self.constraints = SearchConstraints()
        """What may be split and recomputed; set by OSDPCallback before planning."""
        self.resumed_plan: ExecutionPlan | None = None
        """A plan to use again if it still fits (from the checkpoint to resume from); set by OSDPCallback."""

    def __repr__(self) -> str:
        return "<OSDPStrategy for lightning.pytorch.Trainer>"  # pytorch_lightning's says that it can't use this

    # What the Trainer asks for while it is built

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register("osdp", cls, description="Optimal sharded data parallelism, planned automatically")

    @property
    def execution_plan(self) -> ExecutionPlan | None:
        """The plan in use; None before ``fit`` has made or read one."""
        return self._plan

    @property
    def search_constraints(self) -> SearchConstraints:
        """All that is not left to the search: the callback's wishes and the strategy's own."""
        return replace(self.constraints, sharding_group=self._sharding_group)

    @property
    def measured_step(self) -> MeasuredStep | None:
        """Step time and peak memory of this rank's training so far; None until enough steps were made."""
        return self._monitor.measured_step if self._monitor is not None else None

    # Planning and applying

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """In ``fit``: plans and applies. Elsewhere: copies the module to the device, unless it is sharded already."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        arguments.disable_inference_mode(trainer)
        self._defer_gathers_on_save(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            if self._engine is None:
                self._set_up_evaluation()
            self.setup_precision_plugin()
            return
        preemption.install(trainer)
        if self._engine is None or self._engine.module is not self.model:
            self._set_up_training(trainer)
        else:
            with self._engine.unsharded_shapes():
                self.setup_optimizers(trainer)
            self._engine.shard_optimizer_state(self.optimizers)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._monitor = self._create_monitor()
        assert self._plan is not None
        self._heap_controller = HeapController(self._plan, self.root_device)

    def _set_up_evaluation(self) -> None:
        """The whole module on every rank, with the first one's values."""
        assert self.model is not None
        check_initializable(self.model)
        MetaInitializer(self.model, self.root_device).fill(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        _sync_module_states(self.model)

    def _set_up_training(self, trainer: pl.Trainer) -> None:
        """Recipe: find a plan, check it, resize the batch, make optimizers, apply, tell."""
        began_s = time.monotonic()
        module = self.lightning_module
        assert module is not None
        ranks = measure.RankGroup.from_node_rank(dist.group.WORLD, self.node_rank, self.root_device)
        given = pipeline.raise_on_all_ranks(ranks, lambda: self._validate_and_load_plan(trainer))
        self.model = self.precision_plugin.convert_module(module)
        with isolate_rng():  # planning must not change what the run's own random numbers are
            data, batch, batch_size = pipeline.raise_on_all_ranks(ranks, lambda: read_data(trainer, module))
            batch = self.precision_plugin.convert_input(batch)
            self._planning_result = self._resolve_plan(trainer, ranks, given, data, batch, batch_size, began_s)
            data.reset_dataloader()
        if self._replan_mode == "never":
            self._planning_result = replace(
                self._planning_result, replan=None
            )  # it holds all that was read of the step: some MiB
        self._plan = plan = self._planning_result.plan
        assert_equal_on_ranks(ranks.group, "the plan", hashlib.sha256(plan.to_json().encode()).hexdigest()[:12])
        engine = FairScaleEngine(self.root_device, ranks.group)
        pipeline.raise_on_all_ranks(ranks, lambda: engine.check(module, plan))
        if plan.batch_size != batch_size:
            pipeline.raise_on_all_ranks(ranks, lambda: apply_batch_size(data, plan.batch_size))
        trainer.accumulate_grad_batches = plan.accumulate_grad_batches
        if self._layer_sync is not None:  # after planning: a synchronised layer can't run on fake tensors
            self.model = self._layer_sync.apply(module)
        if is_meta(module):  # there is nothing yet that optimizers could copy, nor will it ever be whole
            engine.apply(module, plan, ())
            with engine.unsharded_shapes():
                pipeline.raise_on_all_ranks(ranks, lambda: self.setup_optimizers(trainer))
            engine.shard_optimizer_state(self.optimizers)
        else:
            pipeline.raise_on_all_ranks(ranks, lambda: self.setup_optimizers(trainer))
            engine.apply(module, plan, self.optimizers)
        # Where nothing was measured or searched for there is little garbage; it was looked for, or counted as in use.
        memory.trim(self.root_device, generation=1 if self._planning_result.reused else 2)
        self._engine = engine
        model_summary.count_unsharded_parameters(trainer, engine.unsharded_shapes)
        self._print_and_write_plan(
            trainer, tables.plan_table(plan, self._planning_result.profiling_s, engine.collectives_per_step)
        )

    def _resolve_plan(
        self,
        trainer: pl.Trainer,
        rank_group: measure.RankGroup,
        given_plan: ExecutionPlan | None,
        data: TrainData,
        batch: Any,
        batch_size: int,
        started_at_s: float,
    ) -> pipeline.PlanningResult:
        """The plan that was given or that a checkpoint holds, once it is known to fit, or a new one."""
        module, context = self.lightning_module, self.precision_plugin.train_step_context
        assert module is not None
        device = self.root_device
        between = NO_NON_TRAINING_WORK
        if given_plan is None:
            between = NonTrainingWork(
                checkpoint_memory=self._checkpoint_memory_mode(trainer),
                evaluation_batch_size=data.evaluation_batch_size(),
            )
        read = partial(pipeline.profile_model, module, batch, batch_size, device, context, between, self._cache)
        traced = pipeline.profile_model_on_ranks(rank_group, module, self._cache, read)
        assert_equal_on_ranks(rank_group.group, "the model (fingerprint)", traced.model_profile.fingerprint[:12])
        separable = traced.model_profile.optimizer_step.per_parameter
        why_not = arguments.in_backward_blocker(
            trainer, self.precision_plugin, is_allowed=self._update_in_backward, per_parameter=separable
        )
        if given_plan is not None:
            pipeline.raise_on_all_ranks(
                rank_group, lambda: given_plan.check(traced.model_profile, rank_group.world_size, rank_group.nodes)
            )
            pipeline.raise_on_all_ranks(
                rank_group, lambda: arguments.check_plan_allows_in_backward(given_plan, why_not)
            )
            return pipeline.PlanningResult(given_plan)
        rule = pipeline.raise_on_all_ranks(rank_group, lambda: self._batch_size_policy(trainer, data, batch_size))
        cluster = pipeline.raise_on_all_ranks(rank_group, lambda: arguments.read_cluster(self._given_cluster))
        tensors = [*module.parameters(), *module.buffers()]
        model_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        limit = memory.MemoryLimit(
            device, self.num_processes, measure.ranks_sharing_memory_limit(rank_group), self._memory_limit
        )
        earlier = pipeline.reuse_if_valid(self.resumed_plan, traced, rank_group, rule, limit.current())
        if earlier is not None and self._replan_mode == "never" and not (earlier.update_in_backward and why_not):
            return pipeline.PlanningResult(earlier)
        return pipeline.autotune(
            traced,
            rank_group,
            rule,
            limit,
            model_bytes,
            cluster=cluster,
            cache=self._cache,
            constraints=replace(self.search_constraints, update_in_backward=not why_not),
            non_training=between,
            trial_context=TrialContext(module, batch, batch_size, device, context) if self._trial_steps else None,
            started_at_s=started_at_s,
        )

    def _validate_and_load_plan(self, trainer: pl.Trainer) -> ExecutionPlan | None:
        """Refuses what can't work and reads the plan that was given, before anything else is done."""
        arguments.reject_unsupported(trainer, self.precision_plugin)
        assert self.lightning_module is not None
        if not any(p.requires_grad for p in self.lightning_module.parameters()):
            raise ConfigurationError("the module has no trainable parameters: there is nothing to plan or train")
        return arguments.read_plan(self._given_plan)

    def _batch_size_policy(self, trainer: pl.Trainer, data: TrainData, batch_size: int) -> BatchSizePolicy:
        accumulation = trainer.accumulate_grad_batches
        wished = BatchSizePolicy(self._batch_size, self._max_batch_size, self._global_batch_size, accumulation)
        return data.batch_size_policy(batch_size, wished, self.world_size, quiet=not self.is_global_zero)

    def _create_monitor(self, detect_drift: bool = True) -> PredictionMonitor:
        assert self._plan is not None
        correction, file = Correction(), None
        if self._planning_result is not None:
            correction, file = self._planning_result.correction, self._planning_result.cache_file
        keep = partial(measure.store_correction, file) if file is not None else None
        ranks = measure.RankGroup(dist.group.WORLD, self.num_nodes, self.root_device)
        return PredictionMonitor(
            self._plan, ranks, correction, keep, detect_drift=detect_drift and self._replan_mode == "on_drift"
        )

    def _print_and_write_plan(self, trainer: pl.Trainer, table: Any) -> None:
        folder = trainer.log_dir  # a broadcast: on every rank
        if not self.is_global_zero:
            return
        Console().print(table)
        assert self._plan is not None
        tables.write_plan(self._plan, Path(folder or ".") / PLAN_FILE)

    @override
    def setup_precision_plugin(self) -> None:
        """Connects the plugin and has it clip by the norm over all ranks."""
        super().setup_precision_plugin()
        if self._engine is not None:
            precision.patch_for_sharded_gradients(self.precision_plugin, self.clip_grad_norm, dist.group.WORLD)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are made on the host, or with ``empty_init`` on the meta device, and come to the device in parts."""
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # Training

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Between two steps: goes on under a better plan, if the one in use has proved wrong."""
        assert self._monitor is not None
        if self._monitor.drift is not None:
            self._replan(self._monitor.drift)

    def _replan(self, measured: MeasuredStep) -> None:
        """From the same model and optimizer state, at the same batch size; warns where that can't be."""
        assert self._engine is not None
        assert self._planning_result is not None
        assert self._plan is not None
        assert self.lightning_module is not None
        outcome, self._monitor = self._planning_result, self._create_monitor(detect_drift=False)
        if outcome.replan is None or not self.lightning_module.automatic_optimization:
            why = "it was given" if outcome.replan is None else "gradients are the module's own (manual optimization)"
            rank_zero_warn(f"memory left its prediction, but the plan is kept: {why}", category=OSDPWarning)
            return
        correction = update_correction(outcome.correction, self._plan, measured)
        rule = BatchSizePolicy(batch_size=self._plan.batch_size, accumulation=self._plan.accumulate_grad_batches)
        try:
            plan = outcome.replan(correction, rule)
        except InfeasibleError as error:
            rank_zero_warn(f"memory left its prediction, but the plan is kept: {error}", category=OSDPWarning)
            return
        self._engine.apply_plan_change(plan, self.optimizers)
        memory.trim(self.root_device)
        self._plan, self._planning_result = plan, replace(outcome, plan=plan, correction=correction)
        self._monitor, self._heap_controller = self._create_monitor(), HeapController(plan, self.root_device)
        self._print_and_write_plan(
            self.lightning_module.trainer, tables.plan_table(plan, None, self._engine.collectives_per_step)
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        assert self._monitor is not None
        assert self._heap_controller is not None
        self._heap_controller.on_step_start()
        self._monitor.on_microbatch_start()
        self._engine.before_forward()
        with self._explain_oom():
            return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self._engine is not None
        self._engine.finish_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Completes the reductions, updates, and frees the gradients at once."""
        assert self._engine is not None
        assert self._monitor is not None
        assert self.lightning_module is not None
        self._engine.before_optimizer_step(optimizer)
        with self._explain_oom(), fused_step(optimizer):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._engine.after_optimizer_step()
        if self.lightning_module.automatic_optimization:
            # Lightning frees gradients only after the next forward, where they would add to the activations.
            optimizer.zero_grad(set_to_none=True)
        self._monitor.on_step_end()
        assert self._heap_controller is not None
        self._heap_controller.on_step_end()
        return result

    def _explain_oom(self) -> AbstractContextManager[None]:
        assert self._plan is not None
        return out_of_memory.explain_oom(self._plan, self.global_rank, lambda: memory.peak_reserved(self.root_device))

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over whole gradients, wherever their parts are; gives the norm before.

        To be called on all ranks, for instance in ``configure_gradient_clipping``.
        """
        assert self._engine is not None
        return self._engine.clip_grad_norm(parameters, max_norm, norm_type)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._engine is not None
        with self._engine.no_sync():
            yield

    @override
    def on_train_end(self) -> None:
        """Prints what was predicted beside what was measured on the slowest rank."""
        assert self._monitor is not None
        self._monitor.report()

    @override
    def on_validation_start(self) -> None:
        self._release_heap()

    @override
    def on_test_start(self) -> None:
        self._release_heap()

    @override
    def on_predict_start(self) -> None:
        self._release_heap()

    @override
    def teardown(self) -> None:
        self._release_heap()
        super().teardown()

    def _release_heap(self) -> None:
        """What comes now was planned without freed tensors in the heap."""
        if self._heap_controller is not None:
            self._heap_controller.release()

    # State

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._release_heap()  # what is saved first: a checkpoint is made
        return super().lightning_module_state_dict()

    def summon_full_params(self, module: Any = None, writeback: bool = True) -> AbstractContextManager[None]:
        """Within it, parameters (of ``module`` alone, if given) are whole. See ``Engine.summon_full_params``."""
        self._release_heap()
        return self._engine.summon_full_params(module, writeback) if self._engine is not None else nullcontext()

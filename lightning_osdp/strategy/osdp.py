"""OSDPStrategy: Lightning's hooks in order. It plans on rank 0, applies the plan, and lets the engine do its work."""

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
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.autotune import profile_cache
from lightning_osdp.autotune.progress import StageDisplay
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.backend import memory
from lightning_osdp.backend.allocator import HeapController
from lightning_osdp.backend.fused_adam import fused_step
from lightning_osdp.engine.base import Engine, create_engine
from lightning_osdp.engine.meta_init import MetaInitializer, check_initializable, is_meta
from lightning_osdp.planning.cost.run_correction import MeasuredStep
from lightning_osdp.planning.spec.capabilities import DEFAULT_ENGINE
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import tables
from lightning_osdp.state.checkpoint import CheckpointFormat
from lightning_osdp.strategy import arguments, model_summary, out_of_memory, precision, preemption
from lightning_osdp.strategy.batch_size_change import announce_change
from lightning_osdp.strategy.buffers import BufferBroadcast
from lightning_osdp.strategy.dataloader import apply_batch_size
from lightning_osdp.strategy.failure_detector import assert_equal_on_ranks
from lightning_osdp.strategy.monitor import PredictionMonitor
from lightning_osdp.strategy.plan_logging import log_graphs, write_and_log_plan
from lightning_osdp.strategy.plan_resolution import RunRequest, read_step_on_ranks, replan, resolve_plan
from lightning_osdp.strategy.planning_options import PlanningOptions, check_and_read_plan
from lightning_osdp.strategy.run_end import HandoverStrategy
from lightning_osdp.strategy.run_warnings import RunWarnings

REPLAN_MODES = ("never", "on_drift")

PLAN_FILE = "osdp_plan.json"
"""Name of the plan in the trainer's log directory."""


class OSDPStrategy(HandoverStrategy):
    """Optimal sharded data parallelism (Jiang et al., arXiv 2209.13258) as a Lightning strategy.

    Before training it traces the module's training step and measures the hardware. It searches the batch size, and for
    each operator whether to replicate it (dp: FSDP's NO_SHARD), to shard it and gather it once a step (zdp2:
    SHARD_GRAD_OP) or twice (zdp: FULL_SHARD), or to keep a slice of it on each rank and exchange activations (tp,
    tensor parallelism). It applies that plan with FairScale units.

    Args:
        memory_limit: memory per device: ``"auto"`` for what the device has, ``"90%"`` for a share of that, bytes, or
            text such as ``"8GiB"``.
        batch_size: samples per device: ``"auto"`` to search it, ``"keep"`` for the loader's, or a fixed number.
        max_batch_size: upper end of the search.
        global_batch_size: batch size x accumulation x ranks, if given; ``"keep"`` for that of loader and Trainer.
        plan: a plan, or the path of one, to use as it is: nothing is measured or searched.
        cluster: hardware that is known already, or the path of its JSON: links are not measured.
        sharding_group: with several nodes, the ranks that operators are sharded over: ``"world"`` for all ranks,
            ``"node"`` for those of a node (FSDP's HYBRID_SHARD), ``"auto"`` to choose for each operator.
        engine: what applies the plan: ``"fairscale"``, or a name given to ``engine.base.register_engine``.
        save_format: ``"full"`` saves one ordinary file (FSDP's FULL_STATE_DICT); ``"sharded"`` saves a folder that
            every rank writes its shards to (SHARDED_STATE_DICT).
        replan: ``"on_drift"`` makes a new plan, at the same batch size and with nothing lost, if the measured peak of
            memory differs from the predicted one by more than 5 % or exceeds the limit; ``"never"`` only reports it.
        trial_steps: whether the module's own step is run 40 to 300 times on a copy while planning, if there is memory.
            Set it to False if ``training_step`` does things that can't be repeated; predicted times are less sure then.
        update_in_backward: whether sharded parameters may be updated during the backward pass, each as soon as its
            gradient is there, so that gradients need not be stored. It is done if memory is so short that it pays, and
            if nothing needs all gradients at once: no clipping, accumulation, loss scaling or hooks that inspect
            gradients; one optimizer of ``torch.optim`` without temporaries.
        min_steps_per_epoch: optimizer steps that a searched batch size leaves in an epoch of known length; if the
            loader's own batch size leaves no more, it is the largest that is searched.
        sample_batches: batches that are read before training: the largest decides memory, the typical one time.
        sample_batch: a batch to plan for instead, as the loader would give it.
        reduce_dtype: ``"fp32"`` or ``"bf16"`` to reduce gradients in over the ranks; None for their own type.
        cache: folder of measurements; None for one in the user's cache folder, ``""`` to cache nothing.
        timeout: timeout of the process group; None for 30 minutes.
        process_group_backend: None for NCCL on CUDA and gloo on the CPU.
        broadcast_buffers: whether all ranks get rank 0's buffers (BatchNorm's, codebooks) when DDP sends them.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: set by the Trainer.

    Raises:
        ConfigurationError: an argument can't be used.
    """

    def __init__(
        self,
        memory_limit: int | str = "auto",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        global_batch_size: int | str | None = None,
        plan: str | Path | ExecutionPlan | None = None,
        cluster: str | Path | Cluster | None = None,
        sharding_group: str = "auto",
        engine: str = DEFAULT_ENGINE,
        save_format: str = "full",
        replan: str = "never",
        trial_steps: bool = True,
        update_in_backward: bool = True,
        min_steps_per_epoch: int = 100,
        sample_batches: int = 8,
        sample_batch: Any = None,
        reduce_dtype: str | None = None,
        cache: str | Path | None = None,
        timeout: timedelta | None = None,
        process_group_backend: str | None = None,
        broadcast_buffers: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        arguments.check_run_kinds(plan, timeout, process_group_backend, broadcast_buffers)
        super().__init__(
            timeout or timedelta(minutes=30),
            process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = PlanningOptions(
            memory_limit,
            batch_size,
            max_batch_size,
            global_batch_size,
            cluster,
            sharding_group,
            cache,
            trial_steps,
            update_in_backward,
            engine,
            min_steps_per_epoch,
            sample_batches,
            sample_batch,
            reduce_dtype,
        )
        self._given_plan = plan
        self._broadcasts_buffers = broadcast_buffers
        self._buffers: BufferBroadcast | None = None
        self._checkpoint_format = CheckpointFormat(save_format)
        self._replan_mode = arguments.validate_choice("replan", replan, REPLAN_MODES)
        self._monitor: PredictionMonitor | None = None
        self._heap_controller: HeapController | None = None
        self._run_warnings: RunWarnings | None = None
        self.constraints = SearchConstraints()
        """Which operators may be sliced and which blocks recomputed; set by OSDPCallback before planning."""
        self.resumed_plan: ExecutionPlan | None = None
        """The plan of the checkpoint to resume from, to use again if it is still valid; set by OSDPCallback."""

    def __repr__(self) -> str:
        return "<OSDPStrategy for lightning.pytorch.Trainer>"  # pytorch_lightning's says that it can't use this

    # -- what the Trainer asks for while it is built -------------------------------------------------------------------

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register("osdp", cls, description="Optimal sharded data parallelism, planned automatically")

    @property
    def execution_plan(self) -> ExecutionPlan | None:
        """The plan in use; None until ``fit`` has made or read one."""
        return self._planning_result.plan if self._planning_result is not None else None

    @property
    def search_constraints(self) -> SearchConstraints:
        """The constraints of the callback and of the strategy's own arguments."""
        return replace(self.constraints, sharding_group=self._options.sharding_group)

    @property
    def measured_step(self) -> MeasuredStep | None:
        """Step time and peak memory of this rank so far; None until enough steps were made."""
        return self._monitor.measured_step if self._monitor is not None else None

    # -- planning and applying -----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Plan and apply the plan in ``fit``; elsewhere copy the module to the device, unless it is sharded already."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        arguments.disable_inference_mode(trainer)
        self._defer_gathers_on_save(trainer)
        preemption.install(trainer, self._failure_detector, self._setup_signal)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        is_applied = self._take_over_module() and self._resume_plan(trainer)
        log_graphs(trainer, is_sharded=is_applied)
        if not is_applied:
            self._set_up_training(trainer) if is_fit else self._set_up_evaluation()
        self.setup_precision_plugin()
        if not is_fit:
            return
        _optimizers_to_device(self.optimizers, self.root_device)
        self._monitor = self._create_monitor()
        self._heap_controller = HeapController(self._plan, self.root_device)
        if self._broadcasts_buffers and self.lightning_module is not None:
            self._buffers = BufferBroadcast(self.lightning_module, dist.group.WORLD, self.root_device)

    def _set_up_evaluation(self) -> None:
        """Put the unsharded module on every rank, with the values of the first one."""
        assert self.model is not None
        check_initializable(self.model)
        MetaInitializer(self.model, self.root_device).fill(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        _sync_module_states(self.model)

    def _set_up_training(self, trainer: pl.Trainer) -> None:
        """Find a plan, change the batch size to it, make the optimizers, and apply the plan."""
        began_s = time.monotonic()
        module = self.lightning_module
        assert module is not None
        ranks = RankGroup.from_node_rank(dist.group.WORLD, self.node_rank, self.root_device)
        display = StageDisplay(self.is_global_zero, uses_terminal=trainer.progress_bar_callback is not None)
        budget = StartupBudget.for_ranks(ranks, began_s, display)
        given_plan = ranks.raise_on_all_ranks(lambda: check_and_read_plan(trainer, self._given_plan))
        self.model = self.precision_plugin.convert_module(module)
        with isolate_rng(), display:  # planning must not change the run's own random numbers
            budget.begin_stage("reading batches")
            data, context = read_step_on_ranks(ranks, self._options, trainer, self.root_device)
            request = RunRequest(
                self._options,
                self.constraints,
                self._checkpoint_memory_mode(trainer),
                self.num_processes,
                self.resumed_plan if self._replan_mode == "never" else None,
            )
            self._planning_result = resolve_plan(trainer, budget, given_plan, data, context, request)
            data.reset_dataloader()
        if self._replan_mode == "never":  # the measurements take some MiB, which training needs
            self._planning_result = replace(self._planning_result, replanner=None)
        plan = self._plan
        assert_equal_on_ranks(ranks.group, "the plan", hashlib.sha256(plan.to_json().encode()).hexdigest()[:12])
        budget.begin_stage("applying the plan")
        engine = create_engine(self._options.engine, self.root_device, ranks.group)
        ranks.raise_on_all_ranks(lambda: engine.check(module, plan))
        present, world = data.loader_batch_size or context.batch_size, ranks.world_size
        self._sizes_before = present, int(trainer.accumulate_grad_batches)
        if self._keeps_batch_size:  # also where ranks have other ones, of which the plan has the largest
            present = plan.batch_size
        remedy = self._options.remedy(plan, present, world, is_given=given_plan is not None)
        announce_change(trainer, data.epoch(world), present, plan, world, remedy)
        if ranks.all_reduce_max([plan.batch_size != present])[0]:
            ranks.raise_on_all_ranks(lambda: apply_batch_size(data, plan.batch_size, world))
        trainer.accumulate_grad_batches = plan.accumulate_grad_batches
        self._apply_plan(trainer, module, engine, ranks)
        self._engine = engine
        self._run_warnings = RunWarnings(plan, data.bytes_per_sample, self.global_rank)
        # Without measuring or searching there is little garbage; it was collected, or counted as in use.
        memory.trim(self.root_device, generation=1 if self._planning_result.is_reused else 2)
        model_summary.count_unsharded_parameters(trainer, engine.unsharded_shapes)
        self._print_and_write_plan(trainer, self._planning_result.profiling_s)

    def _apply_plan(self, trainer: pl.Trainer, module: pl.LightningModule, engine: Engine, ranks: RankGroup) -> None:
        if self._layer_sync is not None:  # after planning: a synchronised layer can't run on fake tensors
            self.model = self._layer_sync.apply(module)
        if is_meta(module):  # there are no values yet that optimizers could copy, and the module is never unsharded
            engine.apply(module, self._plan, ())
            self._set_up_optimizers_of_shards(trainer, engine, ranks)
        else:
            ranks.raise_on_all_ranks(lambda: self.setup_optimizers(trainer))
            engine.apply(module, self._plan, self.optimizers)

    def _create_monitor(self, detect_drift: bool = True) -> PredictionMonitor:
        assert self._planning_result is not None
        correction, file = self._planning_result.correction, self._planning_result.cache_file
        save_correction = partial(profile_cache.store_correction, file) if file is not None else None
        ranks = RankGroup(dist.group.WORLD, self.num_nodes, self.root_device)
        detect_drift = detect_drift and self._replan_mode == "on_drift"
        return PredictionMonitor(self._plan, ranks, correction, save_correction, detect_drift)

    def _print_and_write_plan(self, trainer: pl.Trainer, profiling_s: float | None) -> None:
        assert self._engine is not None
        folder = trainer.log_dir  # a broadcast: on every rank
        if self.is_global_zero:
            tables.print_output(tables.plan_table(self._plan, profiling_s, self._engine.collectives_per_step))
            write_and_log_plan(self._plan, Path(folder or ".") / PLAN_FILE, trainer.loggers)

    @override
    def setup_precision_plugin(self) -> None:
        """Connect the plugin, and make it clip by the norm over all ranks."""
        super().setup_precision_plugin()
        if self._engine is not None:
            precision.patch_for_sharded_gradients(self.precision_plugin, self.clip_grad_norm, dist.group.WORLD)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make modules on the host, or with ``empty_init`` on the meta device: they come to the device in parts."""
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # -- training ------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Continue under a better plan, between two steps, if the one in use was predicted wrongly."""
        assert self._monitor is not None
        if self._monitor.drift is not None:
            self._replan(self._monitor.drift)

    def _replan(self, measured_step: MeasuredStep) -> None:
        """Continue with the same model and optimizer state at the same batch size; warn if that is not possible."""
        assert self._engine is not None
        assert self._planning_result is not None
        assert self.lightning_module is not None
        result, self._monitor = self._planning_result, self._create_monitor(detect_drift=False)
        new = replan(result, measured_step, self.lightning_module.automatic_optimization)
        if new is None:
            return
        plan, correction = new
        self._engine.apply_plan_change(plan, self.optimizers)
        memory.trim(self.root_device)
        self._planning_result = replace(result, plan=plan, correction=correction)
        self._monitor, self._heap_controller = self._create_monitor(), HeapController(plan, self.root_device)
        if self._run_warnings is not None:
            self._run_warnings.plan = plan
        self._print_and_write_plan(self.lightning_module.trainer, profiling_s=None)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        assert self._monitor is not None
        assert self._heap_controller is not None
        self._heap_controller.on_step_start()
        if self._run_warnings is not None:
            self._run_warnings.on_batch(args[:1])
        self._monitor.on_microbatch_start()
        self._engine.before_forward()
        if self._buffers is not None:
            self._buffers.before_forward(is_training=True)
        with self._explain_oom():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self._buffers is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._buffers.before_forward(is_training=False)
        return super().validation_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self._engine is not None
        self._engine.finish_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Complete the reductions, update the parameters, and free the gradients."""
        assert self._engine is not None
        assert self._monitor is not None
        assert self.lightning_module is not None
        assert self._heap_controller is not None
        self._engine.before_optimizer_step(optimizer)
        with self._explain_oom(), fused_step(optimizer):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._engine.after_optimizer_step()
        if arguments.may_free_gradients(self.lightning_module.trainer):
            # Lightning frees gradients only after the next forward, where they would add to the activations.
            optimizer.zero_grad(set_to_none=True)
        self._monitor.on_step_end()
        if self._run_warnings is not None:
            self._run_warnings.on_step_end(self._monitor.peak_memory_bytes)
        self._heap_controller.on_step_end()
        return result

    def _explain_oom(self) -> AbstractContextManager[None]:
        return out_of_memory.explain_oom(self._plan, self.global_rank, lambda: memory.peak_reserved(self.root_device))

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip unsharded gradients like ``torch.nn.utils.clip_grad_norm_``; return the norm before.

        Collective: every rank must call it, for instance in ``configure_gradient_clipping``.
        """
        assert self._engine is not None
        return self._engine.clip_grad_norm(parameters, max_norm, norm_type)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._engine is not None
        with self._engine.no_sync(), self._buffers.accumulate() if self._buffers is not None else nullcontext():
            yield

    @override
    def on_train_end(self) -> None:
        """Print predicted and measured step time and memory of the slowest rank."""
        assert self._monitor is not None
        self._before_collective("the end of training")  # which a rank may have come to by itself
        self._monitor.report()

    @override
    def _on_evaluation_start(self, attribute: str, kind: str) -> None:
        self._release_heap()
        super()._on_evaluation_start(attribute, kind)

    @override
    def teardown(self) -> None:
        self._release_heap()
        super().teardown()

    def _release_heap(self) -> None:
        """Release the heap before work that was planned without freed tensors retained in it."""
        if self._heap_controller is not None:
            self._heap_controller.release()

    # -- state ---------------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._release_heap()  # a checkpoint is saved, and this is saved first
        return super().lightning_module_state_dict()

    def summon_full_params(self, module: Any = None, writeback: bool = True) -> AbstractContextManager[None]:
        """Return a context with unsharded parameters, of ``module`` alone if given (``Engine.summon_full_params``)."""
        self._release_heap()
        return self._engine.summon_full_params(module, writeback) if self._engine is not None else nullcontext()

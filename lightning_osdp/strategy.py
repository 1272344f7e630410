"""OSDPStrategy: Lightning's hooks in order. Plans on rank 0, applies the plan, and lets the engine do its work."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp import planner, report, settings, summary
from lightning_osdp.data import TrainData
from lightning_osdp.errors import ConfigurationError, OSDPWarning
from lightning_osdp.failures import check_same
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule
from lightning_osdp.planning.units import parse_bytes
from lightning_osdp.profiling import memory
from lightning_osdp.profiling.steps import StepClock
from lightning_osdp.saving import SavingStrategy
from lightning_osdp.sharding.checkpoint import Checkpoints
from lightning_osdp.sharding.fairscale import FairScaleEngine

PLAN_FILE = "osdp_plan.json"
"""Name of the plan in the trainer's log directory."""


class OSDPStrategy(SavingStrategy):
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
        engine: what carries the plan out; ``"fairscale"`` is the only one.
        save_format: ``"full"`` saves one ordinary file; ``"sharded"`` a folder that every rank writes its part of.
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
        engine: str = "fairscale",
        save_format: str = "full",
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
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._memory_limit = None if memory_limit == "auto" else parse_bytes(memory_limit)
        self._batch_size = settings.positive("batch_size", None if batch_size == "auto" else batch_size)
        self._max_batch_size = settings.positive("max_batch_size", max_batch_size)
        self._global_batch_size = settings.positive("global_batch_size", global_batch_size)
        self._given_plan, self._given_cluster = plan, cluster
        if engine != "fairscale":
            raise ConfigurationError(f"engine={engine!r} is not known: the only one is 'fairscale'")
        self._checkpoints = Checkpoints(save_format)
        self._engine: FairScaleEngine | None = None
        self._cache = planner.cache_folder(cache)
        self._timeout = timeout or timedelta(minutes=30)
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._plan: ExecutionPlan | None = None
        self._clock: StepClock | None = None

    # What the Trainer asks for while it is built

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register("osdp", cls, description="Optimal sharded data parallelism, planned automatically")

    @property
    def is_distributed(self) -> bool:
        """True: Lightning gives each rank its part of the data."""
        return True

    @property
    def num_nodes(self) -> int:
        """Machines, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def execution_plan(self) -> ExecutionPlan | None:
        """The plan in use; None before ``fit`` has made or read one."""
        return self._plan

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tells the cluster environment which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        """Sets the allocator and joins the process group, before any of the user's hooks."""
        super().setup_environment()
        if self.root_device.type == "cpu":
            memory.fix_cpu_allocator()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        self._start_watch(self._timeout)

    # Planning and applying

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """In ``fit``: plans and applies. Elsewhere: copies the module to the device, unless it is sharded already."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._keep_gradients_possible(trainer)
        self._collect_when_saving(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            if self._engine is None:
                self.model_to_device()
                _sync_module_states(self.model)
            self.setup_precision_plugin()
            return
        if self._engine is None or self._engine.module is not self.model:
            self._set_up_training(trainer)
        else:
            with self._engine.whole_shapes():
                self.setup_optimizers(trainer)
            self._engine.take_in(self.optimizers)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._clock = StepClock(self.root_device)

    def _set_up_training(self, trainer: pl.Trainer) -> None:
        """Recipe: find a plan, check it, resize the batch, make optimizers, apply, tell."""
        module = self.lightning_module
        assert module is not None
        ranks = planner.Ranks(dist.group.WORLD, self.num_nodes, self.root_device)
        given = planner.on_all_ranks(ranks, lambda: self._given(trainer))
        with isolate_rng():  # planning must not change what the run's own random numbers are
            data, batch, batch_size = planner.on_all_ranks(ranks, lambda: _read_data(trainer, module))
            plan, profiling_s = self._find_plan(trainer, ranks, given, data, batch, batch_size)
            data.forget_loader()
        check_same(ranks.group, "the plan", hashlib.sha256(plan.to_json().encode()).hexdigest()[:12])
        self._plan = plan
        engine = FairScaleEngine(self.root_device, ranks.group)
        planner.on_all_ranks(ranks, lambda: engine.check(module, plan))
        if plan.batch_size != batch_size:
            planner.on_all_ranks(ranks, lambda: _resize(data, plan.batch_size))
        trainer.accumulate_grad_batches = plan.accumulate_grad_batches
        planner.on_all_ranks(ranks, lambda: self.setup_optimizers(trainer))
        engine.apply(module, plan, self.optimizers)
        memory.release_unused(self.root_device)
        self._engine = engine
        summary.count_whole_parameters(trainer, engine.whole_shapes)
        self._tell(trainer, report.plan_table(plan, profiling_s, engine.collectives_per_step))

    def _find_plan(
        self,
        trainer: pl.Trainer,
        ranks: planner.Ranks,
        given: ExecutionPlan | None,
        data: TrainData,
        batch: Any,
        batch_size: int,
    ) -> tuple[ExecutionPlan, float | None]:
        """The plan that was given, once it is known to fit this model, or a new one with its profiling time."""
        module, context = self.lightning_module, self.precision_plugin.train_step_context
        assert module is not None
        device = self.root_device
        traced = planner.on_all_ranks(ranks, lambda: planner.describe(module, batch, batch_size, device, context))
        check_same(ranks.group, "the model (fingerprint)", traced.description.fingerprint[:12])
        if given is not None:
            planner.on_all_ranks(ranks, lambda: given.check(traced.description, ranks.count))
            return given, None
        rule = planner.on_all_ranks(ranks, lambda: self._batch_rule(trainer, data, batch_size))
        cluster = planner.on_all_ranks(ranks, lambda: settings.read_cluster(self._given_cluster))
        model_bytes = traced.description.parameter_bytes + traced.description.buffer_bytes
        limit = self._memory_limit or memory.memory_limit(device, self.num_processes)
        made = planner.measure_and_plan(
            traced,
            ranks,
            rule,
            limit,
            model_bytes if device.type == "cpu" else 0,  # on CUDA the model is still on the host
            cluster=cluster,
            cache=self._cache,
        )
        return made.plan, made.profiling_s

    def _given(self, trainer: pl.Trainer) -> ExecutionPlan | None:
        """Refuses what can't work and reads the plan that was given, before anything else is done."""
        settings.refuse(trainer, self.precision_plugin)
        assert self.lightning_module is not None
        if not any(p.requires_grad for p in self.lightning_module.parameters()):
            raise ConfigurationError("the module has no trainable parameters: there is nothing to plan or train")
        return settings.read_plan(self._given_plan)

    def _batch_rule(self, trainer: pl.Trainer, data: TrainData, batch_size: int) -> BatchRule:
        accumulation = trainer.accumulate_grad_batches
        wished = BatchRule(self._batch_size, self._max_batch_size, self._global_batch_size, accumulation)
        return data.batch_rule(batch_size, wished, self.world_size, quiet=not self.is_global_zero)

    def _tell(self, trainer: pl.Trainer, table: Any) -> None:
        folder = trainer.log_dir  # a broadcast: on every rank
        if not self.is_global_zero:
            return
        Console().print(table)
        assert self._plan is not None
        try:
            Path(folder or ".").mkdir(parents=True, exist_ok=True)
            (Path(folder or ".") / PLAN_FILE).write_text(self._plan.to_json())
        except OSError as error:  # the other ranks train already, and the plan is on the screen
            warnings.warn(f"the plan can't be written to {folder}: {error}", OSDPWarning, stacklevel=2)

    @staticmethod
    def _keep_gradients_possible(trainer: pl.Trainer) -> None:
        # Weights gathered under inference_mode could not be trained afterwards: evaluation uses no_grad instead.
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in loops:
            loop.inference_mode = False

    @override
    def setup_precision_plugin(self) -> None:
        """Connects the plugin and has it clip by the norm over all ranks."""
        super().setup_precision_plugin()
        engine = self._engine
        if engine is None:
            return

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            engine.clip_grad_norm(self.precision_plugin.main_params(optimizer), clip_val)

        # The plugin's own sees this rank's shards only, and would clip by a norm that is too small.
        self.precision_plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # Training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        assert self._clock is not None
        self._clock.begin()
        self._engine.before_forward()
        return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self._engine is not None
        self._engine.finish_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Completes the reductions, updates, and frees the gradients at once."""
        assert self._engine is not None
        assert self._clock is not None
        assert self.lightning_module is not None
        self._engine.before_optimizer_step(optimizer)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._engine.after_optimizer_step()
        if self.lightning_module.automatic_optimization:
            # Lightning frees gradients only after the next forward, where they would add to the activations.
            optimizer.zero_grad(set_to_none=True)
        self._clock.end()
        return result

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._engine is not None
        with self._engine.no_sync():
            yield

    @override
    def on_train_end(self) -> None:
        """Prints what was predicted beside what was measured on the slowest rank."""
        assert self._clock is not None
        assert self._plan is not None
        seconds = self._clock.median_s()
        numbers = torch.tensor([seconds or 0.0, float(self._clock.peak_memory_bytes)], dtype=torch.float64)
        numbers = self.reduce(numbers.to(self.root_device), reduce_op="max")
        if self.is_global_zero and seconds is not None:
            Console().print(report.measured_table(self._plan, float(numbers[0]), int(numbers[1])))

    # Collectives that Lightning and users call

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def teardown(self) -> None:
        """Ends the run; the module stays sharded for a later one on the same Trainer."""
        # Not the base class's: it moves parameters to the CPU, away from what the units know of them.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._stop_watch()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _read_data(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[TrainData, Any, int]:
    data = TrainData(trainer, module)
    return data, *data.first_batch()


def _resize(data: TrainData, batch_size: int) -> None:
    why = data.why_fixed()
    if why:
        raise ConfigurationError(f"the plan's batch size is {batch_size}, but it can't be set: {why}")
    data.set_batch_size(batch_size)

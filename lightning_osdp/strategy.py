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

from lightning_osdp import measurements, planner, precision, report, settings, shortage, signals, summary
from lightning_osdp.checkup import Checkup
from lightning_osdp.copies import Stage
from lightning_osdp.data import TrainData, read_data, resize
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPWarning
from lightning_osdp.failures import check_same
from lightning_osdp.fusing import fused
from lightning_osdp.keeping import Keeping
from lightning_osdp.planning.calibration import Correction, MeasuredStep, learn
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.operators import NOTHING_BETWEEN, BetweenSteps
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule
from lightning_osdp.planning.units import parse_bytes
from lightning_osdp.planning.wishes import Wishes
from lightning_osdp.processes import RanksStrategy
from lightning_osdp.profiling import memory
from lightning_osdp.sharding.checkpoint import Checkpoints
from lightning_osdp.sharding.fairscale import FairScaleEngine
from lightning_osdp.sharding.initialise import Initialiser, check_initialisable, is_meta

REPLAN = ("never", "on_drift")
"""What ``replan`` may be."""

PLAN_FILE = "osdp_plan.json"
"""Name of the plan in the trainer's log directory."""


class OSDPStrategy(RanksStrategy):
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
        rehearse: whether the module's own step is run some 30 times on a copy while planning, where there is room for
            it. False where ``training_step`` does things that can't be repeated; predicted times are less sure then.
        update_in_backward: whether sharded parameters may be updated in the backward pass, each as soon as its gradient
            is there, which then need not be kept. It is done where memory is so short that it pays, and where nothing
            needs all gradients at once: no clipping, accumulation, loss scale, hooks that look at gradients; one
            optimizer of ``torch.optim`` without temporaries (``fused``; Adam and AdamW are that by themselves).
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
        rehearse: bool = True,
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
        self._batch_size = settings.positive("batch_size", None if batch_size == "auto" else batch_size)
        self._max_batch_size = settings.positive("max_batch_size", max_batch_size)
        self._global_batch_size = settings.positive("global_batch_size", global_batch_size)
        self._given_plan, self._given_cluster = plan, cluster
        self._sharding_group = Wishes(sharding_group=sharding_group).sharding_group
        if engine != "fairscale":
            raise ConfigurationError(f"engine={engine!r} is not known: the only one is 'fairscale'")
        self._checkpoints = Checkpoints(save_format)
        self._engine: FairScaleEngine | None = None
        self._cache = measurements.cache_folder(cache)
        self._replan = settings.one_of("replan", replan, REPLAN)
        self._rehearse = rehearse
        self._update_in_backward = update_in_backward
        self._plan: ExecutionPlan | None = None
        self._checkup: Checkup | None = None
        self._keeping: Keeping | None = None
        self._outcome: planner.Outcome | None = None
        self.wishes = Wishes()
        """What may be split and recomputed; set by OSDPCallback before planning."""
        self.earlier_plan: ExecutionPlan | None = None
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
    def search_wishes(self) -> Wishes:
        """All that is not left to the search: the callback's wishes and the strategy's own."""
        return replace(self.wishes, sharding_group=self._sharding_group)

    @property
    def measured(self) -> MeasuredStep | None:
        """Step time and peak memory of this rank's training so far; None until enough steps were made."""
        return self._checkup.measured if self._checkup is not None else None

    # Planning and applying

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """In ``fit``: plans and applies. Elsewhere: copies the module to the device, unless it is sharded already."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        settings.evaluate_without_inference_mode(trainer)
        self._collect_when_saving(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            if self._engine is None:
                self._set_up_evaluation()
            self.setup_precision_plugin()
            return
        signals.defer(trainer)
        if self._engine is None or self._engine.module is not self.model:
            self._set_up_training(trainer)
        else:
            with self._engine.whole_shapes():
                self.setup_optimizers(trainer)
            self._engine.take_in(self.optimizers)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        self._checkup = self._new_checkup()
        assert self._plan is not None
        self._keeping = Keeping(self._plan, self.root_device)

    def _set_up_evaluation(self) -> None:
        """The whole module on every rank, with the first one's values."""
        assert self.model is not None
        check_initialisable(self.model)
        Initialiser(self.model, self.root_device).fill(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        _sync_module_states(self.model)

    def _set_up_training(self, trainer: pl.Trainer) -> None:
        """Recipe: find a plan, check it, resize the batch, make optimizers, apply, tell."""
        began_s = time.monotonic()
        module = self.lightning_module
        assert module is not None
        ranks = measurements.Ranks.on_nodes(dist.group.WORLD, self.node_rank, self.root_device)
        given = planner.on_all_ranks(ranks, lambda: self._given(trainer))
        self.model = self.precision_plugin.convert_module(module)
        with isolate_rng():  # planning must not change what the run's own random numbers are
            data, batch, batch_size = planner.on_all_ranks(ranks, lambda: read_data(trainer, module))
            batch = self.precision_plugin.convert_input(batch)
            self._outcome = self._find_plan(trainer, ranks, given, data, batch, batch_size, began_s)
            data.forget_loader()
        if self._replan == "never":
            self._outcome = replace(self._outcome, again=None)  # it holds all that was read of the step: some MiB
        self._plan = plan = self._outcome.plan
        check_same(ranks.group, "the plan", hashlib.sha256(plan.to_json().encode()).hexdigest()[:12])
        engine = FairScaleEngine(self.root_device, ranks.group)
        planner.on_all_ranks(ranks, lambda: engine.check(module, plan))
        if plan.batch_size != batch_size:
            planner.on_all_ranks(ranks, lambda: resize(data, plan.batch_size))
        trainer.accumulate_grad_batches = plan.accumulate_grad_batches
        if self._layer_sync is not None:  # after planning: a synchronised layer can't run on fake tensors
            self.model = self._layer_sync.apply(module)
        if is_meta(module):  # there is nothing yet that optimizers could copy, nor will it ever be whole
            engine.apply(module, plan, ())
            with engine.whole_shapes():
                planner.on_all_ranks(ranks, lambda: self.setup_optimizers(trainer))
            engine.take_in(self.optimizers)
        else:
            planner.on_all_ranks(ranks, lambda: self.setup_optimizers(trainer))
            engine.apply(module, plan, self.optimizers)
        # Where nothing was measured or searched for there is little garbage; it was looked for, or counted as in use.
        memory.release_unused(self.root_device, generation=1 if self._outcome.settled else 2)
        self._engine = engine
        summary.count_whole_parameters(trainer, engine.whole_shapes)
        self._tell(trainer, report.plan_table(plan, self._outcome.profiling_s, engine.collectives_per_step))

    def _find_plan(
        self,
        trainer: pl.Trainer,
        ranks: measurements.Ranks,
        given: ExecutionPlan | None,
        data: TrainData,
        batch: Any,
        batch_size: int,
        began_s: float,
    ) -> planner.Outcome:
        """The plan that was given or that a checkpoint holds, once it is known to fit, or a new one."""
        module, context = self.lightning_module, self.precision_plugin.train_step_context
        assert module is not None
        device = self.root_device
        between = NOTHING_BETWEEN
        if given is None:
            between = BetweenSteps(saving=self._saving(trainer), evaluation_batch_size=data.evaluation_batch_size())
        read = partial(planner.describe, module, batch, batch_size, device, context, between, self._cache)
        traced = planner.describe_together(ranks, module, self._cache, read)
        check_same(ranks.group, "the model (fingerprint)", traced.description.fingerprint[:12])
        separable = traced.description.optimizer_step.separable
        why_not = settings.why_not_in_backward(
            trainer, self.precision_plugin, wanted=self._update_in_backward, separable=separable
        )
        if given is not None:
            planner.on_all_ranks(ranks, lambda: given.check(traced.description, ranks.count, ranks.nodes))
            planner.on_all_ranks(ranks, lambda: settings.check_in_backward(given, why_not))
            return planner.Outcome(given)
        rule = planner.on_all_ranks(ranks, lambda: self._batch_rule(trainer, data, batch_size))
        cluster = planner.on_all_ranks(ranks, lambda: settings.read_cluster(self._given_cluster))
        tensors = [*module.parameters(), *module.buffers()]
        model_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        limit = memory.Limit(device, self.num_processes, measurements.sharers(ranks), self._memory_limit)
        earlier = planner.still_right(self.earlier_plan, traced, ranks, rule, limit.now())
        if earlier is not None and self._replan == "never" and not (earlier.update_in_backward and why_not):
            return planner.Outcome(earlier)
        return planner.measure_and_plan(
            traced,
            ranks,
            rule,
            limit,
            model_bytes,
            cluster=cluster,
            cache=self._cache,
            wishes=replace(self.search_wishes, update_in_backward=not why_not),
            between=between,
            stage=Stage(module, batch, batch_size, device, context) if self._rehearse else None,
            began_s=began_s,
        )

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

    def _new_checkup(self, look_for_drift: bool = True) -> Checkup:
        assert self._plan is not None
        correction, file = Correction(), None
        if self._outcome is not None:
            correction, file = self._outcome.correction, self._outcome.file
        keep = partial(measurements.remember, file) if file is not None else None
        ranks = measurements.Ranks(dist.group.WORLD, self.num_nodes, self.root_device)
        return Checkup(
            self._plan, ranks, correction, keep, look_for_drift=look_for_drift and self._replan == "on_drift"
        )

    def _tell(self, trainer: pl.Trainer, table: Any) -> None:
        folder = trainer.log_dir  # a broadcast: on every rank
        if not self.is_global_zero:
            return
        Console().print(table)
        assert self._plan is not None
        report.write_plan(self._plan, Path(folder or ".") / PLAN_FILE)

    @override
    def setup_precision_plugin(self) -> None:
        """Connects the plugin and has it clip by the norm over all ranks."""
        super().setup_precision_plugin()
        if self._engine is not None:
            precision.look_at_all_ranks(self.precision_plugin, self.clip_grad_norm, dist.group.WORLD)

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
        assert self._checkup is not None
        if self._checkup.drift is not None:
            self._plan_again(self._checkup.drift)

    def _plan_again(self, measured: MeasuredStep) -> None:
        """From the same model and optimizer state, at the same batch size; warns where that can't be."""
        assert self._engine is not None
        assert self._outcome is not None
        assert self._plan is not None
        assert self.lightning_module is not None
        outcome, self._checkup = self._outcome, self._new_checkup(look_for_drift=False)
        if outcome.again is None or not self.lightning_module.automatic_optimization:
            why = "it was given" if outcome.again is None else "gradients are the module's own (manual optimization)"
            rank_zero_warn(f"memory left its prediction, but the plan is kept: {why}", category=OSDPWarning)
            return
        correction = learn(outcome.correction, self._plan, measured)
        rule = BatchRule(batch_size=self._plan.batch_size, accumulation=self._plan.accumulate_grad_batches)
        try:
            plan = outcome.again(correction, rule)
        except InfeasibleError as error:
            rank_zero_warn(f"memory left its prediction, but the plan is kept: {error}", category=OSDPWarning)
            return
        self._engine.change(plan, self.optimizers)
        memory.release_unused(self.root_device)
        self._plan, self._outcome = plan, replace(outcome, plan=plan, correction=correction)
        self._checkup, self._keeping = self._new_checkup(), Keeping(plan, self.root_device)
        self._tell(self.lightning_module.trainer, report.plan_table(plan, None, self._engine.collectives_per_step))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        assert self._checkup is not None
        assert self._keeping is not None
        self._keeping.begin()
        self._checkup.begin()
        self._engine.before_forward()
        with self._shortage_explained():
            return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self._engine is not None
        self._engine.finish_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Completes the reductions, updates, and frees the gradients at once."""
        assert self._engine is not None
        assert self._checkup is not None
        assert self.lightning_module is not None
        self._engine.before_optimizer_step(optimizer)
        with self._shortage_explained(), fused(optimizer):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._engine.after_optimizer_step()
        if self.lightning_module.automatic_optimization:
            # Lightning frees gradients only after the next forward, where they would add to the activations.
            optimizer.zero_grad(set_to_none=True)
        self._checkup.end()
        assert self._keeping is not None
        self._keeping.end()
        return result

    def _shortage_explained(self) -> AbstractContextManager[None]:
        assert self._plan is not None
        return shortage.explained(self._plan, self.global_rank, lambda: memory.held_memory(self.root_device))

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
        assert self._checkup is not None
        self._checkup.tell()

    @override
    def on_validation_start(self) -> None:
        self._only_planned()

    @override
    def on_test_start(self) -> None:
        self._only_planned()

    @override
    def on_predict_start(self) -> None:
        self._only_planned()

    @override
    def teardown(self) -> None:
        self._only_planned()
        super().teardown()

    def _only_planned(self) -> None:
        """What comes now was planned without freed tensors in the heap."""
        if self._keeping is not None:
            self._keeping.pause()

    # State

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._only_planned()  # what is saved first: a checkpoint is made
        return super().lightning_module_state_dict()

    def summon_full_params(self, module: Any = None, writeback: bool = True) -> AbstractContextManager[None]:
        """Within it, parameters (of ``module`` alone, if given) are whole. See ``Engine.whole_parameters``."""
        self._only_planned()
        return self._engine.whole_parameters(module, writeback) if self._engine is not None else nullcontext()

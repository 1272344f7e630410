"""When a run is over: its module is given back whole, or refuses to be used; a later run takes it over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_osdp.autotune.pipeline import PlanningResult
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.backend import memory
from lightning_osdp.engine.base import Engine, create_engine, engines_of
from lightning_osdp.errors import OSDPWarning, ShardingError
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy.dataloader import TrainData, apply_batch_size
from lightning_osdp.strategy.planning_options import PlanningOptions
from lightning_osdp.strategy.processes import ProcessGroupStrategy

_ADVICE = (
    "go on with its Trainer or hand it to a new Trainer with strategy='osdp', or call trainer.save_checkpoint(path) on "
    "all ranks and load_from_checkpoint(path)"
)


def end_run(
    engine: Engine, status: TrainerStatus, optimizers: Sequence[Optimizer], limit: memory.MemoryLimit, group: Any
) -> None:
    """Give the module back whole if it fits on every rank; else have every use of it say that it is sharded.

    Collective after a run that ended well. After an error other ranks may be gone, so nothing is gathered.

    Args:
        engine: carries out the plan of the run.
        status: the Trainer's status.
        optimizers: the optimizers of the run, whose states are made whole as well.
        limit: memory that a rank may use.
        group: all ranks.
    """
    if not engine.is_sharded:
        engine.restore(optimizers)
    elif status == TrainerStatus.INTERRUPTED:
        engine.refuse_runs(f"this module is sharded, since its run ended with an error: {_ADVICE}")
    elif (reason := _why_not_whole(engine, optimizers, limit, group)) is None:
        engine.restore(optimizers)
    else:
        engine.refuse_runs(f"this module is sharded, since it does not fit whole: {reason}. To use it, {_ADVICE}")


def take_over(module: nn.Module, own_engine: Engine | None, limit: memory.MemoryLimit, group: Any) -> Engine | None:
    """Free a module of the plans that other runs have applied to it. Collective.

    Args:
        module: the module of a new run.
        own_engine: the engine of an earlier run of the same Trainer, which is left alone.
        limit: memory that a rank may use.
        group: all ranks.

    Returns:
        An engine that this run has to go on with, since the module does not fit whole; None if there is none.
    """
    for engine in engines_of(module):
        if engine is own_engine:
            continue
        reason = _why_not_whole(engine, (), limit, group) if engine.is_sharded else None
        if reason is not None and engine.module is module:
            rank_zero_warn(
                f"the module is sharded by an earlier run, whose plan is kept, since it does not fit whole: {reason}",
                category=OSDPWarning,
            )
            return engine
        engine.restore(())
    return None


def _why_not_whole(
    engine: Engine, optimizers: Iterable[Optimizer], limit: memory.MemoryLimit, group: Any
) -> str | None:
    """Return why some rank can't hold everything in full, the same on all ranks; None if all can. Collective."""
    memory.trim(limit.device, generation=1)
    own_allowed = limit.current()
    own_needed = memory.memory_in_use(limit.device) + engine.missing_bytes(optimizers)
    of_all_ranks = RankGroup(group, 1, limit.device).all_gather_object((own_needed, own_allowed))
    needed, allowed = max(of_all_ranks, key=lambda each: each[0] - each[1])
    if needed <= allowed:
        return None
    return f"it needs {format_bytes(needed)} on a device, of which {format_bytes(allowed)} may be used"


class HandoverStrategy(ProcessGroupStrategy):
    """A strategy that gives its module back when a run is over, and goes on with it in a later run."""

    _options: PlanningOptions
    _engine: Engine | None = None
    _planning_result: PlanningResult | None = None
    _sizes_before: tuple[int, int] | None = None
    """Batch size of the loader, and accumulation of the Trainer, before the plan changed them."""

    @property
    def _plan(self) -> ExecutionPlan:
        """The plan in use, once there is one."""
        assert self._planning_result is not None
        return self._planning_result.plan

    @property
    def _keeps_batch_size(self) -> bool:
        """Whether each rank trains at the batch size of its own loader."""
        return self._options.batch_size == "keep"

    @abstractmethod
    def _apply_plan(self, trainer: pl.Trainer, module: pl.LightningModule, engine: Engine, ranks: RankGroup) -> None:
        """Make the optimizers and apply the plan."""

    def _memory_limit(self) -> memory.MemoryLimit:
        return self._options.limit_on(self.root_device, self.num_processes)

    def _take_over_module(self) -> bool:
        """Free the module of other runs' plans; return whether this strategy has one for it."""
        assert self.model is not None
        if self._engine is not None and self._engine.module is not self.model:
            self._engine = None
        left = take_over(self.model, self._engine, self._memory_limit(), dist.group.WORLD)
        if left is not None:
            assert left.plan is not None
            self._engine, self._planning_result = left, PlanningResult(left.plan)
        return self._engine is not None

    def _resume_plan(self, trainer: pl.Trainer) -> bool:
        """Go on with the plan of the last run, with new optimizers in ``fit``; return False if it can't be applied."""
        engine, module, is_fit = self._engine, self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert engine is not None
        assert module is not None
        engine.refuse_runs("")
        ranks = RankGroup(dist.group.WORLD, self.num_nodes, self.root_device)
        if is_fit and engine.is_restored and self._has_other_sizes(trainer, ranks):
            self._engine = None
            return False
        if engine.is_restored:
            self._engine = engine = create_engine(self._options.engine, self.root_device, ranks.group)
            try:
                engine.check(module, self._plan)
            except ShardingError:  # the module was changed in the meantime
                self._engine = None
                return False
            if is_fit:
                self._apply_plan(trainer, module, engine, ranks)
            else:
                engine.apply(module, self._plan, self.optimizers)
        elif is_fit:
            self._set_up_optimizers_of_shards(trainer, engine, ranks)
        if is_fit:
            trainer.accumulate_grad_batches = self._plan.accumulate_grad_batches
            ranks.raise_on_all_ranks(lambda: self._resize_loader(trainer, ranks.world_size))
        return True

    def _has_other_sizes(self, trainer: pl.Trainer, ranks: RankGroup) -> bool:
        """Return whether this run has another batch size than the plan was made from. Collective.

        If so, the Trainer accumulates as before that plan.
        """
        source = trainer.fit_loop._data_source
        own_size = source.instance.batch_size if isinstance(source.instance, DataLoader) else None
        before_size, accumulation = self._sizes_before or (own_size, 1)
        is_other = (own_size is not None and own_size != before_size) or (
            trainer.accumulate_grad_batches != self._plan.accumulate_grad_batches
        )
        if not ranks.all_reduce_max([is_other])[0]:
            return False
        if trainer.accumulate_grad_batches == self._plan.accumulate_grad_batches:
            trainer.accumulate_grad_batches = accumulation
        return True

    def _resize_loader(self, trainer: pl.Trainer, num_ranks: int) -> None:
        """Give a loader that was passed to ``fit`` the plan's batch size; a module's own has it since the last run."""
        assert self.lightning_module is not None
        if trainer.fit_loop._data_source.is_module() or self._keeps_batch_size:
            return
        data = TrainData(trainer, self.lightning_module)
        if data.loader_batch_size not in (None, self._plan.batch_size) and not data.fixed_batch_size_reason():
            apply_batch_size(data, self._plan.batch_size, num_ranks)

    def _set_up_optimizers_of_shards(self, trainer: pl.Trainer, engine: Engine, ranks: RankGroup) -> None:
        """Make the optimizers of a module that is sharded already."""
        with engine.unsharded_shapes():
            ranks.raise_on_all_ranks(lambda: self.setup_optimizers(trainer))
        engine.shard_optimizer_state(self.optimizers)

    @override
    def teardown(self) -> None:
        """End the run, and give the module back whole if it fits."""
        module, engine = self.lightning_module, self._engine
        if module is not None and module._trainer is not None and engine is not None and not engine.is_restored:
            status = module.trainer.state.status
            end_run(engine, status, self.optimizers, self._memory_limit(), dist.group.WORLD)
            if engine.is_restored and self._layer_sync is not None:
                self.model = self._layer_sync.revert(module)
        super().teardown()

"""A second engine, as small as one can be: every rank holds the full module, and gradients are averaged at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.engine.activation_checkpointing import check_recomputed_blocks, checkpoint_block
from lightning_osdp.engine.base import Engine
from lightning_osdp.engine.meta_init import MetaInitializer
from lightning_osdp.engine.starting_values import StartingValues
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.capabilities import EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan


class ReplicatedEngine(Engine):
    """All-reduces every gradient once the backward pass is over, and offers nothing else."""

    def __init__(self, device: torch.device, group: object = None, broadcast: bool = True) -> None:
        super().__init__(device, group, broadcast)
        self._sync = True
        self._is_pending = False

    @staticmethod
    def capabilities(device: torch.device) -> EngineCapabilities:
        return EngineCapabilities(
            engine="replicated",
            modes=(Mode.DP,),
            slices=False,
            per_block_wrap=False,
            node_scope=False,
            hierarchical=False,
            in_backward=False,
            prefetch=False,
        )

    @property
    def collectives_per_step(self) -> int:
        return sum(p.requires_grad for p in self._module.parameters())

    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        check_recomputed_blocks(plan.recomputed, module)
        sharded = [op.name for op in plan.operators if set(op.slices) != {Mode.DP}]
        if sharded:
            raise ShardingError(f"the plan shards {sharded[0]}, which this engine can't")

    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer] = ()) -> None:
        self.check(module, plan)
        self._module = module
        tensors = [*module.parameters(), *module.buffers()]
        values = StartingValues(tensors, self._device, self._group if self._broadcast else None)
        MetaInitializer(module, self._device, self._group).fill(module)
        for tensor in tensors:
            values.move_to_device(tensor)
        self._undo = [checkpoint_block(module.get_submodule(name)) for name in plan.recomputed]

    def apply_plan_change(self, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        self.check(self._module, plan)
        for undo in self._undo:
            undo()
        self._undo = [checkpoint_block(self._module.get_submodule(name)) for name in plan.recomputed]
        self._module.zero_grad(set_to_none=True)

    def restore(self, optimizers: Iterable[Optimizer]) -> None:
        for undo in self._undo:
            undo()
        self._undo, self.is_restored = [], True

    def close(self) -> None:
        for parameter in self._module.parameters():
            parameter.data = parameter.data.new_empty(0)

    def before_forward(self) -> None:
        self._is_pending = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def finish_backward(self) -> None:
        if not (self._sync and self._is_pending):
            return
        self._is_pending = False
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._group)
                parameter.grad /= self._group.size()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.finish_backward()

    def after_optimizer_step(self) -> None:
        pass

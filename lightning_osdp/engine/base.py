"""The seam between a plan and whatever carries it out. One engine today: FairScale's units (``engine.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state.deferred_tensor import DeferredTensors
from lightning_osdp.state.state_dict import Fill, fill_from_memory


class Engine(Protocol):
    """Applies a plan to a module, in place: the module keeps its class, its tree and its parameters' names.

    After ``apply``, each sharded parameter object holds its rank's part, flat and padded to equal length, whenever
    the operator is not running; ``Parameter`` objects keep their identity, so optimizers made before stay valid.
    """

    @property
    def collectives_per_step(self) -> int:
        """How many collectives one optimizer step makes on each rank, without accumulation."""
        ...

    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        """Refuses a plan that can't be applied to ``module``, before any parameter has moved.

        Raises:
            ShardingError: names the operator or the parameter and what is wrong with it.
        """
        ...

    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        """Copies rank 0's parameters and buffers to all ranks, shards the operators and installs the reductions."""
        ...

    def apply_plan_change(self, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        """Goes on under another plan for the same module, between two optimizer steps, with all parameters and
        optimizer states as they are. Gradients are freed. Collective.

        Raises:
            ShardingError: as of ``assert_cluster_and_peak``; nothing has changed then.
        """
        ...

    def shard_optimizer_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Cuts state that optimizers made for whole parameters down to this rank's part."""
        ...

    def unsharded_shapes(self) -> AbstractContextManager[None]:
        """Within it, parameters show their whole shape (not their values), as ``configure_optimizers`` expects."""
        ...

    def summon_full_params(
        self, module: nn.Module | None = None, writeback: bool = True
    ) -> AbstractContextManager[None]:
        """Within it, sharded parameters have their whole values and shapes. Collective; the model can't run within it.

        Args:
            module: a part of the module, whose parameters alone are made whole; None for all.
            writeback: whether what is written to them is kept. Every rank must write the same.

        Raises:
            ShardingError: a step is going on, or the model is run.
        """
        ...

    def before_forward(self) -> None:
        """To be called before each micro-batch: takes in parameters that were unfrozen."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, replicated gradients pile up locally; sharded ones are still reduced, since keeping them whole
        would cost the memory that sharding saves."""
        ...

    def finish_backward(self) -> None:
        """Completes the reductions of the backward pass that just ended. Idempotent."""
        ...

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Makes sure that gradients are complete and that the optimizer holds no parameter unknown to the engine.

        Raises:
            ShardingError: a parameter is in no unit and in no bucket, so it would be trained apart on each rank.
        """
        ...

    def after_optimizer_step(self) -> None:
        """Marks gathered copies as stale."""
        ...

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips by the norm over all shards and replicas, each element counted once. Returns that norm."""
        ...

    def model_state(self, deferred_tensors: DeferredTensors | None = None) -> dict[str, Any]:
        """State dict of the plain module. Collective.

        With ``deferred_tensors``, on every rank, what is to be gathered as ``deferred_tensors`` has it. Without: whole tensors on the
        CPU, and nothing on ranks other than 0.
        """
        ...

    def load_model_state(self, state: dict[str, Any], strict: bool = True, fill: Fill = fill_from_memory) -> None:
        """Loads a plain module's state dict, given whole or as handles that ``fill`` reads on every rank.

        Raises:
            ShardingError: a tensor has another shape than the parameter of that name; nothing has changed then.
        """
        ...

    def optimizer_state(
        self, optimizer: Optimizer, index: int = 0, deferred_tensors: DeferredTensors | None = None
    ) -> dict[str, Any]:
        """``optimizer.state_dict()`` of optimizer number ``index``; the rest as for ``model_state``. Collective."""
        ...

    def check_state(
        self, state: dict[str, Any], strict: bool, saved_states: Mapping[Optimizer, dict[str, Any]]
    ) -> None:
        """Refuses a state dict, or states ``saved_states`` for optimizers, that can't be loaded.

        Raises:
            ShardingError: names, shapes or groups differ.
        """
        ...

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any], fill: Fill = fill_from_memory) -> None:
        """Loads what ``optimizer_state`` returned, under this or any other plan, on every rank."""
        ...

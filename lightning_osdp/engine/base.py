"""The seam between a plan and the engine that carries it out: the base class of engines and their registry.

FairScale's engine is the only one that comes with the package. Another one is a subclass of ``Engine`` that implements
the abstract methods, brings a ``ShardLayout`` for its sharded parameters and is registered with ``register_engine``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.capabilities import DEFAULT_ENGINE, EngineCapabilities
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state import state_dict as states
from lightning_osdp.state.checked_values import match_optimizer_state
from lightning_osdp.state.deferred_tensor import DeferredTensors
from lightning_osdp.state.guarded_parameter import without_guards
from lightning_osdp.state.state_dict import Fill, ShardedParameters, fill_from_memory


class Engine(ABC):
    """Applies a plan to a module in place and carries the module through training.

    The module keeps its class, its tree and its parameters' names, and ``Parameter`` objects keep their identity, so
    optimizers made before stay valid. Whenever its operator is not running, a sharded parameter holds this rank's local
    shard, and is guarded if the engine guards it (``state.guarded_parameter``). Every rank must call the methods in the
    same order, since most of them are collective.

    Args:
        device: where this rank computes.
        group: the ranks that train together; all if None.
        broadcast: whether ``apply`` gives all ranks rank 0's values. Otherwise each rank keeps its own.
    """

    plan: ExecutionPlan | None = None
    """The plan that is carried out, where the module can stay sharded after a run."""
    is_restored = False
    """Whether ``restore`` has given the module back; the engine carries out no plan any more."""
    _module: nn.Module
    """Set by ``apply``."""
    _sharded_parameters: ShardedParameters
    """How parameters lie over the ranks; set by ``apply`` and ``apply_plan_change``."""

    def __init__(self, device: torch.device, group: Any = None, broadcast: bool = True) -> None:
        self._device = device
        self._group: Any = group if group is not None else dist.group.WORLD
        self._broadcast = broadcast
        self._sharded_parameters = ShardedParameters({}, self._group)
        _ENGINES[self] = None

    @staticmethod
    @abstractmethod
    def capabilities(device: torch.device) -> EngineCapabilities:
        """Return what engines of this class can carry out on a type of device.

        Every engine has to carry out recomputed blocks (``activation_checkpointing.checkpoint_block``).
        """

    @property
    def module(self) -> nn.Module | None:
        """The module that a plan was applied to; None before ``apply``."""
        return getattr(self, "_module", None)

    @property
    @abstractmethod
    def collectives_per_step(self) -> int:
        """Number of collectives of one optimizer step on each rank, without accumulation."""

    # Applying a plan

    @abstractmethod
    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        """Refuse a plan that can't be applied to ``module``, before any parameter has moved.

        Raises:
            ShardingError: names the operator or the parameter and what is wrong with it.
        """

    @abstractmethod
    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer] = ()) -> None:
        """Move the module to the device, shard its operators and install the reduction of gradients."""

    @abstractmethod
    def apply_plan_change(self, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        """Continue under another plan between two optimizer steps, with all parameters and optimizer states.

        Gradients are freed.

        Raises:
            ShardingError: the plan can't be applied (see ``check``); nothing has changed then.
        """

    @abstractmethod
    def restore(self, optimizers: Iterable[Optimizer]) -> None:
        """Give the module back as it was before ``apply``: whole, with its own forwards and without hooks.

        The states of ``optimizers`` are whole, too. Gradients are freed. State dicts can be asked for. Idempotent.
        """

    def refuse_runs(self, reason: str) -> None:  # noqa: B027 (an engine that shards nothing need not refuse)
        """Have each use of a module that stays sharded after its run raise ``reason``; empty: let it run again."""

    def missing_bytes(self, optimizers: Iterable[Optimizer]) -> int:
        """Return the bytes that ``restore`` adds at most on this rank."""
        return self._sharded_parameters.missing_bytes(list(optimizers))

    @property
    def is_sharded(self) -> bool:
        """Return whether any parameter is sharded over several ranks, so that ``restore`` needs them all."""
        return self._group.size() > 1 and bool(self._sharded_parameters.parameters)

    @abstractmethod
    def close(self) -> None:
        """Free the memory of the module's parameters and of the engine. Neither can be used afterwards."""

    # The training step

    @abstractmethod
    def before_forward(self) -> None:
        """Prepare a micro-batch: include parameters that were unfrozen since the last one."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of replicated parameters on each rank within a context.

        Gradients of sharded parameters are still reduced: to keep them in full would take the memory that sharding
        saves.
        """

    def after_training_step(self) -> None:  # noqa: B027
        """Note that what the module runs from here on is not the step that the plan was made for."""

    def evaluation_step(self, name: str) -> AbstractContextManager[None]:
        """Return a context for one step of validation, test or prediction.

        At its end an engine may have ranks wait for others that run more of the module.

        Args:
            name: names the step in errors, as "validation batch 3".
        """
        return nullcontext()

    def before_collective(self, operation: str) -> None:  # noqa: B027
        """Prepare for a collective that is not the engine's; others may run more of the module before it.

        Args:
            operation: its name.
        """

    @abstractmethod
    def finish_backward(self) -> None:
        """Complete the reductions of the backward pass that just ended. Idempotent."""

    def leave_step(self) -> None:
        """End a step that failed on this rank; where the engine can, take part in what other ranks still run of it."""
        return

    @abstractmethod
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Make sure that gradients are complete and that the engine knows every parameter of the optimizer.

        Raises:
            ShardingError: the engine does not reduce a parameter's gradient, so each rank would train its own copy.
        """

    @abstractmethod
    def after_optimizer_step(self) -> None:
        """Mark gathered copies of parameters as stale."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their norm over all ranks, each element counted once, and return that norm."""
        with without_guards():
            with_gradient = [p for p in parameters if p.grad is not None]
            gradients = [(p, p.grad) for p in with_gradient if p.grad is not None]
            total = self._sharded_parameters.compute_norm(gradients, norm_type, self._device)
            torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, total)
        return total

    # Full parameters and optimizers

    def shard_optimizer_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Cut state that optimizers created for full parameters down to this rank's shards."""
        for optimizer in optimizers:
            self._sharded_parameters.shard_existing_state(optimizer)

    def unsharded_shapes(self) -> AbstractContextManager[None]:
        """Show the full shapes of parameters (not their values) within a context, for ``configure_optimizers``."""
        return self._sharded_parameters.show_unsharded_shapes()

    @contextmanager
    def summon_full_params(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[None]:
        """Show the full values and shapes of parameters within a context, in which the model can't run.

        Args:
            module: part of the module whose parameters are gathered; None for all.
            writeback: whether changes to the values are kept. Every rank must write the same.

        Raises:
            ShardingError: parameters are gathered already, for a step in progress or another such context.
        """
        with self._sharded_parameters.summon_full_params(
            (self._module if module is None else module).parameters(), writeback
        ):
            yield

    # State dicts

    def model_state(self, deferred_tensors: DeferredTensors | None = None) -> dict[str, Any]:
        """Return the state dict of the plain module.

        Args:
            deferred_tensors: creates placeholders for tensors that have to be gathered, on every rank. None: gather
                all tensors to the CPU of rank 0; other ranks return an empty dict.
        """
        if deferred_tensors is None:
            return states.gather_state(self._sharded_parameters, lambda eager: self.model_state(eager))
        return states.model_state(self._module, self._sharded_parameters, deferred_tensors)

    def load_model_state(self, state: dict[str, Any], strict: bool = True, fill: Fill = fill_from_memory) -> None:
        """Load a plain module's state dict on every rank.

        Args:
            state: full tensors, or placeholders that ``fill`` reads.
            strict: whether missing and unexpected keys are errors.
            fill: copies values to where they belong.

        Raises:
            ShardingError: a tensor has another shape than the parameter of that name; nothing has changed then.
        """
        states.load_model_state(self._module, self._sharded_parameters, state, strict, fill)
        self.after_optimizer_step()

    def optimizer_state(
        self, optimizer: Optimizer, index: int = 0, deferred_tensors: DeferredTensors | None = None
    ) -> dict[str, Any]:
        """Return the state dict of optimizer number ``index`` as without sharding; see ``model_state``."""
        sharded, names = self._sharded_parameters, self._parameter_names()
        if deferred_tensors is None:
            return states.gather_state(sharded, lambda eager: self.optimizer_state(optimizer, index, eager))
        return states.optimizer_state(optimizer, sharded, names, index, deferred_tensors)

    def check_state(
        self, state: dict[str, Any], strict: bool, saved_states: Mapping[Optimizer, dict[str, Any]]
    ) -> None:
        """Refuse a model's state dict, or the saved states of optimizers, that can't be loaded.

        Raises:
            ShardingError: names, shapes or groups differ.
        """
        states.check_model_state(self._module, self._sharded_parameters, state, strict)
        shape_of, names = self._sharded_parameters.unsharded_shape, self._parameter_names()
        for optimizer, saved_state in saved_states.items():
            match_optimizer_state(optimizer, shape_of, names, saved_state)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any], fill: Fill = fill_from_memory) -> None:
        """Load what ``optimizer_state`` returned, under this or any other plan, on every rank."""
        states.load_optimizer_state(optimizer, self._sharded_parameters, self._parameter_names(), state, fill)

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._module.named_parameters()}


_ENGINES: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()
"""All engines, in the order in which they were created: a set has another order on each rank."""


def engines_of(module: nn.Module) -> list[Engine]:
    """Return the engines that carry out a plan on parameters of ``module``, in it or in another module.

    They come in the same order on all ranks, so what is done to them may be collective.
    """
    parameters = set(module.parameters())
    return [
        engine
        for engine in _ENGINES
        if engine.module is not None
        and not engine.is_restored
        and not parameters.isdisjoint(engine.module.parameters())
    ]


_REGISTERED_ENGINES: dict[str, type[Engine]] = {}


def register_engine(name: str, engine_class: type[Engine]) -> None:
    """Make an engine available as ``OSDPStrategy(engine=name)``; it replaces an engine of the same name."""
    _REGISTERED_ENGINES[name] = engine_class


def find_engine(name: str) -> type[Engine]:
    """Return the engine that is registered under ``name``.

    Raises:
        ConfigurationError: there is none; the message lists the names.
    """
    if name in _REGISTERED_ENGINES:
        return _REGISTERED_ENGINES[name]
    if name == DEFAULT_ENGINE:
        from lightning_osdp.engine.fairscale.engine import FairScaleEngine  # other engines do not need FairScale

        return FairScaleEngine
    names = ", ".join(sorted({DEFAULT_ENGINE, *_REGISTERED_ENGINES}))
    raise ConfigurationError(f"engine={name!r} is not known; there are: {names}")


def create_engine(name: str, device: torch.device, group: Any = None, *, broadcast: bool = True) -> Engine:
    """Create the engine that is registered under ``name``; see ``Engine`` for the arguments.

    Raises:
        ConfigurationError: no engine has that name.
    """
    return find_engine(name)(device, group, broadcast)


def engine_capabilities(name: str, device: torch.device) -> EngineCapabilities:
    """Return what the engine that is registered under ``name`` can carry out on ``device``."""
    return find_engine(name).capabilities(device).model_copy(update={"engine": name})

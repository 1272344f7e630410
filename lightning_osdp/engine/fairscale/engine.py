"""The engine on FairScale's units: applies a plan to a module, and carries it through training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.backend.work import is_driven_by_host
from lightning_osdp.engine.activation_checkpointing import check_recomputed_blocks, checkpoint_block
from lightning_osdp.engine.attention_fastpath import AttentionFastpath
from lightning_osdp.engine.base import Engine
from lightning_osdp.engine.fairscale.communicators import sharded_units
from lightning_osdp.engine.fairscale.context import EngineContext
from lightning_osdp.engine.fairscale.plan_checks import check_operators, check_parameters, check_units
from lightning_osdp.engine.fairscale.sharded_operator import (
    NestedOperators,
    ShardedOperator,
    find_nested_operators,
    large_parameters,
    modules_holding,
    own_parameters,
    release_storage,
)
from lightning_osdp.engine.fairscale.unit import FairScaleUnit
from lightning_osdp.engine.grad_norm import patch_total_norm
from lightning_osdp.engine.gradient_buckets import BucketedAllReduce, parameters_in_order_of_use
from lightning_osdp.engine.guards import OptimizerGuard, close_opened_guards, install_guards, mark_generation
from lightning_osdp.engine.meta_init import MetaInitializer, check_initializable
from lightning_osdp.engine.sliced_operator import SlicedOperator
from lightning_osdp.engine.starting_values import StartingValues
from lightning_osdp.engine.tensor_parallel.apply import make_unit, weights_to_cut
from lightning_osdp.engine.tensor_parallel.check import check_tensor_parallelism, tensor_units
from lightning_osdp.engine.tensor_parallel.slice_averages import SliceAverages
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit, UnitContext
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.capabilities import EngineCapabilities
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.state.deferred_tensor import DeferredTensors
from lightning_osdp.state.guarded_parameter import ShardGuard, without_guards
from lightning_osdp.state.shard_layout import ShardLayout
from lightning_osdp.state.state_dict import ShardedParameters

PARTIALLY_UPDATED = "a backward pass was broken off when some parameters had been updated: {}. Resume from a checkpoint"


class FairScaleEngine(Engine):
    """Carries out a plan with FairScale units for sharded operators and bucketed all-reduces for all others.

    ``cpu`` needs a gloo process group, ``cuda`` an NCCL one.
    """

    _context: EngineContext  # set by ``apply``, as is ``_nested_operators``
    _nested_operators: NestedOperators

    def __init__(self, device: torch.device, group: Any = None, broadcast: bool = True) -> None:
        super().__init__(device, group, broadcast)
        self._operators: dict[str, ShardedOperator | TensorUnit] = {}
        self._units: list[FairScaleUnit] = []
        self._sliced_operators: list[SlicedOperator] = []
        self._guards: list[ShardGuard] = []
        self._guard_hooks: list[Any] = []
        self._undo_recompute: list[Callable[[], None]] = []
        self._managed_parameters: frozenset[nn.Parameter] = frozenset()

    @staticmethod
    @override
    def capabilities(device: torch.device) -> EngineCapabilities:
        return EngineCapabilities(modes=tuple(Mode), prefetch=is_driven_by_host(device))

    @property
    @override
    def collectives_per_step(self) -> int:
        units: list[FairScaleUnit | TensorUnit] = [*self._units, *self._tensor_units]
        return sum(unit.num_collectives for unit in units) + self._bucketed_all_reduce.num_collectives

    @property
    def _tensor_units(self) -> list[TensorUnit]:
        return [operator for operator in self._operators.values() if isinstance(operator, TensorUnit)]

    # Applying a plan

    @override
    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        check_initializable(module)
        check_recomputed_blocks(plan.recomputed, module)
        check_tensor_parallelism(module, plan, self._group.size())
        parameters_by_operator = check_operators(module, plan)
        check_units(plan, dict(module.named_modules()), parameters_by_operator)
        check_parameters(module, parameters_by_operator, self._device)

    @override
    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer] = ()) -> None:
        # One operator after the other, so that the device never holds the full module.
        self.check(module, plan)
        self._module = module
        self._set_plan(plan)
        tensors = [*module.parameters(), *module.buffers()]
        values = StartingValues(tensors, self._device, self._group if self._broadcast else None)
        initializer = MetaInitializer(module, self._device, self._group)
        for unit, operators in sharded_units(plan).items():
            for operator in operators:
                body, parameters = module.get_submodule(operator.name), self._large_parameters(operator)
                for part in modules_holding(body, parameters) if operator.name in self._nested_operators else [body]:
                    initializer.fill(part)
                for parameter in parameters:
                    values.move_to_device(parameter)
            self._shard(unit, operators, plan)
        for name, operators in tensor_units(plan).items():
            for operator in operators:
                initializer.fill(module.get_submodule(operator.name))
                for weight in weights_to_cut(module, operator):
                    values.move_to_device(weight.parameter)
            self._cut(name, operators, plan)
        initializer.fill(module)
        sharded = {parameter for operator in self._operators.values() for parameter in operator.layouts}
        for tensor in [p for p in module.parameters() if p not in sharded] + list(module.buffers()):
            values.move_to_device(tensor)
        self._finalize(plan)
        self.shard_optimizer_state(optimizers)
        self._attention_fastpath = AttentionFastpath()

    @override
    def apply_plan_change(self, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        # One unit after the other, so that only one operator at a time is there in full.
        self._bucketed_all_reduce.detach()
        self._slice_averages.detach()
        try:
            self._check_unwrapped(plan)
        except ShardingError:
            self._bucketed_all_reduce.refresh()
            self._slice_averages.refresh()
            raise
        optimizers = list(optimizers)
        self._remove_guards()
        for undo in self._undo_recompute:
            undo()
        self._set_plan(plan)
        previous, self._operators = self._operators, {}
        for shard, units in ((self._shard, sharded_units(plan)), (self._cut, tensor_units(plan))):
            for unit, operators in units.items():
                for name in self._overlapping_operators(previous, unit, operators):
                    previous.pop(name).unshard(optimizers)
                layouts = shard(unit, operators, plan)
                for optimizer in optimizers:
                    ShardedParameters(layouts, self._group).shard_existing_state(optimizer)
        for operator in reversed(previous.values()):
            operator.unshard(optimizers)
        self._finalize(plan)
        self._attach(optimizers)

    def _overlapping_operators(
        self, previous: dict[str, ShardedOperator | TensorUnit], unit: str, operators: Iterable[OperatorPlan]
    ) -> list[str]:
        """Return the names of those ``previous`` operators whose modules or parameters ``unit`` is to have.

        Several may have replaced the forward of one module: they come together, the last one first.
        """
        wanted = {p for op in operators for p in own_parameters(self._module, op.name, self._nested_operators)}
        modules = {unit, *(old.label for old in previous.values() if not wanted.isdisjoint(old.layouts))}
        return [name for name, old in reversed(previous.items()) if old.label in modules]

    def _check_unwrapped(self, plan: ExecutionPlan) -> None:
        """Check a plan for the module as its user knows it: full shapes and the user's own forwards."""
        with ExitStack() as stack:
            stack.enter_context(self.unsharded_shapes())
            for operator in reversed(self._operators.values()):
                stack.enter_context(operator.use_original_forward())
            self.check(self._module, plan)

    def _set_plan(self, plan: ExecutionPlan) -> None:
        self._context = EngineContext(self._device, self._group, plan)
        self._context.owner, self.plan = self, plan
        self._nested_operators = find_nested_operators(plan)

    def _shard(
        self, unit: str, operators: Sequence[OperatorPlan], plan: ExecutionPlan
    ) -> Mapping[nn.Parameter, ShardLayout]:
        """Shard the large parameters of the operators, which are in full on the device, in one unit."""
        is_shared = bool(operators[0].unit)
        module = self._module.get_submodule(unit)
        plans = {parameter: operator for operator in operators for parameter in self._large_parameters(operator)}
        for parameter in plans:
            self._context.views.part_from(parameter)
        self._operators[unit] = operator = ShardedOperator(
            unit,
            module,
            plans,
            self._context.communicator_factory.for_choice(operators[0].choice),
            self._context,
            is_recomputed=any(
                unit.startswith(name + ".") or (unit == name and not is_shared) for name in plan.recomputed
            ),
        )
        return operator.layouts

    def _cut(
        self, name: str, operators: Sequence[OperatorPlan], plan: ExecutionPlan
    ) -> Mapping[nn.Parameter, ShardLayout]:
        """Cut the weights of operators that are tensor parallel together, which are in full on the device."""
        for operator in operators:
            for weight in weights_to_cut(self._module, operator):
                self._context.views.part_from(weight.parameter)
        context = UnitContext(self._context.order, self._context.check_run)
        needs = plan.tensor_scopes.get(name)
        unit = make_unit(name, self._module, operators, needs, self._group, self._device, context)
        self._operators[f"{name} (tensor parallel)"] = unit
        return unit.layouts

    def _large_parameters(self, operator: OperatorPlan) -> list[nn.Parameter]:
        return large_parameters(self._module, operator.name, self._nested_operators)

    def _finalize(self, plan: ExecutionPlan) -> None:
        """Wrap recomputed blocks and reduce the gradients of all parameters that no unit holds."""
        self._undo_recompute = [checkpoint_block(self._module.get_submodule(name)) for name in plan.recomputed]
        operators = self._operators.values()
        self._units = [unit for operator in operators for unit in operator.units]
        self._sliced_operators = [op.sliced_operator for op in operators if op.sliced_operator is not None]
        self._slice_averages = SliceAverages(self._tensor_units, self._context.sync)
        layouts = {parameter: layout for operator in operators for parameter, layout in operator.layouts.items()}
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        self._guards = [g for operator in operators for g in operator.create_guards(names, self._context.guards)]
        self._guard_hooks = install_guards(self._module, self._guards)
        self._context.views.follow_originals()
        self._sharded_parameters = ShardedParameters(layouts, self._group)
        patch_total_norm(self._sharded_parameters)
        slices = {sliced.full_parameter: sliced.replicated_weights for sliced in self._sliced_operators}
        replicated = [
            weight
            for parameter in parameters_in_order_of_use(self._module, plan.operators)
            for weight in slices.get(parameter, [parameter] if parameter not in layouts else [])
        ]
        self._bucketed_all_reduce = BucketedAllReduce(
            replicated,
            self._context.replica_group,
            self._context.sync,
            self._before_replicated,
            self._show_slice_gradients,
            self._context.reducer.dtype,
        )
        self._bucketed_all_reduce.agree_by(self._context.order, self._bind_slice_gradients)
        self._context.backward_passes.on_end = self._show_slice_gradients
        self._context.guards.before_update = self._finish_unseen_backward
        self._context.guards.before_gradient = self._before_gradient
        self._managed_parameters = self._sharded_parameters.parameters.union(replicated)
        mark_generation(self._module, bool(layouts) and self._group.size() > 1)

    def _before_replicated(self) -> None:
        self._bind_slice_gradients()
        self._context.order.before_replicated()

    def _bind_slice_gradients(self) -> None:
        for sliced in self._sliced_operators:
            sliced.bind_remaining_gradients()

    def _show_slice_gradients(self) -> None:
        """Give sliced weights their gradients when a backward pass is over: replicated slices' may come last."""
        passes, is_updated = self._context.backward_passes, self._context.update_in_backward
        if not (is_updated or passes.is_running or self._bucketed_all_reduce.is_active):
            self._gather_slice_gradients()

    def _gather_slice_gradients(self) -> None:
        self._context.communicator_factory.inter_node_all_reduce.wait()
        with without_guards():
            for sliced in self._sliced_operators:
                sliced.gather_slice_gradients()
        self._context.guards.num_updates[True] += 1

    def _remove_guards(self) -> None:
        close_opened_guards()
        for guard in self._guards:
            guard.remove()
        for hook in self._guard_hooks:
            hook.remove()
        self._guards, self._guard_hooks = [], []

    @override
    def restore(self, optimizers: Iterable[Optimizer]) -> None:
        if self.is_restored:
            return
        if self._context.backward_optimizer.is_partially_updated:
            raise ShardingError(PARTIALLY_UPDATED.format("the module is not made whole"))
        optimizers = list(optimizers)
        self._remove_guards()
        self._bucketed_all_reduce.detach()
        self._slice_averages.detach()
        for undo in self._undo_recompute:
            undo()
        for unit in self._units:
            unit.reshard()
        self._context.gather_memory.free_all()
        for operator in reversed(self._operators.values()):
            operator.unshard(optimizers)
        self._context.views.release()
        mark_generation(self._module, False)
        self._operators, self._units, self._sliced_operators, self._undo_recompute = {}, [], [], []
        self._sharded_parameters = ShardedParameters({}, self._group)
        self._attention_fastpath.restore()
        self.is_restored = True

    @override
    def refuse_runs(self, reason: str) -> None:
        def refuse_access(name: str) -> None:
            raise ShardingError(reason)

        context = self._context
        context.why_no_runs, context.guards.thread = reason, get_ident()
        context.guards.before_access = refuse_access if reason else context.order.before_access

    @override
    def close(self) -> None:
        self._remove_guards()
        if self.module is not None:
            mark_generation(self._module, False)
            self._context.order.close()
            release_storage(self._module.parameters())
        for operator in self._operators.values():
            operator.release_slices()

    @override
    def shard_optimizer_state(self, optimizers: Iterable[Optimizer]) -> None:
        optimizers = list(optimizers)
        super().shard_optimizer_state(optimizers)
        self._attach(optimizers)

    def _attach(self, optimizers: Iterable[Optimizer]) -> None:
        if self._guards:
            self._guard_hooks += [OptimizerGuard(optimizer) for optimizer in optimizers]
        if self._context.update_in_backward:
            self._context.backward_optimizer.attach(optimizers)

    @contextmanager
    @override
    def summon_full_params(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[None]:
        if self._context.params_summoned or any(unit.has_unsharded_params for unit in self._units):
            raise ShardingError(
                "parameters can't be made whole where they are already: between forward and backward, or within itself"
            )
        self._context.params_summoned = True
        try:
            with super().summon_full_params(module, writeback):
                yield
        finally:
            self._context.params_summoned = False
            self.after_optimizer_step()

    # The training step

    @override
    def before_forward(self) -> None:
        close_opened_guards()
        self._context.guards.add_outside_gradients()
        for sliced in self._sliced_operators:
            sliced.sync_requires_grad()
        self._bucketed_all_reduce.refresh()
        self._slice_averages.refresh()
        self._context.backward_optimizer.refresh()
        self._finish_unseen_backward()  # the last step had none on this rank; others wait in theirs
        self._context.reducer.discard()
        self._context.backward_passes.discard()
        self._context.order.begin_step()
        for tensor_unit in self._tensor_units:  # what was joined until now belongs to the last step on all ranks
            tensor_unit.begin_step()
        self._bucketed_all_reduce.begin_step()

    @override
    def after_training_step(self) -> None:
        self._context.order.is_in_training_step = False

    def _before_gradient(self) -> None:
        self._context.end_broken_passes()  # their gradients would come after all have been set to zero
        self._slice_averages.complete(self._finish_unseen_backward)

    def _finish_unseen_backward(self) -> None:
        self._context.end_broken_passes()
        if self._context.order.has_backward:
            self.finish_backward()

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        return self._context.sync.pause()

    @contextmanager
    @override
    def evaluation_step(self, name: str) -> Iterator[None]:
        self._context.order.begin_evaluation(name)
        yield
        self._context.order.end_evaluation()

    @override
    def before_collective(self, operation: str) -> None:
        self._context.order.before_collective(operation)

    @override
    def finish_backward(self) -> None:
        with without_guards():
            self._bind_slice_gradients()
            self._bucketed_all_reduce.finish()
            for tensor_unit in self._tensor_units:
                tensor_unit.check_complete()
            has_pass = self._context.order.has_backward
            if has_pass:
                self._context.order.complete_backward()
                for unit in self._units:
                    unit.show_gradients()
                    unit.show_joined_gradients()
            self._slice_averages.finish(has_pass, self._context.sync.is_on)
            self._context.communicator_factory.inter_node_all_reduce.finish()
            for unit in self._units:  # whether or not the pass has reached it
                unit.reshard()
            self._context.gather_memory.free_all()
        self._context.guards.is_accumulating = not self._context.sync.is_on
        self._gather_slice_gradients()
        self._context.guards.add_outside_gradients()
        self._context.backward_optimizer.finish_backward()

    @override
    def leave_step(self) -> None:
        self._context.reducer.discard()
        self._context.backward_passes.discard()
        self._finish_unseen_backward()

    @override
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.finish_backward()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter not in self._managed_parameters:
                raise ShardingError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is in no unit and in "
                    "no bucket: it was created after the strategy's setup. Create it in __init__ or configure_model"
                )

    @override
    def after_optimizer_step(self) -> None:
        self._context.parameters_changed = True
        self._context.guards.num_updates[False] += 1

    @override
    def model_state(self, deferred_tensors: DeferredTensors | None = None) -> dict[str, Any]:
        if self._context.backward_optimizer.is_partially_updated:
            raise ShardingError(PARTIALLY_UPDATED.format("this state is not saved"))
        return super().model_state(deferred_tensors)

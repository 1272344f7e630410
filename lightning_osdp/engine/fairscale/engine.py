"""The engine on FairScale's units: applies a plan to a module, and carries it through training."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.engine.activation_checkpointing import check_recomputed_blocks, checkpoint_block
from lightning_osdp.engine.fairscale.communicators import sharded_operators, sharded_units
from lightning_osdp.engine.fairscale.sharded_operator import (
    NestedOperators,
    ShardedOperator,
    find_nested_operators,
    large_parameters,
    modules_holding,
    own_parameters,
)
from lightning_osdp.engine.fairscale.unit import UNIT_DTYPES, EngineContext, FairScaleUnit
from lightning_osdp.engine.grad_norm import patch_total_norm
from lightning_osdp.engine.gradient_buckets import BucketedAllReduce
from lightning_osdp.engine.meta_init import MetaInitializer, check_initializable
from lightning_osdp.engine.sliced_operator import SlicedOperator, check_slicing
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.state import state_dict as states
from lightning_osdp.state.deferred_tensor import DeferredTensors
from lightning_osdp.state.shard_layout import ShardLayout
from lightning_osdp.state.state_dict import Fill, ShardedParameters


class FairScaleEngine:
    """Carries out a plan with one FairScale unit for each sharded operator and bucketed all-reduce for the rest.

    Args:
        device: where the rank computes; ``cpu`` needs a gloo process group, ``cuda`` an NCCL one.
        group: the ranks to shard over; the whole world if None.
        broadcast: whether all ranks get rank 0's values. If not, each keeps its own.
    """

    def __init__(self, device: torch.device, group: Any = None, broadcast: bool = True) -> None:
        self._device = device
        self._broadcast = broadcast
        self._group: Any = group if group is not None else dist.group.WORLD
        self._operators: dict[str, ShardedOperator] = {}
        self._units: list[FairScaleUnit] = []
        self._sliced_operators: list[SlicedOperator] = []
        self._undo_recompute: list[Callable[[], None]] = []
        self._bucketed_all_reduce: BucketedAllReduce | None = None
        self._module: nn.Module | None = None
        self._sharded_parameters = ShardedParameters({}, self._group)
        self._managed_parameters: frozenset[nn.Parameter] = frozenset()
        self._context: EngineContext | None = None
        self._nested_operators: NestedOperators = {}

    @property
    def collectives_per_step(self) -> int:
        """Of the units, in however many stages each runs, and the buckets of replicated gradients."""
        assert self._bucketed_all_reduce is not None
        return sum(unit.num_collectives for unit in self._units) + self._bucketed_all_reduce.num_collectives

    @property
    def module(self) -> nn.Module | None:
        """The module that a plan was applied to."""
        return self._module

    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        """See ``Engine.assert_cluster_and_peak``."""
        check_initializable(module)
        check_recomputed_blocks(plan.recomputed, module)
        modules = dict(module.named_modules())
        inside = find_nested_operators(plan)
        held: dict[str, list[nn.Parameter]] = {}
        owner: dict[nn.Parameter, str] = {}
        for operator in sharded_operators(plan):
            if operator.name not in modules or not operator.name:
                raise ShardingError(f"the plan shards {operator.name!r}, which is not a submodule of this module")
            if len(operator.slices) > 1:
                check_slicing(operator, modules[operator.name])
            held[operator.name] = parameters = large_parameters(module, operator.name, inside)
            if not parameters:
                raise ShardingError(f"{operator.name} can't be sharded: all its parameters are small")
            for parameter in parameters:
                if parameter in owner:
                    raise ShardingError(
                        f"{operator.name} and {owner[parameter]} share a parameter: both can't shard it"
                    )
                owner[parameter] = operator.name
        _check_units(plan, modules, held)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            home = owner.get(parameter)
            if home is not None and not name.startswith(home + "."):
                raise ShardingError(f"{home} can't be sharded: its parameter is also {name}, outside of it")
            if home is not None and parameter.dtype not in UNIT_DTYPES:
                raise ShardingError(f"{name} is {parameter.dtype}: units hold float32, bfloat16 or float16")

    def apply(self, module: nn.Module, plan: ExecutionPlan, optimizers: Iterable[Optimizer] = ()) -> None:
        """See ``Engine.apply``. The module is never whole on the device: operators are moved and sharded in turn."""
        self.check(module, plan)
        self._module = module
        self._context, self._nested_operators = (
            EngineContext(self._device, self._group, plan),
            find_nested_operators(plan),
        )
        compared = self._broadcast and self._device.type == "cpu"
        equal = _find_equal_on_all_ranks([*module.parameters(), *module.buffers()], self._group) if compared else set()
        initialiser = MetaInitializer(module, self._device, self._group)
        for unit, operators in sharded_units(plan).items():
            for operator in operators:
                body, parameters = module.get_submodule(operator.name), self._large_parameters(operator)
                for part in modules_holding(body, parameters) if operator.name in self._nested_operators else [body]:
                    initialiser.fill(part)
                for parameter in parameters:
                    self._move_and_broadcast(parameter, equal)
            self._shard(unit, operators, plan)
        initialiser.fill(module)
        sharded = {parameter for one in self._operators.values() for parameter in one.layouts}
        for tensor in [p for p in module.parameters() if p not in sharded] + list(module.buffers()):
            self._move_and_broadcast(tensor, equal)
        self._finalize(plan)
        self.shard_optimizer_state(optimizers)
        # Its inference path reads the weights of submodules without calling them, so it would see shards.
        torch.backends.mha.set_fastpath_enabled(False)

    def apply_plan_change(self, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        """See ``Engine.apply_plan_change``. One operator at a time is whole."""
        assert self._module is not None
        assert self._bucketed_all_reduce is not None
        self._bucketed_all_reduce.detach()
        try:
            self._check_plan_change(plan)
        except ShardingError:
            self._bucketed_all_reduce.refresh()
            raise
        optimizers = list(optimizers)
        for undo in self._undo_recompute:
            undo()
        self._context, self._nested_operators = (
            EngineContext(self._device, self._group, plan),
            find_nested_operators(plan),
        )
        before, self._operators = self._operators, {}
        wanted = sharded_units(plan)
        holder = {parameter: name for name, one in before.items() for parameter in one.layouts}
        for unit in [*wanted, *before]:
            members = [operator.name for operator in wanted.get(unit, [])]
            owned = [p for name in members for p in own_parameters(self._module, name, self._nested_operators)]
            held = {holder.get(parameter) for parameter in owned}
            for name in [name for name in before if name in held or name == unit]:
                before.pop(name).undo(optimizers)
            if unit in wanted and unit not in self._operators:
                layouts = self._shard(unit, wanted[unit], plan)
                for optimizer in optimizers:
                    ShardedParameters(layouts, self._group).shard_existing_state(optimizer)
        self._finalize(plan)
        self._attach_backward_optimizer(optimizers)

    def close(self) -> None:
        """Frees what is not among the module's own parameters. The engine is of no use afterwards."""
        for operator in self._operators.values():
            if operator.sliced_operator is not None:
                operator.sliced_operator.release_storage()

    def _check_plan_change(self, plan: ExecutionPlan) -> None:
        """``assert_cluster_and_peak`` of the module as its user knows it."""
        assert self._module is not None
        with ExitStack() as as_it_was:
            as_it_was.enter_context(self.unsharded_shapes())
            for operator in self._operators.values():
                as_it_was.enter_context(operator.use_original_forward())
            self.check(self._module, plan)

    def _shard(
        self, unit: str, operators: list[OperatorPlan], plan: ExecutionPlan
    ) -> Mapping[nn.Parameter, ShardLayout]:
        """Makes units of what lies in the module ``unit``, whole and on the device. Returns how the parameters lie."""
        assert self._module is not None
        assert self._context is not None
        joined = bool(operators[0].unit)
        again = any(unit.startswith(name + ".") or (unit == name and not joined) for name in plan.recomputed)
        line, module = (
            self._context.communicator_factory.for_choice(operators[0].choice),
            self._module.get_submodule(unit),
        )
        parameters = [parameter for operator in operators for parameter in self._large_parameters(operator)]
        tied = not joined and unit in self._nested_operators
        watched = [one for one in modules_holding(module, parameters) if one is not module] if tied else ()
        made = ShardedOperator(module, parameters, operators[0], line, self._context, again, watched)
        self._operators[unit] = made
        return made.layouts

    def _large_parameters(self, operator: OperatorPlan) -> list[nn.Parameter]:
        assert self._module is not None
        return large_parameters(self._module, operator.name, self._nested_operators)

    def _finalize(self, plan: ExecutionPlan) -> None:
        """Once all operators are as planned: recomputed blocks, the reductions of the rest, and who holds what."""
        assert self._module is not None
        assert self._context is not None
        self._undo_recompute = [checkpoint_block(self._module.get_submodule(name)) for name in plan.recomputed]
        operators = self._operators.values()
        self._units = [unit for one in operators for unit in one.units]
        self._sliced_operators = [one.sliced_operator for one in operators if one.sliced_operator is not None]
        layouts = {parameter: layout for one in operators for parameter, layout in one.layouts.items()}
        self._sharded_parameters = ShardedParameters(layouts, self._group)
        patch_total_norm(self._sharded_parameters)
        slices = {split.full_parameter: split.replicated_weights for split in self._sliced_operators}
        whole = self._module.parameters()
        replicated = [r for p in whole for r in slices.get(p, [p] if p not in layouts else [])]
        self._bucketed_all_reduce = BucketedAllReduce(replicated, self._context.replica_group)
        self._managed_parameters = self._sharded_parameters.parameters.union(replicated)

    def shard_optimizer_state(self, optimizers: Iterable[Optimizer]) -> None:
        """See ``Engine.shard_optimizer_state``."""
        optimizers = list(optimizers)
        for optimizer in optimizers:
            self._sharded_parameters.shard_existing_state(optimizer)
        self._attach_backward_optimizer(optimizers)

    def _attach_backward_optimizer(self, optimizers: Iterable[Optimizer]) -> None:
        assert self._context is not None
        if self._context.update_in_backward:
            self._context.backward_optimizer.attach(optimizers)

    def unsharded_shapes(self) -> AbstractContextManager[None]:
        """See ``Engine.unsharded_shapes``."""
        return self._sharded_parameters.show_unsharded_shapes()

    @contextmanager
    def summon_full_params(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[None]:
        """See ``Engine.summon_full_params``."""
        assert self._module is not None
        assert self._context is not None
        if self._context.params_summoned or any(unit.has_unsharded_params for unit in self._units):
            raise ShardingError(
                "parameters can't be made whole where they are already: between forward and backward, or within itself"
            )
        self._context.params_summoned = True
        try:
            with self._sharded_parameters.summon_full_params((module or self._module).parameters(), writeback):
                yield
        finally:
            self._context.params_summoned = False
            self.after_optimizer_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See ``Engine.no_sync``."""
        if self._bucketed_all_reduce is None or self._context is None:
            yield
            return
        with (
            self._bucketed_all_reduce.no_sync(),
            self._context.communicator_factory.inter_node_all_reduce.no_sync(),
            self._context.backward_optimizer.pause(),
        ):
            yield

    def before_forward(self) -> None:
        """Takes in what changed since the last step: parameters that were unfrozen."""
        for split in self._sliced_operators:
            split.sync_requires_grad()
        if self._bucketed_all_reduce is not None:
            self._bucketed_all_reduce.refresh()
        if self._context is not None:
            self._context.backward_optimizer.refresh()
            self._context.reducer.discard()
            self._context.prefetch_order.start_pass(is_backward=False)

    def finish_backward(self) -> None:
        """See ``Engine.finish_backward``. Frees units that a backward pass did not reach (frozen, or without loss)."""
        assert self._bucketed_all_reduce is not None
        assert self._context is not None
        for split in self._sliced_operators:
            split.bind_remaining_gradients()
        self._bucketed_all_reduce.finish()
        self._context.communicator_factory.inter_node_all_reduce.finish()
        for unit in self._units:
            unit.finish_backward()
        for split in self._sliced_operators:
            split.gather_slice_gradients()
        self._context.backward_optimizer.finish_backward()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """See ``Engine.before_optimizer_step``."""
        self.finish_backward()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._managed_parameters:
                    raise ShardingError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is in no unit and in "
                        "no bucket: it was created after the strategy's setup. Create it in __init__ or configure_model"
                    )

    def after_optimizer_step(self) -> None:
        """See ``Engine.after_optimizer_step``."""
        assert self._context is not None
        self._context.parameters_changed = True

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See ``Engine.clip_grad_norm``."""
        with_gradient = [p for p in parameters if p.grad is not None]
        total = self._sharded_parameters.compute_norm(
            [(p, p.grad) for p in with_gradient if p.grad is not None], norm_type, self._device
        )
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, total)
        return total

    def model_state(self, deferred_tensors: DeferredTensors | None = None) -> dict[str, Any]:
        """See ``Engine.model_state``."""
        assert self._module is not None
        assert self._context is not None
        if self._context.backward_optimizer.is_partially_updated:
            raise ShardingError(
                "a backward pass was broken off when the optimizer had updated a part of the parameters: this state is "
                "not saved. Go on from the last checkpoint"
            )
        if deferred_tensors is not None:
            return states.model_state(self._module, self._sharded_parameters, deferred_tensors)
        return states.gather_state(self._sharded_parameters, lambda now: self.model_state(now))

    def load_model_state(
        self, state: dict[str, Any], strict: bool = True, fill: Fill = states.fill_from_memory
    ) -> None:
        """See ``Engine.load_model_state``."""
        assert self._module is not None
        states.load_model_state(self._module, self._sharded_parameters, state, strict, fill)
        self.after_optimizer_step()

    def optimizer_state(
        self, optimizer: Optimizer, index: int = 0, deferred_tensors: DeferredTensors | None = None
    ) -> dict[str, Any]:
        """See ``Engine.optimizer_state``."""
        if deferred_tensors is not None:
            return states.optimizer_state(
                optimizer, self._sharded_parameters, self._parameter_names(), index, deferred_tensors
            )
        return states.gather_state(self._sharded_parameters, lambda now: self.optimizer_state(optimizer, index, now))

    def check_state(
        self, state: dict[str, Any], strict: bool, saved_states: Mapping[Optimizer, dict[str, Any]]
    ) -> None:
        """See ``Engine.check_state``."""
        assert self._module is not None
        states.check_model_state(self._module, self._sharded_parameters, state, strict)
        for optimizer, theirs in saved_states.items():
            states.match_optimizer_state(optimizer, self._sharded_parameters, self._parameter_names(), theirs)

    def load_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], fill: Fill = states.fill_from_memory
    ) -> None:
        """See ``Engine.load_optimizer_state``."""
        states.load_optimizer_state(optimizer, self._sharded_parameters, self._parameter_names(), state, fill)

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        assert self._module is not None
        return {parameter: name for name, parameter in self._module.named_parameters()}

    def _move_and_broadcast(self, tensor: Tensor, equal_on_all_ranks: set[Tensor]) -> None:
        """Moves a parameter or buffer to the device, in place, with rank 0's values, which all have of those that are
        ``equal_on_all_ranks``."""
        tensor.data = tensor.data.to(self._device)
        if self._broadcast and tensor not in equal_on_all_ranks:
            dist.broadcast(tensor.data, src=dist.get_global_rank(self._group, 0), group=self._group)


def _find_equal_on_all_ranks(tensors: Sequence[Tensor], group: Any) -> set[Tensor]:
    """Those known to hold the same bytes on all ranks, as most do: modules are made from one seed. Collective.

    Worth it on the host, not on CUDA, where sending takes no longer. [a core hashes 1.8 GB/s; at 1 Gbit/s 110 MB took
    0.9 s to send, and asking for each of 111 tensors by itself 0.4 s with four ranks]
    """
    digests = bytearray(b"".join(_digest(tensor) for tensor in tensors))
    if not digests:
        return set()
    own = torch.frombuffer(digests, dtype=torch.uint8).view(len(tensors), -1)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    same = torch.stack([(each == own).all(1) for each in everyone]).all(0)
    return {tensor for tensor, equal in zip(tensors, same.tolist(), strict=True) if equal and _is_readable(tensor)}


def _digest(tensor: Tensor) -> bytes:
    if not _is_readable(tensor):
        return bytes(hashlib.sha256().digest_size)
    values = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())  # as numpy, storages can't be freed again
    return hashlib.sha256(values).digest()


def _is_readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()


def _check_units(
    plan: ExecutionPlan, modules: Mapping[str, nn.Module], parameters_by_operator: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """Refuses units that hold several types, or that operators share which do not lie in a module that runs."""
    for unit, operators in sharded_units(plan).items():
        shared = bool(operators[0].unit)
        if shared and (unit not in modules or type(modules[unit]).forward is nn.Module.forward):
            raise ShardingError(f"the plan joins operators of {unit!r}, which is no submodule that is called")
        outside = [operator.name for operator in operators if not operator.name.startswith(unit + ".")]
        if shared and outside:
            raise ShardingError(f"the plan joins {outside[0]} with operators of {unit}, where it does not lie")
        dtypes = sorted(
            {str(parameter.dtype) for operator in operators for parameter in parameters_by_operator[operator.name]}
        )
        if len(dtypes) > 1:
            raise ShardingError(f"{unit} holds {' and '.join(dtypes)}: a unit's parameters are of one type")

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

from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.sharding import state as states
from lightning_osdp.sharding.initialise import Initialiser, check_initialisable
from lightning_osdp.sharding.layout import Layout
from lightning_osdp.sharding.lines import sharded_operators, sharded_units
from lightning_osdp.sharding.norms import count_whole_gradients
from lightning_osdp.sharding.pending import Pending
from lightning_osdp.sharding.recompute import check_recomputed, recompute
from lightning_osdp.sharding.replicas import Replicas
from lightning_osdp.sharding.sharded import (
    Inside,
    ShardedOperator,
    holders,
    large_parameters,
    operators_inside,
    own_parameters,
)
from lightning_osdp.sharding.splitting import SplitOperator, check_split
from lightning_osdp.sharding.state import Fill, Shards
from lightning_osdp.sharding.units import UNIT_DTYPES, Shared, Unit


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
        self._units: list[Unit] = []
        self._splits: list[SplitOperator] = []
        self._undo_recompute: list[Callable[[], None]] = []
        self._replicas: Replicas | None = None
        self._module: nn.Module | None = None
        self._shards = Shards({}, self._group)
        self._known: frozenset[nn.Parameter] = frozenset()
        self._shared: Shared | None = None
        self._inside: Inside = {}

    @property
    def collectives_per_step(self) -> int:
        """Of the units, in however many stages each runs, and the buckets of replicated gradients."""
        assert self._replicas is not None
        return sum(unit.num_collectives for unit in self._units) + self._replicas.num_collectives

    @property
    def module(self) -> nn.Module | None:
        """The module that a plan was applied to."""
        return self._module

    def check(self, module: nn.Module, plan: ExecutionPlan) -> None:
        """See ``Engine.check``."""
        check_initialisable(module)
        check_recomputed(plan.recomputed, module)
        modules = dict(module.named_modules())
        inside = operators_inside(plan)
        held: dict[str, list[nn.Parameter]] = {}
        owner: dict[nn.Parameter, str] = {}
        for operator in sharded_operators(plan):
            if operator.name not in modules or not operator.name:
                raise ShardingError(f"the plan shards {operator.name!r}, which is not a submodule of this module")
            if len(operator.slices) > 1:
                check_split(operator, modules[operator.name])
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
        self._shared, self._inside = Shared(self._device, self._group, plan), operators_inside(plan)
        compared = self._broadcast and self._device.type == "cpu"
        equal = _same_on_all_ranks([*module.parameters(), *module.buffers()], self._group) if compared else set()
        initialiser = Initialiser(module, self._device, self._group)
        for unit, operators in sharded_units(plan).items():
            for operator in operators:
                body, parameters = module.get_submodule(operator.name), self._large_parameters(operator)
                for part in holders(body, parameters) if operator.name in self._inside else [body]:
                    initialiser.fill(part)
                for parameter in parameters:
                    self._place(parameter, equal)
            self._shard(unit, operators, plan)
        initialiser.fill(module)
        sharded = {parameter for one in self._operators.values() for parameter in one.layouts}
        for tensor in [p for p in module.parameters() if p not in sharded] + list(module.buffers()):
            self._place(tensor, equal)
        self._join(plan)
        self.take_in(optimizers)
        # Its inference path reads the weights of submodules without calling them, so it would see shards.
        torch.backends.mha.set_fastpath_enabled(False)

    def change(self, plan: ExecutionPlan, optimizers: Iterable[Optimizer]) -> None:
        """See ``Engine.change``. One operator at a time is whole."""
        assert self._module is not None
        assert self._replicas is not None
        self._replicas.detach()
        try:
            self._check_change(plan)
        except ShardingError:
            self._replicas.refresh()
            raise
        optimizers = list(optimizers)
        for undo in self._undo_recompute:
            undo()
        self._shared, self._inside = Shared(self._device, self._group, plan), operators_inside(plan)
        before, self._operators = self._operators, {}
        wanted = sharded_units(plan)
        holder = {parameter: name for name, one in before.items() for parameter in one.layouts}
        for unit in [*wanted, *before]:
            members = [operator.name for operator in wanted.get(unit, [])]
            owned = [p for name in members for p in own_parameters(self._module, name, self._inside)]
            held = {holder.get(parameter) for parameter in owned}
            for name in [name for name in before if name in held or name == unit]:
                before.pop(name).undo(optimizers)
            if unit in wanted and unit not in self._operators:
                layouts = self._shard(unit, wanted[unit], plan)
                for optimizer in optimizers:
                    Shards(layouts, self._group).shard_existing_state(optimizer)
        self._join(plan)
        self._update_with(optimizers)

    def forget_slices(self) -> None:
        """Frees what is not among the module's own parameters. The engine is of no use afterwards."""
        for operator in self._operators.values():
            if operator.split is not None:
                operator.split.forget()

    def _check_change(self, plan: ExecutionPlan) -> None:
        """``check`` of the module as its user knows it."""
        assert self._module is not None
        with ExitStack() as as_it_was:
            as_it_was.enter_context(self.whole_shapes())
            for operator in self._operators.values():
                as_it_was.enter_context(operator.own_forward())
            self.check(self._module, plan)

    def _shard(self, unit: str, operators: list[OperatorPlan], plan: ExecutionPlan) -> Mapping[nn.Parameter, Layout]:
        """Makes units of what lies in the module ``unit``, whole and on the device. Returns how the parameters lie."""
        assert self._module is not None
        assert self._shared is not None
        joined = bool(operators[0].unit)
        again = any(unit.startswith(name + ".") or (unit == name and not joined) for name in plan.recomputed)
        line, module = self._shared.lines.of(operators[0].choice), self._module.get_submodule(unit)
        parameters = [parameter for operator in operators for parameter in self._large_parameters(operator)]
        tied = not joined and unit in self._inside
        watched = [one for one in holders(module, parameters) if one is not module] if tied else ()
        made = ShardedOperator(module, parameters, operators[0], line, self._shared, again, watched)
        self._operators[unit] = made
        return made.layouts

    def _large_parameters(self, operator: OperatorPlan) -> list[nn.Parameter]:
        assert self._module is not None
        return large_parameters(self._module, operator.name, self._inside)

    def _join(self, plan: ExecutionPlan) -> None:
        """Once all operators are as planned: recomputed blocks, the reductions of the rest, and who holds what."""
        assert self._module is not None
        assert self._shared is not None
        self._undo_recompute = [recompute(self._module.get_submodule(name)) for name in plan.recomputed]
        operators = self._operators.values()
        self._units = [unit for one in operators for unit in one.units]
        self._splits = [one.split for one in operators if one.split is not None]
        layouts = {parameter: layout for one in operators for parameter, layout in one.layouts.items()}
        self._shards = Shards(layouts, self._group)
        count_whole_gradients(self._shards)
        slices = {split.handle: split.replicated for split in self._splits}
        whole = self._module.parameters()
        replicated = [r for p in whole for r in slices.get(p, [p] if p not in layouts else [])]
        self._replicas = Replicas(replicated, self._shared.replica_group)
        self._known = self._shards.parameters.union(replicated)

    def take_in(self, optimizers: Iterable[Optimizer]) -> None:
        """See ``Engine.take_in``."""
        optimizers = list(optimizers)
        for optimizer in optimizers:
            self._shards.shard_existing_state(optimizer)
        self._update_with(optimizers)

    def _update_with(self, optimizers: Iterable[Optimizer]) -> None:
        assert self._shared is not None
        if self._shared.update_in_backward:
            self._shared.updates.of(optimizers)

    def whole_shapes(self) -> AbstractContextManager[None]:
        """See ``Engine.whole_shapes``."""
        return self._shards.whole_shapes_shown()

    @contextmanager
    def whole_parameters(self, module: nn.Module | None = None, writeback: bool = True) -> Iterator[None]:
        """See ``Engine.whole_parameters``."""
        assert self._module is not None
        assert self._shared is not None
        if self._shared.shown_whole or any(unit.in_use for unit in self._units):
            raise ShardingError(
                "parameters can't be made whole where they are already: between forward and backward, or within itself"
            )
        self._shared.shown_whole = True
        try:
            with self._shards.whole_values_shown((module or self._module).parameters(), writeback):
                yield
        finally:
            self._shared.shown_whole = False
            self.after_optimizer_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See ``Engine.no_sync``."""
        if self._replicas is None or self._shared is None:
            yield
            return
        with self._replicas.no_sync(), self._shared.lines.between.no_sync(), self._shared.updates.paused():
            yield

    def before_forward(self) -> None:
        """Takes in what changed since the last step: parameters that were unfrozen."""
        for split in self._splits:
            split.follow()
        if self._replicas is not None:
            self._replicas.refresh()
        if self._shared is not None:
            self._shared.updates.refresh()
            self._shared.reducer.drop()
            self._shared.order.begin(backward=False)

    def finish_backward(self) -> None:
        """See ``Engine.finish_backward``. Frees units that a backward pass did not reach (frozen, or without loss)."""
        assert self._replicas is not None
        assert self._shared is not None
        for split in self._splits:
            split.before_reductions_end()
        self._replicas.finish()
        self._shared.lines.between.finish()
        for unit in self._units:
            unit.end_backward()
        for split in self._splits:
            split.collect()
        self._shared.updates.finish()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """See ``Engine.before_optimizer_step``."""
        self.finish_backward()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._known:
                    raise ShardingError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is in no unit and in "
                        "no bucket: it was created after the strategy's setup. Create it in __init__ or configure_model"
                    )

    def after_optimizer_step(self) -> None:
        """See ``Engine.after_optimizer_step``."""
        assert self._shared is not None
        self._shared.parameters_changed = True

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See ``Engine.clip_grad_norm``."""
        with_gradient = [p for p in parameters if p.grad is not None]
        total = self._shards.norm([(p, p.grad) for p in with_gradient if p.grad is not None], norm_type, self._device)
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, total)
        return total

    def model_state(self, pending: Pending | None = None) -> dict[str, Any]:
        """See ``Engine.model_state``."""
        assert self._module is not None
        assert self._shared is not None
        if self._shared.updates.amid_backward:
            raise ShardingError(
                "a backward pass was broken off when the optimizer had updated a part of the parameters: this state is "
                "not saved. Go on from the last checkpoint"
            )
        if pending is not None:
            return states.model_state(self._module, self._shards, pending)
        return states.at_once(self._shards, lambda now: self.model_state(now))

    def load_model_state(
        self, state: dict[str, Any], strict: bool = True, fill: Fill = states.fill_from_memory
    ) -> None:
        """See ``Engine.load_model_state``."""
        assert self._module is not None
        states.load_model_state(self._module, self._shards, state, strict, fill)
        self.after_optimizer_step()

    def optimizer_state(self, optimizer: Optimizer, index: int = 0, pending: Pending | None = None) -> dict[str, Any]:
        """See ``Engine.optimizer_state``."""
        if pending is not None:
            return states.optimizer_state(optimizer, self._shards, self._names(), index, pending)
        return states.at_once(self._shards, lambda now: self.optimizer_state(optimizer, index, now))

    def check_state(self, state: dict[str, Any], strict: bool, saved: Mapping[Optimizer, dict[str, Any]]) -> None:
        """See ``Engine.check_state``."""
        assert self._module is not None
        states.check_model_state(self._module, self._shards, state, strict)
        for optimizer, theirs in saved.items():
            states.fitting_optimizer_state(optimizer, self._shards, self._names(), theirs)

    def load_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], fill: Fill = states.fill_from_memory
    ) -> None:
        """See ``Engine.load_optimizer_state``."""
        states.load_optimizer_state(optimizer, self._shards, self._names(), state, fill)

    def _names(self) -> dict[nn.Parameter, str]:
        assert self._module is not None
        return {parameter: name for name, parameter in self._module.named_parameters()}

    def _place(self, tensor: Tensor, equal: set[Tensor]) -> None:
        """Moves a parameter or buffer to the device, in place, with rank 0's values, which all have of those that are
        ``equal``."""
        tensor.data = tensor.data.to(self._device)
        if self._broadcast and tensor not in equal:
            dist.broadcast(tensor.data, src=dist.get_global_rank(self._group, 0), group=self._group)


def _same_on_all_ranks(tensors: Sequence[Tensor], group: Any) -> set[Tensor]:
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
    plan: ExecutionPlan, modules: Mapping[str, nn.Module], held: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """Refuses units that hold several types, or that operators share which do not lie in a module that runs."""
    for unit, operators in sharded_units(plan).items():
        shared = bool(operators[0].unit)
        if shared and (unit not in modules or type(modules[unit]).forward is nn.Module.forward):
            raise ShardingError(f"the plan joins operators of {unit!r}, which is no submodule that is called")
        outside = [operator.name for operator in operators if not operator.name.startswith(unit + ".")]
        if shared and outside:
            raise ShardingError(f"the plan joins {outside[0]} with operators of {unit}, where it does not lie")
        dtypes = sorted({str(parameter.dtype) for operator in operators for parameter in held[operator.name]})
        if len(dtypes) > 1:
            raise ShardingError(f"{unit} holds {' and '.join(dtypes)}: a unit's parameters are of one type")

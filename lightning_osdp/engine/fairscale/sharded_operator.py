"""One operator, or several that share a unit, as FairScale units, and back.

Note [tied weights]: what several operators have in common, such as an embedding and a head, is an operator by itself:
the module that encloses them, around which the unit lies. The weight is unsharded while that module runs. A module that
holds the weight and is run by itself reads a guarded parameter, as any code outside of the operator does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.engine.fairscale.communicators import UnitCommunicators
from lightning_osdp.engine.fairscale.context import EngineContext
from lightning_osdp.engine.fairscale.low_precision import DTYPES
from lightning_osdp.engine.fairscale.unit import FairScaleUnit
from lightning_osdp.engine.sliced_operator import ForwardStage, SlicedOperator
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.state.flat_layout import FlatPaddedLayout
from lightning_osdp.state.guarded_parameter import GuardContext, ShardGuard
from lightning_osdp.state.state_dict import ShardedParameters

_OF_UNITS = frozenset(
    (
        *("_is_sharded", "_is_shared", "_orig_size", "_fp32_shard", "_fp16_shard", "_cpu_grad", "_saved_grad_shard"),
        *("_joined_grad_shard", "_full_param_padded", "_full_view", "_full_storage", "_shard_bwd_hook"),
    )
)
"""Attributes of a parameter that belong to its unit; all others are the user's."""

NestedOperators = Mapping[str, Sequence[str]]
"""The operators inside of each operator that encloses others, by name."""


def find_nested_operators(plan: ExecutionPlan) -> NestedOperators:
    """Return the names of the operators inside of each of the plan's operators that encloses others."""
    inner: dict[str, list[str]] = {operator.name: [] for operator in plan.operators}
    for name in inner:
        parts = name.split(".")
        for outer in (".".join(parts[:depth]) for depth in range(1, len(parts))):
            if outer in inner:
                inner[outer].append(name)
    return {outer: names for outer, names in inner.items() if names}


def own_parameters(root: nn.Module, operator: str, nested_operators: NestedOperators) -> list[nn.Parameter]:
    """Return the parameters that lie in an operator of ``root`` and in no operator inside of it."""
    module = root.get_submodule(operator)
    if operator not in nested_operators:
        return list(module.parameters())
    prefixes = [inner.removeprefix(operator + ".") + "." for inner in nested_operators[operator]]
    names_by_parameter: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_parameter[parameter].append(name)
    return [
        parameter
        for parameter, names in names_by_parameter.items()
        if not any(all(name.startswith(prefix) for name in names) for prefix in prefixes)
    ]


def large_parameters(root: nn.Module, operator: str, nested_operators: NestedOperators) -> list[nn.Parameter]:
    """Return those of ``own_parameters``, unsharded, that a unit takes (see ``ParameterInfo.is_small``)."""
    parameters = own_parameters(root, operator, nested_operators)
    return [p for p in parameters if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]


def modules_holding(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Return the modules in ``module`` that directly own any of the parameters."""
    wanted = set(parameters)
    return [inner for inner in module.modules() if not wanted.isdisjoint(inner._parameters.values())]


def release_storage(parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of parameters that are not used any more.

    FairScale's hooks tie parameters to autograd's nodes, where Python's garbage collector does not see the cycle.
    """
    for parameter in parameters:
        vars(parameter).clear()
        parameter.data = parameter.data.new_empty(0)


class ShardedOperator:
    """The units of an operator's large parameters: a single one, or one for each sharded slice.

    Args:
        name: the unit's name: of the operator, or of the block.
        module: the operator, or the block whose operators share a unit.
        plans: what was decided for each operator by its large parameters: the same, but for how they are read.
        communicators: communicators of the units.
        context: what all units of the engine share.
        is_recomputed: whether the operator lies in a block that is recomputed.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plans: Mapping[nn.Parameter, OperatorPlan],
        communicators: UnitCommunicators,
        context: EngineContext,
        is_recomputed: bool,
    ) -> None:
        self.label, self._module, parameters = name, module, list(plans)
        plan = plans[parameters[0]]
        self._original_forward = vars(module).get("forward")
        self.layouts = {p: FlatPaddedLayout.create_sharded(p.shape, communicators.group) for p in parameters}
        self.units: list[FairScaleUnit] = []
        self.sliced_operator: SlicedOperator | None = None

        def make_unit(stage: nn.Module | ForwardStage, parameters: list[nn.Parameter], mode: Mode) -> None:
            label = name if len(plan.slices) == 1 else f"{name} (slice {len(self.units) + 1})"
            # How a weight is read holds for its slices; what else is read beside a slice is taken as it is.
            read = plans if stage is module else {p: plan for p in parameters if p not in plans}
            dtypes = {p: DTYPES[own.compute_dtype] for p, own in read.items() if own.compute_dtype in DTYPES}
            unread = {p for p, own in read.items() if not own.gathers_in_backward}
            unit = FairScaleUnit(stage, parameters, mode, communicators, context, is_recomputed, label, dtypes, unread)
            self.units.append(unit)

        if len(plan.slices) == 1:
            make_unit(module, parameters, Mode(plan.slices[0]))
        else:
            self.sliced_operator = SlicedOperator(module, plan, communicators.group, make_unit)
            self.layouts[self.sliced_operator.full_parameter] = self.sliced_operator.layout

    def create_guards(self, names: Mapping[nn.Parameter, str], context: GuardContext) -> list[ShardGuard]:
        """Guard the parameters, which are local shards now."""
        full = self.sliced_operator.full_parameter if self.sliced_operator is not None else None

        def drop_gathered() -> None:
            for unit in self.units:
                unit.reshard()

        def rebind(parameter: nn.Parameter, shard: Tensor) -> None:
            parameter.data = shard
            if self.sliced_operator is not None and parameter is full:
                self.sliced_operator.rebind()
            for unit in self.units:
                unit.adopt_shards()

        return [
            ShardGuard(p, layout, names[p], context, drop_gathered, partial(rebind, p), is_sliced=p is full)
            for p, layout in self.layouts.items()
            if any(group is not None and group.size() > 1 for group in layout.groups) or p is full
        ]

    def unshard(self, optimizers: Iterable[Optimizer]) -> None:
        """Gather parameters and their optimizer states for good and restore the operator as it was. Collective."""
        for optimizer in optimizers:
            ShardedParameters(self.layouts, None).unshard_state(optimizer)
        for unit in self.units:
            unit.detach_hooks()
        for parameter, layout in self.layouts.items():
            parameter.data = layout.unshard(parameter.data)
            parameter.grad = None
            for name in _OF_UNITS & set(vars(parameter)):
                delattr(parameter, name)
        self.release_slices()
        self._restore_forward()

    def release_slices(self) -> None:
        """Free the slices of a split operator: they belong to no module."""
        if self.sliced_operator is not None:
            release_storage(self.sliced_operator.weights)

    @contextmanager
    def use_original_forward(self) -> Iterator[None]:
        """Give the module the forward that its user knows within a context, to be looked at."""
        attributes = vars(self._module)
        sharded = {name: value for name, value in attributes.items() if name in ("_call_impl", "forward")}
        self._restore_forward()
        try:
            yield
        finally:
            attributes.update(sharded)

    def _restore_forward(self) -> None:
        vars(self._module).pop("_call_impl", None)
        if self._original_forward is None:
            del self._module.forward
        else:
            self._module.forward = self._original_forward

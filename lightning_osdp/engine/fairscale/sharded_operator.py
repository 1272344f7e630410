"""One operator, or several that share a unit, as units, and back.

Note [tied weights]: what several operators have in common, as an embedding and a head, is an operator by itself: the
module that encloses them, around which the unit lies. The weight is whole while that module runs. Modules that hold it
are watched: one that is run by itself would compute with a part of the weight. In evaluation it is gathered for that
one; in training, for which the step was traced, that is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.engine.fairscale.communicators import UnitCommunicators
from lightning_osdp.engine.fairscale.unit import EngineContext, FairScaleUnit
from lightning_osdp.engine.sliced_operator import ForwardStage, SlicedOperator
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.state.flat_layout import FlatPaddedLayout

NestedOperators = Mapping[str, Sequence[str]]
"""For each operator that encloses others, those."""


def find_nested_operators(plan: ExecutionPlan) -> NestedOperators:
    """Of all operators of the plan."""
    found: dict[str, list[str]] = {operator.name: [] for operator in plan.operators}
    for name in found:
        parts = name.split(".")
        for outer in (".".join(parts[:depth]) for depth in range(1, len(parts))):
            if outer in found:
                found[outer].append(name)
    return {outer: inner for outer, inner in found.items() if inner}


def own_parameters(root: nn.Module, operator: str, nested_operators: NestedOperators) -> list[nn.Parameter]:
    """Those that lie in the operator, and in none inside of it.

    Args:
        root: the module that a plan is of.
        operator: name of the one whose parameters are wanted.
        nested_operators: what ``find_nested_operators`` gives for the plan.
    """
    module = root.get_submodule(operator)
    if operator not in nested_operators:
        return list(module.parameters())
    inner = [other.removeprefix(operator + ".") + "." for other in nested_operators[operator]]
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [p for p, own in names.items() if not any(all(name.startswith(other) for name in own) for other in inner)]


def large_parameters(root: nn.Module, operator: str, nested_operators: NestedOperators) -> list[nn.Parameter]:
    """Those of the same, whole now, that a unit takes (see ``ParameterInfo.is_small``)."""
    own = own_parameters(root, operator, nested_operators)
    return [p for p in own if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]


def modules_holding(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Modules in ``module`` that hold any of the parameters themselves."""
    wanted = set(parameters)
    return [inner for inner in module.modules() if not wanted.isdisjoint(inner._parameters.values())]


class ShardedOperator:
    """Makes units of large parameters: a single one, or one for each sharded slice.

    Args:
        module: the operator, or the block whose operators share a unit.
        parameters: the large ones of all of them, whole and on the device.
        plan: what was decided for the operator, or for each of them alike.
        line: how its units are joined with their like.
        shared: what all units have in common.
        recomputed: whether it lies in a block that is recomputed.
        watched: modules that hold the parameters and may run only while ``module`` does.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        plan: OperatorPlan,
        communicators: UnitCommunicators,
        context: EngineContext,
        is_recomputed: bool,
        guarded_modules: Iterable[nn.Module] = (),
    ) -> None:
        self._module = module
        self._original_forward = vars(module).get("forward")
        self._attributes = {parameter: set(vars(parameter)) for parameter in parameters}
        self.layouts = {
            parameter: FlatPaddedLayout.create_sharded(parameter.shape, communicators.group) for parameter in parameters
        }
        self.units: list[FairScaleUnit] = []
        self.sliced_operator: SlicedOperator | None = None

        def make_unit(stage: nn.Module | ForwardStage, parameters: list[nn.Parameter], mode: Mode) -> None:
            self.units.append(FairScaleUnit(stage, parameters, mode, communicators, context, is_recomputed))

        if len(plan.slices) == 1:
            make_unit(module, parameters, Mode(plan.slices[0]))
        else:
            self.sliced_operator = SlicedOperator(module, plan, communicators.group, make_unit)
            self.layouts[self.sliced_operator.full_parameter] = self.sliced_operator.layout
        self._running_alone: nn.Module | None = None
        self._guard_hooks: list[Any] = []
        for one in guarded_modules:
            self._guard_hooks.append(one.register_forward_pre_hook(self._pre_forward_guard))
            self._guard_hooks.append(one.register_forward_hook(self._post_forward_guard, always_call=True))

    def _pre_forward_guard(self, holder: nn.Module, inputs: Any) -> None:
        """See Note [tied weights]."""
        (unit,) = self.units
        if unit.is_unsharded:
            return
        if torch.is_grad_enabled():
            kind, outer = type(holder).__name__, type(self._module).__name__
            raise ShardingError(
                f"{kind} runs by itself in training: its weight is tied to another module's and sharded, and is whole "
                f"only while {outer} runs, as in the step that was traced. Call {outer} there, or don't tie the two"
            )
        unit.unshard()
        self._running_alone = holder

    def _post_forward_guard(self, holder: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._running_alone is holder:
            self._running_alone = None
            self.units[0].reshard()

    def undo(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes parameters and their optimizer states whole again, and the operator what it was. Collective."""
        for optimizer in optimizers:
            for parameter, layout in self.layouts.items():
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[key] = layout.unshard(value)
        for watch in self._guard_hooks:
            watch.remove()
        for unit in self.units:
            unit.detach_hooks()
        for parameter, layout in self.layouts.items():
            parameter.data = layout.unshard(parameter.data)
            parameter.grad = None
            for name in set(vars(parameter)) - self._attributes[parameter]:  # FairScale's notes
                delattr(parameter, name)
        if self.sliced_operator is not None:
            self.sliced_operator.release_storage()
        self._restore_forward()

    @contextmanager
    def use_original_forward(self) -> Iterator[None]:
        """Within it the operator has the forward that the user gave it, to be looked at."""
        ours = self._module.forward
        self._restore_forward()
        try:
            yield
        finally:
            self._module.forward = ours

    def _restore_forward(self) -> None:
        if self._original_forward is None:
            del self._module.forward
        else:
            self._module.forward = self._original_forward

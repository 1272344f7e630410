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

from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.operators import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.sharding.layout import Layout
from lightning_osdp.sharding.lines import Line
from lightning_osdp.sharding.splitting import SplitOperator, Stage
from lightning_osdp.sharding.units import Shared, Unit

Inside = Mapping[str, Sequence[str]]
"""For each operator that encloses others, those."""


def operators_inside(plan: ExecutionPlan) -> Inside:
    """Of all operators of the plan."""
    found: dict[str, list[str]] = {operator.name: [] for operator in plan.operators}
    for name in found:
        parts = name.split(".")
        for outer in (".".join(parts[:depth]) for depth in range(1, len(parts))):
            if outer in found:
                found[outer].append(name)
    return {outer: inner for outer, inner in found.items() if inner}


def own_parameters(root: nn.Module, operator: str, inside: Inside) -> list[nn.Parameter]:
    """Those that lie in the operator, and in none inside of it.

    Args:
        root: the module that a plan is of.
        operator: name of the one whose parameters are wanted.
        inside: what ``operators_inside`` gives for the plan.
    """
    module = root.get_submodule(operator)
    if operator not in inside:
        return list(module.parameters())
    inner = [other.removeprefix(operator + ".") + "." for other in inside[operator]]
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [p for p, own in names.items() if not any(all(name.startswith(other) for name in own) for other in inner)]


def large_parameters(root: nn.Module, operator: str, inside: Inside) -> list[nn.Parameter]:
    """Those of the same, whole now, that a unit takes (see ``ParameterInfo.small``)."""
    own = own_parameters(root, operator, inside)
    return [p for p in own if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]


def holders(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
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
        line: Line,
        shared: Shared,
        recomputed: bool,
        watched: Iterable[nn.Module] = (),
    ) -> None:
        self._module = module
        self._forward = vars(module).get("forward")
        self._attributes = {parameter: set(vars(parameter)) for parameter in parameters}
        self.layouts = {parameter: Layout.sharded(parameter.shape, line.group) for parameter in parameters}
        self.units: list[Unit] = []
        self.split: SplitOperator | None = None

        def make_unit(stage: nn.Module | Stage, parameters: list[nn.Parameter], mode: Mode) -> None:
            self.units.append(Unit(stage, parameters, mode, line, shared, recomputed))

        if len(plan.slices) == 1:
            make_unit(module, parameters, Mode(plan.slices[0]))
        else:
            self.split = SplitOperator(module, plan, line.group, make_unit)
            self.layouts[self.split.handle] = self.split.layout
        self._alone: nn.Module | None = None
        self._watches: list[Any] = []
        for one in watched:
            self._watches.append(one.register_forward_pre_hook(self._before))
            self._watches.append(one.register_forward_hook(self._after, always_call=True))

    def _before(self, holder: nn.Module, inputs: Any) -> None:
        """See Note [tied weights]."""
        (unit,) = self.units
        if unit.is_whole:
            return
        if torch.is_grad_enabled():
            kind, outer = type(holder).__name__, type(self._module).__name__
            raise ShardingError(
                f"{kind} runs by itself in training: its weight is tied to another module's and sharded, and is whole "
                f"only while {outer} runs, as in the step that was traced. Call {outer} there, or don't tie the two"
            )
        unit.make_whole()
        self._alone = holder

    def _after(self, holder: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._alone is holder:
            self._alone = None
            self.units[0].release()

    def undo(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes parameters and their optimizer states whole again, and the operator what it was. Collective."""
        for optimizer in optimizers:
            for parameter, layout in self.layouts.items():
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[key] = layout.gather(value)
        for watch in self._watches:
            watch.remove()
        for unit in self.units:
            unit.let_go()
        for parameter, layout in self.layouts.items():
            parameter.data = layout.gather(parameter.data)
            parameter.grad = None
            for name in set(vars(parameter)) - self._attributes[parameter]:  # FairScale's notes
                delattr(parameter, name)
        if self.split is not None:
            self.split.forget()
        self._restore_forward()

    @contextmanager
    def own_forward(self) -> Iterator[None]:
        """Within it the operator has the forward that the user gave it, to be looked at."""
        ours = self._module.forward
        self._restore_forward()
        try:
            yield
        finally:
            self._module.forward = ours

    def _restore_forward(self) -> None:
        if self._forward is None:
            del self._module.forward
        else:
            self._module.forward = self._forward

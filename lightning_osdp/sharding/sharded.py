"""One operator, or several that share a unit, as units, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.operators import SMALL_PARAMETER_ELEMENTS
from lightning_osdp.planning.plan import OperatorPlan
from lightning_osdp.sharding.layout import Layout
from lightning_osdp.sharding.lines import Line
from lightning_osdp.sharding.splitting import SplitOperator, Stage
from lightning_osdp.sharding.units import Shared, Unit


def large_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that a unit takes (see ``ParameterInfo.small``)."""
    return [p for p in module.parameters() if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]


class ShardedOperator:
    """Makes units of large parameters: a single one, or one for each sharded slice.

    Args:
        module: the operator, or the block whose operators share a unit.
        parameters: the large ones of all of them, whole and on the device.
        plan: what was decided for the operator, or for each of them alike.
        line: how its units are joined with their like.
        shared: what all units have in common.
        recomputed: whether it lies in a block that is recomputed.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        plan: OperatorPlan,
        line: Line,
        shared: Shared,
        recomputed: bool,
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

    def undo(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes parameters and their optimizer states whole again, and the operator what it was. Collective."""
        for optimizer in optimizers:
            for parameter, layout in self.layouts.items():
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[key] = layout.gather(value)
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

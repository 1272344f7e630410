"""The optimizer's step of one sharded parameter within the backward pass, as soon as its gradient is there.

Then a rank holds the gradients of a few parameters instead of all. The result is the same if parameters are updated
independently of each other (``OptimizerStep.per_parameter``) and nothing needs all gradients first: no clipping by
their norm, no loss scale (``arguments.in_backward_blocker``). The optimizer's own step still comes at its usual time,
for parameters that have a gradient then, with the user's hooks and the scheduler's count of steps.

Fusing the update with the backward pass is known from LOMO (Lv et al., arXiv 2306.09782) and from PyTorch's tutorial on
the optimizer step in backward; OSDP's paper (2209.13258) does not have it.

Note [amid a backward pass]: between the first update of a pass and its end some parameters are a step ahead of others.
If the pass is broken off there, nothing can bring them back, so such a state is never saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_osdp.backend.fused_adam import enable_fused, has_foreign_hooks
from lightning_osdp.engine.gradient_buckets import GradientSync
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.guarded_parameter import opened
from lightning_osdp.state.guarded_states import opened_states


class BackwardOptimizer:
    """Updates parameters of the attached optimizers one by one.

    Args:
        sync: while it is paused, gradients are accumulated instead.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._optimizers: list[Optimizer] = []
        self._group_by_parameter: dict[nn.Parameter, tuple[Optimizer, dict[str, Any]]] = {}
        self._updated: set[nn.Parameter] = set()

    @property
    def is_partially_updated(self) -> bool:
        """Return whether some parameters are a step ahead of others; see Note [amid a backward pass]."""
        return bool(self._updated)

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Update the parameters of these optimizers from now on."""
        self._optimizers = list(optimizers)
        self.refresh()

    def refresh(self) -> None:
        """Include parameters that were added to the optimizers. To be called before every forward.

        Hooks of the user's on an optimizer expect gradients: its parameters are left to the usual step.
        """
        self._group_by_parameter = {
            parameter: (optimizer, group)
            for optimizer in self._optimizers
            if not has_foreign_hooks(optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def finish_backward(self) -> None:
        """Note that the backward pass is over."""
        self._updated.clear()

    def should_update(self, parameter: nn.Parameter) -> bool:
        """Return whether to update ``parameter`` at once with the gradient that has come.

        Raises:
            ShardingError: the parameter was updated in this backward pass already.
        """
        if not self._sync.is_on or parameter not in self._group_by_parameter:
            return False
        if parameter in self._updated:
            raise ShardingError(
                f"a parameter whose part here has shape {tuple(parameter.shape)} received its gradient twice in one "
                "backward pass, and was updated after the first. That happens when a module used in several places is "
                "recomputed by reentrant checkpointing: set OSDPStrategy(update_in_backward=False)"
            )
        return True

    def step_parameter(self, parameter: nn.Parameter) -> None:
        """Update ``parameter`` and free its gradient."""
        optimizer, group = self._group_by_parameter[parameter]
        groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            with opened([parameter]), opened_states(optimizer):
                enable_fused(optimizer)
                _unwrap_hooks(type(optimizer).step)(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        self._updated.add(parameter)


def _unwrap_hooks(step: Any) -> Any:
    """Return an optimizer class's step without torch's wrapper, whose hooks belong to the step of all parameters."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step

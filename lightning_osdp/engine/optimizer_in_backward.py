"""The optimizer's step of one sharded parameter, in the backward pass, as soon as its gradient is there.

Gradients need not be kept then: a rank holds those of what is under way, not of all. The result is the same, as long as
parameters are updated apart from each other (``OptimizerStep.separable``) and nobody has to see all gradients first:
no clipping by their norm, no loss scale (``arguments.in_backward_blocker``). The optimizer's own step comes at its usual
time, for what has still a gradient then, and with it the user's hooks and the scheduler's count of steps.

Fusing the update with the backward pass is known from LOMO (Lv et al., arXiv 2306.09782) and from PyTorch's tutorial on
the optimizer step in backward; OSDP's paper (2209.13258) does not have it.

Note [amid a backward pass]: between the first update of a pass and its end some parameters are a step ahead of others.
If the pass is broken off there, nothing can bring them back, so such a state is never saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_osdp.backend.fused_adam import enable_fused, has_foreign_hooks
from lightning_osdp.errors import ShardingError


class BackwardOptimizer:
    """Updates parameters of some optimizers one by one. Without optimizers, all wait for the step."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._group_by_parameter: dict[nn.Parameter, tuple[Optimizer, dict[str, Any]]] = {}
        self._updated: set[nn.Parameter] = set()
        self._paused = False

    @property
    def is_partially_updated(self) -> bool:
        """See Note [amid a backward pass]."""
        return bool(self._updated)

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """From now on, of these."""
        self._optimizers = list(optimizers)
        self.refresh()

    def refresh(self) -> None:
        """Takes in parameters that the optimizers were given since. To be called before every forward.

        Who looks at an optimizer before it steps expects gradients: its parameters wait.
        """
        self._group_by_parameter = {
            parameter: (optimizer, group)
            for optimizer in self._optimizers
            if not has_foreign_hooks(optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def finish_backward(self) -> None:
        """The backward pass is over."""
        self._updated.clear()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within it gradients are summed, and nothing is updated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def should_update(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient that has come for ``parameter`` is to be used at once.

        Raises:
            ShardingError: the parameter was updated in this backward pass already.
        """
        if self._paused or parameter not in self._group_by_parameter:
            return False
        if parameter in self._updated:
            raise ShardingError(
                f"a parameter whose part here has shape {tuple(parameter.shape)} received its gradient twice in one "
                "backward pass, and was updated after the first. That happens when a module used in several places is "
                "recomputed by reentrant checkpointing: set OSDPStrategy(update_in_backward=False)"
            )
        return True

    def step_parameter(self, parameter: nn.Parameter) -> None:
        """One step of ``parameter``, whose gradient is there, and is freed."""
        optimizer, group = self._group_by_parameter[parameter]
        groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            enable_fused(optimizer)
            _unwrap_hooks(type(optimizer).step)(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        self._updated.add(parameter)


def _unwrap_hooks(step: Any) -> Any:
    """torch wraps the step of each class in the hooks of its instances, which belong to the whole step."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step

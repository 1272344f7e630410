"""Adam's fused kernel, unless the user has chosen another: one pass over memory and no temporaries.

By itself ``torch.optim`` runs a loop on the CPU, whose temporaries are three times the largest parameter, and
``foreach`` on CUDA, whose temporaries are as large as all parameters. The fused kernels do the same arithmetic and are
faster [M-backend-18]. The choice is made for each step and undone after it, so that checkpoints hold the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

FUSED_DEVICE_TYPES = ("cpu", "cuda")


def can_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether a fused kernel can update a parameter group and the user has not chosen otherwise.

    ``fused=False`` and any ``foreach`` count as a choice, and so do ``capturable`` and ``differentiable``.
    """
    if type(optimizer) not in (Adam, AdamW):  # a subclass may step differently
        return False
    is_unset = group.get("fused") is None and group.get("foreach") is None
    if not is_unset or group.get("capturable") or group.get("differentiable"):
        return False
    return all(
        p.device.type in FUSED_DEVICE_TYPES and p.is_floating_point() and p.is_contiguous() for p in group["params"]
    )


def enable_fused(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Select the fused kernel for all groups that can use it and whose gradients are there; return these groups."""
    groups = [
        group for group in optimizer.param_groups if can_fuse(optimizer, group) and _states_are_dense(optimizer, group)
    ]
    for group in groups:
        group["fused"] = True
    return groups


@contextmanager
def fused_step(optimizer: Optimizer) -> Iterator[None]:
    """Let ``optimizer`` use fused kernels within the block; which ones is decided after the step's closure has run."""
    hook = EnableFusedHook()
    handle = optimizer.register_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        for group in hook.fused_groups:
            group["fused"] = None


class EnableFusedHook:
    """A step hook that selects fused kernels before a step, or after its closure, and remembers the groups."""

    def __init__(self) -> None:
        self.fused_groups: list[dict[str, Any]] = []

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the step, whose closure selects fused kernels, if it has one."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first one is the optimizer
        if closure is None:
            self.fused_groups += enable_fused(optimizer)
            return None

        def closure_then_enable() -> Any:
            result = closure()
            self.fused_groups += enable_fused(optimizer)
            return result

        return args[:1], {**kwargs, "closure": closure_then_enable}


OWN_HOOK = -1
"""The number of the engine's hooks among those of an optimizer, which are there while it steps: torch counts from 0."""


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks other than ours are called before ``optimizer`` steps."""
    hooks = optimizer._optimizer_step_pre_hooks.items()
    return any(key != OWN_HOOK and not isinstance(hook, EnableFusedHook) for key, hook in hooks)


def _states_are_dense(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether gradients and states are laid out like the parameters, as the kernels require.

    Step counts on another device (from a checkpoint) are moved.
    """
    for p in group["params"]:
        if p.grad is None:
            continue
        state = optimizer.state.get(p, {})
        tensors = [p.grad, *(value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)]
        if any(t.layout != torch.strided or t.dtype != p.dtype or not t.is_contiguous() for t in tensors):
            return False
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
    return True

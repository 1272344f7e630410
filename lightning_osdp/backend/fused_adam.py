"""Adam's fused form, where the user has left the form to torch: one pass over memory and no temporaries.

``torch.optim`` itself takes a loop on the CPU, whose temporaries are three times the largest parameter, and ``foreach``
on CUDA, whose temporaries are as large as all parameters together. The fused kernels do the same arithmetic.
[``benchmarks/allocator.py``, steps of a transformer, loop against fused: width 512 642 ms and 583, width 1024 1364 ms
and 1095, peaks 820 MiB and 792]

The form is chosen for each step and taken back after it, so that what is saved names the user's own choice.
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
    """Whether a group of parameters can be stepped by a fused kernel, and nobody has asked for another form.

    ``fused=False`` or any ``foreach`` counts as asking, and so do ``capturable`` and ``differentiable``.
    """
    if type(optimizer) not in (Adam, AdamW):  # a class of the user's own may step in its own way
        return False
    left_open = group.get("fused") is None and group.get("foreach") is None
    if not left_open or group.get("capturable") or group.get("differentiable"):
        return False
    return all(
        p.device.type in FUSED_DEVICE_TYPES and p.is_floating_point() and p.is_contiguous() for p in group["params"]
    )


def enable_fused(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Chooses the fused form for the groups of ``optimizer`` that may take it and whose gradients are there; these
    groups."""
    chosen = [
        group for group in optimizer.param_groups if can_fuse(optimizer, group) and _states_are_dense(optimizer, group)
    ]
    for group in chosen:
        group["fused"] = True
    return chosen


@contextmanager
def fused_step(optimizer: Optimizer) -> Iterator[None]:
    """Within it, ``optimizer`` steps in the fused form where that may be. This is decided when the gradients are there:
    after the closure that the step is given."""
    choosing = _EnableFusedHook()
    handle = optimizer.register_step_pre_hook(choosing)
    try:
        yield
    finally:
        handle.remove()
        for group in choosing.fused_groups:
            group["fused"] = None


class _EnableFusedHook:
    """Chooses before a step, or after the closure that it is given; keeps what was chosen."""

    def __init__(self) -> None:
        self.fused_groups: list[dict[str, Any]] = []

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first one is the optimizer
        if closure is None:
            self.fused_groups += enable_fused(optimizer)
            return None

        def closure_then_enable() -> Any:
            result = closure()
            self.fused_groups += enable_fused(optimizer)
            return result

        return args[:1], {**kwargs, "closure": closure_then_enable}


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of others are called before ``optimizer`` steps."""
    return any(not isinstance(hook, _EnableFusedHook) for hook in optimizer._optimizer_step_pre_hooks.values())


def _states_are_dense(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether gradients and states are laid out as the parameters, which the kernels take for granted; step counts of
    another device (from a checkpoint) are brought along."""
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

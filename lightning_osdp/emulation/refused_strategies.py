"""Strategies that would train one rank, or start processes, are refused while a cluster is emulated."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.errors import ConfigurationError

_REFUSED = (
    (SingleDeviceStrategy, "setup", "trains one device without the others"),
    (_MultiProcessingLauncher, "launch", "starts processes, which are not in the emulated cluster"),
)
"""Whose methods, and why: Trainers take a single device's strategy where devices=1 and no strategy is given."""


def refuse_other_strategies() -> None:
    """Have Trainers refuse to run such a strategy while the process group is emulated. Idempotent."""
    for owner, name, reason in _REFUSED:
        original: Any = getattr(owner, name)
        if not getattr(original, "is_refused_if_emulated", False):
            setattr(owner, name, _refuse_if_emulated(original, reason))


def _refuse_if_emulated(original: Any, reason: str) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        group: Any = dist.group.WORLD
        if is_emulated(group):
            kind = type(getattr(self, "_strategy", self)).__name__
            raise ConfigurationError(
                f"{kind} {reason}, but this process stands for {group.size()} ranks of an emulated cluster: give the "
                'Trainer strategy="osdp", "ddp" or another one of several ranks, or call '
                "torch.distributed.destroy_process_group() first"
            )
        return original(self, *args, **kwargs)

    method.is_refused_if_emulated = True  # type: ignore[attr-defined]
    return method

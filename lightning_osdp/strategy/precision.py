"""Make Lightning's precision plugins use the gradients of all ranks where this rank holds only a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError

ClipGradNorm = Callable[[Iterable[nn.Parameter], float], Tensor]

SUPPORTED = "'32-true', 'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'"


def check(precision: Precision) -> None:
    """Refuse precisions that sharded parameters can't be trained in.

    Raises:
        ConfigurationError: the precision is not one of ``SUPPORTED``.
    """
    if type(precision) is not Precision and not isinstance(precision, MixedPrecision | HalfPrecision):
        raise ConfigurationError(f"precision={precision.precision!r} is not supported: use {SUPPORTED}")


def patch_for_sharded_gradients(precision: Precision, clip_grad_norm: ClipGradNorm, group: Any) -> None:
    """Make the plugin clip by the norm over all ranks, and skip a step where any rank found an inf or a NaN.

    Args:
        precision: the plugin, changed in place; it keeps its settings.
        clip_grad_norm: clips by the norm over all shards.
        group: the process group that holds the shards.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm(precision.main_params(optimizer), clip_val)

    # The plugin's own method sees this rank's shards only, and would clip by a norm that is too small.
    precision.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
    if isinstance(precision, MixedPrecision) and isinstance(precision.scaler, torch.amp.GradScaler):
        precision.scaler = _to_sharded_scaler(precision.scaler, precision.device, group)


def _to_sharded_scaler(scaler: torch.amp.GradScaler, device: str, group: Any) -> torch.amp.GradScaler:
    """Return a scaler with the same state for which an inf on one rank is an inf on all."""
    if isinstance(scaler, ShardedGradScaler) or not scaler.is_enabled():
        return scaler
    state = scaler.state_dict()
    sharded = ShardedGradScaler(device, init_scale=state["scale"], process_group=group)
    sharded.load_state_dict(state)
    return sharded

"""Make ``torch.nn.utils.clip_grad_norm_`` in a user's own code right for sharded gradients.

torch sees this rank's shards only, and would silently clip each rank by a norm of its own that is too small. All of its
functions ask one private function for the total norm. That function is replaced: where gradients of sharded parameters
are among the tensors, the shards of all ranks count, each element once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_osdp.state.guarded_parameter import GuardedTensor, local_shard_of, without_guards
from lightning_osdp.state.state_dict import ShardedParameters

_SHARDED: weakref.WeakSet[ShardedParameters] = weakref.WeakSet()

_torch_total_norm = clip_grad._get_total_norm


def patch_total_norm(sharded_parameters: ShardedParameters) -> None:
    """Have torch's total norm count all shards of these parameters' gradients, as long as the object lives."""
    _SHARDED.add(sharded_parameters)
    clip_grad._get_total_norm = _compute_total_norm


def _compute_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for shards in _SHARDED:
        with without_guards():
            owners = {id(parameter.grad): parameter for parameter in shards.parameters if parameter.grad is not None}
        with_owners = [_find_owner(gradient, owners) for gradient in gradients]
        if not any(owner in shards.parameters for owner, _ in with_owners):
            continue
        total = shards.compute_norm(with_owners, float(norm_type), gradients[0].device)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the norm of the gradients over all ranks is {float(total)}: they can't be clipped by it"
            )
        return total
    return _torch_total_norm(gradients, norm_type, error_if_nonfinite, foreach)


def _find_owner(gradient: Tensor, owners: Mapping[int, nn.Parameter]) -> tuple[nn.Parameter | None, Tensor]:
    """Return the sharded parameter of a gradient, if it is of one, and this rank's part of the gradient."""
    if isinstance(gradient, GuardedTensor):
        local = local_shard_of(gradient)
        return local.guard.parameter, local.tensor
    return owners.get(id(gradient)), gradient

"""Make ``torch.nn.utils.clip_grad_norm_`` in a user's own code right for sharded gradients.

torch sees this rank's shards only, and would silently clip each rank by a norm of its own that is too small. All of its
functions ask one private function for the total norm. That function is replaced: where gradients of sharded parameters
are among the tensors, the shards of all ranks count, each element once. They may be of several engines.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_osdp.state.guarded_parameter import GuardedTensor, local_shard_of, without_guards
from lightning_osdp.state.state_dict import ShardedParameters

_SHARDED: weakref.WeakKeyDictionary[ShardedParameters, None] = weakref.WeakKeyDictionary()
"""Sharded parameters of all engines, in the same order on all ranks: their norms are collective."""

_torch_total_norm = clip_grad._get_total_norm


def patch_total_norm(sharded_parameters: ShardedParameters) -> None:
    """Have torch's total norm count all shards of these parameters' gradients, as long as the object lives."""
    _SHARDED[sharded_parameters] = None
    clip_grad._get_total_norm = _compute_total_norm


def _compute_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norms: list[Tensor] = []
    rest = gradients
    for shards in list(_SHARDED):
        with without_guards():
            owners = {id(parameter.grad): parameter for parameter in shards.parameters if parameter.grad is not None}
        with_owners = [_find_owner(gradient, owners) for gradient in rest]
        own = [(owner, local) for owner, local in with_owners if owner in shards.parameters]
        if own:
            norms.append(shards.compute_norm(own, float(norm_type), gradients[0].device))
            rest = [each for each, (owner, _) in zip(rest, with_owners, strict=True) if owner not in shards.parameters]
    if not norms:
        return _torch_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    replicated = [(None, gradient) for gradient in rest]
    norms.append(ShardedParameters({}, None).compute_norm(replicated, float(norm_type), gradients[0].device))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients over all ranks is {float(total)}: they can't be clipped by it")
    return total


def _find_owner(gradient: Tensor, owners: Mapping[int, nn.Parameter]) -> tuple[nn.Parameter | None, Tensor]:
    """Return the sharded parameter of a gradient, if it is of one, and this rank's part of the gradient."""
    if isinstance(gradient, GuardedTensor):
        local = local_shard_of(gradient)
        return local.guard.parameter, local.tensor
    return owners.get(id(gradient)), gradient

"""Model and optimizer state that does not know the plan: whole tensors under the names the user gave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp import collectives
from lightning_osdp.errors import ShardingError


class Shards:
    """Which parameters are sharded, and how to get from a rank's part to the whole and back.

    A part is one of N equal pieces of the flattened parameter, the last padded with zeros (FairScale's layout).

    Args:
        whole_shapes: shape of each sharded parameter when whole.
        group: the ranks it is sharded over.
    """

    def __init__(self, whole_shapes: Mapping[nn.Parameter, torch.Size], group: Any) -> None:
        self._whole_shapes = dict(whole_shapes)
        self.parameters = frozenset(self._whole_shapes)
        """All sharded parameters."""
        self._group = group
        self._ranks: int = group.size() if group is not None else 1
        self._rank: int = group.rank() if group is not None else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that holds gathered state."""
        return self._rank == 0

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the parameter when whole, sharded or not."""
        if isinstance(parameter, nn.Parameter) and parameter in self._whole_shapes:
            return self._whole_shapes[parameter]
        return parameter.shape

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """The whole of what ``part`` is this rank's piece of, shaped like ``parameter`` when whole. Collective."""
        shape = self._whole_shapes[parameter]
        flat = part.detach().reshape(-1)
        whole = torch.empty(flat.numel() * self._ranks, dtype=flat.dtype, device=flat.device)
        collectives.all_gather(whole, flat.contiguous(), self._group)
        return whole[: shape.numel()].view(shape)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor, flat and padded."""
        flat = whole.detach().reshape(-1)
        size = -(-flat.numel() // self._ranks)
        piece = flat[self._rank * size : (self._rank + 1) * size]
        return nn.functional.pad(piece, (0, size - piece.numel())) if piece.numel() < size else piece.clone()

    @contextmanager
    def whole_shapes_shown(self) -> Iterator[None]:
        """Within it, sharded parameters have their whole shape but no values, for code that sorts them by shape."""
        parts = {parameter: parameter.data for parameter in self._whole_shapes}
        try:
            for parameter, shape in self._whole_shapes.items():
                parameter.data = parameter.data.new_zeros(()).expand(shape)
            yield
        finally:
            for parameter, part in parts.items():
                parameter.data = part

    def shard_existing_state(self, optimizer: Optimizer) -> None:
        """Cuts optimizer state that was made before sharding (Adagrad makes its own at once) down to this rank's."""
        for parameter, shape in self._whole_shapes.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == shape:
                    optimizer.state[parameter][key] = self.part_of(value).to(parameter.device)

    def grad_norm(self, parameters: Iterable[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
        """Norm over all gradients, each element counted once whether its parameter is sharded or replicated."""
        sharded: list[Tensor] = []
        replicated: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                (sharded if parameter in self._whole_shapes else replicated).append(parameter.grad.detach())
        ours, all_of_them = (_power_sum(gradients, norm_type, device) for gradients in (sharded, replicated))
        if norm_type == float("inf"):
            dist.all_reduce(ours, op=dist.ReduceOp.MAX, group=self._group)
            return torch.maximum(ours, all_of_them)
        dist.all_reduce(ours, group=self._group)
        return torch.Tensor(ours + all_of_them).pow(1.0 / norm_type)


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over all elements, or their largest |g| for p = inf, in float32."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=torch.float32).to(device) for g in gradients])
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def gather_model_state(module: nn.Module, shards: Shards) -> dict[str, Any]:
    """The plain module's state dict with whole tensors on the CPU; empty on ranks other than the first. Collective.

    One tensor is gathered at a time. Tied parameters are gathered once and stay one tensor in the result.
    """
    by_name = dict(module.named_parameters(remove_duplicate=False))
    gathered: dict[nn.Parameter, Tensor] = {}
    state: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        parameter = by_name.get(key)
        if parameter is not None and parameter in shards.parameters:
            if parameter not in gathered:
                whole = shards.gather(parameter, parameter.data)
                gathered[parameter] = whole.cpu() if shards.is_first else whole.new_empty(0)
            value = gathered[parameter]
        if shards.is_first:
            state[key] = value.cpu() if isinstance(value, Tensor) else value
    return state


def load_model_state(module: nn.Module, shards: Shards, state: Mapping[str, Any], strict: bool) -> None:
    """Loads whole tensors, given on every rank, into shards and replicas.

    Raises:
        ShardingError: keys are missing or unexpected (``strict``), or a shape differs. Nothing has changed then.
    """
    by_name = dict(module.named_parameters(remove_duplicate=False))
    expected = list(module.state_dict())
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if strict and (missing or unexpected):
        raise ShardingError(
            f"the state dict does not fit: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}"
        )
    for key, parameter in by_name.items():
        if key in state and tuple(state[key].shape) != tuple(shards.whole_shape(parameter)):
            raise ShardingError(
                f"the state dict does not fit: {key} is {tuple(state[key].shape)} there and "
                f"{tuple(shards.whole_shape(parameter))} here"
            )
    local = {
        key: shards.part_of(value) if by_name.get(key) in shards.parameters else value for key, value in state.items()
    }
    module.load_state_dict(local, strict=strict)


def gather_optimizer_state(optimizer: Optimizer, shards: Shards) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors on the CPU; empty on ranks other than the first. Collective."""
    packed = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for index, entries in packed["state"].items():
        parameter = parameters[index]
        state[index] = {key: _whole(value, parameter, shards) for key, value in entries.items()}
    return {**packed, "state": state} if shards.is_first else {}


def _whole(value: Any, parameter: nn.Parameter, shards: Shards) -> Any:
    if not isinstance(value, Tensor):
        return value
    if parameter in shards.parameters and value.shape == parameter.shape:
        whole = shards.gather(parameter, value)
        return whole.cpu() if shards.is_first else None
    return value.cpu()


def load_optimizer_state(optimizer: Optimizer, shards: Shards, packed: Mapping[str, Any]) -> None:
    """Loads what ``gather_optimizer_state`` or a plain optimizer's ``state_dict`` returned, given on every rank."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for index, entries in packed["state"].items():
        parameter = parameters[index]
        cut = parameter in shards.parameters
        state[index] = {
            key: shards.part_of(value)
            if cut and isinstance(value, Tensor) and value.shape == shards.whole_shape(parameter)
            else value
            for key, value in entries.items()
        }
    optimizer.load_state_dict({**packed, "state": state})

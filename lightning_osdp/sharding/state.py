"""Model and optimizer state that does not know the plan: whole tensors under the names the user gave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.errors import ShardingError
from lightning_osdp.sharding.layout import Layout


class Shards:
    """Which parameters are sharded, and how to get from a rank's part to the whole and back.

    Args:
        layouts: of each sharded parameter.
        group: all ranks.
    """

    def __init__(self, layouts: Mapping[nn.Parameter, Layout], group: Any) -> None:
        self._layouts = dict(layouts)
        self.parameters = frozenset(self._layouts)
        """All sharded parameters."""
        self._rank: int = group.rank() if group is not None else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that holds gathered state."""
        return self._rank == 0

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the parameter when whole, sharded or not."""
        if isinstance(parameter, nn.Parameter) and parameter in self._layouts:
            return self._layouts[parameter].shape
        return parameter.shape

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """The whole of what ``part`` is this rank's part of, shaped like ``parameter`` when whole. Collective."""
        return self._layouts[parameter].gather(part)

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that lies like ``parameter``."""
        return self._layouts[parameter].part_of(whole)

    @contextmanager
    def whole_shapes_shown(self) -> Iterator[None]:
        """Within it, sharded parameters have their whole shape but no values, for code that sorts them by shape."""
        parts = {parameter: parameter.data for parameter in self._layouts}
        try:
            for parameter, layout in self._layouts.items():
                parameter.data = parameter.data.new_zeros(()).expand(layout.shape)
            yield
        finally:
            for parameter, part in parts.items():
                parameter.data = part

    @contextmanager
    def whole_values_shown(self, parameters: Iterable[nn.Parameter], writeback: bool) -> Iterator[None]:
        """Within it, those of ``parameters`` that are sharded are whole; changes are kept if ``writeback``. Collective.

        Each rank keeps its own part of what it wrote.
        """
        parts: dict[nn.Parameter, Tensor] = {}
        try:
            for parameter in parameters:  # in the same order on every rank
                if parameter in self._layouts:
                    part = parameter.data
                    parameter.data = self.gather(parameter, part)
                    parts[parameter] = part
            yield
        finally:
            for parameter, part in parts.items():
                if writeback:
                    part.view(-1).copy_(self.part_of(parameter, parameter.data))
                parameter.data = part

    def shard_existing_state(self, optimizer: Optimizer) -> None:
        """Cuts optimizer state that was made before sharding (Adagrad makes its own at once) down to this rank's."""
        for parameter, layout in self._layouts.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == layout.shape:
                    optimizer.state[parameter][key] = layout.part_of(value).to(parameter.device)

    def grad_norm(self, parameters: Iterable[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
        """Norm over all gradients, each element counted once however its parameter lies over the ranks."""
        by_group: dict[Any, list[Tensor]] = {group: [] for group in self._groups()}  # the same keys on every rank
        for parameter in parameters:
            if parameter.grad is None:
                continue
            for group, gradient in self._by_group(parameter, parameter.grad.detach()):
                by_group[group].append(gradient)
        total = torch.zeros((), device=device)
        for group, gradients in by_group.items():
            ours = _power_sum(gradients, norm_type, device)
            if group is not None:
                operation = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
                dist.all_reduce(ours, op=operation, group=group)
            total = torch.maximum(total, ours) if norm_type == float("inf") else total + ours
        return total if norm_type == float("inf") else total.pow(1.0 / norm_type)

    def _groups(self) -> list[Any]:
        """Groups over which slices are cut into pieces, and None for what every rank holds."""
        groups = {piece.group: None for layout in self._layouts.values() for piece in layout.slices}
        return list(groups | {None: None})

    def _by_group(self, parameter: nn.Parameter, gradient: Tensor) -> Iterator[tuple[Any, Tensor]]:
        layout = self._layouts.get(parameter)
        if layout is None:
            yield None, gradient
            return
        for piece, first, last in layout.ranges():
            yield piece.group, gradient.reshape(-1)[first:last]


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
        key: shards.part_of(by_name[key], value) if by_name.get(key) in shards.parameters else value
        for key, value in state.items()
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
            key: shards.part_of(parameter, value)
            if cut and isinstance(value, Tensor) and value.shape == shards.whole_shape(parameter)
            else value
            for key, value in entries.items()
        }
    optimizer.load_state_dict({**packed, "state": state})

"""Model and optimizer state independent of the plan: full tensors under the user's names.

Collective: every rank must call these functions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_osdp.errors import ShardingError
from lightning_osdp.state.checked_values import PARAMETER_NAMES, check_kind, match_optimizer_state
from lightning_osdp.state.deferred_tensor import DeferredTensor, DeferredTensors, LoadTarget
from lightning_osdp.state.guarded_parameter import (
    GatheredTensor,
    GuardedTensor,
    gather,
    guard_behind,
    is_guarded,
    local_data,
    opened,
)
from lightning_osdp.state.guarded_states import opened_states
from lightning_osdp.state.shard_layout import ReplicatedLayout, ShardLayout

Fill = Callable[[list[LoadTarget]], None]
"""A function that fills targets with values of a checkpoint."""


class ShardedParameters:
    """The sharded parameters of a module and how they lie over the ranks.

    Args:
        layouts: the layout of each sharded parameter.
        group: all ranks.
    """

    def __init__(self, layouts: Mapping[nn.Parameter, ShardLayout], group: Any) -> None:
        self._layouts = dict(layouts)
        self.parameters = frozenset(self._layouts)
        """All sharded parameters."""
        self.group = group
        """All ranks."""
        self._rank: int = group.rank() if group is not None else 0

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this is the rank that holds gathered state."""
        return self._rank == 0

    def unsharded_shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of the full parameter, sharded or not."""
        if isinstance(parameter, nn.Parameter) and parameter in self._layouts:
            return self._layouts[parameter].shape
        return parameter.shape

    def layout_of(self, parameter: nn.Parameter) -> ShardLayout:
        """Return the layout of a parameter, sharded or not."""
        return self._layouts.get(parameter) or ReplicatedLayout(parameter.shape)

    @contextmanager
    def show_unsharded_shapes(self) -> Iterator[None]:
        """Give sharded parameters their full shape, without values, within the block, for code that inspects shapes."""
        with opened(self._layouts):
            shards = {parameter: parameter.data for parameter in self._layouts}
            try:
                for parameter, layout in self._layouts.items():
                    parameter.data = parameter.data.new_zeros(()).expand(layout.shape)
                yield
            finally:
                for parameter, shard in shards.items():
                    parameter.data = shard

    @contextmanager
    def summon_full_params(self, parameters: Iterable[nn.Parameter], writeback: bool) -> Iterator[None]:
        """Unshard parameters within the block.

        Args:
            parameters: in the same order on every rank; others than sharded ones are left as they are.
            writeback: whether each rank retains its own shard of changes.
        """
        sharded = [parameter for parameter in parameters if parameter in self._layouts]
        shards: dict[nn.Parameter, Tensor] = {}
        with opened(sharded):
            try:
                for parameter in sharded:
                    shard = parameter.data
                    parameter.data = self._layouts[parameter].unshard(shard)
                    shards[parameter] = shard
                yield
            finally:
                for parameter, shard in shards.items():
                    if writeback:
                        shard.copy_(self._layouts[parameter].shard(parameter.data).view(shard.shape))
                    parameter.data = shard

    def shard_existing_state(self, optimizer: Optimizer) -> None:
        """Shard optimizer state that was made before sharding (Adagrad makes its state in the constructor)."""
        for parameter, layout in self._layouts.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == layout.shape:
                    optimizer.state[parameter][key] = layout.shard(value).to(parameter.device)

    def unshard_state(self, optimizer: Optimizer) -> None:
        """Gather optimizer state for good. Collective."""
        for parameter, layout in self._layouts.items():
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = layout.unshard(value)

    def missing_bytes(self, optimizers: Iterable[Optimizer]) -> int:
        """Return the bytes that gathering parameters and their states in ``optimizers`` for good adds at most.

        That is what other ranks hold, and the largest tensor once more: its parts stay until it is put together.
        """
        total = largest = 0
        for parameter, layout in self._layouts.items():
            states = [s for optimizer in optimizers for s in optimizer.state.get(parameter, {}).values()]
            local = sum(prod(chunk.sizes) for chunk in layout.local_chunks())
            copies = [parameter, *(s for s in states if isinstance(s, Tensor) and s.dim() > 0)]
            total += (layout.shape.numel() - local) * sum(tensor.element_size() for tensor in copies)
            largest = max(largest, *(layout.shape.numel() * tensor.element_size() for tensor in copies))
        return total + largest

    def compute_norm(
        self, gradients: Iterable[tuple[nn.Parameter | None, Tensor]], norm_type: float, device: torch.device
    ) -> Tensor:
        """Return the norm over all gradients, in which each element counts once however its parameter is sharded.

        Args:
            gradients: pairs of a parameter, or None for one that is not sharded, and its local gradient.
            norm_type: p of the p-norm; may be inf.
            device: device of the result.

        Raises:
            ShardingError: the norm is none of a positive p.
        """
        if not norm_type > 0:
            raise ShardingError(f"norm_type={norm_type:g}: the norm over all ranks is that of a positive p, or of inf")
        by_group: dict[Any, list[Tensor]] = {group: [] for group in self._process_groups()}  # alike on every rank
        for parameter, local_gradient in gradients:
            for group, gradient in self._split_by_group(parameter, local_gradient.detach()):
                by_group[group].append(gradient)
        total = torch.zeros((), device=device)
        is_max = norm_type == float("inf")
        for group, local_gradients in by_group.items():
            power_sum = _power_sum(local_gradients, norm_type, device)
            if group is not None:
                dist.all_reduce(power_sum, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
            total = torch.maximum(total, power_sum) if is_max else total + power_sum
        return total if is_max else total.pow(1.0 / norm_type)

    def _process_groups(self) -> list[Any]:
        """Return the groups over which slices are sharded, and None for what every rank holds."""
        groups = {group: None for layout in self._layouts.values() for group in layout.groups}
        return list(groups | {None: None})

    def _split_by_group(self, parameter: nn.Parameter | None, gradient: Tensor) -> Iterator[tuple[Any, Tensor]]:
        layout = self._layouts.get(parameter) if parameter is not None else None
        if layout is None:
            yield None, gradient
            return
        yield from layout.split_by_group(gradient)


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over all elements, or the largest |g| for p = inf, in float32."""
    if not gradients:
        return torch.zeros((), device=device)
    # A few kernels on CUDA, not one for each.
    each = torch._foreach_norm(gradients, norm_type, dtype=torch.float32)
    norms = torch.stack([norm.to(device) for norm in each])
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def fill_from_memory(targets: Iterable[LoadTarget]) -> None:
    """Fill targets whose values are full tensors."""
    for target in targets:
        target.fill()


_collects_state = False


@contextmanager
def _collecting_state() -> Iterator[None]:
    """Let state dicts hold sharded tensors as they are within the block: they are gathered where they are written."""
    global _collects_state
    before, _collects_state = _collects_state, True
    try:
        yield
    finally:
        _collects_state = before


def gather_guarded_entries(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Gather the sharded tensors in a module's state dict that was just made, tied ones once. Collective."""
    sharded = {} if _collects_state else {k: v for k, v in state.items() if isinstance(v, GuardedTensor)}
    if not sharded:
        return
    by_guard = {id(v.gathered.local.guard): v for v in state.values() if isinstance(v, GatheredTensor)}
    for key, value in sharded.items():
        guard = guard_behind(value)
        if id(guard) not in by_guard:
            by_guard[id(guard)] = gather(value)
        state[key] = by_guard[id(guard)]


def gather_state(
    sharded_parameters: ShardedParameters, collect_state: Callable[[DeferredTensors], dict[str, Any]]
) -> dict[str, Any]:
    """Return a full state on the CPU of the first rank; it is empty on other ranks."""
    is_rank_zero = sharded_parameters.is_rank_zero
    state = collect_state(DeferredTensors(eager=True, is_rank_zero=is_rank_zero, group=sharded_parameters.group))
    return tree_map_only(Tensor, Tensor.cpu, state) if is_rank_zero else {}


def model_state(
    module: nn.Module, sharded_parameters: ShardedParameters, deferred_tensors: DeferredTensors
) -> dict[str, Any]:
    """Return the plain module's state dict; tensors to be gathered are replaced by placeholders.

    Tied parameters stay one tensor.
    """
    by_name = dict(module.named_parameters(remove_duplicate=False))
    names = {parameter: name for name, parameter in module.named_parameters()}
    with _collecting_state():
        state: dict[str, Any] = module.state_dict()
    for key, value in state.items():
        parameter = _parameter_of_entry(value, by_name.get(key))
        if parameter is not None and (
            parameter in sharded_parameters.parameters or (deferred_tensors.includes_replicated and parameter.dim() > 0)
        ):
            deferred = DeferredTensor(
                f"state_dict.{names[parameter]}", sharded_parameters.layout_of(parameter), local_data(parameter)
            )
            state[key] = deferred_tensors.placeholder(deferred)
    return state


def _parameter_of_entry(value: Any, named: nn.Parameter | None) -> nn.Parameter | None:
    """Return the parameter that an entry of a state dict is; None if code of the user's has made it of another value.

    Args:
        value: the entry.
        named: the parameter of that name, if there is one.
    """
    if isinstance(value, GuardedTensor):  # under whatever name a hook of the user's gave it
        return guard_behind(value).parameter
    if named is None or is_guarded(named) or not isinstance(value, Tensor):
        return None
    is_same = (value.data_ptr(), value.shape, value.dtype) == (named.data_ptr(), named.shape, named.dtype)
    return named if is_same else None


def _loads_by_itself(module: nn.Module) -> bool:
    """Return whether overridden methods, or hooks that take other names, decide what a state dict becomes."""
    if getattr(module.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        return True
    with_parameters = (inner for inner in module.modules() if next(inner.parameters(), None) is not None)
    return any(
        inner._load_state_dict_pre_hooks or not type(inner)._load_from_state_dict.__module__.startswith("torch.")
        for inner in with_parameters
    )


def load_model_state(
    module: nn.Module, sharded_parameters: ShardedParameters, state: Mapping[str, Any], strict: bool, fill: Fill
) -> None:
    """Load full tensors or placeholders, given on every rank, into the module. See ``check_model_state``."""
    check_model_state(module, sharded_parameters, state, strict)
    if _loads_by_itself(module):
        module.load_state_dict(state, strict=strict)  # guarded parameters take full tensors
        return
    by_name = dict(module.named_parameters(remove_duplicate=False))
    local: Any = OrderedDict(state)
    local._metadata = getattr(state, "_metadata", None)
    targets: dict[nn.Parameter, LoadTarget] = {}
    with opened(by_name.values()):
        for key, parameter in by_name.items():
            if key in state and (parameter in sharded_parameters.parameters or state[key].is_meta):
                targets[parameter] = LoadTarget(sharded_parameters.layout_of(parameter), parameter.data, state[key])
                local[key] = parameter.data  # filled below; the module itself loads the rest
        fill(list(targets.values()))
        module.load_state_dict(local, strict=strict)


def check_model_state(
    module: nn.Module, sharded_parameters: ShardedParameters, state: Mapping[str, Any], strict: bool
) -> None:
    """Reject a state dict of another model.

    A module that decides by itself what a state dict becomes is not checked.

    Raises:
        ShardingError: keys are missing or unexpected (``strict``), or a shape or a kind of values differs.
    """
    if _loads_by_itself(module):
        return
    expected = list(module.state_dict())
    missing, unexpected = sorted(set(expected) - set(state)), sorted(map(str, set(state) - set(expected)))
    if strict and (missing or unexpected):
        raise ShardingError(
            f"the state dict does not fit: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}"
        )
    for key, tensor in chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        if key in state and key in expected:
            check_kind(f"the state dict does not fit: {key}", state[key], tensor)
    for key, parameter in module.named_parameters(remove_duplicate=False):
        if key in state and tuple(state[key].shape) != tuple(sharded_parameters.unsharded_shape(parameter)):
            raise ShardingError(
                f"the state dict does not fit: {key} is {tuple(state[key].shape)} there and "
                f"{tuple(sharded_parameters.unsharded_shape(parameter))} here"
            )


def optimizer_state(
    optimizer: Optimizer,
    sharded_parameters: ShardedParameters,
    names: Mapping[nn.Parameter, str],
    index: int,
    deferred_tensors: DeferredTensors,
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with ``param_names``, as plain PyTorch loads it.

    Args:
        optimizer: the optimizer.
        sharded_parameters: the layouts of the parameters.
        names: the names of the module's parameters.
        index: index of the optimizer in the module's list.
        deferred_tensors: provides the placeholders of tensors that lie like their parameter.
    """
    with opened_states(optimizer):
        packed: dict[str, Any] = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for number, entries in packed["state"].items():
        parameter, name = parameters[number], names.get(parameters[number], f"parameter {number}")
        shape = local_data(parameter).shape
        state[number] = {
            key: deferred_tensors.placeholder(
                DeferredTensor(f"optimizer_states.{index}.{name}.{key}", sharded_parameters.layout_of(parameter), value)
            )
            if isinstance(value, Tensor)
            and value.dim() > 0
            and value.shape == shape
            and (parameter in sharded_parameters.parameters or deferred_tensors.includes_replicated)
            else value
            for key, value in entries.items()
        }
    return {**packed, "state": state, PARAMETER_NAMES: [names.get(parameter) for parameter in parameters]}


def load_optimizer_state(
    optimizer: Optimizer,
    sharded_parameters: ShardedParameters,
    names: Mapping[nn.Parameter, str],
    saved_state: Mapping[str, Any],
    fill: Fill,
) -> None:
    """Load what ``optimizer_state`` or a plain optimizer's ``state_dict`` returned, given on every rank."""
    packed = match_optimizer_state(optimizer, sharded_parameters.unsharded_shape, names, saved_state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    targets: list[LoadTarget] = []
    state: dict[Any, dict[str, Any]] = {}
    for number, entries in packed["state"].items():
        parameter = parameters[number]
        layout = sharded_parameters.layout_of(parameter)
        state[number] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == layout.shape:
                shard = torch.empty_like(local_data(parameter), dtype=value.dtype)
                targets.append(LoadTarget(layout, shard, value))
                state[number][key] = shard
            else:  # a copy, so that the file that it may be mapped from can be closed
                state[number][key] = value.clone() if isinstance(value, Tensor) else value
    fill(targets)
    optimizer.load_state_dict({**packed, "state": state})

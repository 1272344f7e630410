"""Model and optimizer state that does not know the plan: whole tensors under the names the user gave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_osdp.errors import ShardingError
from lightning_osdp.state.deferred_tensor import DeferredTensor, DeferredTensors, LoadTarget
from lightning_osdp.state.shard_layout import ReplicatedLayout, ShardLayout

PARAMETER_NAMES = "param_names"
"""Key of the parameters' names in an optimizer's state, beside ``job_state`` and ``param_groups``. PyTorch would have them
inside of the groups, but an optimizer made without names takes those over and then refuses new groups without."""

Fill = Callable[[list[LoadTarget]], None]
"""Puts values of a checkpoint where they go."""


class ShardedParameters:
    """Which parameters are sharded, and how to get from a rank's part to the whole and back.

    Args:
        layouts: of each sharded parameter.
        group: all ranks.
    """

    def __init__(self, layouts: Mapping[nn.Parameter, ShardLayout], group: Any) -> None:
        self._layouts = dict(layouts)
        self.parameters = frozenset(self._layouts)
        """All sharded parameters."""
        self._rank: int = group.rank() if group is not None else 0

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank is the one that holds gathered state."""
        return self._rank == 0

    def unsharded_shape(self, parameter: Tensor) -> torch.Size:
        """Shape of the parameter when whole, sharded or not."""
        if isinstance(parameter, nn.Parameter) and parameter in self._layouts:
            return self._layouts[parameter].shape
        return parameter.shape

    def layout_of(self, parameter: nn.Parameter) -> ShardLayout:
        """How a parameter lies, sharded or not."""
        return self._layouts.get(parameter) or ReplicatedLayout(parameter.shape)

    @contextmanager
    def show_unsharded_shapes(self) -> Iterator[None]:
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
    def summon_full_params(self, parameters: Iterable[nn.Parameter], writeback: bool) -> Iterator[None]:
        """Within it, those of ``parameters`` that are sharded are whole; changes are kept if ``writeback``. Collective.

        Each rank keeps its own part of what it wrote.
        """
        parts: dict[nn.Parameter, Tensor] = {}
        try:
            for parameter in parameters:  # in the same order on every rank
                if parameter in self._layouts:
                    part = parameter.data
                    parameter.data = self._layouts[parameter].unshard(part)
                    parts[parameter] = part
            yield
        finally:
            for parameter, part in parts.items():
                if writeback:
                    part.copy_(self._layouts[parameter].shard(parameter.data).view(part.shape))
                parameter.data = part

    def shard_existing_state(self, optimizer: Optimizer) -> None:
        """Cuts optimizer state that was made before sharding (Adagrad makes its own at once) down to this rank's."""
        for parameter, layout in self._layouts.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == layout.shape:
                    optimizer.state[parameter][key] = layout.shard(value).to(parameter.device)

    def compute_norm(
        self, gradients: Iterable[tuple[nn.Parameter | None, Tensor]], norm_type: float, device: torch.device
    ) -> Tensor:
        """Norm over all gradients, each element counted once however its parameter lies over the ranks. Collective.

        Args:
            gradients: with the parameter that each is for; None for one that is not sharded.
            norm_type: p of the p-norm; may be inf.
            device: where the norm is to be.
        """
        by_group: dict[Any, list[Tensor]] = {
            group: [] for group in self._process_groups()
        }  # the same keys on every rank
        for parameter, whole_or_part in gradients:
            for group, gradient in self._split_by_group(parameter, whole_or_part.detach()):
                by_group[group].append(gradient)
        total = torch.zeros((), device=device)
        for group, ours_of_it in by_group.items():
            ours = _power_sum(ours_of_it, norm_type, device)
            if group is not None:
                operation = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
                dist.all_reduce(ours, op=operation, group=group)
            total = torch.maximum(total, ours) if norm_type == float("inf") else total + ours
        return total if norm_type == float("inf") else total.pow(1.0 / norm_type)

    def _process_groups(self) -> list[Any]:
        """Groups over which slices are cut into pieces, and None for what every rank holds."""
        groups = {group: None for layout in self._layouts.values() for group in layout.groups}
        return list(groups | {None: None})

    def _split_by_group(self, parameter: nn.Parameter | None, gradient: Tensor) -> Iterator[tuple[Any, Tensor]]:
        layout = self._layouts.get(parameter) if parameter is not None else None
        if layout is None:
            yield None, gradient
            return
        yield from layout.split_by_group(gradient)


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over all elements, or their largest |g| for p = inf, in float32."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=torch.float32).to(device) for g in gradients])
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def fill_from_memory(targets: Iterable[LoadTarget]) -> None:
    """Puts whole tensors where they go."""
    for target in targets:
        target.fill()


def gather_state(
    sharded_parameters: ShardedParameters, collect_state: Callable[[DeferredTensors], dict[str, Any]]
) -> dict[str, Any]:
    """A state whole and on the CPU; empty on ranks other than the first. Collective."""
    state = collect_state(DeferredTensors(eager=True, is_rank_zero=sharded_parameters.is_rank_zero))
    return tree_map_only(Tensor, Tensor.cpu, state) if sharded_parameters.is_rank_zero else {}


def model_state(
    module: nn.Module, sharded_parameters: ShardedParameters, deferred_tensors: DeferredTensors
) -> dict[str, Any]:
    """The plain module's state dict, what is to be gathered as ``deferred_tensors`` has it. Collective.

    Tied parameters stay one tensor.
    """
    by_name = dict(module.named_parameters(remove_duplicate=False))
    names = {parameter: name for name, parameter in module.named_parameters()}
    state: dict[str, Any] = module.state_dict()
    for key in state:
        parameter = by_name.get(key)
        if parameter is not None and (
            parameter in sharded_parameters.parameters or (deferred_tensors.includes_replicated and parameter.dim() > 0)
        ):
            source = DeferredTensor(
                f"state_dict.{names[parameter]}", sharded_parameters.layout_of(parameter), parameter.data
            )
            state[key] = deferred_tensors.placeholder(source)
    return state


def load_model_state(
    module: nn.Module, sharded_parameters: ShardedParameters, state: Mapping[str, Any], strict: bool, fill: Fill
) -> None:
    """Loads whole tensors or handles, given on every rank, into shards and replicas. See ``check_model_state``."""
    check_model_state(module, sharded_parameters, state, strict)
    by_name = dict(module.named_parameters(remove_duplicate=False))
    local: dict[str, Any] = dict(state)
    targets: dict[nn.Parameter, LoadTarget] = {}
    for key, parameter in by_name.items():
        if key in state and (parameter in sharded_parameters.parameters or state[key].is_meta):
            targets[parameter] = LoadTarget(sharded_parameters.layout_of(parameter), parameter.data, state[key])
            local[key] = parameter.data  # the rest is loaded as the module likes it; this is there already
    fill(list(targets.values()))
    module.load_state_dict(local, strict=strict)


def check_model_state(
    module: nn.Module, sharded_parameters: ShardedParameters, state: Mapping[str, Any], strict: bool
) -> None:
    """Refuses a state dict of another model.

    Raises:
        ShardingError: keys are missing or unexpected (``strict``), or a shape differs.
    """
    expected = list(module.state_dict())
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if strict and (missing or unexpected):
        raise ShardingError(
            f"the state dict does not fit: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}"
        )
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
    """``optimizer.state_dict()`` with ``param_names`` beside it, as plain PyTorch loads it. Collective.

    Args:
        optimizer: whose state.
        sharded_parameters: how parameters lie.
        names: of the module's parameters.
        index: of the optimizer among the module's.
        deferred_tensors: says what becomes of tensors that lie like their parameter.
    """
    packed: dict[str, Any] = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for number, entries in packed["state"].items():
        parameter, name = parameters[number], names.get(parameters[number], f"parameter {number}")
        state[number] = {
            key: deferred_tensors.placeholder(
                DeferredTensor(f"optimizer_states.{index}.{name}.{key}", sharded_parameters.layout_of(parameter), value)
            )
            if _has_shape_of(value, parameter)
            and (parameter in sharded_parameters.parameters or deferred_tensors.includes_replicated)
            else value
            for key, value in entries.items()
        }
    return {**packed, "state": state, PARAMETER_NAMES: [names.get(parameter) for parameter in parameters]}


def _has_shape_of(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def load_optimizer_state(
    optimizer: Optimizer,
    sharded_parameters: ShardedParameters,
    names: Mapping[nn.Parameter, str],
    saved_state: Mapping[str, Any],
    fill: Fill,
) -> None:
    """Loads what ``optimizer_state`` or a plain optimizer's ``state_dict`` returned, given on every rank."""
    packed = match_optimizer_state(optimizer, sharded_parameters, names, saved_state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    targets: list[LoadTarget] = []
    state: dict[Any, dict[str, Any]] = {}
    for number, entries in packed["state"].items():
        parameter = parameters[number]
        layout = sharded_parameters.layout_of(parameter)
        state[number] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == layout.shape:
                part = torch.empty(parameter.shape, dtype=value.dtype, device=parameter.device)
                targets.append(LoadTarget(layout, part, value))
                state[number][key] = part
            else:  # a copy: the file that it may be mapped from is not to be kept
                state[number][key] = value.clone() if isinstance(value, Tensor) else value
    fill(targets)
    optimizer.load_state_dict({**packed, "state": state})


def match_optimizer_state(
    optimizer: Optimizer,
    sharded_parameters: ShardedParameters,
    names: Mapping[nn.Parameter, str],
    saved_state: Mapping[str, Any],
) -> dict[str, Any]:
    """The saved state with its parameters in this optimizer's order: by name if both name the same ones.

    Raises:
        ShardingError: it has other parameter groups, or a state of another shape. Nothing has changed then.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    here, there = (
        [len(g["params"]) for g in optimizer.param_groups],
        [len(g["params"]) for g in saved_state["param_groups"]],
    )
    ours, theirs = [names.get(parameter) for parameter in parameters], _get_saved_names(saved_state)
    by_name = theirs is not None and None not in ours and sorted(map(str, ours)) == sorted(map(str, theirs))
    if len(here) != len(there) or (here != there and not by_name):
        raise ShardingError(
            f"the optimizer state does not fit: its parameter groups hold {there} parameters, those here {here}"
        )
    order = [n for group in saved_state["param_groups"] for n in group["params"]]
    if by_name:
        assert theirs is not None
        where = dict(zip(map(str, theirs), order, strict=True))
        order = [where[str(name)] for name in ours]
    state = {number: saved_state["state"][old] for number, old in enumerate(order) if old in saved_state["state"]}
    for number, entries in state.items():
        _check_shapes(
            ours[number] or f"parameter {number}", entries, sharded_parameters.unsharded_shape(parameters[number])
        )
    first, groups = 0, []
    for group, size in zip(saved_state["param_groups"], here, strict=True):
        groups.append({**group, "params": list(range(first, first + size))})
        first += size
    return {"state": state, "param_groups": groups}


def _get_saved_names(saved_state: Mapping[str, Any]) -> list[str] | None:
    """Of the saved parameters, in the order of the groups: as this package writes them, or as PyTorch does."""
    if PARAMETER_NAMES in saved_state:
        return list(saved_state[PARAMETER_NAMES])
    if all("param_names" in group for group in saved_state["param_groups"]):
        return [name for group in saved_state["param_groups"] for name in group["param_names"]]
    return None


def _check_shapes(name: str, entries: Mapping[str, Any], shape: torch.Size) -> None:
    """A state with as many dimensions as its parameter is expected to lie like it (factored ones have fewer)."""
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() == len(shape) > 0 and value.shape != shape:
            raise ShardingError(
                f"the optimizer state does not fit: {key} of {name} is {tuple(value.shape)} there, the parameter "
                f"{tuple(shape)} here"
            )

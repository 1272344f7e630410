"""Refuse what a checkpoint holds in the place of a tensor or of an optimizer's state, before anything is changed.

A saved optimizer's state is brought into the order of the optimizer that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.errors import ShardingError

PARAMETER_NAMES = "param_names"
"""Key of the parameters' names in an optimizer's state, next to ``state`` and ``param_groups``. PyTorch puts names into
the groups, but an optimizer made without names takes those over and then rejects new groups without names."""


def check_kind(description: str, value: Any, own: Tensor) -> None:
    """Refuse a value that can't be copied into a tensor without losing a part of it.

    Args:
        description: the beginning of the error: what the value is for.
        value: the value in a checkpoint.
        own: the tensor that it belongs to.

    Raises:
        ShardingError: it is no tensor, or no dense one, or has complex or fractional numbers and ``own`` can't.
    """
    if not isinstance(value, Tensor):
        raise ShardingError(f"{description} is a {type(value).__name__} there, not a tensor")
    if value.layout != torch.strided or value.is_quantized:
        raise ShardingError(f"{description} is sparse or quantized there ({value.dtype}, {value.layout})")
    is_fractional = value.is_floating_point() and not (own.is_floating_point() or own.is_complex())
    if is_fractional or (value.is_complex() and not own.is_complex()):
        raise ShardingError(f"{description} is {value.dtype} there, and {own.dtype} here can't hold its values")


def check_optimizer_structure(saved_state: Any) -> None:
    """Refuse what is not of the form of ``Optimizer.state_dict()``.

    Args:
        saved_state: the state of one optimizer in a checkpoint.

    Raises:
        ShardingError: says what is wrong with it.
    """
    wrong = _find_wrong_part(saved_state)
    if wrong:
        raise ShardingError(f"the optimizer state does not fit: {wrong}, as no optimizer saves it")


def _find_wrong_part(saved_state: Any) -> str:
    if not isinstance(saved_state, Mapping):
        return f"it is a {type(saved_state).__name__}"
    state, groups = saved_state.get("state"), saved_state.get("param_groups")
    if not isinstance(state, Mapping) or not all(isinstance(entries, Mapping) for entries in state.values()):
        return "it holds no state of each parameter"
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        return "it has no param_groups"
    numbers: list[Any] = []
    for group in groups:
        if not isinstance(group.get("params"), list | tuple):
            return "a group has no params"
        numbers += group["params"]
    if not all(type(number) is int for number in numbers) or len(set(numbers)) != len(numbers):
        return "the params of its groups are not different numbers"
    for names, count in [(saved_state.get(PARAMETER_NAMES), len(numbers))] + [
        (group.get("param_names"), len(group["params"])) for group in groups
    ]:
        if names is not None and not (isinstance(names, list | tuple) and len(names) == count):
            return "it names another number of parameters than it holds"
    return ""


def match_optimizer_state(
    optimizer: Optimizer,
    unsharded_shape: Callable[[Tensor], torch.Size],
    names: Mapping[nn.Parameter, str],
    saved_state: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the saved state with its parameters in this optimizer's order: by name if both have the same names.

    Args:
        optimizer: the optimizer that the state is for.
        unsharded_shape: returns the shape of a parameter in full.
        names: names of the parameters.
        saved_state: its ``state_dict()`` in a checkpoint.

    Raises:
        ShardingError: it has other parameter groups, or a state of another shape. Nothing has changed then.
    """
    check_optimizer_structure(saved_state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_state["param_groups"]]
    own_names, saved_names = [names.get(parameter) for parameter in parameters], _get_saved_names(saved_state)
    by_name = (
        saved_names is not None
        and None not in own_names
        and sorted(map(str, own_names)) == sorted(map(str, saved_names))
    )
    if len(sizes) != len(saved_sizes) or (sizes != saved_sizes and not by_name):
        raise ShardingError(
            f"the optimizer state does not fit: its parameter groups hold {saved_sizes} parameters, those here {sizes}"
        )
    order = [number for group in saved_state["param_groups"] for number in group["params"]]
    if by_name:
        assert saved_names is not None
        number_by_name = dict(zip(map(str, saved_names), order, strict=True))
        order = [number_by_name[str(name)] for name in own_names]
    state = {number: saved_state["state"][old] for number, old in enumerate(order) if old in saved_state["state"]}
    for number, entries in state.items():
        name, shape = own_names[number] or f"parameter {number}", unsharded_shape(parameters[number])
        _check_shapes(name, entries, shape)
        for key, value in entries.items():
            if isinstance(value, Tensor | str | bytes):
                check_kind(f"the optimizer state does not fit: {key} of {name}", value, parameters[number])
    first, groups = 0, []
    for group, size in zip(saved_state["param_groups"], sizes, strict=True):
        groups.append({**group, "params": list(range(first, first + size))})
        first += size
    return {"state": state, "param_groups": groups}


def _get_saved_names(saved_state: Mapping[str, Any]) -> list[str] | None:
    """Return the saved parameters' names in the order of the groups, as written by this package or by PyTorch."""
    if PARAMETER_NAMES in saved_state:
        return list(saved_state[PARAMETER_NAMES])
    if all("param_names" in group for group in saved_state["param_groups"]):
        return [name for group in saved_state["param_groups"] for name in group["param_names"]]
    return None


def _check_shapes(name: str, entries: Mapping[str, Any], shape: torch.Size) -> None:
    """Reject a state with as many dimensions as its parameter (factored states have fewer) but another shape."""
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() == len(shape) > 0 and value.shape != shape:
            raise ShardingError(
                f"the optimizer state does not fit: {key} of {name} is {tuple(value.shape)} there, the parameter "
                f"{tuple(shape)} here"
            )

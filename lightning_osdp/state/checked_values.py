"""Refuse what a checkpoint holds in the place of a tensor or of an optimizer's state, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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

"""What a module keeps from one run to the next, and whether a run changes it so that a second one would differ.

Parameters, and buffers that are changed in place, are left to the recorder. What is replaced without being read, such
as a result that is kept for others, is no reason for a difference.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_osdp.profiling.tracing.aten_calls import storage_keys
from lightning_osdp.profiling.tracing.isolation import is_users

_MAX_ITEMS = 16
"""Items of a container whose numbers are looked at."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class _TensorMark:
    identity: int
    storage: int


@dataclass(frozen=True)
class _ContainerMark:
    identity: int
    length: int
    numbers: tuple[Any, ...]


def kept_state(module: nn.Module) -> dict[str, Any]:
    """Return marks of what a module keeps, by attribute."""
    kept = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return {name: _mark(value) for name, value in (kept | module._buffers).items()}


def find_changed_attribute(before: Mapping[str, Any], after: Mapping[str, Any], read: Collection[int]) -> str:
    """Return the first attribute that a run has changed so that a second one would differ; empty if there is none.

    Args:
        before: the marks before the run.
        after: those after it.
        read: the storages that operations have read.
    """
    return next((name for name, mark in before.items() if _differs(mark, after.get(name), read)), "")


def _mark(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return _TensorMark(id(value), *(storage_keys(value) or [0]))
    if isinstance(value, list | deque | set | dict):
        items = list(value.values() if isinstance(value, dict) else value) if len(value) <= _MAX_ITEMS else []
        return _ContainerMark(id(value), len(value), tuple(each for each in items if isinstance(each, int | float)))
    if isinstance(value, random.Random):
        return ("random", value.getstate())
    if isinstance(value, np.random.Generator):
        return ("random", str(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return ("random", str(value.get_state()))
    if not depth and not isinstance(value, nn.Module | type) and is_users(type(value)):
        return {name: _mark(own, depth + 1) for name, own in getattr(value, "__dict__", {}).items()}
    return value if isinstance(value, int | float) else None


def _differs(before: Any, after: Any, read: Collection[int]) -> bool:
    if type(before) is not type(after) or before is None:
        return False
    if isinstance(before, _TensorMark):
        return before.identity != after.identity and before.storage in read
    if isinstance(before, _ContainerMark):
        return bool(before.identity == after.identity and before != after)
    if isinstance(before, dict):
        return bool(find_changed_attribute(before, after, read))
    return bool(before != after)

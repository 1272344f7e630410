"""Optimizer states of sharded parameters, which show full tensors outside of the optimizer's steps.

An optimizer has its states as dicts, and its step finds this rank's parts in them. Everybody else gets tensors that
stand for the full ones, as a parameter's ``data`` are (``guarded_parameter``), and may put full tensors in their place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_osdp.state.guarded_parameter import (
    GuardedTensor,
    LocalShard,
    ShardGuard,
    find_local_shard,
    guard_of,
    without_guards,
)


class _Access:
    """Whether the optimizer itself works on its states.

    The dicts of the parameters refer to it, and not to the states that hold them: such a cycle would keep the parts of
    a released optimizer until the next collection of garbage.
    """

    is_open = False


class GuardedStates(defaultdict[Any, Any]):
    """The states of one optimizer: a dict for each parameter."""

    def __init__(self, states: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        self._access = _Access()
        self.num_steps = 0
        self.update(states)

    @property
    def is_open(self) -> bool:
        """Whether the optimizer itself works on them, which then finds this rank's parts."""
        return self._access.is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._access.is_open = is_open

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, entries: Any) -> None:
        guard = guard_of(key) if isinstance(key, Tensor) else None
        super().__setitem__(key, entries if guard is None else _GuardedEntries(self._access, guard, entries))

    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __reduce__(self) -> Any:
        return defaultdict, (dict, [(key, dict(entries)) for key, entries in self.items()])

    def to_plain(self) -> defaultdict[Any, Any]:
        """Return the states as dicts that hold this rank's parts."""
        self.is_open = True
        return defaultdict(dict, {key: dict(entries) for key, entries in self.items()})


class _GuardedEntries(dict[str, Any]):
    """The states of one parameter."""

    def __init__(self, access: _Access, guard: ShardGuard, entries: Mapping[str, Any]) -> None:
        self._access, self._guard = access, guard
        self.update(entries)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if self._access.is_open or not isinstance(value, Tensor) or value.shape != self._guard.shard_shape:
            return value
        with without_guards():
            return GuardedTensor.create(LocalShard(self._guard, value, key))

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            with without_guards():
                value = self._part_of(value)
        dict.__setitem__(self, key, value)

    def _part_of(self, value: Tensor) -> Tensor:
        layout, local = self._guard.layout, find_local_shard(value)
        if local is not None:
            if isinstance(value, GuardedTensor) and local.guard.layout == layout:
                return local.tensor
            value = value._full_copy()  # type: ignore[attr-defined]
        return layout.shard(value) if value.shape == layout.shape else value

    def __iter__(self) -> Iterator[str]:  # ``dict(entries)`` would not call ``__getitem__`` without it
        return dict.__iter__(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        """Return a dict of the same values."""
        return dict(self)

    get, items, values = Mapping.get, Mapping.items, Mapping.values  # type: ignore[assignment]
    update, setdefault, pop = MutableMapping.update, MutableMapping.setdefault, MutableMapping.pop


def guard_states(optimizer: Optimizer) -> None:
    """Guard an optimizer's states, which are full tensors or this rank's parts. Idempotent."""
    if not isinstance(optimizer.state, GuardedStates):
        optimizer.state = GuardedStates(optimizer.state)


def show_plain_dicts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with what its guarded states show in plain dicts."""
    states = {
        key: dict(entries) if type(entries) is _GuardedEntries else entries
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def release_states(optimizer: Optimizer) -> None:
    """Leave an optimizer with plain dicts of this rank's parts."""
    if isinstance(optimizer.state, GuardedStates):
        optimizer.state = optimizer.state.to_plain()


@contextmanager
def opened_states(optimizer: Optimizer) -> Iterator[None]:
    """Show an optimizer's states as this rank's parts within a context."""
    states = optimizer.state
    if not isinstance(states, GuardedStates) or states.is_open:
        yield
        return
    states.is_open = True
    try:
        yield
    finally:
        states.is_open = False

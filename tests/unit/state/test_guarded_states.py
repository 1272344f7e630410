from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_osdp.state.guarded_states import GuardedStates, _GuardedEntries, guard_states, release_states


def test_released_states_do_not_keep_parts_that_are_replaced() -> None:
    """The optimizer's states are made whole at the end of a run, one after the other: each frees its part at once."""
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    parts = [weakref.ref(value) for value in optimizer.state[parameter].values()]
    guard_states(optimizer)
    states = optimizer.state
    assert isinstance(states, GuardedStates)
    guard: Any = SimpleNamespace(shard_shape=torch.Size([4]), layout=SimpleNamespace(shape=torch.Size([8])))
    dict.__setitem__(states, parameter, _GuardedEntries(states._access, guard, states[parameter]))
    del states
    gc.disable()
    try:
        release_states(optimizer)
        optimizer.state[parameter] = {}
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()

"""Tells when the host reads values from tensors: what runs afterwards may depend on the data, and so on the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HOST_SYNC_FUNCTIONS = frozenset(
    [
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__contains__,
        Tensor.equal,
        Tensor.allclose,
        Tensor.is_nonzero,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    ]
)
"""What hands values of a tensor to Python."""


class HostSyncDetector(TorchFunctionMode):
    """Calls ``is_known`` whenever Python code reads values from a tensor."""

    def __init__(self, on_sync: Callable[[], None]) -> None:
        super().__init__()
        self._on_sync = on_sync

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_SYNC_FUNCTIONS:
            self._on_sync()
        return func(*args, **(kwargs or {}))

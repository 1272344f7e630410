"""Detects when the host reads values from tensors: later ops may depend on the data, and so on the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CONVERSIONS = [Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__int__, Tensor.__float__, Tensor.__index__]
COMPARISONS = [Tensor.__bool__, Tensor.__contains__, Tensor.equal, Tensor.allclose, Tensor.is_nonzero]
HOST_SYNC_FUNCTIONS = frozenset([*CONVERSIONS, *COMPARISONS, torch.equal, torch.allclose, torch.is_nonzero])
"""Functions that hand values of a tensor to Python."""


class HostSyncDetector(TorchFunctionMode):
    """Calls ``on_sync`` whenever Python code reads values from a tensor."""

    def __init__(self, on_sync: Callable[[], None]) -> None:
        super().__init__()
        self._on_sync = on_sync

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_SYNC_FUNCTIONS:
            self._on_sync()
        return func(*args, **(kwargs or {}))

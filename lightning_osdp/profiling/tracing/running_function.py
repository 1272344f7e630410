"""Which function of torch runs, and whether under autocast: aten calls show neither, where they are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_osdp.engine.splittable import CASTING_FUNCTIONS


class RunningFunction(TorchFunctionMode):
    """Knows the function of torch that Python has called."""

    def __init__(self) -> None:
        super().__init__()
        self._function: Any = None
        self._dtype: torch.dtype | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, kwargs = (self._function, self._dtype), kwargs or {}
        self._function = func
        if func is functional.embedding:
            self._dtype = _autocast_dtype(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._function, self._dtype = before

    def compute_dtype(self, func: Any, args: tuple[Any, ...], out: Any) -> torch.dtype | None:
        """Return autocast's type if an aten call is its cast for a product, or looks rows up under it.

        What users cast themselves, and what autocast casts for other functions, is read as it is.
        """
        if func is torch.ops.aten._to_copy.default:
            return out.dtype if getattr(self._function, "__name__", "") in CASTING_FUNCTIONS else None
        is_dense = func is torch.ops.aten.embedding.default and not any(args[4:])
        return self._dtype if is_dense else None


def _autocast_dtype(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> torch.dtype | None:
    device = weight.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def next_autograd_node() -> int:
    """Return the sequence number of the next node that autograd makes on this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def is_in_autograd_engine() -> bool:
    """Return whether autograd's own code is running: a node that is not a Python function."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)

"""Stubs for code that takes CUDA streams for granted, in a process that computes on the CPU.

FairScale is such code: on a CPU build ``torch.cuda.current_stream`` raises, and so does ``Tensor.record_stream`` for a
CPU tensor. Its global ``torch`` is replaced by a proxy whose streams do nothing.
"""

from __future__ import annotations

import types
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class _StubStream:
    """A CUDA stream where there is none: work is done when the call returns."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


STUB_STREAM = _StubStream()


_STUB_CUDA = types.SimpleNamespace(
    Stream=_StubStream,
    is_available=lambda: False,
    current_stream=lambda: STUB_STREAM,
    stream=lambda _: nullcontext(),
    synchronize=lambda: None,
)
"""A stand-in for ``torch.cuda`` without devices."""


class ModuleProxy(types.ModuleType):
    """A module in which some names are replaced."""

    def __init__(self, module: types.ModuleType, **changes: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def patch_cuda_streams(module: Any) -> None:
    """Replace the ``torch`` of ``module`` by one without CUDA, and make ``Tensor.record_stream`` ignore CPU tensors.

    Calling it again does nothing.

    Args:
        module: a Python module with a global name ``torch``.
    """
    if isinstance(module.torch, ModuleProxy):
        return
    module.torch = ModuleProxy(torch, cuda=_STUB_CUDA)
    original = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)

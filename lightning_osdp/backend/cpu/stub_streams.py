"""Lets code that takes CUDA streams for granted run in a process that computes on the CPU.

FairScale is such code: on a CPU build ``torch.cuda.current_stream`` raises, and so does ``Tensor.record_stream`` for a
CPU tensor. It is shown a ``torch`` whose streams do nothing; its own code stays as it is.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _StubStream:
    """A CUDA stream where there is none: work is done when the call returns."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


STUB_STREAM = _StubStream()


class _StubCuda(types.ModuleType):
    """What FairScale sees as ``torch.cuda`` in a process that computes on the CPU."""

    Stream = _StubStream

    @staticmethod
    def is_available() -> bool:
        """Always false."""
        return False

    @staticmethod
    def current_stream() -> _StubStream:
        """The one and only."""
        return STUB_STREAM

    @staticmethod
    @contextmanager
    def stream(_: object) -> Iterator[None]:
        """Runs the body as it is."""
        yield

    @staticmethod
    def synchronize() -> None:
        """Nothing to wait for."""


class ModuleProxy(types.ModuleType):
    """A module as it is, but for some names."""

    def __init__(self, module: types.ModuleType, **changes: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def patch_cuda_streams(module: Any) -> None:
    """Shows ``module`` a torch without CUDA, and makes ``Tensor.record_stream`` do nothing for CPU tensors. Idempotent.

    Args:
        module: the Python module whose global name ``torch`` is replaced.
    """
    if isinstance(module.torch, ModuleProxy):
        return
    module.torch = ModuleProxy(torch, cuda=_StubCuda("torch.cuda"))
    original = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)

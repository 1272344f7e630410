"""A device that the host must not wait for, where there is none: CUDA's part of the engine runs, and waiting fails.

Tensors lie on the CPU. Streams and events are stand-ins whose ``synchronize`` fails. Functions that hand values of a
tensor to Python, or copy Python's to a device, are noted where the package calls them; torch's and Lightning's own are
theirs. Tensors that are made on the host on purpose, without a device, and what is made of them, may be read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import lightning_osdp
from lightning_osdp.backend.cpu import stub_streams
from lightning_osdp.backend.streams import GatherMemory, ReductionMemory
from lightning_osdp.engine.fairscale import context
from lightning_osdp.engine.fairscale.communicators import CommunicatorFactory
from lightning_osdp.profiling.tracing.host_syncs import HOST_SYNC_FUNCTIONS

READS = HOST_SYNC_FUNCTIONS | {
    Tensor.cpu, Tensor.nonzero, Tensor.masked_select, Tensor.unique, torch.nonzero, torch.masked_select, torch.unique,
}  # fmt: skip
COPIES = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray, Tensor.new_tensor)

_OWN = str(Path(lightning_osdp.__file__).parent)
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(_OWN, "state", "undispatched_functions.py")))
"""Torch, and what stands in the place of some of its functions."""


def wait(*_: object, **__: object) -> None:
    pytest.fail("the host waits for the device")


class Stream:
    """Of a device: others wait for it, never the host."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait_event(self, event: object) -> None:
        self.num_waits += 1

    wait_stream = wait_event
    synchronize = query = wait


class Event:
    def record(self, stream: object = None) -> None:
        pass

    synchronize = query = elapsed_time = wait


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Have engines that are made from now on run as on CUDA, and return the stream that stands for all."""
    stream = Stream()

    def create_streams(device: torch.device, names: Any, module: Any) -> dict[str, Any]:
        stub_streams.patch_cuda_streams(module)
        return dict.fromkeys(names, stream)

    def make_communicators(world: Any, device: torch.device, *rest: Any) -> CommunicatorFactory:
        return CommunicatorFactory(world, torch.device("cuda"), *rest)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(type(stub_streams.STUB_STREAM), "synchronize", wait)
    monkeypatch.setattr(stub_streams._STUB_CUDA, "synchronize", wait)
    monkeypatch.setattr(stub_streams._STUB_CUDA, "current_stream", lambda: stream)
    monkeypatch.setattr(context, "create_streams", create_streams)
    monkeypatch.setattr(context, "GatherMemory", lambda _: GatherMemory(stream))
    monkeypatch.setattr(context, "ReductionMemory", lambda _: ReductionMemory(stream))
    monkeypatch.setattr(context, "CommunicatorFactory", make_communicators)
    return stream


class _Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_host = bool(tensors) and all(getattr(tensor, "is_on_host", False) for tensor in tensors)
        is_made = func in COPIES and kwargs.get("device") is None and not tensors
        if (func in READS and not is_host) or (func in COPIES and not is_made):
            place = _place()
            if place:
                self.found.append(f"{func.__name__} at {place}")
        result = func(*args, **kwargs)
        if is_host or is_made:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    leaf.is_on_host = True  # type: ignore[attr-defined]
        return result


def _place() -> str:
    """Where the package calls a function of torch; nothing where others do."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{Path(file).name}:{frame.f_lineno}" if file.startswith(_OWN) else ""


@contextmanager
def noting_host_waits() -> Iterator[list[str]]:
    """Yield where the package has the host wait within the block."""
    mode = _Noting()
    with mode:
        yield mode.found

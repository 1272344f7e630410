"""Refuse to be traced (``torch.export``, ``torch.jit``, ``torch.compile``, ``make_fx``) or wrapped while sharded."""

from __future__ import annotations

import inspect
import sys

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey

from lightning_osdp.errors import ShardingError

_TRACING_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY)
TRACING_REFUSED = (
    "a sharded module can't be exported, compiled or traced, since it gathers its weights while it runs: do it after "
    "the run, where the module is whole, or with one that load_from_checkpoint made"
)
_TRACERS = ("torch.export", "torch._export", "torch._dynamo")
_WRAPPERS = ("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")


def refuse_tracing() -> None:
    """Raise if code is being traced.

    Raises:
        ShardingError: says how to trace a module that was sharded.
    """
    modes = any(_get_dispatch_mode(key) is not None for key in _TRACING_MODES)
    if modes or torch._C._is_tracing() or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        raise ShardingError(TRACING_REFUSED)


def refuse_tracers() -> None:
    """Raise as ``refuse_tracing`` does if the caller is a tracer that still prepares to trace.

    It looks at all frames of the stack, which is slow: for what is about to fail anyway.

    Raises:
        ShardingError: as of ``refuse_tracing``.
    """
    frame = inspect.currentframe()
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_TRACERS):
        frame = frame.f_back
    if frame is not None:
        raise ShardingError(TRACING_REFUSED)


def refuse_wrappers(depth: int) -> None:
    """Raise if what uses a parameter is code of torch that would reduce its gradients or shard it.

    Args:
        depth: how many frames above the caller of this function that code is.

    Raises:
        ShardingError: says what to do instead.
    """
    name = str(sys._getframe(depth + 1).f_globals.get("__name__"))
    if name.startswith(_WRAPPERS) and not name.endswith("grad_scaler"):
        raise ShardingError(
            f"a sharded module can't be wrapped again ({name}), since its strategy gathers its weights and reduces its "
            "gradients already: use it as it is, or wrap it after the run, where the module is whole"
        )

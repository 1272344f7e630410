"""What the host reads from tensors: real ones are watched, fake ones give numbers that nothing may depend on."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

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


# -- fake tensors ------------------------------------------------------------------------------------------------------


class UnknownValueError(RuntimeError):
    """The step depends on a value that a fake tensor does not have."""


def _depends(*_: Any) -> Any:
    raise UnknownValueError("it depends on a number that .item() reads from a tensor")


class UnknownNumber:
    """An ``item()`` of a fake tensor: fit for arithmetic and for logging, not for decisions and shapes."""

    value: float | int = 1
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _depends
    __int__ = __index__ = __trunc__ = __floor__ = __ceil__ = _depends
    __hash__ = object.__hash__

    def _same(self, *_: Any) -> Any:
        return self

    __neg__ = __abs__ = __pos__ = __round__ = _same


class UnknownFloat(UnknownNumber, float):
    """The number of a floating-point tensor."""

    value = 1.0

    def __new__(cls) -> UnknownFloat:
        """Return one: zero would make logarithms and quotients fail."""
        return super().__new__(cls, 1.0)


class UnknownInt(UnknownNumber):
    """The number of another tensor. No int: those are taken as sizes without a question."""

    __float__ = _depends

    def __format__(self, spec: str) -> str:
        return format(1, spec)

    def __repr__(self) -> str:
        return "1"


def _arithmetic(name: str, is_reflected: bool) -> Callable[[Any, Any], Any]:
    operation: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: UnknownNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            own = type(self.value)(self) if isinstance(self, float) else self.value
            return operation(other, own) if is_reflected else operation(own, other)
        if not isinstance(other, int | float | UnknownNumber):
            return NotImplemented
        is_float = name in ("truediv", "pow") or isinstance(self, float) or isinstance(other, float)
        return UnknownFloat() if is_float else UnknownInt()

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _kind in (UnknownFloat, UnknownInt):
        setattr(_kind, f"__{_name}__", _arithmetic(_name, is_reflected=False))
        setattr(_kind, f"__r{_name}__", _arithmetic(_name, is_reflected=True))


def _unknown_item(tensor: FakeTensor) -> UnknownNumber:
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    return UnknownFloat() if tensor.dtype.is_floating_point else UnknownInt()


@contextmanager
def unknown_numbers() -> Iterator[None]:
    """Let ``item()`` of fake tensors give numbers that raise ``UnknownValueError`` where the step depends on them."""
    with mock.patch.object(FakeTensor, "item", _unknown_item, create=True):
        yield


# -- metrics -----------------------------------------------------------------------------------------------------------


@contextmanager
def silent_metrics() -> Iterator[None]:
    """Let no metric of torchmetrics talk to other ranks, and let those of fake tensors fail without consequences.

    Modules must be copied inside the block. A metric that fails, as it reads values, results in one number.
    """
    wrap_update, wrap_compute = Metric._wrap_update, Metric._wrap_compute
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (Metric, "sync", lambda *_, **__: None),
        (Metric, "_wrap_update", lambda self, update: _tolerant(wrap_update(self, update), lambda *_: None)),
        (Metric, "_wrap_compute", lambda self, compute: _tolerant(wrap_compute(self, compute), _one_number)),
        (Metric, "forward", _tolerant(Metric.forward, _one_number)),
        (MetricCollection, "forward", _tolerant(MetricCollection.forward, _numbers_by_name)),
        (MetricCollection, "compute", _tolerant(MetricCollection.compute, _numbers_by_name)),
        (MetricCollection, "update", _tolerant(MetricCollection.update, lambda *_: None)),
    ]
    with ExitStack() as stack:
        for kind, name, method in patches:
            stack.enter_context(mock.patch.object(kind, name, method))
        yield


def _tolerant(method: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def tolerant(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception:  # checks of values may raise anything when they meet fake tensors
            if torch._guards.active_fake_mode() is None:
                raise
            return result(*args)

    return tolerant


def _one_number(*_: Any) -> Tensor:
    return torch.zeros(())


def _numbers_by_name(collection: Any, *_: Any) -> dict[str, Tensor]:
    return {str(name): torch.zeros(()) for name in collection.keys(keep_base=False)}

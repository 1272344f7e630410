"""Parameters that are gathered in autocast's type, which is half the bytes.

A plan says which operators read their parameters by autocast's casts, or look rows up in them, and do nothing else with
them (``OperatorPlan.compute_dtype``). Under autocast their units cast this rank's shard and gather that. The parameter
itself keeps its type: gradients, optimizer states and checkpoints are of its own.

Note [what reads a parameter]: while such a unit runs, its parameter has a class of its own, and no values. Functions
that autocast would cast it for get the gathered cast instead, which is a function of the parameter to autograd. Any
other function that reads it (the traced step had none) first has the parameter itself gathered in its own type; so
what is computed is what an unsharded module computes, but for rows of tables.

Note [rows of tables]: autocast looks rows up in the parameter itself. Here they come from the gathered cast, rounded as
those of FSDP are, and have the parameter's type again, as has their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from lightning_osdp.engine.sliced_matmul import read_rows
from lightning_osdp.engine.splittable import CASTING_FUNCTIONS
from lightning_osdp.state.guarded_parameter import ValuesOnDemand, without_guards

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_UNIT = "_low_precision_unit"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN = _names("size dim numel nelement ndimension __len__ __hash__ is_floating_point is_complex element_size")
"""Functions that ask for no values."""

_PLAIN_PROPERTIES = _names(
    "shape ndim dtype device layout requires_grad is_leaf grad grad_fn is_cuda is_cpu is_meta is_sparse is_nested "
    "names _version"
)


class ReadUnit(Protocol):
    """What the functions of a parameter need of its unit."""

    @property
    def is_in_autocast(self) -> bool:
        """Return whether autocast is on, in the type of the casts."""

    def cast_of(self, parameter: Any) -> Tensor:
        """Return the gathered cast, for the run of the unit."""

    def read_rows(self, parameter: Any, ids: Tensor, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
        """Return rows of the gathered cast in the parameter's type."""

    def read_as_is(self, parameter: Any) -> None:
        """Gather the parameter in its own type, which it shows for the rest of the run."""


class _LowPrecisionParameter(ValuesOnDemand):
    """A parameter of which the casts are gathered; see Note [what reads a parameter]."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch with the casts, or with the parameters themselves."""
        kwargs = kwargs or {}
        name = func.__name__
        if name in _PLAIN or (name == "__get__" and getattr(func.__self__, "__name__", "") in _PLAIN_PROPERTIES):
            with without_guards():
                return func(*args, **kwargs)
        shown = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _LowPrecisionParameter)]
        if all(getattr(leaf, _UNIT).is_in_autocast for leaf in shown):
            if name in CASTING_FUNCTIONS:
                args, kwargs = tree_map(_replace_by_cast, (args, kwargs))
                return func(*args, **kwargs)
            rows = _read_rows(*args, **kwargs) if func is functional.embedding else None
            if rows is not None:
                return rows
        for leaf in shown:
            if isinstance(leaf, _LowPrecisionParameter):  # it may be given twice
                leaf.show_values()
        return func(*args, **kwargs)

    def show_values(self) -> None:
        """Gather the parameter in its own type."""
        getattr(self, _UNIT).read_as_is(self)


def _replace_by_cast(leaf: Any) -> Any:
    return getattr(leaf, _UNIT).cast_of(leaf) if isinstance(leaf, _LowPrecisionParameter) else leaf


def _read_rows(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Return what ``functional.embedding`` does of a gathered cast; None where that can't be."""
    if max_norm is not None or sparse or not isinstance(weight, _LowPrecisionParameter):
        return None
    rows: Tensor = getattr(weight, _UNIT).read_rows(weight, ids, padding_idx, scale_grad_by_freq)
    return rows


def is_autocast_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether autocast is on for a device, and casts to ``dtype``."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == dtype


@cache
def low_precision_class(plain_class: type) -> type:
    """Return the class of parameters of ``plain_class`` of which the casts are gathered."""
    return type(f"LowPrecision{plain_class.__name__}", (_LowPrecisionParameter, plain_class), {"__slots__": ()})


class _Cast(torch.autograd.Function):
    """The gathered cast as a function of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, cast: Tensor, on_read: Callable[[], None]) -> Tensor:
        ctx.dtype, ctx.on_read = parameter.dtype, on_read
        return cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.on_read()
        return gradient.to(ctx.dtype), None, None


class GatheredCast:
    """The memory of one parameter's gathered cast.

    Attributes:
        storage: its memory, which is there while it is gathered.
        stand_in: what the parameter's data are meanwhile: the full shape without values.
    """

    def __init__(self, parameter: Any, dtype: torch.dtype, num_ranks: int) -> None:
        shard = parameter._fp32_shard
        self._parameter, self._dtype = parameter, dtype
        self._shape, self._numel = parameter._orig_size, num_ranks * shard.numel()
        self.storage = torch.UntypedStorage(0, device=shard.device)  # type: ignore[no-untyped-call]
        self.stand_in = shard.new_full((), float("nan")).expand(self._shape)

    def allocate(self) -> Tensor:
        """Return the flat tensor to gather into."""
        if not self.storage.nbytes():
            self.storage.resize_(self._numel * self._dtype.itemsize)
        return self._view(torch.Size((self._numel,)))

    def cast_shard(self) -> Tensor:
        """Return the cast of this rank's shard."""
        shard: Tensor = self._parameter._fp32_shard.to(self._dtype)
        return shard

    def read(self, on_read: Callable[[], None]) -> Tensor:
        """Return the cast, a function of the parameter where autograd records.

        Args:
            on_read: called in the backward pass once nothing of this run reads it any more.
        """
        cast = self._view(self._shape)
        if not (torch.is_grad_enabled() and self._parameter.requires_grad):
            return cast
        with without_guards():
            result: Tensor = _Cast.apply(self._parameter, cast, on_read)  # type: ignore[no-untyped-call]
        return result

    def read_rows(self, ids: Tensor, on_read: Callable[[], None], padding_idx: int | None, scaled: bool) -> Tensor:
        """Return rows of the cast in the parameter's type, a function of the parameter where autograd records.

        Args:
            ids: numbers of rows.
            on_read: as in ``read``.
            padding_idx: a row that gets no gradient.
            scaled: whether a row's gradient is divided by how often it is looked up.
        """
        with without_guards():
            return read_rows(
                self._parameter,
                ids,
                padding_idx=padding_idx,
                scale_grad_by_freq=scaled,
                on_weight_unused=on_read,
                values=self._view(self._shape),
            )

    def _view(self, shape: torch.Size) -> Tensor:
        """Return the first values in this shape, in a tensor of their own: they may be gathered in inference mode.

        Their memory has to be there: torch would allocate it.
        """
        view: Tensor = self._parameter._fp32_shard.new_empty(0, dtype=self._dtype)
        view.set_(self.storage, 0, shape)  # type: ignore[call-overload]
        return view


def show_cast(parameter: nn.Parameter, unit: ReadUnit, gathered: GatheredCast) -> None:
    """Give the parameter the class that hands out its gathered cast."""
    setattr(parameter, _UNIT, unit)
    parameter.data = gathered.stand_in
    parameter.__class__ = low_precision_class(type(parameter))


def shows_cast(parameter: nn.Parameter) -> bool:
    """Return whether the parameter hands out its gathered cast."""
    return isinstance(parameter, _LowPrecisionParameter)


def show_plain(parameter: nn.Parameter) -> None:
    """Give the parameter its own class again."""
    if shows_cast(parameter):
        parameter.__class__ = type(parameter).__bases__[1]

"""Features between the operators of a run: a slice of them, of the rows of all ranks, that leads to the row operator.

They are tensors of a class of their own, so that torch hands every function that sees them to this file, and so are the
tensors that such functions return. The functions that ran when it was proven that the operators may be cut are known
(``TensorScope.functions``). Any other may need what is on other ranks and is refused, as all are when the run is over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lightning_osdp.engine.tensor_parallel.dropout import drop_apart
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.autograd_state import is_in_backward
from lightning_osdp.state.guarded_parameter import ValuesOnDemand, without_guards


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PROPERTIES = _names(
    "dtype device layout requires_grad is_leaf ndim names is_cuda is_cpu is_meta is_sparse is_nested is_quantized"
)

_FACTS = _names(
    "dim ndimension is_floating_point is_complex is_signed is_contiguous element_size get_device is_inference __hash__"
) | {f"{name}.__get__" for name in _PROPERTIES}
"""Functions that a slice answers like the whole."""

_SHAPES = _names("size numel nelement stride __len__ shape.__get__ nbytes.__get__")
"""Functions whose numbers are another rank's business, unless they were there in the proof."""

_ELEMENTWISE = _names(
    "add sub mul div true_divide __rsub__ __rdiv__ neg relu gelu silu tanh sigmoid leaky_relu dropout masked_fill "
    "where type_as bool float half bfloat16 eq ne lt le gt ge logical_not logical_and logical_or bitwise_not "
    "bitwise_and bitwise_or unsqueeze expand expand_as"
)
"""Functions that do the same to each number, which may begin late, as long as all their tensors lie alike."""

_COPIES = _names("detach clone contiguous to cpu")
"""Functions that hand on what is guarded, also when the run is over."""

_HOOKS = _names("register_hook retain_grad grad_fn.__get__ register_post_accumulate_grad_hook")
"""Functions that show gradients, of which a proof knows nothing."""


class InnerRun:
    """One run, to those who see what is between its operators.

    Args:
        name: its unit's, to be named in errors.
        functions: names of the functions that may see it; None if that is not known.
        slice_index: which slice this rank has.
        degree: number of slices.
    """

    def __init__(
        self, name: str, functions: Collection[str] | None = None, slice_index: int = 0, degree: int = 1
    ) -> None:
        self._name, self._functions = name, functions
        self.slice_index, self.degree = slice_index, degree
        self.is_over = self.needs_grad = False

    def guard(self, value: Any) -> Any:
        """Guard a tensor, or those in a list, as part of this run."""
        if type(value) is Tensor:
            value.__class__ = InnerFeatures
            value.run = self  # type: ignore[attr-defined]
        elif isinstance(value, list | tuple):
            for each in value:
                self.guard(each)
        return value

    def take(self, features: Tensor, is_result: bool = True) -> Tensor:
        """Return what has come to an operator as an ordinary tensor.

        Args:
            features: its input.
            is_result: whether column operators have made it, whose gradients go through it if there are any.
        """
        if not isinstance(features, InnerFeatures):
            return features  # a function that asks no class has made it
        if features.run is not self:
            raise features.run.refusal("an operator of another run")
        with without_guards():
            if is_result and self.needs_grad and torch.is_grad_enabled() and not features.requires_grad:
                raise self.refusal("a function without gradients")
            return features.view_as(features)

    def check(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Refuse a function that sees these tensors where it may need the whole."""
        if name in _COPIES:
            return
        runs = {each.run if isinstance(each, InnerFeatures) else None for each in tensors}
        is_known = self._functions is None or name in self._functions
        is_elementwise = name.removesuffix("_") in _ELEMENTWISE or (name == "__getitem__" and _is_slice(args[1]))
        is_refused = self.is_over or name in _HOOKS or not runs <= {self, None}
        if is_refused or not (is_known or (is_elementwise and runs == {self})):
            raise self.refusal(name)

    def refusal(self, user: str) -> ShardingError:
        """Return the error that says who uses what."""
        return ShardingError(
            f"{user.removesuffix('.__get__')} sees what is between the operators of {self._name}, where each rank has "
            "a slice, and did not when the plan was made: train without tensor parallelism, "
            "OSDPCallback(tensor_parallel=False)"
        )


class InnerFeatures(ValuesOnDemand, Tensor):
    """A tensor between the operators of a run."""

    run: InnerRun

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function that may see the tensors; what it returns is guarded, too."""
        kwargs, name = kwargs or {}, function_name(func)
        in_backward = is_in_backward()
        is_recomputed = in_backward and torch.is_grad_enabled()
        is_noted = name in _FACTS or (name in _SHAPES and _is_noted_by_checkpoint())
        if is_noted or (in_backward and not is_recomputed):
            with without_guards():
                return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        run = next(each.run for each in tensors if isinstance(each, InnerFeatures))
        if not is_recomputed:
            run.check(name, args, tensors)
        apart = partial(drop_apart, func, run.slice_index, run.degree)
        result = _call(apart, types, args, kwargs, tensors)
        if is_recomputed:
            return run.guard(result)
        if any(result is each and not isinstance(each, InnerFeatures) for each in tensors):
            raise run.refusal(name)  # it is written to what was there before
        is_known = isinstance(result, Tensor | list | tuple) or name in _SHAPES or name == "__setitem__"
        if not is_known or (name == "__setitem__" and not isinstance(args[0], InnerFeatures)):
            raise run.refusal(name)
        return run.guard(result)

    def show_values(self) -> None:
        """Refuse a function that asks no class."""
        raise self.run.refusal("a function that needs its memory")


def _call(func: Callable[..., Any], types: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    if all(issubclass(InnerFeatures, each) for each in types):
        with without_guards():
            return func(*args, **kwargs)
    inner = {id(each): each for each in tensors if isinstance(each, InnerFeatures)}.values()
    try:  # the classes of the other tensors are asked
        for each in inner:
            each.__class__ = Tensor  # type: ignore[assignment]
        return func(*args, **kwargs)
    finally:
        for each in inner:
            each.__class__ = InnerFeatures


def _is_noted_by_checkpoint() -> bool:
    """Return whether ``torch.utils.checkpoint`` asks, which notes shapes of what it saves and compares them."""
    return sys._getframe(2).f_code.co_filename == checkpoint.__file__


def _is_slice(index: Any) -> bool:
    """Return whether an index picks no single number or row."""
    return all(
        each is None or each is ... or isinstance(each, slice)
        for each in (index if isinstance(index, tuple) else (index,))
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple) or type(value) is dict:
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def function_name(func: Any) -> str:
    """Return the name of a function of torch, and of the property that it gets."""
    own = func.__name__
    return f"{func.__self__.__name__}.{own}" if own in ("__get__", "__set__", "__delete__") else own


class SeenFunctions(TorchFunctionMode):
    """Collects the names of all functions of torch within a context that see tensors.

    Attributes:
        names: of those that a slice does not answer like the whole.
        is_on: whether they are collected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.is_on = False

    @property
    def hooks(self) -> list[str]:
        """Return the names of those that show gradients."""
        return sorted(_HOOKS & self.names)

    def add(self, *names: str) -> None:
        """Note functions whose place something else has taken."""
        if self.is_on:
            self.names.update(names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the function's name."""
        if (name := function_name(func)) not in _FACTS:
            self.add(name)
        return func(*args, **(kwargs or {}))

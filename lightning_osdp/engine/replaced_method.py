"""A method that a module has in the place of its own, while a plan is carried out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

from torch import nn


class ReplacedMethod(partial[Any]):
    """Calls a function instead of a module's method. Copies of the module, and pickled ones, have the method itself."""

    own: tuple[nn.Module, str, Any]

    def __reduce__(self) -> Any:
        return _own_method, self.own


def _own_method(module: nn.Module, name: str, instance_method: Any) -> Any:
    return MethodType(getattr(type(module), name), module) if instance_method is None else instance_method


def replace_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Have ``module`` call ``function`` instead of its method, whose signature it shows: transformers looks at that."""
    method = ReplacedMethod(function)
    method.own = module, name, vars(module).get(name)
    vars(module)[name] = update_wrapper(method, getattr(module, name))

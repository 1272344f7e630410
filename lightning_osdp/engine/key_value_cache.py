"""Caches of keys and values that models of transformers make and give to each attention, unless ``use_cache=False``.

In training an attention puts its keys and values in a layer of the cache that was empty, and gets them back as they
are: the step does not need them. They are recognised without importing transformers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

_MODULE = "transformers.cache_utils"

_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers that return all that an empty one was given."""

_STATES = ("keys", "values")


def is_dynamic_cache(value: object) -> bool:
    """Return whether this is a cache that grows, which is what models make in training."""
    return _is_class(type(value), "DynamicCache")


def _is_class(kind: type, *names: str) -> bool:
    """Return whether a class is one of those of transformers with these names, and not derived from it."""
    return kind.__module__ == _MODULE and kind.__qualname__ in names


def copy_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with a copy of each cache as it is now, of which the tensors are the same."""
    return tuple(map(copy_cache, args)), {name: copy_cache(value) for name, value in kwargs.items()}


def copy_cache(value: Any) -> Any:
    """Return a copy of a cache as it is now, of which the tensors are the same; anything else is returned itself."""
    known = sys.modules.get(_MODULE)
    return _copy_parts(value) if known is not None and isinstance(value, known.Cache) else value


def _copy_parts(value: Any) -> Any:
    """Copy a cache, or a layer of one, and the lists, dictionaries and objects of transformers that it has."""
    if type(value) is list:
        return [_copy_parts(each) for each in value]
    if type(value) is dict:
        return dict(value)
    if not isinstance(value, type) and any(each.__module__ == _MODULE for each in type(value).__mro__):
        copied = copy.copy(value)
        vars(copied).update({name: _copy_parts(each) for name, each in vars(value).items()})
        return copied
    return value


def layer_index(module: object) -> int | None:
    """Return which layer of a cache an attention uses, as transformers tell it; None if it does not say."""
    index = getattr(module, "layer_idx", None)
    return index if type(index) is int and index >= 0 else None


def describe_unused(cache: Any, module: object) -> str:
    """Describe the layer of a cache that an attention is to fill; empty if it is not empty, or of another kind."""
    if not is_dynamic_cache(cache) or (index := layer_index(module)) is None:
        return ""
    if getattr(cache, "offloading", True) or not isinstance(layers := getattr(cache, "layers", None), list):
        return ""  # it moves keys and values to the host, or it is that of an old version
    if index >= len(layers):  # it makes its layers when they are needed
        kind = cache.layer_class_to_replicate
        return kind.__name__ if kind is not None and _is_class(kind, "DynamicLayer") else ""
    layer = layers[index]
    if not _is_class(type(layer), *_LAYERS) or layer.keys is not None or layer.values is not None:
        return ""
    numbers = {name: value for name, value in vars(layer).items() if isinstance(value, bool | int)}
    return f"{type(layer).__name__} {numbers}"


def filled_layer(cache: Any, module: object) -> Any:
    """Return the layer of a cache that an attention uses; None if it has not filled it."""
    index = layer_index(module)
    layer = cache.layers[index] if index is not None and index < len(cache.layers) else None
    return None if layer is None or vars(layer).get("keys") is None else layer  # which notes no read


def only_own_layer(cache: Any, module: object) -> Any:
    """Return a copy of a cache with nothing in it but the layer that an attention uses."""
    index, copied = layer_index(module), copy_cache(cache)
    copied.layers = [layer if each == index else None for each, layer in enumerate(copied.layers)]
    return copied


def note_reads(layer: Any, note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` when somebody looks at the keys or values of a layer. Return a function that ends it."""
    kind: Any = type(layer)

    def read(self: Any, name: str) -> Any:
        if name in _STATES:
            note()
        return kind.__getattribute__(self, name)

    # Without a name for configurations, under which transformers would register the class.
    layer.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read, "_layer_type": None})

    def undo() -> None:
        layer.__class__ = kind

    return undo

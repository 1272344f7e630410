"""Dropout in slices: ranks that draw the same numbers drop other places of them.

Ranks usually have one seed. Each would drop of its features of a sample what the others drop of theirs. So rows are
rolled before numbers are drawn for them, by another number of rows on each rank, and back. As many numbers are drawn as
without, so that what is drawn later is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_DROPOUTS = frozenset(["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"])


def drop_apart(func: Callable[..., Any], index: int, degree: int, /, *args: Any, **kwargs: Any) -> Any:
    """Return what a function returns; if it draws what it drops, the numbers of each slice fall on other rows.

    Args:
        func: a function of torch.
        index: which slice this rank has.
        degree: number of slices.
        *args: those of the function.
        **kwargs: those of the function.
    """
    if not _draws(func.__name__.removesuffix("_"), args, kwargs):
        return func(*args, **kwargs)
    first: Tensor = _argument(args, kwargs, 0, "query", kwargs.get("input"))
    shift = index * len(first) // degree if first.dim() else 0
    if not shift:
        return func(*args, **kwargs)

    def roll(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() == first.dim() and len(value) == len(first)
        return value.roll(shift, 0) if has_rows else value

    result = func(*map(roll, args), **{name: roll(value) for name, value in kwargs.items()}).roll(-shift, 0)
    is_in_place = func.__name__.endswith("_") or _argument(args, kwargs, 3, "inplace", False) is True
    return first.copy_(result) if is_in_place else result


def _draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(_argument(args, kwargs, 4, "dropout_p", 0.0))
    is_training = _argument(args, kwargs, 2, "training", kwargs.get("train", True))
    return name in _DROPOUTS and bool(is_training and _argument(args, kwargs, 1, "p", 0.5))


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)

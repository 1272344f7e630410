"""JSON files that a user gives or a cache holds: what is wrong with them, in words that name the field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

MAX_NUMBER, MAX_DEPTH = 1e30, 50
"""Numbers in files are smaller, since sums and products of larger ones overflow; and files are not nested deeper."""


def parse_json(text: str) -> Any:
    """Return the JSON value in ``text``.

    Raises:
        ValueError: it is not JSON, holds a number that no computer can use, or is nested too deep.
    """
    try:
        value = json.loads(text)
        check_numbers(value)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def check_numbers(value: Any, path: tuple[str, ...] = ()) -> None:
    """Refuse numbers that are not finite, or too large to calculate with.

    Raises:
        ValueError: names the field.
    """
    if len(path) > MAX_DEPTH:
        raise ValueError("it is nested too deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            check_numbers(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_numbers(inner, (*path, str(index)))
    elif isinstance(value, (int, float)) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        reason = "is too large" if isinstance(value, int) else f"is {value:.6g}, which can't be used"
        raise ValueError(f"field {join_path(path)} {reason}")


def describe_error(error: ValueError) -> str:
    """Return the first thing that is wrong, in one line, with the name of the field if it is known."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where = join_path(first["loc"])
    return f"field {where}: {first['msg']}" if where else first["msg"]


def join_path(parts: Iterable[object]) -> str:
    """Return the dotted path of a field."""
    return ".".join(map(str, parts))

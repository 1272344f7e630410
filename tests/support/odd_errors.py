"""Errors of users' code that are hard to repeat: of classes that refuse, and with messages that can't be sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


class UnprintableError(RuntimeError):
    """Raises when it is printed."""

    def __str__(self) -> str:
        raise TypeError("not a string")


@dataclass(frozen=True)
class FrozenError(Exception):
    """Takes no attributes."""

    text: str


class UnpicklableError(ValueError):
    """Can't be sent, nor made anew from its arguments."""

    def __init__(self, text: str, lock: object) -> None:
        super().__init__(text, lock)

    def __str__(self) -> str:
        return str(self.args[0])


ODD_ERRORS: dict[str, tuple[Callable[[], Exception], str]] = {
    "unprintable": (UnprintableError, "UnprintableError: its message can't be read, TypeError is raised"),
    "frozen": (lambda: FrozenError("row 7 is bad"), "FrozenError: row 7 is bad"),
    "unpicklable": (lambda: UnpicklableError("row 7 is bad", threading.Lock()), "UnpicklableError: row 7 is bad"),
    "huge": (lambda: ValueError("row 7 is bad" + "x" * 30_000_000), "ValueError: row 7 is badxxx"),
    "bytes that are no text": (lambda: ValueError("no row \udce9.bin"), "ValueError: no row \\udce9.bin"),
    "like a lost connection": (
        lambda: RuntimeError("Connection to the database is lost"),
        "RuntimeError: Connection to the database is lost",
    ),
}
"""What makes each error, and what another rank has to say of it."""

"""An error in one line, with the line of the user's code that raised it: what other ranks and the command line say."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

from lightning_osdp.errors import message_of

MAX_TEXT = 1000
"""Characters of an error's message that are repeated: some libraries quote whole files."""

_LIBRARY_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
)
"""Folders of code that is not the user's."""


def describe_error(exception: BaseException) -> str:
    """Return the error in one line: its kind, its message, and the line of the user's code that raised it.

    Where a library raises its own error from the user's, the user's is described.
    """
    error: BaseException | None = exception
    while error is not None:
        if place := describe_place(error):
            return f"{type(error).__name__}: {_to_one_line(error)}{place}"
        error = error.__cause__
    return f"{type(exception).__name__}: {_to_one_line(exception)}"


def describe_place(exception: BaseException) -> str:
    """Return the innermost line of the traceback that is the user's, in brackets; nothing if there is none."""
    for frame in reversed(traceback.extract_tb(exception.__traceback__)):
        if not frame.filename.startswith((*_LIBRARY_FOLDERS, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
    return ""


def _to_one_line(exception: BaseException) -> str:
    """Return the message, shortened: of an error with a worker's traceback the first line and the worker's error."""
    text = message_of(exception).strip() or "no message"
    if "Traceback (most recent call last)" in text:
        text = f"{text.splitlines()[0]} ... {text.splitlines()[-1]}"
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."

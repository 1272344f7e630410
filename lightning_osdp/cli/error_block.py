"""Print an error as one block: on rank 0, or on the rank that had it if rank 0 can't say so."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import traceback

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.strategy.error_text import describe_error, describe_place
from lightning_osdp.strategy.failure_detector import detector_that_reported

TRACEBACK_VARIABLE = "OSDP_TRACEBACK"
"""Environment variable that does what ``--verbose`` does, for ``osdp`` inside of other scripts."""

VERBOSE_OPTIONS = ("-v", "--verbose")

_BAD_CLASS = re.compile(
    r'Parser key "([\w.]+)": Does not validate against any of the Union subtypes .*?'
    r"Problem with given (class_path '.*?': .*?)(?: - Expected a | Given value type: ).*"
)
"""What jsonargparse says of a class that can't be made, besides what is wrong with it."""

HEAD_START_S = 3.0
"""Seconds that other ranks wait with an error that they could not report: if rank 0 ends with the same one, torchrun
and srun end them before they print it again."""


def is_verbose(words: list[str]) -> bool:
    """Return whether tracebacks are asked for, by an option or by the environment."""
    return os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0") or any(word in VERBOSE_OPTIONS for word in words)


def find_output_fault(error: BaseException) -> ConfigurationError | None:
    """Return what is wrong if ``error`` comes of a full disk under the standard output, which is lost from then on."""
    try:
        if isinstance(error, OSError):
            sys.stdout.flush()
    except OSError as fault:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ConfigurationError(f"the standard output can't be written: {fault.strerror}")
    return None


def print_error(error: BaseException, has_traceback: bool, is_expected: bool) -> None:
    """Print an error once, on the lowest rank that can: the others wait until it is printed, and say nothing.

    Args:
        error: what ended the command.
        has_traceback: whether every rank prints its error, with the traceback.
        is_expected: whether the message alone says what is wrong, as with our own errors.
    """
    rank = getattr(rank_zero_only, "rank", None) or 0
    detector = detector_that_reported(error)
    if has_traceback:
        print("".join(traceback.format_exception(error)), file=sys.stderr)
    elif rank:
        if isinstance(error, InfeasibleError) or (detector is not None and detector.is_told_by_rank_zero()):
            return  # all ranks raise the former
        if detector is None:
            time.sleep(HEAD_START_S)
    text = _shorten(str(error)) + _describe_cause(error) if is_expected else _describe(error)
    print(f"osdp: error{f' on rank {rank}' if rank else ''}: {text}", file=sys.stderr, flush=True)
    if detector is not None and rank == 0:
        detector.set_told()


def _shorten(text: str) -> str:
    """Return a message in one line; of one about a class that can't be made, where it is and what is wrong with it."""
    return _BAD_CLASS.sub(r"\1: \2", " ".join(text.split()))


def _describe(error: BaseException) -> str:
    """Describe an error of the user's code, with the line that raised it, and how to see more."""
    text = getattr(error, "osdp_cause", None) or describe_error(error)
    # Where an argument may be a name or an object, jsonargparse lists an error for each: the object's is the last.
    listed = [line for line in str(error).splitlines() if line.startswith("  - ")]
    if listed and text.startswith(f"{type(error).__name__}: Does not validate against any of the Union subtypes"):
        return listed[-1].removeprefix("  - ")
    words = [word for word in sys.argv[1:] if word not in VERBOSE_OPTIONS]
    return f"{text}\n(the traceback: osdp --verbose {shlex.join(words)}, or {TRACEBACK_VARIABLE}=1)"


def _describe_cause(error: BaseException) -> str:
    """Return the line of the user's code behind one of our errors, unless its message says it already."""
    place = describe_place(error.__cause__) if error.__cause__ is not None else ""
    return "" if place in str(error) else place

"""Show what a start is doing: a line on the terminal that is gone when training begins, lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text
from typing_extensions import Self

log = logging.getLogger(__name__)


class StageDisplay:
    """Shows the stages of a start, one after the other.

    The line is drawn when a stage begins, and not by a thread: that would take time from what is being measured.

    Args:
        is_shown: whether anything is shown; that is for one rank.
        uses_terminal: whether a line on the terminal may be used, if there is one.
    """

    def __init__(self, is_shown: bool = False, uses_terminal: bool = False) -> None:
        self._is_shown = is_shown
        self._uses_terminal = uses_terminal
        self._live: Live | None = None
        self._redirected: list[Any] = []
        self._logged: set[str] = set()

    def __enter__(self) -> Self:
        console = Console()
        if self._is_shown and self._uses_terminal and console.is_terminal:
            before = sys.stderr
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
            handlers = logging.getLogger("lightning_osdp").handlers
            self._redirected = [each for each in handlers if getattr(each, "stream", None) is before]
            self._set_stream(sys.stderr)  # which now writes above the line
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._set_stream(sys.stderr)

    def show(self, stage: str, detail: str, time: str) -> None:
        """Show that a stage begins.

        Args:
            stage: what is being done; it is logged once.
            detail: what changes while it is done again.
            time: how much time is left.
        """
        if self._live is not None:
            self._live.update(Text(f"osdp: {stage}{detail} ({time})", overflow="ellipsis", no_wrap=True), refresh=True)
        elif self._is_shown and stage not in self._logged:
            self._logged.add(stage)
            log.info("%s (%s)", stage, time)

    def _set_stream(self, stream: TextIO) -> None:
        for handler in self._redirected:
            handler.setStream(stream)

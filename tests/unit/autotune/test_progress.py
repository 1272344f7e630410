"""What is shown while a start plans."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import torch

from lightning_osdp.autotune import startup_budget
from lightning_osdp.autotune.progress import StageDisplay
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import StartupBudget

LOGGER = "lightning_osdp.autotune.progress"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return screen


def budget_of(display: StageDisplay, monkeypatch: pytest.MonkeyPatch, total_s: float = 30.0) -> StartupBudget:
    monkeypatch.setattr(startup_budget.time, "monotonic", lambda: 104.2)
    return StartupBudget(RankGroup.single(torch.device("cpu")), 100.0, total_s, display)


def test_stages_are_logged_once_with_the_time_left_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER), StageDisplay(True, uses_terminal=True) as display:
        for total_s, stage, detail in ((30.0, "trying plan 1 of 2", ", round 1"), (30.0, "trying plan 1 of 2", "")):
            budget_of(display, monkeypatch, total_s).begin_stage(stage, detail)
        budget_of(display, monkeypatch, float("inf")).begin_stage("searching a plan")
        budget_of(display, monkeypatch, 2.0).begin_stage("applying the plan")
    expected = ["trying plan 1 of 2 (26 of 30 s left)", "searching a plan (4 s so far)"]
    assert caplog.messages == [*expected, "applying the plan (0 of 2 s left)"]


def test_stages_are_a_line_on_the_terminal_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = use_terminal(monkeypatch)
    caplog.set_level(logging.INFO, logger=LOGGER)
    with StageDisplay(True, uses_terminal=True) as display:
        budget_of(display, monkeypatch).begin_stage("trying plan 1 of 2", ", round 3")
        print("a line of the user's step")
    shown = terminal.getvalue()
    assert "osdp: trying plan 1 of 2, round 3 (26 of 30 s left)" in shown
    assert "a line of the user's step\n" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased"
    assert sys.stdout is terminal
    assert caplog.messages == []


@pytest.mark.parametrize(("is_shown", "uses_terminal", "logged"), [(True, False, 1), (False, True, 0)])
def test_stages_leave_the_terminal_alone_without_progress_bar_and_on_other_ranks(
    is_shown: bool, uses_terminal: bool, logged: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = use_terminal(monkeypatch)
    with caplog.at_level(logging.INFO, logger=LOGGER), StageDisplay(is_shown, uses_terminal) as display:
        budget_of(display, monkeypatch).begin_stage("reading batches")
    assert terminal.getvalue() == ""
    assert len(caplog.messages) == logged


def test_log_lines_of_the_package_appear_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, errors = use_terminal(monkeypatch), Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    package = logging.getLogger("lightning_osdp")
    handler = logging.StreamHandler(errors)
    package.addHandler(handler)
    try:
        with StageDisplay(True, uses_terminal=True) as display:
            budget_of(display, monkeypatch).begin_stage("reading batches")
            package.warning("measured")
            assert "measured" in terminal.getvalue()
        assert handler.stream is errors
    finally:
        package.removeHandler(handler)

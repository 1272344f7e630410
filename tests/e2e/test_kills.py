"""Killed runs; ``make test-kill`` kills more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.kills import run_to_end_despite_kills


@pytest.mark.parametrize("save_format", ["full", "sharded"])
def test_killed_run_resumes_with_losses_of_uninterrupted_run(tmp_path: Path, save_format: str) -> None:
    assert len(run_to_end_despite_kills(1, tmp_path, save_format, seed=3)) == 1

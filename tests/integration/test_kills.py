"""Killed runs; ``make test-kill`` kills more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.kills import survive


@pytest.mark.parametrize("save_format", ["full", "sharded"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, save_format: str) -> None:
    assert len(survive(1, tmp_path, save_format, seed=3)) == 1

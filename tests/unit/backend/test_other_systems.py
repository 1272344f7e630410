"""On systems without glibc, without /proc, and on Windows the library imports, plans, and says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SYSTEMS = ["musl", "macos", "windows"]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What works on each faked system."""
    command = [sys.executable, "-m", "tests.support.other_systems"]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[3], env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_imports_and_memory_is_known(answers: dict[str, Any], system: str) -> None:
    answer = answers[system]
    assert "error" not in answer, answer["error"]
    assert answer["modules"] > 150
    assert 0 < answer["resident"] <= answer["usable"]
    assert answer["peak"] > 0
    assert answer["is_alive"]
    assert answer["cores"] > 0
    assert answer["version"] == 0


@pytest.mark.parametrize("system", ["musl", "windows"])
def test_heap_that_is_not_glibcs_is_left_alone_with_a_warning(answers: dict[str, Any], system: str) -> None:
    assert not answers[system]["is_heap_set"]
    (warning,) = answers[system]["warnings"]
    assert "glibc's allocator can't be set here" in warning


def test_windows_refuses_to_train_and_says_what_works(answers: dict[str, Any]) -> None:
    assert "On Windows, train in WSL2" in answers["windows"]["refusal"]
    assert answers["windows"]["hardware"] == 8

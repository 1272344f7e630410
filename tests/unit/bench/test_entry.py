"""Benchmarks are found by name, and their modules import each other in one direction."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from bench.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_name_is_that_of_a_module(name: str) -> None:
    module, description = BENCHMARKS[name]
    assert importlib.util.find_spec(module) is not None
    assert description


def test_entry_without_or_with_unknown_name_lists_the_benchmarks() -> None:
    listed = subprocess.run([sys.executable, "-m", "bench"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    unknown = subprocess.run([sys.executable, "-m", "bench", "x"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert listed.returncode == 0
    assert unknown.returncode == 2
    assert all(name in listed.stdout and name in unknown.stdout for name in BENCHMARKS)


def test_modules_of_the_benchmarks_have_no_import_circle() -> None:
    graph = grimp.build_graph("bench")
    modules = [module for module in graph.modules if module.count(".") > 1]
    circles = [(a, b) for a in modules for b in graph.find_modules_directly_imported_by(a) if graph.chain_exists(b, a)]
    assert circles == []

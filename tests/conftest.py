"""One thread for each process, and property tests without a clock."""

from __future__ import annotations

import gc
import inspect
import os
from functools import cache
from types import CodeType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("unhurried", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

LONGEST = (
    "test_no_hangs.py",
    "test_odd_modules.py",
    "test_examples.py",
    "test_outside_uses.py",
    "test_backward_passes.py",
    "test_fit.py",
    "test_faults_in_start.py",
    "test_fuzz.py",
)
"""Files that take longest; first those in which ranks wait."""


PROCESS_NAMES = {"run_ranks", "subprocess", "multiprocessing", "mp"}
"""Names that a test uses if it starts processes."""


@cache
def starts_processes(function: Any) -> bool:
    """Return whether a function of the tests starts processes, by itself or through other functions of the tests."""
    return _starts_processes(function, set())


def _starts_processes(function: Any, seen: set[Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or function in seen:
        return False
    seen.add(function)
    codes = [code, *(constant for constant in code.co_consts if isinstance(constant, CodeType))]
    names = {name for each in codes for name in each.co_names}
    called = (inspect.unwrap(function).__globals__.get(name) for name in names)
    helpers = [each for each in called if inspect.isfunction(each) and each.__module__.startswith("tests.")]
    return bool(names & PROCESS_NAMES) or any(_starts_processes(helper, seen) for helper in helpers)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes; run the longest files first, since one that comes last keeps others waiting."""
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [each.func for defs in item._fixtureinfo.name2fixturedefs.values() for each in defs]
            if any(starts_processes(function) for function in (item.function, *fixtures)):
                item.add_marker(pytest.mark.processes)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of all later garbage collections, of which planning makes many."""
    gc.freeze()

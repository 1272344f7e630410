"""One thread for each process, and property tests without a clock."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

LONGEST = ("test_no_hangs.py", "test_sliced_operators.py", "test_fit.py", "test_kills.py", "test_cli_fit.py")
"""Files that take minutes each, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: each is run by one process, and one that comes last keeps the others waiting."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))

"""Medians, and means where processes share cores."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_osdp.backend import timer
from lightning_osdp.backend.cpu.core_sharing import CoreSharing
from lightning_osdp.backend.timer import typical_time_s


def test_typical_time_ignores_outlier_unless_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = CoreSharing()
    monkeypatch.setattr(timer, "CORE_SHARING", cores)
    assert typical_time_s([1.0, 1.0, 7.0]) == 1.0
    cores.is_shared = True
    assert typical_time_s([1.0, 1.0, 7.0]) == 3.0


@pytest.mark.parametrize(("processes", "threads", "shared"), [(1, 4, False), (4, 1, False), (5, 1, True), (2, 4, True)])
def test_core_sharing_is_set_with_more_threads_than_cores(
    processes: int, threads: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cores = CoreSharing()
    cores.set_process_count(processes)
    assert cores.is_shared is shared


def test_core_sharing_name_depends_on_set_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for numbers in ({0, 1}, {1, 0}, {2, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, numbers=numbers: numbers, raising=False)
        names.append(CoreSharing.key())
    assert names[0] == names[1] != names[2]

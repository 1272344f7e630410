"""Medians, and means where processes share cores."""

from __future__ import annotations

import os

import pytest
import torch

from lightning_osdp import repeats
from lightning_osdp.repeats import Cores, typical_s


def test_an_outlier_does_not_count_unless_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores()
    monkeypatch.setattr(repeats, "CORES", cores)
    assert typical_s([1.0, 1.0, 7.0]) == 1.0
    cores.shared = True
    assert typical_s([1.0, 1.0, 7.0]) == 3.0


@pytest.mark.parametrize(("processes", "threads", "shared"), [(1, 4, False), (4, 1, False), (5, 1, True), (2, 4, True)])
def test_cores_are_shared_by_more_threads_than_there_are(
    processes: int, threads: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cores = Cores()
    cores.used_by(processes)
    assert cores.shared is shared


def test_other_cores_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for numbers in ({0, 1}, {1, 0}, {2, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, numbers=numbers: numbers, raising=False)
        names.append(Cores.name())
    assert names[0] == names[1] != names[2]

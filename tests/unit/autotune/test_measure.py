"""Measurements of the ranks serve every model; those of a model are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.autotune import measure
from lightning_osdp.autotune.measure import ClusterProfile, Profile, RankGroup
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.cluster import NO_ENGINE_OVERHEAD, ComputeTimes, OperatorTime
from tests.support.models import some_cluster
from tests.support.ranks import run_ranks


def load_links_repeatedly(rank: int, ranks: int, folder: str) -> list[tuple[int, ClusterProfile]]:
    """How often links were measured, and what came of it, each time that they are asked for."""
    here = RankGroup(dist.group.WORLD, 1, torch.device("cpu"))
    made: list[int] = []

    def measure_links(*_: Any) -> Any:
        made.append(rank)
        return some_cluster(ranks).link, None

    measure.measure_links = measure_links
    measure.engine_overhead.measure_engine_overhead = lambda *_: NO_ENGINE_OVERHEAD
    found = []
    for tolerance in (1e9, 1e9, 0.0):
        measure.PROBE_TOLERANCE = tolerance
        connections = measure._load_or_measure_links(here, None, Path(folder), lambda *_: None, 1 << 30)
        found.append((len(made), connections))
    given = measure._load_or_measure_links(here, some_cluster(ranks), Path(folder), lambda *_: None, 1 << 30)
    return [*found, (len(made), given)]


def test_load_or_measure_links_measures_once_while_probe_agrees(tmp_path: Path) -> None:
    for calls in run_ranks(load_links_repeatedly, 2, str(tmp_path)):
        assert [made for made, _ in calls] == [1, 1, 2, 2]
        assert len({connections.model_dump_json() for _, connections in calls}) == 1
    assert [file.name[:6] for file in tmp_path.iterdir()] == ["ranks-"]


def test_read_of_missing_or_damaged_cache_file_returns_none(tmp_path: Path) -> None:
    time = OperatorTime()
    whole = Profile(
        link=some_cluster().link, compute=ComputeTimes(operators=(), unattributed=time, optimizer_s_per_byte=0.0)
    )
    file = tmp_path / "kept.json"
    measure.write(file, whole.model_dump_json())
    assert measure.read(file, Profile) == whole
    assert measure.read(tmp_path / "none.json", Profile) is None
    file.write_text(file.read_text()[:-5])
    with pytest.warns(OSDPWarning, match="damaged"):
        assert measure.read(file, Profile) is None

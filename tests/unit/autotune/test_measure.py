"""Measurements of the ranks serve every model; those of a model are its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightning_osdp.autotune import measure
from lightning_osdp.autotune.profile import ClusterProfile
from lightning_osdp.autotune.profile_cache import ProfileCache
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.planning.spec.cluster import NO_ENGINE_OVERHEAD
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED
from tests.support.models import some_cluster
from tests.support.ranks import run_ranks
from tests.support.small_models import blocks_of_one


def load_links_repeatedly(rank: int, ranks: int, folder: str) -> list[tuple[int, ClusterProfile]]:
    """How often links were measured, and what came of it, each time that they are asked for."""
    here = RankGroup(dist.group.WORLD, 1, torch.device("cpu"))
    traced: Any = SimpleNamespace(model_profile=blocks_of_one(1, 1))
    files = ProfileCache.open(Path(folder), here, traced, None, UNCONSTRAINED)
    made: list[int] = []

    def measure_links(*_: Any) -> Any:
        made.append(rank)
        return some_cluster(ranks).link, None

    measure.measure_links = measure_links
    measure.engine_overhead.measure_engine_overhead = lambda *_: NO_ENGINE_OVERHEAD
    found = []
    for tolerance in (1e9, 1e9, 0.0):
        measure.PROBE_TOLERANCE = tolerance
        connections = measure.load_or_measure_cluster(here, None, files, 1 << 30)
        found.append((len(made), connections))
    given = measure.load_or_measure_cluster(here, some_cluster(ranks), files, 1 << 30)
    return [*found, (len(made), given)]


def test_load_or_measure_cluster_measures_once_while_probe_agrees(tmp_path: Path) -> None:
    for calls in run_ranks(load_links_repeatedly, 2, str(tmp_path)):
        assert [made for made, _ in calls] == [1, 1, 2, 2]
        assert len({connections.model_dump_json() for _, connections in calls}) == 1
    assert [file.name[:6] for file in tmp_path.iterdir()] == ["ranks-"]

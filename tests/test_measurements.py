"""Measurements of the ranks serve every model; those of a model are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp import measurements
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.measurements import Connections, Measurements, Ranks
from lightning_osdp.planning.cluster import NO_OVERHEAD, ComputeTimes, OperatorTime
from tests.models import some_cluster
from tests.ranks import run_ranks


def asked_for(rank: int, ranks: int, folder: str) -> list[tuple[int, Connections]]:
    """How often links were measured, and what came of it, each time that they are asked for."""
    here = Ranks(dist.group.WORLD, 1, torch.device("cpu"))
    made: list[int] = []

    def measure_links(*_: Any) -> Any:
        made.append(rank)
        return some_cluster(ranks).link, None

    measurements.measure_links = measure_links
    measurements.engine_overhead.measure = lambda *_: NO_OVERHEAD
    found = []
    for tolerance in (1e9, 1e9, 0.0):
        measurements.PROBE_TOLERANCE = tolerance
        connections = measurements._connections(here, None, Path(folder), lambda *_: None, 1 << 30)
        found.append((len(made), connections))
    given = measurements._connections(here, some_cluster(ranks), Path(folder), lambda *_: None, 1 << 30)
    return [*found, (len(made), given)]


def test_links_are_measured_once_for_all_models_while_they_hold(tmp_path: Path) -> None:
    for calls in run_ranks(asked_for, 2, str(tmp_path)):
        assert [made for made, _ in calls] == [1, 1, 2, 2]
        assert len({connections.model_dump_json() for _, connections in calls}) == 1
    assert [file.name[:6] for file in tmp_path.iterdir()] == ["ranks-"]


def test_what_can_not_be_read_is_measured_anew(tmp_path: Path) -> None:
    time = OperatorTime()
    whole = Measurements(
        link=some_cluster().link, compute=ComputeTimes(operators=(), outside=time, optimizer_s_per_byte=0.0)
    )
    file = tmp_path / "kept.json"
    measurements.write(file, whole.model_dump_json())
    assert measurements.read(file, Measurements) == whole
    assert measurements.read(tmp_path / "none.json", Measurements) is None
    file.write_text(file.read_text()[:-5])
    with pytest.warns(OSDPWarning, match="damaged"):
        assert measurements.read(file, Measurements) is None

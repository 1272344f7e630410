"""Measurements of the ranks serve every model; those of a model are its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.autotune import measure
from lightning_osdp.autotune.profile import ClusterProfile, MeasuredCluster
from lightning_osdp.autotune.profile_cache import ProfileCache
from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.cluster import NO_ENGINE_OVERHEAD, CollectiveFit, EngineOverhead, Link, ModeOverhead
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
    measure.MIN_STARTS = 3
    for tolerance in (1e9, 1e9, 1e9, 1e9, 0.0):
        measure.PROBE_TOLERANCE = tolerance
        connections = measure.load_or_measure_cluster(here, None, files, 1 << 30)
        found.append((len(made), connections))
    given = measure.load_or_measure_cluster(here, some_cluster(ranks), files, 1 << 30)
    return [*found, (len(made), given)]


def test_load_or_measure_cluster_measures_in_three_starts_then_while_probe_disagrees(tmp_path: Path) -> None:
    for calls in run_ranks(load_links_repeatedly, 2, str(tmp_path)):
        assert [made for made, _ in calls] == [1, 2, 3, 3, 5, 5], "twice where the first does not agree"
        assert len({connections.model_dump_json() for _, connections in calls}) == 1
    assert [file.name[:6] for file in tmp_path.iterdir()] == ["ranks-"]


ALONE = RankGroup.single(torch.device("cpu"))


class TwoRanks(RankGroup):
    """Whose number counts in what collectives take."""

    @property
    def world_size(self) -> int:
        return 2


TWO = TwoRanks(ALONE.group, 1, ALONE.device)


def measured(factor: float, engine_s: float = 1e-3, residual: float = 0.0) -> ClusterProfile:
    """Everything takes ``factor`` as long; an engine of ``engine_s``."""
    fit = CollectiveFit(latency_s=1e-4 * factor, s_per_byte=1e-9 * factor, residual=residual)
    own = ModeOverhead(fixed_s=engine_s * factor)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    return ClusterProfile(link=link, engine=EngineOverhead(dp=own, zdp2=own, zdp=own))


@pytest.mark.parametrize(
    ("kept", "new", "expected"),
    [
        ((), (1.0,), (1.0,)),
        ((1.0,), (1.1,), (1.0, 1.1)),
        ((1.0, 1.1), (9.0, 1.2), (1.0, 1.1, 1.2)),
        ((9.0,), (1.0, 1.1), (1.0, 1.1)),
        ((1.0, 1.1, 1.2), (9.0, 9.1), (9.0, 9.1)),
        ((1.0,), (9.0, 90.0), (1.0, 9.0, 90.0)),
        ((1.0, 1.1, 1.2, 1.3, 1.4), (1.5,), (1.1, 1.2, 1.3, 1.4, 1.5)),
    ],
    ids=["first", "agrees", "disturbed now", "disturbed before", "changed", "no two agree", "latest"],
)
def test_add_start_measures_again_what_contradicts_and_drops_it(
    kept: tuple[float, ...], new: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    left = list(map(measured, new))
    stored = MeasuredCluster(starts=tuple(map(measured, kept))) if kept else None
    found = measure.add_start(stored, lambda: left.pop(0), TWO)
    assert found.starts == tuple(map(measured, expected))
    assert not left


def test_measured_cluster_is_median_of_every_number_with_spread() -> None:
    starts = (measured(1.0), measured(1.2), measured(100.0, engine_s=0.0))
    cluster = MeasuredCluster(starts=starts)
    assert cluster.median.link.all_gather.latency_s == pytest.approx(1.2e-4)
    assert cluster.median.engine.zdp.fixed_s == pytest.approx(1e-3)
    assert cluster.relative_spread(2) == pytest.approx(0.2, rel=0.3)
    assert MeasuredCluster(starts=starts[:1]).relative_spread(2) == 0


@pytest.mark.parametrize(("residuals", "kept"), [([0.1], True), ([0.9, 0.1], True), ([0.9, 0.8], False)])
def test_contradicting_measurement_is_made_again_and_not_kept_if_it_still_contradicts(
    residuals: list[float], kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [measured(1.0, residual=each) for each in residuals]
    monkeypatch.setattr(measure, "_measure_cluster", lambda *_: left.pop(0))
    files = ProfileCache(ALONE, (), tmp_path / "ranks.json")
    measure.load_or_measure_cluster(ALONE, None, files, 1 << 30)
    assert not left
    assert (files.load_cluster() is not None) == kept


def test_poisoned_cluster_file_is_not_believed(tmp_path: Path) -> None:
    files = ProfileCache(ALONE, (), tmp_path / "ranks.json")
    files.save_cluster(MeasuredCluster(starts=(measured(1.0),) * 3))
    assert files.load_cluster() is not None
    data = json.loads((tmp_path / "ranks.json").read_text())
    del data["checksum"]
    for mode, seconds in (("zdp2", -7.1e-3), ("zdp", -8.5e-3)):
        poisoned = copy.deepcopy(data)
        poisoned["starts"][1]["engine"][mode]["fixed_s"] = seconds
        (tmp_path / "ranks.json").write_text(json.dumps(poisoned))
        with pytest.warns(OSDPWarning, match="measured anew"):
            assert files.load_cluster() is None
    data["starts"][0]["engine"]["calibration"]["zdp"] = -1.13
    (tmp_path / "ranks.json").write_text(json.dumps(data))
    with pytest.warns(OSDPWarning, match="measured anew"):
        assert files.load_cluster() is None

"""Measuring the collectives of a real process group."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.backend.hierarchical import NodeGroups
from lightning_osdp.planning.spec import cluster
from lightning_osdp.planning.spec.cluster import CollectiveFit, Link
from lightning_osdp.profiling import network
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (4 << 10, 64 << 10, 1 << 20, 2 << 20)


class MeasurementLog(logging.Handler):
    """Notes (collective, bytes) of each measurement that is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.measured: list[tuple[str, int]] = []
        network.log.addHandler(self)
        network.log.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "%s of %d bytes: %.3g s":
            name, size, _ = record.args
            self.measured.append((name, size))


def measure_links_on_rank(rank: int, world_size: int, long_s: float = math.inf) -> tuple[str, list[tuple[str, int]]]:
    network.BANDWIDTH_BOUND_S = long_s
    log = MeasurementLog()
    link = network.measure_links(dist.group.WORLD, CPU, sizes_bytes=SIZES)
    return link.model_dump_json(), log.measured


def measure_hierarchical_links_on_rank(rank: int, world_size: int) -> tuple[str, list[tuple[str, int]]]:
    log = MeasurementLog()
    groups = NodeGroups.create(dist.group.WORLD, 2)
    found = network.measure_hierarchical_links(groups, CPU, sizes_bytes=(4 << 10, 1 << 20))
    groups.destroy()
    return found.model_dump_json(), log.measured


def count_measurements_under_limits(rank: int, world_size: int, limits: list[int | None]) -> int:
    """How many measurements were made."""
    network.BANDWIDTH_BOUND_S = math.inf
    log = MeasurementLog()
    network.measure_links(dist.group.WORLD, CPU, sizes_bytes=SIZES, max_bytes=limits[rank])
    return len(log.measured)


def measure_with_too_few_sizes(rank: int, world_size: int) -> None:
    network.measure_links(dist.group.WORLD, CPU, sizes_bytes=(4096, 4095))


def test_measure_links_all_ranks_agree_and_log_each_measurement():
    (first, calls), (second, other_calls) = run_ranks(measure_links_on_rank, 2)
    assert first == second
    link = Link.model_validate_json(first)
    for fitted in (link.all_reduce, link.all_gather, link.reduce_scatter, link.all_to_all):
        assert fitted.latency_s + fitted.s_per_byte > 0
        assert fitted.time_s(16 << 20, 2) > 0
        assert 0 <= fitted.overlap_fraction <= 1
    assert calls == other_calls
    assert calls == [(name, size) for size in SIZES for name in NAMES]


def test_measure_links_on_slow_link_skips_larger_sizes():
    (first, calls), (second, _) = run_ranks(measure_links_on_rank, 2, 0.0)
    assert first == second
    assert [size for _, size in calls] == [size for size in SIZES[:3] for _ in range(4)]


def test_measure_hierarchical_links_all_ranks_agree():
    replies = run_ranks(measure_hierarchical_links_on_rank, 4)
    assert len({text for text, _ in replies}) == 1
    assert [size for _, size in replies[0][1]] == 6 * [4 << 10] + 6 * [1 << 20]
    assert len(set(replies[0][1])) == 12
    found = cluster.HierarchicalLinks.model_validate_json(replies[0][0])
    fits = [getattr(found.intra_node, name) for name in type(found.intra_node).model_fields]
    fits += [getattr(found.hierarchical, name) for name in type(found.hierarchical).model_fields]
    assert all(one.time_s(16 << 20, 4) > 0 for one in [*fits, found.inter_node])
    assert 0 <= found.inter_node.overlap_fraction <= 1


def test_measure_links_uses_smallest_memory_bound_of_all_ranks():
    assert run_ranks(count_measurements_under_limits, 2, [None, 1 << 20]) == [12, 12]


def test_measure_links_keeps_two_sizes_under_any_memory_bound():
    assert run_ranks(count_measurements_under_limits, 2, [1, 1]) == [8, 8]


def test_measure_links_on_single_rank_has_zero_cost():
    ((text, calls),) = run_ranks(measure_links_on_rank, 1)
    nothing = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    assert Link.model_validate_json(text) == Link(all_reduce=nothing, all_gather=nothing, reduce_scatter=nothing)
    assert calls == []


@pytest.mark.parametrize(
    ("backend", "free_mib", "largest_mib"),
    [("nccl", 4096, 512), ("nccl", 300, 128), ("nccl", 40, 32), ("gloo", 4096, 32)],
)
def test_measure_links_goes_up_to_512_mib_over_nccl_where_memory_allows(
    monkeypatch: pytest.MonkeyPatch, backend: str, free_mib: int, largest_mib: int
) -> None:
    class Eight:
        def size(self) -> int:
            return 8

    monkeypatch.setattr(network.collectives, "backend_of", lambda *_: backend)
    monkeypatch.setattr(network.agree, "all_reduce_min", lambda number, *_: number)
    wanted = network._sizes_for(Eight(), CPU, None)
    assert 4 * network._affordable_sizes(wanted, free_mib << 20, Eight(), CPU)[-1] == largest_mib << 20


def test_measure_links_requires_two_different_sizes():
    with pytest.raises(AssertionError, match="ValueError: need two different sizes"):
        run_ranks(measure_with_too_few_sizes, 2)


class Clock:
    """Seconds that pass only where a test lets them, so that no other process's work is measured."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


class Transfer:
    """A collective of 60 ms that begins at once; ``busy_s`` of it take the processor while it is waited for."""

    def __init__(self, clock: Clock, busy_s: float) -> None:
        self._clock = clock
        self._busy_s = busy_s
        self._arrives_s = clock.now_s + 0.06 - busy_s

    def wait(self) -> None:
        self._clock.passes(max(0.0, self._arrives_s - self._clock.now_s) + self._busy_s)


@pytest.mark.parametrize(("long", "sizes"), [((8,), 4), ((8, 9), 3)])
def test_fit_all_tolerates_one_slow_collective(
    long: tuple[int, ...], sizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four collectives at four sizes; the third size takes long."""
    timed: list[int] = []

    def time_s(*_: object, **__: object) -> float:
        timed.append(len(timed))
        return 1.0 if timed[-1] in long else 0.001

    monkeypatch.setattr(network.LinkTimer, "typical_s", time_s)
    subject = network.CollectiveBenchmark(lambda _: lambda: None, 2)
    subjects = dict.fromkeys(Link.model_fields, subject)
    network._fit_all(subjects, SIZES, network.LinkTimer(dist.group.WORLD, CPU))
    assert len(timed) == 4 * sizes + 1  # and a stretch of compute


def overlap_fractions_on_rank(rank: int, world_size: int) -> list[float]:
    """Fractions for collectives that go on by themselves, that need the processor half of their time, or all of it."""
    clock = Clock()
    network.time = clock
    found, timer = [], network.LinkTimer(dist.group.WORLD, CPU)
    timer.compute = timer.compute_beside = partial(clock.passes, 0.001)
    rest = 1000, 0.06, 0.001, timer
    for busy_s in (0.0, 0.03, 0.06):
        subject = network.CollectiveBenchmark(
            lambda _, busy_s=busy_s: lambda: Transfer(clock, busy_s).wait(),
            world_size,
            make_async=lambda _, busy_s=busy_s: lambda: Transfer(clock, busy_s),
        )
        found.append(network._overlap_fraction(subject, *rest))
    return [*found, network._overlap_fraction(subject._replace(make_async=None), *rest)]


def test_all_reduce_benchmark_reduces_shards_and_starts_async(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    for name in ("all_reduce_mean", "all_reduce_async"):
        monkeypatch.setattr(network.collectives, name, lambda part, _: reduced.append(part.numel()))

    class Across:
        def size(self) -> int:
            return 3

    subject = network._all_reduce_benchmark(Across(), CPU, 2)
    subject.make(8)()
    assert subject.make_async is not None
    subject.make_async(8)()
    assert reduced == [4, 4]
    assert subject.is_always_async
    assert subject.ranks == 3


def test_overlap_fraction_is_share_without_processor_time():
    first, second = run_ranks(overlap_fractions_on_rank, 2)
    assert first == second
    assert first == pytest.approx([1.0, 0.5, 0.0, 0.0])

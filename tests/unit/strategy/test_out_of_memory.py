"""Out of memory, explained."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from lightning_osdp.errors import OutOfMemoryError, ShardingError
from lightning_osdp.planning.spec.search_record import BatchSizePoint, PeakMoment
from lightning_osdp.strategy import out_of_memory
from tests.support.ranks import run_ranks
from tests.unit.report.test_tables import make_plan

PEAK = PeakMoment(
    where="backward of blocks.7.mlp",
    states=600 << 20,
    gradients=200 << 20,
    gathered=100 << 20,
    transient=50 << 20,
    activations=166 << 20,
    overhead=420 << 20,
)


def test_oom_advice_names_memory_categories_and_peak_moment() -> None:
    text = out_of_memory.oom_advice(make_plan(peak=PEAK), 1600 << 20)
    for words in (
        "backward of blocks.7.mlp",
        "states 600.0 MiB",
        "gathered parameters 100.0 MiB",
        "activations 166.0 MiB",
    ):
        assert words in text
    assert "predicts a peak of 1.50 GiB under a limit of 2.00 GiB" in text
    assert "peak measured was 1.56 GiB" in text


def test_oom_advice_for_peak_above_prediction_suggests_lower_limit_or_batch_size() -> None:
    frontier = tuple(BatchSizePoint(batch_size=b, samples_per_s=b, peak_memory_bytes=b) for b in (4, 6, 8, 10))
    text = out_of_memory.oom_advice(make_plan(frontier=frontier), 4 << 30)
    assert "prediction was too low" in text
    assert 'memory_limit="921MiB"' in text  # half of the 2 GiB, less a tenth
    assert "batch_size=6" in text


def test_oom_advice_for_peak_below_prediction_names_other_processes() -> None:
    text = out_of_memory.oom_advice(make_plan(), 1000 << 20)
    assert "other processes" in text
    assert 'memory_limit="900MiB"' in text


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
def test_explain_oom_raises_out_of_memory_error_from_allocator_error(error: Exception) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="rank 3 ran out of memory") as caught,
        out_of_memory.explain_oom(make_plan(), 3, lambda: 1 << 30),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ShardingError("no"), OutOfMemoryError("said already")]
)
def test_explain_oom_passes_other_errors_through(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, out_of_memory.explain_oom(make_plan(), 0, lambda: 0):
        raise error
    assert caught.value is error


def _allocate_too_much(rank: int, world_size: int) -> str:
    """Under a real limit of this process's address space."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), hard))  # some of it is for threads
    try:
        with out_of_memory.explain_oom(make_plan(), 0, lambda: 1 << 30):
            torch.zeros(1 << 30)
    except OutOfMemoryError as error:
        return str(error)
    return ""


def test_explain_oom_recognises_failed_cpu_allocation() -> None:
    (text,) = run_ranks(_allocate_too_much, 1)
    assert "rank 0 ran out of memory" in text
    assert "memory_limit=" in text

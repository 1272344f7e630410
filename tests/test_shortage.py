"""Out of memory, explained."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from lightning_osdp import shortage
from lightning_osdp.errors import OutOfMemoryError, ShardingError
from lightning_osdp.planning.plan import FrontierPoint, PeakMoment
from tests.ranks import run_ranks
from tests.test_report import make_plan

PEAK = PeakMoment(
    where="backward of blocks.7.mlp",
    states=600 << 20,
    gradients=200 << 20,
    gathered=100 << 20,
    transient=50 << 20,
    activations=166 << 20,
    overhead=420 << 20,
)


def test_advice_names_every_category_and_the_moment() -> None:
    text = shortage.advice(make_plan(peak=PEAK), 1600 << 20)
    for words in (
        "backward of blocks.7.mlp",
        "states 600.0 MiB",
        "gathered parameters 100.0 MiB",
        "activations 166.0 MiB",
    ):
        assert words in text
    assert "predicts a peak of 1.50 GiB under a limit of 2.00 GiB" in text
    assert "peak measured was 1.56 GiB" in text


def test_a_peak_beyond_the_prediction_asks_for_a_lower_limit_or_a_smaller_batch() -> None:
    frontier = tuple(FrontierPoint(batch_size=b, samples_per_s=b, peak_memory_bytes=b) for b in (4, 6, 8, 10))
    text = shortage.advice(make_plan(frontier=frontier), 4 << 30)
    assert "prediction was too low" in text
    assert 'memory_limit="921MiB"' in text  # half of the 2 GiB, less a tenth
    assert "batch_size=6" in text


def test_less_memory_than_the_plan_was_made_for_is_told_apart() -> None:
    text = shortage.advice(make_plan(), 1000 << 20)
    assert "other processes" in text
    assert 'memory_limit="900MiB"' in text


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
def test_the_allocators_error_is_the_cause(error: Exception) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="rank 3 ran out of memory") as caught,
        shortage.explained(make_plan(), 3, lambda: 1 << 30),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ShardingError("no"), OutOfMemoryError("said already")]
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, shortage.explained(make_plan(), 0, lambda: 0):
        raise error
    assert caught.value is error


def _allocate_too_much(rank: int, world_size: int) -> str:
    """Under a real limit of this process's address space."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), hard))  # some of it is for threads
    try:
        with shortage.explained(make_plan(), 0, lambda: 1 << 30):
            torch.zeros(1 << 30)
    except OutOfMemoryError as error:
        return str(error)
    return ""


def test_an_allocation_that_fails_on_the_cpu_is_recognised() -> None:
    (text,) = run_ranks(_allocate_too_much, 1)
    assert "rank 0 ran out of memory" in text
    assert "memory_limit=" in text

"""The queue and the search for the best batch size of the emulated benchmarks; nothing is trained."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.comparison.models import next_byte_loss
from bench.emulated import document, gpu, queue
from bench.emulated.climb import LARGEST, Climb
from bench.emulated.comparison import SYSTEMS, groups, put_what_can_not_fit
from bench.emulated.links import scaled_cluster
from bench.emulated.models import Paper, tokens_of, vocabulary_of
from bench.emulated.queue import Cell, Queue, Results, run_all


def climbed(limit: int, fixed: int, per_sample: int, compute_s: float = 0.01, link_s: float = 1.0) -> Climb:
    climb = Climb(limit, lambda: link_s)
    for _ in range(200):
        seconds = compute_s * climb.size + (link_s if climb.has_links else 0.0)
        if not climb.after_step(seconds, fixed + per_sample * climb.size):
            return climb
    raise AssertionError("it does not end")


def test_climb_finds_the_largest_size_that_fits() -> None:
    climb = climbed(limit=1000, fixed=300, per_sample=30)
    assert climb.best == 23
    assert max(climb.peaks.values()) <= 1000  # on a GPU more would end the process
    assert climb.step_s == pytest.approx(1.23)


def test_climb_stops_where_larger_sizes_gain_nothing() -> None:
    assert climbed(limit=1 << 40, fixed=0, per_sample=1, compute_s=0.1, link_s=1e-6).best < LARGEST


def test_climb_without_any_size_that_fits_has_no_figures() -> None:
    climb = climbed(limit=10, fixed=100, per_sample=1)
    assert not climb.final_s
    assert climb.peaks == {1: 101}


def test_climb_that_runs_out_of_memory_times_the_best_size_that_did_not() -> None:
    climb = Climb(1 << 40)
    while climb.size < 8:
        assert climb.after_step(0.01 * climb.size + 1.0, climb.size)
    assert climb.after_out_of_memory()
    assert (climb.best, climb.has_links) == (4, True)
    assert climb.after_out_of_memory()
    assert (climb.size, climb.final_s) == (2, [])
    while climb.after_step(1.5, 2):
        pass
    assert (climb.best, climb.step_s, climb.final_peak) == (2, 1.5, 2)


def test_climb_that_runs_out_of_memory_at_its_first_size_has_no_figures() -> None:
    climb = Climb(1 << 40)
    assert not climb.after_out_of_memory()
    assert not climb.final_s


def test_links_of_scaled_cluster_keep_compute_over_communication() -> None:
    here, paper = scaled_cluster(8, 16.3e9), scaled_cluster(8, 16.3e12, width_ratio=1)
    assert here.link.all_gather.s_per_byte == pytest.approx(1000 * paper.link.all_gather.s_per_byte)
    assert here.link.all_gather.latency_s == pytest.approx(1000 / 16 * paper.link.all_gather.latency_s)
    assert (scaled_cluster(64, 1e11).nodes, scaled_cluster(512, 1e11).ranks) == (8, 512)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that were run; each gives a result that names it."""
    found: list[Cell] = []

    def run(cell: Cell, machine: dict[str, Any], limit_s: float) -> dict[str, Any]:
        found.append(cell)
        speed = {"osdp": 3.0, "osdp-plain": 2.0}.get(cell.system, 1.0)
        result = {"batch_size": 4, "step_s": 1.0, "samples_per_s": speed, "peak_bytes": 100 << 20}
        more = {"predicted_s": 1.1, "predicted_bytes": 99 << 20, "modes": {"zdp": 1}, "recomputed": 0}
        return result | (more if cell.system.startswith("osdp") else {})

    monkeypatch.setattr(queue, "run", run)
    return found


def test_queue_goes_on_where_it_ended(tmp_path: Path, ran: list[Cell]) -> None:
    every = list(chain(*groups([8], ["nd-small"])))
    results = Results(tmp_path / "results.json")
    assert {cell.limit_mib for cell in every[:10]} == {250}
    assert run_all(every[:3], results, {}, 60.0, lambda _: None) == 0
    assert run_all(every, Results(tmp_path / "results.json"), {}, 60.0, lambda _: None) == 0
    assert ran == every
    assert run_all(every, Results(tmp_path / "results.json"), {}, -1.0, lambda _: None) == 0


def test_queue_without_time_says_what_is_left(tmp_path: Path, ran: list[Cell]) -> None:
    every = list(chain(*groups([8], [])))
    assert run_all(every, Results(tmp_path / "results.json"), {}, -1.0, lambda _: None) == len(every) == 96
    assert not ran


def test_page_shows_leads_and_what_was_not_run(tmp_path: Path, ran: list[Cell]) -> None:
    every = list(chain(*groups([8], ["nd-small", "ws-small"])))
    results = Results(tmp_path / "results.json")
    run_all(every[: len(SYSTEMS)], results, {}, 60.0, lambda _: None)
    page = document.page(every, results)
    assert "30 of 40 cells were not run." in page
    assert "OSDP beside the best of the others, 1 places: geometric mean 3.00" in page
    assert "N&D against FairScale per operator: 2.00 (paper: 1.22)" in page
    assert len(page.splitlines()) < 200


def test_page_under_bf16_mixed_compares_what_runs_under_autocast(tmp_path: Path, ran: list[Cell]) -> None:
    every = list(chain(*groups([8], ["nd-small"], precision="bf16-mixed")))
    assert {cell.precision for cell in every} == {"bf16-mixed"}
    assert not [cell.system for cell in every if cell.system.startswith(("fairscale", "osdp-"))]
    results = Results(tmp_path / "results.json")
    run_all(every, results, {}, 60.0, lambda _: None)
    page = document.page(every, results)
    assert page.startswith("# Under bf16-mixed")
    assert "2 places: geometric mean 3.00" in page
    assert "FairScale per operator" not in page


def test_cell_is_known_by_all_that_it_is() -> None:
    one = Cell("compare", "nd-small", 8)
    assert all(str(value) in one.name for value in asdict(one).values())


def test_page_sums_up_accuracy_by_ranks(tmp_path: Path) -> None:
    results = Results(tmp_path / "accuracy.json")
    for ranks, predicted in ((2, 1.0), (64, 1.2)):
        figures = {"predicted_s": predicted, "step_s": 1.0, "predicted_bytes": 98, "peak_bytes": 100}
        results.put(Cell("accuracy", "gptj", ranks), figures)
    text = document.accuracy(tmp_path / "accuracy.json")
    assert "| 2 | 1 | 0.0% | 1 | 1 | -2.0% | -2.0% |" in text
    assert "| 64 | 1 | 20.0% | 0 | 1 | -2.0% | -2.0% |" in text
    assert "not run yet" in document.accuracy(tmp_path / "nothing.json")


def test_page_shows_how_far_emulated_is_from_real(tmp_path: Path) -> None:
    results = Results(tmp_path / "real.json")
    one, other = {"step_s": 1.0, "peak_bytes": 100}, {"step_s": 1.1, "peak_bytes": 99}
    results.put(Cell("real", "gptj", 2, "zdp"), {"real": one, "emulated": other})
    assert "| 2 | gptj | zdp | +10.0% | -1.0% |" in document.real(tmp_path / "real.json")


def test_failed_cell_is_run_again_and_one_that_does_not_fit_is_not(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    failed, large = Cell("compare", "nd-small", 8), Cell("compare", "nd-small", 8, "ddp")
    results.put(failed, {"error": "status 1"})
    results.put(large, {"error": "does not fit"})
    assert results.get(failed) is None
    assert results.get(large) is not None


def test_papers_model_gives_a_loss_for_samples_of_many_sequences() -> None:
    name = "W&S 2 x 6144"
    tokens = torch.randint(0, vocabulary_of(name), (2, tokens_of(name) + 1))
    logits = Paper((64, 64))(tokens[:, :-1])
    assert logits.shape == (2, 96 * 6, vocabulary_of(name))
    assert next_byte_loss(logits, tokens).isfinite()


def test_gpu_queue_begins_with_the_papers_links_and_its_smaller_limit() -> None:
    every = gpu.cells()
    assert {(cell.links, cell.limit_mib) for cell in every[:40]} == {("titan-rtx-pcie3", 8 << 10)}
    assert len(every) == 3 * 3 * 4 * len(SYSTEMS)
    assert {cell.precision for cell in every if cell.model == gpu.LLAMA} == {"bf16-true"}


def test_group_that_can_not_be_ended_in_time_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, begun = [0.0], []

    def run(cell: Cell, machine: dict[str, Any], limit_s: float) -> dict[str, Any]:
        now[0] += 10.0
        begun.append(cell)
        return {"samples_per_s": 1.0}

    monkeypatch.setattr(queue, "run", run)
    monkeypatch.setattr(queue.time, "monotonic", lambda: now[0])
    two = [
        [Cell("compare", model, 8, system) for system in ("osdp", "ddp", "shard")] for model in ("one", "two", "three")
    ]
    left = Queue(Results(tmp_path / "results.json"), {}, 65.0).run(two, lambda _: None)
    assert [cell.model for cell in begun] == ["one"] * 3 + ["two"] * 3
    assert left == 3


def test_ddp_is_not_run_where_its_states_alone_do_not_fit(tmp_path: Path) -> None:
    results, every = Results(tmp_path / "results.json"), list(chain(*groups([8], ["nd-small"])))
    put_what_can_not_fit(every, results)
    found = {(cell.limit_mib, cell.system) for cell in every if results.get(cell) is not None}
    assert found == {(250, "ddp"), (250, "ddp+ckpt")}
    result = results.get(Cell("compare", "nd-small", 8, "ddp", limit_mib=250))
    assert result is not None
    assert result["error"] == "does not fit"
    assert result["needed_bytes"] == pytest.approx(16 * 19e6, rel=0.05)


CLOCK = """
import threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from bench.emulated.warp import JumpingClock
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from tests.support.models import some_cluster
from lightning_osdp.planning.spec.cluster import CollectiveFit, Link

real = time.perf_counter
JumpingClock().install()
slow = CollectiveFit(latency_s=100.0, s_per_byte=0.0)
join(EmulatedLinks(some_cluster(2, link=Link(all_reduce=slow, all_gather=slow, reduce_scatter=slow))))
began, really = time.perf_counter(), real()
works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
works[1].wait()
first = time.perf_counter() - began
works[2].wait()
second = time.perf_counter() - began
module = DistributedDataParallel(nn.Linear(2, 2))
before = time.perf_counter()
module(torch.ones(1, 2)).sum().backward()
print(round(first), round(second), round(time.perf_counter() - before), real() - really < 30)
"""


def test_clocks_jump_over_what_is_waited_for_on_links() -> None:
    done = subprocess.run([sys.executable, "-c", CLOCK], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["200", "300", "100", "True"], done.stderr

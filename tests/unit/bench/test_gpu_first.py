"""What runs first where there is a GPU is tried on a CPU: each cell with a small model, and the queue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from bench.emulated import first_steps, gpu, gpu_first, queue
from bench.emulated.queue import Cell, Queue, Results

ROOT = Path(__file__).parents[3]

pytestmark = [  # warnings of fully_shard
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Of each system, in one step of each kind."""
    found = {}
    try:
        for cell in gpu_first.first_cells("cpu"):
            found[cell.system] = first_steps.run(cell, {}, Path())
            patch.stopall()
    finally:
        patch.stopall()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("system", gpu_first.SYSTEMS)
def test_first_cell_gives_all_figures_on_a_cpu(results: dict[str, dict[str, Any]], system: str) -> None:
    found = results[system]
    wanted = {"step_s", "host_s", "nvlink_s", "pcie_s", "active_bytes", "calls", "sent_bytes"}
    assert wanted | ({"predicted_bytes"} if system.startswith("units") else set()) == set(found)
    assert all(found[name] > 0 for name in wanted - {"active_bytes"}) or system == "plain"
    assert json.loads(json.dumps(found)) == found
    assert gpu_first.line(Cell("first", "", 8, system), found).startswith(system)


def test_toggles_change_what_they_are_about(results: dict[str, dict[str, Any]]) -> None:
    usual = results["units block"]
    assert results["units block+casts"]["sent_bytes"] > 1.2 * usual["sent_bytes"]
    for toggle in ("priority", "events", "flags"):
        assert results[f"units block+{toggle}"]["sent_bytes"] == usual["sent_bytes"]
    assert {f"units block+{toggle}" for toggle in first_steps.TOGGLES} < set(gpu_first.SYSTEMS)
    assert results["units operator"]["calls"] > usual["calls"]
    assert results["units block zdp2"]["sent_bytes"] < usual["sent_bytes"] <= results["fully_shard block"]["sent_bytes"]


def test_first_minutes_are_followed_by_the_comparison() -> None:
    every = gpu_first.cells()
    assert [cell.work for cell in every] == ["first"] * len(gpu_first.SYSTEMS) + ["compare"] * len(gpu.cells())
    assert {cell.device for cell in every} == {"cuda"}
    assert len({cell.name for cell in every}) == len(every)


def test_cell_that_failed_comes_last_and_none_takes_longer_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, float]] = []

    def run(cell: Cell, machine: dict[str, Any], limit_s: float) -> dict[str, Any]:
        ran.append((cell.system, limit_s))
        return {"error": "too slow"} if cell.system == "plain" and len(ran) == 1 else {"step_s": 1.0}

    monkeypatch.setattr(queue, "run", run)
    every, file = gpu_first.first_cells()[:3], tmp_path / "results.json"
    for _ in range(2):
        results = Results(file)
        order = [[cell] for cell in gpu_first.in_order(every, results)]
        left = Queue(results, {}, 60.0, limit_s=gpu_first.CELL_S).run(order, lambda _: None)
    assert ran == [(system, 90.0) for system in (*gpu_first.SYSTEMS[:3], "plain")]
    assert left == 0
    assert [row.count("| 1000 ms |") for row in gpu_first.table(every, results)[2:]] == [1, 1, 1]


def test_dry_run_ends_in_time_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first cell in a process of its own; then there is no time for another one."""
    files = ["--json", str(tmp_path / "results.json"), "--write", str(tmp_path / "table.md")]
    monkeypatch.setattr(sys, "argv", ["bench gpu-first", "--dry-run", "--minutes", "0.001", *files])
    monkeypatch.setattr(gpu_first, "CELL_S", 400.0)  # for a machine that does other things as well
    monkeypatch.chdir(ROOT)
    assert gpu_first.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("plain "), printed
    assert f"{len(gpu_first.SYSTEMS) - 1} cells are left." in printed
    assert "| plain |" in (tmp_path / "table.md").read_text()

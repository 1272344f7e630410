"""The example that `make train` runs shows a plan that is worth looking at, whatever the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan

REPOSITORY = Path(__file__).parents[2]


def test_example_trains_a_mixed_plan_where_ddp_does_not_fit_and_shows_it(tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_gpt.py", "--max-steps", "2", "--batch-size", "1", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    plan = ExecutionPlan.from_json((tmp_path / "osdp_plan.json").read_text())
    assert [baseline.fits for baseline in plan.baselines if baseline.name == "DDP"] == [False]
    large = [op for op in plan.operators if op.num_parameters > 100_000]
    assert len({mode for op in large for mode in op.slices}) > 1
    assert Mode.DP in {mode for op in plan.operators for mode in op.slices}
    assert "What else there was" in (tmp_path / "osdp_plan.html").read_text(encoding="utf-8")
    for words in ("does not fit", "training loss, 2 steps", "validation loss in training", "osdp explain"):
        assert words in run.stdout
    assert "Warning" not in run.stderr
    explain = [sys.executable, "-m", "lightning_osdp", "explain", str(tmp_path / "osdp_plan.json")]
    explained = subprocess.run(explain, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=True)
    assert "instead, DDP: does not fit" in explained.stdout

"""The recommender trains under a limit that DDP does not fit, and says how each table is kept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_recommender_learns_where_ddp_does_not_fit_and_prints_the_mode_of_each_table() -> None:
    command = [sys.executable, "examples/recommender.py", "--max-steps", "30"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(r"DDP +does not fit", run.stdout)
    modes = dict(re.findall(r"^ *(\S+): ([\w +]+?) +[\d,]+ parameters$", run.stdout, re.MULTILINE))
    assert {f"tables.{name}" for name in ("user", "item", "shop", "city", "hour")} <= modes.keys()
    assert set(modes.values()) - {"dp"}
    (accuracy,) = re.findall(r"validation accuracy ([\d.]+);", run.stdout)
    assert float(accuracy) > 0.6

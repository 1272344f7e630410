"""One cell of ``python -m bench emulated-accuracy``: a model of the accuracy cases, planned and trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from bench.accuracy import cases
from bench.emulated.queue import Cell
from bench.emulated.worker import QUIET, cluster_of, limits, measured
from bench.processes import run_processes
from lightning_osdp import OSDPStrategy
from lightning_osdp.emulation import EmulatedCluster

STEPS, SCOUT_S = 15, 120.0

MEMORY_STEPS = 5
"""Where the memory alone counts."""


def limit_mib(cell: Cell, folder: Path) -> int:
    """Memory limit of the model: between the least that trains and what replicated training takes; 0: none."""
    share = cases.SHARES[cases.SUBJECTS[cell.model].limit]
    if share is None:
        return 0
    if not run_processes("bench.accuracy.cases", [(cases.scout, (_order(cell, folder),))], SCOUT_S):
        raise SystemExit((folder / "scout.log").read_text())
    bounds = json.loads((folder / "limits.json").read_text())
    return int(bounds["least"] + share * (bounds["replicated"] - bounds["least"])) >> 20


def run(cell: Cell, machine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What was predicted, and what came out."""
    torch.set_num_threads(1)
    steps = MEMORY_STEPS if cell.work == "memory" else STEPS
    subject = cases.SUBJECTS[cell.model]
    environment = EmulatedCluster(cluster_of(cell, machine))
    _, limit = limits(replace(cell, limit_mib=limit_mib(cell, folder)), torch.device("cpu"))
    cases.note_allowances()
    module, rows = cases.subject_of(_order(cell, folder))
    strategy = OSDPStrategy(batch_size=subject.batch_size, memory_limit=limit, cache=str(folder))
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, plugins=[environment], max_steps=steps, **QUIET)
    pace_before = cases.pace_s()
    trainer.fit(module, DataLoader(rows, batch_size=subject.batch_size, collate_fn=cases.collate))
    plan = strategy.execution_plan
    assert plan is not None
    baseline = plan.predicted.overhead_bytes - cases.ALLOWANCES[-1]
    return measured(strategy, baseline) | {
        "plan": cases.named(plan),
        "pace_change": cases.pace_s() / pace_before - 1,
        "limit": subject.limit,
        "allowance_bytes": cases.ALLOWANCES[-1],
        "is_tried": bool(plan.tried),
    }


def _order(cell: Cell, folder: Path) -> cases.Order:
    size = cases.SUBJECTS[cell.model].batch_size
    return cases.Order(cell.model, "searched", size, 0, str(folder), cell.ranks, 0, False)

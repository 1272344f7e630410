"""Runs cells, each in a process of its own, and keeps what came out: a stopped queue goes on."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.comparison.records import current_commit

CELL_S = 400.0
"""A cell that takes longer is ended and counts as too slow."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        work: what is done, of ``bench.emulated.cell.WORK``.
        model: what is trained.
        ranks: how many are emulated.
        system: by which strategy.
        links: name of the hardware, or of the scaled one.
        limit_mib: memory limit of the model, beside what the process takes; 0: the device's.
        device: ``cpu`` or ``cuda``.
        precision: of the Trainer.
    """

    work: str
    model: str
    ranks: int
    system: str = "osdp"
    links: str = "scaled"
    limit_mib: int = 0
    device: str = "cpu"
    precision: str = "32-true"

    @property
    def name(self) -> str:
        """The key of its result."""
        return " ".join(str(value) for value in asdict(self).values())


class Results:
    """A JSON file: what was measured of the machine, and one result for each cell."""

    def __init__(self, file: Path, fresh: bool = False) -> None:
        self._file = file
        self._data: dict[str, Any] = {"machine": {}, "cells": {}}
        self._lock = threading.Lock()
        if file.exists() and not fresh:
            self._data = json.loads(file.read_text())

    def machine(self, name: str, measure: Callable[[], Any]) -> Any:
        """A fact about the machine, measured once."""
        if name not in self._data["machine"]:
            self._data["machine"][name] = measure()
            self._write()
        return self._data["machine"][name]

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell; None if it was not run, or failed: perhaps it does not any more."""
        found: dict[str, Any] | None = self._data["cells"].get(cell.name)
        return found if found is not None and found.get("error") in (None, "does not fit") else None

    def was_run(self, cell: Cell) -> bool:
        """Whether a cell was begun, whatever came out."""
        return cell.name in self._data["cells"]

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a result."""
        with self._lock:
            self._data["cells"][cell.name] = asdict(cell) | result
            self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._data, indent=1) + "\n")
        partial.replace(self._file)


def run_all(
    cells: Sequence[Cell], results: Results, machine: dict[str, Any], budget_s: float, show: Callable[[Cell], None]
) -> int:
    """Run what has no result yet, each by itself, until the time is over; return how many cells are left."""
    return Queue(results, machine, budget_s).run([[cell] for cell in cells], show)


@dataclass
class Queue:
    """Cells that are run one after the other, or some at a time.

    Attributes:
        results: where they are kept.
        machine: about the machine, for the cells' processes.
        budget_s: no cell begins later than so many seconds from now, if it is like those before.
        jobs: cells at the same time: for each there is a core.
        limit_s: a cell that takes longer is ended and counts as too slow.
    """

    results: Results
    machine: dict[str, Any]
    budget_s: float
    jobs: int = 1
    limit_s: float = CELL_S
    _start_s: float = field(default_factory=lambda: time.monotonic())
    _seconds: list[float] = field(default_factory=list)

    def run(self, groups: Sequence[Sequence[Cell]], show: Callable[[Cell], None]) -> int:
        """Run what has no result yet; return how many cells are left.

        Args:
            groups: cells that say something only together, in this order. None begins that can't be ended in time.
            show: is told of each cell that has a result.
        """
        left = 0
        with ThreadPoolExecutor(self.jobs) as pool:
            for cells in groups:
                missing = [cell for cell in cells if self.results.get(cell) is None]
                if missing and self._has_time(len(missing)):
                    list(pool.map(self._run_one, missing))
                for cell in cells:
                    if self.results.get(cell) is not None:
                        show(cell)
                left += sum(self.results.get(cell) is None for cell in cells)
        return left

    def _has_time(self, count: int) -> bool:
        """Whether so many cells more can be ended in time."""
        typical_s, longest_s = (work(self._seconds or [0.0]) for work in (statistics.fmean, max))
        needed_s = max(longest_s, count * typical_s / self.jobs)
        return time.monotonic() - self._start_s + needed_s <= self.budget_s

    def _run_one(self, cell: Cell) -> None:
        if not self._has_time(1):
            return
        began_s = time.monotonic()
        result = run(cell, self.machine, self.limit_s)
        self._seconds.append(time.monotonic() - began_s)
        self.results.put(cell, result | {"cell_s": round(self._seconds[-1], 1), "commit": current_commit()})
        if self.results.get(cell) is None:
            print(f"{cell.name}: {result['error']}", *result.get("log", []), sep="\n  ", flush=True)


def run(cell: Cell, machine: dict[str, Any], limit_s: float = CELL_S) -> dict[str, Any]:
    """Run a cell in a process of its own; what it wrote, or ``error``."""
    with tempfile.TemporaryDirectory(prefix="emulated-") as name:
        folder = Path(name)
        order = json.dumps({"cell": asdict(cell), "machine": machine, "folder": name})
        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "bench.emulated.cell", order]
            try:
                status = subprocess.run(command, stdout=log, stderr=log, timeout=limit_s, check=False).returncode
            except subprocess.TimeoutExpired:
                status = 124
        result = folder / "result.json"
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            return found
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-12:]
        return {"error": "too slow" if status == 124 else f"status {status}", "log": last}

"""Run one cell in a process of its own: ``python -m bench.emulated.cell JSON``, which names the cell and a folder."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from bench.emulated import accuracy_cases, worker
from bench.emulated.queue import Cell
from bench.emulated.warp import JumpingClock


def _first_steps(cell: Cell, machine: dict[str, Any], folder: Path) -> dict[str, Any]:
    from bench.emulated import first_steps  # the engine, which takes memory that other cells do not pay for

    return first_steps.run(cell, machine, folder)


WORK = {"compare": worker.compare, "accuracy": accuracy_cases.run, "memory": accuracy_cases.run, "first": _first_steps}
"""What cells are about."""


def main() -> None:
    order = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    cell, folder = Cell(**order["cell"]), Path(order["folder"])
    if cell.device == "cpu":
        JumpingClock().install()
    result = WORK[cell.work](cell, order["machine"], folder)
    result["cpu_s"] = round(time.process_time(), 1)  # what a quiet core would have needed
    (folder / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

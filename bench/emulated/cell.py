"""Run one cell in a process of its own: ``python -m bench.emulated.cell JSON``, which names the cell and a folder."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

from bench.emulated import accuracy_cases, worker
from bench.emulated.queue import Cell
from bench.emulated.warp import JumpingClock

WORK = {"compare": worker.compare, "accuracy": accuracy_cases.run, "memory": accuracy_cases.run}
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

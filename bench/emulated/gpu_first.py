"""What to run first where there is a GPU for a quarter of an hour: one queue, which goes on where the last run ended.

    python -m bench gpu-first [--minutes 14] [--json runs/gpu-first.json] [--write FILE] [--dry-run]

One GPU stands for eight ranks. First a GPT of 1.3 B parameters in bf16-mixed, plain, under units per operator and per
block and under fully_shard: idle share of the device, seconds that the host is blocked, exposed time over links of 350
and 20 GB/s, peaks of memory beside what was predicted, and what each change of the units is worth. Then the cells of
``emulated-gpu``. A cell that takes longer than 90 s is ended, and comes last from then on. ``--dry-run`` runs the first
cells with a small model on the CPU: that all is ready, not that it is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.emulated import document, gpu
from bench.emulated.queue import Cell, Queue, Results

CELL_S = 90.0
GPT, SMALL = "gpt-1.3b", "ws-quick"
SYSTEMS = (
    "plain",
    "units block",
    "fully_shard block",
    "units operator",
    "units block zdp2",
    "fully_shard block zdp2",
    "units block+casts",
    "units block+priority",
    "units block+events",
    "units block+flags",
)
"""In order of worth; behind a plus, what is undone in the units (``first_steps.TOGGLES``)."""


def first_cells(device: str = "cuda") -> list[Cell]:
    """The engines under the larger model; on a CPU under a small one."""
    model = GPT if device == "cuda" else SMALL
    return [Cell("first", model, gpu.RANKS, system, "each", 0, device, "bf16-mixed") for system in SYSTEMS]


def cells() -> list[Cell]:
    """All that is to run on a GPU, the first minutes first."""
    return [*first_cells(), *gpu.cells()]


def in_order(every: Sequence[Cell], results: Results) -> list[Cell]:
    """The cells, with those last that were begun before and have no result: they failed, or took too long."""
    return sorted(every, key=lambda cell: results.get(cell) is None and results.was_run(cell))


def line(cell: Cell, result: dict[str, Any]) -> str:
    """A result in one line, for the terminal."""
    if cell.work != "first":
        return document.line(cell, result)
    return f"{cell.system:24} " + ", ".join(f"{name} {_figure(value)}" for name, value in result.items() if value != [])


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


COLUMNS = {
    "step": ("step_s", 1e3, "ms"),
    "host": ("host_s", 1e3, "ms"),
    "idle": ("idle", 100, "%"),
    "blocked": ("blocked_s", 1e3, "ms"),
    "over NVLink": ("nvlink_s", 1e3, "ms"),
    "over PCIe": ("pcie_s", 1e3, "ms"),
    "collectives": ("calls", 1, ""),
    "sent": ("sent_bytes", 1e-6, "MB"),
    "active": ("active_bytes", 2**-20, "MiB"),
    "predicted": ("predicted_bytes", 2**-20, "MiB"),
    "reserved": ("reserved", 2**-20, "MiB"),
    "retries": ("retries", 1, ""),
    "waits": ("waits", 1, ""),
}
"""Of the table: the figure, its factor and unit."""


def table(every: Sequence[Cell], results: Results) -> list[str]:
    """The first cells in Markdown, as far as they were run."""
    lines = ["| system | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for cell in every:
        found = results.get(cell) or {}
        shown = [_shown(found.get(name), factor, unit) for name, factor, unit in COLUMNS.values()]
        lines.append(f"| {cell.system} | " + " | ".join(shown) + " |")
    return lines


def _shown(value: Any, factor: float, unit: str) -> str:
    if value is None:
        return "-"
    return f"{len(value) if isinstance(value, list) else round(value * factor)} {unit}".strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14.0, help="begin no cell that would end later")
    parser.add_argument("--json", type=Path, default=Path("runs/gpu-first.json"))
    parser.add_argument("--write", type=Path, help="put the table of the first cells into this file")
    parser.add_argument("--dry-run", action="store_true", help="the first cells, with a small model on the CPU")
    args = parser.parse_args()
    import torch

    results, device = Results(args.json), "CPU"
    if args.dry_run:
        every = first_cells("cpu")
    elif torch.cuda.is_available():
        every, device = cells(), torch.cuda.get_device_name(0)
    else:
        print(f"there is no GPU here: {len(cells())} cells are ready to run, {len(first_cells())} of them first")
        return 1

    def show(cell: Cell) -> None:
        print(line(cell, results.get(cell) or {}), flush=True)

    queue = Queue(results, {"device": device}, args.minutes * 60, limit_s=CELL_S)
    left = queue.run([[cell] for cell in in_order(every, results)], show)
    lines = table([cell for cell in every if cell.work == "first"], results)
    print("\n".join(lines), f"{left} cells are left.", sep="\n")
    if args.write:
        args.write.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""OSDP beside its peers on one GPU that stands for eight: fifteen minutes at a time.

    python -m bench emulated-gpu [--minutes 14] [--json runs/emulated-gpu.json]

The paper's families and a LLaMA of 0.9 B parameters in bf16, links of three machines, limits of 8 and 16 GB and of the
whole device. A cell is one system with one model, one kind of links and one limit; its result is kept in the JSON file,
so that the next call goes on where one was stopped. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.emulated import document
from bench.emulated.comparison import SYSTEMS
from bench.emulated.models import PAPERS
from bench.emulated.queue import Cell, Results, run_all

LLAMA = "llama-gpu"
LINKS = ("titan-rtx-pcie3", "a100-80gb-nvlink", "h100-80gb-nvlink")
LIMITS_MIB = (8 << 10, 16 << 10, 0)
RANKS = 8


def cells() -> list[Cell]:
    """The paper's links and limits first."""
    return [
        Cell("compare", model, RANKS, system, links, limit, "cuda", "bf16-true" if model == LLAMA else "32-true")
        for links in LINKS
        for limit in LIMITS_MIB
        for model in (*PAPERS, LLAMA)
        for system in SYSTEMS
    ]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14.0, help="begin no cell that would end later")
    parser.add_argument("--json", type=Path, default=Path("runs/emulated-gpu.json"))
    args = parser.parse_args()
    every, results = cells(), Results(args.json)
    if not torch.cuda.is_available():
        print(f"there is no GPU here: {len(every)} cells are ready to run")
        return 1

    def show(cell: Cell) -> None:
        print(document.line(cell, results.get(cell) or {}), flush=True)

    left = run_all(every, results, {"device": torch.cuda.get_device_name(0)}, args.minutes * 60, show)
    print("\n".join(document.summary(every, results)))
    print(f"{left} cells are left.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

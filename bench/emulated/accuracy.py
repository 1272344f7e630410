"""Predicted beside emulated step time and peak memory, for up to 512 ranks that are not there.

    python -m bench emulated-accuracy [--ranks 2 4 8 64 512] [--models NAME ...] [--minutes 60] [--memory]

Ten of the models of ``python -m bench accuracy``, under the batch sizes and limits that are drawn there. Links are
PCIe 3.0 in nodes of eight and 200 Gbit/s between them, scaled to this machine's compute (``links.py``). A cell's result
is kept in the JSON file: the next call goes on where one was stopped. ``--memory`` makes a few steps, whose peaks alone
count: any machine will do for that, however busy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.emulated.document import MEMORY_TOLERANCE, TIME_TOLERANCE, errors
from bench.emulated.links import machine_flops
from bench.emulated.queue import Cell, Queue, Results

RANKS = (2, 4, 8, 64, 512)
MODELS = 10
FILE = Path("docs/benchmarks/emulated-accuracy.json")
HEAD = (
    "| model | ranks | plan | predicted | emulated | time | predicted | emulated | memory | machine |\n"
    "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def row(cell: Cell, result: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in result:
        return f"| {cell.model} | {cell.ranks} | {result['error']} |"
    time_error, memory_error = errors(result)
    sizes = [f"{result[name] / 2**20:.0f} MiB" for name in ("predicted_bytes", "peak_bytes")]
    return (
        f"| {cell.model} | {cell.ranks} | {result['plan']} | {result['predicted_s'] * 1e3:.0f} ms | "
        f"{result['step_s'] * 1e3:.0f} ms | {time_error:+.1%} | {sizes[0]} | {sizes[1]} | {memory_error:+.1%} | "
        f"{result['pace_change']:+.0%} |"
    )


def summary(found: Sequence[dict[str, Any]]) -> str:
    """What it adds up to."""
    if not found:
        return "no cells"
    times, memories = zip(*map(errors, found), strict=True)
    return (
        f"{len(found)} cells. Time: median {statistics.median(map(abs, times)):.1%} apart, "
        f"{sum(abs(one) <= TIME_TOLERANCE for one in times)} within {TIME_TOLERANCE:.0%}. Memory: "
        f"{sum(abs(one) <= MEMORY_TOLERANCE for one in memories)} within {MEMORY_TOLERANCE:.0%}, the most under "
        f"{min(memories):+.1%}."
    )


def main() -> None:
    from bench.accuracy.cases import SUBJECTS

    names = list(SUBJECTS)[:MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--models", nargs="+", default=names, choices=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell that would end later")
    parser.add_argument("--memory", action="store_true", help="the memory alone")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--fresh", action="store_true", help="run again what is kept there")
    args = parser.parse_args()
    results = Results(args.json, args.fresh)
    machine = {"flops": results.machine("flops", machine_flops)} if args.minutes > 0 else {}
    work = "memory" if args.memory else "accuracy"
    cells = [Cell(work, model, ranks, links="scaled+200gbit") for ranks in args.ranks for model in args.models]
    print(HEAD)

    def show(cell: Cell) -> None:
        print(row(cell, results.get(cell) or {}), flush=True)

    queue = Queue(results, machine, args.minutes * 60, args.jobs)
    left = queue.run([cells[i : i + args.jobs] for i in range(0, len(cells), args.jobs)], show)
    done = [result for cell in cells if (result := results.get(cell)) is not None and "error" not in result]
    print(f"\n{summary(done)} {left} cells are left.")


if __name__ == "__main__":
    sys.exit(main())

"""Jobs as users have them by OSDP and by DDP, in turns: seconds of a step and samples per second.

    python -m bench jobs [--only NAME ...] [--rounds 3] [--json FILE]

Each job (``tests/support/jobs.py``) is trained at its loader's batch size and at the one that OSDP finds. In every
round DDP and OSDP run after each other in processes of their own, so that neither has the other's allocator or caches.
OSDP's first start measures and searches, later ones take its plan. A step is timed from the beginning of a batch to the
next one; shown are the medians over all rounds, and the median of the rounds' ratios.

Where all replicated fits, no job may be slower than DDP by more than 5 %: the exit status is 1 if one is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, before any of them loads torch

from bench.jobs.worker import RANKS, train
from bench.processes import run_processes
from tests.support.jobs import JOBS
from tests.support.ports import free_port

TIMEOUT_S = 120

ALLOWED = 0.05
"""By how much a job may be slower than under DDP."""


def run(name: str, strategy: str, batch_size: int | str, folder: str) -> dict[str, Any]:
    """One run in processes of its own.

    Raises:
        SystemExit: a rank failed; its log is the message.
    """
    port = free_port()
    calls = [(train, (rank, name, strategy, batch_size, folder, port)) for rank in range(RANKS)]
    if not run_processes("bench.jobs.worker", calls, TIMEOUT_S):
        logs = [Path(folder, f"rank{rank}.log").read_text()[-4000:] for rank in range(RANKS)]
        raise SystemExit(f"{name} by {strategy} failed:\n" + "\n".join(logs))
    result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def compare(name: str, batch_size: int | str, rounds: int, folder: str) -> dict[str, Any]:
    """Rounds of DDP and OSDP at one batch size; OSDP's first start is not timed, since the later ones take its plan."""
    first = run(name, "osdp", batch_size, folder)
    size = first["batch_size"]
    pairs = []
    for index in range(rounds):
        order = ("ddp", "osdp") if index % 2 == 0 else ("osdp", "ddp")
        found = {one: run(name, one, size if one == "ddp" else batch_size, folder) for one in order}
        pairs.append((found["ddp"]["step_s"], found["osdp"]["step_s"], found["osdp"]["batch_size"]))
    ratios = [ddp_s * ours / (ours_s * size) for ddp_s, ours_s, ours in pairs]
    return {
        "job": name,
        "asked": batch_size,
        "batch_size": size,
        "is_replicated": first["is_replicated"],
        "ddp_s": statistics.median(pair[0] for pair in pairs),
        "osdp_s": statistics.median(pair[1] for pair in pairs),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def show(found: dict[str, Any]) -> None:
    spread = f"{min(found['ratios']):.3f} to {max(found['ratios']):.3f}"
    print(
        f"{found['job']:<8}{found['asked']!s:<6}{found['batch_size']:>6}"
        f"{'all replicated' if found['is_replicated'] else 'sharded':>16}"
        f"{found['ddp_s'] * 1e3:>9.1f} ms{found['osdp_s'] * 1e3:>9.1f} ms{found['ratio']:>9.3f}   {spread}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    print(f"{'job':<8}{'asked':<6}{'batch':>6}{'plan':>16}{'DDP':>12}{'OSDP':>12}{'ratio':>9}   rounds")
    results = []
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            for batch_size in ("keep", "auto"):
                results.append(compare(name, batch_size, args.rounds, folder))
                show(results[-1])
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))
    slow = [found for found in results if found["ratio"] < 1 / (1 + ALLOWED)]
    print("ratio: OSDP's samples per second by DDP's at the same batch size, the median of the rounds")
    print(f"{len(results) - len(slow)} of {len(results)} no more than {ALLOWED:.0%} slower than DDP")
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()

"""Jobs as users have them by OSDP and by DDP, in turns: seconds of a step and samples per second.

    python -m bench jobs [--only NAME ...] [--rounds 15] [--json FILE]

Each job (``tests/support/jobs.py``) is trained at its loader's batch size and at the one that OSDP finds. Both sides
run in processes of their own, so that neither has the other's allocator or caches. OSDP measures, searches and makes
its first steps, then DDP starts; from then on they train in turns of about a second while the other side waits, which
makes a round. A step is timed from the beginning of a batch to the next one; shown are the medians over all rounds,
and the median of the rounds' ratios.

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

SIDES = ("osdp", "ddp")

TIMEOUT_S = 300

ALLOWED = 0.05
"""By how much a job may be slower than under DDP."""


def compare(name: str, batch_size: int | str, rounds: int) -> dict[str, Any]:
    """Rounds of DDP and OSDP at one batch size.

    Raises:
        SystemExit: a rank failed; the logs are the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "turn").write_text("0")
        calls = []
        for side in SIDES:
            Path(folder, side).mkdir()
            port = free_port()
            calls += [(train, (rank, name, side, batch_size, rounds, folder, port)) for rank in range(RANKS)]
        if not run_processes("bench.jobs.worker", calls, TIMEOUT_S):
            logs = [Path(folder, side, f"rank{rank}.log") for side in SIDES for rank in range(RANKS)]
            raise SystemExit(f"{name} failed:\n" + "\n".join(log.read_text()[-4000:] for log in logs if log.exists()))
        plan = json.loads(Path(folder, "plan.json").read_text())
        ours_s, ddp_s = (json.loads(Path(folder, side, "medians.json").read_text()) for side in SIDES)
    ratios = [one / other for one, other in zip(ddp_s, ours_s, strict=True)]
    return {
        "job": name,
        "asked": batch_size,
        **plan,
        "ddp_s": statistics.median(ddp_s),
        "osdp_s": statistics.median(ours_s),
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    print(f"{'job':<8}{'asked':<6}{'batch':>6}{'plan':>16}{'DDP':>12}{'OSDP':>12}{'ratio':>9}   rounds")
    results = []
    for name in args.only:
        for batch_size in ("keep", "auto"):
            results.append(compare(name, batch_size, args.rounds))
            show(results[-1])
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    slow = [found for found in results if found["ratio"] < 1 / (1 + ALLOWED)]
    print("ratio: OSDP's samples per second by DDP's at the same batch size, the median of the rounds")
    print(f"{len(results) - len(slow)} of {len(results)} no more than {ALLOWED:.0%} slower than DDP")
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()

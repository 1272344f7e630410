"""Trains random modules under random plans beside DDP, and lists what differs: python -m tests.system.fuzz 0 300."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter

from tests.support.fuzz import case_of, run_cases
from tests.support.ranks import RankError, run_ranks

CASE_TIMEOUT_S = 90.0


def main(first: int, last: int) -> int:
    """Return the number of seeds that were neither equal nor refused."""
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdicts = [each for (each,) in run_ranks(run_cases, 2, [seed], folder, timeout_s=CASE_TIMEOUT_S)]
            except RankError as error:
                verdicts = [f"DIED: {error}"]
        worst = next((v for v in verdicts if v not in ("equal", "refused")), verdicts[0])
        counts[worst.split(":", 1)[0].split(" ")[0]] += 1
        if worst != "equal":
            print(f"{case_of(seed)}\n    {worst}  [{time.monotonic() - began:.0f} s]", flush=True)
    print(dict(counts))
    return sum(counts.values()) - counts["equal"] - counts["refused"] - counts["DDP"]


if __name__ == "__main__":
    sys.exit(int(main(int(sys.argv[1]), int(sys.argv[2])) > 0))

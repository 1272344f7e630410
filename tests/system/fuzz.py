"""Trains random modules under random plans beside DDP, and lists what differs: python -m tests.system.fuzz 0 300.

A pair of ranks runs many seeds. Each of them has its own time-out; after a fault the next seed gets a new pair.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.fuzz import case_of, is_fault, read_verdicts, run_cases
from tests.support.ranks import RankError, run_ranks

CASE_TIMEOUT_S = 90.0
SEEDS_PER_PAIR = 25


def judge_seeds(seeds: list[int]) -> Iterator[tuple[int, str]]:
    """Yield each seed with the worst of its ranks' judgements."""
    while seeds:
        chunk, failure = seeds[:SEEDS_PER_PAIR], ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(run_cases, 2, chunk, folder, CASE_TIMEOUT_S, timeout_s=CASE_TIMEOUT_S * (len(chunk) + 1))
            except RankError as error:
                failure = f"DIED: {error}"
            by_rank = [read_verdicts(folder, rank) for rank in range(2)]
            stacks = [path.read_text() for path in sorted(Path(folder).glob("stacks-*"))]
        judged = [max(pair, key=is_fault) for pair in zip(*by_rank, strict=False)]
        if len(judged) < len(chunk) and failure:
            judged.append("\n".join([failure, *stacks]))
        yield from zip(chunk, judged, strict=False)
        seeds = seeds[len(judged) :]


def main(first: int, last: int) -> int:
    """Return the number of seeds that were neither equal nor refused."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for seed, verdict in judge_seeds(list(range(first, last))):
        counts[verdict.split(":", 1)[0].split(" ")[0]] += 1
        if verdict != "equal":
            print(f"{case_of(seed)}\n    {verdict}", flush=True)
    print(f"{dict(counts)} in {time.monotonic() - began:.0f} s")
    return sum(counts.values()) - counts["equal"] - counts["refused"] - counts["DDP"]


if __name__ == "__main__":
    sys.exit(int(main(int(sys.argv[1]), int(sys.argv[2])) > 0))

"""A fault at every stage of a start, of training, saving and loading, on either rank: how and when both ranks end.

``python -m tests.system.faults [words]`` has all faults of which the line holds the words. Both ranks must end within
ten seconds after a fault, the other one with its cause; or both go on to their end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tests.support.faults import RANKS, Ending, start_with_fault

BOUND_S = 10.0
FAULTS = ("raise", "kill", "sigterm")
START = (
    "setup hook",
    "first batch",
    "look-up",
    "links: barrier of links",
    "engine's overhead",
    "kernels",
    "search",
    "unsharded trial: real step",
    "trial of the plan: real step",
    "cache the plan",
    "check of the plan",
    "apply: engine",
    "write the plan",
    "validation step",
)
TRAINING = ("training: real step", "end of the backward pass", "optimizer step", "end of training")
SAVING = ("state dict", "save", "write the file", "write the shards", "commit", "replace")
LOADING = ("load", "load the optimizer")


class Case(NamedTuple):
    stage: str
    fault: str
    rank: int
    options: dict[str, Any]


def all_cases() -> Iterator[Case]:
    """Every stage, fault and rank; stages that one rank alone or one format alone reaches are not reached elsewhere."""
    stages: list[tuple[str, dict[str, Any]]] = [(stage, {}) for stage in START]
    stages += [(stage, {"save_format": "full"}) for stage in TRAINING]
    for save_format in ("full", "sharded"):
        stages += [(stage, {"save_format": save_format}) for stage in SAVING]
        stages += [(stage, {"save_format": save_format, "resumes": True}) for stage in LOADING]
    for stage, options in stages:
        for fault in FAULTS:
            yield from (Case(stage, fault, rank, options) for rank in range(RANKS))


def judge(case: Case, endings: list[Ending]) -> str:
    """Return what is wrong; nothing if both ranks have ended as they should."""
    failed, other = endings[case.rank], endings[1 - case.rank]
    statuses = [failed.status, other.status]
    if statuses == [0, 0] or math.isnan(other.seconds):
        return "" if statuses == [0, 0] else "WITHOUT A FAULT"
    if max(failed.seconds, other.seconds) > BOUND_S:
        return "LATE"
    if case.stage == "end of training" and other.status == 0:  # it has nothing left to do
        return ""
    if other.status == 0:
        return "THE OTHER WENT ON"
    told = {"raise": "row 7 is bad", "kill": f"rank {case.rank}", "sigterm": "SIGTERM"}[case.fault]
    return "" if told in other.text else "NOT TOLD"


def main(words: list[str]) -> int:
    """Return the number of cases that ended otherwise than they should."""
    cases = [case for case in all_cases() if all(word in str(case) for word in words)]
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        every = pool.map(lambda case: start_with_fault(*case[:3], **case.options), cases)
        for case, endings in zip(cases, every, strict=True):
            found = judge(case, endings)
            wrong += bool(found)
            seconds = " ".join("-" if math.isnan(each.seconds) else f"{each.seconds:.1f}" for each in endings)
            kind = " ".join([case.options.get("save_format", ""), "resumed" * case.options.get("resumes", False)])
            statuses = [each.status for each in endings]
            line = f"{case.fault:8} rank {case.rank} {kind:16} {case.stage:30} statuses {statuses} after {seconds} s"
            print(f"{line} {found}", flush=True)
            if found:
                for rank, each in enumerate(endings):
                    print(f"rank {rank}:\n{each.text[-2000:]}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

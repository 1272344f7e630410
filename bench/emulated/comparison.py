"""OSDP beside its peers, each at its best batch size under the same memory limit, on ranks that are not there.

    python -m bench emulated [--ranks 8 64] [--models NAME ...] [--systems NAME ...] [--minutes 60] [--write]

One core stands for a device. Links have the paper's ratio of compute to communication (``links.py``): eight ranks on
PCIe 3.0; 64 are eight such nodes over 10 Gbit/s. A cell is one system with one model; its result is kept in the JSON
file, so that the next call goes on where one was stopped. ``--write`` makes docs/benchmarks/emulated.md of what is
there, run or not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.emulated import document
from bench.emulated.links import machine_flops
from bench.emulated.queue import Cell, Results, run_all

LIMITS_MIB = {"nd-small": 250, "ws-small": 200, "ic-small": 260, "gpt2": 200, "llama": 260}
QUICK_LIMITS_MIB = {"nd-quick": 120, "ws-quick": 100, "ic-quick": 100, "gpt2-quick": 110, "llama-quick": 110}
MODELS = {8: LIMITS_MIB, 64: QUICK_LIMITS_MIB}
"""By number of ranks: the models, and the memory limit of each (MiB), under which its replicated states of 16 bytes for
each parameter do not fit. Over 10 Gbit/s a step of the larger ones would take minutes."""

SYSTEMS = (
    "osdp",
    "osdp-plain",
    "ddp",
    "ddp+ckpt",
    "fsdp-full",
    "fsdp-full+ckpt",
    "shard",
    "shard+ckpt",
    "fairscale-op",
    "fairscale-op+ckpt",
)
FILE = Path("docs/benchmarks/emulated.json")


def cells(ranks: list[int], models: list[str], systems: list[str]) -> list[Cell]:
    """All cells, those of one model together."""
    return [
        Cell("compare", model, number, system, limit_mib=limit)
        for number in ranks
        for model, limit in MODELS[number].items()
        if not models or model in models
        for system in systems
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell that would end later")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--fresh", action="store_true", help="run again what is kept there")
    parser.add_argument("--write", action="store_true", help="write the page of what is there")
    args = parser.parse_args()
    results = Results(args.json, args.fresh)
    facts = {"flops": results.machine("flops", machine_flops)}

    def show(cell: Cell) -> None:
        print(document.line(cell, results.get(cell) or {}), flush=True)

    left = run_all(cells(args.ranks, args.models, args.systems), results, facts, args.minutes * 60, show)
    every = cells(list(MODELS), [], list(SYSTEMS))
    print("\n".join(document.summary(every, results)))
    print(f"{left} cells are left.")
    if args.write:
        args.json.with_suffix(".md").write_text(document.page(every, results))


if __name__ == "__main__":
    sys.exit(main())

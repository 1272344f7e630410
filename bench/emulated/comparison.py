"""OSDP beside its peers, each at its best batch size under the same memory limit, on ranks that are not there.

    python -m bench emulated [--ranks 8 64] [--models NAME ...] [--systems NAME ...] [--minutes 60] [--write]

One core stands for a device. Links have the paper's ratio of compute to communication (``links.py``): eight ranks on
PCIe 3.0; 64 are eight such nodes over 10 Gbit/s. A cell is one system with one model; its result is kept in the JSON
file, so that the next call goes on where one was stopped. ``--write`` makes docs/benchmarks/emulated.md of what is
there, with the results of ``emulated-accuracy`` and ``emulated-real``; ``--minutes 0 --write`` runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.emulated import accuracy, document, real
from bench.emulated.links import machine_flops
from bench.emulated.queue import Cell, Results, run_all

LARGE = {
    "nd-small": (250, 700),
    "ws-small": (200, 600),
    "ic-small": (260, 800),
    "gpt2": (200, 700),
    "llama": (260, 800),
}
QUICK = {
    "nd-quick": (100, 300),
    "ws-quick": (100, 280),
    "ic-quick": (100, 280),
    "gpt2-quick": (110, 330),
    "llama-quick": (110, 300),
}
MODELS = {8: LARGE, 64: QUICK}
"""By number of ranks: the models, and two memory limits of each (MiB). Under the first, replicated states of 16 bytes
for each parameter do not fit. Over 10 Gbit/s a step of the larger models would take minutes."""

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
    """All cells, those of one model and limit together; the small limits come first."""
    return [
        Cell("compare", model, number, system, limit_mib=limits[level])
        for level in (0, 1)
        for number in ranks
        for model, limits in MODELS[number].items()
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
    machine = {"flops": results.machine("flops", machine_flops)} if args.minutes > 0 else {}

    def show(cell: Cell) -> None:
        print(document.line(cell, results.get(cell) or {}), flush=True)

    left = run_all(cells(args.ranks, args.models, args.systems), results, machine, args.minutes * 60, show)
    every = cells(list(MODELS), [], list(SYSTEMS))
    print("\n".join(document.summary(every, results)))
    print(f"{left} cells are left.")
    if args.write:
        text = document.page(every, results) + document.accuracy(accuracy.FILE) + document.real(real.FILE)
        args.json.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())

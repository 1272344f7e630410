"""OSDP beside its peers, each at its best batch size under the same memory limit, on ranks that are not there.

    python -m bench emulated [--ranks 8 64] [--models NAME ...] [--systems NAME ...] [--minutes 60] [--jobs 2] [--write]
    python -m bench emulated --precision bf16-mixed --ranks 8 [...]

One core stands for a device; waiting for links takes no time (``warp.py``). Links have the paper's ratio of compute to
communication (``links.py``): eight ranks on PCIe 3.0; 64 are eight such nodes over 10 Gbit/s. A cell is one system with
one model, and runs beside as many others as there are jobs, on a core of its own. All systems of a model are a group:
with ``--minutes`` none is begun that can not be ended. Results are kept in the JSON file, so that the next call goes on
where one was stopped. ``--write`` makes docs/benchmarks/emulated.md of what is there, with the results of
``emulated-accuracy`` and ``emulated-real``; ``--minutes 0 --write`` runs nothing. Under another precision, results and
page have its name, links are those of fp32, and FairScale, whose loop here is in fp32, is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from bench.comparison.models import MODELS as MODELS_BUILT
from bench.comparison.models import PAPERS_FAMILIES
from bench.emulated import accuracy, document, real
from bench.emulated.document import FAIRSCALE, FULL, PLAIN
from bench.emulated.links import machine_flops
from bench.emulated.queue import Cell, Queue, Results

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
REPLICATED_BYTES = 16
"""Of a parameter in fp32: it, its gradient and the two states of AdamW."""

FOLDER = Path("docs/benchmarks")


def systems_of(model: str, systems: Sequence[str] = SYSTEMS, precision: str = FULL) -> list[str]:
    """The systems of a model's group. OSDP without recomputing is compared with the paper's figures alone."""
    if precision != FULL:
        return [system for system in systems if system != PLAIN and not system.startswith(FAIRSCALE)]
    return [system for system in systems if system != PLAIN or MODELS_BUILT[model].family in PAPERS_FAMILIES]


def groups(
    ranks: list[int], models: list[str], systems: Sequence[str] = SYSTEMS, precision: str = FULL
) -> list[list[Cell]]:
    """The cells of each model and limit; the small limits come first."""
    return [
        [
            Cell("compare", model, number, system, limit_mib=limits[level], precision=precision)
            for system in systems_of(model, systems, precision)
        ]
        for level in (0, 1)
        for number in ranks
        for model, limits in MODELS[number].items()
        if not models or model in models
    ]


def put_what_can_not_fit(cells: Iterable[Cell], results: Results) -> None:
    """Note that DDP does not fit where its states alone are larger than the limit: nothing has to be run for that."""
    for cell in cells:
        needed = REPLICATED_BYTES * num_parameters(cell.model)
        if cell.system.startswith("ddp") and needed > cell.limit_mib << 20 and results.get(cell) is None:
            results.put(cell, {"error": "does not fit", "needed_bytes": needed, "limit_bytes": cell.limit_mib << 20})


@cache
def num_parameters(model: str) -> int:
    """Its parameters, tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MODELS_BUILT[model].build().parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell that would end later")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at the same time (default: all cores)")
    parser.add_argument("--precision", default=FULL, choices=(FULL, "bf16-mixed"))
    parser.add_argument("--json", type=Path, help="default: in docs/benchmarks, by the precision")
    parser.add_argument("--fresh", action="store_true", help="run again what is kept there")
    parser.add_argument("--write", action="store_true", help="write the page of what is there")
    args = parser.parse_args()
    file = args.json or FOLDER / ("emulated.json" if args.precision == FULL else f"emulated-{args.precision}.json")
    results = Results(file, args.fresh)
    machine = {"flops": results.machine("flops", machine_flops)} if args.minutes > 0 else {}

    def show(cell: Cell) -> None:
        print(document.line(cell, results.get(cell) or {}), flush=True)

    asked = groups(args.ranks, args.models, args.systems, args.precision)
    if args.minutes > 0:
        put_what_can_not_fit(chain(*asked), results)
    left = Queue(results, machine, args.minutes * 60, args.jobs).run(asked, show)
    every = list(chain(*groups(list(MODELS) if args.precision == FULL else args.ranks, [], precision=args.precision)))
    print("\n".join(document.summary(every, results)))
    print(f"{left} cells are left.")
    if args.write:
        text = document.page(every, results)
        if args.precision == FULL:
            text += document.accuracy(accuracy.FILE) + document.real(real.FILE)
        file.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())

"""What splitting operators costs and saves, measured beside predicted (after the paper's figures 6 to 8).

    python -m bench splitting [--widths 512 1024 2048 4096] [--slices 1 2 4 8 16] [--quick] [--json FILE]

The Linear operators of attention (qkv, proj) and of an MLP (up, down) are trained by SGD on two ranks. Figures 7 and 8:
every slice under zdp, for each hidden size and number of slices. Figure 6: 4 slices, 0 to 4 of them under zdp and the
others replicated. Each case has processes of its own, which plan first and train then; the menus are cut down to the
one choice of the case. Time: median of the steps. Memory: peak above what the process took before the model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, before any of them loads torch

from bench.accuracy.accuracy import MIB, run_case
from bench.accuracy.cases import WIDTHS, Case, Order
from lightning_osdp.backend.memory import GROWTH_BYTES
from tests.support.ports import free_port

ALLOWANCE_BYTES = GROWTH_BYTES["cpu"]["tried"]

KINDS = ("attention", "MLP")
SLICES = (1, 2, 4, 8, 16)
MIXED_OF = 4
"""Slices of the operators of figure 6."""

LEAST_SAVED = 0.4
"""Of the peak that the largest hidden sizes should save by being split: the paper saw up to 50 %."""

HEAD = ("operators", "slices", "sharded", "memory", "predicted", "error", "saved", "step", "predicted", "error")


def sweep(args: argparse.Namespace) -> Iterable[tuple[str, tuple[str, ...]]]:
    """(model, modes of the slices): figures 7 and 8, then figure 6."""
    for width in args.widths:
        for kind in args.kinds:
            yield from ((f"{kind} {width}", ("zdp",) * k) for k in args.slices)
    for width in args.widths:
        for kind in args.kinds if args.mixed else ():
            for sharded in range(MIXED_OF + 1):
                yield f"{kind} {width}", ("zdp",) * sharded + ("dp",) * (MIXED_OF - sharded)


def run(args: argparse.Namespace, model: str, slices: tuple[str, ...], folder: str) -> Case:
    """One case in processes of its own. Slices that are all replicated are not cut: it would gain nothing."""
    plan = f"{len(slices)} slices, {slices.count('zdp')} sharded"
    modes = slices if "zdp" in slices else ("dp",)
    return run_case(Order(model, plan, args.batch_size, 1 << 40, folder, args.ranks, free_port(), args.quick, modes))


def row(case: Case, slices: Sequence[str], whole: Case | None, quick: bool) -> tuple[str, ...]:
    """A line of the table; ``whole`` is the same model unsplit."""
    saved = f"{1 - case.measured_bytes / whole.measured_bytes:.0%}" if whole else ""
    memory = (f"{case.measured_bytes / MIB:.1f} MiB", f"{case.predicted_bytes / MIB:.1f} MiB")
    times = (f"{case.measured_s * 1e3:.1f} ms", f"{case.predicted_s * 1e3:.1f} ms", f"{case.time_error:+.1%}")
    sizes = (*memory, f"{case.memory_error:+.1%}", saved)
    return (case.model, str(len(slices)), str(slices.count("zdp")), *sizes, *(("", "", "") if quick else times))


def show(cells: Sequence[str]) -> None:
    first, *others = cells
    print(f"{first:<16}" + "".join(f"{cell:>12}" for cell in others), flush=True)


def width_of(case: Case) -> int:
    return int(case.model.split()[1])


def beyond_allowance(case: Case) -> float:
    """Relative error of the predicted memory, in so far as the allowance for the first steps does not cover it."""
    over = case.predicted_bytes - case.measured_bytes
    return (over if over < 0 else max(0, over - ALLOWANCE_BYTES)) / case.measured_bytes


def verdict(found: Sequence[tuple[tuple[str, ...], Case]], quick: bool) -> str:
    """What the largest hidden size saves, how well memory is predicted, and what splitting does to the time."""
    sharded = [(case, len(slices)) for slices, case in found if set(slices) == {"zdp"}]
    largest = max(map(width_of, (case for case, _ in sharded)))
    lines = []
    for model in dict.fromkeys(case.model for case, _ in sharded if width_of(case) == largest):
        own = {k: case for case, k in sharded if case.model == model}
        least = min(own.values(), key=lambda case: case.measured_bytes)
        saved = 1 - least.measured_bytes / own[min(own)].measured_bytes
        lines.append(f"{model}: splitting saves up to {saved:.0%} of the peak (wanted: {LEAST_SAVED:.0%})")
        slower = [case.measured_s / case.predicted_s - 1 for case in own.values()]
        lines += [] if quick else [f"{model}: steps take at most {max(slower):+.1%} of what was predicted"]
    errors = [beyond_allowance(case) for _, case in found]
    lines.append(
        f"memory: {min(errors):+.1%} to {max(errors):+.1%} beyond the {ALLOWANCE_BYTES // MIB} MiB that plans allow "
        "for the first steps"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--slices", nargs="+", type=int, default=list(SLICES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-mixed", dest="mixed", action="store_false", help="without figure 6")
    parser.add_argument("--quick", action="store_true", help="the memory alone: few steps, nothing timed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the cases there")
    args = parser.parse_args()
    show(HEAD)
    found: list[tuple[tuple[str, ...], Case]] = []
    whole: dict[str, Case] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, slices in sweep(args):
            case = run(args, model, slices, folder)
            if slices == ("zdp",):
                whole[model] = case
            found.append((slices, case))
            show(row(case, slices, whole.get(model), args.quick))
    print(verdict(found, args.quick))
    if args.json:
        args.json.write_text(json.dumps([asdict(case) | {"slices": slices} for slices, case in found], indent=1))


if __name__ == "__main__":
    main()

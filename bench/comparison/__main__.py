"""OSDP against what people have: samples per second under the same hard memory limits, all in one run.

    python -m bench comparison [--quick] [--only nd-small,gpt2] [--settings 2-1gbit] [--levels tight]
    python -m bench comparison --write-docs          # the same, then docs/benchmarks.md with its pictures
    python -m bench comparison --verify              # every system's losses against plain PyTorch
    python -m bench comparison --profile nd-small:2-1gbit:middle --systems ddp+alloc

Results are kept as they come in (--results): a run that was stopped goes on where it was; --fresh forgets them. On a
CPU, ranks are in network namespaces and memory cgroups: needs root, iproute2 and cgroup v1. With --device cuda, each
rank has a GPU, or all share one over gloo, and the limit is the caching allocator's.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # no thread to fork
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to look for a GPU without touching CUDA, which no fork survives

from rich.console import Console

from bench.comparison import cleanup, document, launch, models, report, systems, tournament, verify
from bench.comparison.cells import LEVELS, MIB, cells
from bench.comparison.jobs import FULL_SETTINGS, QUICK_SETTINGS, SETTINGS, Job
from bench.comparison.records import ROOT, Runs, current_commit
from bench.comparison.worker import run_rank
from bench.multinode import emulated_cluster

QUICK_LEVELS = ("middle",)
QUICK_SYSTEMS = "fairscale-op+alloc,fsdp-full+ckpt+alloc,ddp+alloc"
"""The strongest in this setting, and what the paper compares with."""


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parse(given)
    if args.device == "cpu" and (
        os.geteuid() != 0 or not emulated_cluster.CGROUPS.joinpath("memory.limit_in_bytes").exists()
    ):
        print(f"needs root and the memory controller of cgroup v1 at {emulated_cluster.CGROUPS}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: nothing is left behind
    cleanup.remove()
    preload()
    console = Console(width=None if sys.stdout.isatty() else 140)
    runs = Runs(args.results, runner(args), teller(console))
    if runs.commits - {current_commit()}:
        console.print(f"[yellow]{args.results} holds results of {sorted(runs.commits)}; --fresh starts anew[/]")
    try:
        if args.verify:
            return check(runs, args, console)
        if args.profile:
            return dissect(runs, args, console)
        return compare_all(runs, args, console, given)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 130


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, one setting, the strongest systems")
    parser.add_argument("--only", help=f"models: {', '.join(models.MODELS)}")
    parser.add_argument("--settings", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--levels", help=f"of memory: {', '.join(LEVELS)}, or MiB for each rank")
    known = ", ".join((*systems.BASES, systems.NO_TP))
    parser.add_argument("--systems", help=f"all, strongest, or any of {known}; those of others with +ckpt, +alloc")
    parser.add_argument("--repeats", type=int, help="of each finalist, in turns with OSDP")
    parser.add_argument("--finalists", type=int, help="how many competitors are measured again beside OSDP")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--results", type=Path, help="file of results; default: in runs/throughput")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results and measurements")
    parser.add_argument("--write-docs", action="store_true", help="put the cells into docs/benchmarks.md")
    parser.add_argument("--docs", type=Path, help="folder for --write-docs; default: docs, docs/gpu with --device cuda")
    parser.add_argument("--verify", action="store_true", help="compare every system's losses with plain PyTorch's")
    parser.add_argument("--profile", metavar="MODEL:SETTING:LEVEL", help="where OSDP's step time goes; MiB for a level")
    args = parser.parse_args(arguments)
    fill_in(parser, args)
    return args


def fill_in(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Defaults that depend on others; refuses names that are not known."""
    quick = args.quick
    kind = "verify" if args.verify else "profile" if args.profile else "quick" if quick else "full"
    args.results = args.results or ROOT / "runs" / "throughput" / f"{kind}-{args.device}.jsonl"
    args.docs = args.docs or (ROOT / "docs" / "gpu" if args.device == "cuda" else ROOT / "docs")
    usual = models.GPU_MODELS if args.device == "cuda" else models.FULL_MODELS
    args.only = names(parser, args.only, models.MODELS, models.QUICK_MODELS if quick else usual)
    settings = QUICK_SETTINGS[args.device] if quick else FULL_SETTINGS
    links = tuple(name for name in settings if args.device == "cpu" or SETTINGS[name].rate is None)
    args.settings = names(parser, args.settings, SETTINGS, links)
    mib = [level for level in (args.levels or "").split(",") if level.isdigit()]
    args.levels = names(parser, args.levels, (*LEVELS, *mib), QUICK_LEVELS if quick else LEVELS)
    try:
        wanted = args.systems or (QUICK_SYSTEMS if quick else "strongest" if args.profile else "all")
        args.systems = systems.selected(wanted)
    except ValueError as error:
        parser.error(str(error))
    if args.fresh:
        args.results.unlink(missing_ok=True)


def names(parser: argparse.ArgumentParser, text: str | None, known: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text else default
    for name in chosen:
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")
    return chosen


def preload() -> None:
    """What every rank would import by itself, once; ranks are forked from here (see ``launch``). Our modules, which
    they do import by themselves, are compiled, as pip does what it installs: that leaves 1.5 MiB in a process."""
    import lightning.pytorch
    import torch
    import transformers

    assert transformers.GPT2LMHeadModel
    assert transformers.LlamaForCausalLM
    assert lightning.pytorch.Trainer
    torch.set_num_threads(1)
    compileall.compile_dir(ROOT / "lightning_osdp", quiet=1)


def runner(args: argparse.Namespace) -> Callable[[Job], dict[str, Any]]:
    """Runs jobs. OSDP's first run in a cell finds no measurements (quick: the first of a model and setting)."""
    base = args.results.parent / f"{args.results.stem}-cache"
    if args.fresh:
        shutil.rmtree(base, ignore_errors=True)
    work = run_rank
    if args.profile:
        from bench.comparison.step_breakdown import profile_rank as work

    def run(job: Job) -> dict[str, Any]:
        cache = base / (f"{job.model}-{job.setting}" + ("" if args.quick else f"-{job.memory_bytes}"))
        cache = cache.with_name(cache.name + "-no-tp" * (job.system == systems.NO_TP))
        if job.system in systems.OWN and job.repeat == 0 and not args.quick:
            shutil.rmtree(cache, ignore_errors=True)
        return launch.run(job, cache, work)

    return run


def teller(console: Console) -> Callable[[Job, dict[str, Any]], None]:
    """A line for each run."""

    def tell(job: Job, result: dict[str, Any]) -> None:
        sizes = ", ".join(f"{size['batch_size']}: {size['step_s'] * 1e3:.0f} ms" for size in result["sizes"])
        limit = f"{job.memory_bytes // MIB} MiB" if job.memory_bytes else "no limit"
        words = f"{job.purpose:8} {job.model} {job.setting} {limit} {job.system}"
        peak = f"peak {result['peak_bytes'] // MIB} MiB"
        console.print(f"{words}: {result['outcome']}, {peak}, {result['seconds']:.0f} s  [{sizes}]", markup=False)
        if result["outcome"] == "failed":
            console.print(result["error"].strip(), markup=False, style="dim")

    return tell


def compare_all(runs: Runs, args: argparse.Namespace, console: Console, given: list[str]) -> int:
    effort = tournament.QUICK if args.quick else tournament.Effort()
    changes = {name: value for name in ("repeats", "finalists") if (value := getattr(args, name)) is not None}
    effort = effort.changed(**changes)
    comparer = tournament.Comparer(runs, args.systems, effort, args.device)
    found = []
    for cell in cells(runs, args.only, args.settings, args.levels, args.device):
        found.append(comparer.compare(cell))
        console.print(report.cell_table(found[-1]))
    console.print(report.totals_table(found))
    for line in report.verdicts(found):
        console.print(line, highlight=False)
    about = document.facts(given, runs.commits, args.device)
    summary = args.results.with_suffix(".json")
    document.write_json(found, about, summary)
    console.print(f"written: {summary}")
    if args.write_docs:
        console.print(f"written: {document.write(found, about, args.docs)}")
    return 0


def check(runs: Runs, args: argparse.Namespace, console: Console) -> int:
    verdicts = verify.verify(runs, args.only[0], args.settings[0], args.systems, args.device)
    for name, verdict in verdicts.items():
        console.print(f"{name:28} {verdict}", markup=False)
    return 0 if all(verdict.startswith("ok") for verdict in verdicts.values()) else 1


def dissect(runs: Runs, args: argparse.Namespace, console: Console) -> int:
    from bench.comparison import step_breakdown

    model, setting, level = args.profile.split(":")
    (cell,) = cells(runs, (model,), (setting,), (level,), args.device)
    for table in step_breakdown.profile(runs, cell, tuple(system.name for system in args.systems), args.device):
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

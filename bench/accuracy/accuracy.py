"""Predicted beside measured: step time and peak memory of many models, plans and batch sizes on two ranks.

    python -m bench accuracy [--only NAME ...] [--quick] [--json FILE] [--write docs/accuracy.md]

Models: the paper's three families scaled down (narrow and deep, wide and shallow, inconsistent widths) and the zoo of
architectures of the tests. Each is trained by ``Trainer(strategy=OSDPStrategy(...))`` under all-dp, all-zdp2, all-zdp
and a searched plan whose memory limit lies between the peaks of all-dp and all-zdp, at two batch sizes that were not
profiled. Every case has processes of its own, forked from one that has imported the libraries and nothing more. They
plan first, with measurements of this machine that the first case of a model left in a cache, and train then. On CUDA
devices the same command counts with CUDA's own counters.

All that is done in several rounds, minutes apart, each with measurements of its own: what else a machine does makes it
faster or slower for seconds and for minutes. A case of which rounds are off by so different amounts that the standard
error of their mean is above 5 % (two rounds: 10 % apart) is run once more, in five rounds at the most, however far they
are off.

Time: in each round the median over the steps after the first ones; shown is the round that is off by the median, the
mean of two where they are even in number. Memory: the largest peak of a step on any rank, above what the process took
before the model (the plan's ``overhead_bytes`` without its allowance for the first steps), in the round where it was
predicted worst.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import platform
import signal
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, before any of them loads torch

from bench.accuracy.cases import OPTIONS, SUBJECTS, Case, Order, work
from bench.accuracy.statistics import Round, middle, off, unsteady
from tests.support.ports import free_port

PLANS = ("dp", "zdp2", "zdp", "searched")
ENDS = ("dp", "zdp")
"""The searched plan's memory limit lies in the middle between their peaks."""

MIB = 1 << 20

TIME_TOLERANCE, MEMORY_TOLERANCE = 0.10, 0.05

TIMEOUT_S = 600
"""Of one case."""


# -- running -----------------------------------------------------------------------------------------------------------


@functools.cache
def forkserver() -> multiprocessing.context.ForkServerContext:
    """Processes are forked from one that has imported ``cases``. Python 3.11 starts it with a ``sys.path`` of its own,
    and says nothing where it finds nothing there."""
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.accuracy.cases"])
    return context


def run_case(order: Order) -> Case:
    """One case in processes of its own.

    Raises:
        SystemExit: a rank failed; its log is the message.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: no rank is left behind
    context = forkserver()
    ranks = [context.Process(target=work, args=(rank, order)) for rank in range(order.ranks)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(TIMEOUT_S)
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.exitcode for rank in ranks):
        logs = [(Path(order.folder) / f"rank{rank}.log").read_text() for rank in range(order.ranks)]
        raise SystemExit(f"{order} failed:\n" + "\n".join(logs))
    return Case(**json.loads((Path(order.folder) / "case.json").read_text()))


Cases = dict[tuple[int, str], Case]
"""By batch size and plan."""


def run_model(args: argparse.Namespace, model: str, earlier: Iterable[Case]) -> list[Case]:
    """All plans and batch sizes of one model, over all rounds, ``earlier`` ones among them."""
    sizes = (SUBJECTS | OPTIONS)[model].batch_sizes
    wanted = [(size, plan) for size in (sizes[:1] if args.quick else sizes) for plan in args.plans]
    cases = {(case.batch_size, case.plan): case for case in earlier}
    for _ in range(args.rounds):
        run_round(args, model, wanted, cases)
    while not args.quick and (more := [key for key, case in cases.items() if unsteady(rounds_of(case))]):
        run_round(args, model, more, cases)
    return list(cases.values())


def run_round(args: argparse.Namespace, model: str, wanted: Iterable[tuple[int, str]], cases: Cases) -> None:
    """Adds a round of ``wanted`` to ``cases``; the first one measures, the others find that in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        for size, plan in wanted:
            limit = 1 << 40
            if plan == "searched":
                limit = sum(cases[size, mode].predicted_bytes + cases[size, mode].baseline_bytes for mode in ENDS) // 2
            order = Order(model, plan, size, limit, folder, args.ranks, free_port(), args.quick)
            case = run_case(order)
            cases[size, plan] = joined(cases[size, plan], case) if (size, plan) in cases else case


def joined(earlier: Case, new: Case) -> Case:
    """One case, of the rounds of both."""
    worst = max(earlier, new, key=lambda case: abs(case.memory_error))
    rounds = (*rounds_of(earlier), *rounds_of(new))
    predicted, measured = middle(rounds)
    return replace(worst, predicted_s=predicted, measured_s=measured, rounds_s=rounds)


def rounds_of(case: Case) -> Sequence[Round]:
    return case.rounds_s or ((case.predicted_s, case.measured_s),)


# -- the table ---------------------------------------------------------------------------------------------------------

HEAD = ("model", "plan", "batch", "predicted", "measured", "error", "predicted", "measured", "error")
TIMES = slice(3, 6)
"""Its columns of times."""


def row(case: Case) -> tuple[str, ...]:
    return (
        case.model,
        case.plan,
        str(case.batch_size),
        f"{case.predicted_s * 1e3:.0f} ms",
        f"{case.measured_s * 1e3:.0f} ms",
        f"{case.time_error:+.1%}",
        f"{case.predicted_bytes / MIB:.0f} MiB",
        f"{case.measured_bytes / MIB:.0f} MiB",
        f"{case.memory_error:+.1%}",
    )


def summary(cases: Sequence[Case]) -> str:
    """The verdict: time, then memory."""
    times = [abs(case.time_error) for case in cases]
    within = sum(error <= TIME_TOLERANCE for error in times) / len(times)
    return (
        f"{len(cases)} cases. Step time: median error {statistics.median(times):.1%}, {within:.0%} within "
        f"{TIME_TOLERANCE:.0%}, worst {max(times):.1%}. {memory_summary(cases)}"
    )


def memory_summary(cases: Sequence[Case]) -> str:
    sizes = [case.memory_error for case in cases]
    near = sum(abs(error) <= MEMORY_TOLERANCE for error in sizes)
    return (
        f"Peak memory: {near} of {len(cases)} within {MEMORY_TOLERANCE:.0%}, worst over {max(0.0, *sizes):.1%}, "
        f"worst under {max(0.0, *(-error for error in sizes)):.1%}"
    )


def markdown(cases: Sequence[Case]) -> str:
    """docs/accuracy.md."""
    import torch

    rounds = [rounds_of(case) for case in cases]
    single = statistics.median(abs(off(one)) for each in rounds for one in each)
    least, most = min(map(len, rounds)), max(map(len, rounds))
    times = f"{most} rounds" if least == most else f"{least} to {most} rounds"
    device = "CUDA: " + torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    lines = [
        "# Predicted and measured",
        "",
        "`python -m bench accuracy --write docs/accuracy.md` on "
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}: {_processor()}, {device}, 2 ranks, "
        f"torch {torch.__version__}. {'' if torch.cuda.is_available() else 'No GPU was at hand. '}Predictions were "
        "made before each run, from measurements at batch sizes 2 and 8. Time is an optimizer step's median, of "
        f"{times} minutes apart the one that is off by the median, or the mean of two (single rounds are off by "
        f"{single:.1%} in the median). Memory is the peak above what the process took before the model, of the worst "
        "round. Below 0: predicted too little.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- | --- |" + " ---: |" * (len(HEAD) - 2),
        *("| " + " | ".join(row(case)) + " |" for case in cases),
        "",
        summary(cases) + ".",
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_rows(rows: Iterable[Sequence[str]], timed: bool) -> None:
    for each in rows:
        shown = list(each)
        if not timed:
            del shown[TIMES]
        first, plan, batch, *numbers = shown
        print(f"{first:<18}{plan:<10}{batch:>5}" + "".join(f"{number:>11}" for number in numbers), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS | OPTIONS, default=list(SUBJECTS), metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="the memory alone: one batch size, few steps, nothing timed"
    )
    parser.add_argument("--json", type=Path, help="write the cases there, after each model")
    parser.add_argument("--write", type=Path, help="write the table there, as Markdown")
    parser.add_argument("--earlier", type=Path, help="what --json wrote: its rounds count as well")
    parser.add_argument("--rounds", type=int, default=2, help="0 with --earlier: those of what is unsteady alone")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    args = parser.parse_args()
    if "searched" in args.plans and args.plans[:3] != list(PLANS[:3]):
        parser.error("the searched plan's limit lies between dp and zdp: name all of dp zdp2 zdp before it")
    if args.quick and args.write:
        parser.error("--quick measures no times, which --write would show")
    earlier = [Case(**case) for case in json.loads(args.earlier.read_text())] if args.earlier else []
    cases = [case for case in earlier if case.model not in args.only]
    print_rows([HEAD], not args.quick)
    for model in args.only:
        found = run_model(args, model, [case for case in earlier if case.model == model])
        print_rows(map(row, found), not args.quick)
        cases += found
        cases.sort(key=lambda case: list(SUBJECTS | OPTIONS).index(case.model))
        if args.json:  # after each model: an hour's work may be stopped
            args.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    print(memory_summary(cases) if args.quick else summary(cases))
    if args.write:
        args.write.write_text(markdown(cases))


if __name__ == "__main__":
    main()

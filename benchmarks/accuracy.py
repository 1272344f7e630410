"""Predicted beside measured: step time and peak memory of many models, plans and batch sizes on two ranks.

    python benchmarks/accuracy.py [--only NAME ...] [--quick] [--json FILE] [--write docs/accuracy.md]

Models: the paper's three families scaled down (narrow and deep, wide and shallow, inconsistent widths) and the zoo of
architectures of the tests. Each is trained by ``Trainer(strategy=OSDPStrategy(...))`` under all-dp, all-zdp2, all-zdp
and a searched plan whose memory limit lies between the peaks of all-dp and all-zdp, at two batch sizes that were not
profiled. Every case has processes of its own, forked from one that has imported the libraries and nothing more. They
plan first, with measurements of this machine that the first case of a model left in a cache, and train then. Plans of
one batch size take turns with their rehearsals and with training: each is spread over some minutes, since what else a
machine does makes it faster or slower for seconds. On CUDA devices the same command counts with CUDA's own counters.

Time: median over the steps after the first ones. Memory: the largest peak of a step on any rank, above what the
process took before the model (the plan's ``overhead_bytes`` without its allowance for the first steps).
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, before any of them loads torch
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import OPTIONS, SUBJECTS, Case, Order, work

from tests.ports import free_port

PLANS = ("dp", "zdp2", "zdp", "searched")
MIB = 1 << 20

TIME_TOLERANCE, MEMORY_TOLERANCE = 0.10, 0.05

TIMEOUT_S = 600
"""Of one case."""


Said = TypeVar("Said")


# -- running -----------------------------------------------------------------------------------------------------------


class Running:
    """A case in processes of its own, which work when they are given a turn. To be closed."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, order: Order) -> None:
        self._order = order
        self._pipe, theirs = context.Pipe()
        pipes = [theirs] + [None] * (order.ranks - 1)
        self._ranks = [context.Process(target=work, args=(rank, order, pipe)) for rank, pipe in enumerate(pipes)]
        self._theirs = theirs

    def turn(self) -> Any:
        """What the case says at the end of its turn (``work``).

        Raises:
            SystemExit: a rank failed, or takes too long; the logs are the message.
        """
        try:
            if self._theirs.closed:
                self._pipe.send("go on")
            else:
                for rank in self._ranks:
                    rank.start()
                self._theirs.close()
            if self._pipe.poll(TIMEOUT_S):
                return self._pipe.recv()
        except (EOFError, OSError):
            pass
        logs = [
            self._order.log(rank).read_text() for rank in range(self._order.ranks) if self._order.log(rank).exists()
        ]
        raise SystemExit(f"{self._order} failed:\n" + "\n".join(logs))

    def close(self) -> None:
        """Ends what still runs."""
        for rank in self._ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def turns_until(kind: type[Said], running: Mapping[str, Running]) -> dict[str, Said]:
    """Turns for all of them, round by round, until each has said something of that kind."""
    said: dict[str, Said] = {}
    while len(said) < len(running):
        for name, each in running.items():
            if name not in said and isinstance(word := each.turn(), kind):
                said[name] = word
    return said


def run_case(context: multiprocessing.context.ForkServerContext, order: Order) -> Case:
    """One case by itself.

    Raises:
        SystemExit: a rank failed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: no rank is left behind
    with closing(Running(context, order)) as running:
        return turns_until(Case, {order.plan: running})[order.plan]


def run_together(args: argparse.Namespace, order: Order) -> list[Case]:
    """All plans of one model at one batch size, in turns. ``order`` is for the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cases"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as in run_case
    with ExitStack() as stack:

        def started(plan: str, limit_bytes: int) -> Running:
            own = replace(order, plan=plan, limit_bytes=limit_bytes, port=free_port())
            return stack.enter_context(closing(Running(context, own)))

        running = {plan: started(plan, order.limit_bytes) for plan in args.plans if plan != "searched"}
        first = dict([next(iter(running.items()))])
        peaks = turns_until(int, first)  # measures what the others find in the cache
        peaks |= turns_until(int, {plan: each for plan, each in running.items() if plan not in first})
        if "searched" in args.plans:
            running["searched"] = started("searched", (peaks["dp"] + peaks["zdp"]) // 2)
            turns_until(int, {"searched": running["searched"]})
        return list(turns_until(Case, running).values())


def run_model(args: argparse.Namespace, model: str, show: Callable[[Case], None]) -> list[Case]:
    """All plans and batch sizes of one model; the first case measures, the others find that in the cache."""
    cases = []
    sizes = (SUBJECTS | OPTIONS)[model].batch_sizes
    with tempfile.TemporaryDirectory() as folder:
        for batch_size in sizes[:1] if args.quick else sizes:
            order = Order(model, args.plans[0], batch_size, 1 << 40, folder, args.ranks, 0, args.quick)
            for case in sorted(run_together(args, order), key=lambda case: args.plans.index(case.plan)):
                cases.append(case)
                show(case)
    return cases


# -- the table ---------------------------------------------------------------------------------------------------------

HEAD = ("model", "plan", "batch", "predicted", "measured", "error", "predicted", "measured", "error")


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
    times, sizes = [abs(case.time_error) for case in cases], [case.memory_error for case in cases]
    within = sum(error <= TIME_TOLERANCE for error in times) / len(times)
    near = sum(abs(error) <= MEMORY_TOLERANCE for error in sizes)
    return (
        f"{len(cases)} cases. Step time: median error {statistics.median(times):.1%}, {within:.0%} within "
        f"{TIME_TOLERANCE:.0%}, worst {max(times):.1%}. Peak memory: {near} within {MEMORY_TOLERANCE:.0%}, worst over "
        f"{max(0.0, *sizes):.1%}, worst under {max(0.0, *(-error for error in sizes)):.1%}"
    )


def markdown(cases: Sequence[Case]) -> str:
    """docs/accuracy.md."""
    import torch

    device = "CUDA: " + torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    lines = [
        "# Predicted and measured",
        "",
        f"`make accuracy` on {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}: {_processor()}, {device}, 2 ranks, "
        f"torch {torch.__version__}. {'' if torch.cuda.is_available() else 'No GPU was at hand. '}Predictions were "
        "made before each run, from measurements at batch sizes 2 and 8. Time is an optimizer step's median, memory "
        "the peak above what the process took before the model. Below 0: predicted too little.",
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


def print_rows(rows: Iterable[Sequence[str]]) -> None:
    for each in rows:
        first, plan, batch, *numbers = each
        print(f"{first:<18}{plan:<10}{batch:>5}" + "".join(f"{number:>11}" for number in numbers), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS | OPTIONS, default=list(SUBJECTS), metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="the memory alone: one batch size, few steps, nothing timed"
    )
    parser.add_argument("--json", type=Path, help="write the cases there, after each model")
    parser.add_argument("--write", type=Path, help="write the table there, as Markdown")
    parser.add_argument("--earlier", type=Path, help="what --json wrote: of the models that are not run now")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    args = parser.parse_args()
    if "searched" in args.plans and args.plans[:3] != list(PLANS[:3]):
        parser.error("the searched plan's limit lies between dp and zdp: name all of dp zdp2 zdp before it")
    earlier = [Case(**case) for case in json.loads(args.earlier.read_text())] if args.earlier else []
    cases = [case for case in earlier if case.model not in args.only]
    print_rows([HEAD])
    for model in args.only:
        cases += run_model(args, model, lambda case: print_rows([row(case)]))
        cases.sort(key=lambda case: list(SUBJECTS | OPTIONS).index(case.model))
        if args.json:  # after each model: an hour's work may be stopped
            args.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    print(summary(cases))
    if args.write:
        args.write.write_text(markdown(cases))


if __name__ == "__main__":
    main()

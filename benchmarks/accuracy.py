"""Predicted beside measured: step time and peak memory of many models, plans and batch sizes on two ranks.

    python benchmarks/accuracy.py [--only NAME ...] [--quick] [--json FILE] [--write docs/accuracy.md]

Models: the paper's three families scaled down (narrow and deep, wide and shallow, inconsistent widths) and the zoo of
architectures of the tests. Each is trained by ``Trainer(strategy=OSDPStrategy(...))`` under all-dp, all-zdp2, all-zdp
and a searched plan whose memory limit lies between the peaks of all-dp and all-zdp, at two batch sizes that were not
profiled. Every case has processes of its own, which plan first, with measurements of this machine that the first case
of a model left in a cache, and train then. On CUDA devices the same command counts with CUDA's own counters.

Time: median over the steps after the first ones. Memory: the largest peak of a step on any rank, above what the
process took before the model (the plan's ``overhead_bytes`` without its allowance for the first steps).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLANS = ("dp", "zdp2", "zdp", "searched")
STEPS_S, FEWEST_STEPS, MOST_STEPS, QUICK_STEPS = 5.0, 9, 30, 5
MIB = 1 << 20

TIME_TOLERANCE, MEMORY_TOLERANCE, UNDER_TOLERANCE = 0.10, 0.05, 0.03


@dataclass(frozen=True)
class Subject:
    """A model large enough for a step of 0.2 to 1.5 s, and the batch sizes to train it at; 2 and 8 are profiled."""

    make: str
    sizes: dict[str, Any]
    batch_sizes: tuple[int, int] = (3, 6)
    optimizer: str = "AdamW"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


SUBJECTS = {
    "narrow and deep": Subject("stack", {"widths": (256,) * 16, "vocabulary": 2048, "length": 32}),
    "wide and shallow": Subject("stack", {"widths": (1024,) * 3, "vocabulary": 2048, "length": 32}),
    "inconsistent": Subject(
        "stack",
        {"widths": (192,) * 3 + (384,) * 3 + (768,) * 3 + (1024,), "vocabulary": 2048, "length": 32},
    ),
    "gpt2": Subject("gpt2", {"width": 384, "layers": 6, "vocabulary": 8192, "length": 64}),
    "llama": Subject("llama", {"width": 512, "layers": 6, "vocabulary": 8192, "length": 64}),
    "bert": Subject("bert", {"width": 384, "layers": 6, "vocabulary": 8192, "length": 64}),
    "t5": Subject("t5", {"width": 384, "layers": 4, "vocabulary": 8192, "length": 48}),
    "vit": Subject("vit", {"width": 384, "layers": 8, "size": 64, "patch": 8}),
    "swin": Subject("swin", {"width": 96, "depths": (2, 2, 4), "size": 64, "patch": 2, "window": 8}),
    "mixtral": Subject("mixtral", {"width": 256, "layers": 4, "experts": 8, "vocabulary": 8192, "length": 48}),
    "resnet": Subject("resnet", {"width": 64, "stages": 4, "size": 32}),
    "encoder": Subject("encoder", {"width": 512, "layers": 6, "vocabulary": 8192, "length": 64}),
    "lstm": Subject("lstm", {"width": 768, "layers": 3, "vocabulary": 8192, "length": 32}),
    "lora": Subject("lora", {"width": 768, "layers": 6, "rank": 16, "vocabulary": 8192, "length": 48}),
    "routed": Subject("routed", {"width": 768, "layers": 4, "experts": 4, "vocabulary": 8192, "length": 32}),
}

_BLOCKS = {"widths": (512,) * 6, "vocabulary": 4096, "length": 32}

OPTIONS = {
    "SGD": Subject("stack", _BLOCKS, optimizer="SGD"),
    "momentum": Subject("stack", _BLOCKS, optimizer="SGD", optimizer_options={"momentum": 0.9}),
    "Adam": Subject("stack", _BLOCKS, optimizer="Adam"),
    "Adafactor": Subject("stack", _BLOCKS, optimizer="Adafactor"),
    "foreach": Subject("stack", _BLOCKS, optimizer_options={"foreach": True}),
    "fused": Subject("stack", _BLOCKS, optimizer_options={"fused": True}),
    "accumulation": Subject("stack", _BLOCKS, trainer={"accumulate_grad_batches": 2}),
    "clipping": Subject("stack", _BLOCKS, trainer={"gradient_clip_val": 0.1}),
    "bf16-mixed": Subject("stack", _BLOCKS, trainer={"precision": "bf16-mixed"}),
}
"""Ways to train one model. For the memory above all: not part of the whole table."""

EVERYTHING = SUBJECTS | OPTIONS


@dataclass(frozen=True)
class Case:
    """What one run predicted and measured."""

    model: str
    plan: str
    batch_size: int
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    """Above the process's baseline, as ``measured_bytes``."""
    measured_bytes: int
    baseline_bytes: int
    where: str

    @property
    def time_error(self) -> float:
        """Relative; above 0: predicted too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Relative; below 0: predicted too little."""
        return self.predicted_bytes / self.measured_bytes - 1


# -- one rank ----------------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Plans, trains, and on the first rank writes what came out."""
    import torch
    import torch.distributed as dist

    from lightning_osdp import OSDPStrategy, planner
    from lightning_osdp.profiling import memory

    planner.remember = lambda *_: None  # each case is predicted from measurements alone, not from the cases before it
    if args.plan in ("dp", "zdp2", "zdp"):
        only(args.plan)
    hardware = guessed(args.ranks) if args.quick else None
    strategy = OSDPStrategy(batch_size=args.batch_size, memory_limit=args.limit, cache=args.folder, cluster=hardware)
    train(strategy, args)
    plan, step = strategy.execution_plan, strategy.measured
    assert plan is not None
    assert step is not None
    measured = torch.tensor(
        [step.step_time_s, step.peak_memory_bytes], dtype=torch.float64, device=strategy.root_device
    )
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        allowance = memory.FIRST_STEP_BYTES.get(strategy.root_device.type, 0)
        baseline = plan.predicted.overhead_bytes - allowance
        assert plan.peak is not None
        case = Case(
            args.model,
            args.plan,
            args.batch_size,
            predicted_s=plan.predicted.step_time_s,
            measured_s=float(measured[0]),
            predicted_bytes=plan.predicted.peak_memory_bytes - baseline,
            # On CUDA the overhead is room for the caching allocator, which its own counter does not count.
            measured_bytes=int(measured[1]) - (baseline if strategy.root_device.type == "cpu" else 0),
            baseline_bytes=baseline,
            where=plan.peak.where,
        )
        (Path(args.folder) / "case.json").write_text(json.dumps(asdict(case)))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def only(mode: str) -> None:
    """Leaves the planner one mode for each operator: ``mode``, or what comes nearest to it."""
    from lightning_osdp.planning import schedule
    from lightning_osdp.planning.choices import Mode, legal_modes

    def nearest(operator: Any) -> tuple[Mode, ...]:
        legal = legal_modes(operator)
        return (Mode(mode),) if Mode(mode) in legal else (legal[-1],)

    schedule.legal_modes = nearest  # type: ignore[attr-defined]


def guessed(ranks: int) -> Any:
    """Hardware that is not measured: its times mean nothing, but the memory along the step does not depend on them."""
    from lightning_osdp import collectives, planner
    from lightning_osdp.planning.cluster import Cluster, CollectiveFit, Link

    measure = planner.compute.measure
    planner.compute.measure = lambda *args, **kwargs: measure(*args, **kwargs, time_budget_s=0.0)
    fit = CollectiveFit(latency_s=1e-3, s_per_byte=1e-9)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    copy = collectives.reduce_copy("gloo", ranks)
    return Cluster(devices_per_node=ranks, device="cpu", backend="gloo", link=link, reduce_copy=copy)


def train(strategy: Any, args: argparse.Namespace) -> None:
    """Some steps through the Trainer."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    subject = EVERYTHING[args.model]
    from tests.zoo import ZOO

    torch.manual_seed(1)
    module = ZOO[subject.make](**subject.sizes)
    made = getattr(torch.optim, subject.optimizer)
    module.optimizer = lambda module: made(
        [p for p in module.parameters() if p.requires_grad], lr=1e-4, **subject.optimizer_options
    )

    def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    whole = module.batch(64)
    rows = [{key: value[index % 64] for key, value in whole.items()} for index in range(MOST_STEPS * 64)]
    trainer = L.Trainer(
        accelerator="auto",
        devices=args.ranks,
        strategy=strategy,
        max_steps=MOST_STEPS,
        callbacks=[enough(args.quick)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **subject.trainer,
    )
    trainer.fit(module, DataLoader(rows, batch_size=4, collate_fn=collated))


def enough(quick: bool) -> Any:
    """A callback that ends training after some steps, the same number on every rank."""
    import lightning as L
    import torch
    import torch.distributed as dist

    class Enough(L.Callback):
        """Counts on the first rank's clock."""

        def on_train_start(self, *_: Any) -> None:
            self.start: float | None = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps = trainer.global_step
            if steps == 3:
                self.start = time.perf_counter()
            if quick:
                trainer.should_stop = steps >= QUICK_STEPS
            elif steps == 5 and self.start is not None:
                each = torch.tensor((time.perf_counter() - self.start) / 2, device=trainer.strategy.root_device)
                dist.broadcast(each, 0)
                self.steps = max(FEWEST_STEPS, min(MOST_STEPS, round(STEPS_S / float(each)))) + 3
            elif steps > 5:
                trainer.should_stop = steps >= self.steps

    return Enough()


# -- all ranks ---------------------------------------------------------------------------------------------------------


def run_case(args: argparse.Namespace, model: str, plan: str, batch_size: int, limit: int, folder: str) -> Case:
    """One case in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"plan": plan, "model": model, "batch-size": batch_size, "limit": limit, "folder": folder}
    command = [sys.executable, __file__, "--worker", "--ranks", str(args.ranks)]
    command += [text for name, value in own.items() for text in (f"--{name}", str(value))]
    command += ["--quick"] if args.quick else []
    names = {"WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    names |= {"LOCAL_WORLD_SIZE": args.ranks, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "accuracy"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ
            | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
            | {name: str(value) for name, value in (names | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{model}, {plan}, batch size {batch_size} failed:\n" + "\n".join(errors))
    return Case(**json.loads((Path(folder) / "case.json").read_text()))


def run_model(args: argparse.Namespace, model: str, show: Callable[[Case], None]) -> list[Case]:
    """All plans and batch sizes of one model; the first case measures, the others find that in the cache."""
    cases = []
    sizes = EVERYTHING[model].batch_sizes
    with tempfile.TemporaryDirectory() as folder:
        for batch_size in sizes[:1] if args.quick else sizes:
            peaks = {}
            for plan in PLANS:
                limit = (peaks["dp"] + peaks["zdp"]) // 2 if plan == "searched" else 1 << 40
                case = run_case(args, model, plan, batch_size, limit, folder)
                peaks[plan] = case.predicted_bytes + case.baseline_bytes
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
    parser.add_argument("--only", nargs="+", choices=EVERYTHING, default=list(SUBJECTS), metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="the memory alone: one batch size, few steps, nothing timed"
    )
    parser.add_argument("--json", type=Path, help="write the cases there")
    parser.add_argument("--write", type=Path, help="write the table there, as Markdown")
    parser.add_argument("--ranks", type=int, default=2)
    for name in ("model", "plan", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("batch-size", "limit"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    print_rows([HEAD])
    cases = [case for model in args.only for case in run_model(args, model, lambda case: print_rows([row(case)]))]
    print(summary(cases))
    if args.json:
        args.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    if args.write:
        args.write.write_text(markdown(cases))


if __name__ == "__main__":
    main()

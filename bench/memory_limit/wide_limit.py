"""A wide, shallow model trains under OSDP within a hard memory limit that kills FairScale FSDP at batch size 1.

    sudo python -m bench wide-limit [--limit 1390M] [--layers 2] [--width 2048] [--tokens 128]

Each of two ranks runs in a memory cgroup; over its limit the kernel kills it (see emulated_cluster.py). Four runs of
the same model: FairScale FSDP around each block without a limit, which shows that it works and what it takes; the same
under the limit; the same with each block recomputed as well; and OSDP, which plans by itself for that limit. Which
operators to split and how finely is the search's choice; recomputing is asked for (--recompute auto leaves it to the
search as well, which needs it only for long samples). Both sides get glibc's setting that hands freed tensors back to
the system. Needs root and cgroup v1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.multinode import emulated_cluster

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

RANKS, STEPS = 2, 4
MIB = 1 << 20
TIMEOUT_S = 900.0
DONE_FILE = "steps"


def main() -> int:
    args = parsed()
    if args.system:
        worker(args)
        return 0
    limit = emulated_cluster.parse_bytes(args.limit)
    block, recomputed = "fairscale-block", "fairscale-block+ckpt"
    free = run(args, "FairScale FSDP per block, no limit", block, None)
    runs = {
        name: run(args, name, system, limit)
        for name, system in (
            ("FairScale FSDP per block", block),
            ("FairScale FSDP per block, recomputed", recomputed),
            ("OSDP", "osdp"),
        )
    }
    *others, ours = runs.values()
    problems = []
    if any(outcome.status for outcome in free):
        problems.append("FairScale FSDP does not train without a limit either: its death says nothing")
    if not all(any(outcome.out_of_memory for outcome in outcomes) for outcomes in others):
        problems.append("FairScale FSDP fits as well: lower --limit")
    if any(outcome.status for outcome in ours):
        problems.append("OSDP did not survive its own limit")
    print("\n".join(f"FAILED: {problem}" for problem in problems) or "only OSDP trains within the limit")
    return 1 if problems else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1390M")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128, help="of the one sample of each rank")
    parser.add_argument("--recompute", choices=("all", "auto"), default="all", help="blocks, under OSDP")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, name: str, system: str, limit: int | None) -> list[emulated_cluster.Outcome]:
    """Trains on both ranks under the limit and prints what became of them."""
    with tempfile.TemporaryDirectory() as folder:
        model = ["--layers", str(args.layers), "--width", str(args.width), "--tokens", str(args.tokens)]
        model += ["--recompute", args.recompute]
        own = ["--system", system, "--limit", args.limit, "--folder", folder]
        cluster = emulated_cluster.Cluster(f"wide{os.getpid()}", 1, RANKS, None, limit)
        outcomes = emulated_cluster.run(
            cluster, [sys.executable, "-m", "bench.memory_limit.wide_limit", *model, *own], TIMEOUT_S
        )
        done = Path(folder, DONE_FILE)
        steps = len(done.read_text()) if done.exists() else 0
        if system == "osdp":
            show_plan(Path(folder))
    ends = ", ".join(
        f"rank {rank} {'KILLED, out of memory' if one.out_of_memory else f'ended with {one.status}'} "
        f"(peak {one.peak_bytes / MIB:.0f} MiB)"
        for rank, one in enumerate(outcomes)
    )
    print(f"{name}: {steps} of {STEPS} steps; {ends}", flush=True)
    return outcomes


def show_plan(folder: Path) -> None:
    """What the planner chose, if it came that far."""
    from lightning_osdp.planning.spec.plan import ExecutionPlan
    from lightning_osdp.strategy.osdp import PLAN_FILE

    file = folder / PLAN_FILE
    if not file.exists():
        return
    plan = ExecutionPlan.from_json(file.read_text())
    sharded = [op for op in plan.operators if any(mode != "dp" for mode in op.slices)]
    split = [f"{op.name} in {len(op.slices)}" for op in sharded if len(op.slices) > 1]
    print(
        f"planned: batch size {plan.batch_size}, {len(sharded)} of {len(plan.operators)} operators sharded, "
        f"{len(split)} split ({', '.join(split) or 'none'}), recomputed: {', '.join(plan.recomputed) or 'none'}, "
        f"predicted peak {plan.predicted.peak_memory_bytes / MIB:.0f} MiB of {plan.memory_limit_bytes / MIB:.0f} MiB",
        flush=True,
    )


# -- a rank ------------------------------------------------------------------------------------------------------------


def worker(args: argparse.Namespace) -> None:
    """What a rank runs."""
    import torch

    from bench.comparison.models import Decoder, Task

    torch.set_num_threads(1)
    torch.manual_seed(1)
    task = Task(Decoder((args.width,) * args.layers, args.tokens))
    (train_with_osdp if args.system == "osdp" else train_with_fairscale)(args, task)
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def loader(args: argparse.Namespace) -> Any:
    from torch.utils.data import DataLoader, Subset

    from bench.comparison.data import Text

    return DataLoader(Subset(Text(args.tokens), range(STEPS * RANKS)), batch_size=1)


def step_done(args: argparse.Namespace) -> None:
    """Tells the parent, which may see this rank killed."""
    if os.environ["RANK"] == "0":
        with Path(args.folder, DONE_FILE).open("a") as file:
            file.write(".")


def train_with_fairscale(args: argparse.Namespace, task: Any) -> None:
    """FairScale as its documentation has it: a unit for each block and one around the rest, in a plain loop."""
    import torch
    import torch.distributed as dist

    from bench.comparison import fairscale_loop
    from bench.comparison.jobs import Job
    from bench.comparison.models import adamw, next_byte_loss
    from bench.comparison.worker import fix_allocator

    fix_allocator()
    fairscale_loop.show_no_cuda()
    dist.init_process_group("gloo")
    job = Job("final", "", "2-loopback", args.system, sizes=(1,))
    root = fairscale_loop.wrapped(task, job, torch.device("cpu"))
    optimizer = adamw(root)
    batches = list(loader(args))
    for tokens in batches[dist.get_rank() :: RANKS]:
        optimizer.zero_grad()
        next_byte_loss(root(tokens[:, :-1]), tokens).backward()
        optimizer.step()
        step_done(args)
    dist.barrier()


def train_with_osdp(args: argparse.Namespace, task: Any) -> None:
    """Through the Trainer; all that is given is the limit."""
    import lightning as L

    from lightning_osdp import OSDPCallback, OSDPStrategy

    class Steps(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            step_done(args)

    recompute: Any = True if args.recompute == "all" else "auto"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=OSDPStrategy(memory_limit=emulated_cluster.parse_bytes(args.limit), max_batch_size=1, cache=""),
        max_steps=STEPS,
        callbacks=[OSDPCallback(activation_checkpointing=recompute, progress_bar=False), Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.folder,
    )
    trainer.fit(task, loader(args))
    trainer.strategy.barrier()


if __name__ == "__main__":
    sys.exit(main())

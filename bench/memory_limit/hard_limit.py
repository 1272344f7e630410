"""The limit holds: a plan made for a memory limit survives under it, all-dp at the same batch size is killed.

    sudo python -m bench hard-limit [--limit 1000M] [--layers 6] [--width 768]

Each rank runs in a memory cgroup whose hard limit is the limit that the plan was made for: the process, its libraries,
profiling and training all count (but for pages of library files that another process has read before; the plan counts
those too, as the process's own peak does). Over it the kernel kills the rank. First a run plans and trains under the
limit, then a run with every operator replicated and the same batch size. Needs root and cgroup v1 (see
emulated_cluster.py).
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
STEPS = 8
MIB = 1 << 20


def train(args: argparse.Namespace) -> None:
    """What each rank runs: the example's GPT, by a plan that is given or made for the limit."""
    import lightning as L

    from lightning_osdp import OSDPStrategy

    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import GPT, StandardLibrary

    L.seed_everything(1)
    settings: dict[str, Any] = {"plan": args.plan} if args.plan else {"memory_limit": args.limit, "max_batch_size": 16}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=OSDPStrategy(cache="", **settings),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=args.folder,
    )
    trainer.fit(GPT(args.layers, args.width, block_size=128), StandardLibrary(block_size=128))


def under_limit(args: argparse.Namespace, name: str, plan: str | None, folder: str) -> list[emulated_cluster.Outcome]:
    """Runs all ranks under the hard limit and prints what became of them."""
    own = ["--limit", args.limit, "--layers", str(args.layers), "--width", str(args.width), "--folder", folder]
    command = [sys.executable, "-m", "bench.memory_limit.hard_limit", "--worker", "--ranks", str(args.ranks), *own]
    cluster = emulated_cluster.Cluster(
        f"limit{os.getpid()}", 1, args.ranks, None, emulated_cluster.parse_bytes(args.limit)
    )
    outcomes = emulated_cluster.run(cluster, command + (["--plan", plan] if plan else []), timeout_s=300)
    ends = ", ".join(
        f"rank {i} {'KILLED, out of memory' if o.out_of_memory else f'ended with {o.status}'}, "
        f"peak {o.peak_bytes / MIB:.0f} MiB"
        for i, o in enumerate(outcomes)
    )
    print(f"{name}: {ends}", flush=True)
    return outcomes


def replicated(folder: str) -> str:
    """The plan that was made, with every operator replicated; returns its path."""
    from lightning_osdp.planning.spec.choices import Mode
    from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan

    plan = ExecutionPlan.from_json(Path(folder, "osdp_plan.json").read_text())
    sharded = sum(op.slices != (Mode.DP,) for op in plan.operators)
    print(
        f"planned: batch size {plan.batch_size}, {sharded} of {len(plan.operators)} operators sharded, predicted peak "
        f"{plan.predicted.peak_memory_bytes / MIB:.0f} MiB of {plan.memory_limit_bytes / MIB:.0f} MiB",
        flush=True,
    )
    operators = tuple(
        OperatorPlan(name=op.name, num_parameters=op.num_parameters, slices=(Mode.DP,)) for op in plan.operators
    )
    file = Path(folder) / "replicated.json"
    file.write_text(plan.model_copy(update={"operators": operators, "tensor_scopes": {}}).to_json())
    return str(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1000M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.limit = emulated_cluster.parse_bytes(args.limit)
        train(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        planned = under_limit(args, "OSDP's plan  ", None, folder)
        if any(outcome.status for outcome in planned):
            print("FAILED: the planned run did not survive its own limit")
            return 1
        everything = under_limit(args, "all replicated", replicated(folder), folder)
    killed = any(outcome.out_of_memory for outcome in everything)
    print("the limit holds" if killed else "FAILED: all replicated fits as well: lower --limit")
    return 0 if killed else 1


if __name__ == "__main__":
    sys.exit(main())

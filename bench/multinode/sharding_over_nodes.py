"""Sharding over nodes: what crosses the link between them, how long a step takes, and what was predicted.

    sudo python -m bench nodes [--layouts 2x2 4x1] [--rates 1gbit 10gbit] [--layers 4]

Nodes are network namespaces joined by links of limited rate (see emulated_cluster.py). In each setting, a first run
measures the hardware and searches a plan. Then four plans train the same GPT, each in processes of its own:

    world       every operator zdp over all ranks
    two-stage   the same with two-stage collectives
    node        every operator zdp inside its node, gradients averaged between nodes
    searched    what the search chose

One line for each: the median step time of the slowest rank, bytes that a node sent over its link in one step (from the
interface's counters), and the largest peak of a rank's resident memory, each beside its prediction. With nodes of one
rank, "two-stage" is "world" and "node" replicates. Needs root (see emulated_cluster).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.multinode import emulated_cluster

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

SKIPPED_STEPS = 3
"""Before anything is counted: buffers and connections are made in the first steps."""

BLOCK_SIZE = 32
MIB = 1 << 20
PLANS = ("world", "two-stage", "node", "searched")
COLUMNS = "{:>5} {:>7} {:<10} | {:>9} {:>9} {:>6} | {:>9} {:>9} {:>6} | {:>9} {:>9} {:>6}"
LINK_TOLERANCE = 0.05
CLOSE_TO_FASTEST = 0.03
GROUP_SPEED_UP = 1.5


# -- what each rank runs -----------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Trains the example's GPT, by a plan that is given or by one that is searched, and writes what it saw."""
    log = os.open(f"{args.folder}/rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    import lightning as L
    from train_gpt import GPT, StandardLibrary

    from lightning_osdp import OSDPStrategy
    from lightning_osdp.autotune import coordinator

    if not args.plan:
        patch.object(
            coordinator, "plan_or_fallback", partial(plan_and_compare, args.folder, coordinator.plan_or_fallback)
        ).start()
    L.seed_everything(1)
    settings: dict[str, Any] = {"plan": args.plan} if args.plan else {"memory_limit": args.limit}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.per_node,
        num_nodes=args.nodes,
        strategy=OSDPStrategy(batch_size=args.batch_size, cache=f"{args.folder}/cache", **settings),
        max_steps=SKIPPED_STEPS + args.steps if args.plan else 1,
        callbacks=[_counter(args)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=args.folder,
    )
    trainer.fit(GPT(args.layers, args.width, BLOCK_SIZE), StandardLibrary(BLOCK_SIZE))


def _counter(args: argparse.Namespace) -> Any:
    import lightning as L
    import torch.distributed as dist

    class Counter(L.Callback):
        """Counts from the end of the last skipped step on."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.sent_before = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index + 1 == SKIPPED_STEPS:
                dist.barrier()
                self.sent_before = _sent_bytes()
                self.ends = [time.perf_counter()]
            elif index + 1 > SKIPPED_STEPS:
                self.ends.append(time.perf_counter())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            dist.barrier()
            if len(self.ends) < 2:
                return
            steps = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
            found = {
                "step_time_s": statistics.median(steps),
                "sent_bytes": (_sent_bytes() - self.sent_before) / len(steps),
                "peak_bytes": _peak_bytes(),
            }
            Path(args.folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(found))

    return Counter()


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


# -- one setting -------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, setting: tuple[int, int, str], plan: str | None, folder: str) -> list[dict[str, Any]]:
    """Runs all ranks of a setting; returns what each wrote."""
    nodes, per_node, rate = setting
    own = {"nodes": nodes, "per-node": per_node, "folder": folder, "layers": args.layers, "width": args.width}
    own |= {"batch-size": args.batch_size, "steps": args.steps, "limit": args.limit} | ({"plan": plan} if plan else {})
    command = [
        sys.executable,
        "-m",
        "bench.multinode.sharding_over_nodes",
        "--worker",
        *(f"--{name}={value}" for name, value in own.items()),
    ]
    cluster = emulated_cluster.Cluster(f"mn{os.getpid()}", nodes, per_node, rate, None)
    outcomes = emulated_cluster.run(cluster, command, timeout_s=args.timeout)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.status]
    if failed:
        said = Path(folder, f"rank{failed[0]}.log").read_text()[-3000:]
        raise SystemExit(f"{said}\nFAILED: {emulated_cluster.report(outcomes, as_json=False)}")
    files = [Path(folder, f"rank{rank}.json") for rank in range(cluster.ranks)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def compare(args: argparse.Namespace, setting: tuple[int, int, str]) -> list[str]:
    """Prints a line for each plan; returns what missed its target."""
    from lightning_osdp.planning.spec.plan import ExecutionPlan

    nodes, per_node, rate = setting
    seconds: dict[str, float] = {}
    missed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(args.keep or temporary, f"{nodes}x{per_node}-{rate}"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not Path(folder, "searched.json").exists():
            run(args, setting, None, folder)
        for name in PLANS:
            file = Path(folder, f"{name}.json")
            plan = ExecutionPlan.from_json(file.read_text())
            ranks = run(args, setting, str(file), folder)
            seconds[name] = max(rank["step_time_s"] for rank in ranks)
            sent = max(rank["sent_bytes"] for rank in ranks)
            peak = max(rank["peak_bytes"] for rank in ranks)
            expected = link_bytes(args, plan)
            print(
                COLUMNS.format(
                    f"{nodes}x{per_node}",
                    rate,
                    name,
                    *_beside(plan.predicted.step_time_s * 1e3, seconds[name] * 1e3),
                    *_beside(expected / MIB, sent / MIB),
                    *_beside(plan.predicted.peak_memory_bytes / MIB, peak / MIB),
                ),
                flush=True,
            )
            if abs(sent / expected - 1) > LINK_TOLERANCE:
                missed.append(f"{setting}: {name} sent {sent / MIB:.1f} MiB, the model says {expected / MIB:.1f}")
    if seconds["searched"] > (1 + CLOSE_TO_FASTEST) * min(seconds.values()):
        missed.append(f"{setting}: the searched plan is not among the fastest")
    if rate == "1gbit" and per_node > 1 and seconds["world"] < GROUP_SPEED_UP * seconds["node"]:
        missed.append(f"{setting}: group sharding is {seconds['world'] / seconds['node']:.2f} times faster")
    return missed


def _beside(predicted: float, measured: float) -> tuple[str, str, str]:
    return f"{predicted:.1f}", f"{measured:.1f}", f"{100 * (predicted / measured - 1):+.0f} %"


# -- plans -------------------------------------------------------------------------------------------------------------


def plan_and_compare(folder: str, plan_for: Any, problem: Any, *args: Any) -> Any:
    """In place of ``plan_or_fallback``: keeps its plan and what that is compared with, each with its prediction."""
    from lightning_osdp.planning.search.plan_search import PlanSearch
    from lightning_osdp.planning.search.plan_selection import variant_of_plan
    from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope, legal_modes

    searched = plan_for(problem, *args)
    desk, sharded = PlanSearch(variant_of_plan(searched, problem)), ShardingChoice((Mode.ZDP,))
    uniform = {"world": sharded, "two-stage": sharded, "node": ShardingChoice()}
    if problem.cluster.is_hierarchical:
        uniform |= {
            "two-stage": sharded._replace(hierarchical=True),
            "node": sharded._replace(scope=ShardingScope.NODE),
        }
    for name, choice in uniform.items():
        choices = tuple(choice if Mode.ZDP in legal_modes(op) else ShardingChoice() for op in problem.model.operators)
        cost = desk.evaluate_choices(choices, searched.batch_size, searched.accumulate_grad_batches)
        Path(folder, f"{name}.json").write_text(_with(searched, choices, cost).to_json())
    Path(folder, "searched.json").write_text(searched.to_json())
    return searched


def _with(plan: Any, choices: Sequence[Any], cost: Any) -> Any:
    """``make_plan`` with other choices, nothing recomputed, and what that costs."""
    operators = tuple(
        op.model_copy(
            update={
                "slices": choice.slices,
                "unit": "",
                "split_dim": choice.split_dim,
                "sharding_group": choice.scope,
                "hierarchical": choice.hierarchical,
                "is_recomputed": False,
            }
        )
        for op, choice in zip(plan.operators, choices, strict=True)
    )
    times = {"compute_time_s": cost.compute_s, "communication_time_s": cost.communication_s}
    memory = {"peak_memory_bytes": cost.peak.total_bytes, "samples_per_s": cost.samples_per_s}
    predicted = plan.predicted.model_copy(update={"step_time_s": cost.step_time_s} | times | memory)
    return plan.model_copy(update={"operators": operators, "recomputed": (), "predicted": predicted, "blocks": ()})


def _large(model: Any, operator: Any) -> list[Any]:
    """The parameters that are sharded where the operator is."""
    from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS

    if operator.replicated_reason or not operator.name:
        return []
    parameters = model.get_submodule(operator.name).parameters()
    return [p for p in parameters if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]


def _all_of(plan: Any, choice: Any, model: Any) -> Any:
    """``make_plan`` with the same choice for every operator that may be sharded."""
    update = {
        "slices": choice.slices,
        "unit": "",
        "split_dim": None,
        "sharding_group": choice.scope,
        "hierarchical": choice.hierarchical,
    }
    operators = tuple(op.model_copy(update=update) if _large(model, op) else op for op in plan.operators)
    return plan.model_copy(update={"operators": operators, "recomputed": ()})


def link_bytes(args: argparse.Namespace, plan: Any) -> float:
    """Bytes that each node sends in one step, by the model."""
    from train_gpt import GPT

    from bench.multinode.link_bytes import all_reduce_link_bytes, step_link_bytes
    from lightning_osdp.planning.spec.choices import Mode

    model = GPT(args.layers, args.width, BLOCK_SIZE)
    cluster, replicated, total = plan.cluster, sum(p.numel() * 4 for p in model.parameters()), 0.0
    for operator in plan.operators:
        if all(mode == Mode.DP for mode in operator.slices):
            continue
        for parameter in _large(model, operator):
            size = parameter.numel() * 4
            replicated -= size
            for mode in operator.slices:
                part = size / len(operator.slices)
                total += step_link_bytes(cluster, mode, operator.sharding_group, operator.hierarchical, part)
    return total + all_reduce_link_bytes(cluster.ranks, cluster.nodes, replicated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["2x2", "4x1"], help="nodes x ranks of each")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of each node's link")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", default="3GiB", help="memory limit of a rank")
    parser.add_argument("--keep", help="folder to keep measurements and plans in, and to take them from")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, of each run")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for hidden, kind in (("--nodes", int), ("--per-node", int), ("--plan", str), ("--folder", str)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args)
        return 0
    print(
        COLUMNS.format("", "", "", "step, ms", "", "", "link, MiB", "", "", "peak, MiB", "", "")
        + "\n"
        + COLUMNS.format("nodes", "rate", "plan", *["predicted", "measured", "off"] * 3),
        flush=True,
    )
    missed = []
    for layout in args.layouts:
        nodes, per_node = map(int, layout.split("x"))
        for rate in args.rates:
            missed += compare(args, (nodes, per_node, rate))
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

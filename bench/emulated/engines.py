"""The same plans under our units and under ``fully_shard``: one process as rank 0 of emulated ranks.

    python -m bench engines [--model nd-quick] [--batch-size 8] [--precision bf16-mixed] [--rounds 3] [--write]

Plans: every operator a unit (zdp), every block a unit (zdp), and a mix of blocks that are replicated, sharded for good
and sharded anew. What is small (norms, biases) is in our buckets of replicated gradients, and in the root group of
``fully_shard``. Each figure is of a process of its own; the processes take turns, round by round; figures are
medians.

    step      seconds of a step, median
    exposed   of these, what is gone where links take no time
    host      what is left of that beyond the step of the plain module: Python, copies
    peak      bytes of the largest step beyond what the process had before the model
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

ENGINES, PLANS = ("units", "fully_shard"), ("operator", "block", "mixed")
PLAIN = "plain"
RANKS, WARM_UP, STEPS = 8, 3, 7
PAGE = Path("docs/engines.md")
TIMEOUT_S = 300.0
MIB = 1 << 20

Applied = tuple[Callable[[], None], Callable[[Any], None], Any]


def run_cell(order: dict[str, Any]) -> dict[str, Any]:
    """Train under one engine and plan, with links and without."""
    import torch
    import torch.distributed as dist

    from bench.comparison.models import build, next_byte_loss
    from bench.comparison.worker import fix_allocator
    from bench.emulated.links import scaled_cluster
    from bench.emulated.worker import Switch
    from lightning_osdp.backend import memory
    from lightning_osdp.emulation.links import EmulatedLinks
    from lightning_osdp.emulation.process_group import join
    from tests.support.sent_bytes import count_sent

    torch.set_num_threads(1)
    fix_allocator()
    device, switch = torch.device("cpu"), Switch()
    join(EmulatedLinks(scaled_cluster(RANKS, order["flops"])))
    before = memory.memory_in_use(device)
    task, is_mixed = build(order["model"]), order["precision"] == "bf16-mixed"

    def make_optimizer() -> Any:
        return torch.optim.AdamW(task.parameters(), lr=3e-4, foreach=False)

    begin, end, optimizer = _apply(order["engine"], order["plan"], task, is_mixed, make_optimizer)
    tokens = torch.randint(0, 256, (order["batch_size"], _tokens(order["model"]) + 1))
    autocast = is_mixed and order["engine"] != "fully_shard"

    def step() -> float:
        started = time.perf_counter()
        begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = next_byte_loss(task(tokens[:, :-1]), tokens)
        loss.backward()
        end(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    found: dict[str, Any] = {}
    with count_sent() as sent:
        for name, is_on in (("without_links_s", False), ("step_s", True)):
            switch.is_on = is_on
            for _ in range(WARM_UP):
                step()
            memory.reset_peak(device)
            counted = sent.copy()
            found[name] = statistics.median(step() for _ in range(STEPS))
            found["peak_bytes"] = memory.peak_memory(device) - before
            found |= {key: (sent[key] - counted[key]) / STEPS for key in ("calls", "bytes")}
    dist.destroy_process_group()
    return found


def _tokens(model: str) -> int:
    from bench.comparison.models import MODELS

    return MODELS[model].tokens


def _blocks(task: Any) -> list[str]:
    from bench.comparison.models import block_classes

    classes = tuple(block_classes(task))
    return [name for name, module in task.named_modules() if isinstance(module, classes)]


MIXED = ("dp", "zdp2", "zdp")


def _mode_of(plan: str, name: str, blocks: list[str]) -> tuple[str, str]:
    """(mode, the block whose unit it shares) of an operator."""
    block = next((block for block in blocks if name.startswith(f"{block}.")), "")
    if plan == "mixed":
        mode = MIXED[blocks.index(block) % 3] if block else "zdp"
        return mode, "" if mode == "dp" else block
    return "zdp", block if plan == "block" else ""


def _apply(engine: str, plan: str, task: Any, is_mixed: bool, make_optimizer: Callable[[], Any]) -> Applied:
    """Apply a plan; return what begins a step, what ends its backward, and the optimizer."""
    from torch import nn

    blocks = _blocks(task)
    operators = [name for name, module in task.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    modes = {name: _mode_of(plan, name, blocks) for name in operators}
    if engine == "units":
        return _apply_units(task, modes, is_mixed, make_optimizer())
    if engine == "fully_shard":
        _apply_fully_shard(task, modes, is_mixed)
    return lambda: None, lambda _: None, make_optimizer()


def _apply_units(task: Any, modes: dict[str, tuple[str, str]], is_mixed: bool, optimizer: Any) -> Applied:
    import torch
    from torch import nn

    from lightning_osdp.engine.fairscale.engine import FairScaleEngine
    from lightning_osdp.planning.spec.choices import Mode
    from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link
    from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan

    def operator(name: str, mode: str, unit: str) -> OperatorPlan:
        is_product = isinstance(task.get_submodule(name), nn.Linear)
        return OperatorPlan(
            name=name,
            slices=(Mode(mode),),
            unit=unit,
            num_parameters=0,
            compute_dtype="bfloat16" if is_mixed else "",
            gathers_in_backward=is_product,
        )

    fit = CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    cluster = Cluster(devices_per_node=RANKS, device="cpu", backend="emulated", link=link, prefetch_max_bytes=1 << 30)
    plan = ExecutionPlan.minimal((operator(name, *own) for name, own in modes.items()), cluster)
    engine = FairScaleEngine(torch.device("cpu"), broadcast=False)
    engine.apply(task, plan, [optimizer])
    task.engine_of_the_benchmark = [engine]  # it lives as long as the module

    def end(optimizer: Any) -> None:
        engine.before_optimizer_step(optimizer)
        engine.after_optimizer_step()

    return engine.before_forward, end, optimizer


def _apply_fully_shard(task: Any, modes: dict[str, tuple[str, str]], is_mixed: bool) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else None
    sharded = init_device_mesh("cpu", (RANKS,))
    replicated = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    own: dict[str, Any] = {"mp_policy": policy} if policy is not None else {}
    done: set[str] = set()
    for name, (mode, unit) in modes.items():
        target = unit or name
        if target not in done:
            done.add(target)
            mesh = replicated if mode == "dp" else sharded
            fully_shard(task.get_submodule(target), mesh=mesh, reshard_after_forward=mode == "zdp", **own)
    fully_shard(task, mesh=sharded, **own)


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table of all engines and plans, in Markdown."""
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    plain_s = medians[PLAIN]["without_links_s"]
    lines = [
        "| plan | engine | step | exposed | host | peak | collectives | sent |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for plan in PLANS:
        for engine in ENGINES:
            own = medians.get(f"{engine} {plan}")
            if own is None:
                lines.append(f"| {plan} | {engine} | - | - | - | - | - | - |")
                continue
            exposed_s, host_s = own["step_s"] - own["without_links_s"], own["without_links_s"] - plain_s
            lines.append(
                f"| {plan} | {engine} "
                f"| {own['step_s'] * 1e3:.0f} ms | {exposed_s * 1e3:.0f} ms | {host_s * 1e3:.0f} ms "
                f"| {own['peak_bytes'] / MIB:.0f} MiB | {own['calls']:.0f} | {own['bytes'] / MIB:.1f} MiB |"
            )
    return lines


def write_table(page: str, lines: list[str]) -> str:
    """The page with the table between its marks."""
    begin, end = "<!-- engines -->\n", "<!-- /engines -->"
    return re.sub(f"{begin}.*?{end}", lambda _: begin + "\n".join(lines) + "\n" + end, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nd-quick")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(json.loads(args.cell))))
        return 0
    from bench.emulated.links import machine_flops

    shared = {"model": args.model, "batch_size": args.batch_size, "precision": args.precision}
    shared["flops"] = machine_flops()
    cells = [(PLAIN, ""), *((engine, plan) for plan in PLANS for engine in ENGINES)]
    results: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for engine, plan in cells:
            order = json.dumps(shared | {"engine": engine, "plan": plan})
            command = [sys.executable, "-m", "bench.emulated.engines", "--cell", order]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                print(f"{engine} {plan}: status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
                continue
            results.setdefault(f"{engine} {plan}".strip(), []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}: {engine} {plan} {results[f'{engine} {plan}'.strip()][-1]}", flush=True)
    lines = table(results)
    print("\n".join(lines))
    if args.write:
        PAGE.write_text(write_table(PAGE.read_text(), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

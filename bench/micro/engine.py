"""All-zdp through OSDPStrategy against FairScale's own FSDP around the same operators: step time, ratio.

    python -m bench engine [--rounds 3] [--ranks 2] [--layers 6] [--width 384] [--batch-size 8]
    python -m bench engine --against unchecked [--model nd-quick]

Both sides train the example's GPT with AdamW on the CPU over gloo, one thread a rank, with the same allocator setting.
The baseline is FairScale as its documentation has it: every Linear and Embedding wrapped, an outer wrap for the rest,
trained in a plain loop, so that Lightning's own overhead counts against OSDP. Sides take turns, each the first of every
other round; the medians of each round and their ratio are printed. Against ``unchecked``, which is OSDPStrategy without
guards of its sharded parameters and without the ranks' agreement on the order of collectives, the ratio is what those
cost, also for models of the comparison; and the ratio of the first rank's CPU time is, on which other work tells less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
STEPS, SKIPPED = 12, 3


def gpt(args: argparse.Namespace) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from train_gpt import GPT

    class Bare(GPT):
        """One group, no schedule, no logging: the same work on both sides."""

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95))

        def log(self, *args: Any, **kwargs: Any) -> None:
            pass

    torch.manual_seed(1)
    return Bare(args.layers, args.width, block_size=128)


def module(args: argparse.Namespace) -> Any:
    """What OSDPStrategy trains."""
    if not args.model:
        return gpt(args)
    import torch

    from bench.comparison.models import Task, build

    torch.manual_seed(1)
    return Task(build(args.model))


def batches(args: argparse.Namespace) -> Any:
    import torch

    from bench.comparison.models import MODELS

    tokens = MODELS[args.model].tokens if args.model else 128
    return torch.randint(0, 256, (args.batch_size * STEPS * args.ranks, tokens + 1))


def fairscale_side(args: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a step, and CPU seconds, under FairScale, with this package's allocator setting alone."""
    import contextlib
    import types

    import torch
    import torch.distributed as dist
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    stream, view, cuda = Stream(), types.ModuleType("torch"), types.ModuleType("torch.cuda")
    cuda.__dict__.update(
        is_available=lambda: False,
        current_stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        synchronize=lambda: None,
        Stream=Stream,
    )
    view.__dict__.update({**torch.__dict__, "cuda": cuda})
    module.torch = view
    torch.Tensor.record_stream = lambda self, other: None  # type: ignore[method-assign,assignment]
    dist.init_process_group("gloo")
    options: dict[str, Any] = {"compute_device": torch.device("cpu"), "bucket_cap_mb": 0}
    model = gpt(args)

    def wrap(parent: torch.nn.Module) -> None:
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear | torch.nn.Embedding):
                setattr(parent, name, FullyShardedDataParallel(child, **options))
            else:
                wrap(child)

    wrap(model)
    no_op = dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), stream)
    root = FullyShardedDataParallel(model, **options)
    for unit in root.modules():
        if isinstance(unit, FullyShardedDataParallel):
            unit._setup_streams = types.MethodType(_shared_streams(no_op, FullyShardedDataParallel), unit)
    optimizer = model.configure_optimizers()
    rank, seconds, cpu_seconds = dist.get_rank(), [], []
    for batch in batches(args).chunk(STEPS):
        start, cpu_start = time.perf_counter(), time.process_time()
        logits = root(batch[rank :: args.ranks, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[rank :: args.ranks, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    dist.destroy_process_group()
    return statistics.median(seconds[SKIPPED:]), statistics.median(cpu_seconds[SKIPPED:])


def _shared_streams(streams: dict[str, Any], fsdp: type) -> Any:
    """FairScale makes streams for its root only where there is CUDA, but reads them everywhere."""
    original = fsdp._setup_streams  # type: ignore[attr-defined]

    def setup(self: Any) -> None:
        original(self)
        for unit in self.modules():
            if isinstance(unit, fsdp):
                unit._streams = streams  # type: ignore[attr-defined]

    return setup


def osdp_side(args: argparse.Namespace) -> tuple[float, float]:
    """Return the same through the Trainer, with a plan that shards every operator."""
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_osdp import OSDPStrategy

    class CpuTime(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.seconds.append(time.process_time())

    strategy, cpu = OSDPStrategy(plan=args.plan), CpuTime()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[cpu],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(args), DataLoader(batches(args), batch_size=args.batch_size))
    assert strategy.measured_step is not None
    steps = [end - start for start, end in pairwise(cpu.seconds)]
    return strategy.measured_step.step_time_s, statistics.median(steps[SKIPPED:])


def switch_checks_off() -> None:
    """Guard no parameter, and take all ranks to run the same collectives in the same order, as they do here."""
    from lightning_osdp.backend.rank_agreement import Decision
    from lightning_osdp.engine.fairscale import collective_order
    from lightning_osdp.engine.fairscale.sharded_operator import ShardedOperator

    class Unchecked:
        def __init__(self, *args: Any) -> None:
            pass

        def advance(self, event: str) -> bool:
            return True

        def ask(self, request: Any) -> Decision:
            return Decision(request.event)

        def close(self) -> None:
            pass

    collective_order.RankAgreement = Unchecked  # type: ignore[misc,assignment]
    ShardedOperator.create_guards = lambda self, names, context: []  # type: ignore[method-assign]


def write_plan(args: argparse.Namespace, file: Path) -> None:
    """An all-zdp plan for this model: what the planner would make, with its modes replaced."""
    import torch

    from lightning_osdp.planning.spec.choices import Mode, legal_modes
    from lightning_osdp.planning.spec.plan import ModelIdentity, OperatorPlan
    from lightning_osdp.profiling.tracing.trace import TrainingStep, trace
    from tests.support.models import hand_made_plan

    model = module(args)
    step = TrainingStep(model, batches(args)[: args.batch_size], args.batch_size, torch.device("cpu"))
    found = trace(step).model_profile
    operators = tuple(
        OperatorPlan(name=op.name, slices=(legal_modes(op)[-1],), num_parameters=op.num_parameters)
        for op in found.operators
    )
    assert any(op.slices == (Mode.ZDP,) for op in operators)
    model_id = ModelIdentity(fingerprint=found.fingerprint, num_parameters=found.num_parameters)
    plan = hand_made_plan({}, args.ranks, batch_size=args.batch_size)
    file.write_text(plan.model_copy(update={"operators": operators, "model": model_id}).to_json())


def run_side(side: str, args: argparse.Namespace, plan: Path) -> tuple[float, float]:
    """Median seconds of a step of one side in processes of its own, and CPU seconds of its first rank."""
    own = ["--ranks", args.ranks, "--layers", args.layers, "--width", args.width, "--batch-size", args.batch_size]
    own += ["--model", args.model] if args.model else []
    command = [sys.executable, "-m", "bench.micro.engine", "--side", side, "--plan", str(plan), *map(str, own)]
    names = {"WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    names |= {"LOCAL_WORLD_SIZE": args.ranks, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "bench"}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | {k: str(v) for k, v in (names | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("\n".join(err for _, err in outputs))
    found = json.loads(outputs[0][0].strip().splitlines()[-1])
    return found["median_s"], found["cpu_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--against", choices=["fairscale", "unchecked"], default="fairscale")
    parser.add_argument(
        "--model", default="", help="of bench.comparison, against unchecked; default: the example's GPT"
    )
    parser.add_argument("--side", choices=["fairscale", "unchecked", "osdp"], help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model and "fairscale" in (args.against, args.side) and args.side not in ("osdp", "unchecked"):
        parser.error("--model is for --against unchecked")
    if args.side:
        from lightning_osdp.backend.cpu.malloc import configure_cpu_allocator

        configure_cpu_allocator()
        if args.side == "unchecked":
            switch_checks_off()
        median_s, cpu_s = fairscale_side(args) if args.side == "fairscale" else osdp_side(args)
        print(json.dumps({"median_s": median_s, "cpu_s": cpu_s}))
        return
    name = "FairScale FSDP" if args.against == "fairscale" else "without checks"
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        write_plan(args, plan)
        ratios, cpu_ratios, sides = [], [], ["osdp", args.against]
        for number in range(args.rounds):
            found = {side: run_side(side, args, plan) for side in sides}
            sides.reverse()
            (ours, our_cpu), (theirs, their_cpu) = found["osdp"], found[args.against]
            ratios.append(ours / theirs)
            cpu_ratios.append(our_cpu / their_cpu)
            print(
                f"round {number + 1}: OSDPStrategy {ours * 1e3:7.1f} ms, {name} {theirs * 1e3:7.1f} ms, "
                f"ratio {ratios[-1]:.3f}, of CPU time {cpu_ratios[-1]:.3f}",
                flush=True,
            )
    print(
        f"median ratio {statistics.median(ratios):.3f}, of CPU time {statistics.median(cpu_ratios):.3f} "
        "(below 1: OSDPStrategy is faster)"
    )


if __name__ == "__main__":
    main()

"""A node fails: the run on the other ends with the cause, and goes on from its last checkpoint on one node alone.

    sudo python -m bench node-failure [--within 30]

Two nodes of two ranks (see emulated_cluster.py) train a small GPT, sharded inside nodes, and write a checkpoint every
few steps. Once there is one, all ranks of the second node are killed. Those of the first have to end by themselves
within --within seconds, each with an error that names the connection that was lost. Then the first node resumes by
itself, under a plan of its own. Needs root.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.multinode import emulated_cluster

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

LAYERS, WIDTH, BLOCK_SIZE, SAVE_EVERY, RESUMED_STEPS = 2, 256, 32, 5, 4
CAUSES = ("ended without an error: it was killed",)
"""What a rank says of another that is gone."""


def train(args: argparse.Namespace) -> None:
    """What each rank runs; with a checkpoint to resume from, a few steps more."""
    log = os.open(f"{args.folder}/{args.name}{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from train_gpt import GPT, StandardLibrary

    from lightning_osdp import OSDPStrategy
    from lightning_osdp.planning.spec.cluster import Cluster

    class Said(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            print(f"starts at step {trainer.global_step}", flush=True)

    L.seed_everything(1)
    model = GPT(LAYERS, WIDTH, BLOCK_SIZE)
    cluster = Cluster.from_json(Path(args.folder, f"{args.name}.json").read_text())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.per_node,
        num_nodes=args.nodes,
        strategy=OSDPStrategy(batch_size=1, cache="", cluster=cluster, sharding_group=args.group),
        max_steps=_step_of(args.resume) + RESUMED_STEPS if args.resume else 100_000,
        callbacks=[ModelCheckpoint(args.folder, "{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1), Said()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=f"{args.folder}/{args.name}",
    )
    trainer.fit(model, StandardLibrary(BLOCK_SIZE), ckpt_path=args.resume, weights_only=False)
    print(f"ended at step {trainer.global_step}", flush=True)


def _step_of(checkpoint: str) -> int:
    return int(Path(checkpoint).stem.split("=")[1])


def known_cluster(nodes: int, per_node: int) -> Any:
    """Links that need not be measured: times don't matter here."""
    from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, HierarchicalLinks, Link, ShardingLink

    slow, fast = (CollectiveFit(latency_s=1e-3, s_per_byte=rate) for rate in (1e-8, 1e-9))
    world = Link(all_reduce=slow, all_gather=slow, reduce_scatter=slow)
    inside, two_stage = (ShardingLink(all_gather=one, reduce_scatter=one) for one in (fast, slow))
    levels = HierarchicalLinks(intra_node=inside, inter_node=slow, hierarchical=two_stage)
    return Cluster(
        nodes=nodes, devices_per_node=per_node, device="cpu", backend="gloo", link=world,
        hierarchical_links=levels if nodes > 1 else None,
    )  # fmt: skip


def start(
    args: argparse.Namespace, cluster: emulated_cluster.Cluster, name: str, folder: str, **more: str
) -> list[Any]:
    """Starts all ranks."""
    Path(folder, f"{name}.json").write_text(known_cluster(cluster.nodes, cluster.per_node).model_dump_json())
    own = {"nodes": cluster.nodes, "per-node": cluster.per_node, "name": name, "folder": folder} | more
    command = [
        sys.executable,
        "-m",
        "bench.multinode.node_failure",
        "--worker",
        *(f"--{key}={value}" for key, value in own.items()),
    ]
    return [emulated_cluster.start(cluster, rank, command) for rank in range(cluster.ranks)]


def wait_for_checkpoint(folder: str, ranks: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not list(Path(folder).glob("step=*.ckpt")):
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
            raise SystemExit(f"FAILED: no checkpoint\n{_tail(folder, 'two0')}")
        time.sleep(0.1)


def _tail(folder: str, name: str) -> str:
    return Path(folder, f"{name}.log").read_text(errors="replace")[-2000:]


def fail_a_node(args: argparse.Namespace, folder: str) -> str:
    """Trains on two nodes and kills one; returns the last checkpoint."""
    cluster = emulated_cluster.Cluster(f"nf{os.getpid()}", 2, 2, "1gbit", None)
    with emulated_cluster.network(cluster), emulated_cluster.memory_cgroups(cluster):
        ranks = start(args, cluster, "two", folder, group="node")
        try:
            wait_for_checkpoint(folder, ranks, args.timeout)
            for rank in ranks[cluster.per_node :]:
                os.killpg(rank.pid, signal.SIGKILL)
            killed = time.monotonic()
            for rank in ranks[: cluster.per_node]:
                rank.wait(timeout=max(0.1, killed + args.within - time.monotonic()))
            print(f"node 1 was killed; node 0 ended by itself after {time.monotonic() - killed:.1f} s")
        finally:
            emulated_cluster.end(ranks)
    for rank, process in enumerate(ranks[: cluster.per_node]):
        said = Path(folder, f"two{rank}.log").read_text(errors="replace")
        cause = next((line for line in reversed(said.splitlines()) if any(word in line for word in CAUSES)), None)
        if process.returncode == 0 or cause is None:
            raise SystemExit(f"FAILED: rank {rank} ended with {process.returncode}:\n{_tail(folder, f'two{rank}')}")
        print(f"  rank {rank} (status {process.returncode}): {cause.strip()}")
    return str(max(Path(folder).glob("step=*.ckpt"), key=lambda file: _step_of(str(file))))


def resume(args: argparse.Namespace, folder: str, checkpoint: str) -> None:
    """Goes on from ``is_recomputed`` on one node."""
    cluster = emulated_cluster.Cluster(f"nr{os.getpid()}", 1, 2, None, None)
    with emulated_cluster.network(cluster), emulated_cluster.memory_cgroups(cluster):
        ranks = start(args, cluster, "one", folder, resume=checkpoint, group="auto")
        try:
            emulated_cluster.wait(ranks, args.timeout)
        finally:
            emulated_cluster.end(ranks)
    step = _step_of(checkpoint)
    said = Path(folder, "one0.log").read_text(errors="replace")
    if f"starts at step {step}\n" not in said or f"ended at step {step + RESUMED_STEPS}\n" not in said:
        raise SystemExit(f"FAILED: the resumed run\n{_tail(folder, 'one0')}")
    print(f"one node alone went on from step {step} to step {step + RESUMED_STEPS}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=float, default=30.0, help="seconds in which the survivors have to end")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, of each run")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for hidden, kind in (("--nodes", int), ("--per-node", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    for hidden in ("--name", "--folder", "--resume", "--group"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = fail_a_node(args, folder)
        resume(args, folder, checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains the example's GPT on several nodes; what is sharded inside nodes and what over all of them, the plan says.

On a SLURM cluster, and by hand on each node (the same command but for nothing: torchrun numbers the nodes itself):

    sbatch --nodes 2 --ntasks-per-node 4 examples/slurm/train.sbatch \
        python examples/multinode/train.py --nodes 2 --devices 4
    examples/slurm/torchrun.sh 2 4 first-node:29400 examples/multinode/train.py --nodes 2 --devices 4

Two "nodes" of two processes on this machine, to see what it prints: ``examples/multinode/here.sh``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning as L

import lightning_osdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt import GPT, StandardLibrary


def main() -> None:
    """Train; the plan's table says where each operator's states are."""
    parser = argparse.ArgumentParser(description="Train a small GPT on several nodes.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="processes of each node")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--sharding-group", choices=["auto", "world", "node"], default="auto")
    parser.add_argument("--memory-limit", default="auto", help="per process: 700MiB, auto")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--max-steps", type=int, default=60)
    args = parser.parse_args()
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        num_nodes=args.nodes,
        devices=args.devices,
        strategy=lightning_osdp.OSDPStrategy(
            memory_limit=args.memory_limit, max_batch_size=8, sharding_group=args.sharding_group
        ),
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        logger=False,
        limit_val_batches=0,
        default_root_dir="runs/multinode",  # on a file system that all nodes share: checkpoints are written by rank 0
        enable_model_summary=False,
    )
    trainer.fit(GPT(args.layers, args.width, block_size=128), StandardLibrary(block_size=128))


if __name__ == "__main__":
    main()

"""Run a benchmark by its name.

    python -m bench NAME [OPTIONS]     # python -m bench NAME --help lists the options

Without a name, the benchmarks are listed.
"""

from __future__ import annotations

import runpy
import sys

BENCHMARKS = {
    "comparison": ("bench.comparison", "OSDP beside DDP, FSDP and FairScale under hard memory limits (root)"),
    "accuracy": ("bench.accuracy.accuracy", "predicted beside measured step time and peak memory, for many models"),
    "emulated": ("bench.emulated.comparison", "OSDP beside its peers on 8 and 64 ranks that are not there"),
    "emulated-accuracy": ("bench.emulated.accuracy", "predicted beside emulated, for 2 to 512 ranks"),
    "emulated-real": ("bench.emulated.real", "emulated beside real gloo ranks, with the links that were measured"),
    "engines": ("bench.emulated.engines", "the same plans under our units and under fully_shard, on emulated ranks"),
    "emulated-gpu": ("bench.emulated.gpu", "OSDP beside its peers on one GPU that stands for eight"),
    "gpu-first": ("bench.emulated.gpu_first", "what to run first where there is a GPU for a quarter of an hour"),
    "plan-7b": ("bench.emulated.plan_7b", "seconds and memory that a plan of LLaMA 7 B for 64 emulated ranks takes"),
    "jobs": ("bench.jobs", "jobs as users have them (BERT, ResNet, ViT, LoRA, DLRM, GAN) in turns with DDP"),
    "paper": ("bench.paper", "the settings of the OSDP paper, planned for its machine"),
    "search": ("bench.micro.search", "the exact search against a MILP solver and a dynamic programme"),
    "engine": ("bench.micro.engine", "all operators sharded through the Trainer against FairScale's own FSDP"),
    "collectives": ("bench.micro.collectives", "collectives of gloo against ours"),
    "tensor-parallel": ("bench.micro.tensor_parallel", "wide layers and a table under each mode, in turns"),
    "splitting": ("bench.micro.splitting", "memory and time of split operators, predicted and measured"),
    "allocator": ("bench.micro.allocator", "the cost of returning freed memory to the system on a CPU"),
    "trace-7b": ("bench.micro.trace_7b", "seconds and memory that tracing a LLaMA of 7 B parameters takes"),
    "hard-limit": (
        "bench.memory_limit.hard_limit",
        "a plan survives under a hard limit that kills all-replicated (root)",
    ),
    "wide-limit": ("bench.memory_limit.wide_limit", "a wide model trains where FairScale's FSDP is killed (root)"),
    "one-gpu": ("bench.memory_limit.one_gpu", "predicted beside measured on one GPU"),
    "nodes": ("bench.multinode.sharding_over_nodes", "sharding inside nodes against sharding over all ranks (root)"),
    "node-failure": ("bench.multinode.node_failure", "what the other nodes do when one fails (root)"),
    "emulated-cluster": ("bench.multinode.emulated_cluster", "run a command as the ranks of several nodes (root)"),
}
"""Module and description of each benchmark."""


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        print(__doc__)
        for known, (_, description) in BENCHMARKS.items():
            print(f"  {known:17} {description}")
        return 0 if name in ("", "-h", "--help") else 2
    module, _ = BENCHMARKS[name]
    sys.argv = [f"bench {name}", *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

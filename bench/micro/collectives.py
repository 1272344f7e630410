"""The engine's all-gather and reduce-scatter on CPU against gloo's own, and the all-reduce beside them.

    python -m bench collectives                      # 2 and 4 ranks of this machine, over loopback
    python -m bench emulated-cluster --nodes 2 --per-node 1 --rate 2gbit -- python -m bench collectives

Prints medians in milliseconds of the slowest rank, and how many times faster the engine's are. The repeats of all
candidates are interleaved, so that a busy moment of the machine hits them alike.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_osdp.backend import agree, collectives

SIZES_BYTES = (16 << 10, 256 << 10, 4 << 20, 16 << 20, 64 << 20)
COLUMNS = "{:>5} {:>9} | {:>9} {:>9} {:>6} | {:>9} {:>9} {:>6} | {:>9}"


def candidates(numel: int) -> dict[str, Callable[[], None]]:
    """What is compared, on tensors of its own."""
    group = dist.group.WORLD
    whole, part = torch.zeros(numel), torch.zeros(numel // group.size())
    return {
        "gather_native": lambda: dist.all_gather_into_tensor(whole, part),
        "gather_ours": lambda: collectives.all_gather(whole, part, group),
        "scatter_native": lambda: dist.reduce_scatter_tensor(part, whole),
        "scatter_ours": lambda: collectives.reduce_scatter(part, whole, group),
        "all_reduce": lambda: collectives.all_reduce_mean(whole, group),
    }


def medians_ms(numel: int, repeats: int) -> dict[str, float]:
    """Per candidate, the slowest rank's median."""
    compared = candidates(numel)
    samples: dict[str, list[float]] = {name: [] for name in compared}
    for repeat in range(repeats + 1):
        for name, collective in compared.items():
            dist.barrier()
            start = time.perf_counter()
            collective()
            if repeat > 0:  # the first one warms up
                samples[name].append(time.perf_counter() - start)
    medians_ms = [statistics.median(values) * 1e3 for values in samples.values()]
    slowest_ms = agree.all_reduce_max(medians_ms, dist.group.WORLD, torch.device("cpu"))
    return dict(zip(samples, slowest_ms, strict=True))


def compare(repeats: int) -> None:
    """Prints one line for each size, from rank 0."""
    for size in SIZES_BYTES:
        found = medians_ms(size // 4, repeats if size > 1 << 20 else 3 * repeats)
        if dist.get_rank() == 0:
            gather, scatter = (
                (found[f"{what}_native"], found[f"{what}_ours"], found[f"{what}_native"] / found[f"{what}_ours"])
                for what in ("gather", "scatter")
            )
            cells = [f"{value:.2f}" for value in (*gather, *scatter, found["all_reduce"])]
            print(COLUMNS.format(dist.get_world_size(), f"{size >> 10} KiB", *cells), flush=True)


def run_rank(rank: int, ranks: int, store: str, repeats: int) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    compare(repeats)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="ignored under torchrun or emulated_cluster.py"
    )
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    if int(os.environ.get("RANK", "0")) == 0:
        names = ("ranks", "whole", "gather:", "ours", "ratio", "scatter:", "ours", "ratio", "allreduce")
        print(COLUMNS.format(*names), flush=True)
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args.repeats)
        return
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (ranks, f"file://{folder}/store", args.repeats), ranks)


if __name__ == "__main__":
    main()

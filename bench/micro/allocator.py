"""What glibc's allocator costs on a CPU: as it is, as OSDP sets it, with PyTorch's large pages, and with a fused Adam.

    python -m bench allocator [--width 512] [--batch-size 8] [--repeats 3]

OSDP has glibc hand freed tensors back to the system (``backend.cpu.malloc.configure_cpu_allocator``), so that a process
takes what its live tensors take, as predicted. Every tensor's pages are then new ones, which the kernel clears at their
first touch. Where there is memory for it, OSDP lets freed tensors stay in a heap of limited size
(``heap_controller.py``), here as shares of what a step frees. ``THP_MEM_ALLOC_ENABLE=1`` in the environment, read by
PyTorch at its first tensor, asks for pages of 2 MiB. The optimizer has its part in it: a loop over parameters makes
temporaries for each, the fused form (``fused_adam.py``) none.

Four layers of ``nn.TransformerEncoderLayer`` train with AdamW in one thread, in processes of their own that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

LAYERS, HEADS, TOKENS = 4, 8, 64
WARM_UP, STEPS = 3, 8
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
HANDED_BACK, ANY_SIZE = 0.0, -1.0
SETTINGS = {
    "glibc as it is": (None, False, "0"),
    "glibc as it is, fused": (None, True, "0"),
    "freed tensors handed back": (HANDED_BACK, False, "0"),
    "handed back, fused": (HANDED_BACK, True, "0"),
    "handed back, fused, large pages": (HANDED_BACK, True, "1"),
    "fused, half kept": (0.5, True, "0"),
    "fused, heap of what is freed": (1.0, True, "0"),
    "fused, heap of twice that": (2.0, True, "0"),
    "fused, heap of any size": (ANY_SIZE, True, "0"),
}
"""Name: (what OSDP keeps in the heap, as a share of what a step frees, None without its setting; whether the optimizer
is fused; the environment's variable)."""
MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """Of one process."""

    step_s: float
    """Median."""
    peak_bytes: int
    """Above what the process took before the model."""
    faults: int
    """Pages touched for the first time, in a step."""


def one(width: int, batch_size: int, kept: float | None, fused: bool) -> Figures:
    """Trains in this process."""
    import torch

    from lightning_osdp.backend import memory
    from lightning_osdp.backend.cpu import malloc

    device = torch.device("cpu")
    torch.set_num_threads(1)
    if kept is not None:
        malloc.configure_cpu_allocator()
    before = memory.memory_in_use(device)
    layers = [
        torch.nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True) for _ in range(LAYERS)
    ]
    model, x = torch.nn.Sequential(*layers), torch.randn(batch_size, TOKENS, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    seconds, faults = [], []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP and kept:
            freed = memory.peak_memory(device) - memory.memory_in_use(device)
            malloc.HEAP.retain(None if kept == ANY_SIZE else int(kept * freed))
        if step <= WARM_UP:
            memory.reset_peak(device)
        start, first = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
    peak = memory.peak_memory(device) - before
    counted = slice(WARM_UP + 1, None)  # the first one fills the heap
    return Figures(statistics.median(seconds[counted]), peak, int(statistics.median(faults[counted])))


def elsewhere(args: argparse.Namespace, name: str) -> Figures:
    """``one`` in a process of its own."""
    kept, fused, large_pages = SETTINGS[name]
    command = [sys.executable, "-m", "bench.micro.allocator", "--one"]
    command += [*([] if kept is None else [f"--kept={kept}"]), *(["--fused"] if fused else [])]
    command += [f"--width={args.width}", f"--batch-size={args.batch_size}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", LARGE_PAGES: large_pages}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def row(name: str, figures: Sequence[Figures], first: Sequence[Figures]) -> str:
    """Medians, and their ratios to those of ``shard_offset``, which took turns with these."""
    step_s, peak_bytes, faults = (statistics.median(each) for each in zip(*map(astuple, figures), strict=True))
    slower = statistics.median(a.step_s / b.step_s for a, b in zip(figures, first, strict=True))
    larger = statistics.median(a.peak_bytes / b.peak_bytes for a, b in zip(figures, first, strict=True))
    return (
        f"{name:32} {step_s * 1e3:6.0f} ms ({slower:.2f}x)  peak {peak_bytes / MIB:5.0f} MiB ({larger:.2f}x)  "
        f"{faults:7.0f} page faults a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--fused", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(one(args.width, args.batch_size, args.kept, args.fused))))
        return
    found: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    for _ in range(args.repeats):
        for name, figures in found.items():
            figures.append(elsewhere(args, name))
    print(f"width {args.width}, batch size {args.batch_size}, {TOKENS} tokens, medians of {args.repeats} processes")
    for name, figures in found.items():
        print(row(name, figures, found[next(iter(SETTINGS))]))


if __name__ == "__main__":
    main()

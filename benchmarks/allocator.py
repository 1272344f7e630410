"""What glibc's allocator costs on a CPU: as it is, as OSDP sets it, with PyTorch's large pages, and with a fused Adam.

    python benchmarks/allocator.py [--width 512] [--batch-size 8] [--repeats 3]

OSDP has glibc hand freed tensors back to the system (``profiling.memory.fix_cpu_allocator``), so that a process takes
what its live tensors take, as predicted. Every tensor's pages are then new ones, which the kernel clears at their first
touch. ``THP_MEM_ALLOC_ENABLE=1`` in the environment, read by PyTorch at its first tensor, asks for pages of 2 MiB. The
optimizer has its part in it: a loop over parameters makes temporaries for each, the fused form (``fusing.py``) none.

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
SETTINGS = {
    "glibc as it is": (False, False, "0"),
    "glibc as it is, fused": (False, True, "0"),
    "freed tensors handed back": (True, False, "0"),
    "handed back, fused": (True, True, "0"),
    "handed back, fused, large pages": (True, True, "1"),
}
"""Name: (whether OSDP's setting is made, whether the optimizer is fused, the environment's variable)."""
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


def one(width: int, batch_size: int, handed_back: bool, fused: bool) -> Figures:
    """Trains in this process."""
    import torch

    from lightning_osdp.profiling import memory

    device = torch.device("cpu")
    torch.set_num_threads(1)
    if handed_back:
        memory.fix_cpu_allocator()
    before = memory.memory_in_use(device)
    layers = [
        torch.nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True) for _ in range(LAYERS)
    ]
    model, x = torch.nn.Sequential(*layers), torch.randn(batch_size, TOKENS, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    seconds, faults = [], []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            memory.reset_peak(device)
        start, first = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
    peak = memory.peak_memory(device) - before
    return Figures(statistics.median(seconds[WARM_UP:]), peak, int(statistics.median(faults[WARM_UP:])))


def elsewhere(args: argparse.Namespace, name: str) -> Figures:
    """``one`` in a process of its own."""
    handed_back, fused, large_pages = SETTINGS[name]
    command = [sys.executable, __file__, "--one"]
    command += [*(["--handed-back"] if handed_back else []), *(["--fused"] if fused else [])]
    command += [f"--width={args.width}", f"--batch-size={args.batch_size}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", LARGE_PAGES: large_pages}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def row(name: str, figures: Sequence[Figures], first: Sequence[Figures]) -> str:
    """Medians, and their ratios to those of ``first``, which took turns with these."""
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
    parser.add_argument("--handed-back", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fused", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(one(args.width, args.batch_size, args.handed_back, args.fused))))
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

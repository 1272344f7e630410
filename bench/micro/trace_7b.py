"""Reads the training step of a LLaMA of 7 B parameters on this machine: seconds and memory that takes.

    python -m bench trace-7b [--layers 32] [--width 4096] [--batch-size 4] [--length 2048]

The user builds the module on the meta device, where parameters have shapes and no data:

    with torch.device("meta"):
        module = MyLightningModule(...)

Its optimizer step is read as well. The time includes building the module; the memory is the process's peak above what
it took before, with the libraries loaded.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from lightning_osdp.backend import memory
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace
from tests.support.zoo import llama

MOST_S, MOST_BYTES = 60.0, 2 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    device = torch.device("cpu")
    tiny = llama()
    trace(TrainingStep(tiny, tiny.batch(2), 2, device))  # libraries load at their first use
    before = memory.memory_in_use(device)
    memory.reset_peak(device)
    start = time.perf_counter()
    with torch.device("meta"):
        module = llama(
            width=args.width,
            layers=args.layers,
            vocabulary=32000,
            length=args.length,
            num_attention_heads=args.width // 128,
            intermediate_size=round(args.width * 2.6875),
        )
    found = trace(TrainingStep(module, module.batch(args.batch_size), args.batch_size, device)).model_profile
    seconds, growth = time.perf_counter() - start, memory.peak_memory(device) - before
    states = sum(p.state_bytes for operator in found.operators for p in operator.parameters)
    print(
        f"{found.num_parameters / 1e9:.2f} B parameters in {len(found.operators)} operators, whose states are "
        f"{states / 2**30:.0f} GiB, read in {seconds:.1f} s with {growth / 2**20:.0f} MiB of extra memory"
    )
    return 0 if seconds < MOST_S and growth < MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())

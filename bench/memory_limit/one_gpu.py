"""Predicted beside measured on one GPU, of models that fill it as far as they may.

    python -m bench one-gpu [--model nd-gpu --memory-limit 8GiB --precision 32-true]

Each is trained in a process of its own by a plain ``Trainer(strategy=OSDPStrategy())`` on one device, with no
measurements from before. OSDP's own table after the training is what is printed: step time, samples a second and the
caching allocator's peak; below it, what the allocator held at most. ``--accelerator cpu`` runs the same on the host.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings

CASES = (("nd-gpu", "8GiB", "32-true"), ("gpt2-gpu", "auto", "bf16-mixed"))
"""Model, memory limit and precision: one that is short of memory, and one that has the device."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="one of bench.comparison's; default: " + ", ".join(c[0] for c in CASES))
    parser.add_argument("--memory-limit", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    given = parser.parse_args()
    if given.model:
        train(given)
        return 0
    status = 0
    for model, limit, precision in CASES:
        print(f"== {model}, {limit}, {precision}", flush=True)
        case = ["--model", model, "--memory-limit", limit, "--precision", precision]
        same = ["--steps", str(given.steps), "--accelerator", given.accelerator]
        status |= subprocess.run(
            [sys.executable, "-m", "bench.memory_limit.one_gpu", *case, *same], check=False
        ).returncode
    return status


def train(given: argparse.Namespace) -> None:
    import lightning.pytorch as pl
    import torch

    from bench.comparison.data import plain_loader
    from bench.comparison.models import MODELS, build
    from lightning_osdp import OSDPStrategy

    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=given.accelerator,
            devices=1,
            strategy=OSDPStrategy(memory_limit=given.memory_limit, cache=f"{folder}/cache"),
            precision=given.precision,
            max_steps=given.steps,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(build(given.model), plain_loader(MODELS[given.model].tokens))
    if given.accelerator == "gpu":
        held, most = torch.cuda.max_memory_reserved(), trainer.strategy.execution_plan.memory_limit_bytes
        print(f"the allocator held {held / (1 << 30):.2f} GiB at most, {most / (1 << 30):.2f} GiB allowed")


if __name__ == "__main__":
    sys.exit(main())

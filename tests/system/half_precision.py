"""The example's GPT learns in bf16-mixed what it learns in 32-true: the same validation loss, with each of two seeds.

``python -m tests.system.half_precision [STEPS]`` trains it four times on two gloo ranks, every operator sharded (zdp),
and fails if a loss in bf16-mixed is further from that in 32-true than the seeds are from each other, or 1 % of it. It
takes some minutes.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_osdp import OSDPStrategy
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

RANKS, STEPS, BATCH, BLOCK, VOCABULARY, VAL_BATCHES = 2, 120, 8, 64, 1024, 24
PRECISIONS, SEEDS = ("32-true", "bf16-mixed"), (1, 2)
TOLERANCE = 0.01


def example() -> Any:
    """The script, as a module."""
    path = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(rank: int, ranks: int, precision: str, seed: int, steps: int) -> tuple[float, set[str]]:
    """(validation loss, types in which weights are gathered)."""
    script = example()
    pl.seed_everything(seed, verbose=False)
    model = script.GPT(layers=4, width=256, block_size=BLOCK, vocabulary=VOCABULARY)
    data = script.StandardLibrary(BLOCK, BATCH, VOCABULARY)
    plan = plan_for(model, torch.zeros(BATCH, BLOCK + 1, dtype=torch.int64), ranks, "zdp", BATCH)
    strategy = OSDPStrategy(plan=plan)
    with tempfile.TemporaryDirectory() as folder:
        fitting = trainer(
            folder, strategy, max_steps=steps, precision=precision, gradient_clip_val=1.0,
            limit_val_batches=VAL_BATCHES, val_check_interval=steps,
        )  # fmt: skip
        fitting.fit(model, data)
    assert strategy.execution_plan is not None
    return float(fitting.callback_metrics["val_loss"]), {op.compute_dtype for op in strategy.execution_plan.operators}


def main(steps: int) -> int:
    losses: dict[tuple[str, int], float] = {}
    for precision in PRECISIONS:
        for seed in SEEDS:
            began_s = time.monotonic()
            (loss, dtypes), *_ = run_ranks(train, RANKS, precision, seed, steps)
            assert ("bfloat16" in dtypes) == (precision == "bf16-mixed"), dtypes
            losses[precision, seed] = loss
            print(
                f"{precision:10} seed {seed}: {loss:.4f} after {steps} steps, {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
    spread = max(abs(losses[precision, 1] - losses[precision, 2]) for precision in PRECISIONS)
    apart = [abs(losses["bf16-mixed", seed] - losses["32-true", seed]) for seed in SEEDS]
    allowed = max(spread, TOLERANCE * losses["32-true", 1])
    print(f"seeds are apart by {spread:.4f}, precisions by {apart[0]:.4f} and {apart[1]:.4f}")
    return int(max(apart) > allowed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS))

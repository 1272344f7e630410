"""One rank of one run of ``bench jobs``. It imports lightning_osdp for OSDP alone: DDP's user has not imported it."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from bench.processes import become_rank
from tests.support.jobs import JOBS, build, loader

RANKS, SKIPPED_STEPS, TRAIN_S = 2, 5, 2.0
LEAST_STEPS, MOST_STEPS = 12, 120


class Clock(pl.Callback):
    """Times steps, and ends training after ``TRAIN_S`` on all ranks alike."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.steps = MOST_STEPS

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        count = len(self.starts)
        if count == 2 * SKIPPED_STEPS:
            step_s = torch.tensor((self.starts[-1] - self.starts[SKIPPED_STEPS]) / (SKIPPED_STEPS - 1))
            torch.distributed.broadcast(step_s, 0)
            self.steps = max(LEAST_STEPS, min(MOST_STEPS, round(TRAIN_S / float(step_s))))
        trainer.should_stop = count >= self.steps

    def median_s(self) -> float:
        spans = [b - a for a, b in zip(self.starts[SKIPPED_STEPS:], self.starts[SKIPPED_STEPS + 1 :], strict=False)]
        return statistics.median(spans)


def train(rank: int, name: str, strategy: str, batch_size: int | str, folder: str, port: int) -> None:
    """One rank of a run; the first one writes what it took."""
    become_rank(rank, RANKS, port, folder)
    torch.set_num_threads(1)
    made: Any = DDPStrategy(find_unused_parameters=name == "gan")
    own = JOBS[name].batch_size
    if strategy == "osdp":
        from lightning_osdp import OSDPStrategy  # DDP's user has not imported it

        made = OSDPStrategy(batch_size=batch_size, max_batch_size=8 * own, min_steps_per_epoch=1, cache=folder)
    elif isinstance(batch_size, int):
        own = batch_size
    clock = Clock()
    limits = {name: value for name, value in JOBS[name].trainer.items() if name != "max_epochs"}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=made,
        max_steps=2 * MOST_STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **limits,
    )
    count = RANKS * 8 * JOBS[name].batch_size * 16
    trainer.fit(build(name, "large"), loader(name, "large", count, 1, own))
    found = {"step_s": clock.median_s(), "batch_size": own}
    if strategy == "osdp":
        plan = made.execution_plan
        is_replicated = all(mode == "dp" for operator in plan.operators for mode in operator.slices)
        found |= {"batch_size": plan.batch_size, "is_replicated": is_replicated}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way

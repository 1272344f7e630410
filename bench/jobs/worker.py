"""One rank of one side of ``bench jobs``. It imports lightning_osdp for OSDP alone: DDP's user has not imported it."""

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

RANKS, MAX_STEPS, WARMUP_STEPS, TIMED_WARMUP_STEPS = 2, 100_000, 12, 4
TURN_S, MIN_STEPS, MAX_STEPS_OF_TURN = 1.0, 4, 100
"""Approximate time of a turn, and its least and most steps; the first step of each is not timed."""


class Baton:
    """The number of the turn, in a file: the first turn is OSDP's, the second DDP's, then the first changes."""

    def __init__(self, folder: str, strategy: str) -> None:
        self._file, self._strategy = Path(folder, "turn"), strategy

    def owner(self, turn: int) -> str:
        """Return whose turn it is."""
        is_ddp = turn % 2 == 1 if turn < 2 else (turn + turn // 2) % 2 == 1
        return "ddp" if is_ddp else "osdp"

    def wait(self) -> int:
        """Return the number of the turn when it is this side's."""
        while self.owner(turn := int(self._file.read_text())) != self._strategy:
            time.sleep(0.01)
        return turn

    def pass_on(self, turn: int) -> None:
        """End a turn. One rank calls it when all have made their last step."""
        new = self._file.with_suffix(".new")
        new.write_text(str(turn + 1))
        new.rename(self._file)


class Turns(pl.Callback):
    """Trains in turns with the other side, and notes the median step of each turn after the first, the warm-up."""

    def __init__(self, baton: Baton, rounds: int) -> None:
        self._baton, self._rounds = baton, rounds
        self._turn, self._num_steps = -1, WARMUP_STEPS
        self._starts: list[float] = []
        self.medians_s: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._starts:
            self._turn = self._baton.wait()
        self._starts.append(time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if len(self._starts) <= self._num_steps:
            return
        spans = [end - begin for begin, end in zip(self._starts, self._starts[1:], strict=False)]
        self._starts = []
        if self._turn < 2:
            step_s = torch.tensor(statistics.median(spans[-TIMED_WARMUP_STEPS:]))
            torch.distributed.broadcast(step_s, 0)
            self._num_steps = max(MIN_STEPS, min(MAX_STEPS_OF_TURN, round(TURN_S / float(step_s))))
        else:
            self.medians_s.append(statistics.median(spans[1:]))
        torch.distributed.barrier()
        if trainer.is_global_zero:
            self._baton.pass_on(self._turn)
        trainer.should_stop = len(self.medians_s) == self._rounds


def train(rank: int, name: str, strategy: str, batch_size: int | str, rounds: int, folder: str, port: int) -> None:
    """One rank of one side; the first one writes what it took. DDP begins when OSDP has planned and made some steps."""
    own_folder = Path(folder, strategy)
    become_rank(rank, RANKS, port, str(own_folder))
    torch.set_num_threads(1)
    baton = Baton(folder, strategy)
    baton.wait()
    made: Any = DDPStrategy(find_unused_parameters=name == "gan")
    own = JOBS[name].batch_size
    if strategy == "osdp":
        from lightning_osdp import OSDPStrategy  # DDP's user has not imported it

        made = OSDPStrategy(batch_size=batch_size, max_batch_size=8 * own, min_steps_per_epoch=1, cache=str(own_folder))
    else:
        own = json.loads(Path(folder, "plan.json").read_text())["batch_size"]
    turns = Turns(baton, rounds)
    callbacks: list[pl.Callback] = [turns]
    if strategy == "osdp" and rank == 0:
        callbacks.insert(0, PlanWriter(Path(folder, "plan.json")))
    limits = {name: value for name, value in JOBS[name].trainer.items() if name != "max_epochs"}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=made,
        max_steps=MAX_STEPS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **limits,
    )
    count = RANKS * 8 * JOBS[name].batch_size * 16
    trainer.fit(build(name, "large"), loader(name, "large", count, 1, own))
    if rank == 0:
        Path(own_folder, "medians.json").write_text(json.dumps(turns.medians_s))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


class PlanWriter(pl.Callback):
    """Writes the batch size of OSDP's plan, which DDP trains with as well, and whether all is replicated."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        plan: Any = trainer.strategy.execution_plan  # type: ignore[attr-defined]
        is_replicated = all(mode == "dp" for operator in plan.operators for mode in operator.slices)
        self._file.write_text(json.dumps({"batch_size": plan.batch_size, "is_replicated": is_replicated}))

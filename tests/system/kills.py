"""A run with a checkpoint every two steps is killed again and again, and ends at the loss of one that was not.

``python -m tests.system.kills 10`` kills ten times at random moments, half of the times a run that saves whole
files, half of the times one that saves sharded folders. After each kill the last checkpoint must be complete.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_osdp import OSDPStrategy
from lightning_osdp.state import atomic_files
from lightning_osdp.state.folder import CheckpointFolder
from lightning_osdp.state.opened_file import OpenedFile
from tests.support.models import gpt_batches, gpt_loss, two_groups
from tests.support.modules import GPTModule, trainer
from tests.support.plans import plan_for
from tests.support.ranks import start_scripts

RANKS, STEPS, GLOBAL_BATCH = 2, 40, 8
START_S, RUN_S = 240.0, 400.0
"""Limits: until a run makes its first step, and for a whole run."""


class Stepwise(IterableDataset[Any]):
    """This rank's rows of each step's own batch, beginning where the run goes on."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._module.trainer.global_step, STEPS):
            yield from ((row,) for row in make_global_batch(step)[self._module.global_rank :: RANKS])


class Steps(GPTModule):
    """Writes down the loss of each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(batch_size=GLOBAL_BATCH // RANKS)
        self.folder = folder

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            with (self.folder / f"losses-{self.global_rank}").open("a") as file:
                file.write(f"{self.trainer.global_step} {float(loss.detach())!r}\n")
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stepwise(self), batch_size=self.batch_size)


def make_global_batch(step: int) -> Tensor:
    return gpt_batches(1, GLOBAL_BATCH, seed=step)[0]


def train(folder: Path, save_format: str) -> None:
    """Goes on from the last checkpoint, if there is one."""
    torch.manual_seed(1)
    module = Steps(folder)
    plan = plan_for(module, [make_global_batch(0)[: module.batch_size]], RANKS, "mixed", module.batch_size)
    saving = pl.callbacks.ModelCheckpoint(
        folder / "saved", "{step}", every_n_train_steps=2, save_last=True, enable_version_counter=False
    )
    strategy = OSDPStrategy(plan=plan, save_format=save_format)
    last = folder / "saved" / "last.ckpt"
    fitting = trainer(str(folder), strategy, max_steps=STEPS, callbacks=[saving], enable_checkpointing=True)
    fitting.fit(module, ckpt_path=last if last.exists() else None)
    if fitting.is_global_zero:
        (folder / "done").touch()


def expected_losses() -> list[float]:
    """Of plain PyTorch."""
    torch.manual_seed(1)
    module = GPTModule()
    optimizer = two_groups(module)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = gpt_loss(module.model, make_global_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def start_ranks(folder: Path, save_format: str) -> list[Any]:
    return start_scripts(train, RANKS, (folder, save_format), [folder / f"log-{rank}" for rank in range(RANKS)])


def read_losses(folder: Path) -> list[tuple[int, float]]:
    """(step, mean over the ranks), in the order in which the runs made them."""
    ranks = [folder / f"losses-{rank}" for rank in range(RANKS)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in ranks]
    parsed = [
        {int(line.split()[0]): float(line.split()[1]) for line in rank if len(line.split()) == 2} for rank in lines
    ]
    return [(step, sum(rank[step] for rank in parsed) / RANKS) for step in parsed[0] if all(step in r for r in parsed)]


def run_and_kill_once(folder: Path, save_format: str, chance: random.Random) -> str:
    """Starts a run, kills it at a random moment, and looks at what it left. Returns what happened."""
    steps, wait_s = chance.randint(1, STEPS // 10), chance.uniform(0.0, 0.1)
    until = len(read_losses(folder)) + steps
    processes = start_ranks(folder, save_format)
    try:
        deadline = time.monotonic() + START_S
        while len(read_losses(folder)) < until and not (folder / "done").exists():
            if any(process.exitcode is not None for process in processes) or time.monotonic() > deadline:
                raise AssertionError(f"the run did not get on:\n{(folder / 'log-0').read_text()[-2000:]}")
            time.sleep(0.005)
        time.sleep(wait_s)
        victims = chance.sample(processes, chance.randint(1, RANKS))
        for process in victims:
            process.kill()
        for process in processes:
            process.join(RUN_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    left = check_last_checkpoint(folder, save_format)
    return f"{save_format}: {len(victims)} ranks killed {wait_s * 1e3:.0f} ms after {steps} steps; {left}"


def check_last_checkpoint(folder: Path, save_format: str) -> str:
    """Asserts that the last checkpoint, if there is one, is complete."""
    last = folder / "saved" / "last.ckpt"
    if not last.exists():
        return "before the first checkpoint"
    if save_format == "sharded":
        opened = CheckpointFolder(last, True)
        opened.verify(0, 1)
        checkpoint = opened.checkpoint
    else:
        opened_file = OpenedFile(last)
        opened_file.verify()
        checkpoint = opened_file.load(True)
    unfinished = len(list((folder / "saved").glob(f".*{atomic_files.UNFINISHED_SUFFIX}")))
    return f"the last checkpoint is of step {checkpoint['global_step']}, {unfinished} unfinished beside it"


def run_to_end_despite_kills(kills: int, folder: Path, save_format: str, seed: int) -> list[str]:
    """Kills a run, has it end, and asserts that the loss of every step is that of an uninterrupted one."""
    chance = random.Random(seed)
    story = []
    for _ in range(kills):
        if (folder / "done").exists():
            break
        story.append(run_and_kill_once(folder, save_format, chance))
        print(story[-1], flush=True)
    for rank, process in enumerate(start_ranks(folder, save_format)):
        process.join(RUN_S)
        code = process.exitcode
        assert code == 0, f"rank {rank} ended with {code}:\n{(folder / f'log-{rank}').read_text()[-3000:]}"
    expected = expected_losses()
    found = read_losses(folder)
    assert found
    for step, loss in found:
        assert abs(loss - expected[step]) <= 1e-4 * expected[step], (step, loss, expected[step])
    assert found[-1][0] == STEPS - 1
    assert not list((folder / "saved").glob(f".*{atomic_files.UNFINISHED_SUFFIX}")), "leftovers of killed saves"
    print(f"{save_format}: ended at loss {found[-1][1]:.6f}, without a kill {expected[-1]:.6f}", flush=True)
    return story


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for number, save_format in enumerate(("full", "sharded")):
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            run_to_end_despite_kills(kills // 2 + kills % 2 * (1 - number), Path(folder), save_format, seed=number)


if __name__ == "__main__":
    main()

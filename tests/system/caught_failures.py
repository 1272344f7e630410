"""Scripts that catch a failure on both ranks and go on to their end: each process ends with the script's own status.

``python -m tests.system.caught_failures 12`` does so twelve times, in processes of their own as torchrun starts them:
after an error that all ranks raise in setup and a second run that works, and after an error of one rank in training.
An abort would show as a negative status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_osdp import OSDPStrategy
from lightning_osdp.strategy import failure_detector
from tests.support.modules import GPTModule, dataset, trainer
from tests.support.plans import plan_for
from tests.support.ports import free_port

RANKS, LIMIT_S = 2, 240.0
KINDS = ("setup", "forward", "backward")
STATUSES = {"setup": 0, "forward": 5, "backward": 6}
"""How the script ends after each kind of error."""


class Failing(GPTModule):
    """Fails on one rank, where its first argument says."""

    def __init__(self, kind: str, failing: int) -> None:
        super().__init__(batch_size=4, rows=400)
        self.kind, self.failing = kind, failing

    def train_dataloader(self) -> Any:
        self._fail_at("setup")
        return super().train_dataloader()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if batch_index == 3 and not isinstance(loss, torch._subclasses.FakeTensor):
            self._fail_at("forward")
            loss.register_hook(lambda _: self._fail_at("backward"))
        return loss

    def _fail_at(self, kind: str) -> None:
        if self.kind == kind and self.global_rank == self.failing:
            raise ValueError("the user catches this")


def run_script(kind: str, failing: int, folder: str) -> None:
    """Fit until the failure, catch it, and end with a status that tells what was seen."""
    failure_detector.FAILURE_GRACE_S = 60.0  # on a busy machine the failing process takes seconds to end
    plan = plan_for(GPTModule(), [dataset(4).tensors[0]], RANKS, "mixed", 4)

    def fit(module: GPTModule) -> int:
        fitting = trainer(folder, OSDPStrategy(plan=plan), max_steps=6)
        fitting.fit(module)
        return fitting.global_step

    try:
        fit(Failing(kind, failing))
    except Exception as error:
        if "the user catches this" not in str(error):
            raise
    else:
        sys.exit(3)
    if kind == "setup" and fit(GPTModule(batch_size=4, rows=400)) != 6:
        sys.exit(4)
    sys.exit(STATUSES[kind])


def run_once(kind: str, failing: int, folder: Path) -> list[int]:
    """Return the exit statuses of both ranks."""
    world = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    world |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": 1}
    command = [sys.executable, "-m", "tests.system.caught_failures", "--rank", kind, str(failing), str(folder)]
    processes = []
    for rank in range(RANKS):
        environment = {name: str(value) for name, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        with (folder / f"err-{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + LIMIT_S
        return [process.wait(deadline - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(runs: int) -> int:
    """Return the number of processes that ended otherwise than their script says."""
    wrong = 0
    for number in range(runs):
        kind, failing = KINDS[number % len(KINDS)], number // len(KINDS) % RANKS
        with tempfile.TemporaryDirectory(prefix="caught-") as folder:
            began_s = time.monotonic()
            statuses = run_once(kind, failing, Path(folder))
            print(f"{kind} on rank {failing}: statuses {statuses} after {time.monotonic() - began_s:.0f} s", flush=True)
            for rank, status in enumerate(statuses):
                if status != STATUSES[kind]:
                    wrong += 1
                    print(f"rank {rank}:\n{Path(folder, f'err-{rank}').read_text()[-3000:]}", flush=True)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_script(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    sys.exit(main(int([*sys.argv, "12"][1])))

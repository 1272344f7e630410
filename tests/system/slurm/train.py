"""What the SLURM test trains: ``train.py FOLDER STEPS SECONDS_PER_STEP DEVICES``, on two nodes.

What a step sees depends on its number and on the rank alone, so that a run that was interrupted can be compared, step
by step, with one that was not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy
from tests.support.lightning_contract import is_fake, mixed_plan
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, two_groups

NODES = 2
BATCH = 4


class Numbered(pl.LightningModule):
    """Writes its loss of every step to a file of its rank, with how often the job was started again."""

    def __init__(self, folder: Path, steps: int, seconds_per_step: float) -> None:
        super().__init__()
        self.folder = folder
        self.seconds_per_step = seconds_per_step
        self.model = TinyGPT()
        self.data = gpt_batches(steps * 8, 2 * BATCH)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        tokens = self.data[self.global_step * 8 + self.global_rank, : len(batch[0])]
        loss = gpt_loss(self.model, tokens)
        if not is_fake(loss):
            time.sleep(self.seconds_per_step)
            start = int(os.environ.get("SLURM_RESTART_COUNT", 0))
            with (self.folder / f"losses-{self.global_rank}.jsonl").open("a") as file:
                file.write(json.dumps({"start": start, "step": self.global_step, "loss": loss.item()}) + "\n")
        return loss

    def configure_optimizers(self) -> Any:
        return two_groups(self)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(4096)), batch_size=BATCH)


def main(folder: Path, steps: int, seconds_per_step: float, devices: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = Numbered(folder, steps, seconds_per_step)
    plan = mixed_plan(module, (torch.zeros(BATCH),), BATCH, ranks=NODES * devices)
    pl.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=NODES,
        strategy=OSDPStrategy(plan=plan),
        max_steps=steps,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    ).fit(module)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))

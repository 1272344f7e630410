"""Plans a LLaMA of 7 B parameters for 64 emulated ranks on this machine: seconds and memory that takes.

    python -m bench plan-7b [--layers 32] [--width 4096] [--length 2048] [--ranks 64]

It runs ``osdp emulate --plan-only`` in a process of its own, whose peak is that of all its resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

MOST_S, MOST_BYTES = 90.0, 4e9
VOCABULARY = 32000
HARDWARE = "8xa100-80gb-nvlink+200gbit"


class Llama(pl.LightningModule):
    """A LLaMA, made when it is built, as users write it."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers,
                hidden_size=width,
                intermediate_size=width * 43 // 16,
                num_attention_heads=width // 128,
                vocab_size=VOCABULARY,
                use_cache=False,
            )
        )

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Tokens(pl.LightningDataModule):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randint(0, VOCABULARY, (256, self.length)).unbind(), batch_size=1)  # type: ignore[arg-type]


def config(layers: int, width: int, length: int) -> dict[str, Any]:
    """The LightningCLI file."""
    return {
        "model": {"class_path": f"{__spec__.name}.Llama", "init_args": {"layers": layers, "width": width}},
        "data": {"class_path": f"{__spec__.name}.Tokens", "init_args": {"length": length}},
        "trainer": {"accelerator": "cpu"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 32), ("width", 4096), ("length", 2048), ("ranks", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "llama.json"
        file.write_text(json.dumps(config(args.layers, args.width, args.length)))
        command = [sys.executable, "-m", "lightning_osdp", "emulate", "--config", str(file), "--hardware", HARDWARE]
        command += ["--devices", str(args.ranks), "--max-batch-size", "8", "--plan-only", "--cache", ""]
        start = time.perf_counter()
        status = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, cpu_s = used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
    print(
        f"planned in {seconds:.1f} s ({cpu_s:.1f} s of a core) with {peak / 1e9:.2f} GB of memory, libraries included"
    )
    return status or int(seconds > MOST_S or peak > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())

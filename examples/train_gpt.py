"""Trains a small GPT on Python's own standard library, byte by byte, on two processes under a memory limit.

An ordinary Lightning script: what makes it an OSDP one are the ``import lightning_osdp`` and the ``strategy=`` of the
Trainer. Afterwards the checkpoint is loaded into the plain model, without Trainer or process group, and writes a few
lines of Python.

    python examples/train_gpt.py --memory-limit 700MiB
"""

from __future__ import annotations

import argparse
import math
import resource
import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_osdp

VOCABULARY = 256  # a token is a byte


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then an MLP. B batch, T time, C width, H heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)  # 3 x (B, T, C)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, C / H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C / H)
        x = x + self.project(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))  # (B, T, C)


class GPT(L.LightningModule):
    """Decoder-only language model with learned positions and an untied head (Radford et al., 2019)."""

    def __init__(self, layers: int, width: int, block_size: int, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads=width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "contract.weight")):  # these add up along the residual stream
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.dim() >= 2 and name != "tokens.weight":  # which stays N(0, 1): a short run learns sooner so
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.tokens(tokens) + self.positions(position)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte. ``batch``: (B, T + 1) tokens."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def on_validation_end(self) -> None:
        loss = self.trainer.callback_metrics["val_loss"]
        self.print(f"step {self.global_step:>4}: validation loss {loss:.3f} nats per byte")

    def configure_optimizers(self) -> dict[str, object]:
        decayed, plain = [], []
        for name, parameter in self.named_parameters():
            is_matrix = parameter.dim() >= 2 and not name.startswith(("tokens.", "positions."))
            (decayed if is_matrix else plain).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        steps = self.trainer.estimated_stepping_batches
        warm_up = max(1, steps // 10)

        def share(step: int) -> float:  # of the learning rate: up in a line, then down along a cosine
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up + 1)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float = 0.7) -> bytes:
        """``prompt`` and ``num_bytes`` more, sampled one by one."""
        tokens = torch.tensor([list(prompt)])  # (1, T)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.hparams.block_size :])[:, -1]  # (1, VOCABULARY)
            drawn = torch.multinomial((logits / temperature).softmax(-1), num_samples=1)  # (1, 1)
            tokens = torch.cat([tokens, drawn], dim=1)
        return bytes(tokens[0].tolist())


class Crops(Dataset[Tensor]):
    """``world_size`` random pieces of ``length`` tokens; the same ones for the same seed."""

    def __init__(self, text: bytes, length: int, count: int, seed: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - length + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.tokens[start : start + self.length].long()  # (length,)


class StandardLibrary(L.LightningDataModule):
    """The source of Python's standard library, a few MB that every machine has; every tenth file is held out."""

    def __init__(self, block_size: int, batch_size: int = 8) -> None:
        super().__init__()
        self.block_size = block_size
        self.batch_size = batch_size  # the strategy sets it when it is asked to choose

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        held_out = files[::10]
        train = b"".join(file.read_bytes() for file in files if file not in held_out)
        validation = b"".join(file.read_bytes() for file in held_out)
        self.train = Crops(train, self.block_size + 1, count=1 << 16, seed=1)
        self.validation = Crops(validation, self.block_size + 1, count=64, seed=2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, batch_size=self.batch_size)


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description="Train a small GPT under a memory limit.")
    parser.add_argument("--strategy", choices=["osdp", "ddp"], default="osdp")
    parser.add_argument("--memory-limit", help="per process: 700MiB, auto; default: 200 MiB more than it takes now")
    parser.add_argument("--batch-size", default="auto", help="per process; auto: what trains fastest within the limit")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"))
    return parser.parse_args()


def strategy(args: argparse.Namespace) -> Strategy:
    """The one thing that differs from a replicated training."""
    if args.strategy == "ddp":
        return DDPStrategy()
    batch_size = args.batch_size if args.batch_size == "auto" else int(args.batch_size)
    # Libraries take more on some machines than on others; what is left for the training makes the plan interesting.
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    limit = args.memory_limit or now + (200 << 20)
    return lightning_osdp.OSDPStrategy(memory_limit=limit, batch_size=batch_size, max_batch_size=8)


def main() -> None:
    """Train, then use the result without any of it."""
    args = arguments()
    L.seed_everything(1)
    model = GPT(args.layers, args.width, block_size=128)
    data = StandardLibrary(block_size=128)
    if args.batch_size != "auto":
        data.batch_size = int(args.batch_size)
    checkpoint = ModelCheckpoint(args.out, "best", monitor="val_loss", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=strategy(args),
        max_steps=args.max_steps,
        val_check_interval=min(20, args.max_steps),
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[checkpoint],
        logger=False,
        default_root_dir=args.out,
        enable_model_summary=False,  # the plan's table says more
    )
    trainer.fit(model, data)
    if not trainer.is_global_zero:
        return
    plain = GPT.load_from_checkpoint(checkpoint.best_model_path, map_location="cpu").eval()
    with torch.no_grad():
        loss = plain.loss(torch.stack(list(data.validation)))
    print(f"\nvalidation loss in training {checkpoint.best_model_score:.4f}, of the plain model {loss:.4f}\n")
    print(plain.generate(b"def ", num_bytes=300).decode(errors="replace"))


if __name__ == "__main__":
    main()

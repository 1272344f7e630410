"""Trains a small GPT on Python's own standard library, on two processes, under a memory limit that DDP does not fit.

An ordinary Lightning script: what makes it an OSDP one are the ``import lightning_osdp`` and the ``strategy=`` of the
Trainer. Afterwards the checkpoint is loaded into the plain model, without Trainer or process group, and writes a few
lines of Python.

    python examples/train_gpt.py --memory-limit 700MiB
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sysconfig
import warnings
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_osdp

BYTES = 256  # the first tokens are the bytes

PAIR = 40503  # spreads pairs of tokens over the rows of their table

FIRST_STEPS_BYTES = 32 << 20  # what libraries take besides at the first steps

LIMIT_VARIABLE = "TRAIN_GPT_MEMORY_LIMIT"  # tells the processes that are started the limit of the first


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
    """Decoder-only language model with learned positions and an untied head (Radford et al., 2019).

    With ``pairs``, a table of so many rows gives each token what it means after the one before it: many parameters,
    and hardly any work.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        block_size: int,
        learning_rate: float = 1e-3,
        vocabulary: int = BYTES,
        pairs: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocabulary, width)
        self.pairs = nn.Embedding(pairs, width) if pairs else None
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads=width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
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
        if self.pairs is not None:
            before = F.pad(tokens, (1, 0))[:, :-1]  # (B, T)
            x = x + self.pairs((before * PAIR + tokens) % self.pairs.num_embeddings)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, vocabulary)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token. ``batch``: (B, T + 1) tokens."""
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
        self.print(f"step {self.global_step:>4}: validation loss {loss:.3f} nats per token")

    def configure_optimizers(self) -> dict[str, object]:
        rate = self.hparams.learning_rate
        tables, matrices, others = [], [], []
        for name, parameter in self.named_parameters():
            is_table = name.startswith(("tokens.", "pairs.", "positions."))
            (tables if is_table else matrices if parameter.dim() >= 2 else others).append(parameter)
        groups = [
            {"params": tables, "weight_decay": 0.0, "lr": 3 * rate},  # of whose rows a batch reads a few
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        steps = self.trainer.estimated_stepping_batches
        warm_up = max(1, steps // 10)

        def share(step: int) -> float:  # of the learning rate: up in a line, then down along a cosine
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up + 1)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, likeliest: int = 5, temperature: float = 0.8) -> list[int]:
        """``prompt`` and ``count`` tokens more, each drawn from the ``likeliest`` ones."""
        tokens = torch.tensor([prompt])  # (1, T)
        for _ in range(count):
            logits, choices = self(tokens[:, -self.hparams.block_size :])[:, -1].topk(likeliest)  # (1, likeliest)
            drawn = torch.multinomial((logits / temperature).softmax(-1), num_samples=1)  # (1, 1)
            tokens = torch.cat([tokens, choices.gather(1, drawn)], dim=1)
        return tokens[0].tolist()


class Words:
    """Tokens of Python: its most frequent words, with the blanks before them, and single bytes.

    A short run can't learn rare words: such a name is written as a frequent one, chosen by its length, a number as 0.
    """

    PIECE = re.compile(rb"\n[ ]*| ?[A-Za-z_]+| ?[0-9]+| ?[^A-Za-z_0-9 \n]+| +")
    RARE = re.compile(rb"([A-Za-z_]+)|([0-9]+)|^(\n(?: {4}){0,6}) *$|^( ) *$")
    NAMES = (b"name", b"value", b"key", b"data", b"path", b"text", b"index", b"line", b"args", b"result")

    def __init__(self, text: bytes, vocabulary: int) -> None:
        pieces = Counter(match[0] for match in self.PIECE.finditer(text))
        frequent = [word for word, _ in pieces.most_common(vocabulary) if len(word) > 1]
        self.words = [bytes([byte]) for byte in range(BYTES)] + frequent[: vocabulary - BYTES]
        self.number = {word: number for number, word in enumerate(self.words)}

    def encode(self, text: bytes) -> array[int]:
        numbers = array("h")
        for match in self.PIECE.finditer(text):
            piece = match[0]
            if piece not in self.number and len(self.words) > BYTES:
                piece = self.RARE.sub(self.stand_in, piece)
            numbers.extend([self.number[piece]] if piece in self.number else piece)
        return numbers

    def stand_in(self, match: re.Match[bytes]) -> bytes:
        name, number, *blanks = match.groups()
        return self.NAMES[len(name) % len(self.NAMES)] if name else b"0" if number else blanks[0] or blanks[1]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.words[token] for token in tokens).decode(errors="replace")


class Crops(Dataset[Tensor]):
    """``count`` random pieces of ``length`` tokens; the same ones for the same seed."""

    def __init__(self, tokens: array[int], length: int, count: int, seed: int) -> None:
        self.tokens = torch.frombuffer(tokens, dtype=torch.int16)
        self.length = length
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(tokens) - length + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.tokens[start : start + self.length].long()  # (length,)


class StandardLibrary(L.LightningDataModule):
    """The code of Python's standard library, a few MB that every machine has; every tenth file is held out.

    Tokens are bytes, or with a larger ``vocabulary`` frequent words as well.
    """

    NO_CODE = re.compile(
        rb"""^[ ]*[rR]?("{3}|'{3}).*?\1[ ]*\n|^[ ]*#.*?\n|[ ]{2,}#[^\n]*|(?<=\n)[ ]*\n(?=[ ]*\n)""",
        re.DOTALL | re.MULTILINE,
    )
    """Docstrings, comments, and all blank lines but one: a short run should learn code."""

    def __init__(self, block_size: int, batch_size: int = 8, vocabulary: int = BYTES) -> None:
        super().__init__()
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.batch_size = batch_size  # the strategy sets it when it is asked to choose

    def setup(self, stage: str) -> None:
        if hasattr(self, "words"):
            return
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        held_out = files[::10]
        train, validation = (
            self.NO_CODE.sub(b"", b"".join(file.read_bytes() for file in files if (file in held_out) is is_held_out))
            for is_held_out in (False, True)
        )
        self.words = Words(train, self.vocabulary)
        length = self.block_size + 1
        self.train = Crops(self.words.encode(train), length, count=1 << 16, seed=1)
        self.validation = Crops(self.words.encode(validation), length, count=64, seed=2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, batch_size=self.batch_size)


class LossCurve(Callback):
    """The training loss of each step, drawn as text."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def draw(self, width: int = 60, height: int = 10) -> str:
        """The curve in ``height`` lines, with the loss at the left."""
        width = min(width, len(self.losses))
        means = [chunk.mean().item() for chunk in torch.tensor(self.losses).tensor_split(width)]
        low, high = min(means), max(means)
        rows = [round((high - mean) / max(high - low, 1e-9) * (height - 1)) for mean in means]
        lines = []
        for row in range(height):
            loss = high - (high - low) * row / (height - 1)
            lines.append(f"{loss:6.2f} |" + "".join("*" if at == row else " " for at in rows))
        return "\n".join([*lines, " " * 7 + "+" + "-" * width, f"{'':8}training loss, {len(self.losses)} steps"])


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description="Train a small GPT under a memory limit.")
    parser.add_argument("--strategy", choices=["osdp", "ddp"], default="osdp")
    parser.add_argument("--memory-limit", help="per process: 700MiB, auto; default: less than DDP needs, by prediction")
    parser.add_argument("--batch-size", default="4", help="per process; auto: what trains fastest within the limit")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=3072)
    parser.add_argument("--pairs", type=int, default=1 << 15, help="rows of the table of pairs of tokens")
    parser.add_argument("--max-steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"))
    return parser.parse_args()


def memory_limit(model: GPT, data: StandardLibrary, args: argparse.Namespace) -> str:
    """A limit between what FSDP and what ZeRO-2 needs, by prediction: DDP, which needs most, does not fit there.

    What the model takes is the same on every machine, unlike what Python and its libraries take.
    """
    if LIMIT_VARIABLE not in os.environ:
        size = data.batch_size
        plan = lightning_osdp.plan(
            model, data, hardware="titan-rtx-pcie3", devices=args.devices, batch_size=size, callback=callback()
        )
        needed = {baseline.name: baseline.peak_memory_bytes for baseline in plan.baselines}
        least, most = (needed.get(name, needed["DDP"]) for name in ("FSDP per operator", "ZeRO-2"))
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        used = psutil.Process().memory_info().rss - parameters + FIRST_STEPS_BYTES
        os.environ[LIMIT_VARIABLE] = str(used + (least + most) // 2)
    return os.environ[LIMIT_VARIABLE]


def callback() -> lightning_osdp.OSDPCallback:
    """What is not left to the search: the activations of so small a model are not worth recomputing."""
    return lightning_osdp.OSDPCallback(activation_checkpointing=False, progress_bar=False)


def strategy(args: argparse.Namespace, limit: str) -> Strategy:
    """The one thing that differs from a replicated training."""
    if args.strategy == "ddp":
        return DDPStrategy()
    batch_size = args.batch_size if args.batch_size == "auto" else int(args.batch_size)
    return lightning_osdp.OSDPStrategy(memory_limit=limit, batch_size=batch_size, max_batch_size=8)


def sample(plain: GPT, words: Words) -> str:
    """Some lines of Python."""
    return words.decode(plain.generate(list(words.encode(b"\nclass")), count=150)).strip().rpartition("\n")[0]


def write_page(plan: lightning_osdp.ExecutionPlan, folder: Path) -> str:
    """Write the page of the plan, and return its path, or what is missing."""
    try:
        page = plan.to_html()
    except lightning_osdp.ConfigurationError as error:
        return str(error)
    (folder / "osdp_plan.html").write_text(page, encoding="utf-8")
    return str(folder / "osdp_plan.html")


def main() -> None:
    """Train, then use the result without any of it."""
    args = arguments()
    warnings.filterwarnings("ignore", module=r"lightning\.(pytorch|fabric)\.")  # about its own use of PyTorch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(1)
    data = StandardLibrary(block_size=128, vocabulary=args.vocabulary)
    model = GPT(args.layers, args.width, 128, learning_rate=3e-3, vocabulary=args.vocabulary, pairs=args.pairs)
    if args.batch_size != "auto":
        data.batch_size = int(args.batch_size)
    checkpoint = ModelCheckpoint(args.out, "best", monitor="val_loss", enable_version_counter=False)
    curve, is_osdp = LossCurve(), args.strategy == "osdp"
    limit = args.memory_limit or (memory_limit(model, data, args) if is_osdp else "auto")
    trainer = L.Trainer(
        accelerator="cuda" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=strategy(args, limit),
        max_steps=args.max_steps,
        val_check_interval=min(50, args.max_steps),
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[checkpoint, curve, *([callback()] if is_osdp else ())],
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
    print(f"\n{curve.draw()}\n")
    print(f"validation loss in training {checkpoint.best_model_score:.4f}, of the plain model {loss:.4f}\n")
    print(f"What the plain model writes:\n\n{sample(plain, data.words)}")
    if is_osdp:
        print(f"\nThe plan with pictures: {write_page(trainer.strategy.execution_plan, args.out)}")
        print(f"Why it is so:           osdp explain {args.out / 'osdp_plan.json'}")


if __name__ == "__main__":
    main()

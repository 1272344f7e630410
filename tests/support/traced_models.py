"""Small LightningModules for the tests of tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_osdp.profiling.tracing import trace as tracing
from lightning_osdp.profiling.tracing.trace import TracedStep, TrainingStep

OptimizerOf = Callable[[nn.Module], Any]


def trace(module: LightningModule, batch: Any, batch_size: int, **options: Any) -> TracedStep:
    return tracing.trace(TrainingStep(module, batch, batch_size, **options))


def trace_by_running(module: LightningModule, batch: Any, batch_size: int, **options: Any) -> TracedStep:
    return tracing.trace_by_running(TrainingStep(module, batch, batch_size, **options))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


class Regression(LightningModule):
    """Mean square of a network's output."""

    def __init__(self, net: nn.Module, optimizer: OptimizerOf = adamw) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class TinyGPT(LightningModule):
    """Tokens in, cross entropy out; AdamW in two groups."""

    def __init__(self, layers: int = 2, width: int = 32, vocabulary: int = 64, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def training_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.tokens(batch["x"])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch["y"].flatten())
        self.log_dict({"loss": loss})
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        plain = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tokens(batch_size: int = 4, length: int = 16) -> dict[str, Tensor]:
    ids = torch.arange(batch_size * length).view(batch_size, length) % 64
    return {"x": ids, "y": ids}

"""The models: minGPT as the paper trains it, narrow and deep, wide and shallow, and of mixed widths.

What is published of the training task is in the authors' repository (github.com/Youhe-Jiang/
IJCAI2023-OptimalShardedDataParallel): minGPT's addition of two-digit numbers, sequences of 6 tokens out of 10, and 96
sequences to what the command line calls a batch of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile, Operator, RepeatedBlock
from lightning_osdp.planning.spec.tensor import TensorCandidate
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace

VOCABULARY, TOKENS = 10, 6
SEQUENCES = 96
"""In a batch of 1, as the authors count."""
DROPOUT = 0.1
HEAD_WIDTH = 64
DEGREES = (2, 4, 8)
"""Ranks over which operators may be cut, of eight."""


class Attention(nn.Module):
    """Causal self-attention written out, as minGPT has it: the scores are there as tensors. B, T, C = heads x D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.drop, self.drop_out = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        self.register_buffer("allowed", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (B, H, T, D)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        weights = self.drop(scores.masked_fill(~self.allowed, -math.inf).softmax(-1))
        y = (weights @ v).transpose(1, 2).flatten(2)  # (B, T, C)
        return self.drop_out(self.project(y))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class MinGPT(pl.LightningModule):
    """(B, T) tokens -> loss, with Adam. Where the width changes from block to block, a projection lies between."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, widths[0])
        self.positions = nn.Embedding(TOKENS, widths[0])
        self.drop = nn.Dropout(DROPOUT)
        self.stages = nn.ModuleList()
        self.bridges = nn.ModuleList()
        for before, width in pairwise((widths[0], *widths)):
            if not len(self.stages) or before != width:
                self.bridges.append(nn.Identity() if before == width else nn.Linear(before, width))
                self.stages.append(nn.ModuleList())
            self.stages[-1].append(Block(width))
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(TOKENS, device=tokens.device)))  # (B, T, C)
        for bridge, blocks in zip(self.bridges, self.stages, strict=True):
            x = bridge(x)
            for block in blocks:
                x = block(x)
        return self.head(self.norm(x))  # (B, T, V)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=6e-4)


@dataclass(frozen=True)
class Setting:
    """One model of the comparison."""

    family: str
    name: str
    widths: tuple[int, ...]
    """Of each layer."""


N_AND_D, W_AND_S, I_AND_C = "N&D", "W&S", "I&C"

SETTINGS = (
    Setting(N_AND_D, "48 x 1024", (1024,) * 48),
    Setting(N_AND_D, "96 x 1024", (1024,) * 96),
    Setting(N_AND_D, "48 x 1536", (1536,) * 48),
    Setting(W_AND_S, "2 x 6144", (6144,) * 2),
    Setting(W_AND_S, "4 x 6144", (6144,) * 4),
    Setting(W_AND_S, "2 x 8192", (8192,) * 2),
    Setting(W_AND_S, "4 x 8192", (8192,) * 4),
    Setting(W_AND_S, "2 x 12288", (12288,) * 2),
    Setting(W_AND_S, "4 x 12288", (12288,) * 4),
    Setting(I_AND_C, "24 x 1024 + 4 x 3072", (1024,) * 24 + (3072,) * 4),
    Setting(I_AND_C, "24 x 1024 + 2 x 6144", (1024,) * 24 + (6144,) * 2),
    Setting(I_AND_C, "12 x 1024 + 6 x 2048 + 3 x 4096", (1024,) * 12 + (2048,) * 6 + (4096,) * 3),
)

HEADLINE = Setting("README", "48 x 2048", (2048,) * 48)
"""What the authors' README reports a throughput for under 8 GB."""


def describe(setting: Setting) -> ModelProfile:
    """Its training step, read without allocating anything; a sample is one sequence."""
    with torch.device("meta"):
        module = MinGPT(setting.widths)
    batch = torch.zeros(4, TOKENS + 1, dtype=torch.long)
    step = TrainingStep(module, batch, 4, torch.device("cpu"), tensor_degrees=DEGREES)
    return trace(step).model_profile


def in_batches_of(model: ModelProfile, sequences: int) -> ModelProfile:
    """The same model where a sample is so many sequences: everything that grows with a sample does so by as much."""

    def line(one: LinearInBatch) -> LinearInBatch:
        return LinearInBatch(fixed=one.fixed, per_sample=one.per_sample * sequences)

    def operator(one: Operator) -> Operator:
        names = ("flops_per_sample", "input_per_sample", "output_per_sample")
        return one.model_copy(update={name: getattr(one, name) * sequences for name in names})

    def block(one: RepeatedBlock) -> RepeatedBlock:
        lines = {
            name: line(getattr(one, name))
            for name in ("recompute_saves", "kept_inputs", "live_before_forward", "live_before_backward")
        }
        return one.model_copy(
            update=lines | {"unattributed_flops_per_sample": one.unattributed_flops_per_sample * sequences}
        )

    def candidate(one: TensorCandidate) -> TensorCandidate:
        names = ("input_bytes", "output_bytes")
        return one.model_copy(update={name: getattr(one, name) * sequences for name in names})

    scaled = model.model_copy(
        update={
            "operators": tuple(map(operator, model.operators)),
            "moments": tuple(one.model_copy(update={"live": line(one.live)}) for one in model.moments),
            "blocks": tuple(map(block, model.blocks)),
            "unattributed_flops_per_sample": model.unattributed_flops_per_sample * sequences,
        }
    )
    return scaled.with_tensor_candidates(map(candidate, model.tensor_candidates), model.tensor_refusals)

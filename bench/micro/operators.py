"""The operators of one transformer block by themselves: what ``sliced_operator.py`` trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.zoo import Batch, ZooModule

TOKENS, HEAD = 16, 64


class Attention(nn.Module):
    """Norm, qkv, attention, proj. Gives a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # 3 x (B, T, C)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, C / H)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.proj(y.transpose(1, 2).flatten(2))).square().mean()


class MLP(nn.Module):
    """Norm, up, GELU, down. Gives a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(functional.gelu(self.up(self.norm(x))))).square().mean()


def _module(net: nn.Module, width: int) -> ZooModule:
    def rows(batch_size: int, generator: torch.Generator) -> Batch:
        return {"x": torch.randn(batch_size, TOKENS, width, generator=generator)}

    return ZooModule(net, rows)


def attention(width: int) -> ZooModule:
    """4 width^2 parameters in two Linear operators."""
    return _module(Attention(width), width)


def mlp(width: int) -> ZooModule:
    """8 width^2 parameters in two Linear operators."""
    return _module(MLP(width), width)


OPERATORS = {"attention": attention, "MLP": mlp}

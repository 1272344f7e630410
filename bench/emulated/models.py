"""The models of the emulated comparison: those of ``bench.comparison``, and on a GPU the paper's."""

from __future__ import annotations

from torch import Tensor, nn

from bench.comparison.models import BYTES, MODELS
from bench.paper.models import TOKENS, VOCABULARY, MinGPT

PAPERS: dict[str, tuple[int, ...]] = {
    "N&D 48 x 1024": (1024,) * 48,
    "W&S 2 x 6144": (6144,) * 2,
    "I&C 24 x 1024 + 4 x 3072": (1024,) * 24 + (3072,) * 4,
}
"""Widths of the layers, of the smallest model of each family in figure 5."""

SEQUENCES = 96
"""In a sample: what the authors call a batch of 1."""


class Paper(nn.Module):
    """minGPT as the authors train it: (B, T) bytes -> logits of the same number of tokens.

    A row of T bytes stands for as many sequences as ``TOKENS`` go into it.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.model = MinGPT(widths)

    def forward(self, tokens: Tensor) -> Tensor:
        sequences = tokens.reshape(-1, TOKENS)
        return self.model(sequences).unflatten(0, (len(tokens), -1)).flatten(1, 2)


def net_of(name: str) -> nn.Module:
    """(B, T) tokens -> logits."""
    return Paper(PAPERS[name]) if name in PAPERS else MODELS[name].build()


def tokens_of(name: str) -> int:
    """Tokens of a sample."""
    return SEQUENCES * TOKENS if name in PAPERS else MODELS[name].tokens


def vocabulary_of(name: str) -> int:
    """Its number of tokens that data may have."""
    return VOCABULARY if name in PAPERS else BYTES

"""A model with an operator of each kind that can be tensor parallel, and plans for it made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope, TensorSplit
from tests.support.models import hand_made_plan

TOKENS, TAGS, FEATURES = 64, 40, 16

Sample = Mapping[str, Tensor]


class GatedMLP(nn.Module):
    """Two column operators with the same input, and a row operator."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(FEATURES, 32), nn.Linear(FEATURES, 32, bias=False)
        self.down = nn.Linear(32, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Conv1DMLP(nn.Module):
    """A pair of transformers' Conv1D, whose weights are stored the other way round, and whose input is named."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(48, FEATURES), Conv1D(FEATURES, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(x=functional.gelu(self.c_fc(x=x)))


class Wide(nn.Module):
    """Tokens and weighted tags of samples to logits of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, FEATURES, padding_idx=0)
        self.tag_weights = nn.Parameter(torch.linspace(0.5, 1.5, TAGS))
        self.tags = nn.EmbeddingBag(TAGS, FEATURES, mode="sum", include_last_offset=True)
        self.sets = nn.EmbeddingBag(TAGS, FEATURES, mode="mean")
        self.mlp, self.conv = GatedMLP(), Conv1DMLP()
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS)

    def forward(self, sample: Sample, skipped: Sequence[str] = ()) -> Tensor:
        """Returns logits (b, s, TOKENS), without what is ``skipped``."""
        x = self.embed(sample["tokens"])
        if "tags" not in skipped:
            weights = self.tag_weights[sample["tags"]]
            x = x + self.tags(sample["tags"], sample["offsets"], per_sample_weights=weights)[:, None]
        x = x + self.sets(sample["tokens"] % TAGS)[:, None]
        for name in ("mlp", "conv"):
            if name not in skipped:
                x = x + self.get_submodule(name)(self.norm(x))
        return self.head(x)


class SelfAttention(nn.Module):
    """Query, key and value by a Linear each."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3))
        self.o = nn.Linear(FEATURES, FEATURES)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, _ = hidden.shape
        q, k, v = (each(hidden).view(b, s, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class FusedAttention(nn.Module):
    """Attention as in GPT-2: a fused projection, whose width is an attribute; the row operator is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.split_size, self.heads = Conv1D(3 * FEATURES, FEATURES), FEATURES, 4

    def forward(self, hidden: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, None]:
        b, s, _ = hidden.shape
        parts = self.c_attn(hidden).split(self.split_size, dim=2)
        q, k, v = (each.view(b, s, self.heads, -1).transpose(1, 2) for each in parts)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).reshape(b, s, -1), None


class Attending(nn.Module):
    """Two attentions. As in transformers, a mask that masks nothing is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, FEATURES)
        self.attention, self.fused, self.c_proj = SelfAttention(), FusedAttention(), Conv1D(FEATURES, FEATURES)
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, TOKENS)

    def forward(self, sample: Sample, skipped: Sequence[str] = ()) -> Tensor:
        """Returns logits (b, s, TOKENS), without what is ``skipped``."""
        tokens = sample["tokens"]
        is_padding = (tokens < 2)[:, None, None]
        mask = ~is_padding | torch.eye(tokens.shape[1], dtype=torch.bool) if is_padding.any() else None
        x = self.embed(tokens)
        if "attention" not in skipped:
            x = x + self.attention(self.norm(x), mask)
        if "fused" not in skipped:
            x = x + self.c_proj(self.fused(self.norm(x), mask=mask)[0])
        return self.head(x)


def loss_of(model: nn.Module, sample: Sample, skipped: Sequence[str] = ()) -> Tensor:
    """Cross entropy of the token before."""
    logits = model(sample, skipped)
    return functional.cross_entropy(logits.flatten(0, 1), sample["tokens"].roll(1, 1).flatten())


def make_sample(seed: int, rows: int, length: int) -> Sample:
    """Samples of ``length`` tokens and 0 to 3 tags each."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (rows,), generator=generator)
    return {
        "tokens": torch.randint(0, TOKENS, (rows, length), generator=generator),
        "tags": torch.randint(0, TAGS, (int(counts.sum()),), generator=generator),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
    }


def split_sample(sample: Sample, num_parts: int) -> list[Sample]:
    """Micro-batches of equally many samples, from one."""
    rows = len(sample["tokens"]) // num_parts
    parts = []
    for first in range(0, num_parts * rows, rows):
        offsets = sample["offsets"][first : first + rows + 1]
        tags = sample["tags"][offsets[0] : offsets[-1]]
        parts.append({"tokens": sample["tokens"][first : first + rows], "tags": tags, "offsets": offsets - offsets[0]})
    return parts


SPLITS: dict[str, tuple[TensorRole, str | None]] = {
    "embed": (TensorRole.EMBEDDING, None),
    "tags": (TensorRole.EMBEDDING, None),
    "sets": (TensorRole.EMBEDDING, None),
    "mlp.gate": (TensorRole.COLUMN, "mlp"),
    "mlp.up": (TensorRole.COLUMN, "mlp"),
    "mlp.down": (TensorRole.ROW, "mlp"),
    "conv.c_fc": (TensorRole.COLUMN, "conv"),
    "conv.c_proj": (TensorRole.ROW, "conv"),
    "head": (TensorRole.LINEAR, None),
}
"""How each operator of ``Wide`` is cut."""

ATTENTION_SPLITS: dict[str, tuple[TensorRole, str | None]] = {
    "embed": (TensorRole.EMBEDDING, None),
    "attention.q": (TensorRole.COLUMN, "attention"),
    "attention.k": (TensorRole.COLUMN, "attention"),
    "attention.v": (TensorRole.COLUMN, "attention"),
    "attention.o": (TensorRole.ROW, "attention"),
    "fused.c_attn": (TensorRole.COLUMN, "fused"),
    "c_proj": (TensorRole.ROW, "fused"),
    "head": (TensorRole.LINEAR, None),
}
"""How each operator of ``Attending`` is cut."""

SCOPES = {
    "attention": TensorScope(attributes=("attention.heads",), needs_agreement=True),
    "fused": TensorScope(attributes=("fused.split_size", "fused.heads"), needs_agreement=True),
}
"""What the scopes of ``Attending`` need while they run tensor parallel."""

PARTS = {"fused.c_attn": 3}
"""Parts of fused projections."""


def tensor_plan(
    degrees: Mapping[str, int],
    ranks: int,
    others: Mapping[str, Mode] | None = None,
    splits: Mapping[str, tuple[TensorRole, str | None]] = SPLITS,
    **changes: Any,
) -> ExecutionPlan:
    """A plan in which operators whose names begin as given are tensor parallel, and ``others`` are kept as they say."""
    operators = []
    for name, (role, scope) in splits.items():
        degree = next((degree for start, degree in degrees.items() if name.startswith(start)), 0)
        split = TensorSplit(degree=degree, role=role, scope=scope, parts=PARTS.get(name, 1)) if degree else None
        mode = Mode.TP if split is not None else (others or {}).get(name, Mode.DP)
        operators.append(OperatorPlan(name=name, slices=(mode,), num_parameters=0, tensor=split))
    scopes = {op.tensor.scope for op in operators if op.tensor is not None and op.tensor.scope is not None}
    changes = {
        "operators": tuple(operators),
        "tensor_scopes": {name: SCOPES.get(name, TensorScope()) for name in scopes},
    } | changes
    return hand_made_plan({}, ranks).model_copy(update=changes)

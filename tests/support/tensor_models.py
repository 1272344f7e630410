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
    """A pair of transformers' Conv1D, whose weights are stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(48, FEATURES), Conv1D(FEATURES, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


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


def loss_of(model: nn.Module, sample: Sample, skipped: Sequence[str] = ()) -> Tensor:
    """Cross entropy of the token before."""
    logits = model(sample, skipped)
    return functional.cross_entropy(logits.flatten(0, 1), sample["tokens"].roll(1, 1).flatten())


def make_sample(seed: int, rows: int, length: int) -> Sample:
    """So many samples of so many tokens, each with 0 to 3 tags."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (rows,), generator=generator)
    return {
        "tokens": torch.randint(0, TOKENS, (rows, length), generator=generator),
        "tags": torch.randint(0, TAGS, (int(counts.sum()),), generator=generator),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
    }


def split_sample(sample: Sample, num_parts: int) -> list[Sample]:
    """Micro-batches of equally many samples."""
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
        split = TensorSplit(degree=degree, role=role, scope=scope) if degree else None
        mode = Mode.TP if split is not None else (others or {}).get(name, Mode.DP)
        operators.append(OperatorPlan(name=name, slices=(mode,), num_parameters=0, tensor=split))
    scopes = {op.tensor.scope for op in operators if op.tensor is not None and op.tensor.scope is not None}
    changes = {"operators": tuple(operators), "tensor_scopes": {name: TensorScope() for name in scopes}} | changes
    return hand_made_plan({}, ranks).model_copy(update=changes)

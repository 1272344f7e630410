"""One operator whose weight is cut, and what it computes with a slice of it or with all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.state.dim_slice_layout import DimSliceLayout


def cut_dim(module: nn.Module, role: TensorRole) -> int:
    """Return the dimension of the weight that is cut: its output features, or its input features in a row operator."""
    input_dim = matrix_input_dim(module)
    if input_dim is None:  # a table
        return 0 if role == TensorRole.TABLE_ROWS else 1
    return input_dim if role == TensorRole.ROW else 1 - input_dim


class CutWeight(NamedTuple):
    """A weight of an operator that is cut, and how."""

    module: nn.Module
    """Holds it."""
    name: str
    bias_name: str
    dim: int
    parts: int

    @property
    def parameter(self) -> nn.Parameter:
        """The weight, in full."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter


def cut_weights(module: nn.Module, role: TensorRole, parts: int = 1) -> list[CutWeight]:
    """Return the weights of an operator that are cut; of an attention the projections of inputs, and of its output."""
    if role != TensorRole.ATTENTION:
        return [CutWeight(module, "weight", "bias", cut_dim(module, role), parts)]
    attention: Any = module
    is_packed = attention._parameters.get("in_proj_weight") is not None
    names = ["in_proj_weight"] if is_packed else [f"{each}_proj_weight" for each in "qkv"]
    inputs = [CutWeight(module, name, "in_proj_bias", 0, 3 if is_packed else 1) for name in names]
    return [*inputs, CutWeight(attention.out_proj, "weight", "bias", 1, 1)]


@dataclass(eq=False)
class TensorOperator:
    """An operator whose weight is cut along one dimension; its bias is on every rank.

    Attributes:
        name: its name in the module that is trained.
        module: holds the weight; a Linear, a Conv1D of transformers, an Embedding, an EmbeddingBag, or an attention.
        role: how it is cut.
        layout: where the slices of its weight are.
        weight_name: name of the weight in the module.
        bias_name: name of the bias in the module, if it has one.
    """

    name: str
    module: nn.Module
    role: TensorRole
    layout: DimSliceLayout
    weight_name: str = "weight"
    bias_name: str = "bias"

    def __post_init__(self) -> None:
        weight = self.module._parameters[self.weight_name]
        assert weight is not None
        self.weight, self.bias = weight, self.module._parameters.get(self.bias_name)
        self.in_features, self.out_features = self.layout.shape[:2][:: -1 if isinstance(self.module, nn.Linear) else 1]

    @property
    def has_own_weights(self) -> bool:
        """Return whether its own weights are in place, not others (as ``functional_call`` puts there)."""
        own = self.module._parameters
        return own.get(self.weight_name) is self.weight and own.get(self.bias_name) is self.bias

    @property
    def bias_slice(self) -> Tensor | None:
        """The bias of this rank's output features."""
        return None if self.bias is None else self.layout.cut(self.bias, self.layout.shard_index, 0)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x (..., in) times a weight, or some of its features."""
        if isinstance(self.module, nn.Linear):
            return functional.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        return y.view(*x.shape[:-1], y.shape[1])

    def look_up(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the columns (..., c) of a table (rows, c) for indices."""
        return functional.embedding(ids, weight, self.module.padding_idx)  # type: ignore[arg-type]

    def look_up_own_rows(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows (n, c) of a table for indices (n); zeros for those that this rank does not have."""
        num_rows, begin = self.layout.shape[0], self.layout.shard_index * len(rows)
        if ids.is_cuda:
            torch._assert_async(((ids >= 0) & (ids < num_rows)).all())
        elif len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
            raise IndexError("index out of range in self")  # as torch says it
        index: Any = self.module.padding_idx
        own, padding = ids - begin, -1 if index is None else index % num_rows  # a negative one counts from the end
        is_own = (own >= 0) & (own < len(rows))
        has_padding = begin <= padding < begin + len(rows)
        values = functional.embedding(own.where(is_own, 0), rows, padding - begin if has_padding else None)
        return values.masked_fill(~is_own[:, None], 0.0)

    def look_up_bags(self, bags: Bags, weight: Tensor) -> Tensor:
        """Return the columns (bags, c) of a table (rows, c) for bags of indices."""
        bag: Any = self.module
        return functional.embedding_bag(
            bags.ids, weight, bags.starts, mode=bag.mode, per_sample_weights=bags.weights, padding_idx=bag.padding_idx
        )


@dataclass(frozen=True)
class Bags:
    """What an EmbeddingBag is given: all indices, and where each bag starts.

    Attributes:
        ids: (m).
        starts: (number of bags).
        weights: (m), or None.
    """

    ids: Tensor
    starts: Tensor
    weights: Tensor | None

    @classmethod
    def create(cls, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Bags:
        """Return the bags of an EmbeddingBag's arguments."""
        if offsets is None:
            offsets = torch.arange(0, ids.numel(), max(1, ids.shape[1]), device=ids.device, dtype=ids.dtype)
            if not ids.numel():
                offsets = ids.new_zeros(len(ids))
        num_ids = ids.numel() if len(offsets) else 0  # without a bag they would be in the last one of another rank
        flat = None if weights is None else weights.reshape(-1)[:num_ids]
        return cls(ids.reshape(-1)[:num_ids], offsets.to(ids.dtype), flat)

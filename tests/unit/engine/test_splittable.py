from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

from lightning_osdp.engine.splittable import split_dims
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.choices import slice_sizes


class Renamed(nn.Linear):
    """Does what a Linear does."""


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class WithScale(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


def linear_with_replaced_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def linear_with_weight_hook() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda g: g)
    return layer


@pytest.mark.parametrize(
    ("module", "dims"),
    [
        (nn.Linear(8, 8), (1, 0)),
        (nn.Linear(8, 32), (1, 0)),
        (nn.Linear(8, 33), (0, 1)),
        (Renamed(8, 8), (1, 0)),
        (Conv1D(8, 8), (0, 1)),
        (Conv1D(33, 8), (1, 0)),
        (nn.Embedding(100, 8, padding_idx=0, scale_grad_by_freq=True), (1,)),
    ],
)
def test_split_dims_are_listed_best_first(module: nn.Module, dims: tuple[int, ...]) -> None:
    assert split_dims(module) == (dims, "")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LayerNorm(8), "neither a Linear"),
        (nn.Bilinear(2, 2, 2), "neither a Linear"),
        (nn.MultiheadAttention(8, 2), "neither a Linear"),
        (Doubled(4, 4), "forward of its own"),
        (linear_with_replaced_forward(), "forward of its own"),
        (WithScale(), "parameters besides weight and bias"),
        (linear_with_weight_hook(), "hooks on its weight"),
        (parametrizations.weight_norm(nn.Linear(4, 4)), "computed from others"),
        (prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), "computed from others"),
        (nn.LazyLinear(4), "not initialized"),
        (nn.Embedding(8, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(8, 4, sparse=True), "sparse"),
    ],
)
def test_split_dims_of_unsplittable_module_gives_reason(module: nn.Module, reason: str) -> None:
    dims, why = split_dims(module)
    assert dims == ()
    assert reason in why


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_slice_sizes_match_torch_tensor_split(size: int) -> None:
    for k in range(1, size + 1):
        assert slice_sizes(size, k) == tuple(len(part) for part in torch.arange(size).tensor_split(k))


@pytest.mark.parametrize("k", [0, 4])
def test_slice_sizes_with_invalid_slice_count_raises_configuration_error(k: int) -> None:
    with pytest.raises(ConfigurationError, match=f"size 3 can't be cut into {k} slices"):
        slice_sizes(3, k)

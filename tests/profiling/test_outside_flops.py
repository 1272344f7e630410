"""FLOPs of products that no operator owns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_osdp.profiling.trace import trace
from tests.profiling.models import Regression


class Scores(nn.Module):
    """Products of every row of a sequence with every other, without parameters: attention's first half."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(1, 2)  # (B, T, T)


def test_products_without_parameters_count_as_outside_of_operators() -> None:
    # B x T x D with T = 5, D = 8: T * T * D multiplications and as many additions forward, twice that backward.
    module = Regression(nn.Sequential(nn.Linear(8, 8), Scores()))
    found = trace(module, torch.zeros(4, 5, 8), 4, device=torch.device("cpu")).description
    assert found.outside_flops_per_sample == 6 * 5 * 5 * 8
    (linear,) = found.operators
    assert linear.flops_per_sample == 4 * 5 * 8 * 8


def test_a_model_of_operators_alone_has_none_outside() -> None:
    module = Regression(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    found = trace(module, torch.zeros(4, 8), 4, device=torch.device("cpu")).description
    assert found.outside_flops_per_sample == 0

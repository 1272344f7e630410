"""FLOPs of products that no operator owns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.traced_models import Regression, trace


class Scores(nn.Module):
    """Products of every row of a sequence with every other, without parameters: attention's first half."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(1, 2)  # (B, T, T)


def test_trace_counts_matmul_without_parameters_as_unattributed_flops() -> None:
    # B x T x D with T = 5, D = 8: T * T * D multiplications and as many additions forward, twice that backward.
    module = Regression(nn.Sequential(nn.Linear(8, 8), Scores()))
    found = trace(module, torch.zeros(4, 5, 8), 4, device=torch.device("cpu")).model_profile
    assert found.unattributed_flops_per_sample == 6 * 5 * 5 * 8
    (linear,) = found.operators
    assert linear.flops_per_sample == 4 * 5 * 8 * 8


def test_trace_of_operators_only_has_no_unattributed_flops() -> None:
    module = Regression(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    found = trace(module, torch.zeros(4, 8), 4, device=torch.device("cpu")).model_profile
    assert found.unattributed_flops_per_sample == 0

"""A trace finds which products are the last to read their input, whose slices' gradients take its place then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.traced_models import Regression, trace

CPU, WIDTH = torch.device("cpu"), 16


class Branches(nn.Module):
    """Two products of one input; the first one's backward is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.second = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.before(x))
        first = self.first(x)
        return first * self.second(x)


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 8)), {"net.2": True}),
        (nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8)), {"net.2": False}),  # ReLU reads its result
        (nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 8)), {"net.1": True, "net.2": True}),
        (Branches(), {"net.first": True, "net.second": False}),
    ],
    ids=["gelu", "relu", "alone", "branches"],
)
def test_trace_finds_products_that_are_the_last_to_read_their_input(net: nn.Module, expected: dict[str, bool]) -> None:
    profile = trace(Regression(net), torch.ones(4, WIDTH), 4, device=CPU).model_profile
    found = {operator.name: operator.frees_input for operator in profile.operators if operator.input_per_sample}
    assert found == expected

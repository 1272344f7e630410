"""Bags that say nothing raise what torch raises, before they are mixed with those of other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_osdp.engine.tensor_parallel.operator import Bags
from lightning_osdp.engine.tensor_parallel.single import _check_bags

IDS = torch.tensor([1, 2, 3, 4])

WRONG: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "begins late": ({}, (IDS, torch.tensor([1, 2]))),
    "ends late": ({}, (IDS, torch.tensor([0, 5]))),
    "last offset ends late": ({"include_last_offset": True}, (IDS, torch.tensor([0, 2, 5]))),
    "no offsets": ({}, (IDS,)),
    "offsets of rows": ({}, (IDS.view(2, 2), torch.tensor([0, 2]))),
    "too few weights": ({"mode": "sum"}, (IDS, torch.tensor([0, 2]), torch.ones(3))),
    "weights of a mean": ({"mode": "mean"}, (IDS, torch.tensor([0, 2]), torch.ones(4))),
    "offsets in two dimensions": ({}, (IDS, torch.tensor([[0, 2]]))),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_bags_raise_the_error_of_torch(case: str) -> None:
    options, args = WRONG[case]
    bag = nn.EmbeddingBag(6, 4, **options)
    with pytest.raises(Exception, match=r"\w") as expected:
        bag(*args)
    ids, offsets, weights, *_ = (*args, None, None)
    with pytest.raises(expected.type) as found:
        _check_bags(bag, ids, offsets, weights)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("args", [(IDS, torch.tensor([0, 4])), (IDS.view(2, 2),), (IDS, torch.tensor([0]))])
def test_right_bags_pass(args: tuple[Any, ...]) -> None:
    _check_bags(nn.EmbeddingBag(6, 4, mode="sum"), *args, *(None,) * (3 - len(args)))


@pytest.mark.parametrize("weights", [None, torch.ones(4)])
def test_indices_without_a_bag_are_left_out_which_would_be_in_the_last_bag_of_another_rank(weights: Any) -> None:
    bags = Bags.create(IDS, IDS[:0], weights)
    assert not len(bags.starts)
    assert not len(bags.ids)
    assert bags.weights is None or not len(bags.weights)
    assert torch.equal(Bags.create(IDS, torch.tensor([0]), None).ids, IDS)

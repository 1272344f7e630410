"""Bags that say nothing raise what torch raises, before they are mixed with those of other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_osdp.engine.tensor_parallel.operator import Bags, TensorOperator
from lightning_osdp.engine.tensor_parallel.single import _check_bags, _check_last_offset
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.tensor import TensorRole
from lightning_osdp.state.dim_slice_layout import DimSliceLayout

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


def test_indices_behind_the_last_offset_are_refused_since_torch_puts_them_in_a_bag_or_not() -> None:
    bag = nn.EmbeddingBag(6, 4, include_last_offset=True)
    table = TensorOperator("tags", bag, TensorRole.EMBEDDING, DimSliceLayout(bag.weight.shape, 1, 2, 0))
    _check_last_offset(table, IDS, torch.tensor([0, 2, 4]))
    with pytest.raises(ShardingError, match=r"tags is tensor parallel.*given 4 indices, but its last offset is 3"):
        _check_last_offset(table, IDS, torch.tensor([0, 2, 3]))


@pytest.mark.parametrize("padding", [None, 4, -2, -5])
def test_padding_that_counts_from_the_end_has_no_gradient_on_the_rank_that_has_its_row(padding: int | None) -> None:
    table, ids = nn.Embedding(6, 4), torch.tensor([0, 1, 4, 4])
    table.padding_idx = padding  # set later, torch leaves it negative
    table(ids).sum().backward()
    gradients = []
    for rank in range(2):
        layout = DimSliceLayout(table.weight.shape, 0, 2, rank)
        rows = table.weight.detach()[3 * rank : 3 * rank + 3].clone().requires_grad_()
        TensorOperator("table", table, TensorRole.TABLE_ROWS, layout).look_up_own_rows(ids, rows).sum().backward()
        gradients.append(rows.grad)
    assert torch.equal(torch.cat(gradients), table.weight.grad)

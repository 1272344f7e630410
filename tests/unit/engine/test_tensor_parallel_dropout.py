"""Slices whose ranks draw the same numbers drop other places, and as many numbers are drawn as without slices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_osdp.engine.tensor_parallel.dropout import drop_apart

ROWS, DEGREE = 8, 4


def ones() -> Tensor:
    return torch.ones(ROWS, 3, 6)


def attend(func: Callable[..., Tensor]) -> Tensor:
    """The sums of the weights that are kept."""
    x, mask = torch.zeros(ROWS, 1, 5, 2), torch.zeros(ROWS, 1, 1, 5)
    values = 1.0 + torch.arange(ROWS)[:, None, None, None].expand(ROWS, 1, 5, 2)
    y = func(query=x, key=x, value=values, attn_mask=mask, dropout_p=0.5)
    return y / (1.0 + torch.arange(ROWS))[:, None, None, None]


DRAWN: dict[str, Callable[..., Tensor]] = {
    "dropout": lambda how: how(functional.dropout)(ones(), 0.5),
    "by name": lambda how: how(torch.dropout)(input=ones(), p=0.5, train=True),
    "in place": lambda how: how(functional.dropout)(ones(), p=0.5, training=True, inplace=True),
    "in place by torch": lambda how: how(torch.dropout_)(ones(), 0.5, True),
    "channels": lambda how: how(functional.dropout1d)(ones(), 0.5),
    "attention": lambda how: attend(how(functional.scaled_dot_product_attention)),
}


def drawn(name: str, index: int) -> tuple[Tensor, Tensor]:
    """What a slice's call returns, and the next number that is drawn."""
    torch.manual_seed(3)
    result = DRAWN[name](lambda func: lambda *args, **kwargs: drop_apart(func, index, DEGREE, *args, **kwargs))
    return result, torch.rand(1)


@pytest.mark.parametrize("name", DRAWN)
def test_slices_drop_other_places_of_the_same_row_by_equally_many_numbers(name: str) -> None:
    torch.manual_seed(3)
    plain, later = DRAWN[name](lambda func: func), torch.rand(1)
    slices = [drawn(name, index) for index in range(DEGREE)]
    assert torch.equal(slices[0][0], plain)
    assert all(torch.equal(each, later) for _, each in slices)
    for index, (result, _) in enumerate(slices):
        torch.testing.assert_close(result.roll(index * ROWS // DEGREE, 0), plain)  # the same places of other rows
        for other, _ in slices[:index]:
            assert (result == other).flatten(1).all(1).float().mean() < 0.5


@pytest.mark.parametrize("args", [(0.0,), (0.5, False)])
def test_what_drops_nothing_is_returned_as_it_is(args: tuple[float, ...]) -> None:
    x = ones()
    assert drop_apart(functional.dropout, 1, DEGREE, x, *args) is x


def test_in_place_changes_what_was_given() -> None:
    x = ones()
    assert drop_apart(functional.dropout, 1, DEGREE, x, 0.5, True, True) is x
    assert (x == 0).any()

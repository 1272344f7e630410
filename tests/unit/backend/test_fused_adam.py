"""Adam's fused form: chosen where nobody has asked for another one, the same results, and no trace of it in states."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_osdp.backend.fused_adam import can_fuse, fused_step


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((32, 16), (32,), (8, 32))]


def train(optimizer: Optimizer, own: list[nn.Parameter], steps: int, forms: list[Any]) -> None:
    """Notes the form in which each step is made."""
    handle = optimizer.register_step_post_hook(lambda each, *_: forms.append(each.param_groups[0]["fused"]))
    for step in range(steps):

        def closure(step: int = step) -> None:
            for index, p in enumerate(own):
                p.grad = torch.sin(p.detach() * (step + index + 1))

        with fused_step(optimizer):
            optimizer.step(closure)
    handle.remove()


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}])
def test_fused_step_matches_loop_step(kind: Any, options: dict[str, Any]) -> None:
    own, plain = parameters(), parameters()
    forms: list[Any] = []
    train(kind(own, lr=0.05, **options), own, 5, forms)
    train(kind(plain, lr=0.05, foreach=False, **options), plain, 5, other := [])
    assert (forms, other) == ([True] * 5, [None] * 5)
    for a, b in zip(own, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_fused_step_state_keeps_user_choice_and_loads_in_plain_optimizer() -> None:
    own, plain = parameters(), parameters()
    first, second = AdamW(own), AdamW(plain)
    train(first, own, 2, [])
    saved = copy.deepcopy(first.state_dict())
    assert [group["fused"] for group in saved["param_groups"]] == [None]
    with torch.no_grad():
        for a, b in zip(plain, own, strict=True):
            a.copy_(b)
    second.load_state_dict(saved)
    train(first, own, 1, [])
    for index, p in enumerate(plain):
        p.grad = torch.sin(p.detach() * (index + 1))
    second.step()
    for a, b in zip(own, plain, strict=True):
        torch.testing.assert_close(a, b)


class Own(AdamW):
    """A user's."""


@pytest.mark.parametrize(
    "make",
    [
        lambda own: AdamW(own, fused=False),
        lambda own: AdamW(own, foreach=True),
        lambda own: AdamW(own, differentiable=True),
        Own,
        lambda own: torch.optim.SGD(own, momentum=0.9),
        lambda own: AdamW([*own, nn.Parameter(torch.randn(4, 8).t())]),
        lambda own: AdamW([*own, nn.Parameter(torch.randn(4, 8, device="meta"))]),
    ],
    ids=["loop", "foreach", "differentiable", "subclass", "sgd", "transposed", "meta"],
)
def test_can_fuse_is_false_for_user_choice_or_missing_kernel(make: Any) -> None:
    optimizer = make(parameters())
    assert not can_fuse(optimizer, optimizer.param_groups[0])


def test_fused_step_with_other_gradient_layout_uses_loop() -> None:
    own, plain = [nn.Parameter(torch.ones(4, 8))], [nn.Parameter(torch.ones(4, 8))]
    for p in (*own, *plain):
        p.grad = torch.arange(32.0).view(8, 4).t()
    optimizer = AdamW(own)
    with fused_step(optimizer):
        optimizer.step()
    AdamW(plain, foreach=False).step()
    assert torch.equal(own[0], plain[0])


def test_fused_step_restores_setting_when_step_fails() -> None:
    own = parameters()
    optimizer = AdamW(own)
    for p in own:
        p.grad = torch.ones_like(p)
    optimizer.register_step_post_hook(lambda *_: forms.append(optimizer.param_groups[0]["fused"]) or 1 / 0)
    forms: list[Any] = []
    with pytest.raises(ZeroDivisionError), fused_step(optimizer):
        optimizer.step()
    assert (forms, optimizer.param_groups[0]["fused"]) == ([True], None)
    assert not optimizer._optimizer_step_pre_hooks

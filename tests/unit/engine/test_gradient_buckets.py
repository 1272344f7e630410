"""Replicated gradients are reduced in the order in which they come, whatever order a module lists its parameters in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.gradient_buckets import parameters_in_order_of_use
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import NOT_USED
from lightning_osdp.planning.spec.plan import OperatorPlan
from tests.support.models import hand_made_plan, some_cluster

WIDTH = 512  # 1 MiB each: reduced in place


class Unordered(nn.Module):
    """Lists its layers in another order than it runs them; one of them it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH, bias=False)})
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second["inner"](self.first(x * self.scale)))


NAMES = ("", "first", "second.inner", "third")


def operators() -> list[OperatorPlan]:
    used = [OperatorPlan(name=name, slices=(Mode.DP,), num_parameters=0) for name in NAMES]
    return [*used, OperatorPlan(name="unused", slices=(Mode.DP,), num_parameters=0, replicated_reason=NOT_USED)]


def names_of(module: nn.Module, plan: list[OperatorPlan]) -> list[str]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [names[parameter] for parameter in parameters_in_order_of_use(module, plan)]


def test_parameters_come_as_operators_use_them_and_unused_ones_first() -> None:
    expected = ["unused.weight", "scale", "first.weight", "second.inner.weight", "third.weight"]
    found = names_of(Unordered(), operators())
    assert set(found[:2]) == set(expected[:2])
    assert found[2:] == expected[2:]


def test_parameters_of_operators_that_no_plan_names_keep_their_order() -> None:
    module = Unordered()
    assert names_of(module, []) == [name for name, _ in module.named_parameters()]


def test_tied_parameter_comes_with_the_operator_that_holds_all_its_uses() -> None:
    module = nn.Module()
    module.head, module.body, module.embed = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    module.head.weight = module.embed.weight
    plan = [OperatorPlan(name=name, slices=(Mode.DP,), num_parameters=0) for name in ("", "body")]
    assert names_of(module, plan)[0] == "head.weight"


@pytest.fixture
def group() -> Iterator[Any]:
    join(EmulatedLinks(some_cluster(2, backend="emulated")))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradient_is_reduced_while_those_of_earlier_operators_are_computed(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    seconds = EmulatedLinks.seconds
    monkeypatch.setattr(EmulatedLinks, "seconds", lambda *args: begun.append("reduction") or seconds(*args))
    module, engine = Unordered(), FairScaleEngine(torch.device("cpu"), broadcast=False)
    plan = hand_made_plan({}, 2).model_copy(update={"operators": tuple(operators())})
    engine.apply(module, plan)
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: begun.append(name))
    engine.before_forward()
    begun.clear()
    module(torch.ones(2, WIDTH)).sum().backward()
    engine.finish_backward()
    engine.close()
    layers = ["third.weight", "reduction", "second.inner.weight", "reduction", "first.weight", "reduction"]
    # At the end the one that is not used, and the small one, with what says which gradients there are.
    assert begun == [*layers, "scale", "reduction", "reduction"]

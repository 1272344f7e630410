"""What the traced step shows of hooks, of weights that are changed, and of gradients that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_osdp.planning.spec.model import Operator
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace
from tests.support import backward_cases as cases
from tests.support.backward_cases import CASES, ROWS, WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


class Module(LightningModule):
    """Trains a case."""

    def __init__(self, net: nn.Module, step: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.net, self.step = net, step
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.step(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def operators_of(net: nn.Module, step: Callable[[nn.Module, Tensor], None] = cases.square) -> dict[str, Operator]:
    batch = (torch.randn(4, ROWS, WIDTH), torch.arange(4))
    profile = trace(TrainingStep(Module(net, step), batch, 4, torch.device("cpu"))).model_profile
    return {operator.name.removeprefix("net."): operator for operator in profile.operators}


class NormalisedBySelf(nn.Module):
    """Changes its weight when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data /= self.weight.data.norm()
        return x @ self.weight


class Differentiated(nn.Module):
    """Uses torch.func in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: torch.tanh(y @ self.weight).sum())(x)


class Lazy(nn.Module):
    """Uses its weight while its result is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        for factor in (1, 2):
            yield x @ self.weight * factor


LEAVING = [name for name in CASES if name.startswith("hands out") or name == "reads its weight later"]
"""The weight is read by the module around the operator, which holds it then."""

SHARDABLE = [
    name
    for name in CASES
    if "before" not in name or name.startswith("reads")
    if name not in LEAVING
    if name not in ("distribution", "in_direct_forward", "failed_step", "adds to its input")
]


@pytest.mark.parametrize("name", [name for name in LEAVING if name != "hands out copies by expand"])  # of two rows
def test_trace_gives_weights_that_leave_their_operator_to_the_module_around_it(name: str) -> None:
    found = operators_of(*(part() if index == 0 else part for index, part in enumerate(CASES[name])))
    assert "block.op.weight" in {parameter.name.removeprefix("net.") for parameter in found["block"].parameters}


@pytest.mark.parametrize("name", SHARDABLE)
def test_trace_lets_operators_be_sharded_whatever_their_hooks_and_results_are(name: str) -> None:
    found = operators_of(*(part() if index == 0 else part for index, part in enumerate(CASES[name])))
    assert "block.op" in found, list(found)
    assert not {operator.name: operator.replicated_reason for operator in found.values() if operator.replicated_reason}


@pytest.mark.parametrize(
    "op",
    [
        lambda: cases.hooked(cases.write_before),
        lambda: cases.hooked(cases.assign_before),
        lambda: cases.hooked(cases.write_without_grad_before),
        NormalisedBySelf,
        lambda: nn.Sequential(nn.Embedding(4, WIDTH, max_norm=1.0)),
    ],
    ids=["data in place", "data assigned", "no grad", "in forward", "max_norm"],
)
def test_operator_that_changes_its_weight_is_replicated_with_that_reason(op: Callable[[], nn.Module]) -> None:
    net = cases.Net(op())
    if isinstance(net.block.op, nn.Sequential):
        net.block.op, name = cases.Net(nn.Embedding(4, WIDTH, max_norm=1.0)).block.op, "block.op"
        step = lambda model, x: (model.block.op(x[..., 0].long() % 4) + model.out(x)).sum().backward()  # noqa: E731
        found = operators_of(net, step)
    else:
        name, found = "block.op", operators_of(net)
    assert found[name].replicated_reason == "its weights are changed while it runs, by its forward or by a hook"


def test_operator_with_torch_func_is_replicated_with_that_reason() -> None:
    found = operators_of(cases.Net(Differentiated()))
    assert found["block.op"].replicated_reason.startswith("torch.func transforms it")
    assert not found["out"].replicated_reason


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_step_that_transforms_an_operator_is_traced_and_replicates_it(transform: Any) -> None:
    def run(net: nn.Module, x: Tensor) -> None:
        y = transform(lambda y: net.get_submodule("0")(y).sum())(x)
        (net.get_submodule("1")(x).sum() + y.sum()).backward()

    found = operators_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), run)
    assert found["0"].replicated_reason.startswith("torch.func transforms it")
    assert not found["1"].replicated_reason


def test_weight_used_after_its_operator_has_returned_is_replicated() -> None:
    found = operators_of(cases.Net(Lazy(), lambda parts: sum(parts)))
    assert {name for name, operator in found.items() if operator.replicated_reason} == {"block"}
    assert found["block"].replicated_reason == "its forward runs other operators: net.block.lin"


def test_weight_whose_gradient_is_asked_for_is_not_split() -> None:
    found = operators_of(cases.plain_net(), cases.adaptive_weight)
    assert found["out"].unsplittable_reason == "its gradient is asked for by itself"
    assert found["first"].split_dims


def test_weights_that_hooks_read_are_not_split() -> None:
    found = operators_of(cases.plain_net(), cases.with_global_hooks)
    assert {o.unsplittable_reason for o in found.values()} == {
        "its weight is read beside the product, by a hook perhaps"
    }
    found = operators_of(*(CASES["reads after"][0](), cases.square))
    assert found["block.op"].unsplittable_reason == "there are hooks on it, which may read its weight"
    assert found["out"].split_dims

"""Stepping a few parameters of each kind says the same as stepping all, or is not believed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiling.tracing import optimizer_step
from lightning_osdp.profiling.tracing.optimizer_step import Clipping, OptimizerTrace, trace_optimizers


class Normed(Optimizer):
    """Divides by the norm of all gradients: what it does for a parameter depends on the others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            p.sub_(p.grad / total)


def parameters() -> list[nn.Parameter]:
    shapes = 3 * [(16, 8), (16,), (16, 8), (16,), (8, 16), (8,)]
    return [nn.Parameter(torch.empty(shape)) for shape in shapes]


def traced(make: Any, clipping: Clipping = optimizer_step.NO_CLIPPING) -> OptimizerTrace:
    with FakeTensorMode() as mode:
        own = parameters()
        made = make(own)
    return trace_optimizers([made], own, mode, clipping)


def adam_in_groups(own: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW([{"params": own[:9], "weight_decay": 0.0}, {"params": own[9:], "amsgrad": True}], lr=1e-3)


MAKERS: dict[str, Any] = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "loop": lambda own: torch.optim.Adam(own, foreach=False),
    "groups": adam_in_groups,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "foreach": lambda own: torch.optim.AdamW(own, foreach=True),
    "normed": Normed,
}


@pytest.mark.parametrize("clipping", [optimizer_step.NO_CLIPPING, Clipping(1.0), Clipping(1.0, by_value=True)])
@pytest.mark.parametrize("name", MAKERS)
def test_trace_optimizers_some_of_each_kind_equals_stepping_all(
    name: str, clipping: Clipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = traced(MAKERS[name], clipping)
    monkeypatch.setattr(optimizer_step, "_step_by_kind", lambda *_: None)
    every = traced(MAKERS[name], clipping)
    assert set(some.kernels) == set(every.kernels)
    assert (some.state_bytes, some.step, some.needs_unsharded) == (every.state_bytes, every.step, every.needs_unsharded)


@pytest.mark.parametrize("name", MAKERS)
def test_step_by_kind_declines_optimizers_that_couple_parameters(name: str) -> None:
    with FakeTensorMode():
        own = parameters()
        found = optimizer_step._step_by_kind([MAKERS[name](own)], own)
    assert (found is None) == (name in ("foreach", "normed"))


class TwicePerStep(Optimizer):
    """Calls its closure twice, like SAM."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"])
        return loss


def test_trace_optimizers_lbfgs_is_replicated_and_counts_its_full_history() -> None:
    trace = traced(lambda own: torch.optim.LBFGS(own, history_size=10))
    assert set(trace.needs_unsharded) == {"LBFGS"}
    assert trace.state_bytes == tuple(23 * p.nbytes for p in parameters())


def test_trace_optimizers_that_need_a_closure_are_stepped_with_one() -> None:
    trace = traced(TwicePerStep)
    assert set(trace.needs_unsharded) == {""}
    assert sum(kernel.count for kernel in trace.kernels) == 2 * len(parameters())


class Averaging(TwicePerStep):
    """Keeps averages of weights besides its states, and a list of its parameters."""

    def __init__(self, parameters: Any, keeps: bool) -> None:
        super().__init__(parameters)
        self.own = self.param_groups[0]["params"]
        self.averages = [p.detach().clone() for p in self.own] if keeps else [torch.zeros(3)]


@pytest.mark.parametrize("keeps", [False, True])
def test_trace_optimizers_that_keep_copies_of_weights_need_them_whole(keeps: bool) -> None:
    trace = traced(lambda own: Averaging(own, keeps))
    assert set(trace.needs_unsharded) == {"Averaging" if keeps else ""}


def test_trace_optimizers_sparse_adam_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"SparseAdam takes sparse gradients .* use Adam and sparse=False"):
        traced(torch.optim.SparseAdam)

"""Uses of parameters that pass by torch's classes of tensors, and uses of the optimizer's states."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from tests.support.outside_uses import IN, ITEMS, SENTENCE, Model, Use


class Copies(Use):
    """Functions that take whatever they get for data, and ask no class."""

    def after_step(self, step: int) -> None:
        for p in self.model.parameters():
            row = p.data[0]
            p.data.mul_(0.9)
            for made in (
                torch.tensor(p), torch.tensor(p.data), torch.tensor(row), torch.Tensor(p), torch.as_tensor(p.data),
                torch.as_tensor(p, dtype=torch.float64), torch.asarray(p.detach()), torch.zeros(1).new_tensor(p),
                p.new_tensor(p), p.detach().as_subclass(Tensor), torch.tensor([row.view(-1)[0], p.detach().sum()]),
            ):  # fmt: skip
                self.note(made)
            self.note(float(p.detach().__array__().sum()))
            self.note(torch.from_numpy(np.copy(row.numpy())))
            self.note(pickle.loads(pickle.dumps(p)))
            self.note(pickle.loads(pickle.dumps({"data": p.data}))["data"])
            assert torch.as_tensor(p) is p
            torch.Tensor(p.data).mul_(1.5)
            torch.as_tensor(p.data).view(-1)[0] = 0.5
        file = io.BytesIO()
        torch.save([copy.deepcopy(self.model), self.model.items], file)
        file.seek(0)
        for module in torch.load(file, weights_only=False):
            assert all(type(p) is nn.Parameter for p in module.parameters())
            for p in module.parameters():
                self.note(p)


class Transforms(Use):
    """``torch.func`` on the model's own weights: gradients per sample, a Jacobian, a product per row."""

    def after_step(self, step: int) -> None:
        model, x = self.model, torch.linspace(-1, 1, 3 * IN).view(3, IN)
        weights = {name: p.detach() for name, p in model.student.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model.student, weights, (x[None],)).square().sum()

        for gradient in vmap(grad(loss), in_dims=(None, 0))(weights, x).values():
            self.note(gradient)
        self.note(jacrev(lambda weights: loss(weights, x[0]))(weights)["up.weight"])
        self.note(vmap(lambda row: row @ x.T)(model.items.weight.detach()))
        self.note(vmap(lambda row: model.items.weight.detach() @ row)(x))
        halved = {name: 0.5 * p for name, p in weights.items()}
        self.note(functional_call(model.student, halved, (x,)))
        self.note(functional_call(model.student, {"up.weight": halved["up.weight"]}, (x,)))
        self.note(functional_call(model.student, dict(model.student.named_parameters()), (x,)))
        self.note(functional_call(model.student, weights, (x,)))


class FastWeights(Use):
    """A step of gradient descent in the loss, through which the second loss is differentiated (MAML)."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        student = dict(self.model.student.named_parameters())
        first = self.model.student(torch.ones(2, IN)).square().mean()
        gradients = torch.autograd.grad(first, [*student.values()], create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(student.items(), gradients, strict=True)}
        return functional_call(self.model.student, fast, (x,)).sub(x).square().mean() + self.model.loss(x)


class ForwardMode(Use):
    """Derivatives along a direction of the inputs, through the model itself."""

    def after_step(self, step: int) -> None:
        x, direction = torch.ones(2, IN), torch.linspace(-1, 1, 2 * IN).view(2, IN)
        with forward_ad.dual_level():
            out = self.model.student(forward_ad.make_dual(x, direction))
            self.note(forward_ad.unpack_dual(out).tangent)


class LateFunction(Use):
    """An autograd function of the user's own that is given weights, from the second step on."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        loss = self.model.loss(x)
        if step:
            loss = loss + Product.apply(x, self.model.items.weight).square().mean()  # type: ignore[no-untyped-call]
            hidden = checkpoint(lambda x, w: x @ w.T, x, self.model.student.up.weight, use_reentrant=True)
            loss = loss + hidden.square().mean()
        return loss


class Product(torch.autograd.Function):
    """x (n, in) times a weight (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Mixing(torch.optim.Optimizer):
    """Divides each gradient by its norm, so that elements depend on each other."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.add_(mean / mean.norm(), alpha=-0.05)


class OtherOptimizers(Use):
    """Optimizers that the plan knows nothing of."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        student, items = list(model.student.parameters()), [model.items.weight]
        self.others = [
            Mixing(student), torch.optim.Adafactor(student, lr=0.01), torch.optim.Adam(items, amsgrad=True),
            torch.optim.SGD(items, lr=0.1, momentum=0.5, nesterov=True), torch.optim.RMSprop(items, foreach=True),
        ]  # fmt: skip

    def after_backward(self, step: int) -> None:
        for optimizer in self.others:
            optimizer.step()
            for state in optimizer.state.values():
                for value in state.values():
                    self.note(value)


class StatesRead(Use):
    """What callbacks log, keep and reset of Adam's states."""

    def make_optimizer(self, model: Model) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        return self.optimizer

    def after_step(self, step: int) -> None:
        optimizer = self.optimizer
        for p in optimizer.param_groups[0]["params"]:
            state = optimizer.state[p]
            assert state["exp_avg"].shape == p.shape
            self.note(f"{sorted(state)} {len(state)} {'exp_avg' in state} {state.get('none')}")
            self.note(state["exp_avg_sq"].sqrt().max())
            self.note(torch.tensor(state["exp_avg"]))
            self.note(state["step"])
            if step == 1:
                state["exp_avg"].mul_(0.5)
                state["exp_avg_sq"][0] = 0.25
            elif step == 2:
                state["exp_avg"] = torch.ones_like(p) * 0.01
                state["exp_avg_sq"] = state["exp_avg_sq"] * 2
        for entries in optimizer.state_dict()["state"].values():
            for value in dict(entries).values():
                self.note(value)


class StatesSaved(StatesRead):
    """States that are saved and loaded by plain means."""

    def after_step(self, step: int) -> None:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.note(saved["state"][0]["exp_avg"])
        if step == 0:
            self.kept = saved
        elif step == 2:
            self.optimizer.load_state_dict(self.kept)
            self.note(self.optimizer.state_dict()["state"][0]["exp_avg"])
        deep = copy.deepcopy(self.optimizer)
        for entries in deep.state.values():
            self.note(entries["exp_avg_sq"])
        assert type(deep.state) is defaultdict


class MomentumReset(Use):
    def after_step(self, step: int) -> None:
        optimizer = self.optimizer
        for state in optimizer.state.values():
            self.note(state["momentum_buffer"].norm())
        if step == 0:
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        elif step == 1:
            optimizer.state.clear()
        elif step == 2:
            optimizer.state = defaultdict(dict, {p: {"momentum_buffer": 0.1 * p.detach()} for p in optimizer.state})


DOORS: dict[str, Callable[[Model], Use]] = {
    use.__name__: use
    for use in (
        Copies,
        Transforms,
        FastWeights,
        ForwardMode,
        LateFunction,
        OtherOptimizers,
        StatesRead,
        StatesSaved,
        MomentumReset,
    )
}


IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


def _loss(weight: Tensor) -> Tensor:
    return weight.square().sum()


def _backward_after(model: Model, change: Callable[[nn.Parameter], Any]) -> None:
    loss = model.student(torch.ones(2, IN)).square().sum()
    with torch.no_grad():
        change(model.student.down.weight)
    try:
        loss.backward()
    finally:
        model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # ends the pass that was broken off


def _step(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def _assign(parameter: nn.Parameter) -> None:
    parameter.data = 2 * parameter.data


REFUSED_DOORS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "DLPack": (lambda model: torch.utils.dlpack.to_dlpack(model.items.weight), "to_dlpack needs its memory as a whole"),
    "DLPack of its data": (lambda model: torch.from_dlpack(model.items.weight.data), SENTENCE),
    "DLPack of numpy": (lambda model: np.from_dlpack(model.items.weight.detach()), SENTENCE),
    "set_": (lambda model: model.items.weight.data.set_(torch.zeros(ITEMS, IN)), "set_ needs its memory as a whole"),
    "set_ of the parameter": (lambda model: model.items.weight.set_(), SENTENCE),
    "swapped": (
        lambda model: torch.utils.swap_tensors(model.items.weight, nn.Parameter(torch.zeros(ITEMS, IN))),
        "swap_tensors needs its memory as a whole",
    ),
    "autograd of slices": (
        lambda model: torch.autograd.grad(model.items(torch.tensor([1])).sum(), model.items.weight, allow_unused=True),
        r"nothing|autograd knows its slices alone",
    ),
    "backward after a write": (lambda model: _backward_after(model, lambda p: p.mul_(2)), IN_PLACE),
    "backward after a step": (lambda model: _backward_after(model, _step), IN_PLACE),
    "backward after data were assigned": (lambda model: _backward_after(model, _assign), IN_PLACE),
    "torch.func with its gradient": (
        lambda model: grad(_loss)(model.items.weight),
        r"give it the parameter's \.detach",
    ),
    "torch.func through the model": (
        lambda model: grad(lambda x: model.student(x).sum())(torch.ones(1, IN)),
        r"torch\.func can't transform what a sharded module does: .*functional_call\(module, ",
    ),
    "torch.func around a read": (
        lambda model: grad(lambda x: (model.items.weight @ x).sum())(torch.ones(IN)),
        "torch.func would lose the gradient of it",
    ),
}

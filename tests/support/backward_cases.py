"""Modules and steps whose backward passes, hooks or results are out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributions import Normal
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

WIDTH, ROWS = 6, 5


class Net(nn.Module):
    """A block around the operator ``op`` that a case is about, between two Linears; inputs are (batch, rows, width)."""

    def __init__(self, op: nn.Module, after: Callable[[Any], Tensor] = lambda result: result) -> None:
        super().__init__()
        self.first, self.block, self.out = nn.Linear(WIDTH, WIDTH), Block(op, after), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(torch.tanh(self.first(x))))


class Block(nn.Module):
    """The operator, a Linear, and a sum."""

    def __init__(self, op: nn.Module, after: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.op, self.lin, self.after = op, nn.Linear(WIDTH, WIDTH), after

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.softplus(self.lin(self.after(self.op(x))))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def plain_net() -> Net:
    return Net(linear(), torch.tanh)


def frozen_net() -> Net:
    net = plain_net()
    net.block.op.requires_grad_(False)
    net.first.requires_grad_(False)
    return net


def square(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


# -- backward passes that reach no parameters, or reach them more than once


def forces(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    energy = model(x).square().sum(dim=(1, 2))
    (force,) = grad(energy.sum(), x, create_graph=True)
    (energy.mean() + force.square().mean()).backward()


def adversarial(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (ascent,) = grad(model(x).square().mean(), x)
    square(model, (x + 0.1 * ascent.sign()).detach())


def adversarial_of_both(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    clean = model(x).square().mean()
    (ascent,) = grad(clean, x, retain_graph=True)
    (clean + model((x + 0.1 * ascent.sign()).detach()).abs().mean()).backward()


def adaptive_weight(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    one, other = y.square().mean(), (y - x).abs().mean()
    norms = [grad(loss, model.out.weight, retain_graph=True)[0].norm() for loss in (one, other)]
    (one + (norms[0] / (norms[1] + 1e-4)).clamp(0, 10).detach() * other).backward()


def gradient_penalty(model: nn.Module, x: Tensor) -> None:
    fake = x.flip(0) * 0.5
    mixed = (0.3 * x + 0.7 * fake).requires_grad_()
    (slope,) = grad(model(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    (model(fake).mean() - model(x).mean() + 10 * penalty).backward()


def penalty_by_itself(model: nn.Module, x: Tensor) -> None:
    mixed = x.clone().requires_grad_()
    (slope,) = grad(model(mixed).square().sum(), mixed, create_graph=True)
    slope.square().mean().backward()
    square(model, x)


def weight_gradient_penalty(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    gradients = grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()


def curvature(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (first,) = grad(model(x).square().sum(), x, create_graph=True)
    (second,) = grad((first * x.detach()).sum(), x, create_graph=True)
    second.square().mean().backward()


def retained(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def parts(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    y[:1].square().mean().backward(retain_graph=True)
    y[1:].abs().mean().backward()
    model(x * 2).mean().backward()


def two_forwards(model: nn.Module, x: Tensor) -> None:
    (model(x).square().mean() + model(x.flip(1) * 2).abs().mean()).backward()


def two_graphs(model: nn.Module, x: Tensor) -> None:
    one, other = model(x).square().mean(), model(2 * x).abs().mean()
    one.backward()
    other.backward()


def unused_forward(model: nn.Module, x: Tensor) -> None:
    kept = model(x * 3)
    square(model, x)
    del kept


def teacher_without_gradients(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    with torch.no_grad():
        target = model(x.flip(0))
    (y - target).square().mean().backward()


def gradients_in_evaluation(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad(), torch.enable_grad():
        x2 = x.clone().requires_grad_()
        (slope,) = grad(model(x2).square().sum(), x2)
    model.train()
    (model(x + 0.01 * slope)).square().mean().backward()


def only_some_inputs(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward(inputs=[model.out.weight, model.block.lin.weight])


def failed_step(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    y.register_hook(lambda g: (_ for _ in ()).throw(ValueError("broken off")))
    with suppress(ValueError):
        (y + model.out(x)).mean().backward()
    model.zero_grad()
    square(model, x)


def offloaded_activations(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().mean()
    loss.backward()


# -- in-place results, and results that are inputs


def add_in_place(y: Tensor) -> Tensor:
    y += 1
    return y.mul_(2)


def change_view_in_place(y: Tensor) -> Tensor:
    y[:, 0].add_(1)
    y.view(-1)[:3].mul_(2)
    return y


class Echo(nn.Module):
    """Hands out its input and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 0.5 + 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.weight
        return x, y, y


class AddTo(nn.Module):
    """Adds in place: its result is what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * ROWS).view(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1).add_(self.weight)


# -- hooks


def read_before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (args[0] * (1 + module.weight.square().mean()),)


def read_after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.weight.sum(0)


def write_before(module: nn.Module, args: Any) -> None:
    module.weight.data.clamp_(-0.2, 0.2)


def assign_before(module: nn.Module, args: Any) -> None:
    module.weight.data = functional.normalize(module.weight.data, dim=1)


def write_without_grad_before(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        module.weight.div_(module.weight.norm())


def hooked(pre: Any = None, post: Any = None) -> nn.Module:
    layer = linear()
    if pre is not None:
        layer.register_forward_pre_hook(pre)
    if post is not None:
        layer.register_forward_hook(post)
    return layer


def pruned() -> nn.Module:
    return nn.utils.prune.l1_unstructured(linear(), "weight", amount=0.3)


def with_global_hooks(model: nn.Module, x: Tensor) -> None:
    def pre(module: nn.Module, args: Any) -> Any:
        return read_before(module, args) if isinstance(module, nn.Linear) else None

    def post(module: nn.Module, args: Any, output: Any) -> Any:
        return read_after(module, args, output) if isinstance(module, nn.Linear) else None

    handles = [torch_module.register_module_forward_pre_hook(pre), torch_module.register_module_forward_hook(post)]
    try:
        square(model, x)
    finally:
        for handle in handles:
            handle.remove()


def with_full_backward_hook() -> nn.Module:
    layer = linear()
    layer.register_full_backward_hook(lambda module, inputs, outputs: tuple(2 * g for g in inputs))
    return layer


def decayed() -> Net:
    net = plain_net()
    weight = net.block.op.weight
    weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())
    return net


def in_direct_forward(model: nn.Module, x: Tensor) -> None:
    model.out.forward(model.block.op.forward(model.first(x))).square().mean().backward()


# -- results of other kinds


@dataclass
class Result:
    """Not known to pytree."""

    value: Tensor
    more: dict[str, Any]


class Named(NamedTuple):
    first: Tensor
    second: list[Tensor]


class Own:
    """An object with tensors somewhere inside."""

    def __init__(self, value: Tensor) -> None:
        self.inner = SimpleNamespace(value=value)


class WithWeight(nn.Module):
    """Has a square weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))


class Custom(WithWeight):
    """A product handed out as ``pack`` makes it."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(torch.tanh(x @ self.weight) @ self.weight.t())


class Router(WithWeight):
    """Keeps a loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.weight
        self.aux_loss = logits.softmax(-1).mean((0, 1)).square().sum()
        return x * logits.detach().sigmoid()


def with_router_loss(model: nn.Module, x: Tensor) -> None:
    y = model(x).square().mean()
    (y + model.block.op.aux_loss).backward()


class KeptOnContext(torch.autograd.Function):
    """Keeps its weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight.t(), ctx.x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class OwnFunction(WithWeight):
    def forward(self, x: Tensor) -> Tensor:
        return KeptOnContext.apply(x, self.weight)


class Leaving(WithWeight):
    """Hands out its weight, a view of it, or what reads it later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "later":
            return lambda: torch.tanh(x @ self.weight)
        left = {"weight": self.weight, "view": self.weight[:4], "expanded": self.weight.expand(2, -1, -1)}
        return torch.tanh(x @ self.weight), left[self.how]


class Inside(WithWeight):
    """Recomputes itself, or saves tensors by hooks of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return self.product(x)
        return checkpoint(self.product, x, use_reentrant=self.how == "reentrant")

    def product(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class EnergyInside(WithWeight):
    """Differentiates within its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            energy = torch.tanh(x @ self.weight).square().sum()
            return grad(energy, x, create_graph=True)[0]


Step = Callable[[nn.Module, Tensor], None]

STEPS: tuple[Step, ...] = (
    forces,
    adversarial,
    adversarial_of_both,
    adaptive_weight,
    gradient_penalty,
    penalty_by_itself,
    weight_gradient_penalty,
    curvature,
    retained,
    parts,
    two_forwards,
    two_graphs,
    unused_forward,
    teacher_without_gradients,
    gradients_in_evaluation,
    only_some_inputs,
    failed_step,
    offloaded_activations,
    with_global_hooks,
    in_direct_forward,
)
FROZEN_STEPS: tuple[Step, ...] = (square, forces, adversarial, retained, two_forwards)

CASES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    **{step.__name__: (plain_net, step) for step in STEPS},
    **{f"frozen, {step.__name__}": (frozen_net, step) for step in FROZEN_STEPS},
    "inplace relu": (lambda: Net(linear(), nn.ReLU(inplace=True)), square),
    "inplace relu, forces": (lambda: Net(linear(), nn.SiLU(inplace=True)), forces),
    "inplace add": (lambda: Net(linear(), add_in_place), square),
    "inplace view": (lambda: Net(linear(), change_view_in_place), square),
    "inplace on parts": (lambda: Net(linear(), lambda y: torch.cat([p.clone().add_(1) for p in y.chunk(2)])), square),
    "echo": (lambda: Net(Echo(), lambda r: r[0] + r[1] * r[2]), square),
    "echo unused": (lambda: Net(Echo(), lambda r: r[0]), square),
    "adds to its input": (lambda: Net(AddTo()), square),
    "weight norm": (lambda: Net(nn.utils.weight_norm(linear())), square),
    "weight norm, forces": (lambda: Net(nn.utils.weight_norm(linear()), torch.tanh), forces),
    "spectral norm": (lambda: Net(nn.utils.spectral_norm(linear())), square),
    "parametrized weight norm": (lambda: Net(nn.utils.parametrizations.weight_norm(linear())), square),
    "parametrized spectral norm": (lambda: Net(nn.utils.parametrizations.spectral_norm(linear())), square),
    "pruned": (lambda: Net(pruned()), square),
    "reads before": (lambda: Net(hooked(read_before)), square),
    "reads after": (lambda: Net(hooked(None, read_after)), square),
    "reads before and after": (lambda: Net(hooked(read_before, read_after)), forces),
    "writes before": (lambda: Net(hooked(write_before)), square),
    "assigns before": (lambda: Net(hooked(assign_before)), square),
    "writes without grad before": (lambda: Net(hooked(write_without_grad_before)), square),
    "backward hook": (lambda: Net(with_full_backward_hook()), square),
    "weight decay by hook": (decayed, square),
    "dataclass": (lambda: Net(Custom(lambda y: Result(y, {"a": [y * 2]})), lambda r: r.value + r.more["a"][0]), square),
    "dataclass, forces": (lambda: Net(Custom(lambda y: Result(y, {})), lambda r: r.value), forces),
    "distribution": (
        lambda: Net(Custom(lambda y: Normal(y, y.exp())), lambda d: d.mean + d.log_prob(torch.ones(()))),
        square,
    ),
    "own object": (lambda: Net(Custom(Own), lambda r: r.inner.value), square),
    "model output": (
        lambda: Net(Custom(lambda y: BaseModelOutput(y, (y * 2,))), lambda r: r[0] + r.hidden_states[0]),
        square,
    ),
    "named tuple": (lambda: Net(Custom(lambda y: Named(y, [y * 2])), lambda r: r.first + r.second[0]), square),
    "generator": (lambda: Net(Custom(lambda y: (y * n for n in (1, 2))), lambda r: sum(r)), square),
    "function": (lambda: Net(Custom(lambda y: lambda: y), lambda r: r()), square),
    "hands out its weight": (lambda: Net(Leaving("weight"), lambda r: r[0] @ r[1]), square),
    "hands out a view": (lambda: Net(Leaving("view"), lambda r: r[0] + r[1].sum(0)), square),
    "hands out a view, forces": (lambda: Net(Leaving("view"), lambda r: r[0] * r[1].sum(0)), forces),
    "hands out copies by expand": (lambda: Net(Leaving("expanded"), lambda r: r[0] @ r[1]), square),
    "reads its weight later": (lambda: Net(Leaving("later"), lambda r: r()), square),
    "router loss": (lambda: Net(Router()), with_router_loss),
    "kept on context": (lambda: Net(OwnFunction()), square),
    "recomputes itself": (lambda: Net(Inside("non-reentrant")), square),
    "recomputes itself, reentrant": (lambda: Net(Inside("reentrant")), square),
    "own hooks inside": (lambda: Net(Inside("hooks")), square),
    "energy inside": (lambda: Net(EnergyInside()), square),
}
"""By name: what makes the module, and a step up to its gradients."""

"""Uses that change what a sharded module is made of, or go past what trains it, in the middle of training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune

from tests.support.outside_uses import HIDDEN, IN, ITEMS, Model, Use

ROWS = torch.linspace(-1, 1, 3 * IN).view(3, IN)


class OwnSteps(Use):
    """Backward passes and steps of the optimizer that no strategy sees, several in a row."""

    def after_step(self, step: int) -> None:
        for scale in (1.0, 0.5):
            self.optimizer.zero_grad()
            loss = self.model.loss(scale * ROWS)
            self.note(loss)
            loss.backward()
            self.optimizer.step()
        self.note(self.model.loss(ROWS))
        self.optimizer.zero_grad()


class OwnOptimizer(Use):
    """The same with optimizers made in the middle of training, of the plan's class and of others, fused ones too."""

    def after_step(self, step: int) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:], "lr": 0.2}]
        self.others: list[Any] = [
            torch.optim.SGD(groups, lr=0.1, momentum=0.5),
            torch.optim.Adam(parameters, lr=0.01, eps=1e-3),
            torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, amsgrad=True, fused=True),
            torch.optim.Adagrad(parameters, lr=0.01, eps=1e-3, fused=True),
        ]
        for optimizer in self.others:
            optimizer.zero_grad()
            self.model.loss(ROWS).backward()
            optimizer.step()
            self.note(self.model.loss(ROWS))
        self.optimizer.zero_grad()


class SharpnessAware(Use):
    """Weights are moved by their gradient, differentiated there, and put back."""

    def after_backward(self, step: int) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = {}
        with torch.no_grad():
            for p in parameters:
                before[p] = p.data.clone()
                p.add_(p.grad * (0.05 / norm))
        self.model.zero_grad()
        self.model.loss(ROWS).backward()
        for p in parameters:
            p.data = before[p]


class LossScaled(Use):
    """A gradient scaler by hand: a row of one rank's part overflows, and no rank may make that step."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def after_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.model.loss(ROWS)
        if step % 2:
            loss = loss + self.model.items(torch.tensor([0])).sum() * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note(self.scaler.get_scale())
        self.optimizer.zero_grad()


class LateHooks(Use):
    """Hooks on gradients that are put on parameters in the middle of training."""

    def after_step(self, step: int) -> None:
        if step == 1:
            for p in (self.model.student.up.bias, self.model.student.down.weight, self.model.items.weight):
                p.register_post_accumulate_grad_hook(halve_gradient)
            self.model.student.up.weight.register_hook(lambda gradient: 0.5 * gradient)


class LateModuleHooks(Use):
    """All kinds of hooks on modules, from the second step on."""

    def after_step(self, step: int) -> None:
        if step:
            return
        up, down = self.model.student.up, self.model.student.down
        up.register_forward_pre_hook(lambda m, args: (args[0] * (1 + m.weight.square().mean()),))
        up.register_forward_hook(lambda m, args, kwargs, out: out + m.weight.mean(), with_kwargs=True)
        down.register_full_backward_pre_hook(lambda m, gradients: tuple(0.5 * g for g in gradients))
        down.register_full_backward_hook(lambda m, inputs, outputs: tuple(2 * g for g in inputs))
        self.model.items.register_full_backward_hook(lambda m, inputs, outputs: None)
        up.register_full_backward_hook(lambda m, inputs, outputs: self.note(m.weight.detach().norm() * 0))


class Tied(Use):
    """A weight takes another one's place, and later an ordinary one of its own."""

    def after_step(self, step: int) -> None:
        student = self.model.student
        if step == 0:
            student.down.weight = nn.Parameter(torch.ones(IN, HIDDEN) * 0.1)
        elif step == 1:
            self.model.teacher.up.weight = student.up.weight
        elif step == 2:
            student.up.bias = None


class Assigned(Use):
    """State dicts whose tensors become the parameters."""

    def after_step(self, step: int) -> None:
        if step == 1:
            state = {name: value.clone() for name, value in self.model.student.state_dict().items()}
            self.model.student.load_state_dict(state, assign=True)


class PrunedByTorch(Use):
    def after_step(self, step: int) -> None:
        torch.manual_seed(step)
        if step == 0:
            prune.l1_unstructured(self.model.student.up, "weight", amount=0.4)
            prune.random_structured(self.model.items, "weight", amount=0.3, dim=0)
        elif step == 2:
            prune.remove(self.model.student.up, "weight")
            prune.remove(self.model.items, "weight")


class Replaced(Use):
    """Modules that are put in the place of others, or around them."""

    def after_step(self, step: int) -> None:
        student = self.model.student
        if step == 0:
            student.down = nn.Sequential(student.down, nn.Dropout(0.0))
        elif step == 1:
            student.up = copy.deepcopy(student.up)
        elif step == 2:
            self.note(copy.copy(self.model.items)(torch.tensor([1, 2])))


class KeptViews(Use):
    """A hook keeps views of a weight, which are read when the run is over."""

    def after_step(self, step: int) -> None:
        if step == 0:
            self.model.items.register_forward_hook(self.keep)
        with torch.no_grad():
            self.model.items(torch.tensor([0, 1]))
        self.note(self.model.loss(ROWS))
        for view in self.kept:
            self.note(view)

    def keep(self, module: nn.Embedding, args: Any, output: Tensor) -> None:
        if not torch.is_grad_enabled():
            self.kept = [module.weight[1:], module.weight.T, module.weight.detach()]


class FailedRuns(Use):
    """Runs of operators that raise, which the step catches."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        with suppress(RuntimeError):
            self.model.student.up(x[:, :2])
        with suppress(IndexError):
            self.model.items(torch.tensor([ITEMS + 3]))
        return self.model.loss(x)


class GradientsReplaced(Use):
    """Gradients that are kept, cleared, projected on each other and given back."""

    def after_backward(self, step: int) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        first = [p.grad.clone() for p in parameters]
        self.model.zero_grad()
        self.model.loss(ROWS).backward()
        for p, one in zip(parameters, first, strict=True):
            other = p.grad
            along = (one * other).sum().clamp(max=0.0)
            p.grad = one + other - along / (other.norm() ** 2 + 1e-6) * other
            torch.nan_to_num(p.grad, out=p.grad)
            if p.dim() > 1:
                p.grad -= p.grad.mean(1, keepdim=True)


class Cast(Use):
    """Conversions that change nothing, and modes that are switched around a run."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        with torch.inference_mode():
            self.note(float(self.model.loss(ROWS)))
        return self.model.loss(x)

    def after_step(self, step: int) -> None:
        model = self.model
        model.to("cpu").float().to(torch.float32).cpu().train().requires_grad_(False)
        model.student.requires_grad_(True)
        model.items.requires_grad_(True)
        torch.set_grad_enabled(False)
        self.note(model.loss(ROWS))
        torch.set_grad_enabled(True)
        with torch.inference_mode():
            self.note(float(model.loss(ROWS)))
            self.note(float(model.items.weight.sum()))


class Parametrized(Use):
    """Parametrizations that come and go, with an inverse and without, on weights of each kind."""

    def after_step(self, step: int) -> None:
        up, down, items = self.model.student.up, self.model.student.down, self.model.items
        if step == 0:
            parametrize.register_parametrization(up, "weight", Scaled())
            parametrize.register_parametrization(items, "weight", Centered())
        elif step == 1:
            parametrize.register_parametrization(down, "weight", Scaled())
            up.weight = 0.5 * up.weight.detach()
        elif step == 2:
            parametrize.remove_parametrizations(up, "weight", leave_parametrized=True)
            parametrize.remove_parametrizations(items, "weight", leave_parametrized=True)
            parametrize.remove_parametrizations(down, "weight", leave_parametrized=False)
        self.note(up.weight)
        self.note(items.weight)
        self.note(self.model.loss(ROWS))


class GroupsAdded(Use):
    """Parameters that join the optimizer in training, and weights that are frozen and thawed meanwhile."""

    def make_optimizer(self, model: Model) -> torch.optim.Optimizer:
        model.student.down.requires_grad_(False)
        parameters = [*model.student.up.parameters(), *model.items.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return self.optimizer

    def after_step(self, step: int) -> None:
        student = self.model.student
        if step == 0:
            student.down.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(student.down.parameters()), "lr": 0.05, "momentum": 0.5})
        elif step == 1:
            self.model.items.requires_grad_(False)
            self.model.teacher.requires_grad_(True)
        elif step == 2:
            self.model.items.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.model.teacher.parameters()), "lr": 0.01})
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


def halve_memory(tensor: Tensor) -> None:
    array = tensor.detach().numpy()
    array *= 0.5


LIBRARY = torch.library.Library("osdp_tests", "DEF")
LIBRARY.define("halve_memory(Tensor(a!) tensor) -> ()")
LIBRARY.impl("halve_memory", halve_memory, "CPU")


class WrittenByOperator(Use):
    """An operator of the user's own, whose kernel writes to memory so that autograd's versions do not count it."""

    def after_step(self, step: int) -> None:
        with torch.no_grad():
            torch.ops.osdp_tests.halve_memory(self.model.student.up.weight)
            torch.ops.osdp_tests.halve_memory.default(self.model.items.weight[0])
        self.note(self.model.loss(ROWS))


class RowsLimited(Use):
    """Functions that limit the norms of rows, and a view that is changed: amid a graph, and between steps."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        loss, items = super().loss(x, step), self.model.items.weight
        first = items[:2]
        first.detach().mul_(0.9)
        rows = functional.embedding(torch.tensor([1, 2, 2]), items, max_norm=0.5)
        bag = functional.embedding_bag(torch.tensor([[3, 4]]), items, max_norm=0.5, mode="sum")
        return loss + 0.01 * (rows.sum() + bag.square().sum() + first.sum())

    def after_step(self, step: int) -> None:
        items = self.model.items.weight
        self.note(functional.embedding(torch.tensor([5, 1]), items, max_norm=0.3))
        with torch.no_grad():
            torch.embedding_renorm_(items, torch.tensor([6]), 0.2, 2.0)
        self.note(items)


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Centered(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


ODD_USES: dict[str, Callable[[Model], Use]] = {
    use.__name__: use
    for use in (
        OwnSteps, OwnOptimizer, SharpnessAware, LossScaled, LateHooks, LateModuleHooks, Tied, Assigned, PrunedByTorch,
        Replaced, KeptViews, FailedRuns, GradientsReplaced, Cast, Parametrized, GroupsAdded,
        WrittenByOperator, RowsLimited,
    )
}  # fmt: skip

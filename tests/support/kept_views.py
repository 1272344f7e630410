"""Views of weights that are kept: taken before a module is sharded, or while an operator runs in training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.support.outside_uses import HIDDEN, IN, SENTENCE, Model, Use

ROWS = torch.linspace(-1, 1, 3 * IN).view(3, IN)


class TakenBefore(Use):
    """Views that were taken when the module was made, read and written between steps."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        student = model.student
        self.held = [student.up.weight[:3], student.down.weight.t(), *model.items.weight.data.unbind()]
        self.held += [model.teacher.up.weight.detach(), model.items.weight.view(-1)[5:11]]
        self.read = lambda: self.held[1][2]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        for view in self.held:
            self.note(view)
        self.held[1][0] = 0.25
        self.held[2].mul_(0.5)
        self.held[0].add_(0.01)
        self.note(self.read())
        self.note(self.model.loss(ROWS))


class TakenBeforeAndTrained(Use):
    """The same in the loss: gradients pass through views that were taken once."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.held = [model.student.up.weight[:3], model.student.down.weight.t(), model.items.weight.view(-1)[5:11]]

    def loss(self, x: Tensor, step: int) -> Tensor:
        rows, transposed, some = self.held
        outside = rows.square().mean() + transposed[1].abs().sum() + 0.1 * (some * some.detach()).sum()
        return self.model.loss(x) + 0.1 * outside


class TakenInRuns(Use):
    """A hook that is put there later keeps views in each training step; the last ones are read when weights changed."""

    def take(self, module: Any, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not self.is_done:
            weight = module.weight
            self.kept[module] = [weight[1:], weight.T, weight.detach()[0], *weight.unbind()[:2], weight.data]

    def after_step(self, step: int) -> None:
        self.kept: dict[nn.Module, list[Tensor]] = {} if step == 0 else self.kept
        self.is_done = step == 2
        if step == 0:
            for module in (self.model.student.up, self.model.items):
                module.register_forward_hook(self.take)
        for views in self.kept.values():
            for view in views:
                self.note(view.detach().norm())
                self.note(view)
        self.note(self.model.loss(ROWS).detach())


class KeptByProduct(Use):
    """The very tensor that autograd saves is kept, and used once more when the operator is done."""

    def make_optimizer(self, model: Model) -> torch.optim.Optimizer:
        up = model.student.up

        def forward(x: Tensor) -> Tensor:
            if self.is_keeping:
                self.transposed = up.weight.t()
                return x @ self.transposed + up.bias
            return nn.functional.linear(x, up.weight, up.bias)

        self.is_keeping, up.forward = False, forward  # type: ignore[method-assign]
        return super().make_optimizer(model)

    def loss(self, x: Tensor, step: int) -> Tensor:
        self.is_keeping = step > 0
        loss = self.model.loss(x)
        return loss + 0.1 * self.transposed.square().sum() if step else loss

    def after_step(self, step: int) -> None:
        if step:
            self.note(self.transposed.detach())


class HandedToNumpy(Use):
    """Hooks make statistics by numpy, and keep arrays, storages and what autograd is given by hooks of their own."""

    def look(self, module: Any, args: Any, output: Tensor) -> None:
        self.array = module.weight.detach().numpy()
        self.note(float(self.array.sum()))
        self.note(float(np.asarray(module.weight.data).max()))

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step == 1:
            for module in (self.model.student.up, self.model.items):
                module.register_forward_hook(self.look)
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.model.loss(x)

    def after_step(self, step: int) -> None:
        for p in self.model.parameters():
            self.note(float(p.detach().numpy().sum()))


class FromOtherMemory(Use):
    """Weights that are parts of one tensor, whose memory is numpy's or their own but can't be freed."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        fused = torch.linspace(-0.5, 0.5, 12 * IN).view(12, IN)
        parts = fused.split([5, 7])
        model.items.weight = nn.Parameter(parts[1])
        model.register_parameter("extra", nn.Parameter(parts[0]))
        rows = np.linspace(-1, 1, HIDDEN * IN, dtype="float32").reshape(HIDDEN, IN)
        model.student.up.weight = nn.Parameter(torch.from_numpy(rows))
        model.student.down.weight.detach().numpy()
        self.state = {name: value.clone() for name, value in model.teacher.state_dict().items()}
        model.teacher.load_state_dict(self.state, assign=True)
        model.teacher.requires_grad_(False)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return self.model.loss(x) + self.model.extra.square().sum()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        self.model.teacher.up.weight.mul_(0.9)
        for value in self.state.values():
            self.note(value)


class TwoNames(Use):
    """A module that is registered under two names."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        model.again, model.inner = model.student, nn.ModuleList([model.student.up])

    def after_step(self, step: int) -> None:
        self.note(sorted(self.model.state_dict()))
        self.note(self.model.again(ROWS).detach())


KEPT_VIEWS: dict[str, Callable[[Model], Use]] = {
    use.__name__: use
    for use in (
        TakenBefore,
        TakenBeforeAndTrained,
        TakenInRuns,
        KeptByProduct,
        HandedToNumpy,
        FromOtherMemory,
        TwoNames,
    )
}


def _in_other_thread(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


REFUSED_ELSEWHERE: dict[str, tuple[Callable[[Model], Any], str]] = {
    "read in another thread": (
        lambda model: _in_other_thread(lambda: model.items.weight.sum()),
        "another thread than the one that trains can't gather it",
    ),
    "written in another thread": (lambda model: _in_other_thread(lambda: model.items.weight.data.mul_(2)), SENTENCE),
    "a parametrization that makes other parameters": (
        lambda model: nn.utils.parametrizations.weight_norm(model.items),
        "what stands for it can't be a leaf of another graph",
    ),
    "another type of one module": (
        lambda model: model.items.to(torch.bfloat16),
        r"torch\.bfloat16 on cpu can't take the place",
    ),
    "run in another thread": (
        lambda model: _in_other_thread(lambda: model.student(ROWS)),
        "a sharded operator runs in another thread than the one that trains",
    ),
}

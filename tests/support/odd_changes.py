"""Modules, as in ``odd_modules``, that change what they train from step to step, or look at an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from tests.support.odd_modules import HIDDEN, Odd


class FrozenInStepByRank(Odd):
    """Ranks freeze and thaw parameters in turn, within the step."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if self.is_live(batch[0]):
            self.mid.requires_grad_((batch_index + self.global_rank) % 2 == 0)
            self.enter.bias.requires_grad_(batch_index != 2)
        return super().training_step(batch, batch_index)


class FrozenTogetherThenByRank(Odd):
    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        self.enter.bias.requires_grad_(batch_index < 1)
        self.table.requires_grad_(batch_index != 2 or self.global_rank != 1)


class Thawed(Odd):
    """An operator that is frozen from the start is trained as ``is_trained`` says; DDP has to be given it unfrozen."""

    is_by_ddp = False

    def build(self) -> None:
        self.mid.requires_grad_(False)

    def setup(self, stage: str) -> None:
        self.is_by_ddp = isinstance(self.trainer.strategy, DDPStrategy)
        self.mid.requires_grad_(self.is_by_ddp)

    def on_fit_start(self) -> None:
        self.mid.requires_grad_(False)

    def is_trained(self, batch_index: int) -> bool:
        return batch_index % 2 == 1

    def training_step(self, batch: Any, batch_index: int) -> Any:
        if self.is_live(batch[0]):
            self.mid.requires_grad_(self.is_trained(batch_index))
        return super().training_step(batch, batch_index)

    def on_train_batch_end(self, *_: Any) -> None:
        self.mid.requires_grad_(False)


class ThawedByRank(Thawed):
    def is_trained(self, batch_index: int) -> bool:
        return batch_index == 3 or (batch_index > 0 and self.global_rank == 1)


class ThawedByRankBeforeStep(ThawedByRank):
    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        self.mid.requires_grad_(self.is_trained(batch_index))


class ThawedAlone(Thawed):
    """The backward pass does not go through the strategy."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_index)
        if self.is_by_ddp:
            self.manual_backward(loss)
        else:
            loss.backward()
        optimizer.step()


class HookedOptimizer(Odd):
    """Hooks on the optimizer's step that read and change weights and states, put there before training and in it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        optimizer.register_step_post_hook(self.see)
        return optimizer

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.register_step_pre_hook(self.see)
        optimizer.register_step_post_hook(self.see_gradients)

    def see_gradients(self, *_: Any) -> None:
        self.note(self.mid.weight.grad.norm())  # type: ignore[union-attr]

    def see(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_live(self.mid.weight.detach()):
            return
        for parameter in (self.mid.weight, self.head.weight):
            self.note(parameter.norm())
            if parameter in optimizer.state:
                self.note(optimizer.state[parameter]["exp_avg"].norm())
            with torch.no_grad():
                parameter.mul_(1 / parameter.norm().clamp(min=2.0))


class Limited(torch.optim.SGD):
    """Runs the step of its parent, which has hooks again, and limits what has come of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.clamp_(-0.3, 0.3)
        return loss


class OptimizerOfParent(HookedOptimizer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Limited(self.parameters(), lr=0.1, momentum=0.0)


class Bare(torch.optim.Optimizer):
    """Expects a gradient of each parameter; from the third step on it may scale them by norms of weights."""

    def __init__(self, parameters: Any, scales: bool = False) -> None:
        super().__init__(parameters, {})
        self.scales, self.steps = scales, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.mul_(0.1)
            parameter -= gradient * parameter.norm() if self.scales and self.steps > 2 else gradient


class BareOptimizer(Odd):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Bare(self.parameters())


class MixesLate(Odd):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Bare(self.parameters(), scales=True)


class NoGradient(torch.autograd.Function):
    """x (n, in) times a weight (out, in), which gets no gradient at all where ``is_left_out``."""

    is_left_out = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, None if NoGradient.is_left_out else gradient.T @ x


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(x, self.weight)  # type: ignore[no-untyped-call, no-any-return]


class WithoutGradient(Odd):
    """A weight that has no gradient in some steps: its momentum and decay rest meanwhile."""

    def build(self) -> None:
        self.product = Multiplied()

    def body(self, x: Tensor) -> Tensor:
        return self.product(super().body(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        NoGradient.is_left_out = self.is_live(batch[0]) and batch_index % 2 == 1
        return super().training_step(batch, batch_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class DrawsBatches(Odd):
    """Draws two batches of a step itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        (first, _, _), (second, _, _) = next(dataloader_iter), next(dataloader_iter)
        return self.loss(*first) + self.loss(*second)


class MadeInFitStart(Odd):
    """Has a module that no optimizer knows, as under DDP, since the strategy's setup is over."""

    late: nn.Module | None = None

    def on_fit_start(self) -> None:
        torch.manual_seed(2)
        self.late = nn.Linear(HIDDEN, HIDDEN)

    def body(self, x: Tensor) -> Tensor:
        h = super().body(x)
        return h if self.late is None else h + self.late(h)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("the step catches this")


class CaughtBackward(Odd):
    """A step's first backward pass fails when the head has its gradient; DDP refuses a second, and makes that alone."""

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.is_live(batch[0]) and batch_index == 2 and not isinstance(self.trainer.strategy, DDPStrategy):
            x, y = batch
            h = FailsInBackward.apply(self.body(x))  # type: ignore[no-untyped-call]
            with suppress(ValueError):
                self.manual_backward(functional.cross_entropy(self.head(h), y) + self.table(y).square().mean())
            optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()


class SavedTensorsScaled(Odd):
    """Hooks on what autograd saves that change all but weights, which they don't get where these are sharded."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if not self.is_live(batch[0]):
            return super().training_step(batch, batch_index)
        whole = {p.untyped_storage().data_ptr() for p in self.parameters() if type(p) is nn.Parameter}

        def pack(tensor: Tensor) -> tuple[Tensor, float]:
            is_kept = tensor.untyped_storage().data_ptr() in whole or not tensor.is_floating_point()
            return tensor, 1.0 if is_kept else 0.5

        def unpack(packed: tuple[Tensor, float]) -> Tensor:
            tensor, factor = packed
            return tensor if factor == 1.0 else tensor * factor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return super().training_step(batch, batch_index)


class MaxNormLate(Odd):
    """Rows of a table are limited from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        if batch_index == 2:
            self.table.max_norm = 0.5


class PaddingLate(Odd):
    """A row of a table is trained no more from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        if batch_index == 2:
            self.table.padding_idx = 1


CHANGE_CASES: dict[tuple[Callable[[], Odd], str], str] = {
    **{(kind, policy): "equal" for policy in ("dp", "mixed", "sliced") for kind in (
        FrozenInStepByRank, FrozenTogetherThenByRank, Thawed, ThawedByRank, ThawedByRankBeforeStep, ThawedAlone,
    )},
    **{(kind, policy): "equal" for policy in ("zdp", "mixed") for kind in (
        HookedOptimizer, OptimizerOfParent, BareOptimizer,
    )},
    **{(PaddingLate, policy): "equal" for policy in ("zdp", "sliced", "tp")},
    (MaxNormLate, "zdp"): "table is sharded, but max_norm changes rows that other ranks have, which was not so when",
    (MaxNormLate, "sliced"): "split into slices, but max_norm changes whole rows of the weight, which was not so when",
    (MixesLate, "zdp"): "Bare.step() mixes elements of sharded weights or of their gradients (linalg_vector_norm)",
    **{(WithoutGradient, policy): "equal" for policy in ("dp", "zdp")},
    **{(kind, policy): "equal" for policy in ("zdp", "tp") for kind in (DrawsBatches, MadeInFitStart)},
    **{(CaughtBackward, policy): "equal" for policy in ("zdp", "sliced", "tp")},
    (CaughtBackward, "dp"): "received its gradient twice in one backward pass. That happens",
    **{(SavedTensorsScaled, policy): "equal" for policy in ("dp", "zdp", "mixed")},
}  # fmt: skip
"""As ``odd_modules.CASES``."""

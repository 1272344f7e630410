"""Modules that use what is between operators which run together, in ways that begin when the plan is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from tests.support.odd_modules import HIDDEN, Odd

WIDE, LENGTH, HEADS = 16, 3, 2


class Between(Odd):
    """An MLP, between whose operators something happens from the third step on."""

    def build(self) -> None:
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.register_buffer("row", torch.zeros(WIDE))
        self.is_late = False

    def body(self, x: Tensor) -> Tensor:
        self.is_late = self.is_live(x) and self.global_step > 1 and self.training
        h = self.activate(self.up(super().body(x)))
        return self.lead_out(self.late(h) if self.is_late else h)

    def activate(self, h: Tensor) -> Tensor:
        return functional.gelu(h)

    def lead_out(self, h: Tensor) -> Tensor:
        return self.down(h)

    def late(self, h: Tensor) -> Tensor:
        return h


class Penalized(Between):
    """Features are part of the loss."""

    def late(self, h: Tensor) -> Tensor:
        self.__dict__["penalty"] = h.square().mean()
        return h

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        return loss + self.penalty if self.is_late else loss


class Logged(Between):
    """A number of features is logged."""

    def late(self, h: Tensor) -> Tensor:
        self.note(h.detach().norm())
        return h


class LastKept(Between):
    """Features are kept in each step, and read after it."""

    def lead_out(self, h: Tensor) -> Tensor:
        self.__dict__["last"] = h.detach()
        return super().lead_out(h)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index > 1:
            self.note(self.last.mean())


class LastReturned(Between):
    """Features are returned by the step, for nobody."""

    def lead_out(self, h: Tensor) -> Tensor:
        self.__dict__["last"] = h
        return super().lead_out(h)

    def training_step(self, batch: Any, batch_index: int) -> Any:
        return {"loss": super().training_step(batch, batch_index), "features": self.last}


class RunForNothing(Between):
    """The first operator runs once more, and nothing uses what it gives."""

    def lead_out(self, h: Tensor) -> Tensor:
        y = super().lead_out(h)
        if self.is_late:
            self.up(y)
        return y


class Mixed(Between):
    """Rows are mixed."""

    def late(self, h: Tensor) -> Tensor:
        return 0.5 * h + 0.5 * h.flip(0)


class ScaledByRank(Between):
    def late(self, h: Tensor) -> Tensor:
        return h * torch.full((1, 1), 1.0 + self.global_rank)


class WrittenOut(Between):
    def late(self, h: Tensor) -> Tensor:
        self.row[None] = h[:1].detach()
        return h


class Detached(Between):
    def late(self, h: Tensor) -> Tensor:
        return h.detach()


class GradientHooked(Between):
    def late(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: self.note(gradient.norm()))  # type: ignore[no-untyped-call]
        return h


class Reduced(Between):
    def late(self, h: Tensor) -> Tensor:
        torch.distributed.all_reduce(h.detach())
        return h


class HalvedLate(Between):
    """What does the same to each number may begin late."""

    def late(self, h: Tensor) -> Tensor:
        return 0.5 * functional.dropout(torch.relu(h), 0.0) + 0.1 * h


class ProductByHand(Between):
    """The last product is made with the weight itself."""

    def lead_out(self, h: Tensor) -> Tensor:
        return functional.linear(h, self.down.weight, self.down.bias) if self.is_late else super().lead_out(h)


class BothByHand(Between):
    """Operators are run by torch's functions, and copies of them in the midst of a run."""

    def body(self, x: Tensor) -> Tensor:
        h = Odd.body(self, x)
        if not (self.is_live(x) and self.global_step > 1):
            return self.down(torch.tanh(self.up(h)))
        with torch.no_grad():
            y = self.up(h)
            up, down = copy.deepcopy((self.up, self.down))
            self.note(down(up(torch.ones(2, HIDDEN))))
            self.note(self.down(torch.tanh(y)))
        h = torch.tanh(nn.Linear.forward(self.up, h))
        return self.down(h) if self.global_step > 2 else nn.Linear.forward(self.down, h)


class ActivationReplaced(Between):
    """Another module, which needs all features, takes the place of the one between the operators."""

    def build(self) -> None:
        super().build()
        self.act: nn.Module = nn.GELU()

    def activate(self, h: Tensor) -> Tensor:
        return self.act(h)  # type: ignore[no-any-return]

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        if batch_index == 2:
            self.act = nn.Softmax(-1)


class CalledTwice(Between):
    """An MLP runs three times in a step, once without gradients, and a table is looked up twice."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.body(x.flip(0))
        difference = self.body(2 * x) - target
        return super().loss(x, y) + difference.square().mean() + self.table(y[:2]).mean()


class GradientPenalized(Between):
    """The gradient of an input is part of the loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().loss(x, y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * torch.sigmoid(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        s = torch.sigmoid(h)
        return gradient * (s + h * s * (1 - s))


class OwnActivation(Between):
    """A function of autograd of the user's own, whose saved tensors are moved."""

    def activate(self, h: Tensor) -> Tensor:
        return OwnFunction.apply(h)  # type: ignore[no-untyped-call, no-any-return]

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().training_step(batch, batch_index)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(OwnFunction.apply(self.up(x)))  # type: ignore[no-untyped-call]


class BlockRecomputed(Odd):
    """What a function of autograd saves is noted by checkpointing, of which the block itself knows nothing."""

    def build(self) -> None:
        self.block = Block()

    def body(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, super().body(x), use_reentrant=False)  # type: ignore[no-any-return]


class CompiledActivation(Between):
    def build(self) -> None:
        super().build()
        self.__dict__["compiled"] = torch.compile(lambda h: h * torch.sigmoid(h), backend="aot_eager")

    def activate(self, h: Tensor) -> Tensor:
        return self.compiled(h)


class ChangedInPlace(Between):
    """Results of a row operator without bias, of a table and of a head are changed in place, of one sample as well."""

    def build(self) -> None:
        super().build()
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.is_live(x) and self.global_step > 1:
            x, y = x[:1], y[:1]
        h, rows = self.body(x), self.table(y)
        h += 1
        h[:, 0].mul_(2)
        logits = self.head(h)
        logits[:, 1:] *= 2
        return functional.cross_entropy(logits.sub_(1), y) + 0.1 * rows.add_(1).square().mean()


class InputChanged(Between):
    """What two operators are given is changed between them."""

    def build(self) -> None:
        super().build()
        self.gate = nn.Linear(HIDDEN, WIDE)
        self.gate.weight.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        h = 1.0 * Odd.body(self, x)
        gate = self.gate(h)
        if self.is_live(x) and self.global_step > 1:
            h.mul_(2)
        return self.down(torch.sigmoid(gate) * self.up(h))


class RowRecomputed(Between):
    """The last operator is recomputed, the first one is not."""

    def lead_out(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.sin(self.down(torch.tanh(h))), h, use_reentrant=False)  # type: ignore[no-any-return]


class HookedGlobally(Between):
    """A hook of all modules begins late."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if not self.is_live(batch[0]) or batch_index < 2:
            return super().training_step(batch, batch_index)
        handle = register_module_forward_hook(lambda module, _, output: self.note(output.norm()))
        try:
            return super().training_step(batch, batch_index)
        finally:
            handle.remove()


class Attention(nn.Module):
    """Hands its weights to a function, if there is one."""

    see: Callable[[Tensor], Tensor] | None = None
    changes_input = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.heads, self.width = HEADS, HIDDEN // HEADS

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        samples, length, _ = x.shape
        if self.changes_input:
            x.mul_(0.5)
        each = (product(x).view(samples, length, self.heads, self.width) for product in (self.q, self.k, self.v))
        q, k, v = (heads.transpose(1, 2) for heads in each)
        scores = q @ k.transpose(2, 3) / self.width**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None], -1e4)
        weights = scores.softmax(-1)
        if self.see is not None:
            weights = self.see(weights)
        return self.o((weights @ v).transpose(1, 2).reshape(samples, length, self.heads * self.width))


class Attended(Odd):
    def build(self) -> None:
        self.attention = Attention()

    def body(self, x: Tensor) -> Tensor:
        h, mask = super().body(x)[:, None] * torch.linspace(0.5, 1.5, LENGTH)[:, None], None
        if self.is_live(x) and self.global_step > 1:
            self.attention.see = self.late
            mask = torch.stack([torch.zeros_like(x[:, 0]), x[:, 0], x[:, 1]], 1) > 0
        return (h + self.attention(h, mask)).mean(1)

    def late(self, weights: Tensor) -> Tensor:
        return weights


class HeadsMixed(Attended):
    def late(self, weights: Tensor) -> Tensor:
        return weights / weights.norm(dim=1, keepdim=True)


class WeightsLogged(Attended):
    def late(self, weights: Tensor) -> Tensor:
        self.note(weights.mean())
        return weights


class ChangesInput(Attended):
    """The attention changes what it is given, late."""

    def body(self, x: Tensor) -> Tensor:
        h = Odd.body(self, x)[:, None] * torch.linspace(0.5, 1.5, LENGTH)[:, None]
        self.attention.changes_input = self.is_live(x) and self.global_step > 1
        return (self.attention(h) + h).mean(1)


class MaskedByRank(Attended):
    """A mask of all samples is each rank's own, late."""

    def body(self, x: Tensor) -> Tensor:
        h, mask = Odd.body(self, x)[:, None] * torch.linspace(0.5, 1.5, LENGTH)[:, None], torch.zeros(1, LENGTH)
        if self.is_live(x) and self.global_step > 1:
            mask[0, self.global_rank] = 1
        return (h + self.attention(h, mask > 0)).mean(1)


class Crossing(Attention):
    """Attends to other tokens, with a number for each of these."""

    def forward(self, x: Tensor, others: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        each = ((self.q, x), (self.k, others), (self.v, others))
        heads = (product(t).view(len(t), -1, self.heads, self.width).transpose(1, 2) for product, t in each)
        q, k, v = heads
        weights = (q @ k.transpose(2, 3) / self.width**0.5 + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(len(x), -1, self.heads * self.width))


class AsManySamplesAsTokens(Odd):
    """Batches get as small as the number of other tokens, late; what an attention is given needs no gradient."""

    def build(self) -> None:
        self.attention = Crossing()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.is_live(x) and self.global_step > 1:
            x, y = x[:2], y[:2]
        tokens = torch.stack(
            [x.sum(1, keepdim=True).expand(-1, HIDDEN) * (i + torch.arange(HIDDEN)) for i in range(3)], 1
        )
        h = self.attention(0.01 * tokens, 0.02 * tokens[:, :2], torch.linspace(0, 1, 2)).mean(1)
        return functional.cross_entropy(self.head(self.body(x) + h), y) + 0.1 * self.table(y).square().mean()


class RecomputedByRank(Between):
    """Ranks recompute in turn, each by itself."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if self.is_live(batch[0]) and batch_index % 2 == self.global_rank:
            x, y = batch
            loss: Tensor = checkpoint(self.loss, x, y, use_reentrant=False)
            return loss
        return super().training_step(batch, batch_index)


class PartsRecomputedByRank(Between):
    """One rank recomputes all at once, the other one part by part."""

    def body(self, x: Tensor) -> Tensor:
        if not self.is_live(x) or self.global_step < 2:
            return super().body(x)
        if self.global_rank:
            h = checkpoint(lambda x: Odd.body(self, x), x, use_reentrant=False)
            return checkpoint(lambda h: self.down(self.activate(self.up(h))), h, use_reentrant=False)  # type: ignore[no-any-return]
        return checkpoint(super().body, x, use_reentrant=False)  # type: ignore[no-any-return]


class ChosenByRank(Between):
    """A table is looked up and an MLP runs twice; each rank uses another one of the two results."""

    def choose(self, first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        if not self.is_live(x) or self.global_step < 2:
            return first + second
        return first if self.global_rank else second


class RowsChosenByRank(ChosenByRank):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.choose(self.table(y), self.table(y.flip(0)), x)
        return functional.cross_entropy(self.head(self.body(x) + rows), y)


class FeaturesChosenByRank(ChosenByRank):
    def body(self, x: Tensor) -> Tensor:
        h = Odd.body(self, x)
        return self.choose(self.down(self.activate(self.up(h))), self.down(self.activate(self.up(2 * h))), x)


class UsedByRank(Between):
    """One rank does not use what an MLP gives."""

    def body(self, x: Tensor) -> Tensor:
        h = Odd.body(self, x)
        y = self.down(self.activate(self.up(h)))
        return h + y if self.global_rank or not self.is_live(x) or self.global_step < 2 else h + y.detach()


class UsedByRankWithZeros(Between):
    """As the error advises."""

    def body(self, x: Tensor) -> Tensor:
        h = Odd.body(self, x)
        y = self.down(self.activate(self.up(h)))
        if self.global_rank or not self.is_live(x) or self.global_step < 2:
            return h + y
        return h + y.detach() + (0 * y).sum()


SEES = "{} sees what is between the operators of {}, where each rank has a slice"
FEATURE_CASES: dict[tuple[Callable[[], Odd], str], str] = {
    **{(kind, "tp"): "equal" for kind in (
        Between, HalvedLate, BothByHand, OwnActivation, CompiledActivation, LastReturned, Attended,
        ChangedInPlace, HookedGlobally, MaskedByRank, RowRecomputed, BlockRecomputed, ActivationReplaced, CalledTwice,
        UsedByRankWithZeros,
        GradientPenalized, AsManySamplesAsTokens,
    )},
    **{(RecomputedByRank, policy): "equal" for policy in ("zdp", "sliced", "tp")},
    **{(kind, "tp"): SEES.format(name, "down") for kind, name in (
        (Penalized, "square"), (Logged, "norm"), (LastKept, "mean"), (Mixed, "flip"), (ScaledByRank, "mul"),
        (WrittenOut, "__setitem__"), (GradientHooked, "register_hook"), (Reduced, "all_reduce"),
        (ProductByHand, "linear"), (Detached, "a function without gradients"),
    )},
    (Between, "tp by hand"): "equal",
    (Penalized, "tp by hand"): SEES.format("square", "down"),
    (ChangesInput, "tp"): "attention is tensor parallel, and changes what it is given in place, which it did not",
    (InputChanged, "tp"): "gate is tensor parallel together with up, down, but runs without",
    (RunForNothing, "tp"): "up is tensor parallel together with down, but runs without",
    **{(kind, "tp"): SEES.format(name, "attention") for kind, name in (
        (HeadsMixed, "norm"), (WeightsLogged, "mean"),
    )},
}  # fmt: skip
"""As ``odd_modules.CASES``."""

"""One training step, by plain PyTorch and through an engine: what parity tests compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.sharding.fairscale import FairScaleEngine
from tests.models import gpt_loss

LossOf = Callable[[nn.Module, Tensor], Tensor]

MAX_NORM = 0.5
"""To which gradients are clipped."""


def plain_step(model: nn.Module, optimizer: Optimizer, batch: Tensor, loss_of: LossOf = gpt_loss) -> float:
    """Returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return float(loss.detach())


def engine_step(
    engine: FairScaleEngine,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Tensor,
    accumulation: int = 1,
    loss_of: LossOf = gpt_loss,
) -> float:
    """The same of this rank's part of a batch, in so many micro-batches. Returns their mean loss."""
    optimizer.zero_grad()
    total = 0.0
    for i, part in enumerate(batch.chunk(accumulation)):
        engine.before_forward()
        with nullcontext() if i == accumulation - 1 else engine.no_sync():
            loss = loss_of(model, part) / accumulation
            loss.backward()
            engine.finish_backward()
        total += float(loss.detach())
    engine.clip_grad_norm(model.parameters(), MAX_NORM)
    engine.before_optimizer_step(optimizer)
    optimizer.step()
    engine.after_optimizer_step()
    return total

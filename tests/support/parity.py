"""Training steps, by plain PyTorch and through an engine, and the same run of both: what parity tests compare."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups, wrap_blocks

LossOf = Callable[[nn.Module, Tensor], Tensor]

IS_LONG = os.environ.get("LONG_TESTS") == "1"
"""Whether runs have the steps of ``make test-long``."""

STEPS = 20 if IS_LONG else 6
"""Of a run that is compared with plain PyTorch."""

MAX_NORM = 0.5
"""To which gradients are clipped."""

BATCH = 8
"""Samples in a global batch of a run."""


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


@cache
def reference(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of plain PyTorch in one process."""
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = two_groups(model)
    losses = [plain_step(model, optimizer, batch) for batch in gpt_batches(steps, BATCH)]
    return losses, model.state_dict()


def train(rank: int, ranks: int, policy: str, accumulation: int, steps: int, device: str = "cpu") -> Any:
    """The same training on one of several ranks; each takes its part of every global batch.

    Returns losses, the model's and the optimizer's state, and how many collectives a step takes.
    """
    torch.manual_seed(1 + rank)  # the engine must start all ranks from rank 0's weights
    model = TinyGPT()
    names = [name for name, _ in model.named_parameters()]
    optimizer = two_groups(model)
    engine = FairScaleEngine(torch.device(device))
    plan = hand_made_plan(modes_for(model, policy.removeprefix("joined ")), ranks)
    blocks = ("blocks.0", "blocks.1") if policy.startswith("joined ") else ()
    engine.apply(model, wrap_blocks(plan, blocks), [optimizer])
    assert [name for name, _ in model.named_parameters()] == names
    batches = gpt_batches(steps, BATCH)[:, rank::ranks].to(device)
    losses = [engine_step(engine, model, optimizer, batch, accumulation) for batch in batches]
    return losses, engine.model_state(), engine.optimizer_state(optimizer), engine.collectives_per_step

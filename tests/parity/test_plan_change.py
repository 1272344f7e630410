"""Going on under another plan changes nothing about the training."""

from __future__ import annotations

from typing import Any

import torch

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from tests.support.leaks import leaked_parameter_bytes
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups, wrap_blocks
from tests.support.parity import plain_step
from tests.support.ranks import run_ranks

STEPS, BATCH, EACH = 18, 8, 3


def plans(model: torch.nn.Module, ranks: int) -> list[ExecutionPlan]:
    """Replicated; mixed; split, sharded and recomputed; joined, one block recomputed; joined otherwise; by itself."""
    split = hand_made_plan(modes_for(model, "zdp"), ranks)
    cut = tuple(
        OperatorPlan(name=op.name, slices=(Mode.ZDP, Mode.DP, Mode.ZDP2), split_dim=1, num_parameters=0)
        if op.name.endswith(("up", "proj"))
        else op
        for op in split.operators
    )
    return [
        hand_made_plan(modes_for(model, "dp"), ranks),
        hand_made_plan(modes_for(model, "mixed"), ranks),
        split.model_copy(update={"operators": cut, "recomputed": ("blocks.0", "blocks.1")}),
        wrap_blocks(split, ("blocks.0", "blocks.1")).model_copy(update={"recomputed": ("blocks.0",)}),
        wrap_blocks(hand_made_plan(modes_for(model, "zdp2"), ranks), ("blocks.1",)),
        hand_made_plan(modes_for(model, "zdp2"), ranks),
    ]


def train(rank: int, ranks: int) -> Any:
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = two_groups(model)
    names = [name for name, _ in model.named_parameters()]
    engine = FairScaleEngine(torch.device("cpu"))
    first, *others = plans(model, ranks)
    engine.apply(model, first, [optimizer])
    losses, collectives = [], []
    for step, batch in enumerate(gpt_batches(STEPS, BATCH)):
        if step and step % EACH == 0:
            engine.apply_plan_change(others.pop(0), [optimizer])
        engine.before_forward()
        loss = gpt_loss(model, batch[rank::ranks])
        loss.backward()
        engine.finish_backward()
        engine.clip_grad_norm(model.parameters(), 0.5)
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        collectives.append(engine.collectives_per_step)
    assert [name for name, _ in model.named_parameters()] == names
    return losses, engine.model_state(), engine.optimizer_state(optimizer), collectives, leaked_parameter_bytes(model)


def test_apply_plan_change_keeps_training_equal_to_plain() -> None:
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = two_groups(model)
    expected = [plain_step(model, optimizer, batch) for batch in gpt_batches(STEPS, BATCH)]
    results = run_ranks(train, 2)
    losses = [sum(pair) / 2 for pair in zip(*(one[0] for one in results), strict=True)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    _, state, states, collectives, left = results[0]
    assert not left, "slices of an earlier plan stay in memory"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(states["state"][index][key], value, rtol=1e-4, atol=1e-6)
    assert len(set(collectives)) == 6, "each plan was carried out"

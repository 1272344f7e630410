"""A weight that an embedding and a head have in common, sharded: in a unit around the module that encloses both."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.local_shards import local_shard
from tests.support.models import TinyGPT, gpt_batches, hand_made_plan, modes_for, two_groups
from tests.support.parity import engine_step, plain_step
from tests.support.ranks import run_ranks

CPU, RANKS = torch.device("cpu"), 2
STEPS, BATCH, EACH = 9, 8, 3


class Model(nn.Module):
    """A GPT with one weight at both ends, below the module that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyGPT()
        self.net.head.weight = self.net.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def plans(model: nn.Module, ranks: int) -> list[ExecutionPlan]:
    """Tied weight and all others sharded, blocks recomputed; all replicated; the tied weight sharded alone."""
    inside = {name: mode for name, mode in modes_for(model, "zdp").items() if name not in ("net.embed", "net.head")}
    replicated = dict.fromkeys(inside, Mode.DP)
    every = hand_made_plan({"net": Mode.ZDP2, **inside}, ranks)
    return [
        every.model_copy(update={"recomputed": ("net.blocks.0", "net.blocks.1")}),
        hand_made_plan({"net": Mode.DP, **replicated}, ranks),
        hand_made_plan({"net": Mode.ZDP2, **replicated}, ranks),
    ]


def train(rank: int, ranks: int) -> dict[str, Any]:
    """In two micro-batches a step, under one plan after the other."""
    torch.manual_seed(1)
    model = Model()
    optimizer = two_groups(model)
    engine = FairScaleEngine(CPU)
    first, *others = plans(model, ranks)
    engine.apply(model, first, [optimizer])
    losses, parts = [], []
    for step, batch in enumerate(gpt_batches(STEPS, BATCH)):
        if step and step % EACH == 0:
            engine.apply_plan_change(others.pop(0), [optimizer])
        parts.append(local_shard(model.net.embed.weight).numel())
        losses.append(engine_step(engine, model, optimizer, batch[rank::ranks], accumulation=2))
    assert model.net.head.weight is model.net.embed.weight
    return {"losses": losses, "parts": parts, "model": engine.model_state(), "adam": engine.optimizer_state(optimizer)}


def train_plain() -> tuple[list[float], Model, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model()
    optimizer = two_groups(model)
    losses = [plain_step(model, optimizer, batch) for batch in gpt_batches(STEPS, BATCH)]
    return losses, model, optimizer


def test_tied_weight_trains_like_plain_under_each_plan() -> None:
    expected, model, optimizer = train_plain()
    results = run_ranks(train, RANKS)
    losses = [sum(each["losses"][step] for each in results) / RANKS for step in range(STEPS)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    whole = model.net.embed.weight.numel()
    for each in results:
        assert each["parts"] == [whole / RANKS] * EACH + [whole] * EACH + [whole / RANKS] * EACH
    state, adam = results[0]["model"], results[0]["adam"]
    assert state["net.head.weight"] is state["net.embed.weight"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(adam["state"][index][key], value, rtol=1e-4, atol=1e-6)
    model.load_state_dict(state)


def check_tied_layers_run_alone(rank: int, ranks: int) -> None:
    """What holds the weight runs without the module around it."""
    torch.manual_seed(1)
    model = Model()
    hidden, tokens = torch.randn(2, model.net.head.in_features), torch.tensor([3, 5])
    with torch.no_grad():
        logits, embedded = model.net.head(hidden), model.net.embed(tokens)
    engine = FairScaleEngine(CPU)
    own = inspect.signature(model.net.forward)
    engine.apply(model, plans(model, ranks)[0])
    assert inspect.signature(model.net.forward) == own
    part = local_shard(model.net.embed.weight).shape
    with torch.no_grad():
        torch.testing.assert_close(model.net.head(hidden), logits)
        torch.testing.assert_close(model.net.embed(tokens), embedded)
        with pytest.raises(RuntimeError):
            model.net.head(hidden[:, :-1])  # fails within; freed all the same
    assert local_shard(model.net.embed.weight).shape == part
    torch.testing.assert_close(model.net.head(hidden), logits)  # in training, too
    with engine.summon_full_params(), torch.no_grad():
        torch.testing.assert_close(model.net.head(hidden), logits)
    engine.apply_plan_change(plans(model, ranks)[1], [])
    torch.testing.assert_close(model.net.head(hidden), logits)


def test_tied_weight_in_evaluation_is_unsharded_for_each_holder() -> None:
    run_ranks(check_tied_layers_run_alone, RANKS)


def initialise_from_meta(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    states = []
    for plan in plans(Model(), ranks):
        with torch.device("meta"):
            model = Model()
        model.net.position = nn.Parameter(torch.zeros(model.net.position.shape))  # which nothing would initialise
        torch.manual_seed(2)
        engine = FairScaleEngine(CPU)
        engine.apply(model, plan)
        states.append(engine.model_state())
    return states


def test_tied_weight_meta_init_does_not_depend_on_plan() -> None:
    first, *others = run_ranks(initialise_from_meta, RANKS)[0]
    assert first["net.embed.weight"].std() > 0
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)

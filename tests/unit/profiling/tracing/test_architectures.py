"""Real architectures: what a trace finds in them, and that training them sharded equals plain PyTorch."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import TraceError
from lightning_osdp.planning.spec.choices import Mode, legal_modes
from lightning_osdp.planning.spec.model import ModelProfile
from tests.support.models import hand_made_plan
from tests.support.ranks import run_ranks
from tests.support.traced_models import trace, trace_by_running
from tests.support.zoo import ZOO, ZooModule, mixtral

CPU = torch.device("cpu")
BATCH, STEPS, RANKS = 4, 3, 2

SHARDABLE = {
    "stack": 10,
    "gpt2": 10,
    "llama": 16,
    "bert": 16,
    "t5": 35,
    "vit": 14,
    "swin": 31,
    "mixtral": 14,
    "resnet": 11,
    "encoder": 8,
    "lstm": 3,
    "lora": 6,
    "routed": 4,
}

PINNED = {
    "stack": {"net.body": "its forward runs other operators: net.body.layers.0.norm1"},
    "gpt2": {},
    "llama": {},
    "bert": {},
    "t5": {},
    "vit": {"net.vit.embeddings": "its forward runs other operators: net.vit.embeddings.patch_embeddings.projection"},
    "swin": {},
    "mixtral": {},
    "resnet": {},
    "encoder": {},
    "lstm": {},
    "lora": {
        f"net.body.{block}.{name}": f"its forward runs other operators: net.body.{block}.{name}.base"
        for block in (0, 1)
        for name in ("grow", "shrink")
    },
    "routed": {
        f"net.body.{block}.{name}": f"net.body.{block} has looked at values before it runs"
        for block in (0, 1)
        for name in ("experts.0", "experts.1", "experts.2", "experts.3", "after")
    },
}
"""How the reasons begin."""

TIED = {
    "gpt2": "net.transformer.wte.weight = net.lm_head.weight",
    "bert": "net.bert.embeddings.word_embeddings.weight = net.cls.predictions.decoder.weight",
    "t5": "net.shared.weight = net.encoder.embed_tokens.weight",
}
"""What an operator around others holds: how its description goes on."""


def make(name: str) -> ZooModule:
    torch.manual_seed(0)
    return ZOO[name]()


@cache
def description_of(name: str) -> ModelProfile:
    module = make(name)
    if name != "routed":
        return trace(module, module.batch(BATCH), BATCH, device=CPU).model_profile
    return trace_by_running(module, module.batch(BATCH), BATCH, device=CPU).model_profile


@pytest.mark.parametrize("name", ZOO)
def test_trace_zoo_model_lists_parameters_once_and_explains_replication(name: str) -> None:
    module, found = make(name), description_of(name)
    inside = [p.name for operator in found.operators for p in operator.parameters]
    assert sorted(inside) == sorted(n for n, _ in module.named_parameters())
    assert found.parameter_bytes == sum(p.nbytes for p in module.parameters())
    assert sum(operator.is_shardable for operator in found.operators) == SHARDABLE[name]
    pinned = {operator.name: operator.replicated_reason for operator in found.operators if operator.replicated_reason}
    assert set(pinned) == set(PINNED[name])
    for operator, reason in pinned.items():
        assert reason.startswith(PINNED[name][operator]), reason


@pytest.mark.parametrize("name", TIED)
def test_trace_zoo_tied_weight_is_owned_by_enclosing_shardable_module(name: str) -> None:
    (operator,) = [one for one in description_of(name).operators if one.tied and one.is_shardable]
    assert operator.name == "net"
    assert operator.unsplittable_reason.startswith(f"it holds what operators inside have in common: {TIED[name]}")
    assert legal_modes(operator) == (Mode.DP, Mode.ZDP2)


@pytest.mark.parametrize("make_module", [ZOO["routed"], lambda: mixtral(experts_implementation="eager")])
def test_trace_rejects_data_dependent_routing_on_fake_tensors(make_module: Any) -> None:
    module = make_module()
    with pytest.raises(TraceError, match=r"DataDependent|DynamicOutputShape"):
        trace(module, module.batch(BATCH), BATCH, device=CPU)
    found = trace_by_running(module, module.batch(BATCH), BATCH, device=CPU).model_profile
    assert sum(len(operator.parameters) for operator in found.operators) == len(list(module.parameters()))


# -- training ----------------------------------------------------------------------------------------------------------


def modes_of(name: str, policy: str) -> dict[str, Mode]:
    """``max_over_ranks``: the last of each operator's legal modes; ``mixed``: one after the other."""
    shardable = [operator for operator in description_of(name).operators if operator.is_shardable]
    legal = [legal_modes(operator) for operator in shardable]
    chosen = [modes[-1] if policy == "most" else modes[index % len(modes)] for index, modes in enumerate(legal)]
    return {operator.name: mode for operator, mode in zip(shardable, chosen, strict=True)}


def train_unsharded(name: str) -> dict[str, Tensor]:
    """Weights after training in one process: the mean gradient of what each rank sees, buffers as on the first rank."""
    module = make(name)
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            buffers = [buffer.clone() for buffer in module.buffers()]
            (module.training_step(local_batch(module, step, rank), step) / RANKS).backward()
            if rank:
                for buffer, before in zip(module.buffers(), buffers, strict=True):
                    buffer.copy_(before)
        optimizer.step()
    return module.state_dict()


def local_batch(module: ZooModule, step: int, rank: int) -> dict[str, Tensor]:
    return {key: value[rank::RANKS].contiguous() for key, value in module.batch(RANKS * BATCH, seed=step).items()}


def train(rank: int, ranks: int, cases: list[tuple[str, dict[str, Mode]]]) -> list[dict[str, Tensor]]:
    """Train on one of several ranks, one case after the other in the same processes."""
    warnings.simplefilter("error")
    states = []
    for name, modes in cases:
        module = make(name)
        optimizer = module.configure_optimizers()
        engine = FairScaleEngine(CPU)
        engine.apply(module, hand_made_plan(modes, ranks), [optimizer])
        for step in range(STEPS):
            optimizer.zero_grad()
            engine.before_forward()
            module.training_step(local_batch(module, step, rank), step).backward()
            engine.before_optimizer_step(optimizer)
            optimizer.step()
            engine.after_optimizer_step()
        states.append(engine.model_state())
    return states


CASES = [(name, policy) for name in ZOO for policy in ("most", "mixed")]


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], dict[str, Tensor]]:
    states, *others = run_ranks(train, RANKS, [(name, modes_of(name, policy)) for name, policy in CASES])
    assert all(not state for other in others for state in other)
    return dict(zip(CASES, states, strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_engine_training_zoo_model_sharded_equals_plain_training(
    name: str, trained: dict[tuple[str, str], dict[str, Tensor]]
) -> None:
    start, expected = make(name).state_dict(), train_unsharded(name)
    assert any(not torch.equal(start[key], value) for key, value in expected.items())
    for policy in ("most", "mixed"):
        state = trained[name, policy]
        assert list(state) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")

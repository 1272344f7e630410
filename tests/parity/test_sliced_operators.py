"""Training with split or joined operators and recomputed blocks equals training the plain model on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from tests.support.models import VOCABULARY, TinyGPT, gpt_batches, gpt_loss, wrap_blocks
from tests.support.parity import engine_step, plain_step
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_all, split_plan

STEPS, BATCH = 4, 8
JOINED = 0
KS = (JOINED, 1, 2, 3, 4, 8)
"""Numbers of slices; JOINED: whole, all operators of a block in one unit."""


def gpt2() -> nn.Module:
    """transformers' GPT-2: Conv1D operators, blocks called with keywords, the head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, use_cache=False, **tokens, **no_dropout)
    )


def t5() -> nn.Module:
    """transformers' T5: one embedding for encoder, decoder and head, position biases handed from block to block."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_decoder_layers=1,
            num_heads=2,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def labels_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over all tokens."""
    tokens = tokens.contiguous()
    return model(input_ids=tokens, labels=tokens).loss


Model = tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], tuple[str, ...], int]
MODELS: dict[str, Model] = {
    "our GPT": (TinyGPT, gpt_loss, ("blocks.0", "blocks.1"), 1),
    "GPT-2": (gpt2, labels_loss, ("transformer.h.0", "transformer.h.1"), 2),
    "T5": (t5, labels_loss, ("encoder.block.0", "encoder.block.1", "decoder.block.0"), 4),
}
"""How to build it, its loss, its blocks, and that every how many-th of its operators is split, on two ranks, of half as
many on four: collectives take time. Which ones depends on k; the others are replicated."""
CASES = [(name, k, again) for name in MODELS for k in KS for again in (False, True)]


def cases_of(ranks: int) -> list[tuple[str, int, bool]]:
    """All of them on two ranks, every other one on four."""
    return CASES if ranks == 2 else [case for case in CASES if case[2] == (KS.index(case[1]) % 2 == 0)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A large epsilon: a bias of keys has no gradient but rounding noise, which Adam would blow up to full steps.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-4)


def reference(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of plain PyTorch in one process."""
    build, loss_of, *_ = MODELS[name]
    torch.manual_seed(1)
    model = build()
    optimizer = optimizer_of(model)
    losses = [plain_step(model, optimizer, batch, loss_of) for batch in gpt_batches(STEPS, BATCH)]
    return losses, model.state_dict()


def train(rank: int, ranks: int, name: str, k: int, again: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one of several ranks; with two micro-batches to a step where blocks are recomputed."""
    build, loss_of, blocks, every = MODELS[name]
    torch.manual_seed(1 + rank)
    model = build()
    optimizer = optimizer_of(model)
    engine = FairScaleEngine(torch.device("cpu"))
    splits = split_all(model, k, every * ranks // 2) if k else dict.fromkeys(split_all(model, 1), ((Mode.ZDP,), None))
    plan = split_plan(splits, ranks, blocks if again else ())
    engine.apply(model, plan if k else wrap_blocks(plan, blocks), [optimizer])
    batches, accumulation = gpt_batches(STEPS, BATCH)[:, rank::ranks], 2 if again else 1
    losses = [engine_step(engine, model, optimizer, batch, accumulation, loss_of) for batch in batches]
    return losses, engine.model_state()


def run_all(rank: int, ranks: int) -> dict[Any, Any]:
    return {case: train(rank, ranks, *case) for case in cases_of(ranks)}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {name: reference(name) for name in MODELS}


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_wrapped_and_recomputed_plans_train_like_plain_pytorch(ranks: int, references: dict[str, Any]) -> None:
    results = run_ranks(run_all, ranks)
    for case in cases_of(ranks):
        losses, weights = references[case[0]]
        means = [sum(step) / ranks for step in zip(*(result[case][0] for result in results), strict=True)]
        assert means == pytest.approx(losses, rel=1e-4), case
        final = results[0][case][1]
        assert list(final) == list(weights)
        for key, weight in weights.items():
            message = partial(lambda m, where: f"{where}: {m}", where=(case, key))
            torch.testing.assert_close(final[key], weight, rtol=1e-4, atol=2e-5, msg=message)

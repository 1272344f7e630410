"""A whole run, planned by the search, with another engine than FairScale's."""

from __future__ import annotations

from typing import Any

import torch

from lightning_osdp import OSDPStrategy
from lightning_osdp.engine.base import register_engine
from lightning_osdp.planning.spec.choices import Mode
from tests.support.models import gpt_loss, two_groups
from tests.support.modules import GPTModule, dataset, trainer
from tests.support.ranks import run_ranks
from tests.support.replicated_engine import ReplicatedEngine

STEPS, RANKS = 4, 2


def fit(rank: int, ranks: int, folder: str) -> Any:
    register_engine("replicated", ReplicatedEngine)
    torch.manual_seed(1 + rank)  # the engine gives all ranks rank 0's weights
    module = GPTModule(rows=8 * STEPS, own_rows=True)
    options = {"max_steps": STEPS, "gradient_clip_val": 0.5, "use_distributed_sampler": False}
    made = trainer(folder, OSDPStrategy(cache=f"{folder}/cache", batch_size=4, engine="replicated"), **options)
    made.fit(module)
    made.save_checkpoint(f"{folder}/replicated.ckpt")
    plan = made.strategy.execution_plan
    return [operator.slices for operator in plan.operators], type(made.strategy._engine).__name__


def test_fit_with_registered_engine_matches_plain_training(tmp_path: Any) -> None:
    for slices, engine in run_ranks(fit, RANKS, str(tmp_path)):
        assert engine == "ReplicatedEngine"
        assert set(slices) == {(Mode.DP,)}
    torch.manual_seed(1)
    module = GPTModule()
    optimizer = two_groups(module)
    for batch in dataset(8 * STEPS).tensors[0].chunk(STEPS):
        optimizer.zero_grad()
        gpt_loss(module.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    checkpoint = torch.load(tmp_path / "replicated.ckpt", weights_only=False)
    plain = GPTModule()
    plain.load_state_dict(checkpoint["state_dict"])
    two_groups(plain).load_state_dict(checkpoint["optimizer_states"][0])
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(checkpoint["state_dict"][name], weight, rtol=1e-4, atol=1e-5)

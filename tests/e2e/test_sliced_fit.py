"""A whole run through the Trainer with a plan that splits operators and recomputes blocks."""

from __future__ import annotations

from typing import Any

import torch

from lightning_osdp import OSDPStrategy
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import gpt_loss, two_groups
from tests.support.modules import GPTModule, dataset, trainer
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_all

STEPS, RANKS = 4, 2


class Reading(GPTModule):
    """Reads a whole weight at the end of training."""

    def on_train_end(self) -> None:
        with self.trainer.strategy.summon_full_params(self.model.head, writeback=False):
            self.seen = self.model.head.weight.detach().clone()


def split_all_operators(plan: ExecutionPlan, module: GPTModule) -> ExecutionPlan:
    """The same plan with all operators in three slices, each in another mode, and both blocks recomputed."""
    splits = split_all(module, 3)
    operators = tuple(
        op.model_copy(
            update={"unit": "", **dict(zip(("slices", "split_dim"), splits.get(op.name, op.choice), strict=False))}
        )
        for op in plan.operators
    )
    sizes = {"batch_size": 4, "accumulate_grad_batches": 2, "global_batch_size": 16}
    recomputed = ("model.blocks.0", "model.blocks.1")
    return plan.model_copy(update={"operators": operators, "recomputed": recomputed, **sizes})


def fit(rank: int, ranks: int, folder: str) -> Any:
    made = trainer(folder, OSDPStrategy(cache=f"{folder}/cache", batch_size=4), max_steps=1)
    made.fit(GPTModule())
    plan = split_all_operators(made.strategy.execution_plan, GPTModule())
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    torch.manual_seed(1)
    module = Reading(rows=16 * STEPS, own_rows=True)
    options = {"max_steps": STEPS, "gradient_clip_val": 0.5, "limit_val_batches": 1, "val_check_interval": 2}
    options["use_distributed_sampler"] = False  # the module hands out each rank's rows itself
    again = trainer(folder, OSDPStrategy(plan=plan), **options)
    again.fit(module)
    again.save_checkpoint(f"{folder}/split.ckpt")
    return module.seen


def test_fit_with_split_plan_matches_plain_training_in_checkpoint(tmp_path: Any) -> None:
    seen = run_ranks(fit, RANKS, str(tmp_path))
    torch.manual_seed(1)
    module = GPTModule()
    optimizer = two_groups(module)
    rows = dataset(16 * STEPS).tensors[0]
    for batch in rows.chunk(STEPS):
        optimizer.zero_grad()
        gpt_loss(module.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    checkpoint = torch.load(tmp_path / "split.ckpt", weights_only=False)
    plain = GPTModule()
    plain.load_state_dict(checkpoint["state_dict"])
    two_groups(plain).load_state_dict(checkpoint["optimizer_states"][0])
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(checkpoint["state_dict"][name], weight, rtol=1e-4, atol=1e-5)
    for whole in seen:
        torch.testing.assert_close(whole, module.model.head.weight.detach(), rtol=1e-4, atol=1e-5)

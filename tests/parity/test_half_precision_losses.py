"""bf16-mixed in Lightning's Trainer: losses are as near to those of FSDPStrategy and DDP as these are to each other.

The same batches in another order of their rows have the same gradients but for rounding. How far FSDP's losses go apart
for that reason alone, or are from DDP's, is the measure of those of OSDPStrategy.
"""

from __future__ import annotations

import itertools
import tempfile
import warnings
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.planning.spec.choices import Mode
from tests.parity.test_low_precision import with_casts
from tests.support.models import Block, TinyGPT, gpt_batches, gpt_loss, wrap_blocks
from tests.support.modules import trainer
from tests.support.parity import IS_LONG
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

RANKS, STEPS, BATCH, DISTINCT = 2, 50 if IS_LONG else 25, 8, 5
ORDERS = 4
POLICIES = ("mixed", "joined zdp", "reduced in bf16", *(("dp", "zdp2", "zdp") if IS_LONG else ()))


class Learner(pl.LightningModule):
    """Learns ``DISTINCT`` batches by heart, the rows of each in the order of that number."""

    def __init__(self, order: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.order, self.model = order, TinyGPT()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = gpt_loss(self.model, batch[0])
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randperm(BATCH, generator=torch.Generator().manual_seed(self.order))
        own = gpt_batches(DISTINCT, BATCH)[:, rows[self.global_rank :: RANKS]].flatten(0, 1)
        return DataLoader(TensorDataset(own), batch_size=BATCH // RANKS)


class AutocastOnCpu(FSDPPrecision):
    """Lightning's, which takes it for granted that autocast is CUDA's."""

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class FSDPOnCpu(FSDPStrategy):
    """Lightning's, which refuses a CPU unless it is another class, with torch's FSDP told the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **self.kwargs,
        )


def losses_of(strategy: Any, order: int = 0, **options: Any) -> list[float]:
    module = Learner(order)
    if "plugins" not in options:
        options["precision"] = "bf16-mixed"
    with tempfile.TemporaryDirectory() as folder:
        own = {"max_steps": STEPS, "use_distributed_sampler": False, "max_epochs": -1}
        trainer(folder, strategy, **own, **options).fit(module)
    return module.losses


def osdp(policy: str) -> OSDPStrategy:
    module = Learner(0)
    mode = policy if policy in (*Mode, "mixed") else "zdp"
    plan = plan_for(module, [gpt_batches(1, BATCH // RANKS)[0]], RANKS, mode, BATCH // RANKS)
    plan = wrap_blocks(with_casts(plan, module), ["model.blocks.0", "model.blocks.1"] if "joined" in policy else [])
    is_reduced = "reduced" in policy
    plan = plan.model_copy(update={"reduce_dtype": "bfloat16" if is_reduced else ""})
    return OSDPStrategy(plan=plan, reduce_dtype="bf16" if is_reduced else None)


def train_all(rank: int, ranks: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    fsdp = {
        f"fsdp {order}": losses_of(FSDPOnCpu(auto_wrap_policy={Block}), order, plugins=[AutocastOnCpu("bf16-mixed")])
        for order in range(ORDERS)
    }
    found = {policy: losses_of(osdp(policy)) for policy in POLICIES}
    found["ddp"] = losses_of(DDPStrategy())
    with tempfile.TemporaryDirectory() as cache:
        planned = OSDPStrategy(batch_size=BATCH // RANKS, cache=cache)
        found["planned"] = losses_of(planned, callbacks=[OSDPCallback(modes="zdp")])
    assert {op.compute_dtype for op in planned.execution_plan.operators} == {"", "bfloat16"}  # type: ignore[union-attr]
    return fsdp | found


@pytest.fixture(scope="module")
def losses() -> dict[str, Tensor]:
    """Of each run, the mean over the ranks."""
    runs = run_ranks(train_all, RANKS)
    return {name: torch.tensor([run[name] for run in runs]).mean(0) for name in runs[0]}


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def spread(losses: dict[str, Tensor]) -> float:
    """How far losses of FSDP, with rows in several orders, and of DDP are apart; a fourth more on other processors."""
    runs = [losses["ddp"], *(losses[f"fsdp {order}"] for order in range(ORDERS))]
    return 1.25 * max(distance(one, other) for one, other in itertools.combinations(runs, 2))


@pytest.mark.parametrize("way", [*POLICIES, "planned"])
def test_losses_are_within_the_spread_of_fsdp(losses: dict[str, Tensor], way: str) -> None:
    assert len(losses[way]) == STEPS
    assert losses["fsdp 0"][-1] < (0.7 if IS_LONG else 0.85) * losses["fsdp 0"][0]  # it learns
    assert distance(losses[way], losses["fsdp 0"]) <= spread(losses)


@pytest.mark.parametrize("way", [*POLICIES, "planned"])
def test_losses_are_within_the_spread_of_fsdp_of_those_of_ddp(losses: dict[str, Tensor], way: str) -> None:
    assert distance(losses[way], losses["ddp"]) <= spread(losses)

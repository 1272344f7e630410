"""A module that has everything that a step changes, and what its trials share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.autotune.trials import TrialSetup
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling.tracing.trace import TracedStep
from tests.support.models import hand_made_plan, some_cluster
from tests.support.traced_models import trace

CPU, ROOM = torch.device("cpu"), 1 << 40
BATCH = torch.arange(4 * 64, dtype=torch.float32).view(4, 64) / 256
ALONE = RankGroup.single(CPU)


class Module(pl.LightningModule):
    """Has gradients, running statistics, random numbers, and attributes of its own."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.5), nn.Linear(128, 128), nn.Linear(128, 1)
        )
        self.fails, self.steps = fails, 0

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.steps += 1
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        if self.fails and type(batch) is Tensor:
            raise ValueError("not for real")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class GivenBudget(StartupBudget):
    """A budget with a given time that remains."""

    remaining: Callable[[], float] = lambda: math.inf

    def remaining_s(self) -> float:
        return self.remaining()


def all_ranks() -> RankGroup:
    """All ranks of this process's group; this process alone if there is none."""
    return RankGroup(dist.group.WORLD, 1, CPU) if dist.is_initialized() else ALONE


def make_trial_context(module: pl.LightningModule) -> TrialContext:
    return TrialContext(module, BATCH, 4, CPU)


def make_trial_setup(
    module: pl.LightningModule,
    traced: TracedStep,
    cluster: Cluster | None = None,
    free_bytes: Callable[[], int] = lambda: ROOM,
    remaining_s: Callable[[], float] = lambda: math.inf,
    searched_sizes: Sequence[int] = (2, 4),
) -> TrialSetup:
    ranks = all_ranks()
    return TrialSetup(
        make_trial_context(module),
        traced.model_profile,
        traced.batch_sizes,
        searched_sizes,
        ranks,
        cluster or some_cluster(ranks.world_size),
        free_bytes,
        GivenBudget(ranks, 0.0, remaining=remaining_s),
    )


def mixed_plan(ranks: int) -> ExecutionPlan:
    """Every mode, and one operator in slices."""
    module = Module()
    names = [operator.name for operator in trace(module, BATCH, 4, device=CPU).model_profile.operators]
    modes = {name: Mode.ZDP if name == "net.0" else Mode.DP for name in names}
    plan = hand_made_plan(modes, ranks)
    cut = {"slices": (Mode.ZDP2, Mode.DP), "split_dim": 1}
    operators = tuple(op.model_copy(update=cut) if op.name == "net.3" else op for op in plan.operators)
    return plan.model_copy(update={"operators": operators})

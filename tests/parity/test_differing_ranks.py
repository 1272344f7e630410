"""Ranks that run different operators: trained as under DDP, or an error that names the units and the ranks on all."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_osdp.engine.fairscale import collective_order
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import hand_made_plan, modes_for, wrap_blocks
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_all, split_plan

WIDTH, STEPS, ROWS = 12, 6, 4


class Residual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Runs those of its blocks, in that order, that it is told to."""

    def __init__(self, hidden: tuple[int, ...] = (24,) * 6) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(size) for size in hidden)
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: Tensor, blocks: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for index in blocks:
            x = self.blocks[index](x)
        return self.head(x)


Route = Callable[[int, int], tuple[int, ...]]
"""Step and rank -> the blocks to run."""


def all_but(*left_out: int) -> tuple[int, ...]:
    return tuple(index for index in range(6) if index not in left_out)


def draw(step: int, rank: int) -> tuple[int, ...]:
    generator = random.Random(100 * rank + step)
    return all_but(*(index for index in range(6) if generator.random() < 0.4))


ROUTES: dict[str, Route] = {
    "one left out by rank from the second step": lambda step, rank: all_but(rank + 1) if step else all_but(),
    "one left out by rank from the first step": lambda step, rank: all_but(2 - 2 * rank),
    "one rank leaves out the first": lambda step, rank: all_but(0) if rank and step else all_but(),
    "one rank leaves out the last": lambda step, rank: all_but(5) if not rank and step else all_but(),
    "drawn": draw,
    "no rank runs one": lambda step, rank: all_but(3) if step > 1 else all_but(),
    "swapped": lambda step, rank: (0, 2, 1, 3, 4, 5) if rank and step else all_but(),
    "reversed": lambda step, rank: (5, 4, 3, 2, 1, 0) if rank and step > 1 else all_but(),
    "early exit": lambda step, rank: (0, 1, 2)[: 3 - step % 3] if rank else all_but(),
    "one more": lambda step, rank: all_but() if rank and step else all_but(2),
    "experts": lambda step, rank: ((step + rank) % 6,),
    "no expert": lambda step, rank: () if rank and step % 2 else (step % 6,),
    "one twice": lambda step, rank: (0, 1, 1, 2) if rank and step else (0, 1, 2),
    "as one from the third step": lambda step, rank: all_but(2 * rank) if step < 2 else all_but(),
}


class Case(NamedTuple):
    route: str
    policy: str
    hidden: tuple[int, ...] = (24,) * 6
    accumulation: int = 1


UNEQUAL = (8, 40, 16, 24, 12, 32)
CASES = [Case(route, "zdp", UNEQUAL) for route in ROUTES]
CASES += [Case(route, "zdp2", UNEQUAL) for route in ROUTES]
for policy in ("mixed", "joined zdp", "joined zdp2", "sliced", "recomputed", "prefetched"):
    CASES += [Case(route, policy) for route in ("drawn", "one left out by rank from the second step", "swapped")]
CASES += [Case("drawn", "updated"), Case("one left out by rank from the second step", "updated")]
CASES += [Case("drawn", policy, UNEQUAL, 2) for policy in ("zdp", "zdp2", "sliced", "mixed")]


def plan_of(model: nn.Module, policy: str, ranks: int) -> ExecutionPlan:
    if policy == "sliced":
        return split_plan(split_all(model, 3), ranks)
    mode = policy.split()[-1] if policy.split()[-1] in ("zdp", "zdp2", "mixed") else "zdp"
    blocks = [f"blocks.{index}" for index in range(6)]
    plan = wrap_blocks(hand_made_plan(modes_for(model, mode), ranks), blocks if "joined" in policy else ())
    ahead = (1 << 30) * (policy == "prefetched")
    return plan.model_copy(
        update={
            "cluster": plan.cluster.model_copy(update={"prefetch_max_bytes": ahead}),
            "recomputed": tuple(blocks[:3]) if policy == "recomputed" else (),
            "update_in_backward": policy == "updated",
        }
    )


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, 5, (ROWS,), generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def train_by_ddp(rank: int, case: Case) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Stack(case.hidden)
    wrapped, optimizer = DistributedDataParallel(model, find_unused_parameters=True), optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.accumulation):
            with nullcontext() if micro + 1 == case.accumulation else wrapped.no_sync():
                x, y = batch_of(case.accumulation * step + micro, rank)
                logits = wrapped(x, ROUTES[case.route](case.accumulation * step + micro, rank))
                (nn.functional.cross_entropy(logits, y) / case.accumulation).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_by_engine(rank: int, ranks: int, case: Case) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Stack(case.hidden)
    optimizer, engine = optimizer_of(model), FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, case.policy, ranks), [optimizer])
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.accumulation):
            engine.before_forward()
            with nullcontext() if micro + 1 == case.accumulation else engine.no_sync():
                x, y = batch_of(case.accumulation * step + micro, rank)
                logits = model(x, ROUTES[case.route](case.accumulation * step + micro, rank))
                (nn.functional.cross_entropy(logits, y) / case.accumulation).backward()
                engine.finish_backward()
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
    state = engine.model_state()
    engine.close()
    return state


def compare(rank: int, ranks: int, cases: list[Case]) -> list[float]:
    collective_order.STABLE_COUNT, collective_order.FIRST_ASKING_STEPS = 2, 1  # also what comes after
    worst, by_ddp = [], {}
    for case in cases:
        key = case._replace(policy="")
        if key not in by_ddp:
            by_ddp[key] = train_by_ddp(rank, case)
        right, found = by_ddp[key], train_by_engine(rank, ranks, case)
        worst.append(max((float((right[name] - value).abs().max()) for name, value in found.items()), default=0.0))
    return worst


@pytest.fixture(scope="module")
def differences() -> dict[Case, float]:
    return dict(zip(CASES, run_ranks(compare, 2, CASES)[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_run_different_blocks_train_as_under_ddp(differences: dict[Case, float], case: Case) -> None:
    assert differences[case] < 1e-6

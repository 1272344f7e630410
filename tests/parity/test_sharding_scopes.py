"""Group sharding and two-stage collectives on 2 nodes of 2 ranks: training equals that of one process.

All cases run in one set of processes, since starting four takes longer than training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from tests.support.models import (
    TinyGPT,
    gpt_batches,
    gpt_loss,
    hand_made_plan,
    some_cluster,
    two_groups,
    weighted_modules,
)
from tests.support.ranks import run_ranks

RANKS, NODES, STEPS, BATCH = 4, 2, 4, 8

WORLD, WORLD2 = ShardingChoice((Mode.ZDP,)), ShardingChoice((Mode.ZDP2,))
NODE, NODE2 = (
    ShardingChoice((Mode.ZDP,), scope=ShardingScope.NODE),
    ShardingChoice((Mode.ZDP2,), scope=ShardingScope.NODE),
)
STAGES, STAGES2 = ShardingChoice((Mode.ZDP,), hierarchical=True), ShardingChoice((Mode.ZDP2,), hierarchical=True)

SPLIT_NODE = ShardingChoice((Mode.ZDP, Mode.DP, Mode.ZDP2), split_dim=1, scope=ShardingScope.NODE)
SPLIT_STAGES = ShardingChoice((Mode.ZDP, Mode.ZDP), split_dim=1, hierarchical=True)

PLANS: dict[str, list[ShardingChoice]] = {
    "node": [NODE],
    "node zdp2": [NODE2],
    "two-stage": [STAGES],
    "two-stage zdp2": [STAGES2],
    "split": [SPLIT_NODE, SPLIT_STAGES],
    "mixed": [ShardingChoice(), WORLD, NODE, STAGES, WORLD2, NODE2, STAGES2],
    "mixed, prefetched in nodes": [ShardingChoice(), NODE, WORLD, NODE2, STAGES, SPLIT_NODE],
}
CASES = [(name, accumulation) for name in PLANS for accumulation in (1, 2)]


def operator_plan_fields(choice: ShardingChoice) -> dict[str, Any]:
    """As an ``OperatorPlan`` calls it."""
    return {
        "slices": choice.slices,
        "split_dim": choice.split_dim,
        "sharding_group": choice.scope,
        "hierarchical": choice.hierarchical,
    }


def plan_of(
    module: nn.Module, choices: list[ShardingChoice], nodes: int = NODES, prefetched: bool = False
) -> ExecutionPlan:
    """A plan that takes ``choices`` in turn for the weighted modules."""
    names = weighted_modules(module)
    operators = tuple(
        OperatorPlan(name=name, **operator_plan_fields(c), num_parameters=0)
        for name, c in zip(names, choices * len(names), strict=False)
    )
    cluster = some_cluster(RANKS // nodes, nodes=nodes, prefetch_max_bytes=(1 << 30) * prefetched)
    return hand_made_plan({}, RANKS).model_copy(update={"operators": operators, "cluster": cluster})


class Run:
    """A model in training on one rank."""

    def __init__(
        self, rank: int, plan: Callable[[nn.Module], ExecutionPlan], make: Callable[[], nn.Module] = TinyGPT
    ) -> None:
        torch.manual_seed(1 + rank)  # the engine must start all ranks from rank 0's weights
        self.rank = rank
        self.model = make()
        self.optimizer = two_groups(self.model)
        self.engine = FairScaleEngine(torch.device("cpu"))
        self.engine.apply(self.model, plan(self.model), [self.optimizer])

    def step(self, parts: list[Callable[[nn.Module], Tensor]], clip: float = 0.5) -> tuple[float, float]:
        """One optimizer step over micro-batches, each a function of the model: (loss, norm of the gradient)."""
        self.optimizer.zero_grad()
        total = 0.0
        for i, part in enumerate(parts):
            self.engine.before_forward()
            with nullcontext() if i == len(parts) - 1 else self.engine.no_sync():
                loss = part(self.model) / len(parts)
                loss.backward()
                self.engine.finish_backward()
            total += float(loss.detach())
        norm = self.engine.clip_grad_norm(self.model.parameters(), clip)
        self.engine.before_optimizer_step(self.optimizer)
        self.optimizer.step()
        self.engine.after_optimizer_step()
        return total, float(norm)

    def train(self, batches: Tensor, accumulation: int = 1) -> tuple[list[float], list[float]]:
        """This rank's part of each global batch: losses and norms."""
        results = []
        for batch in batches:
            chunks = batch[self.rank :: RANKS].chunk(accumulation)
            results.append(self.step([lambda m, c=chunk: gpt_loss(m, c) for chunk in chunks]))
        return [loss for loss, _ in results], [norm for _, norm in results]

    def whole_state(self) -> tuple[Any, Any]:
        """Model and optimizer state, whole on every rank, as after loading a checkpoint."""
        box = [(self.engine.model_state(), self.engine.optimizer_state(self.optimizer))]
        dist.broadcast_object_list(box, 0)
        return box[0]


@cache
def reference(steps: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and final weights of plain PyTorch in one process."""
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = two_groups(model)
    losses, norms = [], []
    for batch in gpt_batches(steps, BATCH):
        optimizer.zero_grad()
        loss = gpt_loss(model, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


def train_under_plan(rank: int, name: str, accumulation: int) -> Any:
    run = Run(rank, lambda module: plan_of(module, PLANS[name], prefetched="prefetched" in name))
    losses, norms = run.train(gpt_batches(STEPS, BATCH), accumulation)
    return losses, norms, run.engine.model_state()


def train_under_two_plans(rank: int, before: str, after: str) -> Any:
    """Half of the steps under one plan, the others under another; what is between them is a checkpoint."""
    batches = gpt_batches(STEPS, BATCH)
    first = Run(rank, lambda module: plan_of(module, PLANS[before]))
    first.train(batches[: STEPS // 2])
    model, optimizer = first.whole_state()
    second = Run(rank, lambda module: plan_of(module, PLANS[after]))
    second.engine.load_model_state(model)
    second.engine.load_optimizer_state(second.optimizer, optimizer)
    second.train(batches[STEPS // 2 :])
    return second.engine.model_state()


def bf16_weights(rank: int, name: str) -> Any:
    """After steps under autocast, where only the reductions differ between plans."""
    run = Run(rank, lambda module: plan_of(module, PLANS[name] if name else [WORLD]))
    with torch.autocast("cpu", torch.bfloat16):
        run.train(gpt_batches(3, BATCH), accumulation=2)
    return run.engine.model_state()


class Detour(nn.Module):
    """Takes another way through its weights for every second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        x = self.often(x)
        return self.seldom(x) if detour else x


def detour_parts(rank: int | None) -> list[Callable[[nn.Module], Tensor]]:
    """Two micro-batches of one rank, or of all together; only the first uses all weights."""
    x = torch.randn(2, BATCH, 16, generator=torch.Generator().manual_seed(3))
    x = x if rank is None else x[:, rank::RANKS]
    return [lambda m: m(x[0], True).square().mean(), lambda m: m(x[1], False).square().mean()]


def step_with_detour(rank: int, choice: ShardingChoice) -> Any:
    run = Run(rank, lambda module: plan_of(module, [choice]), Detour)
    _, norm = run.step(detour_parts(rank), clip=1e9)
    return norm, run.engine.model_state()


def train_on_one_rank_nodes(rank: int) -> Any:
    """Four nodes of one rank: a node has nothing to share, two stages are one."""
    run = Run(rank, lambda module: plan_of(module, [NODE, STAGES], nodes=4))
    run.train(gpt_batches(STEPS, BATCH))
    return run.engine.model_state(), run.engine.collectives_per_step


MOVES = [("node", "two-stage"), ("mixed", "node")]


def run_all(rank: int, ranks: int) -> dict[str, Any]:
    counted = {}
    for name in ("node", "two-stage"):
        counted[name] = Run(rank, lambda m, n=name: plan_of(m, PLANS[n])).engine.collectives_per_step
    return {
        "trained": [train_under_plan(rank, *case) for case in CASES],
        "moved": [train_under_two_plans(rank, *move) for move in MOVES],
        "bf16": [bf16_weights(rank, name) for name in ("", "node", "mixed")],
        "detour": [step_with_detour(rank, choice) for choice in (NODE, SPLIT_NODE)],
        "one rank": train_on_one_rank_nodes(rank),
        "counted": counted,
    }


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS)


def assert_same_weights(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(state) == list(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_node_and_hierarchical_plans_match_plain_losses_norms_and_weights(
    runs: list[dict[str, Any]], case: tuple[str, int]
) -> None:
    results = [run["trained"][CASES.index(case)] for run in runs]
    expected_losses, expected_norms, expected = reference()
    losses = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=1e-5, atol=0)
    for result in results:
        torch.testing.assert_close(torch.tensor(result[1]), torch.tensor(expected_norms), rtol=1e-4, atol=0)
    assert_same_weights(results[0][2], expected)


@pytest.mark.parametrize("move", MOVES)
def test_state_moved_to_other_plan_continues_like_plain_training(
    runs: list[dict[str, Any]], move: tuple[str, str]
) -> None:
    assert_same_weights(runs[0]["moved"][MOVES.index(move)], reference()[2])


def test_autocast_with_node_groups_matches_world_sharding(runs: list[dict[str, Any]]) -> None:
    world, node, mixed = runs[0]["bf16"]
    assert_same_weights(node, world)
    assert_same_weights(mixed, world)


def test_gradient_from_first_micro_batch_only_is_averaged_over_ranks(runs: list[dict[str, Any]]) -> None:
    torch.manual_seed(1)
    model = Detour()
    optimizer = two_groups(model)
    for part in detour_parts(None):
        (part(model) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    for actual_norm, state in runs[0]["detour"]:
        assert actual_norm == pytest.approx(float(norm), rel=1e-5)
        assert_same_weights(state, model.state_dict())


def test_one_rank_nodes_match_plain_training_with_flat_collectives(runs: list[dict[str, Any]]) -> None:
    state, collectives = runs[0]["one rank"]
    assert_same_weights(state, reference()[2])
    operators = len(weighted_modules(TinyGPT()))
    assert collectives == 3 * (operators // 2) + 1


def test_collectives_per_step_counts_node_and_hierarchical_collectives(runs: list[dict[str, Any]]) -> None:
    operators = len(weighted_modules(TinyGPT()))
    assert runs[0]["counted"] == {"node": 4 * operators + 1, "two-stage": 3 * operators + 1}

"""Sharded parameters updated in the backward pass: the same training, without gradients that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_osdp.backend.fused_adam import fused_step
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.gradient_buckets import GradientSync
from lightning_osdp.engine.optimizer_in_backward import BackwardOptimizer
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups, wrap_blocks
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_all, split_plan

STEPS, BATCH, RANKS = 12, 8, 2
HALF = STEPS // 2
"""So many steps update in the backward pass, the others after it."""


class BrokenOffError(Exception):
    """Amid a backward pass."""


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "AdamW":
        return two_groups(model)
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def reference(name: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, final weights and optimizer state of plain PyTorch in one process."""
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = optimizer_of(model, name)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    losses = []
    for batch in gpt_batches(STEPS, BATCH):
        loss = gpt_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict(), optimizer.state_dict()


def plan_of(model: nn.Module, policy: str, at_once: bool) -> ExecutionPlan:
    """``is_slice``: in modes that differ from slice to slice; ``sharded slices``: none of them replicated."""
    if policy == "sliced":
        plan = split_plan(split_all(model, 3), RANKS)
    elif policy == "sharded slices":
        splits = {name: ((Mode.ZDP,) * len(modes), dim) for name, (modes, dim) in split_all(model, 3).items()}
        plan = split_plan(splits, RANKS, ("blocks.1",))
    else:
        blocks = ("blocks.0", "blocks.1") if policy.startswith("joined ") else ()
        plan = wrap_blocks(hand_made_plan(modes_for(model, policy.removeprefix("joined ")), RANKS), blocks)
    return plan.model_copy(update={"update_in_backward": at_once})


def train(rank: int, ranks: int, policy: str, name: str, accumulation: int) -> dict[str, Any]:
    """The same on one of several ranks."""
    torch.manual_seed(1)
    model = TinyGPT()
    large = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = optimizer_of(model, name)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, policy, True), [optimizer])
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    losses, kept = [], []
    for step, batch in enumerate(gpt_batches(STEPS, BATCH)):
        if step == HALF:
            engine.apply_plan_change(plan_of(model, policy, False), [optimizer])
        *firsts, last = batch[rank::ranks].chunk(accumulation)

        def run_pass(part: torch.Tensor) -> float:
            engine.before_forward()
            loss = gpt_loss(model, part) / accumulation
            loss.backward()
            engine.finish_backward()
            return float(loss.detach())

        def run_last_pass(part: torch.Tensor = last) -> float:
            loss = run_pass(part)
            kept.append(sum(parameter.grad is not None for parameter in large))
            engine.before_optimizer_step(optimizer)
            return loss

        total = 0.0
        with engine.no_sync():
            for part in firsts:
                total += run_pass(part)
        with fused_step(optimizer):
            if step % 2:  # as Lightning's loops do in automatic optimization
                total += optimizer.step(run_last_pass)
            else:
                total += run_last_pass()
                optimizer.step()
        engine.after_optimizer_step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return {
        "losses": losses,
        "state": engine.model_state(),
        "optimizer": engine.optimizer_state(optimizer),
        "kept": kept,
        "calls": len(calls),
    }


POLICIES = ("zdp", "zdp2", "mixed", "joined zdp", "sliced", "sharded slices")
CASES = [(policy, "AdamW", 1) for policy in POLICIES]
CASES += [("zdp", "SGD", 1), ("zdp", "RMSprop", 1), ("zdp", "AdamW", 2), ("sharded slices", "AdamW", 2)]


def train_all(rank: int, ranks: int) -> list[dict[str, Any]]:
    return [train(rank, ranks, *case) for case in CASES]


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    by_rank = run_ranks(train_all, RANKS)
    return {case: [results[at] for results in by_rank] for at, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_update_in_backward_matches_plain_training(
    runs: dict[Any, list[dict[str, Any]]], case: tuple[str, str, int]
) -> None:
    expected_losses, expected, states = reference(case[1])
    losses = torch.tensor([result["losses"] for result in runs[case]]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=1e-5, atol=0)
    found = runs[case][0]
    for name, weight in expected.items():
        torch.testing.assert_close(
            found["state"][name], weight, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    for index, state in states["state"].items():
        for key, value in state.items():
            if value is not None:
                torch.testing.assert_close(found["optimizer"]["state"][index][key], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_update_in_backward_frees_gradients_before_step(
    runs: dict[Any, list[dict[str, Any]]], case: tuple[str, str, int]
) -> None:
    kept = runs[case][0]["kept"]
    large = kept[-1]  # all of them wait for the step
    assert kept == [kept[0]] * HALF + [large] * (STEPS - HALF)
    waits = large if case[0] == "sliced" else sum(mode == Mode.DP for mode in modes_for(TinyGPT(), "mixed").values())
    if case[0] == "sliced":  # nearly every weight has a replicated slice
        assert 0 < kept[0] <= waits
    else:
        position = 1  # a parameter of no operator: replicated
        assert kept[0] == position + (waits if case[0] == "mixed" else 0)


def test_update_in_backward_calls_step_hooks_once_per_step(runs: dict[Any, list[dict[str, Any]]]) -> None:
    assert {result["calls"] for results in runs.values() for result in results} == {STEPS}


def interrupt_backward(rank: int, ranks: int) -> tuple[bool, str]:
    """A backward pass that ends when the head and the last block are updated."""
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = two_groups(model)
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, "zdp", True), [optimizer])
    before = engine.model_state()

    def stop(gradient: torch.Tensor) -> None:
        raise BrokenOffError

    model.blocks[0].register_forward_hook(lambda _, __, output: output.register_hook(stop) and None)
    engine.before_forward()
    with pytest.raises(BrokenOffError):
        gpt_loss(model, gpt_batches(1, BATCH)[0][rank::ranks]).backward()
    with pytest.raises(ShardingError) as refused:
        engine.model_state()
    return bool(before), str(refused.value)


def test_model_state_of_partially_updated_model_raises_sharding_error() -> None:
    (saved, said), (_, also_said) = run_ranks(interrupt_backward, RANKS)
    assert saved
    assert "some parameters had been updated: this state is not saved" in said
    assert said == also_said


def attach_one_parameter(sync: GradientSync) -> tuple[nn.Parameter, torch.optim.SGD, BackwardOptimizer]:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter, nn.Parameter(torch.ones(2))], lr=1.0)
    updates = BackwardOptimizer(sync)
    updates.attach([optimizer])
    return parameter, optimizer, updates


def test_step_parameter_updates_one_parameter_and_frees_its_gradient() -> None:
    parameter, optimizer, updates = attach_one_parameter(GradientSync())
    other = optimizer.param_groups[0]["params"][1]
    groups = optimizer.param_groups
    parameter.grad, other.grad = torch.full((3,), 0.25), torch.ones(2)
    assert updates.should_update(parameter)
    updates.step_parameter(parameter)
    assert parameter.tolist() == [0.75] * 3
    assert other.tolist() == [1.0] * 2
    assert parameter.grad is None
    assert optimizer.param_groups is groups
    assert groups[0]["params"] == [parameter, other]
    assert updates.is_partially_updated
    with pytest.raises(ShardingError, match="twice in one backward pass"):
        updates.should_update(parameter)
    updates.finish_backward()
    assert updates.should_update(parameter)
    assert not updates.is_partially_updated


def test_should_update_is_false_for_foreign_paused_or_hooked_parameters() -> None:
    sync = GradientSync()
    parameter, optimizer, updates = attach_one_parameter(sync)
    assert not updates.should_update(nn.Parameter(torch.ones(3)))  # of no optimizer
    with sync.pause():
        assert not updates.should_update(parameter)
    with fused_step(optimizer):  # our own look at the optimizer needs no gradients
        updates.refresh()
        assert updates.should_update(parameter)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    updates.refresh()
    assert not updates.should_update(parameter)
    handle.remove()
    updates.refresh()
    assert updates.should_update(parameter)
    optimizer.add_param_group({"params": [late := nn.Parameter(torch.ones(1))]})
    assert not updates.should_update(late)
    updates.refresh()
    assert updates.should_update(late)

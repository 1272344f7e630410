"""Units that run ahead: the same training to the bit, whatever way the passes go."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

from lightning_osdp.engine.fairscale import unit_collectives
from lightning_osdp.engine.fairscale.communicators import CommunicatorFactory
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.fairscale.unit import FairScaleUnit
from lightning_osdp.engine.gradient_buckets import GradientSync
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import (
    TinyGPT,
    gpt_batches,
    gpt_loss,
    hand_made_plan,
    modes_for,
    some_cluster,
    two_groups,
    wrap_blocks,
)
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_all, split_plan

STEPS, BATCH = 5, 12
ALL = 1 << 30
"""As ``prefetch_max_bytes``: every unit."""

POLICIES = (
    "zdp",
    "zdp2",
    "mixed",
    "joined zdp",
    "sliced",
    "recomputed",
    "recomputed joined",
    "updated",
    "updated joined",
)


class Wayward(TinyGPT):
    """In some steps it leaves out a block, runs the blocks in another order, or one of them twice."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.step = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ways = ((0, 1, 2), (0, 1, 2), (0, 2), (2, 1, 0), (0, 1, 1, 2))
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for index in ways[self.step % len(ways)]:
            x = self.blocks[index](x)
        self.step += self.training
        return self.head(self.norm(x))


def plan_of(model: nn.Module, policy: str, ranks: int, ahead_bytes: int) -> ExecutionPlan:
    if policy == "sliced":
        plan = split_plan(split_all(model, 3), ranks)
    else:
        mode = policy if policy in ("zdp2", "mixed") else "zdp"
        plan = wrap_blocks(
            hand_made_plan(modes_for(model, mode), ranks), ("blocks.0", "blocks.1") * ("joined" in policy)
        )
    cluster = plan.cluster.model_copy(update={"prefetch_max_bytes": ahead_bytes})
    again = ("blocks.0", "blocks.1") if "recomputed" in policy else ()
    return plan.model_copy(update={"cluster": cluster, "recomputed": again, "update_in_backward": "updated" in policy})


class Counted:
    """Counts what is begun, and what of it is waited for when it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for kind, name in (
            (unit_collectives.CoalescedAllGather, "start"),
            (unit_collectives.CoalescedAllGather, "gather"),
        ):
            monkeypatch.setattr(kind, name, self._counting(name, getattr(kind, name)))
        for name in ("all_gather_async", "reduce_scatter_async"):
            monkeypatch.setattr(unit_collectives, name, self._counting(name, getattr(unit_collectives, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            if name == "gather" and args[0].is_started:
                self.calls["in time"] += 1
            return function(*args)

        return counted


def train(rank: int, ranks: int, policy: str, ahead_bytes: int, accumulation: int, wayward: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Wayward() if wayward else TinyGPT()
    optimizer = two_groups(model)
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, policy, ranks, ahead_bytes), [optimizer])
    units = [module for module in engine._units if isinstance(module, FairScaleUnit)]
    losses, left, begun = [], [], []
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        for batch in gpt_batches(STEPS, BATCH):
            parts = batch[rank::ranks].chunk(accumulation)
            for index, part in enumerate(parts):
                engine.before_forward()
                with nullcontext() if index + 1 == len(parts) else engine.no_sync():
                    loss = gpt_loss(model, part) / accumulation
                    loss.backward()
                    engine.finish_backward()
                losses.append(float(loss.detach()))
            left.append(sum(unit.has_unsharded_params or unit._coalesced_gather.is_started for unit in units))
            engine.before_optimizer_step(optimizer)
            optimizer.step()
            engine.after_optimizer_step()
            optimizer.zero_grad()
            begun.append(dict(counted.calls))
            model.eval()
            with torch.no_grad():
                losses.append(float(gpt_loss(model, batch[rank::ranks])))
            model.train()
            assert counted.calls["start"] == begun[-1].get("start", 0)  # evaluation has no room for the next
            engine.before_forward()
            gpt_loss(model, batch[rank::ranks])  # a forward without a backward
            engine.finish_backward()
    return {"losses": losses, "state": engine.model_state(), "left": left, "begun": begun[-1]}


CASES = [(policy, 1, False) for policy in POLICIES]
CASES += [("zdp", 2, False), ("sliced", 2, False), ("zdp", 1, True), ("recomputed", 1, True)]


def train_all(rank: int, ranks: int) -> list[list[dict[str, Any]]]:
    return [
        [train(rank, ranks, policy, ahead_bytes, accumulation, wayward) for ahead_bytes in (0, ALL)]
        for policy, accumulation, wayward in CASES
    ]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def runs(request: pytest.FixtureRequest) -> dict[Any, list[list[dict[str, Any]]]]:
    by_rank = run_ranks(train_all, request.param)
    return {case: [results[at] for results in by_rank] for at, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefetch_keeps_training_bitwise_equal(runs: dict[Any, list[list[dict[str, Any]]]], case: Any) -> None:
    for usual, found in runs[case]:
        assert found["losses"] == usual["losses"]
        for name, weight in usual["state"].items():
            assert torch.equal(found["state"][name], weight), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefetch_starts_collectives_before_they_are_needed(
    runs: dict[Any, list[list[dict[str, Any]]]], case: Any
) -> None:
    for usual, found in runs[case]:
        assert usual["begun"].get("all_gather_async", usual["begun"].get("reduce_scatter_async", 0)) == 0
        assert found["begun"]["reduce_scatter_async"] > 0
        begun, in_time = found["begun"]["start"], found["begun"]["in time"]
        if not case[2]:  # one step to learn the order; then all but the first of each pass
            assert in_time == begun > (STEPS - 2) / STEPS * 0.5 * (found["begun"]["gather"] - found["begun"]["start"])
        else:
            assert 0 < in_time <= begun


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefetch_leaves_no_unit_in_use_after_step(runs: dict[Any, list[list[dict[str, Any]]]], case: Any) -> None:
    for both in runs[case]:
        assert [result["left"] for result in both] == [[0] * STEPS] * 2


def prefetch_flags(rank: int, ranks: int, ahead_bytes: int) -> list[bool]:
    model = TinyGPT()
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, "zdp", ranks, ahead_bytes))
    return [unit._is_prefetched for unit in engine._units]


def test_prefetch_skips_units_above_max_bytes() -> None:
    model = TinyGPT()
    weights = [model.get_submodule(name).weight.nbytes for name in modes_for(model, "zdp")]
    middle = sorted(set(weights))[len(set(weights)) // 2]
    (found, _) = run_ranks(prefetch_flags, 2, middle)
    assert found == [size <= middle for size in weights]
    assert len(set(found)) == 2
    assert run_ranks(prefetch_flags, 1, ALL) == [[False] * len(weights)]


def test_prefetch_is_off_where_ranks_of_a_node_share_its_link() -> None:
    def bound(**nodes: Any) -> int:
        cluster = some_cluster(4).model_copy(update={"prefetch_max_bytes": ALL, **nodes})
        sharded = ShardingChoice((Mode.ZDP,))
        return (
            CommunicatorFactory(object(), torch.device("cpu"), [sharded], cluster, GradientSync())
            .for_choice(sharded)
            .prefetch_max_bytes
        )

    assert bound() == bound(nodes=4, devices_per_node=1) == ALL
    assert bound(nodes=2, devices_per_node=2) == bound(devices_by_node=(3, 1)) == 0


class Pair(nn.Module):
    """Two layers, of which a pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x).relu()
        return self.second(x).relu() if both else x


class Partial(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: torch.Tensor, unused: int | None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, index != unused)
        return x


def train_with_unused_layers(rank: int, ranks: int) -> list[str]:
    """What differs from plain PyTorch where a unit's gradients do not all come, or the pass breaks off."""
    failed = []
    torch.manual_seed(1)
    model, plain = Partial(), Partial()
    plain.load_state_dict(model.state_dict())
    modes = {f"blocks.{block}.{layer}": Mode.ZDP for block in range(2) for layer in ("first", "second")}
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, wrap_blocks(hand_made_plan(modes, ranks), ("blocks.0", "blocks.1")))
    x = torch.randn(12, 8)
    for unused in (None, 1, 0, None):
        plain.zero_grad()
        plain(x, unused).square().mean().backward()
        engine.before_forward()
        model(x[rank::ranks], unused).square().mean().backward()
        engine.finish_backward()
        for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            came = own.grad is not None
            if came != (other.grad is not None):
                failed.append(f"{name} without {unused}: {came}")
            elif came and not torch.allclose(own.grad.clone(), other.grad, atol=1e-7):
                failed.append(f"{name} without {unused} is off")
            own.grad = None
        engine._context.reducer._queued_reduction = engine._units[0].process_group_reduce_scatter
        engine._context.reducer._queued_reduction.enqueue(
            torch.ones(8 * ranks), lambda _: 1 / 0
        )  # a pass that broke off amid a unit
    return failed


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradient_reducer_with_unused_layers_reduces_enqueued_gradients(ranks: int) -> None:
    assert run_ranks(train_with_unused_layers, ranks) == [[]] * ranks


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("caught")


def run_interrupted_backward(rank: int, ranks: int) -> list[list[float]]:
    """Backward passes that end amid a reduction on all ranks; training goes on from where it was."""
    torch.manual_seed(1)
    model, batch = TinyGPT(layers=3), gpt_batches(1, BATCH)[0][rank::ranks]
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(model, plan_of(model, "zdp", ranks, ALL))

    def gradient_norms() -> list[float]:
        model.zero_grad()
        engine.before_forward()
        gpt_loss(model, batch).backward()
        engine.finish_backward()
        return [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]

    waited: list[bool] = []  # each with whether the gradient is wanted
    engine._context.reducer._pending = waited.append
    engine._context.reducer.discard()
    assert waited == []  # another rank may not have begun it yet
    norms = [gradient_norms()]
    assert waited == [False]
    for step in range(30):
        hook = model.blocks[step % 3].register_forward_hook(lambda *args: FailsInBackward.apply(args[-1]))
        engine.before_forward()
        with suppress(ValueError):
            gpt_loss(model, batch).backward()
        hook.remove()
        norms.append(gradient_norms())
    return norms


def test_gradient_reducer_drops_pending_work_of_interrupted_backward_once_it_is_done() -> None:
    for first, *others in run_ranks(run_interrupted_backward, 2):
        assert len(first) > 5
        for norms in others:
            assert norms == pytest.approx(first)

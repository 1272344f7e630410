"""Blocks that are recomputed: the same training as without, whatever they are called with and hand out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.engine.activation_checkpointing import checkpoint_block
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from tests.support.models import wrap_blocks
from tests.support.ranks import run_ranks
from tests.support.split_plans import Split, split_all, split_plan

WIDTH = 12


class Block(nn.Module):
    """Takes keywords and a nested argument, hands out a nested result, ends in dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.runs = 0

    def forward(self, x: Tensor, *, extra: dict[str, list[Tensor]], bias: Tensor | None = None) -> dict[str, Any]:
        self.runs += 1
        y = self.norm(x + extra["more"][0])
        y = y + self.attention(y, y, y, need_weights=False)[0]
        z = torch.tanh(self.up(y))
        if bias is not None:
            z = z + bias
        return {"x": x + self.dropout(self.down(z)), "hidden": (z, "a word")}


class Model(nn.Module):
    """Two blocks; the first gets an input without gradient.

    ``own``: the model checkpoints them itself, as transformers does.
    """

    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        for block in self.blocks:
            result = self._run(block, x, {"more": [x.detach()]}, hidden[-1].detach() if hidden else None)
            x, hidden = result["x"], [result["hidden"][0]]
        return self.head(x) + hidden[0].mean()

    def _run(self, block: nn.Module, x: Tensor, extra: Any, bias: Tensor | None) -> dict[str, Any]:
        if not self.own or not torch.is_grad_enabled():
            return block(x, extra=extra, bias=bias)
        if self.own == "non-reentrant":
            return checkpoint(block, x, extra=extra, bias=bias, use_reentrant=False)
        x, z = checkpoint(lambda *a: _flat(block(a[0], extra=extra, bias=bias)), x.requires_grad_(), use_reentrant=True)
        return {"x": x, "hidden": (z, "")}


def _flat(result: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return result["x"], result["hidden"][0]


def mixed_splits(k: int) -> dict[str, Split]:
    """Attention (several parameters in one unit) in zdp, the rest split and mixed."""
    found = {name: split for name, split in split_all(Model(), k).items() if "out_proj" not in name}
    return found | {f"blocks.{i}.attention": ((mode,), None) for i, mode in enumerate((Mode.ZDP, Mode.ZDP2))}


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, ranks: int, k: int, recomputed: bool, own: str = "", autocast: bool = False) -> Any:
    """Losses and weights after some steps with dropout, accumulation, clipping and evaluations in between."""
    torch.manual_seed(0)
    model = Model(own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    engine = FairScaleEngine(torch.device("cpu"))
    blocks = ("blocks.0", "blocks.1") if recomputed else ()
    engine.apply(model, split_plan(mixed_splits(k), ranks, blocks), [optimizer])
    torch.manual_seed(5 + rank)
    losses = []
    for step in range(4):
        engine.before_forward()
        with engine.no_sync() if step % 2 else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(inputs(rank, step)).float().square().mean()
            loss.backward()
            engine.finish_backward()
        losses.append(float(loss.detach()))
        assert not any(unit.has_unsharded_params for unit in engine._units)
        if step % 2:
            continue
        engine.clip_grad_norm(model.parameters(), 1.0)
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        optimizer.zero_grad()
        with torch.no_grad():
            runs = model.blocks[0].runs
            losses.append(float(model(inputs(rank, 9)).square().mean()))
            assert model.blocks[0].runs == runs + 1
    return losses, engine.model_state()


def count_gathers_per_step(rank: int, ranks: int, together: bool = False) -> dict[str, int]:
    """All-gathers in one step by unit, all of them zdp and whole, both blocks recomputed."""
    torch.manual_seed(0)
    model = Model()
    names = [f"blocks.{i}.{n}" for i in range(2) for n in ("up", "down")] + ["head"]
    engine = FairScaleEngine(torch.device("cpu"))
    plan = split_plan(dict.fromkeys(names, ((Mode.ZDP,), None)), ranks, ("blocks.0", "blocks.1"))
    engine.apply(model, wrap_blocks(plan, ("blocks.0", "blocks.1")) if together else plan)
    counts: Counter[str] = Counter()
    for name, operator in engine._operators.items():
        _count_gathers(operator.units[0], name, counts)
    model(inputs(rank, 0)).sum().backward()
    engine.finish_backward()
    return dict(counts)


def _count_gathers(unit: Any, name: str, counts: Counter[str]) -> None:
    gather = unit._gather

    def counting(*args: Any, **kwargs: Any) -> Any:
        gathered = gather(*args, **kwargs)
        counts[name] += bool(gathered)
        return gathered

    unit._gather = counting


class WholeAtOnce:
    """Notes how many parameters are whole when another gather starts."""

    def __init__(self, engine: FairScaleEngine) -> None:
        self.engine, self.most, self.gathers = engine, 0, 0
        self.announce = engine._context.order.before_gather
        engine._context.order.before_gather = self.before_gather  # type: ignore[method-assign]

    def before_gather(self, *arguments: Any) -> None:
        self.gathers += 1
        self.most = max(self.most, self._whole())
        self.announce(*arguments)

    def _whole(self) -> int:
        parameters = [p for unit in self.engine._units for p in unit.params if hasattr(p, "_full_param_padded")]
        return sum(p._full_param_padded.untyped_storage().nbytes() // 4 for p in parameters)


def measure_unsharded_elements(rank: int, ranks: int) -> dict[str, tuple[int, int]]:
    """(gathers, most elements that are whole when a gather starts), for two operators of 4 slices in zdp."""
    found = {}
    for name, recomputed in (("kept", ()), ("recomputed", ("0",))):
        for dim in (0, 1):
            model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 4))
            engine = FairScaleEngine(torch.device("cpu"))
            splits = {"0.0": ((Mode.ZDP,) * 4, dim), "0.2": ((Mode.ZDP,) * 4, dim)}
            engine.apply(model, split_plan(splits, ranks, recomputed))
            noted = WholeAtOnce(engine)
            model(torch.randn(3, 16)).sum().backward()
            engine.finish_backward()
            found[f"{name}, {dim}"] = (noted.gathers, noted.most)
    return found


def two_graph_gradients(rank: int, ranks: int, sharded: bool) -> list[Tensor]:
    """Gradients where the backward of one graph ends between the forward and the backward of another."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for name in "gc"})
    if sharded:
        engine = FairScaleEngine(torch.device("cpu"))
        modes = (Mode.DP, Mode.ZDP2, Mode.ZDP)  # the backward begins with a unit whose parameters must stay
        splits = {"g.0": (modes, 1), "g.2": (modes, 0), "c.0": ((Mode.ZDP2,), None), "c.2": ((Mode.ZDP2,), None)}
        engine.apply(model, split_plan(splits, ranks, ("g",)))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = []
    made = model["g"](x)
    for loss_of in (lambda: model["c"](made.detach()).square().mean(), lambda: model["c"](made).sum()):
        loss_of().backward()
        if sharded:
            engine.finish_backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def run_all(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gathers": count_gathers_per_step(rank, ranks),
        "gathers together": count_gathers_per_step(rank, ranks, together=True),
        "whole": measure_unsharded_elements(rank, ranks),
        "two graphs": two_graph_gradients(rank, ranks, True),
    }
    for k in (1, 3):
        for autocast in (False, True):
            found[f"kept {k} {autocast}"] = train(rank, ranks, k, False, autocast=autocast)
            found[f"recomputed {k} {autocast}"] = train(rank, ranks, k, True, autocast=autocast)
            for own in ("non-reentrant", "reentrant"):
                found[f"{own} {k} {autocast}"] = train(rank, ranks, k, False, own, autocast)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["recomputed", "non-reentrant", "reentrant"])
def test_checkpoint_block_keeps_losses_and_weights_equal(
    results: list[dict[str, Any]], how: str, k: int, autocast: bool
) -> None:
    """Dropout drops the same; a block checkpointed by the model itself works as one that the plan names."""
    for result in results:
        kept, again = result[f"kept {k} {autocast}"], result[f"{how} {k} {autocast}"]
        assert again[0] == pytest.approx(kept[0], rel=1e-5)
        for name, weight in kept[1].items():
            torch.testing.assert_close(again[1][name], weight, rtol=1e-4, atol=1e-5)


def test_recomputed_unit_gathers_three_times_per_step(results: list[dict[str, Any]]) -> None:
    """The blocks end in dropout, whose backward makes the block run again before any unit is gathered for its own."""
    inside = {f"blocks.{i}.{name}": 3 for i in range(2) for name in ("up", "down")}
    assert results[0]["gathers"] == {**inside, "head": 2}
    assert results[0]["gathers together"] == {"blocks.0": 2, "blocks.1": 2, "head": 2}, "one unit around the block"


def test_recomputed_slices_are_unsharded_one_at_a_time(results: list[dict[str, Any]]) -> None:
    one_slice = 16 * 16 // 4
    for name, (gathers, whole) in results[0]["whole"].items():
        if name.startswith("kept"):
            assert (gathers, whole) == (2 * 2 * 4, 0), name
        else:  # the slice with which the backward begins stays whole while the block runs again, and need not again
            assert (gathers, whole) == (3 * 2 * 4 - 1, one_slice), name


def test_engine_with_overlapping_graphs_gives_plain_gradients(results: list[dict[str, Any]]) -> None:
    for ours, expected in zip(results[0]["two graphs"], two_graph_gradients(0, 1, False), strict=True):
        torch.testing.assert_close(ours, expected)


def test_checkpoint_block_saves_only_its_inputs() -> None:
    torch.manual_seed(0)
    for again in (False, True):
        model = Model()
        if again:
            for block in model.blocks:
                checkpoint_block(block)
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(inputs(0, 0)).sum()
        shapes = Counter(tuple(tensor.shape) for tensor in saved)
        assert bool(shapes[2, 5, 2 * WIDTH] + shapes[10, 2 * WIDTH]) != again
        loss.backward()
        assert model.blocks[0].runs == 1 + again

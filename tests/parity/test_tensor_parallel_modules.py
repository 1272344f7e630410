"""Attentions and tables of torch that are cut over ranks train as plain PyTorch does, however they are called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.tensor_parallel.operator_run import SlicedRun
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorSplit
from lightning_osdp.state.guarded_parameter import local_data
from tests.support.models import hand_made_plan
from tests.support.ranks import run_ranks

RANKS, STEPS, WIDTH, LENGTH, ROWS = 2, 4, 16, 5, 12

Sample = dict[str, Tensor]


class Attending(nn.Module):
    """An attention, in the order of dimensions that it wants, with all that calls of it may need."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        options = {"batch_first": True} | options
        self.attention = nn.MultiheadAttention(WIDTH, 4, **options)
        self.keys, self.values = (nn.Linear(8, options.get(name, WIDTH)) for name in ("kdim", "vdim"))
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH * LENGTH).view(LENGTH, LENGTH))

    def order(self, x: Tensor) -> Tensor:
        return x if self.attention.batch_first else x.transpose(0, 1)

    def attend(self, sample: Sample, **options: Any) -> Tensor:
        """Self-attention with a loss of the output, and of the weights if there are any."""
        x = self.order(self.embed(sample["x"]))
        y, weights = self.attention(x, x, x, **options)
        loss = (self.head(self.order(y)) - sample["y"]).square().mean()
        return loss if weights is None else loss + (weights * torch.arange(weights.shape[-1])).square().mean()

    def attend_to(self, sample: Sample, query: Tensor, *others: Tensor, **options: Any) -> Tensor:
        y, _ = self.attention(self.order(query), *map(self.order, others), **options)
        return (self.head(self.order(y)) - sample["y"]).square().mean()


class Encoding(nn.Module):
    """Layers of torch around attentions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True} | options
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 24, **options)

    def attend(self, sample: Sample, padded: bool = True) -> Tensor:
        x, padding = self.embed(sample["x"]), sample["padding"] if padded else None
        memory = self.encoder(x, src_key_padding_mask=padding)
        y = self.decoder(x, memory, causal(x), memory_key_padding_mask=padding, tgt_is_causal=True)
        return (self.head(y) - sample["y"]).square().mean()


class Looking(nn.Module):
    """A table, and weights of what is looked up."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.scale = table, nn.Parameter(torch.linspace(0.5, 1.5, ROWS))
        self.head = nn.Linear(table.embedding_dim, 3)

    def look_up(self, sample: Sample, *args: Any, **options: Any) -> Tensor:
        """Loss of one row, or the mean of several, for each sample."""
        rows = self.table(*args, **options)
        rows = rows if rows.dim() == 2 else rows.mean(1)
        return (self.head(rows) - sample["y"][:, 0]).square().mean()

    def look_up_bags(self, sample: Sample, *, weighted: bool = False) -> Tensor:
        """Bags that begin at offsets, of which some are empty."""
        offsets = sample["offsets"] if self.table.include_last_offset else sample["offsets"][:-1]
        weights = self.scale[sample["items"]] if weighted else None
        return self.look_up(sample, sample["items"], offsets, per_sample_weights=weights)


def causal(x: Tensor) -> Tensor:
    """The mask of the upper triangle, for samples (n, length, ...)."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def as_numbers(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


def own_mask(sample: Sample) -> Tensor:
    """A mask of queries and keys that is another one on each rank."""
    scores = sample["x"][0, :, 0]
    return (scores[:, None] > scores) & ~torch.eye(len(scores), dtype=torch.bool)


def own_mask_of_heads(sample: Sample) -> Tensor:
    return own_mask(sample).expand(4 * len(sample["x"]), -1, -1)


def attend_without_samples(net: Any, sample: Sample) -> Tensor:
    x = net.embed(sample["x"][0])
    return (net.head(net.attention(x, x, x)[0]) - sample["y"][0]).square().mean()


def attend_to_others(net: Any, sample: Sample) -> Tensor:
    memory = net.keys(sample["other"])
    return net.attend_to(sample, net.embed(sample["x"]), memory, memory, need_weights=False)


def attend_to_two(net: Any, sample: Sample) -> Tensor:
    keys, values = net.keys(sample["other"]), net.values(sample["other"])
    return net.attend_to(sample, net.embed(sample["x"]), keys, values)


@dataclass(frozen=True)
class Case:
    """How an attention is made and called, and whether ranks differ."""

    loss: Callable[[Any, Sample], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., nn.Module] = Attending
    ragged: bool = False
    role: TensorRole = TensorRole.ATTENTION
    frozen: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    accumulation: int = 1
    rest: Mode = Mode.ZDP
    is_sliced: bool = True
    """Whether it runs with slices in each step."""


ATTENTION_CASES = {
    "plain": Case(lambda net, s: net.attend(s, need_weights=False)),
    "sequence first": Case(lambda net, s: net.attend(s, need_weights=False), {"batch_first": False}),
    "without bias": Case(lambda net, s: net.attend(s, need_weights=False), {"bias": False}),
    "weights": Case(lambda net, s: net.attend(s)),
    "weights, sequence first": Case(lambda net, s: net.attend(s), {"batch_first": False}, rest=Mode.ZDP2),
    "weights that nothing uses": Case(lambda net, s: net.attend_to(s, *[net.embed(s["x"])] * 3)),
    "padding": Case(lambda net, s: net.attend(s, key_padding_mask=s["padding"], need_weights=False)),
    "padding and weights": Case(lambda net, s: net.attend(s, key_padding_mask=s["padding"])),
    "causal": Case(lambda net, s: net.attend(s, attn_mask=causal(s["x"]), is_causal=True, need_weights=False)),
    "causal with weights": Case(lambda net, s: net.attend(s, attn_mask=causal(s["x"]), is_causal=True)),
    "causal and padding": Case(
        lambda net, s: net.attend(
            s, attn_mask=causal(s["x"]), is_causal=True, key_padding_mask=s["padding"], need_weights=False
        )
    ),
    "learned mask": Case(lambda net, s: net.attend(s, attn_mask=net.bias, need_weights=False)),
    "learned mask and padding": Case(
        lambda net, s: net.attend(s, attn_mask=net.bias, key_padding_mask=as_numbers(s["padding"])),
        {"batch_first": False},
    ),
    "mask of each rank": Case(lambda net, s: net.attend(s, attn_mask=own_mask(s), need_weights=False)),
    "mask of each rank, numbers": Case(lambda net, s: net.attend(s, attn_mask=as_numbers(own_mask(s)))),
    "other keys": Case(attend_to_others),
    "other keys, other widths": Case(attend_to_two, {"kdim": 12, "vdim": 20}),
    "other keys, sequence first": Case(attend_to_two, {"batch_first": False}, rest=Mode.DP),
    "frozen input": Case(lambda net, s: net.attend(s), frozen=("attention.in_proj_weight", "embed")),
    "frozen output": Case(lambda net, s: net.attend(s), frozen=("attention.out_proj",)),
    "recomputed": Case(lambda net, s: net.attend(s, key_padding_mask=s["padding"]), recomputed=("attention",)),
    "accumulated": Case(lambda net, s: net.attend(s, key_padding_mask=s["padding"]), accumulation=2),
    "layers": Case(lambda net, s: net.attend(s), make=Encoding),
    "layers, norm first": Case(lambda net, s: net.attend(s), {"norm_first": True, "bias": False}, make=Encoding),
    "layers, lengths that differ": Case(
        lambda net, s: net.attend(s), {"norm_first": True}, make=Encoding, ragged=True, is_sliced=False
    ),
    "lengths that differ": Case(lambda net, s: net.attend(s), ragged=True, is_sliced=False),
    "a mask on one rank": Case(
        lambda net, s: net.attend(s, key_padding_mask=s["padding"] if s["padding"].any() else None), is_sliced=False
    ),
    "weights of each head": Case(lambda net, s: net.attend(s, average_attn_weights=False), is_sliced=False),
    "mask of each head": Case(lambda net, s: net.attend(s, attn_mask=own_mask_of_heads(s)), is_sliced=False),
    "one sequence": Case(attend_without_samples, is_sliced=False),
}


def bag(**options: Any) -> dict[str, Any]:
    return {"table": lambda: nn.EmbeddingBag(ROWS, 8, **options)}


def embedding(width: int = 8, **options: Any) -> dict[str, Any]:
    return {"table": lambda: nn.Embedding(ROWS, width, **options)}


def make_looking(table: Callable[[], nn.Module]) -> nn.Module:
    return Looking(table())


def of_table(loss: Callable[[Any, Sample], Tensor], options: dict[str, Any], **fields: Any) -> Case:
    return Case(loss, options, make_looking, **({"role": TensorRole.EMBEDDING} | fields))


TABLE_CASES = {
    "bags, sum, weighted": of_table(lambda net, s: net.look_up_bags(s, weighted=True), bag(mode="sum")),
    "bags, sum, weighted, padding": of_table(
        lambda net, s: net.look_up_bags(s, weighted=True), bag(mode="sum", padding_idx=2, include_last_offset=True)
    ),
    "bags, mean, padding": of_table(lambda net, s: net.look_up_bags(s), bag(padding_idx=-2)),
    "bags, mean, last offset": of_table(lambda net, s: net.look_up_bags(s), bag(include_last_offset=True)),
    "bags, max, padding": of_table(lambda net, s: net.look_up_bags(s), bag(mode="max", padding_idx=3)),
    "bags, max, last offset": of_table(lambda net, s: net.look_up_bags(s), bag(mode="max", include_last_offset=True)),
    "bags of equal size": of_table(lambda net, s: net.look_up(s, s["ids"]), bag()),
    "bags of equal size, weighted": of_table(
        lambda net, s: net.look_up(s, s["ids"], per_sample_weights=net.scale[s["ids"]]), bag(mode="sum")
    ),
    "bags of small numbers": of_table(lambda net, s: net.look_up(s, s["ids"].int()), bag(mode="max")),
    "bags, frozen": of_table(lambda net, s: net.look_up_bags(s, weighted=True), bag(mode="sum"), frozen=("table",)),
    "embedding, padding": of_table(lambda net, s: net.look_up(s, s["ids"]), embedding(padding_idx=-1)),
    "embedding, one each": of_table(lambda net, s: net.look_up(s, s["ids"][:, 0].int()), embedding(padding_idx=2)),
    "embedding, accumulated": of_table(
        lambda net, s: net.look_up(s, s["ids"]), embedding(), accumulation=2, recomputed=("table",)
    ),
    "rows": of_table(lambda net, s: net.look_up(s, s["ids"]), embedding(1), role=TensorRole.TABLE_ROWS),
    "rows, padding": of_table(
        lambda net, s: net.look_up(s, s["ids"]), embedding(3, padding_idx=-2), role=TensorRole.TABLE_ROWS
    ),
    "rows, padding, accumulated": of_table(
        lambda net, s: net.look_up(s, s["ids"].int()),
        embedding(1, padding_idx=1),
        role=TensorRole.TABLE_ROWS,
        accumulation=2,
        recomputed=("table",),
    ),
    "rows, frozen": of_table(
        lambda net, s: net.look_up(s, s["ids"]), embedding(1), role=TensorRole.TABLE_ROWS, frozen=("table",)
    ),
}
CASES = ATTENTION_CASES | TABLE_CASES


def sample_of(case: Case, step: int, rank: int) -> Sample:
    """The first rank has no padding in every second step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = LENGTH - (step + rank) % 3 if case.ragged else LENGTH
    shapes = {"x": (4, length, 8), "y": (4, length, 3), "other": (4, 7, 8)}
    sample = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sample["padding"] = torch.zeros(4, length, dtype=torch.bool)
    if rank or step % 2:
        sample["padding"][1:, -1 - rank :] = True
    sample["ids"] = torch.randint(0, ROWS, (4, 3), generator=generator)
    counts = torch.tensor([2, 0, 1 + rank, 3 + step % 2])  # of items in bags
    sample["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    sample["items"] = torch.randint(0, ROWS, (int(counts.sum()),), generator=generator)
    return sample


def split(sample: Sample, num_parts: int) -> list[Sample]:
    return [
        dict(zip(sample, parts, strict=True))
        for parts in zip(*(x.chunk(num_parts) for x in sample.values()), strict=False)
    ]


def make_net(case: Case, seed: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = case.make(**case.options)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen) if case.frozen else True)
    return net, torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-4)


def train_plain(case: Case) -> dict[str, Any]:
    net, optimizer = make_net(case)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [part for rank in range(RANKS) for part in split(sample_of(case, step, rank), case.accumulation)]
        loss = torch.stack([case.loss(net, part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        evaluated = case.loss(net.eval(), sample_of(CASES["plain"], STEPS, 1))
    return {"losses": losses, "weights": net.state_dict(), "evaluated": float(evaluated)}


def plan_of(net: nn.Module, case: Case) -> Any:
    """Cut the attentions; linear layers that they don't hold have the mode ``rest``."""
    split = TensorSplit(degree=RANKS, role=case.role)
    operators = []
    for name, module in net.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.Embedding | nn.EmbeddingBag):
            operators.append(OperatorPlan(name=name, slices=(Mode.TP,), num_parameters=0, tensor=split))
        elif isinstance(module, nn.Linear) and not name.endswith("out_proj"):
            operators.append(OperatorPlan(name=name, slices=(case.rest,), num_parameters=0))
    changes = {"operators": tuple(operators), "recomputed": case.recomputed}
    return hand_made_plan({}, RANKS).model_copy(update=changes)


def count_sliced_runs(engine: FairScaleEngine) -> list[bool]:
    """Grows with each run: whether it was with slices."""
    noted: list[bool] = []

    def noting(start: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            run, numbers = start(*args, **options)
            noted.append(isinstance(run, SlicedRun))
            return run, numbers

        return note

    for unit in engine._tensor_units:
        vars(unit)["start"] = noting(unit.start)
    return noted


CUT = ("_proj_weight", "out_proj.weight", "table.weight")


def train_cut(rank: int, case: Case) -> dict[str, Any]:
    net, optimizer = make_net(case, seed=1 + rank)
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(net, plan_of(net, case), [optimizer])
    local = {name: local_data(p).numel() for name, p in net.named_parameters() if name.endswith(CUT)}
    noted, losses = count_sliced_runs(engine), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total, parts = 0.0, split(sample_of(case, step, rank), case.accumulation)
        for index, part in enumerate(parts):
            engine.before_forward()
            with nullcontext() if index == len(parts) - 1 else engine.no_sync():
                loss = case.loss(net, part) / len(parts)
                loss.backward()
                engine.finish_backward()
            total += float(loss.detach())
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        losses.append(total)
    num_sliced = sum(noted), len(noted)
    with torch.no_grad():
        evaluated = case.loss(net.eval(), sample_of(CASES["plain"], STEPS, 1))
    result = {"losses": losses, "weights": engine.model_state(), "evaluated": float(evaluated)}
    engine.restore([optimizer])
    assert not any("forward" in vars(module) for module in net.modules())
    return result | {"sliced": num_sliced, "local": local}


def train_all(rank: int, ranks: int) -> dict[str, Any]:
    return {name: train_cut(rank, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(train_all, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_cut_module_has_the_losses_and_weights_of_plain_training(runs: list[dict[str, Any]], name: str) -> None:
    expected = train_plain(CASES[name])
    losses = torch.tensor([run[name]["losses"] for run in runs]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected["losses"]), rtol=1e-5, atol=0)
    for run in runs:
        assert run[name]["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    weights = runs[0][name]["weights"]
    assert list(weights) == list(expected["weights"])
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_module_is_cut_and_runs_with_slices_where_ranks_call_it_in_a_way_that_allows_it(
    runs: list[dict[str, Any]], name: str
) -> None:
    for run in runs:
        num_sliced, count = run[name]["sliced"]
        assert (num_sliced == count) == CASES[name].is_sliced
        whole = {name: p.numel() for name, p in make_net(CASES[name])[0].named_parameters() if name.endswith(CUT)}
        assert {key: RANKS * size for key, size in run[name]["local"].items()} == whole
        assert whole

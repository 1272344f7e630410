"""Models that are tensor parallel in all that was found in them train as plain PyTorch does on all ranks' batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.tensor import TensorRole
from tests.support import families, zoo
from tests.support.parity import MAX_NORM, STEPS
from tests.support.ranks import run_ranks
from tests.support.tensor_plans import OTHER_SLICES, plan_of_candidates

ROWS = 2

Batch = dict[str, Tensor]


class DLRM(nn.Module):
    """Tables, an MLP of numbers, scalar products of pairs, and an MLP of these."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(40, 16), nn.EmbeddingBag(30, 16, mode="sum"), nn.Embedding(7, 16)])
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, ids: Tensor, bags: Tensor, clicks: Tensor) -> Tensor:
        one, many, few = self.tables
        bottom = self.bottom(numbers)
        vectors = torch.stack([bottom, one(ids[:, 0]), many(bags), few(ids[:, 1] % 7)], dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        logits = self.top(torch.cat([bottom, products], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


def clicks(rows: int, generator: torch.Generator) -> Batch:
    return {
        "numbers": torch.randn(rows, 8, generator=generator),
        "ids": torch.randint(0, 40, (rows, 2), generator=generator),
        "bags": torch.randint(0, 30, (rows, 3), generator=generator),
        "clicks": torch.randint(0, 2, (rows,), generator=generator).float(),
    }


def padded(batch: Batch, step: int, rank: int) -> Batch:
    """Padding at the end, of another length on each rank; none on the first rank."""
    mask = torch.ones_like(batch["input_ids"])
    mask[1:, mask.shape[1] - 2 * rank - step % 2 * min(rank, 1) :] = 0
    return batch | {"attention_mask": mask}


def shortened(batch: Batch, step: int, rank: int) -> Batch:
    """Sequences of another length on each rank."""
    return {name: value[:, : 12 - (step + rank) % 4] for name, value in batch.items()}


def ragged(batch: Batch, step: int, rank: int) -> Batch:
    """Sequences of another length on each rank, and in the last steps other numbers of them."""
    rows = ROWS if step < STEPS - 4 else 1 + (step + rank) % ROWS
    return {name: value[:rows] for name, value in shortened(batch, step // 3, rank).items()}


@dataclass(frozen=True)
class Case:
    """A model, the mode of what is not tensor parallel, and how batches differ between ranks."""

    make: Callable[[], zoo.ZooModule]
    rest: str = "dp"
    change: Callable[[Batch, int, int], Batch] = lambda batch, step, rank: batch
    recomputed: tuple[str, ...] = ()
    units: int = 2
    """Least number of pairs and scopes."""
    max_degree: int = 0
    """Ranks over which operators are cut at most; all if 0."""
    dtype: torch.dtype = torch.float32


CASES = {
    "TinyGPT": Case(zoo.tiny_gpt, "mixed"),
    "TinyGPT, other lengths": Case(zoo.tiny_gpt, "zdp", shortened),
    "TinyGPT, recomputed": Case(zoo.tiny_gpt, "zdp", recomputed=("net.gpt.blocks.0", "net.gpt.blocks.1")),
    "TinyGPT, everything": Case(
        lambda: zoo.tiny_gpt(layers=3), "everything", ragged, ("net.gpt.blocks.1",), max_degree=2
    ),
    "TinyGPT, bfloat16": Case(zoo.tiny_gpt, "mixed", dtype=torch.bfloat16),
    "GPT-2": Case(zoo.gpt2, "zdp", units=4),
    "GPT-2, degree 2": Case(zoo.gpt2, "mixed", units=4, max_degree=2),
    "LLaMA": Case(lambda: zoo.llama(num_attention_heads=4, num_key_value_heads=2), "zdp2", units=4),
    "LLaMA, other lengths": Case(zoo.llama, "dp", shortened, units=4),
    "BERT, padded": Case(zoo.bert, "mixed", padded, units=4),
    "ViT": Case(zoo.vit, "dp", units=4),
    "T5": Case(zoo.t5, "zdp", units=4),
    "OPT": Case(lambda: families.build("opt", dropout=0.0), "dp", units=4),
    "DLRM": Case(lambda: zoo.ZooModule(DLRM(), clicks), "zdp"),
    "DLRM, degree 2": Case(lambda: zoo.ZooModule(DLRM(), clicks), "dp", max_degree=2),
    "nn.TransformerEncoder": Case(zoo.encoder, "zdp2"),
}


def make_model(case: Case) -> tuple[zoo.ZooModule, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = case.make().to(case.dtype)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 2e-3},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return module, torch.optim.AdamW(groups, eps=1e-4)  # a gradient of a few roundings makes no full step


def batch_of(case: Case, module: zoo.ZooModule, step: int, rank: int) -> Batch:
    return case.change(module.batch(ROWS, seed=100 * step + rank), step, rank)


def train_plain(case: Case, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process that averages the losses of all ranks' batches."""
    module, optimizer = make_model(case)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([module.training_step(batch_of(case, module, step, r), 0) for r in range(ranks)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module.state_dict()


def train_cut(rank: int, case: Case, plan: ExecutionPlan) -> tuple[list[float], dict[str, Tensor]]:
    module, optimizer = make_model(case)
    engine = FairScaleEngine(torch.device("cpu"))
    engine.apply(module, plan, [optimizer])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        engine.before_forward()
        loss = module.training_step(batch_of(case, module, step, rank), 0)
        loss.backward()
        engine.finish_backward()
        engine.clip_grad_norm(module.parameters(), MAX_NORM)
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        losses.append(float(loss.detach()))
    return losses, engine.model_state()


def train_all(rank: int, ranks: int, plans: dict[str, ExecutionPlan]) -> dict[str, Any]:
    """Every model in the same processes, since starting them takes longer than training."""
    return {name: train_cut(rank, CASES[name], plan) for name, plan in plans.items()}


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def runs(request: pytest.FixtureRequest) -> tuple[int, dict[str, ExecutionPlan], list[dict[str, Any]]]:
    """Number of ranks, plans by model, and by rank what was trained."""
    plans = {}
    for name, case in CASES.items():
        module, _ = make_model(case)
        batch = batch_of(case, module, 0, request.param - 1)
        plans[name] = plan_of_candidates(module, batch, request.param, case.rest, case.recomputed, case.max_degree)
    return request.param, plans, run_ranks(train_all, request.param, plans)


@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_model_has_the_losses_and_weights_of_plain_training(
    runs: tuple[int, dict[str, ExecutionPlan], list[dict[str, Any]]], name: str
) -> None:
    ranks, plans, results = runs
    losses, weights = train_plain(CASES[name], ranks)
    cut = [operator for operator in plans[name].operators if operator.slices == (Mode.TP,)]
    assert len(plans[name].tensor_scopes) >= CASES[name].units
    assert {op.tensor.degree for op in cut if op.tensor is not None} >= {min(ranks, CASES[name].max_degree or ranks)}
    if CASES[name].rest == "everything":
        assert {op.slices for op in plans[name].operators} == {(Mode.TP,), *OTHER_SLICES}
    if name == "DLRM":
        roles = {operator.tensor.role for operator in cut if operator.tensor is not None}
        assert {TensorRole.EMBEDDING, TensorRole.COLUMN, TensorRole.ROW} <= roles
    averages = torch.tensor([each[name][0] for each in results]).mean(0)
    tolerance = 1e-5 if CASES[name].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(averages, torch.tensor(losses), rtol=tolerance, atol=0)
    for found in (each[name][1] for each in results[:1]):
        assert found.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(
                found[key], weight, rtol=tolerance, atol=tolerance / 10, msg=lambda text, key=key: f"{key}: {text}"
            )

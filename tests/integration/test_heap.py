"""Freed tensors that stay in the heap from step to step: the same training with fewer new pages, within the limit."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_osdp import OSDPStrategy
from lightning_osdp.collectives import largest_of_ranks
from lightning_osdp.keeping import MARGIN
from lightning_osdp.measurements import Measurements, read
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.profiling.heap import HEAP
from lightning_osdp.profiling.memory import peak_memory, reset_peak
from tests.integration.modules import trainer
from tests.ranks import run_ranks

CPU, MIB, RANKS = torch.device("cpu"), 1 << 20, 2
WIDTH, LAYERS, BATCH, STEPS = 128, 24, 2048, 16
ACTIVATIONS = LAYERS * BATCH * WIDTH * 4
"""Bytes that forward keeps, in tensors of 1 MiB."""

SHORT_BYTES = 16 * MIB
"""Of the limit, beside what steps take that hand everything back."""


class Tall(pl.LightningModule):
    """Small matrices, many activations; notes losses, and for each step its faults, its peak and what the heap does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS // 2)))
        self.losses: list[float] = []
        self.steps: list[tuple[int, int, bool]] = []
        self.beside: list[bool] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = (self.layers(batch[0]) - batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.beside.append(HEAP.keeps)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.beside.append(HEAP.keeps)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        reset_peak(CPU)
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        self.steps.append((faults, peak_memory(CPU), HEAP.keeps))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows(count: int) -> DataLoader[Any]:
    data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=BATCH)


def fit(folder: str, plan: ExecutionPlan | None, limit: int | str = "auto", **options: Any) -> tuple[Any, Tall]:
    module = Tall()
    strategy = OSDPStrategy(memory_limit=limit, batch_size=BATCH, rehearse=False, cache="", plan=plan)
    made = trainer(folder, strategy, max_steps=STEPS, **options)
    made.fit(module, rows(BATCH * RANKS * STEPS), rows(BATCH * RANKS))
    return strategy.execution_plan, module


def trained(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Handed back, then kept: with much room, and with little."""
    made, _ = fit(folder, None)  # leaves something behind
    _, usual = fit(folder, made)
    (peak,) = largest_of_ranks([max(peak for _, peak, _ in usual.steps)], dist.group.WORLD, CPU)
    limit = int((peak + SHORT_BYTES) / (1 - MARGIN))
    kept_plan = made.model_copy(update={"keep_heap": True})
    _, short = fit(folder, kept_plan.model_copy(update={"memory_limit_bytes": limit}))
    saving = {"enable_checkpointing": True, "limit_val_batches": 1.0, "val_check_interval": STEPS // 2}
    _, kept = fit(folder, kept_plan, **saving)
    after = HEAP.keeps
    found = {"usual": usual, "kept": kept, "short": short}
    return {name: (one.losses, one.steps, one.beside) for name, one in found.items()} | {"after": after, "limit": limit}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(trained, RANKS, str(tmp_path_factory.mktemp("heap")))


def test_training_is_the_same(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert found["usual"][0] == found["kept"][0] == found["short"][0]


def test_pages_that_stay_need_not_be_made_anew(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        usual, kept, short = (min(each[0] for each in found[name][1]) for name in ("usual", "kept", "short"))
        assert usual > ACTIVATIONS // 4096
        assert kept < 0.5 * usual  # not none: where small blocks lie in between, a tensor finds no stretch of the heap
        assert short < usual - SHORT_BYTES // 2 // 4096
        assert [keeps for _, _, keeps in found["usual"][1]] == [False] * STEPS
        assert [keeps for _, _, keeps in found["kept"][1]][2:] == [True] * (STEPS - 2)


def test_the_limit_holds(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert max(peak for _, peak, _ in found["short"][1]) <= found["limit"]


def test_beside_steps_nothing_stays(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert len(found["kept"][2]) >= 3  # two evaluations and a checkpoint
        assert not any(found["kept"][2])
        assert not found["after"]


def measured(rank: int, ranks: int, folder: str) -> Measurements | None:
    strategy = OSDPStrategy(batch_size=BATCH, cache=f"{folder}/cache")
    trainer(folder, strategy).fit(Tall(), rows(BATCH * RANKS * 4))
    files = [file for file in Path(folder, "cache").glob("*.json") if "-" not in file.stem]
    return read(files[0], Measurements) if rank == 0 else None


def test_a_start_measures_what_it_brings(tmp_path: Path) -> None:
    found = run_ranks(measured, RANKS, str(tmp_path))[0]
    assert found.kept_compute is not None
    usual, kept = (sum(one.at(BATCH) for one in times.operators) for times in (found.compute, found.kept_compute))
    assert 0 < kept <= usual

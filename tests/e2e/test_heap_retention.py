"""Freed tensors that stay in the heap from step to step: the same training with fewer new pages, within the limit."""

from __future__ import annotations

import gc
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
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.profile_cache import read
from lightning_osdp.backend.agree import all_reduce_max
from lightning_osdp.backend.cpu.malloc import HEAP
from lightning_osdp.backend.memory import peak_memory, reset_peak
from lightning_osdp.planning.cost.cpu_effects import HEAP_LIMIT_MARGIN
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

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
        self.beside.append(HEAP.retains)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.beside.append(HEAP.retains)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        reset_peak(CPU)
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        self.steps.append((faults, peak_memory(CPU), HEAP.retains))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def random_loader(count: int) -> DataLoader[Any]:
    data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=BATCH)


def fit(folder: str, plan: ExecutionPlan | None, limit: int | str = "auto", **options: Any) -> tuple[Any, Tall]:
    module = Tall()
    strategy = OSDPStrategy(memory_limit=limit, batch_size=BATCH, trial_steps=False, cache="", plan=plan)
    made = trainer(folder, strategy, max_steps=STEPS, **options)
    made.fit(module, random_loader(BATCH * RANKS * STEPS), random_loader(BATCH * RANKS))
    module.trainer = None  # or it holds the loader's rows, which later runs would be measured with
    gc.collect()
    return strategy.execution_plan, module


def train_with_released_and_retained_heap(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Handed back, then kept: with much room, and with little."""
    kept_plan, _ = fit(folder, None)  # leaves something behind
    assert kept_plan.retain_freed_memory  # no step was tried, but there is memory for it
    _, usual = fit(folder, kept_plan.model_copy(update={"retain_freed_memory": False}))
    (peak,) = all_reduce_max([max(peak for _, peak, _ in usual.steps)], dist.group.WORLD, CPU)
    limit = int((peak + SHORT_BYTES) / (1 - HEAP_LIMIT_MARGIN))
    _, short = fit(folder, kept_plan.model_copy(update={"memory_limit_bytes": limit}))
    saving = {"enable_checkpointing": True, "limit_val_batches": 1.0, "val_check_interval": STEPS // 2}
    _, kept = fit(folder, kept_plan, **saving)
    after = HEAP.retains
    found = {"usual": usual, "kept": kept, "short": short}
    return {name: (one.losses, one.steps, one.beside) for name, one in found.items()} | {"after": after, "limit": limit}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_with_released_and_retained_heap, RANKS, str(tmp_path_factory.mktemp("heap")))


def test_retained_heap_keeps_losses_equal(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert found["usual"][0] == found["kept"][0] == found["short"][0]


def test_retained_heap_reduces_page_faults(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        usual, kept, short = (min(each[0] for each in found[name][1]) for name in ("usual", "kept", "short"))
        assert usual > ACTIVATIONS // 4096
        # Not none: where small blocks lie in between, a tensor finds no stretch of the heap, which has a bound.
        assert kept < 0.5 * usual
        # In a small heap, buffers of gloo lie in between, so that few tensors find a stretch in some runs.
        assert short < usual - SHORT_BYTES // 8 // 4096
        assert [keeps for _, _, keeps in found["usual"][1]] == [False] * STEPS
        assert [keeps for _, _, keeps in found["kept"][1]][2:] == [True] * (STEPS - 2)


def test_retained_heap_with_tight_limit_keeps_peak_within_limit(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert max(peak for _, peak, _ in found["short"][1]) <= found["limit"]


def test_heap_is_released_outside_training_steps(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert len(found["kept"][2]) >= 3  # two evaluations and a checkpoint
        assert not any(found["kept"][2])
        assert not found["after"]


def fit_and_read_profile(rank: int, ranks: int, folder: str) -> Profile | None:
    strategy = OSDPStrategy(batch_size=BATCH, cache=f"{folder}/cache")
    trainer(folder, strategy).fit(Tall(), random_loader(BATCH * RANKS * 4))
    files = [file for file in Path(folder, "cache").glob("*.json") if "-" not in file.stem]
    return read(files[0], Profile) if rank == 0 else None


def test_profile_contains_compute_with_retained_heap(tmp_path: Path) -> None:
    found = run_ranks(fit_and_read_profile, RANKS, str(tmp_path))[0]
    assert found.compute_with_retained_heap is not None
    usual, kept = (
        sum(one.seconds_at(BATCH) for one in times.operators)
        for times in (found.compute, found.compute_with_retained_heap)
    )
    assert 0 < kept <= usual

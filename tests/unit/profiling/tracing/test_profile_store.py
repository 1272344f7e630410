"""Steps that were read before: found again by what the smaller batch size shows, and not where that has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_osdp.autotune.profile_cache import ModelProfileCache
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.profiling.tracing.profile_store import trace_with_store
from lightning_osdp.profiling.tracing.trace import TracedStep, TrainingStep
from tests.support.traced_models import Regression, TinyGPT, tokens, trace

CPU = torch.device("cpu")
BATCH = torch.ones(4, 8)


class InMemoryProfileStore(dict[str, ModelProfile]):
    """Profiles in memory."""

    def load(self, key: str) -> ModelProfile | None:
        return self.get(key)

    def save(self, key: str, model_profile: ModelProfile) -> None:
        self[key] = model_profile


def trace_stored(
    module: LightningModule, known: InMemoryProfileStore, batch: Any = BATCH, key: str = "", **more: Any
) -> TracedStep:
    return trace_with_store(TrainingStep(module, batch, 4, CPU, **more), known, key)


@pytest.mark.parametrize("evaluation", [False, True])
def test_trace_known_step_reuses_profile_and_retraces_on_demand(evaluation: bool) -> None:
    known = InMemoryProfileStore()
    first = trace_stored(TinyGPT(), known, tokens(), evaluation=evaluation)
    assert first == trace(TinyGPT(), tokens(), 4, device=CPU, evaluation=evaluation)
    assert first.with_all_kernels() is first
    again = trace_stored(TinyGPT(), known, tokens(), evaluation=evaluation)
    assert again.model_profile is first.model_profile
    assert again.batch_sizes == (2, 8)
    assert set(again.kernels) == {2}
    assert {kernel.key for kernel in again.kernels[2]} == {kernel.key for kernel in first.kernels[2]}
    assert again.with_all_kernels() == first
    assert len(known) == 1


def test_trace_known_key_skips_tracing_unless_parameters_differ() -> None:
    known = InMemoryProfileStore()
    module = Regression(mlp(nn.ReLU()))
    first = trace_stored(module, known)
    (key,) = known
    told = trace_stored(module, known, key=key)
    assert (told.model_profile, told.batch_sizes, told.key) == (first.model_profile, first.batch_sizes, key)
    assert not told.kernels
    assert told.with_all_kernels() == first
    for other in (Regression(mlp(nn.ReLU(), width=9)), Regression(frozen()), Regression(mlp(nn.ReLU())).double()):
        batch = BATCH.to(next(other.parameters()).dtype)
        assert (
            trace_stored(other, known, batch, key=key).model_profile == trace(other, batch, 4, device=CPU).model_profile
        )
    assert trace_stored(module, known, key="not kept").kernels


def mlp(*inner: nn.Module, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), *inner, nn.Linear(width, 8))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def frozen() -> nn.Module:
    net = mlp(nn.ReLU())
    net[2].weight.requires_grad_(False)  # type: ignore[union-attr, operator, index]
    return net


CHANGES: dict[str, Callable[[], LightningModule]] = {
    "another activation": lambda: Regression(mlp(nn.Tanh())),
    "one more activation": lambda: Regression(mlp(nn.ReLU(), nn.ReLU())),
    "another width": lambda: Regression(mlp(nn.ReLU(), width=9)),
    "another dtype": lambda: Regression(mlp(nn.ReLU())).double(),
    "another optimizer": lambda: Regression(mlp(nn.ReLU()), sgd),
    "a frozen weight": lambda: Regression(frozen()),
    "no bias": lambda: Regression(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8))),
    "a buffer": lambda: Regression(mlp(nn.ReLU(), nn.BatchNorm1d(8, affine=False))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_trace_changed_step_is_traced_anew(change: str) -> None:
    known = InMemoryProfileStore()
    trace_stored(Regression(mlp(nn.ReLU())), known)
    module = CHANGES[change]()
    batch = BATCH.double() if change == "another dtype" else BATCH
    found = trace_stored(module, known, batch)
    assert set(found.kernels) == {2, 8}
    assert found.model_profile == trace(module, batch, 4, device=CPU).model_profile
    assert len(known) == 2


def test_trace_other_batch_sizes_or_evaluation_are_traced_anew() -> None:
    known = InMemoryProfileStore()
    module = Regression(mlp(nn.ReLU()))
    trace_stored(module, known)
    trace_stored(module, known, evaluation=True)
    trace_stored(module, known, sizes=(2, 16))
    trace_stored(module, known, torch.ones(4, 3, 8))
    assert len(known) == 4


def test_model_profile_cache_saves_loads_and_warns_of_damaged_files(tmp_path: Path) -> None:
    description = trace(Regression(mlp(nn.ReLU())), BATCH, 4, device=CPU).model_profile
    kept = ModelProfileCache(tmp_path / "cache")
    assert not kept.contains("mine")
    assert kept.load("mine-a") is None
    kept.save("mine-a", description)
    assert kept.contains("mine")
    assert kept.load("mine-a") == description
    assert not kept.contains("other")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(file.read_text()[:-9])
    with pytest.warns(OSDPWarning, match="damaged"):
        assert kept.load("mine-a") is None

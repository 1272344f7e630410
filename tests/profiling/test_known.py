"""Steps that were read before: found again by what the smaller batch size shows, and not where that has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_osdp.errors import OSDPWarning
from lightning_osdp.measurements import StepsKept
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.profiling.trace import Trace, trace
from tests.profiling.models import Regression, TinyGPT, tokens

CPU = torch.device("cpu")
BATCH = torch.ones(4, 8)


class Kept(dict[str, ModelDescription]):
    """Descriptions in memory."""

    def find(self, name: str) -> ModelDescription | None:
        return self.get(name)

    def keep(self, name: str, description: ModelDescription) -> None:
        self[name] = description


def read(module: LightningModule, known: Kept, batch: Any = BATCH, **more: Any) -> Trace:
    return trace(module, batch, 4, device=CPU, known=known, **more)


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_known_step_is_described_as_it_was_and_read_whole_on_demand(evaluation: bool) -> None:
    known = Kept()
    first = read(TinyGPT(), known, tokens(), evaluation=evaluation)
    assert first == trace(TinyGPT(), tokens(), 4, device=CPU, evaluation=evaluation)
    assert first.whole() is first
    again = read(TinyGPT(), known, tokens(), evaluation=evaluation)
    assert again.description is first.description
    assert again.sizes == (2, 8)
    assert set(again.kernels) == {2}
    assert {kernel.key for kernel in again.kernels[2]} == {kernel.key for kernel in first.kernels[2]}
    assert again.whole() == first
    assert len(known) == 1


def test_a_step_known_by_its_name_is_not_read_unless_the_parameters_are_others() -> None:
    known = Kept()
    module = Regression(mlp(nn.ReLU()))
    first = read(module, known)
    (name,) = known
    told = read(module, known, name=name)
    assert (told.description, told.sizes, told.name) == (first.description, first.sizes, name)
    assert not told.kernels
    assert told.whole() == first
    for other in (Regression(mlp(nn.ReLU(), width=9)), Regression(frozen()), Regression(mlp(nn.ReLU())).double()):
        batch = BATCH.to(next(other.parameters()).dtype)
        assert read(other, known, batch, name=name).description == trace(other, batch, 4, device=CPU).description
    assert read(module, known, name="not kept").kernels


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
def test_a_step_that_has_changed_is_read_anew(change: str) -> None:
    known = Kept()
    read(Regression(mlp(nn.ReLU())), known)
    module = CHANGES[change]()
    batch = BATCH.double() if change == "another dtype" else BATCH
    found = read(module, known, batch)
    assert set(found.kernels) == {2, 8}
    assert found.description == trace(module, batch, 4, device=CPU).description
    assert len(known) == 2


def test_other_batches_and_what_evaluation_takes_are_read_anew() -> None:
    known = Kept()
    module = Regression(mlp(nn.ReLU()))
    read(module, known)
    read(module, known, evaluation=True)
    read(module, known, sizes=(2, 16))
    read(module, known, torch.ones(4, 3, 8))
    assert len(known) == 4


def test_descriptions_are_kept_in_files(tmp_path: Path) -> None:
    description = trace(Regression(mlp(nn.ReLU())), BATCH, 4, device=CPU).description
    kept = StepsKept(tmp_path / "cache")
    assert not kept.any("mine")
    assert kept.find("mine-a") is None
    kept.keep("mine-a", description)
    assert kept.any("mine")
    assert kept.find("mine-a") == description
    assert not kept.any("other")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(file.read_text()[:-9])
    with pytest.warns(OSDPWarning, match="damaged"):
        assert kept.find("mine-a") is None

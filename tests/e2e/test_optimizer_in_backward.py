"""Parameters updated in the backward pass: planned where memory is short, and only in runs that allow it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_osdp import ConfigurationError, InfeasibleError, OSDPCallback, OSDPStrategy
from lightning_osdp.backend.cpu.malloc import configure_cpu_allocator
from lightning_osdp.backend.memory import peak_memory, reset_peak
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy import arguments
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
MIB = 1 << 20
RANKS, BATCH, STEPS, WIDTH, LAYERS = 2, 4, 3, 1024, 12
PARTS_BYTES = LAYERS * WIDTH * WIDTH * 4 // RANKS
"""Of all gradients: 24 MiB."""

ABOVE_LEAST = PARTS_BYTES // 3
"""Above what the plan of least memory needs, and below what it would need with gradients."""


class Deep(pl.LightningModule):
    """Matrices of 4 MiB each, one after the other."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-4)  # type: ignore[call-arg]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(rows()[self.global_rank :: RANKS]), batch_size=BATCH)


class OwnSGD(torch.optim.SGD):
    """It may do anything."""


class Looks(pl.Callback):
    """At gradients."""

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


class Clips(Deep):
    """In its own way."""

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        pass


class ByHand(Deep):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def rows() -> Tensor:
    return torch.randn(BATCH * RANKS * STEPS, WIDTH, generator=torch.Generator().manual_seed(3))


def train_plain() -> list[float]:
    """Losses of one process on the same batches."""
    module = Deep()
    optimizer = module.configure_optimizers()
    losses = []
    for batch in rows().view(STEPS, BATCH * RANKS, WIDTH):
        loss = module.training_step([batch], 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def fit(
    folder: str,
    limit: int,
    plan: Any = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> tuple[Any, Deep]:
    configure_cpu_allocator()
    module = Deep(optimizer)  # made here: modules that are sent to other processes lie in shared memory
    strategy = OSDPStrategy(memory_limit=limit, batch_size=BATCH, trial_steps=False, cache=f"{folder}/cache", plan=plan)
    made = trainer(folder, strategy, max_steps=STEPS, use_distributed_sampler=False, **options)
    reset_peak(CPU)
    made.fit(module)
    return strategy, module


def needed_bytes(rank: int, ranks: int, folder: str) -> int:
    """Of the plan of least memory."""
    with pytest.raises(InfeasibleError) as failure:
        fit(folder, MIB)
    return failure.value.needed_bytes


def keeps_gradients(rank: int, ranks: int, folder: str, limit: int, options: dict[str, Any]) -> bool:
    """Whether a run keeps gradients, or ends for want of room for them."""
    try:
        strategy, _ = fit(folder, limit, **options)
    except InfeasibleError as error:
        return error.needed_bytes > limit
    return not strategy.execution_plan.update_in_backward


def fit_and_measure_peak(rank: int, ranks: int, folder: str, limit: int, plan: ExecutionPlan | None) -> dict[str, Any]:
    strategy, module = fit(folder, limit, plan=plan)
    return {"plan": strategy.execution_plan, "losses": module.losses, "peak": peak_memory(CPU)}


def catch_clipping_error(rank: int, ranks: int, folder: str, plan: ExecutionPlan) -> str:
    with pytest.raises(ConfigurationError) as refused:
        fit(folder, MIB, plan=plan, gradient_clip_val=1.0)
    return str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("updates"))


@pytest.fixture(scope="module")
def limit(folder: str) -> int:
    """There is no room for all gradients."""
    return int(run_ranks(needed_bytes, RANKS, folder)[0]) + ABOVE_LEAST


@pytest.fixture(scope="module")
def runs(folder: str, limit: int) -> list[dict[str, Any]]:
    return run_ranks(fit_and_measure_peak, RANKS, folder, limit, None)


def test_fit_at_tight_limit_updates_in_backward_and_matches_plain_losses(
    runs: list[dict[str, Any]], limit: int
) -> None:
    plan: ExecutionPlan = runs[0]["plan"]
    assert plan.update_in_backward
    assert plan.predicted.peak_memory_bytes <= limit
    assert all(found["peak"] <= limit for found in runs)
    losses = torch.tensor([found["losses"] for found in runs]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(train_plain()), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 1.0}, {"optimizer": OwnSGD}, {"callbacks": [Looks()]}],
    ids=["clipping", "optimizer", "hook"],
)
def test_fit_that_needs_all_gradients_does_not_update_in_backward(
    folder: str, limit: int, options: dict[str, Any]
) -> None:
    assert all(run_ranks(keeps_gradients, RANKS, folder, limit, options))


def test_given_in_backward_plan_is_used_and_rejected_with_clipping(runs: list[dict[str, Any]], folder: str) -> None:
    plan = runs[0]["plan"]
    again = run_ranks(fit_and_measure_peak, RANKS, folder, MIB, plan)
    assert [found["losses"] for found in again] == [found["losses"] for found in runs]
    for said in run_ranks(catch_clipping_error, RANKS, folder, plan):
        assert "this run does not allow: gradient_clip_val=1.0 takes the norm of all gradients" in said


def fake_trainer(module: pl.LightningModule, **changes: Any) -> Any:
    """What ``in_backward_blocker`` asks of a trainer."""
    return SimpleNamespace(**({"lightning_module": module, "gradient_clip_val": None, "callbacks": []} | changes))


def find_blocker(run: Any, precision: Precision | None = None, wanted: bool = True, separable: bool = True) -> str:
    return arguments.in_backward_blocker(run, precision or Precision(), is_allowed=wanted, per_parameter=separable)


@pytest.mark.parametrize(
    ("module", "changes", "expected"),
    [
        (ByHand(), {}, "automatic_optimization=False"),
        (Deep(), {"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
        (Clips(), {}, "Clips has its own configure_gradient_clipping"),
        (Deep(), {"callbacks": [Looks()]}, "Looks has a hook on_after_backward"),
        (Deep(), {"callbacks": [GradientAccumulationScheduler({4: 2})]}, "GradientAccumulationScheduler"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_in_backward_blocker_names_what_needs_all_gradients(
    module: pl.LightningModule, changes: Any, expected: str
) -> None:
    assert expected in find_blocker(fake_trainer(module, **changes))


def test_in_backward_blocker_of_usual_run_is_empty() -> None:
    usual = fake_trainer(Deep(), callbacks=[LearningRateMonitor(), OSDPCallback(), pl.callbacks.ModelCheckpoint()])
    assert find_blocker(usual) == ""
    assert find_blocker(usual, MixedPrecision("bf16-mixed", "cpu")) == ""


def test_in_backward_blocker_names_user_setting_and_foreign_optimizer() -> None:
    assert "update_in_backward=False" in find_blocker(fake_trainer(Deep()), wanted=False)
    assert "its optimizer is not one of torch.optim" in find_blocker(fake_trainer(Deep()), separable=False)


def test_in_backward_blocker_names_loss_scaling() -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert "scales the loss" in find_blocker(fake_trainer(Deep()), scaled)

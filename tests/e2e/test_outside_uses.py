"""Lightning's hooks and callbacks that read or change parameters have the values of a run under DDP."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from tests.support.lightning_contract import FEATURES, ManualOptimization, Net, batches, build_seeded, is_fake
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

RANKS, EPOCHS, PER_EPOCH = 2, 3, 3
POLICIES = ["zdp", "zdp2", "mixed"]


class Noting(Net):
    """Net with notes of what it sees, which are compared."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.noted: list[Any] = []

    def note(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value)
        if not is_fake(value):
            self.noted.append(value.detach().double().clone())

    def validation_step(self, batch: Any, index: int) -> None:
        self.note(self(batch[0]).sum())

    def on_train_end(self) -> None:
        for parameter in self.parameters():
            self.note(parameter)


class Teacher(Noting):
    """A momentum teacher that targets come from, a penalty that begins late, and figures of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, 3)).requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        loss = super().training_step(batch, index) + (self(batch[0]) - target).square().mean()
        if self.trainer.current_epoch >= 1:
            loss = loss + 0.05 * self.second.weight.square().sum()
        return loss

    def on_train_start(self) -> None:
        torch.manual_seed(3)
        nn.init.kaiming_uniform_(self.second.weight)
        self.teacher[0].load_state_dict(self.first.state_dict())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for value in grad_norm(self, 2).values():
            self.note(value)
        self.log_dict(grad_norm(self, "inf"))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        for teacher, student in ((self.teacher[0], self.first), (self.teacher[2], self.last)):
            teacher.weight.data = 0.9 * teacher.weight.data + 0.1 * student.weight.data
            teacher.bias.data.lerp_(student.bias.data, 0.1)

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.note((batch[0] @ self.first.weight.T).abs().sum())

    def on_validation_end(self) -> None:
        with torch.no_grad():
            self.last.weight[self.last.weight.abs() < 0.05] = 0.0


class Clipped(ManualOptimization, Noting):
    """Manual optimization that clips weights and gradients by itself, as a critic's."""

    def on_gradients(self) -> None:
        self.note(sum(p.grad.norm() for p in self.parameters()))
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.3, 0.3)


class Stated(pl.Callback):
    """Saves the module's own state dict from rank 0, and a checkpoint in the middle of an epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        state = module.state_dict()
        file = Path(self.folder) / "state.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        if trainer.is_global_zero:
            torch.save(state, file)
        trainer.save_checkpoint(Path(self.folder) / "amid.ckpt")
        dist.barrier()
        for values in (torch.load(file), torch.load(Path(self.folder) / "amid.ckpt", weights_only=False)["state_dict"]):
            for value in values.values():
                module.note(value)
        dist.barrier()
        module.note(sum(p.numel() for p in module.parameters()))
        module.note(copy.deepcopy(state)["first.weight"])


class Backboned(Noting):
    """What BackboneFinetuning freezes and trains again is its ``backbone``."""

    @property
    def backbone(self) -> nn.Module:
        return self.second

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


CASES: dict[str, tuple[Any, Callable[[str], list[Any]]]] = {
    "teacher and figures": (Teacher, lambda folder: [ModelSummary()]),
    "manual clipping": (Clipped, lambda folder: []),
    "state dicts": (Noting, lambda folder: [Stated(folder)]),
    "EMA": (Noting, lambda folder: [EMAWeightAveraging(decay=0.6), ModelCheckpoint(folder, save_last=True)]),
    "SWA": (Noting, lambda folder: [StochasticWeightAveraging(0.02, swa_epoch_start=1)]),
    "finetuning": (Backboned, lambda folder: [BackboneFinetuning(1, verbose=False)]),
}


def fit(case: str, policy: str, folder: str) -> Any:
    module_class, make_callbacks = CASES[case]
    module, data = build_seeded(module_class), batches(PER_EPOCH, 2)
    planned = copy.deepcopy(module)
    if isinstance(planned, Backboned):  # as the callback does before anything is planned
        planned.backbone.requires_grad_(False)
    strategy: Any = "ddp_find_unused_parameters_true"
    if policy != "ddp":
        strategy = OSDPStrategy(plan=plan_for(planned, next(iter(data)), RANKS, policy, 2))
    made = trainer(
        folder, strategy, max_steps=-1, max_epochs=EPOCHS, limit_val_batches=1.0, use_distributed_sampler=False,
        callbacks=make_callbacks(folder), enable_checkpointing=case == "EMA",
    )  # fmt: skip
    made.fit(module, data, batches(1, 4, seed=5))
    return module.noted


def fit_all(rank: int, ranks: int, folder: str, cases: list[str], policies: list[str]) -> Any:
    """Every case under every policy in the same processes."""
    warnings.simplefilter("ignore")
    results: dict[tuple[str, str], Any] = {}
    for case in cases:
        for policy in ["ddp", *policies]:
            try:
                results[case, policy] = fit(case, policy, f"{folder}/{case}-{policy}")
            except Exception:
                results[case, policy] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank returned."""
    return run_ranks(fit_all, RANKS, str(tmp_path_factory.mktemp("runs")), [*CASES], POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "finetuning"])
def test_hooks_and_callbacks_see_and_make_the_values_of_ddp(runs: list[Any], case: str, policy: str) -> None:
    for results in runs:
        noted, expected = results[case, policy], results[case, "ddp"]
        assert not isinstance(noted, str), noted
        assert not isinstance(expected, str), expected
        torch.testing.assert_close(noted, expected, rtol=1e-4, atol=1e-5)


def fit_in_one_process(folder: str) -> list[Tensor]:
    """The weights that fine-tuning ends with; DDP does not reduce gradients of what it was given frozen."""
    module, data = build_seeded(Backboned), batches(PER_EPOCH, 2)
    whole = DataLoader(data.dataset, batch_size=2 * RANKS)
    callbacks = CASES["finetuning"][1](folder)
    trainer(folder, "auto", max_steps=-1, max_epochs=EPOCHS, callbacks=callbacks, devices=1).fit(module, whole)
    return module.noted


@pytest.mark.parametrize("policy", POLICIES)
def test_finetuning_callback_trains_like_one_process(runs: list[Any], policy: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = fit_in_one_process(str(tmp_path))
    for results in runs:
        noted = results["finetuning", policy]
        assert not isinstance(noted, str), noted
        torch.testing.assert_close(noted[-len(expected) :], expected, rtol=1e-4, atol=1e-5)

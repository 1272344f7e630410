"""Buffers that steps write: validation, checkpoints and weights are DDP's."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from lightning_osdp import OSDPStrategy
from tests.support.lightning_contract import CLASSES, FEATURES, HIDDEN, RANKS, ManualOptimization, batches, build_seeded
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

EPOCHS, COUNT, SIZE = 2, 4, 4


class BufferNet(pl.LightningModule):
    """BatchNorm, spectral norm, a small and a large codebook updated by hand, and a large table that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.last = spectral_norm(nn.Linear(HIDDEN, CLASSES))
        self.register_buffer("center", torch.zeros(HIDDEN))
        self.register_buffer("codebook", torch.zeros(2000, HIDDEN))
        self.register_buffer("table", torch.ones(2000, HIDDEN))
        self.val_losses: list[float] = []
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        if self.training:
            self.center.lerp_(hidden.detach().mean(0), 0.5)
            self.codebook.data.lerp_(hidden.detach().mean(0).expand(2000, HIDDEN), 0.5)
        return self.last(torch.tanh(self.second(hidden - self.center) + self.codebook[7] * self.table[3]))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.val_losses.append(float(functional.cross_entropy(self(batch[0]), batch[1])))
        if batch_index == 0:
            self.seen.append({name: buffer.detach().clone() for name, buffer in self.named_buffers()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ManualBufferNet(ManualOptimization, BufferNet):
    """It steps by itself."""


class LateBufferNet(BufferNet):
    """A large table is written before the first step, and another one is registered after it: each rank's own."""

    def on_train_start(self) -> None:
        self.table.data.mul_(1 + self.global_rank)

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        if self.global_step == 1:
            self.register_buffer("late", torch.full((2000, HIDDEN), 1.0 + self.global_rank))

    def forward(self, x: Tensor) -> Tensor:
        late = dict(self.named_buffers()).get("late")
        return super().forward(x) if late is None else super().forward(x) * late[2, :CLASSES]


class OnlyLateNet(LateBufferNet):
    """It has no buffer before training begins; DDP sends none then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.Identity(), nn.Linear(HIDDEN, CLASSES)
        self._buffers.clear()

    def on_train_start(self) -> None:
        self.register_buffer("center", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.norm(self.first(x)), dict(self.named_buffers())
        if "center" in found and self.training:
            self.center.lerp_(hidden.detach().mean(0), 0.5)
        late = found["late"][2] if "late" in found else 0.0
        return self.last(torch.tanh(self.second(hidden + found.get("center", 0.0) + 0.1 * late)))


CASES: dict[str, tuple[type[BufferNet], str, int, bool]] = {
    **{policy: (BufferNet, policy, 1, True) for policy in ("dp", "zdp2", "zdp", "mixed")},
    "accumulation": (BufferNet, "mixed", 2, True),
    "manual": (ManualBufferNet, "mixed", 1, True),
    "own buffers": (BufferNet, "mixed", 1, False),
    "late": (LateBufferNet, "mixed", 1, True),
    "only late": (OnlyLateNet, "mixed", 1, True),
}
"""The module, the plan's modes, the accumulated batches, and whether buffers are broadcast."""


def fit(folder: str, strategy: Any, module: BufferNet, accumulation: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": EPOCHS, "limit_val_batches": 1.0}
    if accumulation > 1:
        options["accumulate_grad_batches"] = accumulation
    made = trainer(folder, strategy, use_distributed_sampler=False, **options)
    made.fit(module, batches(COUNT, SIZE), batches(COUNT, SIZE, seed=1))
    return {"losses": module.val_losses, "seen": module.seen, "weights": dict(module.named_parameters())}


def run_case(folder: str, name: str) -> list[dict[str, Any]]:
    kind, policy, accumulation, broadcasts = CASES[name]
    module = build_seeded(kind)
    plan = plan_for(copy.deepcopy(module), next(iter(batches(COUNT, SIZE))), RANKS, policy, SIZE, accumulation, shift=2)
    ours = OSDPStrategy(plan=plan, broadcast_buffers=broadcasts)
    ddp = DDPStrategy() if broadcasts else DDPStrategy(broadcast_buffers=False)
    return [fit(folder, ours, module, accumulation), fit(folder, ddp, build_seeded(kind), accumulation)]


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    return {name: run_case(folder, name) for name in CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("buffers")))


@pytest.mark.parametrize("name", CASES)
def test_validation_and_buffers_equal_those_of_ddp(name: str, results: list[dict[str, Any]]) -> None:
    for ours, ddp in (one[name] for one in results):
        assert len(ours["losses"]) == EPOCHS * COUNT
        torch.testing.assert_close(ours["losses"], ddp["losses"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["seen"], ddp["seen"], rtol=1e-5, atol=1e-6)
        for key, value in ours["weights"].items():
            torch.testing.assert_close(value, ddp["weights"][key], rtol=1e-5, atol=1e-6)


def test_buffers_of_all_ranks_are_equal_unless_they_are_not_broadcast(results: list[dict[str, Any]]) -> None:
    for name in ("zdp", "own buffers"):
        first, second = (one[name][0]["seen"][-1] for one in results)
        equal = [torch.equal(first[key], second[key]) for key in ("center", "codebook", "norm.running_mean")]
        assert equal == [name == "zdp"] * 3

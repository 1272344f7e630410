"""Modules whose ranks do different things, each trained by DDP and by OSDP, or ended with an error."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy, ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import modes_for, wrap_blocks
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.split_plans import split_all

WIDTH, BATCH, STEPS = 12, 4, 5


def rank_of_process() -> int:
    return int(os.environ["RANK"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(pl.LightningModule):
    """Three blocks and an auxiliary head; subclasses differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.auxiliary = nn.Linear(WIDTH, 5, bias=False), nn.Linear(WIDTH, 5, bias=False)

    @property
    def differs(self) -> bool:
        """Whether this rank is the second one, in a step after the first."""
        return self._trainer is not None and self.global_step > 0 and rank_of_process() == 1

    def blocks_of_rank(self) -> list[int]:
        return [0, 1, 2]

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.blocks_of_rank():
            x = self.blocks[index](x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: Any, batch_index: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(16 * BATCH, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(0, 5, (len(x),), generator=generator)), batch_size=BATCH)


class OtherOrder(Net):
    def blocks_of_rank(self) -> list[int]:
        return [2, 0, 1] if self.differs else [0, 1, 2]


class AuxiliaryLoss(Net):
    """One rank adds the loss of a head that the other one does not run."""

    def training_step(self, batch: Any, batch_index: int) -> Any:
        features = self.features(batch[0])
        loss = nn.functional.cross_entropy(self.head(features), batch[1])
        if self.differs:
            loss = loss + 0.5 * nn.functional.cross_entropy(self.auxiliary(features), batch[1])
        return loss


class FrozenByRank(Net):
    """The blocks that are left out by rank are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def blocks_of_rank(self) -> list[int]:
        return [0, 2] if self.differs else [0, 1, 2]


class LayerDropoutInCheckpoint(Net):
    """Each rank drops layers at random inside of a block that torch's own checkpointing recomputes."""

    def drop(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2):
            if float(torch.rand(())) < 0.6:
                x = self.blocks[index](x)
        return x

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.global_step == 1:
            torch.manual_seed(100 + rank_of_process())
        return checkpoint(self.drop, x, use_reentrant=False)


class Sampler(Net):
    """One rank evaluates for some seconds in plain Python, and the other one waits."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.differs and self.global_step == 3:
            time.sleep(8.0)


class UnequalBatches(Net):
    """Rows that differ in number between ranks, as in last batches."""

    def training_step(self, batch: Any, batch_index: int) -> Any:
        rows = slice(0, 1 if self.differs else BATCH)
        return nn.functional.cross_entropy(self(batch[0][rows]), batch[1][rows])


class Manual(Net):
    """Manual optimization, in which one rank has more micro-batches to a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        optimizer: Any = self.optimizers()
        for part in range(3 if self.differs else 2):
            rows = slice(part, part + 2)
            self.manual_backward(nn.functional.cross_entropy(self(batch[0][rows]), batch[1][rows]) / 2)
        optimizer.step()
        optimizer.zero_grad()


class NoLoss(Net):
    """One rank skips a step."""

    def training_step(self, batch: Any, batch_index: int) -> Any:
        return None if self.differs and self.global_step == 2 else super().training_step(batch, batch_index)


class StopsAlone(Net):
    """One rank ends training by itself."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.differs and self.global_step == 3:
            self.trainer.should_stop = True


class RunsAlone(Net):
    """``if self.global_rank == 0: self.model(x)`` in validation."""

    def validation_step(self, batch: Any, batch_index: int) -> None:
        if self.global_rank == 0:
            self(batch[0])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class ReadsAlone(Net):
    """One rank alone asks for the weights, and trains on where it can't have them."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.differs and self.global_step == 3:
            with suppress(ShardingError):
                self.state_dict()


class OwnCollective(Net):
    """One rank alone runs a collective of the user's, where the other one gathers a weight."""

    def training_step(self, batch: Any, batch_index: int) -> Any:
        if self.differs and self.global_step == 3:
            torch.distributed.all_reduce(torch.ones(3))
        return super().training_step(batch, batch_index)


class OneFails(Net):
    """A gather finds no memory on one rank."""

    def training_step(self, batch: Any, batch_index: int) -> Any:
        if self.differs and self.global_step == 2:
            unit: Any = self.blocks[1].up.forward.func.__self__  # type: ignore[union-attr]
            unit._outputs_and_shards = _find_no_memory
        return super().training_step(batch, batch_index)


def _find_no_memory(*_: Any) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")


POLICIES = ("zdp", "zdp2", "mixed", "sliced", "per block", "recomputed")


def make_plan(module: Net, policy: str, ranks: int) -> ExecutionPlan:
    """The first rank's plan with the modes of ``policy`` for all operators of the module, also if it runs none."""
    plan = plan_for(module, next(iter(module.train_dataloader())), ranks, "zdp", BATCH)
    modes = modes_for(module, policy if policy in ("zdp", "zdp2", "mixed") else "zdp")
    changes = {name: {"slices": (mode,)} for name, mode in modes.items()}
    if policy == "sliced":
        changes = {name: {"slices": each, "split_dim": dim} for name, (each, dim) in split_all(module, 2).items()}
    operators = [op.model_copy(update=changes.get(op.name, {})) for op in plan.operators]
    blocks = [f"blocks.{index}" for index in range(3)]
    plan = plan.model_copy(
        update={"operators": tuple(operators), "recomputed": tuple(blocks[:2]) if policy == "recomputed" else ()}
    )
    box = [(wrap_blocks(plan, blocks) if policy == "per block" else plan).to_json()]
    torch.distributed.broadcast_object_list(box)
    return ExecutionPlan.from_json(box[0])


def fit(kind: type[Net], policy: str) -> dict[str, Tensor]:
    """The weights after training under a policy, or by DDP if it is ``ddp``."""
    torch.manual_seed(1)
    module = kind()
    strategy: Any = DDPStrategy(find_unused_parameters=True)
    if policy != "ddp":
        with torch.random.fork_rng():
            strategy = OSDPStrategy(plan=make_plan(kind(), policy, 2), cache="")
    has_validation = "validation_step" in vars(kind)
    with tempfile.TemporaryDirectory() as folder:
        options = {"limit_val_batches": 2, "val_check_interval": 2} if has_validation else {}
        fitting = trainer(folder, strategy, max_steps=STEPS, **options)
        fitting.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}

"""Whole runs on two ranks: training sees the data, and the user's objects, as it would without planning."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_osdp import ExecutionPlan, OSDPStrategy
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

RANKS = 2
ROWS = torch.linspace(-1, 1, 64 * 8).view(64, 8)


class SharpnessAware(torch.optim.Optimizer):
    """Calls its closure twice, and expects a gradient of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, [move + 0.1 * p.grad for p, move in zip(parameters, moves, strict=True)])
        return loss


class Net(pl.LightningModule):
    """A classifier that collects, counts, logs and measures in ``act``."""

    def __init__(self, act: Callable[[Net, Tensor, Tensor], Any] | None = None, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.outputs: list[Any] = []
        self.seen: list[float] = []
        self.counter = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.act, self.optimizer, self.correct = act, optimizer, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0] if isinstance(batch, list | tuple) else batch
        logits, labels = self.net(rows), rows[:, 0].mul(100).abs().long() % 3
        loss = nn.functional.cross_entropy(logits, labels)
        if not isinstance(rows, torch._subclasses.FakeTensor):
            self.seen += [round(value, 4) for value in rows[:, 0].tolist()]
        if self.act is not None:
            self.act(self, logits, labels)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=3)
        if self.optimizer == "sam":
            return SharpnessAware(self.net.parameters(), {})
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(module: Net, logits: Tensor, labels: Tensor) -> None:
    module.accuracy(logits, labels)
    module.log("accuracy", module.accuracy, on_epoch=True, on_step=False)


def collect(module: Net, logits: Tensor, labels: Tensor) -> None:
    module.outputs.append((logits.argmax(-1) == labels).float().mean().item())
    module.correct += int((logits.argmax(-1) == labels).sum())
    module.counter.add_(1)
    random.random()


def prioritise(module: Net, logits: Tensor, labels: Tensor) -> None:
    dataset = module.trainer.train_dataloader.dataset
    vars(dataset).setdefault("priorities", []).append(logits.detach().mean().item())
    module.correct = len(dataset.priorities)


ACTS: dict[str, Any] = {"metric": measure, "collected": collect, "prioritised": prioritise}


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int) -> None:
        self.rows = iter(ROWS[rank::RANKS])

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.rows


def generate(rank: int) -> Iterator[Tensor]:
    yield from ROWS[rank::RANKS].split(4)


DATA: dict[str, Callable[[int], Any]] = {
    "stream": lambda rank: DataLoader(Stream(rank), batch_size=4),
    "generator": generate,
    "batch sampler": lambda rank: DataLoader(
        TensorDataset(ROWS), batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, False)
    ),
    "shuffled": lambda rank: DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True),
}


def fit(folder: str, module: Net, data: Any, strategy: Any, **options: Any) -> pl.Trainer:
    values = {"max_steps": -1, "max_epochs": 1} | options
    made = trainer(folder, strategy, **values)
    made.fit(module, data)
    return made


def seeded(**options: Any) -> Net:
    pl.seed_everything(7, verbose=False)
    return Net(**options)


def osdp(module: Net, policy: str, **options: Any) -> OSDPStrategy:
    plan = plan_for(Net(), (ROWS[:4],), RANKS, policy, 4) if policy == "zdp" else None
    return OSDPStrategy(plan=plan, trial_steps=policy != "no trials", batch_size="keep", memory_limit="4GiB", **options)


def observe(made: pl.Trainer, module: Net) -> dict[str, Any]:
    return {
        "rows": module.seen,
        "outputs": module.outputs,
        "counts": (module.correct, float(module.counter)),
        "metrics": {name: round(float(value), 6) for name, value in made.callback_metrics.items()},
        "random": (random.random(), float(np.random.rand()), float(torch.rand(1))),
        "weights": {name: value.clone() for name, value in made.strategy.lightning_module_state_dict().items()},
    }


def run_cases(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases: list[tuple[str, dict[str, Any], Callable[[int], Any]]] = [
        *((name, {}, make) for name, make in DATA.items()),
        *((name, {"act": act}, DATA["shuffled"]) for name, act in ACTS.items()),
        *((name, {"optimizer": name}, DATA["shuffled"]) for name in ("lbfgs", "sam")),
    ]
    for name, options, make in cases:
        for kind in ("ddp", "zdp", "auto"):
            if kind != "ddp" and (name, kind) not in CASES:
                continue
            module = seeded(**options)
            data = make(rank)
            strategy = "ddp" if kind == "ddp" else osdp(module, kind)
            found[f"{name} {kind}"] = observe(fit(f"{folder}/{name}", module, data, strategy), module)
    found["change"] = change_of_batch_size(folder, rank)
    return found


class Hyper(Net):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


def change_of_batch_size(folder: str, rank: int) -> dict[str, Any]:
    """What is printed and logged of a batch size that is not the loader's."""
    output, module = io.StringIO(), Hyper(2)
    logging.getLogger("lightning_osdp").addHandler(logging.StreamHandler(output))  # a terminal shows both
    loggers = [CSVLogger(f"{folder}/csv", version=0), TensorBoardLogger(f"{folder}/tb", version=0)]
    data = DataLoader(TensorDataset(ROWS), batch_size=2)
    with redirect_stdout(output):
        made = fit(
            folder, module, data, OSDPStrategy(batch_size=8, memory_limit="4GiB", trial_steps=False), logger=loggers
        )
    files = [f"{logger.log_dir}/hparams.yaml" for logger in loggers]
    logged = [yaml.safe_load(Path(file).read_text()) for file in files] if rank == 0 else []
    plan = made.strategy.execution_plan
    board = EventAccumulator(f"{folder}/tb/lightning_logs/version_0").Reload() if rank == 0 else None
    return {
        "said": output.getvalue(),
        "logged": logged,
        "hparams": dict(module.hparams),
        "steps": made.global_step,
        "plan": plan.to_json(),
        "plan file": Path(loggers[0].log_dir, "osdp_plan.json").read_text(),
        "text": board.Tensors("osdp_plan/text_summary")[0].tensor_proto.string_val[0].decode() if board else "",
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_cases, RANKS, str(tmp_path_factory.mktemp("data")))


PLANNED = ("stream", "collected", "prioritised", "lbfgs", "sam")
CASES = [*((name, "zdp") for name in (*DATA, *ACTS)), *((name, "auto") for name in PLANNED)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_run_sees_data_and_leaves_objects_as_ddp_does(found: list[dict[str, Any]], name: str, kind: str) -> None:
    for rank in range(RANKS):
        ddp, osdp_ = found[rank][f"{name} ddp"], found[rank][f"{name} {kind}"]
        for fact in ("rows", "counts", "metrics", "random"):
            assert osdp_[fact] == ddp[fact], fact
        assert osdp_["outputs"] == pytest.approx(ddp["outputs"])
        for key, value in ddp["weights"].items() if rank == 0 else ():  # other ranks get no state
            assert torch.allclose(osdp_["weights"][key], value, atol=1e-5), key
    assert len(found[0][f"{name} {kind}"]["rows"]) >= 32


def test_changed_batch_size_is_said_once_and_logged(found: list[dict[str, Any]]) -> None:
    first, second = (each["change"] for each in found)
    line = (
        "batch size per device 2 -> 8 (global 4 -> 16), 16 -> 4 optimizer steps per epoch; the learning rate is yours "
        "to adapt\n"
    )
    assert first["said"].count(line) == 1
    assert line not in second["said"]
    assert [each["batch_size"] for each in first["logged"]] == [8, 8]
    assert first["hparams"]["batch_size"] == 8
    assert first["steps"] == 4


def test_loggers_get_the_plan_that_is_trained(found: list[dict[str, Any]]) -> None:
    first = found[0]["change"]
    assert first["plan file"] == first["plan"]
    lines = str(ExecutionPlan.from_json(first["plan"])).splitlines()
    assert [line.removeprefix("    ") for line in first["text"].splitlines()] == lines

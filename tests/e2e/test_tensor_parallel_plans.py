"""Tensor parallelism asked for, left to the search, or refused: through the Trainer, on two gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.errors import OSDPError
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report.explain import explain
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

RANKS, ROWS, WIDTH, STEPS = 2, 3000, 32, 3


class Tables(pl.LightningModule):
    """A large table, one that scales gradients by counts, an MLP with a residual, a hooked head; few indices a step."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(ROWS, WIDTH)
        self.counted = nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, 601)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch
        x = self.large(ids) + self.counted(ids)
        loss = functional.cross_entropy(self.odd(x + self.down(functional.gelu(self.up(x)))), labels)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, ROWS, (64,), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, ids % 601), batch_size=4)


class Mixing(Tables):
    """Its optimizer mixes the elements of a tensor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), 1e-2)


def slow_links() -> Cluster:
    """No latency, and so slow that moving weights can never pay."""
    fit = CollectiveFit(latency_s=0.0, s_per_byte=1e-6)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    return Cluster(devices_per_node=RANKS, device="cpu", backend="gloo", link=link)


def fit(folder: str, strategy: Any, module: type[Tables] = Tables, **wishes: Any) -> tuple[Tables, Any]:
    torch.manual_seed(1)
    made = module()
    callbacks = [] if isinstance(strategy, DDPStrategy) else [OSDPCallback(**wishes)]
    run = trainer(folder, strategy, max_steps=STEPS, callbacks=callbacks)
    run.fit(made)
    return made, run


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, cls: type[Tables] = Tables, plan: Any = None, **wishes: Any) -> None:
        strategy = OSDPStrategy(plan=plan, cache=None, cluster=slow_links(), batch_size="keep", trial_steps=False)
        try:
            module, run = fit(folder, strategy, cls, **wishes)
        except OSDPError as error:
            found[name] = f"{type(error).__name__}: {error}"
            return
        state = {key: value.clone() for key, value in module.state_dict().items()}
        found[name] = {"losses": module.losses, "state": state, "plan": run.strategy.execution_plan.to_json()}

    module, _ = fit(folder, DDPStrategy())
    found["ddp"] = {"losses": module.losses, "state": module.state_dict()}
    note("auto")
    note("off", tensor_parallel=False)
    note("half of a pair", tensor_parallel={"large": 1, "down": 2})
    note("everything", tensor_parallel={"*": 2})
    note("three ranks", tensor_parallel={"large": 3})
    note("no such name", tensor_parallel={"lagre": 2})
    note("counted", tensor_parallel={"counted": 2})
    note("odd", tensor_parallel={"odd": 2})
    note("mixing optimizer", Mixing, tensor_parallel={"large": 2})
    if rank == 0:
        Path(folder, "auto.json").write_text(found["auto"]["plan"])
        damaged = json.loads(found["auto"]["plan"])
        next(op for op in damaged["operators"] if op["name"] == "up")["tensor"]["scope"] = "elsewhere"
        Path(folder, "damaged.json").write_text(json.dumps(damaged))
    torch.distributed.barrier()
    note("saved plan", plan=f"{folder}/auto.json")
    note("saved plan and off", plan=f"{folder}/auto.json", tensor_parallel=False)
    note("damaged plan", plan=f"{folder}/damaged.json")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("runs")))
    assert {name: value for name, value in first.items() if isinstance(value, str)} == {
        name: value for name, value in second.items() if isinstance(value, str)
    }
    return dict(first)


def degrees(run: dict[str, Any]) -> dict[str, int]:
    return {op.name: op.choice.tensor_degree for op in ExecutionPlan.from_json(run["plan"]).operators}


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("auto", {"large", "up", "down"}),
        ("off", set()),
        ("half of a pair", {"up", "down"}),
        ("everything", {"large", "up", "down"}),
        ("saved plan", {"large", "up", "down"}),
    ],
)
def test_run_cuts_what_was_asked_for_or_found_and_trains_like_ddp(
    runs: dict[str, Any], name: str, cut: set[str]
) -> None:
    run = runs[name]
    assert {operator for operator, degree in degrees(run).items() if degree == RANKS} == cut
    assert run["losses"] == pytest.approx(runs["ddp"]["losses"], rel=1e-5)
    assert run["state"].keys() == runs["ddp"]["state"].keys()
    for key, value in runs["ddp"]["state"].items():
        torch.testing.assert_close(run["state"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three ranks", "large can't be cut over 3 ranks: that does not divide the 2 devices of a node: use 2"),
        ("no such name", "tensor_parallel: 'lagre' matches no operator (near names: large"),
        ("counted", "tensor_parallel: counted can't be tensor parallel: scale_grad_by_freq"),
        ("odd", "tensor_parallel: odd can't be tensor parallel: "),
        ("mixing optimizer", "tensor_parallel: large can't be tensor parallel: "),
        ("saved plan and off", "contradict each other: large is cut over 2 ranks in the plan. Leave one of them out"),
        ("damaged plan", "up: tensor.scope 'elsewhere' is not in tensor_scopes"),
    ],
)
def test_run_with_a_wish_that_can_not_be_had_is_refused_on_all_ranks(
    runs: dict[str, Any], name: str, message: str
) -> None:
    assert runs[name].startswith("ConfigurationError: ")
    assert message in runs[name]


def test_explanation_of_a_run_says_what_is_exchanged_and_what_can_not_be(runs: dict[str, Any]) -> None:
    text = explain(ExecutionPlan.from_json(runs["auto"]["plan"]))
    assert "large: tp over 2 ranks. Exchanges activations (" in text
    assert "instead of weights (375.0 KiB)" in text
    assert "Not tensor parallel: scale_grad_by_freq counts " in text
    everything = explain(ExecutionPlan.from_json(runs["everything"]["plan"]))
    assert "OSDPCallback asks for tp, which is not possible: scale_grad_by_freq counts " in everything

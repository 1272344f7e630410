"""What is refused, or differs from DDP, in a run: each with its sentence, on all ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor
from torch.nn import functional

from lightning_osdp import OSDPStrategy
from lightning_osdp.errors import OSDPError
from lightning_osdp.state.guarded_parameter import is_guarded
from tests.support.lightning_contract import RANKS, ManualOptimization, Net, batches, build_seeded, is_fake
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks


class LatePenalty(Net):
    """Reads a weight for its gradient from the second step on."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if batch_index and not is_fake(loss):
            loss = loss + self.second.weight.square().sum()
        return loss


class GraphOfGradients(ManualOptimization, Net):
    """Gradients that are part of a graph."""

    def training_step(self, batch: Any, batch_index: int) -> None:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss, create_graph=not is_fake(loss))
        self.optimizers().step()


class Held(pl.Callback):
    """Holds on to what stands for weights, and looks at gradients when they are there and after the step."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.gradients: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(module.second.weight.grad.norm().item())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        assert is_guarded(module.second.weight)
        self.held = [module.second.weight.data, module.second.weight.detach()[0], module.second.state_dict()["weight"]]
        self.gradients.append(module.second.weight.grad)


def fit(folder: str, kind: Any, callbacks: list[Any], policy: str = "zdp", in_backward: bool = False) -> None:
    module, data = build_seeded(kind), batches(3, 2)
    plan = plan_for(copy.deepcopy(module), next(iter(data)), RANKS, policy, 2)
    strategy = OSDPStrategy(plan=plan.model_copy(update={"update_in_backward": in_backward}))
    trainer(folder, strategy, max_steps=3, use_distributed_sampler=False, callbacks=callbacks).fit(module, data)


def catch(work: Any) -> str:
    try:
        work()
    except OSDPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def try_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "late penalty": catch(lambda: fit(folder, LatePenalty, [], in_backward=True)),
        "graph of gradients": catch(lambda: fit(folder, GraphOfGradients, [])),
    }
    for policy in ("zdp", "zdp2"):
        held = Held()
        fit(folder, Net, [held], policy)
        found[f"held, {policy}"] = [catch(lambda value=value: value.sum()) for value in held.held]  # type: ignore[misc]
        found[f"gradients, {policy}"] = held.gradients
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank got."""
    return run_ranks(try_all, RANKS, str(tmp_path_factory.mktemp("refused")))


@pytest.mark.parametrize(
    ("case", "start", "words"),
    [
        (
            "late penalty",
            "ShardingError: weight of second is sharded, and ",
            "read for the gradient outside of its operator, but may be updated before that gradient is there",
        ),
        (
            "graph of gradients",
            "ShardingError: ",
            "backward(create_graph=True) makes gradients that are part of a graph, which can't be reduced over the ",
        ),
    ],
)
def test_step_that_cannot_be_right_is_refused_on_all_ranks(
    results: list[dict[str, Any]], case: str, start: str, words: str
) -> None:
    for result in results:
        assert result[case].startswith(start), result[case]
        assert words in result[case]


@pytest.mark.parametrize("policy", ["zdp", "zdp2"])
def test_tensor_that_outlived_its_run_says_so(results: list[dict[str, Any]], policy: str) -> None:
    for result in results:
        texts = result[f"held, {policy}"]
        assert texts[0].startswith("ShardingError: this tensor is of second.weight")
        assert "as it was sharded before the plan changed or the run ended: take it anew" in texts[0]
        assert texts[1:] == ["no error"] * 2 or all(text.startswith("ShardingError: this tensor") for text in texts[1:])


@pytest.mark.parametrize("policy", ["zdp", "zdp2"])
def test_gradient_is_there_before_the_optimizers_step_and_freed_after_it(
    results: list[dict[str, Any]], policy: str
) -> None:
    for result in results:
        noted = result[f"gradients, {policy}"]
        assert all(isinstance(value, float) and value > 0 for value in noted[::2])
        assert noted[1::2] == [None] * 3

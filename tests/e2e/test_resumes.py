"""Runs that resume: callbacks that keep averages, hooks that look at a checkpoint, experts. As under DDP."""

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
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.autotune import pipeline
from tests.support.fuzz import Case, FuzzModule
from tests.support.lightning_contract import HIDDEN, RANKS, Net, batches, build_seeded
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks


class Normalized(Net):
    """With buffers."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.second(torch.tanh(self.first(x))))))


class Plain(Net):
    """Without: in its last epoch, which is for batch norms, Lightning's SWA steps once more under DDP if resumed."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)


class Looking(Normalized):
    """Reads, replaces and changes tensors of the checkpoint that it is loaded from, and keeps a copy of one."""

    kept: Tensor | None = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.kept = state["first.weight"].clone()
        state["second.weight"].mul_(0.5)
        state["last.weight"] = 2 * state["last.weight"]
        state["last.bias"][0] = float(state["first.weight"].norm())


class OwnNames(Normalized):
    """Saves half precision under other names, and the transposes of what it trains, as some libraries' hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_state_dict_post_hook(self.transpose)
        self.second.register_load_state_dict_pre_hook(self.transpose)

    @staticmethod
    def transpose(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {f"saved.{name}": 2 * value.double() for name, value in state.items() if value.is_floating_point()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        plain = {name.removeprefix("saved."): value / 2 for name, value in state.items()}
        return super().load_state_dict(plain, strict=False)


Callbacks = Callable[[], list[pl.Callback]]

CASES: dict[str, tuple[type[Net], Callbacks, Callbacks]] = {
    "EMA": (Normalized, lambda: [EMAWeightAveraging(decay=0.6)], lambda: [EMAWeightAveraging(decay=0.6)]),
    "EMA from a run without": (Normalized, list, lambda: [EMAWeightAveraging(decay=0.6)]),
    "SWA": (
        Plain,
        lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)],
        lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)],
    ),
    "a hook that looks": (Looking, list, list),
    "a state dict of its own": (OwnNames, list, list),
}
"""Modules, callbacks before the checkpoint, and callbacks after it."""

WAYS = [("zdp", "full"), ("zdp", "sharded"), ("zdp2", "sharded"), ("mixed", "sharded")]


def fit(folder: str, case: str, policy: str, save_format: str, resumes: bool) -> Net:
    """Fit two epochs and save after the second one, or go on for two more."""
    kind, before, after = CASES[case]
    module, data = build_seeded(kind), batches(3, 2)
    strategy: Any = "ddp"
    if policy != "ddp":
        plan = plan_for(build_seeded(kind), next(iter(data)), RANKS, policy, 2)
        strategy = OSDPStrategy(plan=plan, save_format=save_format)
    callbacks, path = after() if resumes else [*before(), Saver(folder)], Path(folder, "saved.ckpt")
    options: dict[str, Any] = {"max_steps": -1, "use_distributed_sampler": False, "callbacks": callbacks}
    made = trainer(folder, strategy, max_epochs=4 if resumes else 2, **options)
    made.fit(module, data, ckpt_path=path if resumes else None)
    return module


class Saver(pl.Callback):
    """Saves after the second epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(self.folder, "saved.ckpt"))


def fit_experts(folder: str, save_format: str | None = None) -> tuple[dict[str, Tensor], str]:
    """Fit experts that the ranks run in different order and save; resume, with the plan of the checkpoint.

    Without a format DDP trains them.

    Returns:
        The weights, and the plan of both runs if it is the same, for which the second one has measured nothing.
    """
    case, plans = Case(1, ("Experts", "Experts"), "plain", (), 1, None, "AdamW", "zdp"), []
    for steps, path in ((3, None), (7, f"{folder}/experts.ckpt")):
        strategy: Any = "ddp_find_unused_parameters_true"
        callbacks: list[pl.Callback] = []
        if save_format:
            strategy = OSDPStrategy(
                batch_size="keep", memory_limit="900MiB", cache="", trial_steps=False, save_format=save_format
            )
            callbacks = [OSDPCallback(modes="zdp")]
        module = FuzzModule(case)
        made = trainer(folder, strategy, max_steps=steps, callbacks=callbacks)
        made.fit(module, ckpt_path=path)
        if path is None:
            made.save_checkpoint(f"{folder}/experts.ckpt")
        plans.append(strategy.execution_plan.to_json() if save_format else "")
    return copy.deepcopy(module.state_dict()), plans[0] if plans[0] == plans[1] else "another plan"


def run_all(rank: int, ranks: int, folder: str) -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    for case in CASES:
        for policy, save_format in (("ddp", "full"), *WAYS):
            own = f"{folder}/{case}-{policy}-{save_format}"
            try:
                fit(own, case, policy, save_format, resumes=False)
                module = fit(own, case, policy, save_format, resumes=True)
                found[case, policy, save_format] = copy.deepcopy(module.state_dict()), getattr(module, "kept", None)
            except Exception:
                found[case, policy, save_format] = traceback.format_exc()
    found["experts by ddp"] = fit_experts(f"{folder}/ddp")[0]
    count, autotune = 0, pipeline.autotune

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return autotune(*args, **kwargs)

    pipeline.autotune = counted
    for save_format in ("full", "sharded"):
        count = 0
        found["experts", save_format] = (*fit_experts(f"{folder}/osdp-{save_format}", save_format), count)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank got."""
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("resumes")))


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize("case", CASES)
def test_resumed_run_has_the_weights_of_ddp(results: list[dict[Any, Any]], case: str, way: tuple[str, str]) -> None:
    for result in results:
        got, expected = result[(case, *way)], result[case, "ddp", "full"]
        assert not isinstance(got, str), got
        assert not isinstance(expected, str), expected
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("save_format", ["full", "sharded"])
def test_resumed_run_of_experts_has_the_plan_of_its_checkpoint_and_the_weights_of_ddp(
    results: list[dict[Any, Any]], save_format: str
) -> None:
    for result in results:
        weights, plan, num_planned = result["experts", save_format]
        assert plan != "another plan"
        assert '"zdp"' in plan
        assert num_planned == 1
        torch.testing.assert_close(weights, result["experts by ddp"], rtol=1e-4, atol=1e-6)

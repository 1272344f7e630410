"""Each mistake is an error of ours on every rank, before any parameter has moved, and no rank hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.errors import (
    ConfigurationError,
    InfeasibleError,
    OSDPError,
    PlanMismatchError,
    ShardingError,
    TraceError,
)
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.modules import FixedLoader, GPTModule, LateParameter, loader, trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks


class Frozen(GPTModule):
    """Nothing to train."""

    def configure_optimizers(self) -> Any:
        self.requires_grad_(False)
        return super().configure_optimizers()

    def setup(self, stage: str) -> None:
        self.requires_grad_(False)


class Broken(GPTModule):
    """A step that fails for real as well."""

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        raise RuntimeError("no such luck")


class BrokenOnOne(GPTModule):
    """A dataset that only rank 1 fails to read."""

    def train_dataloader(self) -> Any:
        if torch.distributed.get_rank() == 1:
            raise OSError("disk gone")
        return loader(8, 2)


def try_fit(
    folder: str, module: GPTModule, data: Any = None, options: dict[str, Any] | None = None, **osdp: Any
) -> Any:
    """(error's class name, text, whether the parameters are as they were)."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    try:
        strategy = OSDPStrategy(cache=f"{folder}/cache", **osdp)
        trainer(folder, strategy, **(options or {})).fit(module, data)
    except (OSDPError, OSError) as error:
        same = all(torch.equal(p, before[n]) for n, p in module.named_parameters())
        return type(error).__name__, str(error), same
    return "no error", "", True


def plan_for_gpt() -> ExecutionPlan:
    return plan_for(GPTModule(), next(iter(loader(4, 4))), 2, "dp", 4)


def try_all_mistakes(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All mistakes, one after the other in the same processes: none may leave the ranks out of step."""
    made = trainer(folder, OSDPStrategy(cache=f"{folder}/cache", batch_size=4))
    made.fit(GPTModule())
    good = json.loads(Path(folder, "osdp_plan.json").read_text())
    files = {
        "text": "not json",
        "version": json.dumps(good | {"version": 7}),
        "model": json.dumps(good | {"model": {"fingerprint": "0", "num_parameters": 12}}),
        "ranks": json.dumps(good | {"cluster": good["cluster"] | {"devices_per_node": 8}}),
        "cluster": json.dumps({"nodes": "many"}),
    }
    for name, text in files.items():
        Path(folder, f"{rank}-{name}.json").write_text(text)

    def path(name: str) -> str:
        return f"{folder}/{rank}-{name}.json"

    pruning = {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured", amount=0.5)]}
    sharded, replicated = ({"callbacks": [OSDPCallback(modes=mode)]} for mode in ("zdp", "dp"))
    return {
        "too little memory": try_fit(folder, GPTModule(), memory_limit="1MiB"),
        "not json": try_fit(folder, GPTModule(), plan=path("text")),
        "another version": try_fit(folder, GPTModule(), plan=path("version")),
        "another model": try_fit(folder, GPTModule(), plan=path("model")),
        "other ranks": try_fit(folder, GPTModule(), plan=path("ranks")),
        "no file": try_fit(folder, GPTModule(), plan=f"{folder}/none.json"),
        "bad cluster": try_fit(folder, GPTModule(), cluster=path("cluster")),
        "frozen": try_fit(folder, Frozen()),
        "broken step": try_fit(folder, Broken()),
        "broken on one rank": try_fit(folder, BrokenOnOne()),
        "pruning": try_fit(folder, GPTModule(), options=pruning),
        "precision": try_fit(folder, GPTModule(), options={"precision": "64-true"}),
        "fixed batch size": try_fit(folder, FixedLoader(), batch_size=3),
        "global batch size": try_fit(folder, GPTModule(), global_batch_size=7),
        "modes beside a plan": try_fit(folder, GPTModule(), options=sharded, plan=plan_for_gpt()),
        "batch size beside a plan": try_fit(folder, GPTModule(2), plan=plan_for_gpt(), batch_size="keep"),
        "modes that don't fit": try_fit(folder, GPTModule(), options=replicated, memory_limit="1MiB"),
        "late parameter": try_fit(folder, LateParameter(), batch_size=4),
        "and then": try_fit(folder, GPTModule(), batch_size=4),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(try_all_mistakes, 2, str(tmp_path_factory.mktemp("bad")))


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        ("too little memory", InfeasibleError, ["needs at least", "the limit is 1 MiB", "largest operator is"]),
        ("not json", ConfigurationError, ["text.json is not JSON"]),
        ("another version", PlanMismatchError, ["has version 7", "reads versions up to 3"]),
        ("another model", PlanMismatchError, ["model of 12 parameters"]),
        ("other ranks", PlanMismatchError, ["for 8 ranks, this run has 2"]),
        ("no file", ConfigurationError, ["none.json can't be read"]),
        ("bad cluster", ConfigurationError, ["cluster.json is not a cluster file"]),
        ("frozen", ConfigurationError, ["no trainable parameters"]),
        ("broken step", TraceError, ["no such luck"]),
        ("pruning", ConfigurationError, ["ModelPruning", "remove the callback"]),
        ("precision", ConfigurationError, ["64-true", "use '32-true', 'bf16-mixed'"]),
        ("fixed batch size", ConfigurationError, ["batch_size=3 can't be set", "uses 2"]),
        (
            "modes beside a plan",
            ConfigurationError,
            ["plan and OSDPCallback(modes=...) contradict each other: ", " is dp in the plan, zdp by modes. Leave one"],
        ),
        (
            "batch size beside a plan",
            ConfigurationError,
            ["plan and batch_size='keep' contradict each other: the plan's is 4, the train dataloader's 2. Leave one"],
        ),
        ("modes that don't fit", InfeasibleError, ["nothing fits with modes='dp': ", "the limit is 1 MiB"]),
        ("global batch size", ConfigurationError, ["global_batch_size=7 is not a multiple of the 2 ranks"]),
    ],
)
def test_fit_with_invalid_input_raises_on_every_rank_and_keeps_parameters(
    results: list[dict[str, Any]], mistake: str, error: type[Exception], words: list[str]
) -> None:
    for result in results:
        name, text, untouched = result[mistake]
        assert name == error.__name__
        assert all(word in text for word in words), text
        assert untouched


def test_fit_failing_on_one_rank_raises_its_error_on_the_other(results: list[dict[str, Any]]) -> None:
    name, text, _ = results[0]["broken on one rank"]
    assert name == "OSDPError"
    assert text == "rank 1 failed: OSError: disk gone"


def test_optimizer_step_with_late_parameter_raises_sharding_error(results: list[dict[str, Any]]) -> None:
    for result in results:
        name, text, _ = result["late parameter"]
        assert name == ShardingError.__name__
        assert "in no unit and in no bucket" in text


def test_fit_after_failed_fits_in_same_process_succeeds(results: list[dict[str, Any]]) -> None:
    assert [result["and then"][0] for result in results] == ["no error", "no error"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"memory_limit": "8 gigs"}, "8 gigs"),
        ({"memory_limit": -5}, "-5"),
        ({"batch_size": 0}, "batch_size=0 is not a positive whole number"),
        ({"batch_size": "keep", "global_batch_size": "keep"}, "batch_size='keep' keeps the global batch size too: "),
        ({"batch_size": "some"}, "batch_size='some' is not a positive whole number or 'auto' or 'keep'"),
        ({"global_batch_size": 1.5}, "global_batch_size=1.5"),
        ({"engine": "deepspeed"}, "engine='deepspeed' is not known"),
        ({"engine": None}, "engine takes a name, not NoneType: None"),
        ({"sharding_group": ["node"]}, "sharding_group takes a name, not list: "),
        ({"trial_steps": "no"}, "trial_steps takes True or False, not str: 'no'"),
        ({"update_in_backward": 0}, "update_in_backward takes True or False, not int: 0"),
        ({"broadcast_buffers": "no"}, "broadcast_buffers takes True or False, not str: 'no'"),
        ({"min_steps_per_epoch": None}, "min_steps_per_epoch takes a positive whole number, not NoneType: None"),
        ({"sample_batches": 2.0}, "sample_batches takes a positive whole number, not float: 2.0"),
        ({"cache": 3}, "cache takes a folder, '' for none, or None for the user's own, not int: 3"),
        ({"cluster": {"nodes": 1}}, "cluster takes a Cluster or the path of a file of `osdp profile`, not dict: "),
        ({"plan": {}}, "plan takes an ExecutionPlan or the path of one, not dict: {}"),
        ({"timeout": 3}, "timeout takes a datetime.timedelta, not int: 3"),
        ({"process_group_backend": 3}, "process_group_backend takes a name, such as 'gloo', not int: 3"),
    ],
)
def test_strategy_with_invalid_argument_raises_configuration_error(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OSDPStrategy(**setting)

"""The examples that people copy: each runs as the script it is, makes a plan, and learns what it is about."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
import warnings
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_osdp import OSDPCallback
from lightning_osdp.cli.main import main
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.models import some_cluster
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

RUNS: dict[str, tuple[list[str], Any]] = {
    "finetune_bert": (["--max-steps=40"], "auto"),
    "lora": (["--max-steps=20"], "zdp"),
    "vision": (
        ["--model=resnet", "--max-steps=40"],
        {f"model.resnet.encoder.stages.{stage}": mode for stage, mode in enumerate(("dp", "zdp", "zdp2", "dp"))},
    ),
    "gan": (["--max-steps=300"], "auto"),
    "recommender": (["--max-steps=30"], "auto"),
    "train_gpt": (["--max-steps=2", "--batch-size=1", "--out=train_gpt"], "auto"),
}
"""Arguments of each example, and the modes that are forced so that one machine shows what a smaller one would do."""


def run_examples(rank: int, ranks: int, folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Metrics in the order of the validations, the plan, and what was printed."""
    os.chdir(folder)
    os.environ["LIGHTNING_OSDP_CACHE"] = f"{folder}/cache"
    return {name: run_example(name, *RUNS[name]) for name in names}


def run_example(name: str, args: list[str], modes: Any) -> dict[str, Any]:
    validations: list[dict[str, float]] = []
    trainers: list[pl.Trainer] = []

    class Observer(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            validations.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def create(trainer: pl.Trainer, *positional: Any, callbacks: Any = (), **named: Any) -> None:
        trainers.append(trainer)
        own: list[pl.Callback] = [Observer()]
        if modes != "auto":  # nothing is left to choose but the batch size: what planning measures is given
            strategy = named["strategy"]
            strategy._options = replace(strategy._options, trial_steps=False, cluster=some_cluster(2))
            own.append(OSDPCallback(modes=modes))
        named |= {"callbacks": [*callbacks, *own], "enable_progress_bar": False}
        original(trainer, *positional, **named)

    original, pl.Trainer.__init__ = pl.Trainer.__init__, create  # type: ignore[method-assign]
    sys.argv = [f"{name}.py", "--devices=2", *args]
    try:
        with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        pl.Trainer.__init__ = original  # type: ignore[method-assign]
    plan = trainers[-1].strategy.execution_plan  # type: ignore[attr-defined]
    used = Counter(mode.value for operator in plan.operators for mode in operator.slices)
    return {
        "validations": validations,
        "modes": dict(used),
        "steps": trainers[-1].global_step,
        "printed": printed.getvalue(),
        "warnings": [str(each.message) for each in caught],
        "folder": os.getcwd(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each rank saw."""
    pytest.importorskip("peft")
    folder = str(tmp_path_factory.mktemp("examples"))
    *first, last = RUNS  # whose limit is what its process takes, so that process runs no other before
    runs = run_ranks(run_examples, 2, folder, first), run_ranks(run_examples, 2, folder, [last])
    return [before | after for before, after in zip(*runs, strict=True)]


def test_finetune_bert_learns_to_tell_reviews_apart(results: list[dict[str, dict[str, Any]]]) -> None:
    accuracies = [each["val_accuracy"] for each in results[0]["finetune_bert"]["validations"]]
    assert accuracies[-1] > 0.9


def test_lora_learns_to_count_with_sharded_adapters(results: list[dict[str, dict[str, Any]]]) -> None:
    before, after = (each["val_loss"] for each in results[0]["lora"]["validations"][-2:])
    assert after < before - 0.5
    assert results[0]["lora"]["modes"]["zdp"] > 10


def test_vision_learns_directions_under_mixed_modes(results: list[dict[str, dict[str, Any]]]) -> None:
    assert results[0]["vision"]["validations"][-1]["val_accuracy"] > 0.5
    assert results[0]["vision"]["modes"].keys() == {"dp", "zdp", "zdp2"}


def test_gan_draws_points_nearer_to_the_ring(results: list[dict[str, dict[str, Any]]]) -> None:
    before, after = (each["distance_from_ring"] for each in results[0]["gan"]["validations"][-2:])
    assert after < 0.5 * before
    assert sum(results[0]["gan"]["modes"].values()) == 8  # its networks run twice in a step: the search may shard them


def test_recommender_learns_where_ddp_does_not_fit_and_prints_the_mode_of_each_table(
    results: list[dict[str, dict[str, Any]]],
) -> None:
    found = results[0]["recommender"]
    assert re.search(r"DDP +does not fit", found["printed"])
    modes = dict(re.findall(r"^ *(\S+): ([\w +]+?) +[\d,]+ parameters$", found["printed"], re.MULTILINE))
    assert {f"tables.{name}" for name in ("user", "item", "shop", "city", "hour")} <= modes.keys()
    assert set(modes.values()) - {"dp"}
    assert found["validations"][-1]["val_accuracy"] > 0.6


def test_train_gpt_trains_a_mixed_plan_where_ddp_does_not_fit_and_shows_it(
    results: list[dict[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = results[0]["train_gpt"]
    folder = Path(found["folder"], "train_gpt")
    plan = ExecutionPlan.from_json((folder / "osdp_plan.json").read_text())
    assert [baseline.fits for baseline in plan.baselines if baseline.name == "DDP"] == [False]
    large = [op for op in plan.operators if op.num_parameters > 100_000]
    assert len({mode for op in large for mode in op.slices}) > 1
    assert found["modes"]["dp"] > 0
    assert "What else there was" in (folder / "osdp_plan.html").read_text(encoding="utf-8")
    for words in ("does not fit", "training loss, 2 steps", "validation loss in training", "osdp explain"):
        assert words in found["printed"]
    assert found["warnings"] == []
    assert main(["explain", str(folder / "osdp_plan.json")]) == 0
    assert "instead, DDP: does not fit" in capsys.readouterr().out


def test_examples_end_at_the_same_figures_on_both_ranks(results: list[dict[str, dict[str, Any]]]) -> None:
    for name in RUNS:
        synchronized = [
            {key: value for key, value in each[name]["validations"][-1].items() if not key.endswith("loss")}
            for each in results
        ]
        assert synchronized[0] == synchronized[1]
        assert results[0][name]["steps"] > 0

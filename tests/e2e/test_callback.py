"""OSDPCallback in whole runs on two gloo ranks."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_osdp import ConfigurationError, OSDPCallback, OSDPStrategy
from lightning_osdp.autotune import pipeline
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.e2e.test_fit import build_seeded
from tests.support.modules import trainer
from tests.support.ranks import run_ranks


def log_save_and_resume(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Trains with a CSV logger and a checkpoint, then resumes from it in a new Trainer."""
    logger = pl.loggers.CSVLogger(folder, name="log", version=0)
    first = _fit(folder, f"{folder}/cache", logger=logger, max_steps=8, log_every_n_steps=2)
    path = f"{folder}/first.ckpt"
    first.save_checkpoint(path)
    shown = sorted(name for name in first.progress_bar_metrics if name.startswith("osdp"))
    profiled = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal profiled
        profiled += 1
        return measure(*args, **kwargs)

    measure, pipeline.autotune = pipeline.autotune, counted
    second = _fit(folder, f"{folder}/other", path, max_steps=10, osdp={"save_format": "sharded"})
    second.save_checkpoint(f"{folder}/sharded.ckpt")
    from_sharded = _fit(folder, f"{folder}/other", f"{folder}/sharded.ckpt", max_steps=12)
    resumed = profiled
    third = _fit(folder, f"{folder}/other", path, max_steps=10, osdp={"batch_size": 3})
    pipeline.autotune = measure
    return {
        "plans": [one.strategy.execution_plan.to_json() for one in (first, second, third)],
        "plan from sharded": from_sharded.strategy.execution_plan.to_json(),
        "steps from sharded": from_sharded.global_step,
        "profiled": [resumed, profiled],
        "step": second.global_step,
        "shown": shown,
        "metrics": _read_metrics(Path(folder, "log", "version_0", "metrics.csv")) if rank == 0 else [],
        "file": torch.load(path, weights_only=True)["callbacks"][OSDPCallback().state_key]["plan"],
    }


def _fit(folder: str, cache: str, ckpt_path: str | None = None, *, osdp: Any = None, **options: Any) -> pl.Trainer:
    made = trainer(folder, OSDPStrategy(cache=cache, **(osdp or {})), callbacks=[OSDPCallback()], **options)
    made.fit(build_seeded(rows=64), ckpt_path=ckpt_path)
    return made


def _read_metrics(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if row.get("osdp/step_time_s")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(log_save_and_resume, 2, str(tmp_path_factory.mktemp("callback")))


def test_callback_logs_measured_and_predicted_metrics(runs: list[dict[str, Any]]) -> None:
    plan = ExecutionPlan.from_json(runs[0]["plans"][0])
    last = runs[0]["metrics"][-1]
    assert float(last["osdp/predicted_step_time_s"]) == pytest.approx(plan.predicted.step_time_s)
    assert float(last["osdp/predicted_peak_memory_bytes"]) == plan.predicted.peak_memory_bytes
    samples_per_s = plan.global_batch_size / float(last["osdp/step_time_s"])
    assert float(last["osdp/samples_per_s"]) == pytest.approx(samples_per_s)
    assert float(last["osdp/peak_memory_bytes"]) > plan.predicted.overhead_bytes / 2


def test_callback_progress_bar_shows_throughput_and_peak_memory(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["shown"] == ["osdp_peak_GiB", "osdp_samples_per_s"]


def test_callback_resume_reuses_plan_from_checkpoint_without_profiling(runs: list[dict[str, Any]]) -> None:
    for one in runs:
        first, second, _ = one["plans"]
        assert one["file"] == first == second == one["plan from sharded"]
        assert one["steps from sharded"] == 12
        assert one["profiled"][0] == 0
        assert one["step"] == 10


def test_callback_resume_with_other_batch_size_plans_again(runs: list[dict[str, Any]]) -> None:
    for one in runs:
        assert one["profiled"][1] == 1
        assert ExecutionPlan.from_json(one["plans"][2]).batch_size == 3


def test_callback_without_osdp_strategy_raises_configuration_error(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), "auto", devices=1, callbacks=[OSDPCallback()])
    with pytest.raises(ConfigurationError, match=r"needs OSDPStrategy.*SingleDeviceStrategy"):
        made.fit(build_seeded())


def fit_with_two_callbacks(rank: int, world_size: int, folder: str) -> str:
    made = trainer(folder, "osdp", devices=1, callbacks=[OSDPCallback(), OSDPCallback(slice_granularity=2)])
    try:
        made.fit(build_seeded())
    except ConfigurationError as error:
        return str(error)
    return ""


def test_fit_with_two_osdp_callbacks_raises_configuration_error(tmp_path: Path) -> None:
    assert all("has 2 OSDPCallbacks" in text for text in run_ranks(fit_with_two_callbacks, 1, str(tmp_path)))


class Misled(pl.Callback):
    """Has the plan seem wrong, and what is planned instead be something else."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        plan, again = strategy.execution_plan, strategy._planning_result.replanner.replan
        lower = plan.predicted.model_copy(update={"peak_memory_bytes": plan.predicted.peak_memory_bytes // 2})
        handed_back = {"retain_freed_memory": False}  # else only a peak above the limit would count
        strategy._monitor._plan = plan.model_copy(update={"predicted": lower, **handed_back})

        def sharded(correction: Any, rule: Any) -> ExecutionPlan:
            new = again(correction, rule)
            operators = [
                op.model_copy(update={"slices": (Mode.ZDP,)}) if not op.replicated_reason else op
                for op in new.operators
            ]
            large = [op for op in operators if op.num_parameters > 1000]
            kept = tuple(op if op in large else before for op, before in zip(operators, new.operators, strict=True))
            return new.model_copy(update={"operators": kept})

        strategy._planning_result = dataclasses.replace(
            strategy._planning_result, replanner=SimpleNamespace(replan=sharded)
        )


def train_with_and_without_replanning(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The same training as it is, and with a plan that changes on the way."""
    found: dict[str, Any] = {"losses": []}
    for callbacks, settings in ([], {}), ([Misled()], {"replan": "on_drift"}):
        strategy = OSDPStrategy(cache=f"{folder}/cache", batch_size=4, **settings)
        module = build_seeded(rows=128, own_rows=True)
        trainer(folder, strategy, callbacks=callbacks, max_steps=10).fit(module)
        found["losses"].append(module.losses)
        assert strategy._run_warnings is not None
        assert strategy._run_warnings.plan == strategy.execution_plan
        found["modes"] = {mode.value for op in strategy.execution_plan.operators for mode in op.slices}
    return found


def test_replan_on_drift_switches_plan_and_keeps_losses(tmp_path: Path) -> None:
    for one in run_ranks(train_with_and_without_replanning, 2, str(tmp_path)):
        assert one["modes"] == {"dp", "zdp"}
        assert len(one["losses"][1]) == 10
        assert one["losses"][1] == pytest.approx(one["losses"][0], rel=1e-5)

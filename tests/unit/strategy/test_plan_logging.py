"""What loggers get of a plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_osdp import OSDPWarning
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy.plan_logging import write_and_log_plan
from tests.support.models import hand_made_plan

PLAN = hand_made_plan({"one": Mode.ZDP}, 2)


class Experiment:
    """Notes calls of the methods that a library's experiment has, and knows no others."""

    def __init__(self, *methods: str) -> None:
        self.calls: list[Any] = []
        for method in methods:
            setattr(self, method, lambda *args, _name=method, **kwargs: self.calls.append((_name, args, kwargs)))


class Neptune(Experiment):
    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(upload=lambda path: self.calls.append(("upload", (name, path), {})))


def log_to(folder: Path, *loggers: Any) -> Path:
    file = folder / "osdp_plan.json"
    write_and_log_plan(PLAN, file, loggers)
    assert ExecutionPlan.from_json(file.read_text()) == PLAN
    return file


def test_plan_goes_to_each_logger_by_the_method_that_it_has(tmp_path: Path) -> None:
    comet = Experiment("log_asset_data", "log_text", "log_artifact")
    mlflow, wandb = Experiment("log_text", "log_artifact"), Experiment("log_artifact", "log")
    board, neptune, csv = Experiment("add_text"), Neptune("get_structure"), Experiment("save")
    runs: list[Any] = [SimpleNamespace(experiment=each) for each in (comet, wandb, board, neptune, csv)]
    file = log_to(tmp_path, *runs, SimpleNamespace(experiment=mlflow, run_id="run 7"), SimpleNamespace())
    assert comet.calls == [("log_asset_data", (PLAN.to_json(),), {"name": "osdp_plan.json"})]
    assert mlflow.calls == [("log_text", ("run 7", PLAN.to_json(), "osdp_plan.json"), {})]
    assert wandb.calls == [("log_artifact", (str(file),), {"name": "osdp_plan", "type": "plan"})]
    assert neptune.calls == [("upload", ("osdp_plan", str(file)), {})]
    assert csv.calls == []
    ((_, (tag, text), _),) = board.calls
    assert tag == "osdp_plan"
    assert [line.removeprefix("    ") for line in text.splitlines()] == str(PLAN).splitlines()


def test_logger_that_refuses_the_plan_is_a_warning_and_the_others_get_it(tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionError("the server is gone")

    board = Experiment("add_text")
    refusing = SimpleNamespace(experiment=SimpleNamespace(add_text=refuse))
    with pytest.warns(OSDPWarning, match="SimpleNamespace did not take the plan, which is in .*: the server is gone"):
        log_to(tmp_path, refusing, SimpleNamespace(experiment=board))
    assert len(board.calls) == 1

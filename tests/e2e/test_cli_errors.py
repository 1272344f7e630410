"""What ends `osdp fit` is said once, by rank 0: what went wrong, in which line, and how to see the traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_osdp.cli import error_block, main
from tests.support.modules import GPTModule, dataset
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


class RaisesInTraining(GPTModule):
    """Its second step fails, on one rank or on all of them."""

    ranks: tuple[int, ...] = (0, 1)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        is_real = not isinstance(loss, torch._subclasses.FakeTensor)
        if is_real and self.trainer.global_step == 1 and self.global_rank in self.ranks:
            raise KeyError("no such column")
        return loss


class RaisesOnRank1(RaisesInTraining):
    ranks = (1,)


class RaisesWhenBuilt(GPTModule):
    def __init__(self) -> None:
        raise KeyError("no vocabulary")


class RaisesAlways(GPTModule):
    """The step can't even be traced."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        raise ValueError("labels are missing")


def write_config(folder: Path, name: str, class_path: str, **strategy: Any) -> str:
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 3,
        "limit_val_batches": 0,
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "strategy": {"class_path": "lightning_osdp.OSDPStrategy", "init_args": {"trial_steps": False} | strategy},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"class_path": class_path}}))
    return str(path)


def write_plan(folder: Path) -> str:
    """A plan made by hand, so that nothing is measured before the step fails."""
    batch = next(iter(DataLoader(dataset(4), batch_size=4)))
    path = folder / "plan.json"
    path.write_text(plan_for(GPTModule(), batch, 2, "dp", 4).to_json())
    return str(path)


def run_failing_commands(rank: int, ranks: int, folder: str, plan: str) -> dict[str, tuple[int, str]]:
    """Exit status and standard error of each command, all in the same two processes."""
    os.environ["LIGHTNING_OSDP_CACHE"] = f"{folder}/cache"
    os.chdir(ROOT)
    error_block.HEAD_START_S = 0.0  # nobody ends this rank
    own = Path(folder, str(rank))
    own.mkdir()
    here = "tests.e2e.test_cli_errors"
    Path(own, "broken.yaml").write_text("model: [")
    configs = {
        "raises": write_config(own, "raises", f"{here}.RaisesInTraining", plan=plan),
        "not built": write_config(own, "built", f"{here}.RaisesWhenBuilt"),
        "untraceable": write_config(own, "untraceable", f"{here}.RaisesAlways"),
        "too small": write_config(own, "small", f"{here}.RaisesInTraining", memory_limit="1MiB"),
        "unknown class": write_config(own, "unknown", f"{here}.Nobody"),
        "unknown argument": write_config(own, "argument", f"{here}.RaisesInTraining", memory="1GiB"),
        "broken file": str(own / "broken.yaml"),
    }
    found = {name: run_main("fit", "--config", path) for name, path in configs.items()}
    return found | {"verbose": run_main("--verbose", "fit", "--config", configs["raises"])}


def run_main(*args: str) -> tuple[int, str]:
    sys.argv = ["osdp", *args]
    with redirect_stderr(io.StringIO()) as err:
        status = main.main(list(args))
    lines = err.getvalue().splitlines()
    blocks = [index for index, line in enumerate(lines) if line.startswith(("osdp: error", "Traceback"))]
    return status, "\n".join(lines[blocks[0] :]) if blocks else ""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, str]]]:
    """What each rank printed."""
    folder = tmp_path_factory.mktemp("errors")
    return run_ranks(run_failing_commands, 2, str(folder), write_plan(folder))


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("raises", main.BAD_INPUT, ["KeyError: 'no such column'", "(test_cli_errors.py:", "in training_step)"]),
        ("untraceable", main.BAD_INPUT, ["ValueError: labels are missing", "(test_cli_errors.py:", "training_step)"]),
        ("too small", main.INFEASIBLE, ["nothing fits", "What would fit"]),
    ],
)
def test_error_of_a_run_is_one_block_on_rank_0(
    results: list[dict[str, tuple[int, str]]], command: str, status: int, words: list[str]
) -> None:
    (status_0, text), (status_1, silence) = (each[command] for each in results)
    assert (status_0, status_1) == (status, status)
    assert silence == ""
    assert text.count("osdp: error: ") == 1
    assert "Traceback" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("command", "words"),
    [("unknown class", ["Nobody"]), ("unknown argument", ["memory"]), ("broken file", ["broken.yaml"])],
)
def test_bad_configuration_is_one_line(
    results: list[dict[str, tuple[int, str]]], command: str, words: list[str]
) -> None:
    for rank, each in enumerate(results):
        status, text = each[command]
        assert status == main.BAD_INPUT
        (line,) = text.splitlines()
        assert line.startswith("osdp: error on rank 1: " if rank else "osdp: error: ")
        assert all(word in line for word in words), line


def test_error_says_how_to_see_the_traceback_and_verbose_shows_it(results: list[dict[str, tuple[int, str]]]) -> None:
    assert "(the traceback: osdp --verbose fit --config" in results[0]["raises"][1].splitlines()[-1]
    for rank, each in enumerate(results):
        text = each["verbose"][1]
        assert text.startswith("Traceback (most recent call last):")
        assert 'raise KeyError("no such column")' in text
        assert f"osdp: error{' on rank 1' if rank else ''}: KeyError" in text


def test_error_of_rank_1_alone_is_told_by_rank_0(tmp_path: Path) -> None:
    """In ranks that Lightning starts: they print to one terminal."""
    config = write_config(tmp_path, "fit", "tests.e2e.test_cli_errors.RaisesOnRank1", plan=write_plan(tmp_path))
    values = {"LIGHTNING_OSDP_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "lightning_osdp", "fit", "--config", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=os.environ | values)
    assert done.returncode == main.BAD_INPUT, done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if "KeyError: 'no such column'" in line]
    assert len(told) == 1, done.stderr
    assert re.search(
        r"rank 1 failed: KeyError: 'no such column' \(test_cli_errors\.py:\d+, in training_step\)", told[0]
    )

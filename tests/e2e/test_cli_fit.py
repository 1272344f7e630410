"""LightningCLI with the strategy: named or spelt out, written down and read back, and through ``osdp fit``."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.cli import fit, main
from lightning_osdp.planning.spec.constraints import SearchConstraints
from tests.support.modules import GPTModule
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]

ARGUMENTS: dict[str, Any] = {
    "memory_limit": "2GiB",
    "batch_size": 3,
    "max_batch_size": 64,
    "global_batch_size": 96,
    "plan": "plan.json",
    "cluster": "cluster.json",
    "sharding_group": "world",
    "save_format": "sharded",
    "replan": "on_drift",
    "trial_steps": False,
    "engine": "fairscale",
    "cache": "measurements",
    "timeout": "0:05:00",
    "process_group_backend": "gloo",
}


WISHES: dict[str, Any] = {
    "slice_granularity": {"model.blocks.0.*": 4},
    "activation_checkpointing": ["model.blocks.1"],
    "progress_bar": False,
    "modes": {"model.head": "dp", "model.blocks": "zdp"},
}


def parse_cli(*args: str) -> Any:
    """LightningCLI up to where it would run."""
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false", *args]
    return LightningCLI(GPTModule, args=options, run=False, save_config_callback=None, seed_everything_default=1)


@pytest.fixture(autouse=True)
def clear_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns where it is given arguments although the command line has some: here, pytest's."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.chdir(ROOT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_round_trips_strategy_and_callback_arguments(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    strategy = {"class_path": "lightning_osdp.OSDPStrategy", "init_args": ARGUMENTS}
    callback = {"class_path": "lightning_osdp.OSDPCallback", "init_args": WISHES}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy, "callbacks": [callback]}}))
    first = parse_cli("--config", str(path))
    written = first.parser.dump(first.config, skip_none=False)
    given = yaml.safe_load(written)["trainer"]["strategy"]
    assert given["class_path"] == "lightning_osdp.OSDPStrategy"
    assert {name: given["init_args"][name] for name in ARGUMENTS} == ARGUMENTS
    path.write_text(written)
    second = parse_cli("--config", str(path))
    assert second.parser.dump(second.config, skip_none=False) == written
    for made in (first.trainer.strategy, second.trainer.strategy):
        assert isinstance(made, OSDPStrategy)
        options = made._options
        assert (options.memory_limit_bytes, options.batch_size, options.global_batch_size) == (2 << 30, 3, 96)
        assert (made._given_plan, str(options.cluster), str(options.cache_folder)) == (
            "plan.json",
            "cluster.json",
            "measurements",
        )
        assert made._timeout.total_seconds() == 300
    for trainer in (first.trainer, second.trainer):
        (found,) = (one for one in trainer.callbacks if isinstance(one, OSDPCallback))
        assert found.constraints == SearchConstraints(
            {"model.blocks.0.*": 4}, ("model.blocks.1",), modes=WISHES["modes"]
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_accepts_strategy_by_name() -> None:
    assert isinstance(parse_cli("--trainer.strategy=osdp").trainer.strategy, OSDPStrategy)


def write_config(folder: Path) -> Path:
    """A file that a person would write: the strategy is not named, so it is ``run_osdp``."""
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 2,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}},
    }
    model = {"class_path": "tests.support.modules.GPTModule", "init_args": {"batch_size": 4}}
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": model}))
    return path


def fit_by_command(config: Path) -> str:
    """What ``python -m lightning_osdp fit`` prints; it starts its second rank by itself."""
    cache = {"LIGHTNING_OSDP_CACHE": str(config.parent / "cache"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | cache | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "lightning_osdp", "fit", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def validate(rank: int, ranks: int, config: str) -> str:
    """What ``osdp validate`` prints on a rank that torchrun has started."""
    os.chdir(ROOT)
    sys.argv = ["osdp"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main.main(["validate", "--config", config]) == main.DONE
    return printed.getvalue()


def test_osdp_fit_and_validate_train_and_evaluate(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert "Execution plan for" in fit_by_command(path)
    (kept,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    assert yaml.safe_load(kept.read_text())["trainer"]["strategy"] == "osdp"
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    assert "val_loss" in run_ranks(validate, 2, str(path))[0]


def test_config_paths_are_taken_from_config_options() -> None:
    assert list(fit._config_paths(["fit", "--config", "a/b.yaml", "-c=c/d.yaml", "--trainer.devices", "2"])) == [
        ROOT / "a" / "b.yaml",
        ROOT / "c" / "d.yaml",
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_osdp_fit_with_bad_unit_exits_with_bad_input_and_says_what_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = ("--trainer.strategy=lightning_osdp.OSDPStrategy", "--trainer.strategy.memory_limit=8 gigs")
    assert main.main(["fit", "--config", str(write_config(tmp_path)), *strategy]) == main.BAD_INPUT
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "osdp: error" in each)
    assert "'8 gigs' has an unknown unit, 'gigs': give a whole number of bytes" in line

"""LightningCLI with the strategy: named or spelt out, written down and read back, and through ``osdp fit``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_osdp import OSDPCallback, OSDPStrategy, training
from lightning_osdp.planning.wishes import Wishes
from tests.integration.modules import GPTModule

ROOT = Path(__file__).resolve().parents[1]

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
    "rehearse": False,
    "engine": "fairscale",
    "cache": "measurements",
    "timeout": "0:05:00",
    "process_group_backend": "gloo",
}


WISHES: dict[str, Any] = {
    "slice_granularity": {"model.blocks.0.*": 4},
    "activation_checkpointing": ["model.blocks.1"],
    "progress_bar": False,
}


def parsed(*args: str) -> Any:
    """LightningCLI up to where it would run."""
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false", *args]
    return LightningCLI(GPTModule, args=options, run=False, save_config_callback=None, seed_everything_default=1)


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns where it is given arguments although the command line has some: here, pytest's."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.chdir(ROOT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_arguments_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    strategy = {"class_path": "lightning_osdp.OSDPStrategy", "init_args": ARGUMENTS}
    callback = {"class_path": "lightning_osdp.OSDPCallback", "init_args": WISHES}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy, "callbacks": [callback]}}))
    first = parsed("--config", str(path))
    written = first.parser.dump(first.config, skip_none=False)
    given = yaml.safe_load(written)["trainer"]["strategy"]
    assert given["class_path"] == "lightning_osdp.OSDPStrategy"
    assert {name: given["init_args"][name] for name in ARGUMENTS} == ARGUMENTS
    path.write_text(written)
    second = parsed("--config", str(path))
    assert second.parser.dump(second.config, skip_none=False) == written
    for made in (first.trainer.strategy, second.trainer.strategy):
        assert isinstance(made, OSDPStrategy)
        assert (made._memory_limit, made._batch_size, made._global_batch_size) == (2 << 30, 3, 96)
        assert (made._given_plan, str(made._given_cluster), str(made._cache)) == (
            "plan.json",
            "cluster.json",
            "measurements",
        )
        assert made._timeout.total_seconds() == 300
    for trainer in (first.trainer, second.trainer):
        (found,) = (one for one in trainer.callbacks if isinstance(one, OSDPCallback))
        assert found.wishes == Wishes({"model.blocks.0.*": 4}, ("model.blocks.1",))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_name_is_enough() -> None:
    assert isinstance(parsed("--trainer.strategy=osdp").trainer.strategy, OSDPStrategy)


def configuration(folder: Path) -> Path:
    """A file that a person would write: the strategy is not named, so it is ``osdp``."""
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
    model = {"class_path": "tests.integration.modules.GPTModule", "init_args": {"batch_size": 4}}
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": model}))
    return path


def osdp(*args: str, folder: Path) -> str:
    """What ``python -m lightning_osdp`` prints; it starts its second rank by itself."""
    cache = {"LIGHTNING_OSDP_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | cache | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "lightning_osdp", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_osdp_fit_and_validate_train_and_evaluate(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    assert "Execution plan for" in osdp("fit", "--config", str(path), folder=tmp_path)
    (kept,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    assert yaml.safe_load(kept.read_text())["trainer"]["strategy"] == "osdp"
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    assert "val_loss" in osdp("validate", "--config", str(path), folder=tmp_path)


def test_modules_are_found_beside_the_configuration() -> None:
    assert list(training._folders(["fit", "--config", "a/b.yaml", "-c=c/d.yaml", "--trainer.devices", "2"])) == [
        str(ROOT / "a"),
        str(ROOT / "c"),
    ]

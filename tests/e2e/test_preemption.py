"""Signals while two ranks train: noted at once, heeded by all ranks at the end of the same batch."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_osdp.strategy import preemption
from lightning_osdp.strategy.preemption import PreemptionCallback
from tests.support.lightning_contract import RANKS, Net, batches, build_seeded, is_fake, make_planned_trainer
from tests.support.ranks import run_ranks

BATCHES = 10


class Signalled(Net):
    """One rank gets a signal in the middle of a step."""

    signalled_s = 0.0

    def __init__(self, signum: signal.Signals | None = None, rank: int = 0, at: int = 3) -> None:
        super().__init__()
        self.signum, self.rank, self.at = signum, rank, at

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if not is_fake(loss) and self.signum and batch_index == self.at and dist.get_rank() == self.rank:
            self.signalled_s = time.monotonic()  # the clock of all processes of a machine
            os.kill(os.getpid(), self.signum)
            time.sleep(0.05)  # the handler runs
        return loss


class SlowSignalled(Signalled):
    """One rank, or both if ``rank`` is -1, get SIGTERM; there is time for the others to hear of it."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if not is_fake(loss):
            time.sleep(0.05)
            if self.rank == -1 and batch_index == self.at:
                self.signalled_s = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
        return loss


def stop_by_sigterm(folder: str, rank: int, with_checkpoint: bool, accumulation: int = 1) -> dict[str, Any]:
    """Fit outside SLURM until SIGTERM comes to ``rank``."""
    data = batches(60, 2)
    callbacks = [OnExceptionCheckpoint(folder, "stopped")] if with_checkpoint else []
    module = build_seeded(SlowSignalled, signal.SIGTERM, rank=rank)
    options = {"callbacks": callbacks, "accumulation": accumulation, "enable_checkpointing": with_checkpoint}
    made = make_planned_trainer(folder, build_seeded(Net), data, **options)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        made.fit(module, data)
    file = Path(folder, "stopped.ckpt")
    return {
        "batches": len(module.losses),
        "signalled_s": module.signalled_s,
        "ended_s": time.monotonic(),
        "saved": torch.load(file, weights_only=True)["global_step"] if file.exists() else None,
        "steps": made.global_step,
        "restored": signal.getsignal(signal.SIGTERM) == before,
    }


def run_sigterm_scenarios(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """SIGTERM to either rank and to both, outside SLURM; in one run after the other."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    results = {
        "rank 0": stop_by_sigterm(f"{folder}/0", 0, with_checkpoint=True),
        "rank 1": stop_by_sigterm(f"{folder}/1", 1, with_checkpoint=True, accumulation=2),
        "both": stop_by_sigterm(f"{folder}/both", -1, with_checkpoint=True),
        "without checkpoint": stop_by_sigterm(f"{folder}/none", 1, with_checkpoint=False),
    }
    with patch.object(preemption, "is_driven_by_host", lambda _: False):
        results["host ahead of the device"] = stop_by_sigterm(
            f"{folder}/ahead", 1, with_checkpoint=True, accumulation=2
        )
    dist.barrier()
    return results


@pytest.fixture(scope="module")
def sigterm_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_sigterm_scenarios, RANKS, str(tmp_path_factory.mktemp("sigterm")))


@pytest.mark.parametrize("case", ["rank 0", "rank 1", "both", "without checkpoint", "host ahead of the device"])
def test_sigterm_outside_slurm_ends_all_ranks_before_same_batch_and_saves_if_asked(
    sigterm_results: list[dict[str, Any]], case: str
) -> None:
    first, second = (result[case] for result in sigterm_results)
    assert first["batches"] == second["batches"]
    assert 4 <= first["batches"] < 60
    assert first["saved"] == (None if case == "without checkpoint" else first["steps"])
    assert max(first["ended_s"], second["ended_s"]) - max(first["signalled_s"], second["signalled_s"]) < 10
    assert first["restored"]
    assert second["restored"]


def fake_slurm_environment(folder: str, rank: int) -> None:
    """What SLURM sets, and a scontrol that writes down what it was asked for."""
    names = {"NTASKS": RANKS, "NTASKS_PER_NODE": RANKS, "NNODES": 1, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    os.environ |= {f"SLURM_{name}": str(value) for name, value in names.items()}
    os.environ |= {"SLURM_JOB_ID": "417", "SLURM_JOB_NAME": "osdp"}
    tools = Path(folder, f"tools-{rank}")
    tools.mkdir()
    script = tools / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    script.chmod(0o755)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"


def fit_under_slurm(folder: str, module: Any, **options: Any) -> pl.Trainer:
    """A fit under SLURM's environment."""
    data = batches(BATCHES, 2)
    made = make_planned_trainer(folder, build_seeded(Net), data, plugins=[SLURMEnvironment()], **options)
    made.fit(module, data)
    return made


def run_scenarios(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All in the same processes: without a signal, with each signal on one rank, and going on."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    fake_slurm_environment(folder, rank)
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    whole, asked, resumed = (
        build_seeded(Signalled),
        build_seeded(Signalled, signal.SIGUSR1, rank=1),
        build_seeded(Signalled),
    )
    fit_under_slurm(f"{folder}/whole", whole)
    made = fit_under_slurm(f"{folder}/asked", asked, accumulation=2)
    checkpoint = f"{folder}/asked/hpc_ckpt_1.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["global_step"]
    fit_under_slurm(f"{folder}/asked", resumed, accumulation=2)  # Lightning finds the checkpoint by itself
    stopped = build_seeded(Signalled, signal.SIGTERM, rank=0)
    with pytest.raises(SIGTERMException):
        fit_under_slurm(f"{folder}/stopped", stopped)
    dist.barrier()
    return {
        "whole": whole.losses,
        "asked": asked.losses,
        "saved": saved,
        "checkpoints": sorted(path.name for path in Path(folder, "asked").glob("*.ckpt")),
        "resumed": len(resumed.losses),
        "stopped": len(stopped.losses),
        "scontrol": Path(folder, "scontrol.txt").read_text(),
        "callbacks": sum(isinstance(callback, PreemptionCallback) for callback in made.callbacks),
        "restored": before == (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_scenarios, RANKS, str(tmp_path_factory.mktemp("signals")))


def test_sigusr1_saves_checkpoint_on_all_ranks_after_optimizer_step(results: list[dict[str, Any]]) -> None:
    for result in results:
        # Noted in the fourth batch, asked at its end, known at the end of the fifth, saved when the sixth has stepped.
        assert result["saved"] == 3
        assert result["checkpoints"] == ["hpc_ckpt_1.ckpt"]
        assert len(result["asked"]) == BATCHES  # the run goes on until SLURM ends it


def test_sigusr1_requeues_slurm_job_once(results: list[dict[str, Any]]) -> None:
    assert results[0]["scontrol"] == "requeue 417\n"


def test_requeued_job_resumes_at_saved_batch(results: list[dict[str, Any]]) -> None:
    assert [result["resumed"] for result in results] == [BATCHES - 6] * RANKS


def test_sigterm_stops_all_ranks_at_same_batch(results: list[dict[str, Any]]) -> None:
    assert [result["stopped"] for result in results] == [5] * RANKS


def test_signal_handlers_are_restored_after_fit(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["restored"]
        assert result["callbacks"] == 1


def test_fit_without_signal_trains_all_batches(results: list[dict[str, Any]]) -> None:
    assert [len(result["whole"]) for result in results] == [BATCHES] * RANKS

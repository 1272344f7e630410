"""Jobs as users have them, by ``strategy="osdp"`` and by DDP: the same losses, figures of validation, and files."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_osdp import OSDPStrategy
from lightning_osdp.autotune import coordinator
from lightning_osdp.backend import memory
from lightning_osdp.planning.search.finalists import is_sharded, is_tensor_parallel
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.jobs import JOBS, build, loader
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

RANKS, STEPS, VALIDATIONS = 2, 3, 1


def fit(folder: Path, name: str, strategy: Any) -> dict[str, Any]:
    """Train a job and return what its user sees."""
    kind = JOBS[name]
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 1.0, "log_every_n_steps": 1}
    logger = CSVLogger(str(folder), "logs", "")
    own = {"callbacks": kind.callbacks(), "logger": logger, "enable_checkpointing": bool(kind.callbacks())}
    module = build(name, "small")
    made = trainer(str(folder), strategy, **options | own | kind.trainer)
    count = kind.batch_size * RANKS
    data = loader(name, "small", count * STEPS, seed=1, shuffle=True)
    made.fit(module, data, loader(name, "small", count * VALIDATIONS, seed=2))
    plan = made.strategy.execution_plan if isinstance(made.strategy, OSDPStrategy) else None
    return {
        "losses": [float(loss) for loss in module.losses],
        "figures": {key: float(value) for key, value in made.callback_metrics.items()},
        "epochs": made.current_epoch,
        "rates": logged_rates(folder) if made.is_global_zero else [],
        "saved": {file.name: torch.load(file)["state_dict"] for file in folder.rglob("*.ckpt") if made.is_global_zero},
        "plan": plan and plan.to_json(),
    }


def logged_rates(folder: Path) -> list[float]:
    """What LearningRateMonitor wrote."""
    with (folder / "logs" / "metrics.csv").open() as file:
        return [float(row["lr-AdamW/pg1"]) for row in csv.DictReader(file) if row.get("lr-AdamW/pg1")]


def fit_thrice(folder: Path, name: str) -> dict[str, Any]:
    """Everything automatic; within a limit that asks for sharding; and by DDP."""
    automatic = fit(folder / "auto", name, OSDPStrategy(batch_size="keep"))
    limit = JOBS[name].tight_bytes
    # The limit is that of the model's tensors alone.
    with mock.patch.object(coordinator, "process_overhead", return_value=0), mock.patch.dict(memory.KEPT_BYTES, cpu={}):
        tight = fit(folder / "tight", name, OSDPStrategy(batch_size="keep", memory_limit=limit))
    # A network of a GAN has no gradients where the other one is trained.
    ddp = fit(folder / "ddp", name, DDPStrategy(find_unused_parameters=name == "gan"))
    return {"auto": automatic, "tight": tight, "ddp": ddp}


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All jobs in the same processes, since starting them takes longest."""
    os.environ["LIGHTNING_OSDP_CACHE"] = f"{folder}/cache"
    return {name: fit_thrice(Path(folder) / name, name) for name in JOBS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("jobs")))


@pytest.mark.parametrize("plan", ["auto", "tight"])
@pytest.mark.parametrize("name", JOBS)
def test_job_has_losses_and_validation_figures_of_ddp(results: list[dict[str, Any]], name: str, plan: str) -> None:
    for result in results:
        ours, ddp = result[name][plan], result[name]["ddp"]
        assert len(ours["losses"]) >= 2 * STEPS
        assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert ours["figures"] == pytest.approx(ddp["figures"], rel=1e-5)
        assert ours["epochs"] == ddp["epochs"] == 2


@pytest.mark.parametrize("name", JOBS)
def test_job_is_sharded_where_its_limit_asks_for_that_and_keeps_its_batch_size(
    results: list[dict[str, Any]], name: str
) -> None:
    free, tight = (ExecutionPlan.from_json(results[0][name][plan]["plan"]) for plan in ("auto", "tight"))
    assert free.batch_size == tight.batch_size == JOBS[name].batch_size
    assert is_sharded(tight) or is_tensor_parallel(tight)
    assert tight.predicted.peak_memory_bytes <= tight.memory_limit_bytes


@pytest.mark.parametrize("plan", ["auto", "tight"])
def test_callbacks_of_job_stop_save_and_log_as_under_ddp(results: list[dict[str, Any]], plan: str) -> None:
    ours, ddp = results[0]["bert"][plan], results[0]["bert"]["ddp"]
    assert ours["rates"] == ddp["rates"]
    assert ours["rates"] == pytest.approx([5e-5, 1e-4, 1.5e-4, 2e-4, 2e-4, 2e-4])
    assert "last.ckpt" in ours["saved"]
    assert set(ours["saved"]) == set(ddp["saved"])
    for name, state in ours["saved"].items():
        assert list(state) == list(ddp["saved"][name])
        for key, value in state.items():
            if ".key.bias" not in key:  # its gradient is rounding noise, which Adam blows up to full steps
                torch.testing.assert_close(value, ddp["saved"][name][key], rtol=1e-5, atol=1e-6)

"""Two ranks that start a run as under torchrun, of which one has a fault at a named stage; how and when both end."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_osdp import OSDPCallback, OSDPStrategy
from lightning_osdp.autotune import (
    calibration,
    coordinator,
    finalists,
    measure,
    pipeline,
    profile_cache,
    startup_budget,
)
from lightning_osdp.engine.fairscale import engine
from lightning_osdp.profiling import engine_overhead, network
from lightning_osdp.state import atomic_files, single_file
from lightning_osdp.state import folder as folder_of_shards
from lightning_osdp.strategy import failure_detector, osdp, planning_options
from tests.support.modules import GPTModule, trainer
from tests.support.plans import plan_for
from tests.support.ranks import _shorten_measurements, start_scripts

RANKS = 2
LIMIT_S = 120.0
"""For a start with a fault, after which it counts as hanging; the process group's own time-out is 30 minutes."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended: its exit status, what it said, and seconds from the fault until then."""

    status: int
    text: str
    seconds: float


class Faulty(GPTModule):
    """A module whose own code can be told to fail, in the middle of a step as well."""

    def __init__(self) -> None:
        super().__init__(batch_size=2, rows=16)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        if not isinstance(loss, torch._subclasses.FakeTensor):
            reach("real step")
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        reach("validation step")
        super().validation_step(batch, batch_index)

    def setup(self, stage: str) -> None:
        reach("setup hook")

    def configure_optimizers(self) -> Any:
        if engine_is_made:
            reach("configure_optimizers")
        return super().configure_optimizers()


class FaultyCallback(pl.Callback):
    """Hooks of a callback."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        reach("callback's setup")


engine_is_made = False
_fault_file = "fault"
_current_phase = ""
_armed: tuple[str, str, float] | None = None
"""The stage of the fault on this rank, the fault, and how often the stage is reached before it."""


def reach(stage: str) -> None:
    """Have the fault, if it belongs to ``stage``; ``PHASE: STAGE`` stands for a stage within a phase."""
    global _armed
    if _armed is None or stage != _armed[0].rpartition(": ")[2]:
        return
    phase = _armed[0].rpartition(": ")[0]
    if phase and phase != _current_phase:
        return
    _, fault, left = _armed
    if left > 0:
        _armed = (_armed[0], fault, left - 1)
        return
    _armed = None
    Path(os.environ["FAULT_FOLDER"], _fault_file).touch()
    if fault == "raise":
        raise ValueError("row 7 is bad")
    if fault == "memory":
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:128] can't allocate memory: you tried to allocate 9 bytes")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # in training the signal is heeded at the end of the step
        return
    if fault == "sigterm while blocked":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        _get_default_store().wait(["what never comes"], timedelta(seconds=60))
    raise AssertionError(fault)


def _wrap(owner: Any, name: str, stage: str | None = None, phase: str | None = None) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        global _current_phase
        before = _current_phase
        _current_phase = phase or before
        try:
            if stage:
                reach(stage)
            return original(*args, **kwargs)
        finally:
            _current_phase = before

    setattr(owner, name, wrapped)


def _instrument() -> None:
    """Name the stages that a start reaches."""

    def mark_engine(*args: Any, **kwargs: Any) -> Any:
        global engine_is_made
        engine_is_made = True
        return made(*args, **kwargs)

    made = osdp.create_engine
    osdp.create_engine = mark_engine  # type: ignore[assignment]
    _wrap(planning_options, "read_data", "first batch")
    _wrap(pipeline, "trace", "trace")
    _wrap(pipeline, "trace_with_store", "trace")
    _wrap(profile_cache.ProfileCache, "load_profile", "look-up")
    _wrap(network.dist, "barrier", "barrier of links")
    _wrap(engine_overhead, "_time_once_s", "engine's overhead")
    _wrap(measure.compute, "measure_partition", "kernels")
    _wrap(measure, "measure_links", phase="links")
    _wrap(calibration, "time_step", phase="unsharded trial")
    _wrap(finalists, "run_plan_trials", phase="trial of the plan")
    _wrap(coordinator.PlanningCoordinator, "build_problem", "search")
    _wrap(coordinator.PlanningCoordinator, "memory_budget", "memory budget")
    _wrap(pipeline, "_cache_plan", "cache the plan")
    _wrap(engine.FairScaleEngine, "check", "check of the plan")
    _wrap(osdp.OSDPStrategy, "_apply_plan", phase="apply")
    _wrap(engine.FairScaleEngine, "apply", "engine")
    _wrap(osdp.OSDPStrategy, "_print_and_write_plan", "write the plan")
    _wrap(osdp.OSDPStrategy, "training_step", phase="training")
    _wrap(osdp.OSDPStrategy, "post_backward", "end of the backward pass")
    _wrap(osdp.OSDPStrategy, "optimizer_step", "optimizer step")
    _wrap(osdp.OSDPStrategy, "on_train_end", "end of training")
    _wrap(osdp.OSDPStrategy, "lightning_module_state_dict", "state dict")
    _wrap(osdp.OSDPStrategy, "save_checkpoint", "save")
    _wrap(single_file, "save", "write the file")
    _wrap(folder_of_shards, "_write_shards", "write the shards")
    _wrap(atomic_files, "commit", "commit")
    _wrap(atomic_files, "replace", "replace")
    _wrap(osdp.OSDPStrategy, "load_checkpoint", "load")
    _wrap(osdp.OSDPStrategy, "load_optimizer_state_dict", "load the optimizer")


def start_with_fault(stage: str, fault: str, rank: int, after: int = 0, **options: Any) -> list[Ending]:
    """Run two ranks, of which ``rank`` has ``fault`` when it reaches ``stage`` the ``after``-th time, from 0."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        armed = [(stage, fault, after) if own == rank else None for own in range(RANKS)]
        return _start(Path(folder), _run_rank, [(one, options) for one in armed], rank if fault == "stop" else None)


def start_and_catch(faults: Sequence[tuple[str, str, int, int]]) -> tuple[list[Ending], list[list[Ending]]]:
    """Have faults (as of ``start_with_fault``) in one run after the other, which a script catches, then none.

    Returns:
        How the ranks ended, and the error of each rank in each run with the seconds from the fault until then.
    """
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        endings = _start(Path(folder), _run_and_catch, [(tuple(faults),)] * RANKS, None)
        caught = [json.loads(Path(folder, f"caught-{rank}").read_text()) for rank in range(RANKS)]
        began_s = [Path(folder, f"fault-{index}").stat().st_mtime for index in range(len(faults))]
    runs = zip(*caught, began_s, strict=True)
    return endings, [[Ending(1, text, ended_s - began) for text, ended_s in ranks] for *ranks, began in runs]


def _start(folder: Path, run: Any, arguments: Sequence[tuple[Any, ...]], stopped: int | None) -> list[Ending]:
    """Run ``run(rank, folder, *arguments[rank])`` on each rank; return how they end."""
    logs = [folder / f"err-{rank}" for rank in range(RANKS)]
    processes = start_scripts(_run_prepared, RANKS, (run, str(folder), arguments), logs)
    try:
        return _wait(processes, folder, stopped)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait(processes: list[Any], folder: Path, stopped: int | None) -> list[Ending]:
    """Wait until all ranks but the one that is ``stopped`` have ended."""
    deadline, ended_s = time.monotonic() + LIMIT_S, {}
    waited = [rank for rank in range(RANKS) if rank != stopped]
    while len(ended_s) < len(waited) and time.monotonic() < deadline:
        for rank in waited:
            if rank not in ended_s and not processes[rank].is_alive():
                ended_s[rank] = time.time()
        time.sleep(0.02)
    fault = folder / "fault"
    began_s = fault.stat().st_mtime if fault.exists() else float("nan")
    texts = [path.read_text() if (path := folder / f"err-{rank}").exists() else "" for rank in range(RANKS)]
    return [
        Ending(
            process.exitcode if process.exitcode is not None else 999, text, ended_s.get(rank, float("inf")) - began_s
        )
        for rank, (process, text) in enumerate(zip(processes, texts, strict=True))
    ]


def _run_prepared(run: Any, folder: str, arguments: Sequence[tuple[Any, ...]]) -> None:
    os.environ["FAULT_FOLDER"] = folder
    _shorten_measurements()
    warnings.simplefilter("ignore")
    _instrument()
    failure_detector.SILENCE_TIMEOUT_S = 3.0
    startup_budget.STARTUP_BUDGET_S = 600.0
    rank = int(os.environ["RANK"])
    run(rank, folder, *arguments[rank])


def _fit(folder: str, cache: str, options: dict[str, Any]) -> int:
    """Fit, and return the number of steps; with ``save_format`` save at every second one, and with it ``resume``."""
    arguments = {"max_steps": 4, "num_sanity_val_steps": 1, "limit_val_batches": 1} | options
    save_format, resumes = arguments.pop("save_format", ""), arguments.pop("resumes", False)
    callbacks: list[pl.Callback] = [FaultyCallback(), OSDPCallback(modes="zdp")]
    strategy = OSDPStrategy(memory_limit="900MiB", batch_size=2, cache=cache)
    if save_format:
        module = Faulty()
        plan = plan_for(module, [next(iter(module.val_dataloader()))[0]], RANKS, "zdp", 2)
        strategy = OSDPStrategy(plan=plan, save_format=save_format)
        callbacks.append(ModelCheckpoint(f"{folder}/saved", every_n_train_steps=2, save_last=True))
        arguments["enable_checkpointing"] = True
    torch.manual_seed(1)
    fitting = trainer(folder, strategy, callbacks=callbacks, **arguments)
    fitting.fit(Faulty(), ckpt_path=f"{folder}/saved/last.ckpt" if resumes else None)
    return fitting.global_step


def _run_rank(rank: int, folder: str, armed: tuple[str, str, int] | None, options: dict[str, Any]) -> None:
    global _armed
    try:
        if options.get("resumes"):
            _fit(folder, "", options | {"resumes": False})
            options = options | {"max_steps": 8}
        _armed = armed
        _fit(folder, f"{folder}/cache-{rank}", options)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)


def _run_and_catch(rank: int, folder: str, faults: Sequence[tuple[str, str, int, int]]) -> None:
    global _armed, _fault_file, engine_is_made
    _fit(folder, "", {})  # what it loads would be loaded while the other rank waits
    caught = []
    for index, (stage, fault, failing, after) in enumerate(faults):
        _fault_file, engine_is_made = f"fault-{index}", False
        _armed = (stage, fault, after) if rank == failing else None
        try:
            _fit(folder, f"{folder}/cache-{rank}-{index}", {})
            caught.append(("no error", time.time()))
        except Exception:
            caught.append((traceback.format_exc(), time.time()))
    Path(folder, f"caught-{rank}").write_text(json.dumps(caught))
    _armed = None
    if _fit(folder, "", {}) != 4:
        sys.exit(3)


if __name__ == "__main__":
    for ending in start_with_fault(sys.argv[1], sys.argv[2], int(sys.argv[3]), int([*sys.argv, "0"][4])):
        print("=====", ending.status, f"{ending.seconds:.1f} s")
        print(ending.text[-int(os.environ.get("TAIL", 1500)) :])

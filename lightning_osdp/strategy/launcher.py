"""Start the ranks as Lightning does, and remember the checkpoint that the run resumes from.

Lightning tells a strategy the checkpoint only after ``setup``, when the plan is already applied. The launcher sees it
before, among the arguments of the function that it launches, so a plan in the checkpoint can be used again.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from typing_extensions import override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy import failure_detector
from lightning_osdp.strategy.failure_detector import end_process

OBSERVER_INTERVAL_S, OBSERVER_GRACE_S = 1, 7.0
"""Seconds between two looks at the processes of other ranks; and seconds that the first rank may go on after one has
failed, which it hears of by itself once the ranks are connected."""


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device, which also remembers ``ckpt_path``."""

    _ckpt_path: Any = None
    weights_only: bool | None = None
    """The argument of ``fit``: whether the checkpoint may hold nothing but tensors and plain values."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Return whether a notebook can train: with one device, since each further one needs a process of its own.

        Raises:
            ConfigurationError: there are several devices; Lightning asks only in a notebook.
        """
        if self.num_processes * self.num_nodes > 1:
            raise ConfigurationError(
                'strategy="osdp" starts one process for each device by running the script again, which a notebook is '
                "not: use Trainer(devices=1) here, or put the code in a script and run it with python, torchrun or srun"
            )
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` on every rank of this machine."""
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        self._ckpt_path, self.weights_only = bound.get("ckpt_path"), bound.get("weights_only")
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        observer: _RankObserver | None = None
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            observer = _RankObserver(self.procs, trainer)
            observer.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if trainer is not None:
                trainer.strategy.note_failure(error)  # type: ignore[attr-defined]
            if observer is not None and not dist.is_initialized():
                # The others would wait for this rank, whose error they can't hear. It goes on, if its script does.
                observer.stop()
                for process in self.procs:
                    process.kill()
            raise

    def resume_checkpoint_path(self, trainer: pl.Trainer) -> str | None:
        """Return the path of the checkpoint that ``fit`` will resume from; None if it starts from scratch."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warned already when it resolved the path itself
            path = trainer._checkpoint_connector._select_ckpt_path(
                TrainerFn.FITTING, self._ckpt_path, model_provided=True, model_connected=True
            )
        return str(path) if path else None


class _RankObserver(_ChildProcessObserver):
    """A thread of the first rank that ends all ranks it has started, and itself, some time after one has failed.

    Lightning's kills the first rank at once, before it can say why.

    Args:
        child_processes: the other ranks on this machine.
        trainer: tells whether the first rank is ending its run.
    """

    def __init__(self, child_processes: list[Any], trainer: pl.Trainer | None) -> None:
        super().__init__(os.getpid(), child_processes, OBSERVER_INTERVAL_S)
        self._trainer, self._is_stopped = trainer, False

    def stop(self) -> None:
        """End nothing any more."""
        self._is_stopped = True

    @override
    def _terminate_all(self) -> None:
        failed = next(process for process in self._child_processes if process.returncode)
        began_s = time.monotonic()
        while time.monotonic() - began_s < self._grace_s():
            time.sleep(OBSERVER_INTERVAL_S)
        if self._is_stopped:
            return
        for process in self._child_processes:
            process.kill()
        text = f"rank 0 is ended: rank {self._child_processes.index(failed) + 1} has ended with status"
        print(f"{text} {failed.returncode}", file=sys.stderr, flush=True)
        end_process(failure_detector.EXIT_STATUS)

    def _grace_s(self) -> float:
        is_ending = self._trainer is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        return failure_detector.ENDING_GRACE_S if is_ending else OBSERVER_GRACE_S

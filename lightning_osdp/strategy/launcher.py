"""Starts the ranks as Lightning does, and remembers which checkpoint the run is to resume from.

Lightning names the checkpoint to a strategy only after ``setup``, when the plan is made and applied. The launcher sees
it before, among the arguments of what it launches: a plan that lies in the checkpoint can be used again.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device, with a memory for ``ckpt_path``."""

    _ckpt_path: Any = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function`` on every rank of this machine."""
        self._ckpt_path = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def resume_checkpoint_path(self, trainer: pl.Trainer) -> str | None:
        """Path of the checkpoint that ``fit`` will resume from; None if it starts anew."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning has said the same already, when it resolved the path itself
            found = trainer._checkpoint_connector._select_ckpt_path(
                TrainerFn.FITTING, self._ckpt_path, model_provided=True, model_connected=True
            )
        return str(found) if found else None

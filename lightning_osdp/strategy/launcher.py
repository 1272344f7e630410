"""Start the ranks as Lightning does, and remember the checkpoint that the run resumes from.

Lightning tells a strategy the checkpoint only after ``setup``, when the plan is already applied. The launcher sees it
before, among the arguments of the function that it launches, so a plan in the checkpoint can be used again.
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

from lightning_osdp.errors import ConfigurationError


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
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def resume_checkpoint_path(self, trainer: pl.Trainer) -> str | None:
        """Return the path of the checkpoint that ``fit`` will resume from; None if it starts from scratch."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warned already when it resolved the path itself
            path = trainer._checkpoint_connector._select_ckpt_path(
                TrainerFn.FITTING, self._ckpt_path, model_provided=True, model_connected=True
            )
        return str(path) if path else None

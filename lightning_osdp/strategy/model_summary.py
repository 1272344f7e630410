"""Lightning's ModelSummary, made to count whole parameters instead of this rank's parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

UnshardedShapes = Callable[[], AbstractContextManager[None]]


def count_unsharded_parameters(trainer: pl.Trainer, unsharded_shapes: UnshardedShapes) -> None:
    """Has the trainer's ModelSummary callbacks run where parameters show their whole shapes.

    Not where the summary runs the model on an example input: that needs the values.

    Args:
        trainer: about to call its callbacks' ``on_fit_start``.
        unsharded_shapes: makes the context to run them in.
    """
    if trainer.lightning_module.example_input_array is not None:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            callback.on_fit_start = _wrap_in_context(unsharded_shapes, callback.on_fit_start)  # type: ignore[method-assign]


def _wrap_in_context(context: UnshardedShapes, function: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        with context():
            function(*args, **kwargs)

    return run

"""Make Lightning's ModelSummary count unsharded parameters instead of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary


def count_unsharded_parameters(trainer: pl.Trainer, unsharded_shapes: Callable[[], Any]) -> None:
    """Run the trainer's ModelSummary callbacks while parameters show their unsharded shapes.

    Nothing is done where the summary runs the model on an example input, which needs the values.

    Args:
        trainer: the Trainer, before it calls ``on_fit_start`` of its callbacks.
        unsharded_shapes: makes the context in which parameters show their unsharded shapes.
    """
    if trainer.lightning_module.example_input_array is not None:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            callback.on_fit_start = unsharded_shapes()(callback.on_fit_start)  # type: ignore[method-assign]

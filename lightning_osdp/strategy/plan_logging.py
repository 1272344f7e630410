"""What the Trainer's loggers get at the start: the plan, where they have a place for it, and the module's graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from lightning_osdp.engine.meta_init import is_meta
from lightning_osdp.errors import ConfigurationError, OSDPWarning, ShardingError, message_of
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.state.atomic_files import write_text

log = logging.getLogger(__name__)

ARTIFACT_NAME = "osdp_plan"


def write_and_log_plan(plan: ExecutionPlan, file: Path, loggers: Sequence[Logger]) -> None:
    """Write the plan to a file, and give it to each logger that takes files or texts; what fails is a warning.

    The other ranks train already, and the plan is on the screen.

    Args:
        plan: the plan.
        file: the file.
        loggers: the Trainer's loggers.
    """
    try:
        write_text(file, plan.to_json(), ExecutionPlan.is_plan)
    except (OSError, ConfigurationError) as error:
        warnings.warn(f"the plan can't be written to {file.parent}: {error}", OSDPWarning, stacklevel=3)
        return
    log.info("the plan is in %s (osdp explain FILE says why it is what it is)", file)
    for logger in loggers:
        try:
            _log_to(logger, plan, file)
        except Exception as error:  # whatever a logger's library raises: the run goes on, and the plan is in its file
            text = f"{type(logger).__name__} did not take the plan, which is in {file}: {message_of(error)}"
            warnings.warn(text, OSDPWarning, stacklevel=2)


def log_graphs(trainer: pl.Trainer, *, is_sharded: bool) -> None:
    """Let loggers trace the module before it is sharded, instead of after the strategy's setup.

    A module that can't be traced any more, or not yet, is a warning.

    Args:
        trainer: the Trainer, which would ask its loggers for that later.
        is_sharded: whether its module is sharded already.
    """
    module = trainer.lightning_module
    for logger in trainer.loggers if trainer.enable_autolog_hparams else ():
        if type(logger).log_graph is Logger.log_graph or not getattr(logger, "_log_graph", True):
            continue
        try:
            if is_sharded or is_meta(module):
                raise ShardingError("a module can't be traced while it is sharded, or has no values yet")
            logger.log_graph(module)
        except Exception as error:  # of the user's forward, or of a logger's library
            text = f"{type(logger).__name__} did not log the module's graph: {message_of(error)}"
            warnings.warn(text, OSDPWarning, stacklevel=2)
        logger.log_graph = partial(_skip_once, logger)  # type: ignore[method-assign]


def _skip_once(logger: Any, *args: Any, **kwargs: Any) -> None:
    """Stand for a logger's method when Lightning calls it."""
    del logger.log_graph


def _log_to(logger: Any, plan: ExecutionPlan, file: Path) -> None:
    """Log the plan by the methods that a logger's experiment has: none of the libraries is imported here."""
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "log_asset_data"):  # Comet
        experiment.log_asset_data(plan.to_json(), name=file.name)
    elif hasattr(experiment, "log_text") and hasattr(logger, "run_id"):  # MLflow
        experiment.log_text(logger.run_id, plan.to_json(), file.name)
    elif hasattr(experiment, "log_artifact"):  # Weights & Biases
        experiment.log_artifact(str(file), name=ARTIFACT_NAME, type="plan")
    elif hasattr(experiment, "add_text"):  # TensorBoard, in Markdown
        experiment.add_text(ARTIFACT_NAME, "\n".join(f"    {line}" for line in str(plan).splitlines()))
    elif hasattr(experiment, "get_structure"):  # Neptune
        experiment[ARTIFACT_NAME].upload(str(file))

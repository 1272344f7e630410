"""Run ``osdp fit | validate | test | predict``: LightningCLI with the strategy "osdp" as default."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_osdp.cli import offline_plan
from lightning_osdp.errors import OSDPWarning

SUBCOMMANDS = {
    "fit": "Train what a LightningCLI configuration says.",
    "validate": "Run one evaluation epoch over its validation data.",
    "test": "Run one evaluation epoch over its test data.",
    "predict": "Run inference on its data for prediction.",
}
"""Subcommands of LightningCLI, each with its purpose in one line."""


class _SaveConfig(SaveConfigCallback):
    """Saves the configuration over one that LightningCLI has saved, but not over the user's own file."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.already_saved:
            return
        path = Path(trainer.log_dir or ".") / self.config_filename  # a broadcast: on every rank
        is_foreign = path.is_file() and not path.read_text(errors="replace").startswith("# lightning.pytorch==")
        if trainer.strategy.broadcast(is_foreign):
            rank_zero_warn(f"the configuration is not saved: LightningCLI did not write {path}", category=OSDPWarning)
        else:
            super().setup(trainer, pl_module, stage)
        self.already_saved = True


def run(args: Sequence[str]) -> None:
    """Run LightningCLI.

    The current folder and those of configuration files are searched first for modules, as for a script that lies there.

    Args:
        args: a subcommand and its arguments.

    Raises:
        ConfigurationError: a configuration file can't be read.
        ArgumentError: an argument, or something in a configuration file, can't be used.
    """
    raises = {"exit_on_error": False}
    paths = list(_config_paths(args))
    for path in paths:
        offline_plan.read_yaml(path)  # LightningCLI's own error does not name the file
    sys.path[:0] = [str(Path.cwd()), *(str(path.parent) for path in paths)]
    with warnings.catch_warnings():
        # LightningCLI warns that args are given although the command line has some: they are the same.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        LightningCLI(
            args=list(args),
            trainer_defaults={"strategy": "osdp"},
            save_config_callback=_SaveConfig,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "osdp", **raises, **{name: dict(raises) for name in SUBCOMMANDS}},
        )


def _config_paths(args: Sequence[str]) -> Iterator[Path]:
    for index, word in enumerate(args):
        name, _, value = word.partition("=")
        if name in ("--config", "-c"):
            yield Path(value or next(iter(args[index + 1 :]), "")).resolve()

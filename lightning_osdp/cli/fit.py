"""Run ``osdp fit | validate | test | predict``: LightningCLI with the strategy "osdp" as default."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

SUBCOMMANDS = ("fit", "validate", "test", "predict")
"""Subcommands of LightningCLI."""


def run(args: Sequence[str]) -> None:
    """Run LightningCLI; errors in the arguments end the process with status 2, as always.

    The current folder and those of configuration files are searched first for modules, as for a script that lies there.

    Args:
        args: a subcommand and its arguments.
    """
    sys.path[:0] = [str(Path.cwd()), *_config_folders(args)]
    with warnings.catch_warnings():
        # LightningCLI warns that args are given although the command line has some: they are the same.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        LightningCLI(args=list(args), trainer_defaults={"strategy": "osdp"}, save_config_kwargs={"overwrite": True})


def _config_folders(args: Sequence[str]) -> Iterator[str]:
    for index, word in enumerate(args):
        name, _, value = word.partition("=")
        if name in ("--config", "-c"):
            path = value or next(iter(args[index + 1 :]), "")
            yield str(Path(path).resolve().parent)

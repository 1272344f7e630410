"""Plans what a LightningCLI configuration would train, in one process and without training it.

Lightning itself reads the file and takes the module and its data through their hooks, up to ``Strategy.setup``: there
the plan is made, by the same pipeline as in training (``autotune.pipeline``), and the run ends.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, get_loader
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_osdp.autotune import pipeline
from lightning_osdp.errors import ConfigurationError, OSDPError, OSDPWarning
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import CheckpointMemory
from lightning_osdp.strategy import arguments, offline
from lightning_osdp.strategy.error_text import describe_error
from lightning_osdp.strategy.planning_options import PlanningOptions

CONFIG_SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
"""Sections of the file that are read. Others, such as ``ckpt_path``, say how to run."""

PLANNING_ARGS = tuple(option.name for option in fields(PlanningOptions))
"""Arguments of ``OSDPStrategy`` that say what to plan."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "config": {"type": str, "required": True, "help": "the YAML that LightningCLI trains from"},
    "memory_limit": {"type": str, "help": "per device: 16GiB or 90% (default: what it has)"},
    "batch_size": {"type": int, "help": "per device, fixed (default: the file's, or searched)"},
    "max_batch_size": {"type": int, "help": "the largest that is considered"},
    "global_batch_size": {"type": int, "help": "over all devices, made exactly"},
    "cache": {"type": str, "help": "folder of measurements (default: the user's; '': none)"},
    "html": {"type": str, "help": "file for a page with the plan's pictures"},
}
"""Arguments that several commands have."""

BATCH_SIZE_ARGS = ("batch_size", "max_batch_size", "global_batch_size")
"""Those of ``ARGUMENTS`` that say which batch sizes may be tried."""

MakeTrainer = Callable[[pl.LightningModule, dict[str, Any]], pl.Trainer]
"""Makes a Trainer for a module from the file's arguments, but for ``strategy`` and ``accelerator``."""


@dataclass(frozen=True)
class TrainingConfig:
    """A configuration file, read but not built.

    Attributes:
        path: the path of the file, for errors.
        sections: those of ``CONFIG_SECTIONS`` that the file has.
        make_module: makes the module from its class and arguments; None: calls the class.
    """

    path: Path
    sections: Mapping[str, Any]
    make_module: Callable[..., pl.LightningModule] | None = None

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The arguments of the Trainer."""
        trainer = self.sections.get("trainer")
        return {} if trainer is None else trainer

    @property
    def accelerator(self) -> str:
        """The accelerator that training would have."""
        return str(self.trainer.get("accelerator") or "auto")

    @property
    def strategy(self) -> Mapping[str, Any]:
        """The arguments of OSDPStrategy; empty if the file has another strategy."""
        strategy = self.trainer.get("strategy")
        if not isinstance(strategy, Mapping) or not str(strategy.get("class_path")).endswith("OSDPStrategy"):
            return {}
        return strategy.get("init_args") or {}

    @property
    def planning_args(self) -> dict[str, Any]:
        """The arguments of OSDPStrategy that say what to plan."""
        return {name: self.strategy[name] for name in PLANNING_ARGS if self.strategy.get(name) is not None}

    @property
    def checkpoint_memory(self) -> CheckpointMemory:
        """How checkpoints are saved, whatever callbacks want to see of them."""
        is_full = (
            self.trainer.get("enable_checkpointing") is not False and self.strategy.get("save_format") != "sharded"
        )
        return "streamed" if is_full else "nothing"

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks that the file trains with; None if that depends on the machine."""
        devices = self.trainer.get("devices")
        if isinstance(devices, list):
            devices = len(devices)
        if isinstance(devices, bool) or not str(devices).isdecimal() or int(str(devices)) < 1:
            return None
        return int(str(devices)) * int(self.trainer.get("num_nodes") or 1)


def add_arguments(parser: ArgumentParser, *names: str) -> None:
    """Declare some of ``ARGUMENTS``."""
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", **ARGUMENTS[name])


def load_config(path: Path) -> TrainingConfig:
    """Read a LightningCLI YAML (or JSON) file; if it has a section ``fit``, that section is read.

    Raises:
        ConfigurationError: the file can't be read, or has no model.
    """
    data = read_yaml(path)
    if isinstance(data, dict) and isinstance(data.get("fit"), dict):
        data = data["fit"]
    if not isinstance(data, dict) or not data.get("model"):
        raise ConfigurationError(f"{path} has no section 'model': it is not a configuration of LightningCLI")
    sections = {name: _read_section(path, data[name]) for name in CONFIG_SECTIONS if data.get(name) is not None}
    config = TrainingConfig(path, sections)
    _check_trainer(config)
    return config


def _read_section(path: Path, section: Any) -> Any:
    """Return a section, which may be the name of a file of its own beside the configuration."""
    is_file = isinstance(section, str) and (path.parent / section).is_file()
    return read_yaml(path.parent / section) if is_file else section


def _check_trainer(config: TrainingConfig) -> None:
    """Refuse arguments that no Trainer takes, and that planning has no use for.

    Raises:
        ConfigurationError: names the argument.
    """
    if not isinstance(config.trainer, Mapping):
        raise ConfigurationError(f"{config.path}: its section trainer is {config.trainer!r:.80}, no mapping")
    devices, strategy = config.trainer.get("devices"), config.trainer.get("strategy")
    if not (devices in (None, "auto", "-1", -1) or isinstance(devices, list) or _is_count(devices)):
        raise ConfigurationError(f"{config.path}: trainer.devices={devices!r} is no number of devices")
    known = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if isinstance(config.trainer.get("accelerator"), str) and config.accelerator not in known:
        raise ConfigurationError(f"{config.path}: there is no accelerator {config.accelerator!r}")
    if isinstance(strategy, str) and strategy not in ("auto", *StrategyRegistry.available_strategies()):
        raise ConfigurationError(f"{config.path}: there is no strategy {strategy!r}")


def _is_count(devices: Any) -> bool:
    """Return whether a value is a positive number, or several numbers of devices as text."""
    parts = str(devices).split(",")
    return not isinstance(devices, bool) and all(map(str.isdecimal, parts)) and (len(parts) > 1 or int(parts[0]) > 0)


def read_yaml(path: Path) -> Any:
    """Read a YAML (or JSON) file.

    Raises:
        ConfigurationError: it can't be read.
    """
    try:
        return get_loader("yaml")(path.read_text())
    except Exception as error:  # the loader's errors are those of whatever library parses YAML
        text = " ".join(str(error).split())[:400]
        raise ConfigurationError(f"the config file {path} can't be read: {text}") from error


def plan_from_config(
    config: TrainingConfig, devices: int | None = None, **planning_args: Any
) -> pipeline.PlanningResult:
    """Make the plan that training by ``config`` would make, for links that were measured elsewhere.

    Args:
        config: what to train.
        devices: devices per node, instead of the cluster's; without a cluster only 1 can be planned for.
        **planning_args: arguments of ``OSDPStrategy`` (``PLANNING_ARGS``), instead of the file's; None for the file's.

    Raises:
        ConfigurationError: something can't be used, or can't be built.
        InfeasibleError: nothing fits.
        TraceError: the training step can't be traced.
    """
    options = _planning_options(config, planning_args)
    cluster = _resolve_cluster(config, arguments.read_cluster(options.cluster), devices)
    options, device = replace(options, cluster=cluster), offline.measuring_device(config.accelerator, cluster)
    limit = offline.prepare_device(device, cluster, options)

    def plan_in_trainer(trainer: pl.Trainer) -> pipeline.PlanningResult:
        return offline.plan_in_setup(trainer, options, limit, device, config.checkpoint_memory)

    result = _run_until_setup(config, device, plan_in_trainer)
    assert isinstance(result, pipeline.PlanningResult)
    return result


def _planning_options(config: TrainingConfig, given: Mapping[str, Any]) -> PlanningOptions:
    named = {name: value for name, value in given.items() if value is not None}
    return PlanningOptions(**config.planning_args | named)


def profile_from_config(config: TrainingConfig, **planning_args: Any) -> offline.ProfiledRun:
    """Trace the file's model on fake tensors: nothing is allocated but what its own code allocates.

    Args:
        config: what to train.
        **planning_args: as in ``plan_from_config``.

    Returns:
        The model, with the FLOPs and bytes of its precision setting, whatever devices are here; what the file does
        not leave to a search; and the batch sizes that it and its data allow.

    Raises:
        ConfigurationError: something can't be built.
        TraceError: the training step can't be traced.
    """
    options = _planning_options(config, planning_args)

    def profile_in_trainer(trainer: pl.Trainer) -> offline.ProfiledRun:
        return offline.profile_in_setup(trainer, options)

    result = _run_until_setup(config, torch.device("cpu"), profile_in_trainer)
    assert isinstance(result, offline.ProfiledRun)
    return result


def fit_config(config: TrainingConfig, make_trainer: MakeTrainer) -> pl.Trainer:
    """Train what the file says, with another Trainer, and return it.

    Raises:
        ConfigurationError: something can't be built, or its own code fails.
    """
    with _as_configuration_error(config), offline.quiet_lightning():
        cli = _ConfigCLI(config, make_trainer)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.trainer


def _run_until_setup(config: TrainingConfig, device: torch.device, work: Callable[[pl.Trainer], Any]) -> Any:
    """Return what ``work`` makes of the Trainer in ``Strategy.setup``."""
    strategy = offline.PlanOnlyStrategy(device, work)
    accelerator = "cuda" if device.type == "cuda" else "cpu"

    def make_trainer(_: pl.LightningModule, arguments: dict[str, Any]) -> pl.Trainer:
        strategy.callbacks = arguments.pop("callbacks")
        return pl.Trainer(**arguments | offline.QUIET_TRAINER_ARGS, strategy=strategy, accelerator=accelerator)

    with redirect_stdout(sys.stderr):  # what the module's own code prints is no part of our output
        fit_config(config, make_trainer)
    return strategy.result


class _ConfigCLI(LightningCLI):
    """Builds module, data and a Trainer of one's own from the file, as LightningCLI does."""

    def __init__(self, config: TrainingConfig, make_trainer: MakeTrainer) -> None:
        self._make_trainer, self._make_module = make_trainer, config.make_module
        with warnings.catch_warnings():
            # Our own command line is not LightningCLI's.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            # Lightning 2.6 calls what jsonargparse 4.53 is about to rename.
            warnings.filterwarnings("ignore", message=r"(?s).*jsonargparse", category=DeprecationWarning)
            super().__init__(
                run=False,
                args=dict(config.sections),
                save_config_callback=None,
                seed_everything_default=False,
                parser_kwargs={"exit_on_error": False},
            )

    @override
    def before_instantiate_classes(self) -> None:
        for name in ("strategy", "logger", "profiler", "plugins"):
            self.config.trainer[name] = None
        if self._make_module is not None:
            self.parser.add_instantiator(self._make_module, pl.LightningModule, subclasses=True, prepend=True)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        arguments = dict(vars(self.config_init.trainer))
        callbacks = arguments["callbacks"] or []
        arguments["callbacks"] = callbacks if isinstance(callbacks, list) else [callbacks]
        for name in ("strategy", "accelerator"):
            arguments.pop(name)
        return self._make_trainer(self.model, arguments)


def _resolve_cluster(config: TrainingConfig, cluster: Cluster | None, devices: int | None) -> Cluster:
    """Return the hardware to plan for.

    Raises:
        ConfigurationError: the links between ranks are not known.
    """
    if cluster is None:
        ranks = devices or config.num_ranks
        if ranks == 1:
            return offline.this_machine(config.accelerator)
        number = str(ranks) if ranks else "N"
        raise ConfigurationError(
            "the links between ranks are not known, and one process can't measure them: run `osdp profile --devices "
            f"{number} --out cluster.json` and pass --cluster cluster.json"
        )
    if devices is not None:
        return cluster.model_copy(update={"devices_per_node": devices})
    if config.num_ranks not in (None, cluster.ranks):
        warnings.warn(
            f"{config.path} trains on {config.num_ranks} ranks, the cluster has {cluster.ranks}: the plan is for the "
            "cluster's (--devices N plans for N per node)",
            OSDPWarning,
            stacklevel=3,
        )
    return cluster


@contextmanager
def _as_configuration_error(config: TrainingConfig) -> Iterator[None]:
    """Raise errors of the user's code and of the file as one of ours, with the line that raised them.

    Raises:
        ConfigurationError: instead of any error that is not ours.
    """
    try:
        yield
    except OSDPError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):  # Lightning's for Ctrl-C
            raise error.__context__ from None
        raise ConfigurationError(f"{config.path}: {describe_error(error)}") from error

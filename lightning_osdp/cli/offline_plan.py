"""Plans what a LightningCLI configuration would train, in one process and without training it.

Lightning itself reads the file and takes the module and its data through their hooks, up to the point where a strategy
would set up training: there the plan is made and the run ends.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import get_loader
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

from lightning_osdp.autotune import measure, pipeline
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.backend import allocator, memory
from lightning_osdp.errors import ConfigurationError, OSDPError, OSDPWarning
from lightning_osdp.planning.search.batch_size_search import BatchSizePolicy
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.formatting import parse_bytes
from lightning_osdp.planning.spec.model import CheckpointMemory, ModelProfile, NonTrainingWork
from lightning_osdp.strategy import arguments
from lightning_osdp.strategy.dataloader import TrainData

CONFIG_SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
"""What counts of the file; ``ckpt_path`` and the like say how to run, not what."""

DISABLED_TRAINER_ARGS: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 1,
    "logger": False,
    "callbacks": None,
    "profiler": None,
    "fast_dev_run": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings of the Trainer that would leave traces, or that speak of processes that are not there."""

PLANNING_ARGS = (
    "memory_limit",
    "batch_size",
    "max_batch_size",
    "global_batch_size",
    "cluster",
    "sharding_group",
    "cache",
    "trial_steps",
    "update_in_backward",
)
"""Arguments of ``OSDPStrategy`` that say what to plan."""


@dataclass(frozen=True)
class TrainingConfig:
    """A configuration file, read but not built.

    Attributes:
        path: of the file, for errors.
        sections: those of ``CONFIG_SECTIONS`` that it has.
    """

    path: Path
    sections: Mapping[str, Any]

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The Trainer's arguments."""
        return self.sections.get("trainer") or {}

    @property
    def strategy(self) -> Mapping[str, Any]:
        """The arguments of OSDPStrategy, where that is its strategy."""
        strategy = self.trainer.get("strategy")
        if not isinstance(strategy, Mapping) or not str(strategy.get("class_path")).endswith("OSDPStrategy"):
            return {}
        return strategy.get("init_args") or {}

    @property
    def planning_args(self) -> dict[str, Any]:
        """What it asks of OSDPStrategy, as far as that says what to plan."""
        return {name: self.strategy[name] for name in PLANNING_ARGS if self.strategy.get(name) is not None}

    @property
    def checkpoint_memory(self) -> CheckpointMemory:
        """How it saves checkpoints, whatever its callbacks want to see of them."""
        whole = self.trainer.get("enable_checkpointing") is not False and self.strategy.get("save_format") != "sharded"
        return "streamed" if whole else "nothing"

    @property
    def callback_constraints(self) -> SearchConstraints:
        """What it asks of the search by its OSDPCallback; nothing if it has none.

        Raises:
            ConfigurationError: a value can't be used.
        """
        callbacks = self.trainer.get("callbacks") or []
        for one in callbacks if isinstance(callbacks, list) else [callbacks]:
            if isinstance(one, Mapping) and str(one.get("class_path")).endswith("OSDPCallback"):
                given = one.get("init_args") or {}
                patterns = given.get("activation_checkpointing", "auto")
                return SearchConstraints(
                    given.get("slice_granularity", "auto"), tuple(patterns) if isinstance(patterns, list) else patterns
                )
        return UNCONSTRAINED

    @property
    def num_ranks(self) -> int | None:
        """Processes that it would train with; None where only the machine says so."""
        devices = self.trainer.get("devices")
        if isinstance(devices, list):
            devices = len(devices)
        if isinstance(devices, bool) or not str(devices).isdecimal() or int(str(devices)) < 1:
            return None
        return int(str(devices)) * int(self.trainer.get("num_nodes") or 1)


def load_config(path: Path) -> TrainingConfig:
    """Reads a LightningCLI YAML (or JSON) file; one with a section ``fit`` is taken to mean that.

    Raises:
        ConfigurationError: it can't be read, or says nothing of a model.
    """
    try:
        data = get_loader("yaml")(path.read_text())
    except Exception as error:  # the loader's errors are those of whatever library parses YAML
        raise ConfigurationError(f"the config file {path} can't be read: {_to_one_line(error)}") from error
    if isinstance(data, dict) and isinstance(data.get("fit"), dict):
        data = data["fit"]
    if not isinstance(data, dict) or not data.get("model"):
        raise ConfigurationError(f"{path} has no section 'model': it is not a configuration of LightningCLI")
    return TrainingConfig(path, {name: data[name] for name in CONFIG_SECTIONS if name in data})


def plan_from_config(
    config: TrainingConfig, devices: int | None = None, **planning_args: Any
) -> pipeline.PlanningResult:
    """Makes the plan that training by ``config`` would make, but for links that are measured elsewhere.

    Args:
        config: what to train.
        devices: per node, instead of the cluster's; without a cluster 1 is all that can be planned.
        **planning_args: arguments of ``OSDPStrategy`` (``PLANNING_ARGS``), instead of the recipe's; None: the recipe's.

    Raises:
        ConfigurationError: something can't be used, or can't be built.
        InfeasibleError: nothing fits.
        TraceError: the training step can't be read.
    """
    wanted = config.planning_args | {name: value for name, value in planning_args.items() if value is not None}
    cluster = _resolve_cluster(config, arguments.read_cluster(wanted.get("cluster")), devices)
    device = _measuring_device(config, cluster)
    if device.type == "cpu":
        allocator.configure(device)
        _set_num_threads_if_needed(cluster.devices_per_node)
    limit = wanted.get("memory_limit", "auto")
    limit_bytes = memory.memory_limit(device, cluster.devices_per_node) if limit == "auto" else parse_bytes(limit)
    batch_size = wanted.get("batch_size", "auto")
    rule = BatchSizePolicy(
        arguments.validate_positive("batch_size", None if batch_size == "auto" else batch_size),
        arguments.validate_positive("max_batch_size", wanted.get("max_batch_size")),
        arguments.validate_positive("global_batch_size", wanted.get("global_batch_size")),
    )
    folder = measure.cache_folder(wanted.get("cache"))

    def plan_in_trainer(trainer: pl.Trainer) -> pipeline.PlanningResult:
        return _plan(trainer, cluster, device, rule, limit_bytes, folder, config, wanted)

    outcome = _run_until_setup(config, device, plan_in_trainer)
    assert isinstance(outcome, pipeline.PlanningResult)
    return outcome


def profile_from_config(config: TrainingConfig) -> tuple[ModelProfile, SearchConstraints]:
    """Reads the recipe's model on fake tensors: nothing of it is allocated but what its own code allocates.

    Returns:
        The model, with the FLOPs and bytes of its precision setting, whatever devices are here; and what the recipe
        does not leave to a search.

    Raises:
        ConfigurationError: something can't be built.
        TraceError: the training step can't be read.
    """
    device = torch.device("cpu")

    def profile_in_trainer(trainer: pl.Trainer) -> tuple[ModelProfile, SearchConstraints]:
        module = trainer.lightning_module
        batch, batch_size = TrainData(trainer, module).first_batch()
        context = trainer.precision_plugin.train_step_context
        model = pipeline.profile_model(module, batch, batch_size, device, context).model_profile
        return model, _search_constraints(trainer, config, config.planning_args, model)

    found: tuple[ModelProfile, SearchConstraints] = _run_until_setup(config, device, profile_in_trainer)
    return found


def _run_until_setup(config: TrainingConfig, device: torch.device, work: Callable[[pl.Trainer], Any]) -> Any:
    """What ``work`` makes of the Trainer where a strategy would set up training."""
    strategy = _PlanOnlyStrategy(device, work)
    with _as_configuration_error(config), _quiet_lightning():
        parts = _ConfigCLI(config, strategy)
        parts.trainer.fit(parts.model, datamodule=parts.datamodule)
    return strategy.result


def _plan(
    trainer: pl.Trainer,
    cluster: Cluster,
    device: torch.device,
    policy: BatchSizePolicy,
    limit_bytes: int,
    cache: Path | None,
    config: TrainingConfig,
    overrides: Mapping[str, Any],
) -> pipeline.PlanningResult:
    """What ``OSDPStrategy`` does before training by ``config`` with its arguments ``overrides`` (``PLANNING_ARGS``), on a cluster
    that is known."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    arguments.reject_unsupported(trainer, precision)
    data = TrainData(trainer, module)
    batch, batch_size = data.first_batch()
    between = NonTrainingWork(
        checkpoint_memory=config.checkpoint_memory, evaluation_batch_size=data.evaluation_batch_size()
    )
    traced = pipeline.profile_model(module, batch, batch_size, device, precision.train_step_context, between, cache)
    wished = BatchSizePolicy(
        policy.batch_size, policy.max_batch_size, policy.global_batch_size, int(trainer.accumulate_grad_batches)
    )
    allowed = data.batch_size_policy(batch_size, wished, cluster.ranks)
    model_bytes = traced.model_profile.parameter_bytes + traced.model_profile.buffer_bytes
    on_device = model_bytes if device.type == "cpu" else 0
    trial_steps = overrides.get("trial_steps", True)
    stage = TrialContext(module, batch, batch_size, device, precision.train_step_context) if trial_steps else None
    return pipeline.plan_offline(
        traced,
        cluster,
        device,
        allowed,
        limit_bytes,
        on_device,
        cache=cache,
        constraints=_search_constraints(trainer, config, overrides, traced.model_profile),
        non_training=between,
        trial_context=stage,
    )


def _search_constraints(
    trainer: pl.Trainer, config: TrainingConfig, overrides: Mapping[str, Any], model: ModelProfile
) -> SearchConstraints:
    """What is not left to the search where ``trainer`` trains ``model`` by ``config`` with arguments ``overrides``."""
    why_not = arguments.in_backward_blocker(
        trainer,
        trainer.precision_plugin,
        is_allowed=overrides.get("update_in_backward", True),
        per_parameter=model.optimizer_step.per_parameter,
    )
    group = overrides.get("sharding_group", "auto")
    return replace(config.callback_constraints, sharding_group=group, update_in_backward=not why_not)


class _PlanOnlyStrategy(SingleDeviceStrategy):
    """Plans where a strategy would set up training, and ends the run there.

    Attributes:
        callbacks: those of the run that is planned. The Trainer has them while ``work`` looks at it, and calls none.
        result: of ``work``.
    """

    def __init__(self, device: torch.device, work: Callable[[pl.Trainer], Any]) -> None:
        super().__init__(device=device)
        self._work = work
        self.callbacks: list[pl.Callback] = []
        self.result: Any = None

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        called = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = self.callbacks  # type: ignore[attr-defined]
        try:
            self.result = self._work(trainer)
        finally:
            trainer.callbacks = called  # type: ignore[attr-defined]
        raise _TunerExitException  # Lightning's own way to end a run early: it tears down and returns


class _ConfigCLI(LightningCLI):
    """Module, data and a Trainer for one process, as LightningCLI builds them from the recipe."""

    def __init__(self, config: TrainingConfig, strategy: _PlanOnlyStrategy) -> None:
        self._strategy = strategy
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
        for name in ("strategy", "logger", "profiler"):
            self.config.trainer[name] = None

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        callbacks = self.config_init.trainer.callbacks or []
        self._strategy.callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        accelerator = "cuda" if self._strategy.root_device.type == "cuda" else "cpu"
        return super().instantiate_trainer(accelerator=accelerator, strategy=self._strategy, **DISABLED_TRAINER_ARGS)


def _resolve_cluster(config: TrainingConfig, cluster: Cluster | None, devices: int | None) -> Cluster:
    """The hardware to plan for.

    Raises:
        ConfigurationError: it is not known.
    """
    if cluster is None:
        ranks = devices or config.num_ranks
        if ranks == 1:
            here = _local_device(config)
            backend = "gloo" if here.type == "cpu" else "nccl"
            return Cluster(devices_per_node=1, device=measure.device_name(here), backend=backend, link=measure.NO_LINK)
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


def _local_device(config: TrainingConfig) -> torch.device:
    """The device of this machine that the recipe would use."""
    wanted = config.trainer.get("accelerator") or "auto"
    cuda = default_device_type() == "cuda" and wanted in ("auto", "gpu", "cuda")
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def default_device_type() -> str:
    """``cuda`` where there is a device, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _measuring_device(config: TrainingConfig, cluster: Cluster) -> torch.device:
    """Where compute is measured: on this machine, which has to be like the cluster's.

    Raises:
        ConfigurationError: the cluster's devices are of another type.
    """
    wanted = cluster.device.split(":")[0]
    if wanted == "cpu":
        return torch.device("cpu")
    here = _local_device(config)
    if here.type != wanted:
        raise ConfigurationError(
            f"the cluster's devices are {cluster.device}, here is only {measure.device_name(here)}: compute has "
            "to be measured on a device like the cluster's"
        )
    return here


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without Lightning's words on devices and tips; its warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _as_configuration_error(config: TrainingConfig) -> Iterator[None]:
    """Errors of the user's own code and of the file as one of ours, with the place where they arose.

    Raises:
        ConfigurationError: instead of any error but ours.
    """
    try:
        yield
    except OSDPError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(sys.exc_info()[2])[-1]
        raise ConfigurationError(
            f"{config.path}: {type(error).__name__}: {_to_one_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
        ) from error


def _to_one_line(error: Exception) -> str:
    """Its text without line breaks, and without end: parsers quote whole files."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]}..."

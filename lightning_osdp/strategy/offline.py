"""Plan in one process without training: ``lightning_osdp.plan``, and what ``osdp plan`` and ``osdp simulate`` share.

Lightning takes the module and its data through their hooks up to ``Strategy.setup``. There the plan is made, by the
same pipeline as in training (``autotune.pipeline``), and the run ends.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import nn
from typing_extensions import override

from lightning_osdp.autotune import pipeline
from lightning_osdp.autotune.ranks import RankGroup, current_cluster, device_name
from lightning_osdp.autotune.startup_budget import StartupBudget
from lightning_osdp.backend import allocator
from lightning_osdp.backend.memory import MemoryLimit
from lightning_osdp.errors import ConfigurationError, OSDPWarning, check_kind, format_error
from lightning_osdp.planning.search.baselines import find_baselines
from lightning_osdp.planning.search.plan_selection import select_plan
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.constraints import UNCONSTRAINED, SearchConstraints
from lightning_osdp.planning.spec.model import CheckpointMemory, ModelProfile, NonTrainingWork
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.problem import Problem
from lightning_osdp.planning.whatif import hardware as whatif_hardware
from lightning_osdp.planning.whatif.simulate import problem_for_hardware
from lightning_osdp.profiling.tracing.isolation import restored
from lightning_osdp.strategy import arguments
from lightning_osdp.strategy.callback import OSDPCallback, find_own_callback
from lightning_osdp.strategy.planning_options import PlanningOptions
from lightning_osdp.strategy.weight_averages import count_averaged_copies

QUIET_TRAINER_ARGS: dict[str, Any] = {
    "num_nodes": 1,
    "devices": 1,
    "logger": False,
    "profiler": None,
    "fast_dev_run": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that neither writes files nor starts processes."""

DTYPES = {"bf16": "bf16", "16": "fp16"}
"""The type of matrix products by the beginning of a Trainer's ``precision``; that of the parameters for all others."""

PARAMETER_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The type of matrix products by that of the parameters; ``fp32`` for all others."""


def plan(
    module: pl.LightningModule,
    data: Any = None,
    *,
    devices: int | None = None,
    hardware: str | Path | None = None,
    callback: OSDPCallback | None = None,
    trainer_args: dict[str, Any] | None = None,
    **options: Any,
) -> ExecutionPlan:
    """Make a plan in this one process, without training, and return it.

    With ``hardware`` times are estimated from its description, and nothing is measured. Without it, compute is measured
    on this machine, as training would; with several ranks the links have to be known (``cluster``).

    Args:
        module: the module to train. It stays as it is; what it builds in ``configure_model`` is built on the meta
            device, takes no memory, and is taken away again.
        data: a LightningDataModule or a data loader; None for the module's own ``train_dataloader``.
        devices: number of devices: all in all with ``hardware`` (None: all it has), per node with a ``cluster``.
        hardware: a name such as ``"h100-80gb-nvlink"``, or the path of a hardware file.
        callback: an OSDPCallback with constraints of the search.
        trainer_args: arguments of the Trainer that training would have, such as ``precision``,
            ``accumulate_grad_batches`` or ``gradient_clip_val``.
        **options: arguments of OSDPStrategy about planning, such as ``memory_limit``, ``batch_size`` or ``cluster``.

    Raises:
        ConfigurationError: an argument can't be used.
        InfeasibleError: nothing fits.
        TraceError: the training step can't be traced.
    """
    settings = _planning_options(options)
    devices = arguments.validate_positive("devices", devices)
    check_kind("plan()", module, pl.LightningModule, "a LightningModule")
    trainer_args = _complete_trainer_args(trainer_args, callback)
    if hardware is not None:
        if settings.cluster is not None:
            raise ConfigurationError("hardware and cluster both say what to plan for: give one of them")
        return _plan_for_hardware(module, data, trainer_args, settings, hardware, devices)
    cluster = arguments.read_cluster(settings.cluster)
    accelerator = str(trainer_args.get("accelerator", "auto"))
    if cluster is None:
        if devices not in (None, 1):
            raise ConfigurationError(
                f"the links between {devices} devices are not known, and one process can't measure them: give "
                "hardware=..., or cluster=... with a file of `osdp profile`"
            )
        cluster = this_machine(accelerator)
    elif devices is not None:
        cluster = cluster.model_copy(update={"devices_per_node": devices})
    device = measuring_device(accelerator, cluster)
    limit = prepare_device(device, cluster, settings)
    settings = replace(settings, cluster=cluster)

    def plan_in_trainer(trainer: pl.Trainer) -> ExecutionPlan:
        return plan_in_setup(trainer, settings, limit, device, "streamed").plan

    result: ExecutionPlan = _run(module, data, trainer_args, device, plan_in_trainer)
    return result


def _complete_trainer_args(given: dict[str, Any] | None, callback: OSDPCallback | None) -> dict[str, Any]:
    """Return the Trainer's arguments, checked, with a list of all callbacks."""
    check_kind("trainer_args", given, (Mapping, NoneType), "a dict of arguments of the Trainer")
    check_kind("callback", callback, (OSDPCallback, NoneType), "an OSDPCallback")
    trainer_args = dict(given or {})
    for name in ("strategy", "devices", "num_nodes"):
        if trainer_args.pop(name, None) not in (None, "auto", "osdp"):
            raise ConfigurationError(
                f"trainer_args: {name} is not read. plan() itself takes devices, hardware or cluster, and the options "
                "of OSDPStrategy"
            )
    callbacks = trainer_args.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    for each in callbacks:
        check_kind("trainer_args['callbacks']", each, pl.Callback, "callbacks")
    return trainer_args | {"callbacks": [callback] * (callback is not None) + callbacks}


def _planning_options(options: dict[str, Any]) -> PlanningOptions:
    known = [field.name for field in fields(PlanningOptions) if field.init]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigurationError(
            f"plan() takes no {unknown[0]!r}: arguments of the Trainer, such as precision, are given as "
            f"trainer_args={{{unknown[0]!r}: ...}}; of OSDPStrategy those about planning are taken: {', '.join(known)}"
        )
    return PlanningOptions(**options)


def _plan_for_hardware(
    module: pl.LightningModule,
    data: Any,
    trainer_args: dict[str, Any],
    options: PlanningOptions,
    hardware: str | Path,
    devices: int | None,
) -> ExecutionPlan:
    described = whatif_hardware.load(hardware)
    num_devices = devices or described.devices
    whatif_hardware.build_cluster(described, num_devices)  # refused here, before the step is traced

    run: ProfiledRun = _run(
        module, data, trainer_args, torch.device("cpu"), lambda trainer: profile_in_setup(trainer, options)
    )
    policy = run.policy(num_devices)
    limit_bytes = options.memory_limit_bytes or described.usable_bytes(options.memory_share)
    dtype = run.matmul_dtype(trainer_args.get("precision"), described)
    problem = run.problem_on(described, num_devices, limit_bytes, dtype)
    found = select_plan(problem, policy, ())
    return found.model_copy(update={"baselines": find_baselines(found, problem, policy)})


def _run(
    module: pl.LightningModule, data: Any, trainer_args: dict[str, Any], device: torch.device, work: Callable[..., Any]
) -> Any:
    """Return what ``work`` makes of a Trainer in ``Strategy.setup``; module and data are as before afterwards."""
    strategy = PlanOnlyStrategy(device, work)
    accelerator = "cuda" if device.type == "cuda" else "cpu"
    own = {name: value for name, value in trainer_args.items() if name not in ("callbacks", "accelerator")}
    if not {"max_epochs", "max_steps", "max_time"}.intersection(own):
        own["max_epochs"] = 1000  # Lightning's own default, about which it warns
    strategy.callbacks = trainer_args["callbacks"]
    # The caller's code may run where gradients are off.
    with quiet_lightning(), torch.inference_mode(False), torch.enable_grad():
        try:
            trainer = pl.Trainer(**own | QUIET_TRAINER_ARGS, strategy=strategy, accelerator=accelerator)
        except Exception as error:  # Lightning's, of whatever class
            raise ConfigurationError(f"trainer_args: the Trainer refuses them: {format_error(error)}") from error
        is_datamodule = isinstance(data, pl.LightningDataModule)
        before = module._trainer, data.trainer if is_datamodule else None
        try:
            with restored(module, *[data] * is_datamodule):  # training has to build what has values
                trainer.fit(module, datamodule=data) if is_datamodule else trainer.fit(module, data)
        finally:
            module.trainer = before[0]
            if is_datamodule:
                data.trainer = before[1]
    return strategy.result


def prepare_device(device: torch.device, cluster: Cluster, options: PlanningOptions) -> MemoryLimit:
    """Set the process up as a rank would be, and return its memory limit.

    It is read before the model is built: the limit counts what is free now, which the model then takes from.
    """
    if device.type == "cpu":
        allocator.configure(device)
        _set_num_threads_if_needed(cluster.devices_per_node)
    local_ranks = cluster.devices_per_node
    return MemoryLimit(device, local_ranks, user_limit=options.limit_on(device, local_ranks).current())


@dataclass(frozen=True)
class ProfiledRun:
    """What is known of a run without measuring anything.

    Attributes:
        model: the traced module.
        constraints: what is not left to a search.
        policy: returns the batch sizes that a number of ranks may try: as asked for, within what the data allow.
        averages: what averages of the weights need.
        parameter_dtype: the type of most parameters: ``fp32``, ``fp16`` or ``bf16``.
    """

    model: ModelProfile
    constraints: SearchConstraints
    policy: Callable[[int], BatchSizePolicy]
    averages: NonTrainingWork
    parameter_dtype: str = "fp32"

    def problem_on(self, hardware: whatif_hardware.Hardware, devices: int, limit_bytes: int, dtype: str) -> Problem:
        """Return the problem of this run on described hardware; arguments as in ``problem_for_hardware``."""
        problem = problem_for_hardware(self.model, hardware, devices, limit_bytes, dtype, self.constraints)
        return replace(problem, non_training=self.averages, overhead_bytes=self.averages.copied_bytes)

    def matmul_dtype(self, precision: Any, hardware: whatif_hardware.Hardware) -> str:
        """Return the type of matrix products under a Trainer's ``precision``.

        Warns where the parameters are of a type that the hardware does not compute in, and no precision says so.
        """
        asked = next((dtype for prefix, dtype in DTYPES.items() if str(precision or "").startswith(prefix)), None)
        if asked is None and self.parameter_dtype not in ("fp32", *hardware.peak_flops):
            warnings.warn(
                f"the parameters are {self.parameter_dtype}, which {hardware.device} does not compute in: the times of "
                "this plan are those of fp32",
                OSDPWarning,
                stacklevel=2,
            )
            return "fp32"
        return asked or self.parameter_dtype


def profile_in_setup(trainer: pl.Trainer, options: PlanningOptions) -> ProfiledRun:
    """Trace the Trainer's module on fake tensors, unless it is one that training would refuse."""
    arguments.reject_unsupported(trainer, trainer.precision_plugin)
    data, context = options.read_step(trainer, torch.device("cpu"))
    own_constraints = _callback_constraints(trainer)
    traced = pipeline.profile_model(options.with_tensor_degrees(context, own_constraints))
    traced = options.with_reduce_dtype(traced)
    blocker = options.in_backward_blocker(trainer, traced)
    searched = options.constraints(own_constraints, blocker, context.device)
    present = data.loader_batch_size or context.batch_size

    def policy(ranks: int) -> BatchSizePolicy:
        asked = options.policy_with_kept_sizes(trainer, present, ranks)
        asked = asked.restricted_to(traced.model_profile.only_batch_size)
        is_fixed = asked.batch_size is not None
        return asked if is_fixed else data.bounded_policy(present, asked, ranks, options.min_steps_per_epoch)

    averages = count_averaged_copies(trainer, context.device, NonTrainingWork())
    dtype = _parameter_dtype(trainer.lightning_module)
    return ProfiledRun(traced.model_profile, searched, policy, averages, dtype)


def _parameter_dtype(module: pl.LightningModule) -> str:
    """Return the type of most elements of the parameters."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point() and not nn.parameter.is_lazy(parameter):
            elements[parameter.dtype] += parameter.numel()
    return PARAMETER_DTYPES.get(max(elements, key=elements.__getitem__, default=torch.float32), "fp32")


def plan_in_setup(
    trainer: pl.Trainer,
    options: PlanningOptions,
    limit: MemoryLimit,
    device: torch.device,
    checkpoint_memory: CheckpointMemory,
) -> pipeline.PlanningResult:
    """Plan as ``OSDPStrategy`` does before training, for the cluster of ``options``."""
    cluster = options.cluster
    assert isinstance(cluster, Cluster)
    arguments.reject_unsupported(trainer, trainer.precision_plugin)
    data, context = options.read_step(trainer, device)
    non_training = NonTrainingWork(
        checkpoint_memory=checkpoint_memory, evaluation_batch_size=data.evaluation_batch_size()
    )
    non_training = count_averaged_copies(trainer, device, non_training)
    cache, own_constraints = options.cache_folder, _callback_constraints(trainer)
    context = options.with_tensor_degrees(context, own_constraints, cluster)
    ranks = RankGroup.single(device)
    traced = pipeline.profile_model_on_ranks(ranks, context, non_training, cache)
    traced = options.with_reduce_dtype(traced)
    blocker = options.in_backward_blocker(trainer, traced)
    constraints = options.constraints(own_constraints, blocker, device)
    facts = (trainer, data, context.batch_size, cluster.ranks, limit, constraints, non_training)
    request = options.request(*facts, traced.model_profile.only_batch_size)
    budget, step = StartupBudget.unlimited(ranks), context if options.trial_steps else None
    return pipeline.autotune(traced, request, ranks, budget, cache=cache, trial_context=step)


def _callback_constraints(trainer: pl.Trainer) -> SearchConstraints:
    """Return the constraints of the Trainer's OSDPCallback; none if it has no such callback."""
    found = find_own_callback(trainer)
    return UNCONSTRAINED if found is None else found.constraints


class PlanOnlyStrategy(SingleDeviceStrategy):
    """A strategy that plans in ``setup`` and ends the run there; ``configure_model`` builds on the meta device.

    Attributes:
        callbacks: the callbacks of the planned run. The Trainer has them while ``work`` runs, and calls none.
        result: the result of ``work``.
    """

    def __init__(self, device: torch.device, work: Callable[[pl.Trainer], Any]) -> None:
        super().__init__(device=device)
        self._work = work
        self.callbacks: list[pl.Callback] = []
        self.result: Any = None

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make the tensors of ``configure_model`` without memory: a plan needs their shapes alone."""
        try:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
        except (RuntimeError, TypeError) as error:  # of item(), tolist(), numpy(), a copy to the host
            if "meta" not in str(error):
                raise
            raise ConfigurationError(
                f"configure_model reads values of tensors, which a plan builds without any: {format_error(error)}. "
                "Make those on the host, as torch.linspace(..., device='cpu') does, or build the module in __init__"
            ) from error

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        own_callbacks = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = self.callbacks  # type: ignore[attr-defined]
        try:
            with _converted(trainer.lightning_module, self.precision_plugin):
                self.result = self._work(trainer)
        finally:
            trainer.callbacks = own_callbacks  # type: ignore[attr-defined]
        raise _TunerExitException  # Lightning's own way to end a run early: it tears down and returns

    @override
    def teardown(self) -> None:
        """Leave the module where it is: on the meta device it can't be moved."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()


@contextmanager
def _converted(module: pl.LightningModule, precision: Precision) -> Iterator[None]:
    """Give a module the data type in which training with ``precision`` holds it, within the block."""
    parameters = [(parameter, parameter.data) for parameter in module.parameters()]
    inner_modules = [(inner, dict(inner._buffers), vars(inner).get("_dtype")) for inner in module.modules()]
    try:
        precision.convert_module(module)
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for inner, buffers, dtype in inner_modules:
            inner._buffers.update(buffers)
            if dtype is not None:  # of a LightningModule
                inner._dtype = dtype


def local_device(accelerator: str) -> torch.device:
    """Return the device of this machine that training with the Trainer's ``accelerator`` would use."""
    uses_cuda = default_device_type() == "cuda" and accelerator in ("auto", "gpu", "cuda")
    return torch.device("cuda", 0) if uses_cuda else torch.device("cpu")


def this_machine(accelerator: str) -> Cluster:
    """Return the one device of this machine that training with the Trainer's ``accelerator`` would use, as a cluster.

    Raises:
        ConfigurationError: there is none.
    """
    device = local_device(accelerator)
    if device.type == "cpu" and accelerator not in ("auto", "cpu"):
        raise ConfigurationError(
            f"accelerator={accelerator!r}: there is no such device here to measure compute on. Plan where there is "
            "one, or for described hardware"
        )
    return current_cluster(RankGroup.single(device))


def default_device_type() -> str:
    """Return ``cuda`` if there is such a device, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def measuring_device(accelerator: str, cluster: Cluster) -> torch.device:
    """Return the device of this machine to measure kernels on, which has to be like the cluster's.

    Raises:
        ConfigurationError: the cluster's devices are of another type.
    """
    device_type = cluster.device.split(":")[0]
    if device_type == "cpu":
        return torch.device("cpu")
    device = local_device(accelerator)
    if device.type != device_type:
        raise ConfigurationError(
            f"the cluster's devices are {cluster.device}, here is only {device_name(device)}: compute has "
            "to be measured on a device like the cluster's"
        )
    return device


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's messages about devices and tips; its warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

"""Validate what a user asks for, and refuse combinations that can't work."""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Sequence
from datetime import timedelta
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelPruning
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_osdp.errors import ConfigurationError, check_kind
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.files import describe_error
from lightning_osdp.planning.spec.model import ReduceDtype
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.strategy import precision


def validate_positive(name: str, value: Any, words: Sequence[str] = ()) -> int | None:
    """Return ``value`` as an int if it is a positive whole number; None if it is None or one of ``words``.

    Raises:
        ConfigurationError: it is anything else; the message names the argument ``name``.
    """
    if isinstance(value, str) and value in words:
        return None
    if value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        others = "".join(f" or {word!r}" for word in words)
        raise ConfigurationError(f"{name}={value!r:.80} is not a positive whole number{others}")
    return int(value)


def validate_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``.

    Raises:
        ConfigurationError: it is not; the message names the argument ``name``.
    """
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is not known: use {' or '.join(map(repr, choices))}")
    return value


def check_run_kinds(plan: object, timeout: object, process_group_backend: object, broadcast_buffers: object) -> None:
    """Refuse arguments of OSDPStrategy about the run, and not about planning, that are of a wrong kind.

    Raises:
        ConfigurationError: names the argument.
    """
    check_kind("plan", plan, (str, Path, ExecutionPlan, NoneType), "an ExecutionPlan or the path of one")
    check_kind("timeout", timeout, (timedelta, NoneType), "a datetime.timedelta")
    check_kind("process_group_backend", process_group_backend, (str, NoneType), "a name, such as 'gloo'")
    check_kind("broadcast_buffers", broadcast_buffers, bool, "True or False")


REDUCE_DTYPES: dict[object, ReduceDtype] = {None: "", "fp32": "float32", "bf16": "bfloat16"}
"""Values that ``reduce_dtype`` may have."""


def parse_reduce_dtype(value: object) -> ReduceDtype:
    """Return the type in which gradients are to be reduced over the ranks; empty for their own.

    Raises:
        ConfigurationError: ``value`` is no type that gradients can be reduced in.
    """
    if not (value is None or isinstance(value, str)) or value not in REDUCE_DTYPES:
        raise ConfigurationError(
            f"reduce_dtype={value!r} is not known: use 'fp32', 'bf16', or None for the gradients' own type"
        )
    return REDUCE_DTYPES[value]


def reject_unsupported(trainer: pl.Trainer, plugin: Precision) -> None:
    """Refuse combinations that would train wrongly.

    Raises:
        ConfigurationError: a callback replaces weights, the precision is not supported, the whole module is compiled,
            a module in it is lazy, scripted or wrapped, gradients are sparse, or batch norms are to be
            synchronised where they can't be.
    """
    module = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} puts masked copies in the place of weights, which the plan does not know: "
                "remove the callback, and prune by hand (parameter.data[mask] = 0) or after training"
            )
    precision.check(plugin)
    if module._compiled_call_impl is not None:
        raise ConfigurationError(
            f"{type(module).__name__} is compiled as a whole, and no part of it could be sharded: compile submodules "
            "instead, which then stay replicated"
        )
    _reject_layers(module)
    _reject_shared_memory(module)
    norms = [name for name, inner in module.named_modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if norms and on_cpu and getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ConfigurationError(
            f"sync_batchnorm=True: PyTorch synchronises batch norms ({norms[0]}) on GPUs only. Remove it to train on "
            "the CPU, where each rank then normalises by its own batch"
        )


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ShardedDataParallel")
"""Names of classes, of torch and of FairScale, that reduce the gradients of the modules in them."""


def _reject_layers(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        wrapper = next((kind.__name__ for kind in type(inner).__mro__ if kind.__name__ in WRAPPERS), "")
        if wrapper:
            raise ConfigurationError(
                f"{name or type(inner).__name__} is wrapped in {wrapper}, which reduces its gradients by itself: take "
                "the wrapper off, since OSDPStrategy does that for the whole module"
            )
        if isinstance(inner, torch.jit.ScriptModule) and any(p.requires_grad for p in inner.parameters()):
            raise ConfigurationError(
                f"{name} is scripted by TorchScript, whose trainable parameters can't be copied for planning: train "
                "the module that it was made of, and script that after the run"
            )
        tensors = (*inner._parameters.items(), *inner._buffers.items())
        if lazy := [own for own, tensor in tensors if is_lazy(tensor)]:
            raise ConfigurationError(
                f"{name}.{lazy[0]} ({type(inner).__name__}) has no shape before a first batch, and DDP would need it, "
                "too: run the module on a small batch in __init__ or configure_model, or give its sizes"
            )
        if sparse := [own for own, tensor in tensors if tensor is not None and tensor.layout != torch.strided]:
            own = f"{name}.{sparse[0]}".lstrip(".")
            raise ConfigurationError(
                f"{own} ({type(inner).__name__}) is a sparse tensor, which neither OSDPStrategy nor DDP sends to other "
                "ranks: keep its indices and values as buffers, or the tensor as a plain attribute"
            )
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse and inner.weight.requires_grad:
            raise ConfigurationError(
                f"{name} ({type(inner).__name__}) has sparse=True: sparse gradients, which SparseAdam takes, are not "
                "reduced over shards. Set sparse=False, with an optimizer for dense gradients"
            )


def _reject_shared_memory(module: nn.Module) -> None:
    """Refuse tensors in a parameter's memory: a change of one is a change of the other only while both are whole."""
    parameters = [(n, p) for n, p in module.named_parameters() if type(p) is nn.Parameter and _has_memory(p)]
    places = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in parameters)
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if _has_memory(buffer)]
    for name, tensor in (*parameters, *buffers):
        begin, end, other = (
            places[max(0, bisect(places, (tensor.data_ptr(), sys.maxsize)) - 1)] if places else (0, 0, "")
        )
        if begin <= tensor.data_ptr() < end and other != name:
            raise ConfigurationError(
                f"{other} and {name} lie in the same memory, which sharding would part: use one parameter under both "
                "names (module.one.weight = module.other.weight), or a copy"
            )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0 and 0 not in tensor.stride()


GRADIENT_HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks that see all gradients, decide about the optimizer's step, or may accumulate gradients of several backwards."""


def may_free_gradients(trainer: pl.Trainer) -> bool:
    """Return whether nothing of the user's decides about gradients, or sees them, between a step and the next one."""
    module = trainer.lightning_module
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        module.automatic_optimization
        and not is_overridden("optimizer_zero_grad", module, pl.LightningModule)
        and not is_overridden("on_before_zero_grad", module, pl.LightningModule)
        and not any(is_overridden("on_before_zero_grad", callback, pl.Callback) for callback in callbacks)
    )


def in_backward_blocker(trainer: pl.Trainer, plugin: Precision, *, is_allowed: bool, per_parameter: bool) -> str:
    """Say why a run may not update parameters during backward; empty if it may.

    Args:
        trainer: the Trainer of the run.
        plugin: its precision.
        is_allowed: whether the user allows it.
        per_parameter: whether the optimizer updates each parameter by itself (``OptimizerStep.per_parameter``).
    """
    if not is_allowed:
        return "OSDPStrategy(update_in_backward=False)"
    blocker = _all_gradients_blocker(trainer, plugin)
    if blocker or per_parameter:
        return blocker
    return "its optimizer is not one of torch.optim that updates each parameter by itself without temporaries"


def _all_gradients_blocker(trainer: pl.Trainer, plugin: Precision) -> str:
    """Say what needs all gradients before the first parameter is updated; empty if nothing does."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimizes by itself (automatic_optimization=False)"
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val} takes the norm of all gradients"
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        return f"precision={plugin.precision!r} scales the loss, and skips steps in which a gradient overflows"
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        return "GradientAccumulationScheduler sums gradients of several batches"
    for hook in GRADIENT_HOOKS:
        if is_overridden(hook, module, pl.LightningModule):
            return f"{type(module).__name__} has its own {hook}"
        for callback in callbacks:
            if hasattr(pl.Callback, hook) and is_overridden(hook, callback, pl.Callback):
                return f"{type(callback).__name__} has a hook {hook}"
    return ""


def check_plan_allows_in_backward(plan: ExecutionPlan | None, blocker: str) -> None:
    """Refuse a plan that updates parameters during backward in a run that may not.

    Args:
        plan: the given plan, or None.
        blocker: why the run may not; empty if it may.

    Raises:
        ConfigurationError: the plan does.
    """
    if plan is not None and plan.update_in_backward and blocker:
        raise ConfigurationError(
            f"the plan updates parameters in the backward pass, which this run does not allow: {blocker}. Make a new "
            "plan"
        )


def disable_inference_mode(trainer: pl.Trainer) -> None:
    """Make all loops evaluate under ``no_grad``: weights gathered under inference_mode can't be trained afterwards."""
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False


def read_plan(plan: str | Path | ExecutionPlan | None) -> ExecutionPlan | None:
    """Return the given plan, read from its file if it is a path.

    Raises:
        ConfigurationError: the file can't be read or is not a plan.
        PlanMismatchError: it is a plan of another version.
    """
    if plan is None or isinstance(plan, ExecutionPlan):
        return plan
    return ExecutionPlan.from_json(_read_text(Path(plan), "plan"), source=str(plan))


def read_cluster(cluster: str | Path | Cluster | None) -> Cluster | None:
    """Return the given hardware, read from its file if it is a path.

    Raises:
        ConfigurationError: the file can't be read or does not describe a cluster.
    """
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    text = _read_text(Path(cluster), "cluster")
    try:
        return Cluster.from_json(text)
    except ValueError as error:
        raise ConfigurationError(f"{cluster} is not a cluster file: {describe_error(error)}") from error


def _read_text(path: Path, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path
        raise ConfigurationError(f"the {kind} file {path} can't be read: {error}") from error

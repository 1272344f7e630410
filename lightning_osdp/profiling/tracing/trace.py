"""LightningModule and batch -> ModelDescription: one training step at two batch sizes, on fake tensors.

Nothing real is allocated and nothing of the module, its trainer or the random states changes. Where a step can't run
on fake tensors, ``trace_by_running`` runs one small real step under the same recorder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_osdp.backend.memory import allowed_bytes
from lightning_osdp.engine.splittable import matrix_input_dim, split_dims
from lightning_osdp.errors import ConfigurationError, OSDPError, OSDPWarning, TraceError
from lightning_osdp.planning.spec.model import UNATTRIBUTED, ModelProfile, Operator, ParameterInfo
from lightning_osdp.profiling.kernels.kernel import Kernel
from lightning_osdp.profiling.kernels.sliced_kernels import MatmulKernels, find_matmul
from lightning_osdp.profiling.tracing.host_syncs import HostSyncDetector
from lightning_osdp.profiling.tracing.moments import count_kernels, fit_moments, group_ops, owners_of_ops
from lightning_osdp.profiling.tracing.optimizer_step import (
    Clipping,
    OptimizerTrace,
    build_optimizers,
    fake_optimizers,
    trace_optimizers,
)
from lightning_osdp.profiling.tracing.parameter_owners import NamedParameter, OwnerScope, find_scopes, named_parameters
from lightning_osdp.profiling.tracing.recorder import Recorder, Recording
from lightning_osdp.profiling.tracing.repeated_blocks import blocks_of_ops, describe_blocks, find_blocks
from lightning_osdp.profiling.tracing.stand_ins import (
    detached_from_trainer,
    extract_loss,
    fake_batch,
    fake_copy,
    fork_rng,
    has_batch_dimension,
    make_manual_backward,
    move_batch,
    real_batch,
    step_arguments,
)

StepContext = Callable[[], AbstractContextManager[Any]]

MAX_TRACE_BATCH_SIZE = 64
"""Batch size to trace at on CUDA, up to which the step's tensors would fit the device. Kernels of few samples take as
long there as it takes to launch them, and a line through two such points says little of a batch that fills the device.
[measured, H100, GPT-2 of 354 M parameters, bf16, 204 samples: 228 ms foreseen from 2 and 8 samples, 388 taken]"""

MODEL_PROFILE_VERSION = 2
"""Of descriptions that are kept. To be raised when what they are made of changes its meaning."""


@dataclass(frozen=True)
class TracedStep:
    """One training step, read without running it for real."""

    model_profile: ModelProfile
    kernels: Mapping[int, tuple[Kernel, ...]]
    """What forward and backward run, by traced batch size."""
    optimizer_kernels: tuple[Kernel, ...]
    """What one step of all optimizers runs."""
    batch_sizes: tuple[int, ...] = ()
    """Batch sizes that the description is of, rising."""
    retrace: Callable[[], TracedStep] | None = None
    """Where the description was known, and ``kernels`` are of the smaller batch size alone or none: reads all of it."""
    key: str = ""
    """Under which the description was known."""

    def with_all_kernels(self) -> TracedStep:
        """With the kernels of all batch sizes."""
        return self if self.retrace is None else self.retrace()


class ModelProfileStore(Protocol):
    """Descriptions of steps that were read before, by names of their modules' looks (``architecture_key``) and of what the
    smaller batch size shows of them."""

    def load(self, key: str) -> ModelProfile | None:
        """What was kept; None if nothing was."""

    def save(self, key: str, model_profile: ModelProfile) -> None:
        """For later starts."""


def trace(
    module: LightningModule,
    batch: Any,
    batch_size: int,
    *,
    device: torch.device,
    sizes: tuple[int, int] = (2, 8),
    step_context: StepContext = nullcontext,
    evaluation: bool = False,
    store: ModelProfileStore | None = None,
    key: str = "",
) -> TracedStep:
    """Reads ``module`` on fake tensors.

    The larger batch size is not read where the smaller shows the same step as one that is ``store``: the same
    operators, kernels, shapes, memory and optimizers. Nothing is where the step is ``store`` by its name.

    Args:
        module: left as it is; its trainer, if it has one, is only read.
        batch: as the data loader gives it; tensors with ``batch_size`` rows are taken to grow with the batch size.
        batch_size: samples in ``batch``.
        device: that the module is to train on.
        sizes: the two batch sizes to trace at; on CUDA the larger one may be larger still (``MAX_TRACE_BATCH_SIZE``).
        step_context: makes what ``training_step`` runs in (autocast).
        evaluation: whether to look at what evaluation takes, too.
        store: steps that were read before; this one is added. None: it is read anew.
        key: that another process found this step to be known by; empty if none did.

    Raises:
        ConfigurationError: nothing in the module is trainable.
        TraceError: its step does not run on fake tensors; the cause is chained.
    """
    _check_trainable(module)
    rows = _choose_batch_sizes(batch, batch_size, sizes)
    again = partial(trace, module, batch, batch_size, device=device, sizes=sizes, step_context=step_context)
    reread = partial(again, evaluation=evaluation)
    told = store.load(key) if store is not None and key else None
    if told is not None and told.fingerprint == _fingerprint(told.operators, module):
        return TracedStep(told, {}, (), _batch_sizes_of_key(key, rows), reread, key)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_module_and_optimizers(module, fake_mode, device) as (twin, optimizers):
        batches = {rows[0]: fake_batch(batch, batch_size, rows[0], fake_mode)}
        with fake_mode:
            recordings = {rows[0]: _record(twin, batches[rows[0]], device, step_context)}
        if device.type == "cuda":
            rows = _saturating_sizes(rows, max(recordings[rows[0]].live_bytes()), allowed_bytes(device))
        twins = [parameter.tensor for parameter in named_parameters(twin)]
        stepped = trace_optimizers(optimizers, twins, fake_mode, Clipping.from_trainer(module._trainer))
        if store is not None:
            first = _assemble(module, batch_size, recordings, stepped, {})
            key = f"{architecture_key(module)}-{_trace_key(first, rows, evaluation)}-{rows[-1]}"
            description = store.load(key)
            if description is not None:
                return replace(first, model_profile=description, batch_sizes=rows, retrace=reread, key=key)
        batches |= {size: fake_batch(batch, batch_size, size, fake_mode) for size in rows[1:]}
        with fake_mode:
            recordings |= {size: _record(twin, batches[size], device, step_context) for size in rows[1:]}
            evaluated = _record_evaluation(twin, batches, device, step_context) if evaluation else {}
    whole = _assemble(module, batch_size, recordings, stepped, evaluated)
    if store is not None:
        store.save(key, whole.model_profile)
    return whole


def trace_by_running(
    module: LightningModule,
    batch: Any,
    batch_size: int,
    *,
    device: torch.device,
    sizes: tuple[int, int] = (2, 8),
    step_context: StepContext = nullcontext,
) -> TracedStep:
    """Reads ``module`` by real small steps in place, for modules that ``trace`` refuses.

    The module must lie on ``device``. Gradients are freed as they come, so it takes the parameters and the activations
    of ``max(sizes)`` samples, which are rows of ``batch``. Afterwards buffers, training modes and random states are
    as before and gradients are None; parameters are not touched, nor is the trainer. What evaluation takes is not
    looked at. Arguments as in ``trace``.

    Raises:
        ConfigurationError: nothing in the module is trainable.
        TraceError: the step fails for real, too; the cause is chained.
    """
    _check_trainable(module)
    rows = _choose_batch_sizes(batch, batch_size, sizes)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    with fork_rng(device), _raise_as_trace_error(module), torch.compiler.set_stance("force_eager"):
        with detached_from_trainer(module, optimizers, schedulers), _restore_buffers_and_modes(module):
            found = build_optimizers(module)
            optimizers += found[0]
            schedulers += [_noop_scheduler(scheduler) for scheduler in found[1]]
            recordings = {}
            for size in rows:
                resized = real_batch(batch, batch_size, size)
                recordings[size] = _record(module, resized, device, step_context, real=True)
        copies, fakes = fake_optimizers(optimizers, fake_mode, device)
        stand_ins = [fakes.get(id(parameter.tensor)) for parameter in named_parameters(module)]
        stepped = trace_optimizers(copies, stand_ins, fake_mode, Clipping.from_trainer(module._trainer))
    return _assemble(module, batch_size, recordings, stepped, {})


@contextmanager
def _fake_module_and_optimizers(
    module: LightningModule, fake_mode: FakeTensorMode, device: torch.device
) -> Iterator[tuple[LightningModule, list[Any]]]:
    """A fake copy of the module, whose steps change nothing outside of it, and its optimizers."""
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    with fork_rng(device), _raise_as_trace_error(module), torch.compiler.set_stance("force_eager"):
        twin = fake_copy(module, fake_mode, device)
        twin.__dict__["_trainer"] = module._trainer
        with detached_from_trainer(twin, optimizers, schedulers):
            with fake_mode:
                optimizers[:], found = build_optimizers(twin)
            schedulers += [_noop_scheduler(scheduler) for scheduler in found]
            yield twin, optimizers


# -- one step ----------------------------------------------------------------------------------------------------------


def _record(
    module: LightningModule,
    batch: Any,
    device: torch.device,
    step_context: StepContext,
    *,
    real: bool = False,
    autograd: bool = True,
) -> Recording:
    """Forward and backward of one batch; gradients of ``real`` tensors are freed as they come. No backward without
    ``autograd``."""
    batch = move_batch(module, batch, device)
    parameters = [parameter.tensor for parameter in named_parameters(module)]
    recorder = Recorder(module, parameters, free_gradients=real)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            recorder.track(leaf)
    module.__dict__["manual_backward"] = make_manual_backward(module, recorder)
    if real:
        gc.collect()  # garbage may hold memory that the step needs
    enabled = gc.isenabled()
    gc.disable()  # garbage cycles would be freed at moments that depend on what else the process does
    try:
        reads = HostSyncDetector(recorder.record_host_sync) if real else nullcontext()
        with torch.set_grad_enabled(autograd), recorder.record_step(), reads:
            with step_context():
                output = module.training_step(*step_arguments(module, batch))
            if module.automatic_optimization and autograd:
                loss = extract_loss(output)
                with recorder.mark_backward():
                    module.backward(loss)
    finally:
        if enabled:
            gc.enable()
        module.__dict__.pop("manual_backward", None)
        for parameter in module.parameters():
            parameter.grad = None
    return recorder.recording


def _record_evaluation(
    module: LightningModule, batches: Mapping[int, Any], device: torch.device, step_context: StepContext
) -> dict[int, Recording]:
    """The training step's forward as evaluation runs it, by batch size; empty where it needs gradients.

    In training mode: it takes no less, and no shortcut that the engine turns off.
    """
    if not module.automatic_optimization:
        return {}
    try:
        return {size: _record(module, batch, device, step_context, autograd=False) for size, batch in batches.items()}
    except Exception:  # of the user's code
        return {}


@contextmanager
def _raise_as_trace_error(module: LightningModule) -> Iterator[None]:
    try:
        yield
    except OSDPError:
        raise
    except Exception as error:  # whatever the user's code or a fake kernel raises
        what = str(error).strip().split("\n")[0]
        raise TraceError(
            f"the training step of {type(module).__name__} can't be traced: {type(error).__name__}: {what}"
        ) from error


def _choose_batch_sizes(batch: Any, batch_size: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    if sizes[0] == sizes[1] or min(sizes) < 1:
        raise ConfigurationError(f"two different positive batch sizes are needed to trace at, not {sizes}")
    if has_batch_dimension(batch, batch_size):
        return tuple(sorted(sizes))
    warnings.warn(
        f"no tensor of the batch has {batch_size} rows: its cost is taken as the same at every batch size",
        OSDPWarning,
        stacklevel=3,
    )
    return (batch_size,)


def _saturating_sizes(sizes: tuple[int, ...], live_bytes: int, device_bytes: int) -> tuple[int, ...]:
    """``sizes`` with the last one as large as ``MAX_TRACE_BATCH_SIZE`` says, where the first takes ``live_bytes``."""
    *first, larger = sizes
    while first and 2 * larger <= MAX_TRACE_BATCH_SIZE and 2 * larger / first[0] * live_bytes <= device_bytes:
        larger *= 2
    return (*first, larger)


def _batch_sizes_of_key(key: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """``sizes`` that a description of this name is of."""
    return (*sizes[:-1], int(key.rsplit("-", 1)[1]))


def _check_trainable(module: LightningModule) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(f"{type(module).__name__} has no trainable parameter")


def _noop_scheduler(scheduler: Any) -> Any:
    """The scheduler with a step that does nothing: a traced manual optimization may call it."""
    scheduler.step = lambda *_, **__: None
    return scheduler


@contextmanager
def _restore_buffers_and_modes(module: LightningModule) -> Iterator[None]:
    modes = [(inner, inner.training) for inner in module.modules()]
    buffers = [
        (inner, name, buffer, buffer.clone())
        for inner in module.modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for inner, training in modes:
            inner.training = training
        with torch.no_grad():
            for inner, name, buffer, value in buffers:
                inner._buffers[name] = buffer.copy_(value)


# -- what was found ----------------------------------------------------------------------------------------------------


def _assemble(
    module: LightningModule,
    batch_size: int,
    recordings: Mapping[int, Recording],
    optimizer_trace: OptimizerTrace,
    evaluation_recordings: Mapping[int, Recording],
) -> TracedStep:
    parameters = named_parameters(module)
    largest = max(recordings)
    scopes = find_scopes(module, parameters, recordings[largest])
    owners = {size: owners_of_ops(recording, scopes) for size, recording in recordings.items()}
    flops = [0.0] * (len(scopes) + 1)
    for op, owner in zip(recordings[largest].ops, owners[largest], strict=True):
        flops[owner] += op.flops
    turns = _gradient_orders(scopes, recordings[largest].gradients)
    infos = [
        _parameter_info(each, optimizer_trace.state_bytes[index], turns.get(index, 0))
        for index, each in enumerate(parameters)
    ]
    modules = dict(module.named_modules(remove_duplicate=False))
    products = _find_matmuls(recordings[largest], owners[largest])
    operators = tuple(
        Operator(
            name=scope.name,
            kind=type(modules[scope.name]).__name__,
            parameters=tuple(infos[p] for p in scope.parameters),
            calls=max(1, recordings[largest].calls[scope.name]) if scope.name else 1,
            replicated_reason=scope.replicated_reason or _optimizer_needs_unsharded_reason(scope, optimizer_trace),
            tied=bool(scope.tied_names),
            flops_per_sample=flops[index] / largest,
            **_split_fields(scope, modules[scope.name], products.get(index), largest),
        )
        for index, scope in enumerate(scopes)
    )
    repeated = find_blocks(module, operators, recordings[largest])
    placed = {size: blocks_of_ops(recording, repeated) for size, recording in recordings.items()}
    stretches = {size: group_ops(each, owners[size], placed[size]) for size, each in recordings.items()}
    blocks = describe_blocks(repeated, recordings, stretches, owners[largest])
    index_of = {block.name: index for index, block in enumerate(blocks)}
    evaluation = {
        size: group_ops(each, owners_of_ops(each, scopes), [UNATTRIBUTED] * len(each.ops))
        for size, each in evaluation_recordings.items()
    }
    kept = [*(index_of.get(one.name, UNATTRIBUTED) for one in repeated), UNATTRIBUTED]
    description = ModelProfile(
        fingerprint=_fingerprint(operators, module),
        operators=operators,
        moments=fit_moments(stretches),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        optimizer_step=optimizer_trace.step,
        batch_size=batch_size,
        unattributed_flops_per_sample=flops[UNATTRIBUTED] / largest,
        blocks=blocks,
        evaluation=fit_moments(evaluation) if evaluation else (),
    )
    kernels = {
        size: count_kernels(recording, owners[size], [kept[block] for block in placed[size]])
        for size, recording in recordings.items()
    }
    return TracedStep(description, kernels, optimizer_trace.kernels, tuple(sorted(recordings)))


def _find_matmuls(recording: Recording, owners: Sequence[int]) -> dict[int, MatmulKernels]:
    """The product of each operator that has exactly one."""
    kernels: dict[int, list[Kernel]] = {}
    for kernel in count_kernels(recording, owners):
        kernels.setdefault(kernel.operator, []).append(kernel)
    found = {operator: find_matmul(own) for operator, own in kernels.items()}
    return {operator: product for operator, product in found.items() if product is not None}


def _split_fields(
    scope: OwnerScope, module: torch.nn.Module, matmul: MatmulKernels | None, batch_size: int
) -> dict[str, Any]:
    """What an operator says of being split."""
    if scope.tied_names:
        return {"unsplittable_reason": f"it holds what operators inside have in common: {scope.tied_names}"}
    dims, reason = split_dims(module)
    if dims and matmul is None:
        dims, reason = (), "its forward does not run exactly one product"
    if not dims or matmul is None:
        return {"unsplittable_reason": reason}
    input_dim = matrix_input_dim(module)
    return {
        "split_dims": dims,
        "output_dims": tuple(dim for dim in dims if dim != input_dim),
        "input_per_sample": matmul.input_bytes / batch_size,
        "output_per_sample": matmul.output_bytes / batch_size,
    }


def _optimizer_needs_unsharded_reason(scope: OwnerScope, optimizer_trace: OptimizerTrace) -> str:
    """Why the operator's optimizer can't work on parts, in words for the user; empty if it can."""
    mixing = sorted({optimizer_trace.needs_unsharded[parameter] for parameter in scope.parameters} - {""})
    return f"its optimizer ({', '.join(mixing)}) looks at whole tensors" if mixing else ""


def _gradient_orders(scopes: Sequence[OwnerScope], gradients: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """``ParameterInfo.gradient_order`` of each parameter that has a gradient: the next one begins where all before are whole."""
    turns: dict[int, int] = {}
    for scope in scopes:
        turn, end = -1, -1
        own = [(*gradients[index], index) for index in scope.parameters if index in gradients]
        for made, whole, index in sorted(own):
            turn += made > end
            end = max(end, whole)
            turns[index] = turn
    return turns


def _parameter_info(parameter: NamedParameter, optimizer_bytes: int, gradient_order: int) -> ParameterInfo:
    return ParameterInfo(
        name=parameter.names[0],
        aliases=parameter.names[1:],
        shape=tuple(parameter.tensor.shape),
        element_bytes=parameter.tensor.element_size(),
        trainable=parameter.tensor.requires_grad,
        optimizer_bytes=optimizer_bytes,
        gradient_order=gradient_order,
    )


def _trace_key(first: TracedStep, sizes: Sequence[int], evaluation: bool) -> str:
    """SHA-256 of all that the smaller batch size shows, and of what else is asked for."""
    facts = (sizes, evaluation, torch.__version__, MODEL_PROFILE_VERSION, first.kernels, first.optimizer_kernels)
    return hashlib.sha256(f"{facts}{first.model_profile.model_dump_json()}".encode()).hexdigest()[:32]


def architecture_key(module: torch.nn.Module) -> str:
    """A short name for all modules with parameters of the same names, shapes, dtypes and trainability."""
    return _fingerprint((), module)[:12]


def _shape(parameter: Tensor) -> list[int] | None:
    """None of a lazy module's parameter, until it has one."""
    return None if is_lazy(parameter) else list(parameter.shape)


def _fingerprint(operators: Sequence[Operator], module: torch.nn.Module) -> str:
    """SHA-256 of the parameters' names, shapes, dtypes and trainability, and of the operators' names."""
    tensors = [
        [list(each.names), _shape(each.tensor), str(each.tensor.dtype), each.tensor.requires_grad]
        for each in named_parameters(module)
    ]
    text = json.dumps([tensors, [operator.name for operator in operators]], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

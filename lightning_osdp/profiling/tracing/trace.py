"""Trace one training step at two batch sizes: on fake tensors, or by small real steps where fake tensors won't do.

A trace on fake tensors allocates nothing and changes nothing of the module, its trainer or the random states.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.backend.memory import allowed_bytes
from lightning_osdp.engine.splittable import matrix_input_dim
from lightning_osdp.errors import ConfigurationError, OSDPError, OSDPWarning, TraceError, message_of
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.profiling.kernels.kernel import Kernel, TensorSpec
from lightning_osdp.profiling.tensor_operators import explain_unknown_dataflow
from lightning_osdp.profiling.tensor_scopes import TracedModule, find_tensor_candidates
from lightning_osdp.profiling.tracing import host_syncs, stand_ins
from lightning_osdp.profiling.tracing.dataflow import Dataflow, record_dataflow
from lightning_osdp.profiling.tracing.isolation import isolated
from lightning_osdp.profiling.tracing.optimizer_step import (
    Clipping,
    OptimizerTrace,
    build_optimizers,
    fake_optimizers,
    trace_optimizers,
)
from lightning_osdp.profiling.tracing.packed_sequences import single_sequences
from lightning_osdp.profiling.tracing.parameter_owners import named_parameters
from lightning_osdp.profiling.tracing.profile_builder import build_profile
from lightning_osdp.profiling.tracing.recorder import Recorder, Recording

MAX_TRACED_BYTES = 64 << 30
"""Live bytes of the larger batch size's step beyond which it is traced at a smaller one on a CPU: kernels that are then
timed take a part of that. The same on all machines, for ranks have to trace alike."""

MAX_TRACE_BATCH_SIZE = 64
"""Largest batch size to trace at on CUDA, where kernels of few samples take as long as their launch. [M-trace-1]"""

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of torch.distributed's operators."""


class CollectiveError(OSDPError):
    """A step that only one rank traces has a collective of the user's in it."""


@dataclass(frozen=True)
class TrainingStep:
    """The training step that is traced."""

    module: LightningModule
    """Left as it is; its trainer, if it has one, is only read."""
    batch: Any
    """A batch as the data loader gives it. Tensors with ``batch_size`` rows are taken to grow with the batch size."""
    batch_size: int
    """Number of samples in ``batch``."""
    device: torch.device
    """Device that the module will be trained on."""
    sizes: tuple[int, ...] = (2, 8)
    """Batch sizes to trace at: two, of which on CUDA the larger one is raised up to ``MAX_TRACE_BATCH_SIZE``, or only
    ``batch_size``, for a step that works at no other."""
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context that ``training_step`` runs in (autocast)."""
    evaluation: bool = False
    """Whether the memory of evaluation is read as well; ignored by ``trace_by_running``."""
    tensor_degrees: tuple[int, ...] = ()
    """Numbers of ranks that operators may be cut over, to find out which; ``trace_by_running`` finds none."""
    is_alone: bool = False
    """Whether other ranks wait meanwhile, so that a collective of the step raises ``CollectiveError``."""

    @property
    def only_batch_size(self) -> int:
        """Return the one batch size to trace at; 0 if there are two."""
        return self.batch_size if len(self.sizes) == 1 else 0

    def at_own_batch_size(self) -> TrainingStep:
        """Return the step to be traced at the batch size of its batch alone."""
        return replace(self, sizes=(self.batch_size,))


@dataclass(frozen=True)
class TracedStep:
    """The model and the kernels of one training step."""

    model_profile: ModelProfile
    kernels: Mapping[int, tuple[Kernel, ...]]
    """Kernels of forward and backward, by traced batch size."""
    optimizer_kernels: tuple[Kernel, ...]
    """Kernels of one step of all optimizers."""
    batch_sizes: tuple[int, ...] = ()
    """Batch sizes that ``model_profile`` was made from, ascending."""
    retrace: Callable[[], TracedStep] | None = None
    """Traces the whole step, where the profile was stored and ``kernels`` are incomplete; else None."""
    key: str = ""
    """Key under which the profile was stored; empty if it was not."""

    @property
    def kernel_dtypes(self) -> set[torch.dtype]:
        """Return the data types of all tensors that kernels get."""
        kernels = (kernel for own in self.kernels.values() for kernel in own)
        return {spec.dtype for kernel in kernels for spec in tree_leaves(kernel.args) if isinstance(spec, TensorSpec)}

    def with_all_kernels(self) -> TracedStep:
        """Return the step with the kernels of all batch sizes."""
        return self if self.retrace is None else replace(self.retrace(), model_profile=self.model_profile)

    def with_memory_of(self, other: TracedStep) -> TracedStep:
        """Return this step with the live bytes of ``other``, if that one does the same; else ``other``."""
        own, larger = self.model_profile, other.model_profile
        if own.fingerprint != larger.fingerprint or not own.has_moments_of(larger):
            return other
        memory = {name: getattr(larger, name) for name in ("moments", "blocks", "evaluation")}
        operators = tuple(
            each.model_copy(update={name: getattr(big, name) for name in ("input_per_sample", "output_per_sample")})
            for each, big in zip(own.operators, larger.operators, strict=True)
        )
        return replace(self, model_profile=own.model_copy(update=memory | {"operators": operators}))


def trace(step: TrainingStep) -> TracedStep:
    """Trace ``step`` on fake tensors.

    Raises:
        ConfigurationError: If nothing in the module is trainable.
        TraceError: If the step does not run on fake tensors; the cause is chained.
    """
    with start_fake_trace(step, choose_batch_sizes(step)) as started:
        started.record_larger_batch()
        return started.result()


def trace_by_running(step: TrainingStep) -> TracedStep:
    """Trace ``step`` by real small steps on a copy, for modules that ``trace`` refuses.

    The module must lie on the step's device. Gradients are freed as they come, so the parameters and the activations
    of ``max(sizes)`` samples, which are rows of the batch, must fit.

    Raises:
        ConfigurationError: If nothing in the module is trainable.
        TraceError: If the module can't be copied or the step fails for real, too; the cause is chained.
    """
    sizes = choose_batch_sizes(step)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    recordings = {}
    with _guard_tracing(step):
        module = stand_ins.lazy_clone(step.module)
        with stand_ins.detached_from_trainer(module, optimizers, schedulers):
            _fill_optimizers(module, optimizers, schedulers)
            for size in sizes:
                batch = stand_ins.real_batch(step.batch, step.batch_size, size)
                recordings[size] = _record(step, module, batch, real=True)
        copies, fakes = fake_optimizers(optimizers, fake_mode, step.device)
        parameters = [fakes.get(id(parameter.tensor)) for parameter in named_parameters(module)]
        optimizer_trace = trace_optimizers(copies, parameters, fake_mode, Clipping.from_trainer(step.module._trainer))
    return _without_dataflow(_build_result(step, recordings, optimizer_trace, {}), step)


class FakeTrace:
    """A step on a fake copy of its module, recorded at the smaller batch size and, on demand, at the larger one.

    Attributes:
        sizes: One or two batch sizes, ascending.
    """

    def __init__(
        self, step: TrainingStep, sizes: tuple[int, ...], module: LightningModule, fake_mode: FakeTensorMode
    ) -> None:
        self.sizes = sizes
        self._step = step
        self._module = module
        self._fake_mode = fake_mode
        self._batches: dict[int, Any] = {}
        self._recordings: dict[int, Recording] = {}
        self._evaluation_recordings: dict[int, Recording] = {}
        self._optimizer_trace: OptimizerTrace
        self._dataflow: Dataflow | None = None

    def record_smaller_batch(self, optimizers: list[Any]) -> None:
        """Record the smaller batch size and the step of ``optimizers``."""
        self._record(self.sizes[0])
        live_bytes = max(self._recordings[self.sizes[0]].live_bytes())
        if self._step.device.type != "cuda":
            self.sizes = _affordable_sizes(self.sizes, live_bytes)
        else:
            self.sizes = _saturating_sizes(self.sizes, live_bytes, allowed_bytes(self._step.device))
        parameters = [parameter.tensor for parameter in named_parameters(self._module)]
        clipping = Clipping.from_trainer(self._step.module._trainer)
        self._optimizer_trace = trace_optimizers(optimizers, parameters, self._fake_mode, clipping)

    def record_larger_batch(self) -> None:
        """Record the larger batch size, if there are two, and evaluation and dataflow where they are wanted."""
        for size in self.sizes[1:]:
            self._record(size)
        if self._step.tensor_degrees:
            with self._fake_mode:
                self._dataflow = _record_dataflow(self._step, self._module, self._batches[self.sizes[0]])
        if self._step.evaluation:
            with self._fake_mode:
                self._evaluation_recordings = _record_evaluation(self._step, self._module, self._batches)

    def result(self) -> TracedStep:
        """Return what the recordings so far show."""
        traced = _build_result(self._step, self._recordings, self._optimizer_trace, self._evaluation_recordings)
        if self._dataflow is None:
            return _without_dataflow(traced, self._step)
        size, step = self.sizes[0], self._step
        batch = stand_ins.real_batch(step.batch, step.batch_size, size)
        again, names = self._recordings[size].twice_differentiated_parameters, named_parameters(self._module)
        twice = frozenset(parameter.names[0] for index, parameter in enumerate(names) if index in again)
        played = TracedModule(step.module, self._module, self._dataflow, size, batch, twice)
        found = find_tensor_candidates(played, traced.model_profile.operators, step.tensor_degrees)
        profile = traced.model_profile.with_tensor_candidates(found.candidates, found.refusals, found.group_refusals)
        return replace(traced, model_profile=profile)

    def _record(self, size: int) -> None:
        batch = stand_ins.fake_batch(self._step.batch, self._step.batch_size, size, self._fake_mode)
        self._batches[size] = batch
        with self._fake_mode:
            self._recordings[size] = _record(self._step, self._module, batch)


@contextmanager
def start_fake_trace(step: TrainingStep, sizes: tuple[int, ...]) -> Iterator[FakeTrace]:
    """Copy the module of ``step`` with fake tensors, trace the smaller of ``sizes``, and yield the trace."""
    module, fake_mode = step.module, FakeTensorMode(allow_non_fake_inputs=True)
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    with _guard_tracing(step):
        fake_module = stand_ins.fake_copy(module, fake_mode, step.device)
        fake_module.__dict__["_trainer"] = module._trainer
        with stand_ins.detached_from_trainer(fake_module, optimizers, schedulers):
            with fake_mode:
                _fill_optimizers(fake_module, optimizers, schedulers)
            started = FakeTrace(step, sizes, fake_module, fake_mode)
            started.record_smaller_batch(optimizers)
            yield started


def choose_batch_sizes(step: TrainingStep) -> tuple[int, ...]:
    """Return the batch sizes to trace at, ascending: only the batch's own if no tensor of it grows with the batch size.

    Raises:
        ConfigurationError: If nothing in the module is trainable, or the batch sizes make no sense.
    """
    if not any(parameter.requires_grad for parameter in step.module.parameters()):
        raise ConfigurationError(f"{type(step.module).__name__} has no trainable parameter")
    if step.only_batch_size:
        return step.sizes
    if step.sizes[0] == step.sizes[1] or min(step.sizes) < 1:
        raise ConfigurationError(f"two different positive batch sizes are needed to trace at, not {step.sizes}")
    if stand_ins.has_batch_dimension(step.batch, step.batch_size):
        return tuple(sorted(step.sizes))
    warnings.warn(
        f"no tensor of the batch has {step.batch_size} rows: its cost is taken as the same at every batch size",
        OSDPWarning,
        stacklevel=3,
    )
    return (step.batch_size,)


def _affordable_sizes(sizes: tuple[int, ...], live_bytes: int) -> tuple[int, ...]:
    """Return ``sizes`` with a smaller step between them where the larger one's kernels would take gigabytes each."""
    if len(sizes) == 1 or sizes[1] / sizes[0] * live_bytes <= MAX_TRACED_BYTES:
        return sizes
    return (sizes[0], sizes[0] + 1)


def _saturating_sizes(sizes: tuple[int, ...], live_bytes: int, device_bytes: int) -> tuple[int, ...]:
    """Return ``sizes`` with the larger one doubled as long as its step, of ``live_bytes`` at the smaller, would fit."""
    *smaller, larger = sizes
    while smaller and 2 * larger <= MAX_TRACE_BATCH_SIZE and 2 * larger / smaller[0] * live_bytes <= device_bytes:
        larger *= 2
    return (*smaller, larger)


# -- one step ----------------------------------------------------------------------------------------------------------


def _record(
    step: TrainingStep, module: LightningModule, batch: Any, *, real: bool = False, autograd: bool = True
) -> Recording:
    """Run forward and, with ``autograd``, backward of ``module`` on one batch; free ``real`` gradients as they come."""
    batch = stand_ins.move_batch(module, batch, step.device)
    parameters = [parameter.tensor for parameter in named_parameters(module)]
    # A step that optimizes by itself may look at the gradients.
    recorder = Recorder(module, parameters, free_gradients=real and module.automatic_optimization)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            recorder.track(leaf)
    backward = recorder.mark_backward()(module.backward)
    module.__dict__["manual_backward"] = backward
    if real:
        gc.collect()  # Garbage may hold memory that the step needs.
    syncs = host_syncs.HostSyncDetector(recorder.record_host_sync) if real else host_syncs.unknown_numbers()
    collectives = _RefuseCollectives() if step.is_alone else nullcontext()  # type: ignore[no-untyped-call]
    try:
        with _garbage_collection_disabled(), torch.set_grad_enabled(autograd), recorder.record_step(), syncs:
            with collectives, nullcontext() if real else single_sequences(batch), step.step_context():
                output = module.training_step(*stand_ins.step_arguments(module, batch))
            if module.automatic_optimization and autograd:
                backward(stand_ins.extract_loss(output))
    finally:
        module.__dict__.pop("manual_backward", None)
        for parameter in module.parameters():
            parameter.grad = None
    return recorder.recording


def _record_dataflow(step: TrainingStep, module: LightningModule, batch: Any) -> Dataflow | None:
    """Record the dataflow of the forward, without what the module does with its optimizers; return None if it fails."""
    batch = stand_ins.move_batch(module, batch, step.device)
    products = [each for each in module.modules() if matrix_input_dim(each) is not None]
    module.__dict__["manual_backward"] = lambda *_, **__: None
    try:
        with host_syncs.unknown_numbers(), single_sequences(batch), step.step_context():
            return record_dataflow(
                lambda: module.training_step(*stand_ins.step_arguments(module, batch)), products, batch
            )
    except Exception:  # The user's code runs here and may raise anything.
        return None
    finally:
        module.__dict__.pop("manual_backward", None)
        for parameter in module.parameters():
            parameter.grad = None


def _without_dataflow(traced: TracedStep, step: TrainingStep) -> TracedStep:
    """Return the step with the reason why nothing can be tensor parallel, if that was to be found out."""
    if not step.tensor_degrees:
        return traced
    modules, model = dict(step.module.named_modules()), traced.model_profile
    refusals = explain_unknown_dataflow(model.operators, modules)
    return replace(traced, model_profile=model.with_tensor_candidates((), refusals))


def _record_evaluation(step: TrainingStep, module: LightningModule, batches: Mapping[int, Any]) -> dict[int, Recording]:
    """Record the forward of the training step without gradients, by batch size; return {} where it needs gradients.

    The module stays in training mode: that takes no less memory, and no shortcut that the engine turns off.
    """
    if not module.automatic_optimization:
        return {}
    try:
        return {size: _record(step, module, batch, autograd=False) for size, batch in batches.items()}
    except Exception:  # The user's code runs here and may raise anything.
        return {}


def _build_result(
    step: TrainingStep,
    recordings: Mapping[int, Recording],
    optimizer_trace: OptimizerTrace,
    evaluation_recordings: Mapping[int, Recording],
) -> TracedStep:
    profile, kernels = build_profile(
        step.module, step.batch_size, recordings, optimizer_trace, evaluation_recordings, step.device
    )
    profile = profile.model_copy(update={"only_batch_size": step.only_batch_size})
    return TracedStep(profile, kernels, optimizer_trace.kernels, tuple(sorted(recordings)))


@contextmanager
def _guard_tracing(step: TrainingStep) -> Iterator[None]:
    """Leave all else as it is, turn compilation off, and raise every error of the step as ``TraceError``."""
    with (
        isolated(step.module),
        host_syncs.silent_metrics(),
        stand_ins.fork_rng(step.device),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            yield
        except OSDPError:
            raise
        except Exception as error:  # The user's code or a fake kernel may raise anything.
            reason = message_of(error).strip().split("\n")[0]
            name, hint = type(step.module).__name__, ""
            if isinstance(error, AttributeError) and reason.startswith(f"'{name}' object has no attribute"):
                hint = " (planning runs it before on_fit_start and on_train_start: make it in __init__ or setup)"
            raise TraceError(
                f"the training step of {name} can't be traced: {type(error).__name__}: {reason}{hint}"
            ) from error


class _RefuseCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what would wait for other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise CollectiveError(f"the training step calls {func}, for which all ranks are needed")
        return func(*args, **(kwargs or {}))


@contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Garbage cycles would be freed at moments that depend on what else the process does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fill_optimizers(module: LightningModule, optimizers: list[Any], schedulers: list[Any]) -> None:
    """Append what the module configures; steps of its schedulers, which manual optimization may call, do nothing."""
    configured, configured_schedulers = build_optimizers(module)
    for scheduler in configured_schedulers:
        scheduler.step = lambda *_, **__: None
    optimizers += configured
    schedulers += configured_schedulers
